"""Plans as files: what is written reads back equal, and nothing else reads at all."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster import load_cluster
from autopar.errors import PlanError
from autopar.plans import Plan

DATA: dict[str, Any] = {
    "version": 1,
    "autopar_version": "0.1.0",
    "model": {"name": "llama", "fingerprint": "0" * 64, "parameters": 1000, "task": "causal-lm"},
    "cluster": load_cluster("h100:1x8").to_dict(),
    "mesh": "dp=2,fsdp=2,tp=2",
    "data": {"batch": 16, "seq": 128, "micro_batches": 2},
    "precision": "bf16",
    "recompute": "none",
    "zero": 3,
    "axes": {"batch": ["dp", "fsdp"], "ffn": ["tp"]},
    "blocks": {
        "layers": {
            "times": 4,
            "inputs": ["[8@dp.fsdp, 128, 64]"],
            "outputs": ["[8@dp.fsdp, 128, 64]"],
            "state": {"up": "[256@tp, 64]"},
            "ops": {"linear": {"dp": "a", "fsdp": "a", "tp": "n"}, "add": {}},
        }
    },
    "state": {"layers.0.up.weight": "[256@tp.fsdp, 64]", "norm.weight": "[63@fsdp]"},
    "predicted": {
        "step_time_s": 0.5,
        "tokens_per_s": 4096.0,
        "mfu": 0.4,
        "time_s": {"forward compute": 0.2, "backward compute": 0.3},
        "memory_bytes": {"weights": 100, "activations": 200},
        "memory_total_bytes": 300,
        "memory_limit_bytes": 1000,
    },
    "alternatives": [
        {
            "mesh": "dp=8,fsdp=1,tp=1",
            "micro_batches": 1,
            "recompute": "full",
            "step_time_s": 0.4,
            "memory_total_bytes": 2000,
            "fits": False,
            "reason": "too much",
        }
    ],
    "unruled": [{"op": "x = mylib.op", "block": "layers", "times": 4, "bytes": 10, "seconds": 0.001}],
    "notes": ["dropout is off"],
    "constraints": ["ffn=tp"],
}


def text(**changes: Any) -> str:
    """The plan as JSON, with values at dotted paths replaced (`...` takes one out)."""
    data = copy.deepcopy(DATA)
    for path, value in changes.items():
        at = data
        *parents, key = path.split("__")
        for parent in parents:
            at = at[parent]
        if value is ...:
            del at[key]
        else:
            at[key] = value
    return json.dumps(data)


def test_save_and_load_give_back_the_plan(tmp_path: Path) -> None:
    plan = Plan.from_json(text())
    plan.save(tmp_path / "plan.json")

    assert Plan.load(tmp_path / "plan.json") == plan
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_json_holds_just_what_was_read() -> None:
    assert json.loads(Plan.from_json(text()).to_json()) == json.loads(text())


def test_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot write"):
        Plan.from_json(text()).save(tmp_path / "no" / "plan.json")


def test_plan_cannot_be_changed() -> None:
    with pytest.raises(Exception, match="frozen"):
        Plan.from_json(text()).mesh = "dp=1"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "newer than this autopar"),
        ({"version": 0}, "version"),
        ({"version": "1"}, "version"),
        ({"mesh": ...}, "mesh is missing"),
        ({"extra": 1}, "unknown field extra"),
        ({"mesh": "tp=8"}, "has the axes tp"),
        ({"mesh": "dp=2,fsdp=2"}, "has the axes"),
        ({"mesh": "dp=two"}, "cannot read"),
        ({"mesh": "dp=2,fsdp=2,tp=4"}, "16 devices, the cluster 8"),
        ({"zero": 0}, "zero is 0"),
        ({"zero": True}, "zero"),
        ({"data__batch": 15}, "does not divide"),
        ({"data__batch": "16"}, "data.batch"),
        ({"data__micro_batches": 0}, "micro_batches"),
        ({"precision": "fp7"}, "precision"),
        ({"axes__batch": ["pp"]}, "'pp' is not an axis"),
        ({"state__x": "[4@pp]"}, "'pp' is not an axis"),
        ({"state__x": "[5@tp]"}, "not divisible"),
        ({"state__x": "4@tp]"}, "cannot read"),
        ({"state__x": "[_, 4]"}, "does not give the sizes"),
        ({"state__x": "[4@tp, 4@tp]"}, "used twice"),
        ({"blocks__layers__inputs": ["[7@dp]"]}, "not divisible"),
        ({"blocks__layers__ops": {"linear": {"cp": "a"}}}, "'cp' is not an axis"),
        ({"predicted__step_time_s": -1}, "step_time_s"),
        ({"predicted__mfu": "high"}, "mfu"),
        ({"model__fingerprint": "abc"}, "fingerprint"),
        ({"cluster": {"name": "x"}}, "cluster"),
        ({"cluster__device__memory_gbps": -3}, "memory_gbps"),
        ({"notes": "none"}, "notes"),
    ],
)
def test_bad_plans_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text(**changes))


@pytest.mark.parametrize("cut", [0, 1, 50, 500, -1])
def test_truncated_file_says_so(tmp_path: Path, cut: int) -> None:
    (tmp_path / "plan.json").write_text(text()[:cut])

    with pytest.raises(PlanError, match=r"truncated|not readable") as error:
        Plan.load(tmp_path / "plan.json")
    assert "plan.json" in str(error.value)


@pytest.mark.parametrize(
    "content", ["[]", "3", "null", "NaN", '{"a": ' * 5000, "\ud800".encode("utf-8", "surrogatepass")]
)
def test_what_is_no_plan_is_refused(tmp_path: Path, content: str | bytes) -> None:
    (tmp_path / "plan.json").write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises(PlanError):
        Plan.load(tmp_path / "plan.json")


def test_missing_file_is_a_plan_error(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read"):
        Plan.load(tmp_path / "none.json")


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_damage_gives_a_plan_or_a_plan_error(data: st.DataObject) -> None:
    """Some leaf replaced by something else never raises anything but PlanError."""
    damaged = copy.deepcopy(DATA)
    at: Any = damaged
    while True:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if not isinstance(at[key], (dict, list)) or not at[key] or data.draw(st.booleans()):
            break
        at = at[key]
    at[key] = data.draw(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.just([]), st.just({}))
    )
    with contextlib.suppress(PlanError):
        Plan.from_json(json.dumps(damaged))


def test_diff_has_a_line_per_difference() -> None:
    one, other = Plan.from_json(text()), Plan.from_json(text(recompute="full", axes__ffn=...))

    assert one.diff(one) == ""
    assert one.diff(other).splitlines() == ["recompute: - none  + full", "axes.ffn: - ['tp']"]


def test_page_tells_what_a_person_asks() -> None:
    page = Plan.from_json(text()).page()

    for words in (
        "llama",
        "dp=2,fsdp=2,tp=2",
        "ffn -> tp",
        "2 micro-batches",
        "pipeline not used",
        "tokens/s",
        "mylib.op",
        "does not fit",
    ):
        assert words in page
    assert max(map(len, page.splitlines())) <= 100
