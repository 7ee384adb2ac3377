"""Monitoring: seconds by kind that add up, goodput over restarts, the sinks, and hangs that are named."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from rich.console import Console

import autopar
from autopar.errors import UsageError
from autopar.mesh import Mesh
from autopar.runtime import metrics_file, sinks
from autopar.runtime.metrics_file import MetricsFile, read
from autopar.runtime.monitor import Monitor, MonitorOptions, flops_of_step
from autopar.runtime.observe import Observer
from autopar.runtime.sinks import LiveView, Prometheus, TensorBoard, scalars
from autopar.runtime.stragglers import Stragglers
from autopar.torch_private import c10d_functional, watch_collectives
from tests.runtime.monitor_worker import stack
from tests.runtime.processes import ROOT, run_on
from tests.runtime.test_failures import Run, needs_proc


@pytest.fixture(scope="module")
def run() -> autopar.Compiled:
    model, batch = stack()
    return autopar.compile(model, "cpu:1", batch).start()


def train(run: autopar.Compiled, options: MonitorOptions, steps: int = 3, **more: Any) -> Monitor:
    _, batch = stack()
    with Monitor(run.plan, run.trainer, options, **more) as monitor:
        for _ in range(steps):
            with monitor.step():
                with monitor.doing("data"):
                    time.sleep(0.01)
                with monitor.doing("compute"):
                    result = run.train_step(batch)
                monitor.result(result)
                with monitor.doing("checkpoint"):
                    time.sleep(0.02)
    return monitor


def flat(kinds: Mapping[str, Any]) -> float:
    return sum(scalars({"": kinds}).values())


def test_the_kinds_of_a_step_add_up_to_it(run: autopar.Compiled, tmp_path: Path) -> None:
    began = time.time()
    monitor = train(run, MonitorOptions(out=tmp_path, timeout_s=None))
    wall = time.time() - began
    records = [record for record in read(tmp_path / "metrics.jsonl") if record["event"] == "step"]
    assert len(records) == 3
    for record in records:
        kinds = record["seconds_by_kind"]
        assert flat(kinds) == pytest.approx(record["seconds"])
        assert 0.01 <= kinds["data"] < 0.1
        assert 0.02 <= kinds["checkpoint"] < 0.2
        assert kinds["compute"] > 0
        assert kinds["optimizer"] > 0
        assert record["loss"] > 0
        assert record["memory"]["peak_rss_bytes"] >= record["memory"]["rss_bytes"] // 2 > 0
    assert sum(record["seconds"] for record in records) <= wall
    assert monitor.record["step"] == run.trainer.step_count


def test_utilisation_is_the_plans_count_of_operations(run: autopar.Compiled, tmp_path: Path) -> None:
    record = train(run, MonitorOptions(out=tmp_path, timeout_s=None), steps=1).record
    flops, peak = flops_of_step(run.plan)
    # rows x (up and down: 8 x 16 each, 2 operations per element) x 3 layers, and the backward twice as much
    assert flops == pytest.approx(4 * (2 * 2 * 8 * 16) * 3 * 3, rel=0.02)
    busy = record["seconds"] - record["seconds_by_kind"]["checkpoint"]
    assert record["mfu"] == pytest.approx(flops / busy / peak)


def _failing_step(monitor: Monitor, run: autopar.Compiled) -> None:
    monitor.result(run.train_step(stack()[1]))
    raise ZeroDivisionError


def test_an_error_in_a_step_leaves_no_record(run: autopar.Compiled, tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        Monitor(run.plan, run.trainer, MonitorOptions(out=tmp_path, timeout_s=None)) as monitor,
        monitor.step(),
    ):
        _failing_step(monitor, run)
    assert [record["event"] for record in read(tmp_path / "metrics.jsonl")] == ["start", "end"]
    assert run.trainer.model.observer is None


def test_what_is_watched_is_as_it_was_afterwards(run: autopar.Compiled) -> None:
    """To the attribute: a method of a class that is put back unbound would lose its `self`."""
    holders = (dist.Work, dist.ProcessGroup, c10d_functional.wait_tensor, c10d_functional.wait_tensor.default)
    before = [dict(vars(holder)) for holder in holders]
    undo = watch_collectives(Observer(run.trainer.model, run.trainer.optimizer))
    assert all(vars(holder) != was for holder, was in zip(holders, before, strict=True))
    undo()
    assert all(vars(holder) == was for holder, was in zip(holders, before, strict=True))
    with Monitor(run.plan, run.trainer, MonitorOptions()):
        pass
    assert not run.trainer.optimizer._optimizer_step_pre_hooks


# ---- the file, and goodput -----------------------------------------------------------------------------------------


def write(path: Path, *records: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def step(number: int, time: float, useful: float) -> dict[str, Any]:
    return {"event": "step", "step": number, "time": time, "useful_s": useful}


def told(text: str) -> None:
    raise AssertionError(text)


def test_goodput_counts_restarts_and_repeated_steps_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, now = tmp_path / "metrics.jsonl", time.time()
    monkeypatch.setattr(metrics_file, "process_began", lambda: now)  # and not when the tests began
    write(
        path,
        {"event": "start", "step": 0, "time": now - 100},
        *(step(number, now - 90 + number, 10.0) for number in (1, 2, 3)),
        {
            "event": "start",
            "step": 1,
            "time": now - 50,
        },  # killed after step 3, gone on from the checkpoint of 1
    )
    file = MetricsFile(path, go_on=True, say=told)
    assert file.goodput(2, 10.0, now) == pytest.approx(20 / 100)
    assert file.goodput(3, 10.0, now + 100) == pytest.approx(30 / 200)
    assert file.goodput(4, 10.0, now + 100) == pytest.approx(40 / 200)


def test_a_line_cut_by_a_kill_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(1, 5.0, 1.0), step(2, 6.0, 1.0))
    path.write_text(path.read_text()[:-20])
    file = MetricsFile(path, go_on=True, say=told)
    file.write(step(2, 8.0, float("nan")))
    file.write(step(3, 9.0, 1.0))
    assert [(record["step"], record["useful_s"]) for record in read(path)] == [(1, 1.0), (2, None), (3, 1.0)]


def test_a_new_run_puts_the_old_metrics_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(7, 5.0, 1.0))
    file = MetricsFile(path, go_on=False, say=told)
    file.write(step(1, time.time(), 1.0))
    assert [record["step"] for record in read(path)] == [1]
    assert [record["step"] for record in read(path.with_name("metrics.jsonl.old"))] == [7]
    assert file.goodput(1, 1.0, time.time() + 1) <= 1


def test_metrics_that_cannot_be_written_are_told_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lines: list[str] = []
    file = MetricsFile(tmp_path / "file" / "metrics.jsonl", go_on=True, say=lines.append)
    for number in range(3):
        file.write(step(number, 1.0, 1.0))
    assert len(lines) == 1
    assert "cannot be written" in lines[0]


# ---- sinks ---------------------------------------------------------------------------------------------------------

RECORD = {
    "event": "step", "step": 12, "time": 1e9, "rank": 0, "seconds": 2.0,
    "seconds_by_kind": {"data": 0.5, "compute": 1.0, "communication": {"tp": 0.25, "dp+fsdp": 0.25}, "bubble": 0.0},
    "tokens_per_s": 1000.0, "mfu": 0.25, "goodput": 0.9, "loss": 3.5, "gradient_norm": 1.5,
    "memory": {"peak_rss_bytes": 2**31, "rss_bytes": 2**30}, "ranks": {"compute": [0.9, 1.0, 1.1]},
    "stragglers": [{"rank": 3, "kind": "data"}],
}  # fmt: skip


LAYERS = ["layers.0", "layers.1", "layers.2"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_prometheus_reads_the_last_step() -> None:
    port = free_port()
    sink = Prometheus(port, "tiny")
    try:
        sink.step(RECORD)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            text = page.read().decode()
        assert 'autopar_loss{model="tiny"} 3.5' in text
        assert 'autopar_seconds_by_kind{axis="dp+fsdp",kind="communication",model="tiny"} 0.25' in text
        assert 'autopar_seconds_by_kind{axis="",kind="data",model="tiny"} 0.5' in text
        assert 'autopar_rank_seconds{kind="compute",model="tiny",of="most"} 1.1' in text
        with pytest.raises(UsageError, match=f"port {port} cannot be used"):
            Prometheus(port, "tiny")
    finally:
        sink.close()


def test_tensorboard_reads_every_number(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path)
    sink.step(RECORD)
    sink.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert found.Scalars("loss")[0].value == 3.5
    assert found.Scalars("seconds_by_kind/communication/tp")[0].step == 12


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(UsageError, match="needs the package prometheus-client"):
        Prometheus(free_port(), "tiny")
    with pytest.raises(UsageError, match="needs the package tensorboard"):
        TensorBoard(tmp_path)


def test_the_live_view_shows_where_the_time_goes(run: autopar.Compiled) -> None:
    console = Console(width=100, record=True, file=Path(os.devnull).open("w"))  # noqa: SIM115
    view = LiveView(run.plan, console)
    view.step(RECORD | {"loss": float("nan")})
    view.step(RECORD)
    view.close()
    text = console.export_text()
    for part in (
        "loss",
        "3.5000",
        "communication dp+fsdp",
        "12.5%",
        "slow: rank 3, data",
        "goodput",
        "90.0%",
    ):
        assert part in text


def test_only_what_is_asked_for_is_opened(run: autopar.Compiled) -> None:
    assert sinks.open_sinks(MonitorOptions(), run.plan) == []


# ---- stragglers ----------------------------------------------------------------------------------------------------


def seconds(data: float, compute: float) -> dict[str, float]:
    return {"data": data, "compute": compute}


def test_a_slow_rank_is_named_with_the_kind_of_time_once() -> None:
    slow = Stragglers(Mesh.of({"dp": 4}), slower=1.3, patience=1)
    even = {rank: seconds(0.01, 1.0) for rank in range(4)}
    assert slow.update(even) == []
    told = slow.update(even | {2: seconds(0.6, 1.01)})
    assert len(told) == 1
    assert "rank 2 is slow" in told[0]
    assert "most of it in data" in told[0]
    assert slow.update(even | {2: seconds(0.6, 1.01)}) == []
    assert slow.update(even) == ["rank 2 is as fast as the others again"]


def test_what_passes_is_not_told() -> None:
    slow = Stragglers(Mesh.of({"dp": 2}), slower=1.3, patience=3)
    even, late = {0: seconds(0, 1.0), 1: seconds(0, 1.0)}, {0: seconds(0, 1.0), 1: seconds(0, 2.0)}
    assert [slow.update(each) for each in (late, late, even, late, late, even)] == [[]] * 6
    assert [len(slow.update(late)) for _ in range(4)] == [0, 0, 1, 0]
    assert [len(slow.update(each)) for each in (even, late, even, even, even)] == [0, 0, 0, 0, 1]


def test_stages_of_a_pipeline_are_not_compared() -> None:
    slow = Stragglers(Mesh.of({"pp": 2, "dp": 2}), slower=1.3, patience=1)
    stages = {0: seconds(0, 1.0), 1: seconds(0, 1.0), 2: seconds(0, 3.0), 3: seconds(0, 3.0)}
    assert slow.update(stages) == []
    assert "rank 3" in slow.update(stages | {3: seconds(0, 5.0)})[0]


# ---- several processes ---------------------------------------------------------------------------------------------


def _trace_names_collectives(folder: Path) -> None:
    """Every layer has one in the forward; the backward's is for the layer's input, which the first has none of."""
    for name in ("trace.json", "trace.rank-1.json"):
        events = json.loads((folder / name).read_text())["traceEvents"]
        waits = [each for each in events if each.get("cat") == "autopar" and each["args"].get("node")]
        assert [each["args"]["path"] for each in waits if each["args"]["part"] == "forward"] == LAYERS
        assert [each["args"]["path"] for each in waits if each["args"]["part"] == "backward"] == LAYERS[:0:-1]
        assert all(each["args"]["of"].startswith("all_reduce over tp (ranks 0, 1)") for each in waits)


def test_ranks_tell_their_waits_by_axis_and_the_slow_one_is_named(tmp_path: Path) -> None:
    """Rank 1 is 0.1 s late with its data; rank 0 waits for it in a collective over tp."""
    results = run_on(2, "monitor_worker.py", str(tmp_path), "tp=2", "slow", "30", "6", timeout=120)
    steps = [record for record in read(tmp_path / "metrics.jsonl") if record["event"] == "step"]
    late = [record for record in read(tmp_path / "metrics-rank-1.jsonl") if record["event"] == "step"]
    assert len(steps) == len(late) == 30
    for own, other in zip(steps[1:], late[1:], strict=True):
        assert flat(own["seconds_by_kind"]) == pytest.approx(own["seconds"])
        assert own["seconds_by_kind"]["communication"]["tp"] > 0.08
        assert own["seconds_by_kind"]["data"] < 0.05
        assert other["seconds_by_kind"]["data"] > 0.09
        assert other["loss"] == own["loss"]
    assert "rank 1 is slow" in results[0]["lines"][0]
    assert "most of it in data" in results[0]["lines"][0]
    assert steps[-1]["stragglers"][0]["rank"] == 1
    _trace_names_collectives(tmp_path)
    least, mean, most = steps[-1]["ranks"]["data"]
    assert least <= mean <= most
    assert most > 0.09


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_waits_of_compiled_blocks_are_told(tmp_path: Path) -> None:
    run_on(2, "monitor_worker.py", str(tmp_path), "tp=2", "compiled", "4", "60", timeout=280)
    for record in list(read(tmp_path / "metrics.jsonl"))[2:-1]:
        assert record["seconds_by_kind"]["communication"]["tp"] > 0
        assert flat(record["seconds_by_kind"]) == pytest.approx(record["seconds"])


def test_a_hang_is_told_by_rank_collective_node_and_line(tmp_path: Path) -> None:
    """Rank 1 sleeps in the forward of layer 1 of step 3, for longer than --timeout, here 6 s."""
    with pytest.raises(RuntimeError, match="failed") as error:
        run_on(2, "monitor_worker.py", str(tmp_path), "tp=2", "sleep", "8", "6", timeout=120)
    text = str(error.value)
    assert "rank 0 waits in all_reduce over tp (ranks 0, 1) of float32[4, 8], in forward of layers.1" in text
    assert "node all_reduce of" in text
    assert "rank 1 (process" in text
    assert "is still in forward of layers.1 (block layers) of step 3 since" in text
    assert "monitor_worker.py" in text  # the line of Python it is in
    steps = [record for record in read(tmp_path / "metrics.jsonl") if record["event"] == "step"]
    assert len(steps) == 2


@needs_proc
@pytest.mark.timeout(150)
def test_a_stopped_rank_ends_the_command_within_its_timeout(tmp_path: Path) -> None:
    """A rank that is stopped (SIGSTOP) tells nothing any more, and ends only by SIGKILL."""
    model = f"{ROOT / 'tests' / 'runtime' / 'failure_worker.py'}:mlp"
    plan = tmp_path / "plan.json"
    autopar.plan(model, "cpu:2", batch=4, seq=8, mesh="dp=2", fix=["batch=dp"]).save(plan)
    run = Run("train", model, f"--plan={plan}", "--steps=1000000", "--timeout=6", "--json", "-q")
    try:
        run.until_step(5)
        os.kill(run.rank(1), signal.SIGSTOP)
        began = time.monotonic()
        text = run.end(timeout=60)
        assert time.monotonic() - began < 20
        assert run.process.returncode == 8, text
        assert "rank 1 (process" in text
        assert "does not answer since" in text
        assert "rank 0 waits in all_reduce over dp" in text
        assert text.count("does not answer") == 1
        assert not list(run.processes())
    finally:
        run.clear()
