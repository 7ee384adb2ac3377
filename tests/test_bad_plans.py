"""Plans and batches that are not for the model: an AutoparError says where, and nothing that was there before changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import PlanError, TrainingError, UsageError
from tests.tiny import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

# ---- plans ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planned(captured_once: None) -> tuple[nn.Module, dict[str, Any], autopar.Plan]:
    model, batch = tiny("llama")
    return (
        model,
        batch,
        autopar.plan(model, "cpu:2", example_inputs=batch, mesh="tp=2", fix=["heads=tp", "ffn=tp"]),
    )


def _edit(path: str, value: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        *outer, last = path.split("/")
        for key in outer:
            data = data[key]
        data[last] = value(data.get(last))

    return change


LAYER = "blocks/model_layers"
EDITS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "illegal op choice": (_edit(f"{LAYER}/ops/linear_default", lambda _: {"tp": "zzz"}), "linear_default"),
    "op that is not there": (_edit(f"{LAYER}/ops/nope", lambda _: {}), "nope"),
    "unknown block": (_edit("blocks/extra", lambda _: {"times": 1, "inputs": [], "outputs": [], "state": {}, "ops": {}}), "extra"),
    "missing block": (lambda data: data["blocks"].pop("model_layers") and None, "model_layers"),
    "does not divide": (_edit(f"{LAYER}/inputs", lambda old: ["[3@tp, 16, 64]", *old[1:]]), "3 is not divisible"),
    "other size": (_edit(f"{LAYER}/inputs", lambda old: ["[6, 16, 64]", *old[1:]]), "[4, 16, 64]"),
    "other rank": (_edit(f"{LAYER}/inputs", lambda old: ["[16, 64]", *old[1:]]), "[4, 16, 64]"),
    "missing input": (_edit(f"{LAYER}/inputs", lambda _: []), "says nothing of"),
    "sum that nothing makes": (_edit(f"{LAYER}/inputs", lambda old: [f"{old[0]} + sum(tp)", *old[1:]]), "sum"),
    "parameter as a sum": (_edit(f"{LAYER}/state/input_layernorm_weight", lambda _: "[64] + sum(tp)"), "partial sum"),
    "other batch": (_edit("data/batch", lambda _: 8), "[8, 16]"),
    "newer version": (_edit("version", lambda _: 99), "newer"),
    "other fingerprint": (_edit("model/fingerprint", lambda _: "0" * 64), "other ops now"),
}  # fmt: skip


@pytest.mark.parametrize("case", EDITS)
def test_an_edited_plan_is_refused(
    planned: tuple[nn.Module, dict[str, Any], autopar.Plan], case: str
) -> None:
    model, batch, plan = planned
    change, words = EDITS[case]
    data = json.loads(plan.to_json())
    change(data)
    inputs = {name: value.repeat(data["data"]["batch"] // 4, 1) for name, value in batch.items()}
    with pytest.raises(PlanError) as caught:
        autopar.compile(model, plan=autopar.Plan.from_json(json.dumps(data)), example_inputs=inputs)
    assert words in str(caught.value)
    assert caught.value.where
    assert caught.value.hint


def test_the_plan_that_was_edited_was_a_good_one(
    planned: tuple[nn.Module, dict[str, Any], autopar.Plan],
) -> None:
    model, batch, plan = planned
    assert autopar.compile(model, plan=plan, example_inputs=batch).rank_program.state


def test_a_plan_for_other_processes_is_refused(
    planned: tuple[nn.Module, dict[str, Any], autopar.Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch, plan = planned
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(
        TrainingError, match=r"for 2 processes .*, 4 were launched(.|\n)*torchrun --nproc-per-node 2"
    ):
        autopar.compile(model, plan=plan, example_inputs=batch).start()


# ---- batches -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled() -> tuple[autopar.Compiled, dict[str, Any]]:
    model, batch = tiny("llama")
    return autopar.compile(model, "cpu:1", batch, micro_batches=2), batch


BATCHES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "fewer sequences": (lambda batch: {name: value[:2] for name, value in batch.items()}, r"\[2, 16\].*\[4, 16\]"),
    "shorter sequences": (lambda batch: {name: value[:, :8] for name, value in batch.items()}, r"\[4, 8\]"),
    "other dtype": (lambda batch: {**batch, "input_ids": batch["input_ids"].float()}, "float32.*int64"),
    "no tensor": (lambda batch: {**batch, "input_ids": [1, 2]}, "input_ids is several"),
    "missing": (lambda batch: {"input_ids": batch["input_ids"]}, "no 'labels'"),
    "all labels ignored": (lambda batch: {**batch, "labels": torch.full_like(batch["labels"], -100)}, "ignored"),
}  # fmt: skip


@pytest.mark.parametrize("case", BATCHES)
def test_a_bad_batch_changes_nothing(compiled: tuple[autopar.Compiled, dict[str, Any]], case: str) -> None:
    run, batch = compiled
    change, words = BATCHES[case]
    steps = run.trainer.step_count
    before = {name: parameter.detach().clone() for name, parameter in run.parameters.items()}
    with pytest.raises(TrainingError, match=words) as caught:
        run.train_step(change(batch))
    assert caught.value.hint
    assert all(torch.equal(before[name], parameter) for name, parameter in run.parameters.items())
    assert run.train_step(batch).step == steps + 1  # and the run can go on


def test_a_loss_that_is_not_finite_changes_nothing(
    compiled: tuple[autopar.Compiled, dict[str, Any]],
) -> None:
    run, batch = compiled
    name, parameter = next(iter(run.parameters.items()))
    good = parameter.detach().clone()
    with torch.no_grad():
        parameter.fill_(float("nan"))
    before = {other: value.detach().clone() for other, value in run.parameters.items() if other != name}
    for _ in range(2):
        skipped = run.train_step(batch).skipped
        assert skipped is not None
        assert "the loss is nan" in skipped
        assert name in skipped
    with pytest.raises(TrainingError, match=r"the loss is nan at step \d+(.|\n)*learning rate"):
        run.train_step(batch)
    assert all(torch.equal(value, run.parameters[other]) for other, value in before.items())
    with torch.no_grad():
        parameter.copy_(good)
    run.train_step(batch)


def test_settings_that_the_optimizer_refuses_are_a_usage_error() -> None:
    model, batch = tiny("gpt2")
    with pytest.raises(UsageError, match="learning rate"):
        autopar.compile(model, "cpu:1", batch).start(lr=-1.0)
