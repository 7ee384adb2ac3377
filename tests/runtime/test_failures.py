"""A rank that dies or hangs is reported by name within seconds, leaves no process behind and loses no checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

import autopar
from tests.runtime.processes import ROOT, run_on

MODEL = f"{ROOT / 'tests' / 'runtime' / 'failure_worker.py'}:mlp"

needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks in /proc")


def test_a_stuck_peer_is_a_timeout() -> None:
    told = run_on(2, "failure_worker.py", "hangs", "tp=2", timeout=90)[0]
    assert "timed out" in told["text"]
    assert "rank 0, step 2" in told["text"]
    assert told["hint"]
    assert told["seconds"] < 10


def test_a_dead_peer_is_told_at_once() -> None:
    told = run_on(2, "failure_worker.py", "dies", "dp=2", timeout=90, kill=(1, "\0never"))[0]
    assert "another rank went away" in told["text"]
    assert told["seconds"] < 3


class Run:
    """`autopar ARGUMENTS` in the background. Its processes are found by a mark in their environment."""

    def __init__(self, *arguments: str) -> None:
        self.mark = f"AUTOPAR_TEST={uuid.uuid4()}"
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "autopar", *arguments],
            env={**os.environ, name: value, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def processes(self) -> Iterator[tuple[int, bytes]]:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes()
            except OSError:
                continue
            if self.mark.encode() in environment.split(b"\0"):
                yield int(folder.name), environment

    def rank(self, number: int) -> int:
        return next(pid for pid, words in self.processes() if f"RANK={number}".encode() in words.split(b"\0"))

    def until_step(self, step: int) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if json.loads(line)["step"] >= step:
                return
        raise AssertionError(self.process.communicate()[1])

    def end(self, timeout: float) -> str:
        """What it wrote to standard error; fails if it does not end in time."""
        return self.process.communicate(timeout=timeout)[1]

    def clear(self) -> None:
        for pid, _ in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plans") / "plan.json"
    autopar.plan(MODEL, "cpu:2", batch=4, seq=8).save(file)
    return file


@pytest.fixture
def started() -> Iterator[list[Run]]:
    runs: list[Run] = []
    yield runs
    for run in runs:
        run.clear()


@needs_proc
@pytest.mark.timeout(150)
def test_a_killed_rank_is_named_and_the_run_goes_on_from_the_checkpoint(
    started: list[Run], tmp_path: Path, plan: Path
) -> None:
    out = tmp_path / "run"
    command = ("train", MODEL, f"--plan={plan}", f"--out={out}", "--save-every=1", "--json")
    run = Run(*command, "--steps=1000000")
    started.append(run)
    run.until_step(5)
    os.kill(run.rank(1), signal.SIGKILL)
    began = time.monotonic()
    told = run.end(timeout=40)
    assert run.process.returncode == 8, told
    assert "rank 1 died (killed by SIGKILL)" in told
    assert "--resume" in told
    assert "Traceback" not in told
    assert time.monotonic() - began < 15
    assert not list(run.processes())

    step = json.loads((out / "training.json").read_text())["step"]
    assert step >= 4
    with safe_open(out / "model.safetensors", "pt") as weights:
        assert "up.weight" in weights.keys()  # noqa: SIM118 - safe_open is no mapping
    resumed = Run(*command, f"--steps={step + 2}", "--resume")
    started.append(resumed)
    lines, told = resumed.process.communicate(timeout=60)
    assert resumed.process.returncode == 0, told
    assert [json.loads(line)["step"] for line in lines.splitlines()] == [step + 1, step + 2]
    assert f"checkpoint of step {step}" in told


@needs_proc
@pytest.mark.timeout(100)
def test_who_stops_the_command_stops_its_ranks(started: list[Run], plan: Path) -> None:
    run = Run("train", MODEL, f"--plan={plan}", "--steps=1000000", "--json", "-q")
    started.append(run)
    run.until_step(2)
    run.process.terminate()
    run.end(timeout=40)
    assert run.process.returncode == 128 + signal.SIGTERM
    assert not list(run.processes())


@pytest.mark.timeout(100)
def test_an_error_of_every_rank_is_said_once(tmp_path: Path, plan: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def mlp():\n    raise ValueError('only where it runs')\n")
    ended = subprocess.run(
        [sys.executable, "-m", "autopar", "train", f"{broken}:mlp", f"--plan={plan}", "-q"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 4, ended.stderr
    assert ended.stderr.count("only where it runs") == 1
    assert "Traceback" not in ended.stderr
