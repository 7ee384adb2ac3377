"""Tiny models lowered once per mesh, for tests that train them on simulated ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from autopar.cluster import load_cluster
from autopar.cost.prices import Prices
from autopar.mesh import Mesh
from autopar.passes.axes import name_axes
from autopar.passes.capture import capture
from autopar.passes.lower import RankProgram, lower
from autopar.passes.placement import solve
from autopar.passes.problem import build_problem
from autopar.passes.propagate import parse_constraint, propagate
from autopar.problem import Problem
from autopar.program import Program
from autopar.runtime.groups import join_mesh
from autopar.runtime.model import RankModel
from autopar.runtime.simulate import simulate
from autopar.runtime.store import ParameterStore
from autopar.runtime.trainer import Trainer
from tests.packed import PACKED, packed
from tests.tiny import tiny

T = TypeVar("T")
DTYPES = {"fp32": None, "bf16": torch.bfloat16}

# A module and its batch by a name of the caller's.
CASES: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {}


def case(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    if kind in CASES:
        torch.manual_seed(0)
        return CASES[kind]()
    return packed(kind) if kind in PACKED else tiny(kind)


@dataclass(frozen=True)
class Made:
    """`state`: the model's own tensors. Neither is made on a rank: threads share one random generator."""

    kind: str
    rank_program: RankProgram
    state: Mapping[str, Tensor]
    batch: Mapping[str, Tensor]

    @property
    def mesh(self) -> Mesh:
        return self.rank_program.mesh

    def start(
        self,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
        *,
        micro_batches: int = 1,
        max_norm: float | None = 1.0,
        recompute: bool = False,
    ) -> Trainer:
        """On a rank: a trainer of the model's own weights, by SGD at 0.1 if nothing else is said."""
        groups = join_mesh(self.mesh)
        store = ParameterStore(self.rank_program, groups, self.state)
        rank_model = RankModel(self.rank_program, groups, store, recompute=recompute)
        parameters = [parameter for parameter in store.parameters.values() if parameter.requires_grad]
        chosen = optimizer(parameters) if optimizer else torch.optim.SGD(parameters, lr=0.1)
        return Trainer(rank_model, chosen, micro_batches=micro_batches, max_norm=max_norm)


@cache
def captured(kind: str, precision: str, micro_batches: int) -> tuple[Program, Problem]:
    model, batch = case(kind)
    rows = {name: value[: value.shape[0] // micro_batches] for name, value in batch.items()}
    program, axes = name_axes(capture(model, rows, name=kind, dtype=DTYPES[precision]))
    return program, build_problem(program, axes)


@cache
def made(kind: str, mesh_text: str, precision: str = "fp32", micro_batches: int = 1) -> Made:
    """Split by heads and ffn wherever the mesh has tp and the model has them."""
    sizes = dict(part.split("=") for part in mesh_text.split(","))
    mesh = Mesh.of({axis: int(sizes.get(axis, 1)) for axis in ("dp", "fsdp", "tp")})
    program, problem = captured(kind, precision, micro_batches)
    if mesh.sizes["tp"] > 1 and kind not in CASES:
        words = [parse_constraint(text) for text in ("heads=tp", "ffn=tp")]
        problem, _ = propagate(problem, program, words)
    prices = Prices.of(load_cluster(f"cpu:{math.prod(mesh.sizes.values())}"), mesh, precision, problem)
    model, batch = case(kind)
    state = dict(program.constants)
    state.update(model.named_buffers(remove_duplicate=False))
    state.update(model.named_parameters(remove_duplicate=False))
    lowered = lower(program, problem, solve(problem, mesh, prices), mesh)
    return Made(kind, lowered, {name: value.detach() for name, value in state.items()}, batch)


def on_ranks(compiled: Made, work: Callable[[Made], T]) -> list[T]:
    """What `work` gives on every simulated rank."""
    return simulate(compiled.mesh.device_count, lambda rank: work(compiled), timeout_s=120)


def whole(trainer: Trainer) -> dict[str, Tensor]:
    """The model's parameters, whole. All ranks must call it."""
    store = trainer.store
    return {
        name: store.whole_parameter(name, lambda entry: entry.parameter.detach()).clone()
        for name in store.parts
    }


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Of every bit of them."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(tensors[name].contiguous().numpy().tobytes())
    return found.hexdigest()
