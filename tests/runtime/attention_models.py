"""Models on simulated ranks with the choices of some ops fixed: what tests of attention in whole models share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from autopar.cluster import load_cluster
from autopar.cost.prices import Prices
from autopar.mesh import Mesh
from autopar.passes.candidates import candidates
from autopar.passes.lower import lower
from autopar.passes.placement import solve
from autopar.problem import Op, Problem
from autopar.program import Program
from autopar.runtime.groups import join_mesh
from autopar.runtime.model import RankModel
from autopar.runtime.simulate import simulate
from autopar.runtime.store import Entry, ParameterStore
from autopar.runtime.trainer import Trainer

Choice = dict[str, str | None]


def asked(problem: Problem, mesh: Mesh, choice_of: Callable[[Op], Choice | None]) -> Problem:
    """The problem with the choice of every op fixed of which `choice_of` gives one."""
    wanted = {op.name: choice for op in problem.ops if (choice := choice_of(op)) is not None}
    assert wanted
    fixed = replace(problem, fixed={**problem.fixed, **wanted})
    assert all(candidates(op, fixed, mesh) for op in problem.ops if op.name in wanted)
    return fixed


def by_attention(choice: Mapping[str, str]) -> Callable[[Op], Choice | None]:
    """Every attention split by `choice`, `heads` standing for its heads with their keys."""

    def of(op: Op) -> Choice | None:
        if op.kind != "autopar.attention":
            return None
        assert op.rule is not None
        heads = "kv" if "kv" in op.rule.sizes else "h"
        return {axis: heads if factor == "heads" else factor for axis, factor in choice.items()}

    return of


def gradients_of(
    program: Program, problem: Problem, mesh: Mesh, model: nn.Module, inputs: Mapping[str, Tensor]
) -> tuple[float, dict[str, Tensor]]:
    """The loss and the whole gradient of every parameter, as rank 0 has them."""
    cluster = load_cluster(f"cpu:{mesh.device_count}")
    solution = solve(problem, mesh, Prices.of(cluster, mesh, "fp32", problem))
    ranks = lower(program, problem, solution, mesh)
    state = {**ranks.constants, **dict(model.named_buffers(remove_duplicate=False))}
    state.update(model.named_parameters(remove_duplicate=False))

    def on_rank(_: int) -> tuple[float, dict[str, Tensor]]:
        groups = join_mesh(mesh)
        store = ParameterStore(ranks, groups, {key: value.detach() for key, value in state.items()})
        trainer = Trainer(RankModel(ranks, groups, store), torch.optim.SGD(store.parameters.values()))
        loss = trainer.gradients(inputs)

        def local(entry: Entry) -> Tensor:
            found = entry.parameter.grad
            return torch.zeros_like(entry.parameter) if found is None else found

        return loss, {key: store.whole_parameter(key, local) for key in store.parts}

    return simulate(mesh.device_count, on_rank)[0]


def compare(
    found: tuple[float, Mapping[str, Tensor]], wanted: tuple[float, Mapping[str, Tensor]], within: float
) -> None:
    """Loss within a tenth of `within`, every gradient within it of its norm (of tiny ones: of the largest's)."""
    assert abs(found[0] / wanted[0] - 1) < 0.1 * within
    largest = max(float(gradient.norm()) for gradient in wanted[1].values())
    for name, gradient in wanted[1].items():
        error = float((found[1][name] - gradient).norm()) / max(float(gradient.norm()), 1e-3 * largest)
        assert error < within, name
