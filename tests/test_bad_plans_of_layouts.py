"""Layouts, workloads and plan files with a layout that were edited, or ask for what cannot be: one clear error, soon."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from autopar.cluster import load_cluster
from autopar.cost.pipeline import price
from autopar.cost.software import default_software
from autopar.errors import UsageError
from autopar.explain import Study, what_if
from autopar.layout import Layout
from autopar.layout_check import check
from autopar.passes.decisions import parse_decisions
from autopar.passes.layout_relax import reasons
from autopar.passes.layout_space import Space
from autopar.transformer_shape import TransformerShape
from autopar.workload import Workload, check_sizes

SHAPE = TransformerShape(
    name="tiny", layers=4, hidden=64, heads=4, ffn=96, vocab=96, experts=3, topk=1, expert_ffn=96
)

TEXTS = {
    "mbs=0": "mbs is 0",
    "mbs=1000000000000000000000": "at most",
    "tp=-1": "tp is -1",
    "shard=-4,zero=3": "shard is -4",
    "recompute=full,recompute_layers=-3": "recompute_layers is -3",
    "sp=7": "sp=7 is neither 0 nor 1",
    "pp=2,cuts=-1/5": "whole numbers",
    "pp=2,cuts=4": "cuts has 1 numbers",
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_layout_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Layout.parse(text)
    assert TEXTS[text] in caught.value.what
    assert caught.value.where
    assert caught.value.hint


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, mbs=10**9),
        Layout(dp=2, recompute="full", recompute_layers=99),
        Layout(tp=2, dp=1, ep=10**9),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_told_soon(layout: Layout) -> None:
    with pytest.raises(UsageError, match="try"):
        check(layout, SHAPE.workload(64), load_cluster("h100:2"), 8)


@pytest.mark.parametrize(("batch", "seq"), [(0, 1), (1, 0), (10**20, 1), (1, 10**20), (10**7, 10**7)])
def test_steps_beyond_all_are_refused(batch: int, seq: int) -> None:
    with pytest.raises(UsageError, match="tokens per step"):
        check_sizes(batch, seq)


def _set(*path: Any) -> Callable[[dict[str, Any]], None]:
    *outer, last, value = path

    def change(data: Any) -> None:
        for key in outer:
            data = data[key]
        data[last] = value

    return change


WORKLOADS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "negative width": (_set("kinds", 0, "hidden", -1), "hidden is -1"),
    "no width": (_set("kinds", 0, "ops", 1, "k", 0), "k is 0"),
    "text for a number": (_set("frozen", "x"), "frozen is 'x'"),
    "share above one": (_set("frozen", 2.0), "frozen is 2.0"),
    "not a number": (_set("kinds", 0, "saved", 0, "elements", math.nan), "elements is nan"),
    "no whole number": (_set("vocab", 1.5), "vocab is 1.5"),
    "list for a number": (_set("vocab", []), "vocab is []"),
    "list for a name": (_set("kinds", 0, "ops", 2, "name", []), "name is []"),
    "mapping for a truth": (_set("kinds", 0, "saved", 0, "selective", {}), "selective is {}"),
    "unknown split": (_set("kinds", 0, "ops", 1, "split", "diagonal"), "column"),
    "infinite layers": (_set("layers", 0, 1, math.inf), "inf"),
    "too many layers": (_set("layers", 0, 1, 10**12), "100000"),
    "kind from behind": (_set("layers", 0, 0, -1), "layers name kinds"),
    "huge": (_set("embedding", 10**30), "embedding is 1000"),
    "no such op": (_set("kinds", 0, "ops", 1, "op", "magic"), "magic"),
    "control character": (_set("name", "x\x1b[2J"), "name"),
}


@pytest.mark.parametrize("case", WORKLOADS)
def test_an_edited_workload_is_refused(case: str) -> None:
    change, words = WORKLOADS[case]
    data = json.loads(json.dumps(SHAPE.workload(64).to_dict()))
    assert Workload.from_dict(copy.deepcopy(data)) == SHAPE.workload(64)
    change(data)
    with pytest.raises(UsageError) as caught:
        Workload.from_dict(data)
    assert words in caught.value.what
    assert caught.value.hint


QUESTIONS = {
    "batch=99999999999999999999": "tokens per step",
    "seq=99999999999999999999": "tokens per step",
    "flops=1e-300x": "1e-06 to 1e+06",
    "inter_bw=0x": "above 0",
    "flops=2x,flops=3x": "flops is given twice",
    "batch=0": "no number",
}


@pytest.mark.parametrize("words", QUESTIONS)
def test_a_question_that_means_nothing_is_refused(words: str) -> None:
    cluster, workload, software = load_cluster("h100:2"), SHAPE.workload(256), default_software("h100")
    best = price(workload, Layout(dp=2), cluster, software, 4)
    study = Study(Space(workload, cluster, 4), software, best, best.step_s)
    with pytest.raises(UsageError) as caught:
        what_if(study, words)
    assert QUESTIONS[words] in caught.value.what
    assert caught.value.hint


def test_a_precision_that_the_device_lacks_is_the_reason() -> None:
    space = Space(
        SHAPE.workload(256), load_cluster("a100:2"), 4, parse_decisions(["precision=fp8"]), ("fp8",)
    )
    assert any("a100 has no such number format" in reason for reason in reasons(space))
