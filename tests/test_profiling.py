"""Profiles: names of the plan in a trace of real steps, and measured next to predicted seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.errors import TrainingError, UsageError
from autopar.profile_trace import Measured, Span, measured_of, predicted_events, rows
from autopar.profiling import StepProfiler, parse_steps
from autopar.runtime.observe import Collective, Place
from tests.runtime.monitor_worker import stack

WAIT = "all_reduce over tp: backward of layers.0"
NAMED = {WAIT: (Collective("all_reduce", "tp", (0, 1)), Place(path="layers.0", node="copy", part="backward"))}


@pytest.fixture(scope="module")
def run() -> autopar.Compiled:
    model, batch = stack()
    return autopar.compile(model, "cpu:1", batch).start()


def event(name: str, start: float, end: float, kind: str = "user_annotation") -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": end - start, "pid": 1, "tid": 1}


ENGINE = "autograd::engine::evaluate_function: MmBackward0"
EVENTS = [
    event("compute", 0, 1000),
    event("forward layers.0", 10, 110),
    event("forward layers.1", 110, 210),
    event("backward layers.1", 300, 301),
    event(ENGINE, 305, 390, "cpu_op"),
    event("backward layers.0", 400, 401),
    event("forward again layers.0", 410, 450),
    event(WAIT, 500, 560),
    event(ENGINE, 460, 600, "cpu_op"),
    event("optimizer", 800, 900),
]


def test_a_backward_ends_with_autograds_last_step_before_the_next() -> None:
    found = {span.name: (span.start, span.end) for span in measured_of(EVENTS, NAMED).blocks}
    assert found["backward layers.1"] == (300, 390)
    assert found["backward layers.0"] == (400, 600)
    assert found["forward again layers.0"] == (410, 450)


def test_seconds_by_kind_add_up_to_the_step(run: autopar.Compiled) -> None:
    found = {row.name: row.measured_s * 1e6 for row in rows(run.plan, measured_of(EVENTS, NAMED), steps=1)}
    assert found["forward compute"] == pytest.approx(200)
    assert found["recompute"] == pytest.approx(40)
    assert found["tensor communication"] == pytest.approx(60)
    assert found["backward compute"] == pytest.approx(90 + 200 - 40 - 60)
    assert found["optimizer"] == pytest.approx(100)
    assert found["step"] == pytest.approx(1000)
    kinds = [value for name, value in found.items() if name != "step" and not name.startswith("block")]
    assert sum(kinds) == pytest.approx(found["step"])
    assert found["block layers.0"] == pytest.approx(100 + 40 + 200 - 100)


def test_a_ratio_is_measured_by_predicted(run: autopar.Compiled) -> None:
    measured = Measured((Span("forward a", 0, 10),), (), (Span("compute", 0, 20),), {})
    row = next(row for row in rows(run.plan, measured, steps=1) if row.name == "step")
    assert row.predicted_s == run.plan.predicted.step_time_s
    assert row.ratio == pytest.approx(20e-6 / run.plan.predicted.step_time_s)


def test_a_trace_holds_blocks_by_name_beside_the_prediction(run: autopar.Compiled, tmp_path: Path) -> None:
    lines: list[str] = []
    with autopar.profile(run, tmp_path / "trace.json", say=lines.append) as profiled:
        for _ in range(2):
            run.train_step(stack()[1])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {
        each["args"]["name"] for each in events if each["name"] == "process_name" and each.get("ph") == "M"
    }
    assert any("measured" in name for name in names)
    assert any("predicted" in name for name in names)
    blocks = [each["name"] for each in events if each.get("cat") == "autopar"]
    for path in ("layers.0", "layers.1", "layers.2"):
        assert blocks.count(f"forward {path}") == 2
        assert blocks.count(f"backward {path}") == 2
    assert profiled.steps == 2
    kinds = {row.name: row for row in profiled.table()}
    assert kinds["forward compute"].measured_s > 0
    assert kinds["backward compute"].measured_s > 0
    assert kinds["optimizer"].measured_s > 0
    assert "forward compute" in lines[0]
    assert run.trainer.model.observer is None


def test_a_profiled_step_gives_the_same_numbers(tmp_path: Path) -> None:
    batch = stack()[1]
    plain = autopar.compile(stack()[0], "cpu:1", batch).start()
    other = autopar.compile(stack()[0], plan=plain.plan, example_inputs=batch).start()
    with autopar.profile(other, tmp_path / "trace.json", say=lambda _: None):
        found = [other.train_step(batch).loss for _ in range(2)]
    assert found == [plain.train_step(batch).loss for _ in range(2)]


def test_steps_are_read_off_the_option() -> None:
    assert parse_steps("3:trace.json") == (3, 3, "trace.json")
    assert parse_steps("3-5:C:/trace.json") == (3, 5, "C:/trace.json")
    for text in ("trace.json", "5-3:t", "0:t", "3:"):
        with pytest.raises(UsageError, match="names no steps"):
            parse_steps(text)


def test_only_the_steps_asked_for_are_profiled(run: autopar.Compiled, tmp_path: Path) -> None:
    file, told = tmp_path / "trace.json", []
    profiler = StepProfiler(run, f"2-9:{file}", until=3, say=told.append)
    for number in (1, 2, 3, 4):
        with profiler.step(number):
            run.train_step(stack()[1])
        assert file.exists() == (number >= 2)
    assert "trace of 2 steps" in told[-1]


def test_a_file_that_cannot_be_written_is_told_before_the_step(run: autopar.Compiled, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(TrainingError, match="cannot be written"),
        autopar.profile(run, tmp_path / "file" / "trace.json"),
    ):
        raise AssertionError


def test_the_timeline_of_a_layout_begins_with_the_step() -> None:
    plan = autopar.plan("llama-3.1-8b", "h100:1x8", batch=8, seq=1024, fix=["pp=2", "tp=4"])
    events = predicted_events(plan, 5000.0)
    starts = [each["ts"] for each in events if each["ph"] == "X"]
    assert min(starts) == pytest.approx(5000.0)
    assert len({each["pid"] for each in events}) == 2  # pipeline ranks
