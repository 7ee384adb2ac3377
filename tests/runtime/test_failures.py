"""A rank that dies or hangs is reported by name within seconds, leaves no process behind and loses no checkpoint."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import autopar
from autopar.errors import TrainingError
from autopar.runtime.checkpoint import newest, read_about
from autopar.runtime.groups import peer_errors
from autopar.runtime.launch import EXIT_STOPPED
from tests.checkpoints import model_tensors, whole_tensors
from tests.runtime.processes import ROOT, run_on

MODEL = f"{ROOT / 'tests' / 'runtime' / 'failure_worker.py'}:mlp"

needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks in /proc")


@pytest.mark.slow  # test_monitor.py has hangs of the command
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


@pytest.mark.slow
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

    step = read_about(out)["step"]
    assert step >= 4
    assert "up.weight" in model_tensors(newest(out))
    resumed = Run(*command, f"--steps={step + 2}", "--resume")
    started.append(resumed)
    lines, told = resumed.process.communicate(timeout=60)
    assert resumed.process.returncode == 0, told
    assert [json.loads(line)["step"] for line in lines.splitlines()] == [step + 1, step + 2]
    assert f"checkpoint of step {step}" in told


@pytest.mark.slow
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


@pytest.mark.slow
@needs_proc
@pytest.mark.timeout(150)
def test_a_scheduler_that_asks_for_an_end_gets_a_checkpoint(
    started: list[Run], tmp_path: Path, plan: Path
) -> None:
    out = tmp_path / "run"
    run = Run("train", MODEL, f"--plan={plan}", "--steps=1000000", "--json", f"--out={out}", "--save-every=0")
    started.append(run)
    run.until_step(3)
    run.process.terminate()
    told = run.end(timeout=60)
    assert run.process.returncode == EXIT_STOPPED, told
    assert "--resume goes on" in told
    assert "Traceback" not in told
    assert read_about(out)["step"] >= 3
    assert not list(run.processes())


# every rank at every phase of a step and of a save; a save is due after every second step
FAULTS = (
    "1:data:1", "0:forward:2", "1:backward:2", "0:reduced:3", "1:optimizer:3", "0:updated:4", "1:write:2", "0:write:4",
    "0:publish:4", "0:published:4", "0:published:6",
)  # fmt: skip


@pytest.mark.timeout(200)
@pytest.mark.skipif(sys.platform != "linux", reason="forks its ranks")
def test_a_run_killed_at_every_phase_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, str(ROOT / "tests/runtime/fault_worker.py"), str(tmp_path), *FAULTS],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["clean"] == [0, 0], told["logs"]
    assert told["attempts"][-1] == [0, 0], told["logs"]
    assert all(-signal.SIGKILL in codes for codes in told["attempts"][:-1])
    assert {fault.replace(":", "-") for fault in FAULTS} <= {file.name for file in tmp_path.iterdir()}
    assert "Traceback" not in told["logs"]
    clean, faulty = (whole_tensors(newest(tmp_path / run)) for run in ("clean", "faulty"))
    assert read_about(tmp_path / "faulty")["step"] == 6
    assert clean.keys() == faulty.keys()
    assert all((faulty[name] == tensor).all() for name, tensor in clean.items())


@needs_proc
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("who", ["autopar train --restarts", "torchrun --max-restarts"])
def test_ranks_are_started_again(tmp_path: Path, who: str) -> None:
    """The real thing: killed ranks, restarted by our launcher, and by torchrun with a static rendezvous."""
    model = f"{ROOT / 'tests' / 'runtime' / 'fault_model.py'}:mlp"
    autopar.plan(model, "cpu:2", batch=4, seq=8, fix=["batch=dp"], mesh="dp=2").save(tmp_path / "plan.json")

    def train(out: str, *more: str, faults: str = "", command: tuple[str, ...] = ()) -> str:
        words = ["train", model, f"--plan={tmp_path / 'plan.json'}", "--steps=6", f"--out={tmp_path / out}"]
        ended = subprocess.run(
            [sys.executable, *(command or ("-m", "autopar")), *words, "--save-every=2", *more],
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
            env={
                **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FAULTS": faults,
                "FAULTS_DONE": str(tmp_path),
            },
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr[-6000:]
        return ended.stderr

    train("clean")
    faults = "1:backward:2,0:publish:4"
    if who.startswith("autopar"):
        told = train("faulty", "--restarts=2", faults=faults)
        assert "restart 1 of 2: rank 1 died (killed by SIGKILL)" in told
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        static = (
            "--rdzv-backend=static",
            "--node-rank=0",
            f"--master-port={port}",
            "--master-addr=127.0.0.1",
        )
        meeting = static if who == "torchrun static" else ("--standalone",)
        options = ("--nnodes=1", "--nproc-per-node=2", "--max-restarts=2", *meeting)
        command = ("-m", "torch.distributed.run", *options, "-m", "autopar")
        told = train("faulty", faults=faults, command=command)
    assert "going on from the checkpoint of step 2" in told
    assert {"1-backward-2", "0-publish-4"} <= {file.name for file in tmp_path.iterdir()}
    clean, faulty = (whole_tensors(newest(tmp_path / run)) for run in ("clean", "faulty"))
    assert all((faulty[name] == tensor).all() for name, tensor in clean.items())


def test_a_port_in_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def join(port: int) -> None:
        with peer_errors("joining the mesh"):
            torch.distributed.TCPStore("127.0.0.1", port, 2, True)

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(TrainingError, match="in use by another program") as caught:
            join(port)
    assert os.environ["MASTER_PORT"] in str(caught.value)
    assert "torchrun" in str(caught.value.hint)


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
