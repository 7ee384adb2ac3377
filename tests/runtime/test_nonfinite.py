"""Steps whose values are not finite: where the first came from, on simulated ranks; what a skipped step leaves alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TrainingError
from autopar.runtime.nonfinite import Skips, explain, kept_buffers
from tests.runtime.training_case import CASES, Made, made, on_ranks

VALUES = torch.linspace(-1.0, 1.0, 8 * 4).view(8, 4)
WITH_ZEROS = torch.cat([VALUES[:5], torch.zeros(1, 4), VALUES[6:]])


class Root(nn.Module):
    """Finite for zeros too, but the gradient of sqrt at 0 is infinite, and 0 times it is nan."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.second(torch.sqrt(self.first(x).square())).square().mean()}


class Masked(nn.Module):
    """Infinities that are meant: a softmax takes the mask away again."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        late = torch.ones(4, 4, dtype=torch.bool).triu(1)[: x.shape[-1]]
        scores = self.scores(x).unsqueeze(1).expand(-1, 4, -1).masked_fill(late, float("-inf"))
        return {"loss": self.last(scores.softmax(-1) * 1e30).pow(2).mean()}


CASES["root"] = lambda: (Root(), {"x": WITH_ZEROS})
CASES["masked"] = lambda: (Masked(), {"x": VALUES})


def explained(run: Made, spoil: Any, *, backward: bool = False) -> str:
    """`spoil(rank, parameters)` before a step, then what `explain` says of it. `backward`: the loss itself is finite."""
    trainer = run.start(max_norm=None)
    batch = run.batch
    with torch.no_grad():
        spoil(trainer.groups.rank, trainer.store.parameters)
    if backward:
        trainer.gradients(batch)
        assert not torch.isfinite(trainer.gradient_norm())
    else:
        with pytest.raises(TrainingError, match="the loss is"):
            trainer.gradients(batch)
    before = trainer.model.functions  # type: ignore[union-attr]
    text = explain(trainer.model, [batch])
    assert trainer.model.functions is before  # type: ignore[union-attr]
    return text


@pytest.mark.parametrize("mesh", ["dp=1", "tp=2", "fsdp=2"])
def test_an_overflow_in_a_layer(mesh: str) -> None:
    def spoil(rank: int, parameters: dict[str, Tensor]) -> None:
        parameters["model.layers.1.mlp.up_proj.weight"].fill_(3e38)

    first, *others = on_ranks(made("llama", mesh), lambda run: explained(run, spoil))
    assert all(other == first for other in others)
    assert " infinite of " in first
    assert "= aten.linear of " in first
    assert "%mlp_up_proj_weight up to 3e+38" in first
    assert "block model_layers, layer model.layers.1" in first
    assert ("rank 0" in first) == (mesh != "dp=1")
    assert ", at " in first


@pytest.mark.parametrize("mesh", ["tp=2", "fsdp=2", "dp=2"])
def test_only_one_rank_makes_it(mesh: str) -> None:
    """A fault of one rank reaches the others through a collective; they are not blamed, and nobody hangs."""

    def spoil(rank: int, parameters: dict[str, Tensor]) -> None:
        if rank == 1:
            parameters["model.layers.2.mlp.up_proj.weight"].fill_(3e38)

    texts = on_ranks(made("llama", mesh), lambda run: explained(run, spoil))
    assert len(set(texts)) == 1
    assert "layer model.layers.2" in texts[0]
    # Under fsdp the rows are gathered: both ranks make it, and the first is named.
    assert ("rank 0" if mesh == "fsdp=2" else "rank 1") in texts[0]


def test_a_parameter_that_is_not_finite_itself() -> None:
    def spoil(rank: int, parameters: dict[str, Tensor]) -> None:
        if rank == 1:
            parameters["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")

    (text,) = set(on_ranks(made("llama", "tp=2"), lambda run: explained(run, spoil)))
    assert text == "the parameter model.layers.0.mlp.up_proj.weight itself has 1 nan of 4,096 values, rank 1"


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2", "fsdp=2"])
def test_a_gradient_of_finite_values(mesh: str) -> None:
    texts = on_ranks(made("root", mesh), lambda run: explained(run, lambda *_: None, backward=True))
    assert len(set(texts)) == 1
    assert "in the gradient of %pow" in texts[0] or "in the gradient of %square" in texts[0]
    assert "from the backward of %sqrt" in texts[0]


def test_a_mask_is_not_blamed() -> None:
    (text,) = on_ranks(made("masked", "dp=1"), lambda run: explained(run, lambda *_: None))
    assert "aten.pow" in text
    assert "masked_fill" not in text


def test_a_norm_that_overflows_is_told_as_such() -> None:
    def huge(run: Made) -> str:
        trainer = run.start(max_norm=None)
        batch = run.batch
        trainer.gradients(batch)
        trainer.store.entries["model.norm.weight"].parameter.grad.fill_(1e30)  # type: ignore[union-attr]
        return explain(trainer.model, [batch])

    (text,) = set(on_ranks(made("llama", "dp=2"), huge))
    assert text.startswith(
        "all gradients are finite, their squares are not: model.norm.weight has one of 1e+30"
    )


def test_nothing_is_found_where_nothing_is() -> None:
    def sound(run: Made) -> str:
        trainer = run.start()
        batch = run.batch
        return explain(trainer.model, [batch])

    for text in on_ranks(made("llama", "tp=2"), sound):
        assert text.startswith("run again, every value was finite")


def test_of_several_micro_batches_with_recompute() -> None:
    def work(run: Made) -> str:
        trainer = run.start(micro_batches=2, recompute=True)
        model = trainer.model
        batch = run.batch
        with torch.no_grad():
            trainer.store.parameters["model.layers.1.mlp.up_proj.weight"].fill_(3e38)
        halves = [{name: value[part::2] for name, value in batch.items()} for part in range(2)]
        return explain(model, halves)

    for text in on_ranks(made("llama", "dp=2", micro_batches=2), work):
        assert "layer model.layers.1" in text


def test_buffers_are_as_they_were() -> None:
    run = made("convnet", "dp=1")
    trainer, batch = run.start(), run.batch
    before = {name: value.clone() for name, value in trainer.store.buffers.items()}
    with kept_buffers(trainer.model) as restore:
        trainer.gradients(batch)
        changed = [
            name for name, value in trainer.store.buffers.items() if not torch.equal(value, before[name])
        ]
        restore()
    assert changed
    explain(trainer.model, [batch])
    for name, value in trainer.store.buffers.items():
        assert torch.equal(value, before[name]), name


def trained(run: Made, bad: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Parameters, momentum and buffers after a good step, a bad one that is skipped (if there is one), a good one."""
    trainer = run.start(lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9))
    good = (
        {name: value.roll(1, 0) for name, value in run.batch.items()}
        if run.kind == "convnet"
        else {"x": VALUES}
    )
    trainer.step(good)
    if bad is not None:
        skipped = trainer.step(bad).skipped
        assert skipped is not None
        assert re.search(r"the loss is|the gradient norm is", skipped)
    trainer.step(good)
    store, momenta = trainer.store, trainer.optimizer.state
    found = {name: entry.parameter.detach().clone() for name, entry in store.entries.items()}
    found |= {f"momentum {name}": momenta[each]["momentum_buffer"] for name, each in store.parameters.items()}
    return found | {f"buffer {name}": value.clone() for name, value in store.buffers.items()}


@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2"])
@pytest.mark.parametrize("kind", ["convnet", "root"])  # the loss is not finite, only the gradient is not
def test_a_skipped_step_leaves_no_trace(kind: str, mesh: str) -> None:
    run = made(kind, mesh)
    bad = dict(run.batch)
    if kind == "convnet":
        bad["pixel_values"] = run.batch["pixel_values"].clone()
        bad["pixel_values"][0, 0, 3, 3] = float("inf")
    unbroken = on_ranks(run, lambda each: trained(each, None))
    skipped = on_ranks(run, lambda each: trained(each, bad))
    for expected, found in zip(unbroken, skipped, strict=True):
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def test_skips_are_counted_and_too_many_in_a_row_end_the_run() -> None:
    skips = Skips(limit=3)
    assert skips.skipped(7, "the loss is nan", "cause") == "step 7 is skipped: the loss is nan; cause"
    skips.skipped(8, "the loss is nan", "cause")
    skips.passed()
    skips.skipped(10, "the gradient norm is inf", "cause")
    skips.skipped(11, "the loss is nan", "cause")
    with pytest.raises(
        TrainingError, match=r"the loss is nan at step 12, the last of 3 in a row(.|\n)*cause"
    ):
        skips.skipped(12, "the loss is nan", "cause")
    assert skips.total == 5


def test_a_limit_of_one_skips_nothing() -> None:
    with pytest.raises(TrainingError, match="the loss is nan at step 1; cause"):
        Skips(limit=1).skipped(1, "the loss is nan", "cause")
