"""LoRA over simulated ranks against the adapted model in one process: loss, gradients, steps; what is frozen stays."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar import api
from autopar.compiled import Compiled
from autopar.models.lora import Lora, with_lora
from autopar.runtime.checkpoint import load_checkpoint, newest, read_checkpoint_index, save_checkpoint
from autopar.runtime.simulate import simulate
from autopar.runtime.store import ParameterStore
from tests.tiny import MODELS

pytest.importorskip("peft")
TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
LR, STEPS = 1e-2, 3
MESHES = {"tp=2": 2, "fsdp=2": 2, "dp=2,tp=2": 4, "fsdp=2,tp=2": 4}


@dataclass(frozen=True)
class Outcome:
    """Of a rank, or of the module in one process: by the names of what is trained."""

    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


@cache
def adapted() -> nn.Module:
    """A model whose B is not zero, so that A has gradients."""
    torch.manual_seed(0)
    module = with_lora(MODELS["llama"](), Lora(4, targets=TARGETS)).build()
    for name, parameter in module.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=0.1)
    return module


@cache  # drawn once: simulated ranks share torch's generator
def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, 96, (4, 16))
    labels = ids.clone()
    labels[0, :9] = -100
    return {"input_ids": ids, "labels": labels}


@cache
def expected() -> Outcome:
    """PEFT's own module under torch's AdamW."""
    module = copy.deepcopy(adapted())
    trained = {name: value for name, value in module.named_parameters() if value.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=LR, weight_decay=0.0)
    losses, gradients = [], {}
    for step in range(STEPS):
        loss = module(**batch()).loss
        loss.backward()
        losses.append(float(loss.detach()))
        if step == 0:
            gradients = {
                name: value.grad.clone() for name, value in trained.items() if value.grad is not None
            }
        optimizer.step()
        optimizer.zero_grad()
    return Outcome(losses, gradients, {name: value.detach() for name, value in trained.items()})


@cache
def compiled(mesh: str) -> Compiled:
    fix = ["heads=tp", "ffn=tp"] if "tp=2" in mesh else []
    return api.compile(
        adapted(), f"cpu:{MESHES[mesh]}", batch(), mesh=mesh, fix=fix, micro_batches=1, recompute="none"
    )


def trained_names(store: ParameterStore) -> list[str]:
    return [name for name, entry in store.entries.items() if entry.parameter.requires_grad]


def work(run: Compiled) -> Outcome:
    run.start(lr=LR, max_norm=None)
    store = run.trainer.store
    frozen = {
        name: entry.parameter.detach().clone()
        for name, entry in store.entries.items()
        if not entry.parameter.requires_grad
    }
    first = run.trainer.gradients(batch())
    gradients = {name: run.whole_gradient(name) for name in trained_names(store)}
    run.optimizer.zero_grad()
    losses = [run.train_step(batch()).loss for _ in range(STEPS)]
    assert first == losses[0]
    for name, before in frozen.items():
        assert store.entries[name].parameter.grad is None
        assert torch.equal(store.entries[name].parameter, before)
    assert not any(store._gathered.values()), "parameters gathered for backward were kept"
    whole = {name: store.whole(name, store.entries[name].parameter.detach()) for name in trained_names(store)}
    return Outcome(losses, gradients, whole)


def same(found: Outcome) -> None:
    wanted = expected()
    assert found.losses == pytest.approx(wanted.losses, rel=1e-5)
    assert found.gradients.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        assert (found.gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    for name, value in wanted.parameters.items():
        torch.testing.assert_close(found.parameters[name], value, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize(
    "mesh",
    [
        mesh if "," in mesh and "fsdp" in mesh else pytest.param(mesh, marks=pytest.mark.slow)
        for mesh in MESHES
    ],
)
def test_lora_over_ranks_is_lora(mesh: str) -> None:
    run = compiled(mesh)
    for found in simulate(MESHES[mesh], lambda rank: work(run.on_rank()), timeout_s=120):
        same(found)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp=2,tp=2,dp=1", "dp=2,tp=2,zero=1", "dp=2,tp=1,zero=3,recompute=full"])
def test_lora_under_a_layout(layout: str) -> None:
    """Pipelines, ZeRO-1, recomputed layers: a rank has its own stage's adapters, and together they have all."""
    ranks = 2 if "tp=1" in layout else 4
    run = api.compile(adapted(), f"cpu:{ranks}", batch(), space="all", fix=layout.split(","))
    outcomes = simulate(ranks, lambda rank: work(run.on_rank()), timeout_s=200)
    same(Outcome(
        outcomes[0].losses,
        {name: value for each in outcomes for name, value in each.gradients.items()},
        {name: value for each in outcomes for name, value in each.parameters.items()},
    ))  # fmt: skip


def test_adapters_are_split_as_their_base() -> None:
    """Columns of the base: rows of B. Rows of the base: columns of A. The other one whole."""
    state = compiled("tp=2").rank_program.state
    kinds = set()
    for name, layout in state.items():
        if not name.endswith("base_layer.weight"):
            continue
        base = str(layout.sharding)
        module = name.removesuffix(".base_layer.weight")
        a, b = (str(state[f"{module}.lora_{x}.default.weight"].sharding) for x in "AB")
        assert (a, b) == {"[_@tp, _]": ("[_, _]", "[_@tp, _]"), "[_, _@tp]": ("[_, _@tp]", "[_, _]")}[base], (
            name
        )
        kinds.add(base)
    assert kinds == {"[_@tp, _]", "[_, _@tp]"}


def test_what_is_frozen_is_not_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ZeRO-3 all parameters of a call are gathered together; only adapters come back."""
    reduced: set[str] = set()
    original = ParameterStore.reduce_rows

    def watched(store: ParameterStore, names: Any, gradients: Any) -> list[Tensor]:
        reduced.update(names)
        return original(store, names, gradients)

    monkeypatch.setattr(ParameterStore, "reduce_rows", watched)
    run = compiled("fsdp=2")
    simulate(2, lambda rank: run.on_rank().start().trainer.gradients(batch()), timeout_s=120)
    assert reduced == set(expected().gradients)


def test_a_checkpoint_of_adapters_is_read_on_another_mesh(tmp_path: Path) -> None:
    """Two steps on one mesh, the third on another: as three in one process; and a whole checkpoint is asked of none."""

    def begin(rank: int) -> None:
        run = compiled("fsdp=2,tp=2").on_rank().start(lr=LR, max_norm=None)
        for _ in range(STEPS - 1):
            run.train_step(batch())
        save_checkpoint(tmp_path, run.trainer, about={}, trained_only=True)

    def end(rank: int) -> list[float]:
        run = compiled("tp=2").on_rank().start(lr=LR, max_norm=None)
        load_checkpoint(tmp_path, run.trainer)
        return [run.train_step(batch()).loss]

    compiled("fsdp=2,tp=2"), compiled("tp=2")  # outside of the ranks
    simulate(4, begin, timeout_s=120)
    assert simulate(2, end, timeout_s=120) == [pytest.approx(expected().losses[-1:], rel=1e-5)] * 2
    _, index = read_checkpoint_index(newest(tmp_path))
    assert not any("base_layer" in name or "embed" in name for name in index)
