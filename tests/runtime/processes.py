"""Run a function of a test module on N gloo processes, with a time-out: a hang is a failure, never a hung suite."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_on(
    processes: int, script: str, *arguments: str, timeout: float = 240.0, kill: tuple[int, str] | None = None
) -> list[Any]:
    """Run `tests/runtime/SCRIPT ARGUMENTS` on every rank; returns what each rank wrote to its RESULT file as JSON.

    `kill=(rank, text)`: send SIGKILL to that rank once its output holds `text`. A rank that fails makes this raise
    RuntimeError with its output (unless it was to be killed); so does the time-out.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
        probe.close()
        ranks: list[subprocess.Popen[bytes]] = []
        logs = [Path(folder) / f"log-{rank}" for rank in range(processes)]
        results = [Path(folder) / f"result-{rank}" for rank in range(processes)]
        for rank in range(processes):
            environment = {
                **os.environ,
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "RESULT": str(results[rank]),
                "PYTHONPATH": str(ROOT),
            }  # fmt: skip
            with logs[rank].open("wb") as log:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, str(ROOT / "tests" / "runtime" / script), *arguments],
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        cwd=ROOT,
                    )
                )
        end = time.monotonic() + timeout
        try:
            while any(rank.poll() is None for rank in ranks):
                if time.monotonic() > end:
                    raise RuntimeError(f"timed out after {timeout} s\n" + _tails(logs))
                if kill is not None and kill[1] in logs[kill[0]].read_text(errors="replace"):
                    ranks[kill[0]].send_signal(signal.SIGKILL)
                    kill = (kill[0], "\0never again")
                time.sleep(0.05)
            failed = [number for number, rank in enumerate(ranks) if rank.returncode != 0]
            if failed and kill is None:
                raise RuntimeError(f"ranks {failed} failed\n" + _tails(logs))
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                rank.wait()
        return [json.loads(result.read_text()) if result.exists() else None for result in results]


def _tails(logs: list[Path]) -> str:
    return "\n".join(
        f"--- rank {rank}\n" + log.read_text(errors="replace")[-3000:] for rank, log in enumerate(logs)
    )


def write_result(value: Any) -> None:
    """Called by a script: leave this rank's result."""
    Path(os.environ["RESULT"]).write_text(json.dumps(value))
