"""Launch: the same command on N processes of this machine, and one clear report when one of them fails.

In:  the arguments of an `autopar` command and a number of processes.
Out: torchrun runs them (`python -m torch.distributed.run`); the exit code is that of the first rank that failed.

Ranks leave their error in a folder that the launcher names (`AUTOPAR_ERRORS`) instead of printing it, so that what
all of them found is said once. A rank that left nothing was killed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from autopar.errors import AutoparError, PeerError, TrainingError, UsageError

ERRORS = "AUTOPAR_ERRORS"

_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
# What torch and torchrun log (`W1130 14:10:53.59 ...`), and torchrun's box about OMP_NUM_THREADS.
_TORCH_LOG = re.compile(r"\[?[IWEF]\d{4} |\*{20}|Setting OMP_NUM_THREADS")
_MOST_PER_CORE = 64


def launched() -> bool:
    """Whether this process is one rank of several (torchrun sets WORLD_SIZE)."""
    return "WORLD_SIZE" in os.environ


def launch(arguments: Sequence[str], processes: int, *, threads: int | None = None) -> int:
    """Run `python -m autopar ARGUMENTS` on `processes` ranks. Returns 0, or raises the error of the first that failed.

    Raises UsageError for more processes than this machine can run.
    """
    cores = os.cpu_count() or 1
    if processes > _MOST_PER_CORE * cores:
        raise UsageError(
            f"{processes} processes were asked for, this machine has {cores} cores",
            hint="torchrun on the cluster",
        )
    with tempfile.TemporaryDirectory(prefix="autopar-") as folder:
        environment = {**os.environ, ERRORS: folder}
        environment.setdefault("OMP_NUM_THREADS", str(threads or max(1, cores // processes)))
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={processes}",
        ]
        command += ["-m", "autopar", *arguments]
        with (
            subprocess.Popen(
                command, env=environment, stderr=subprocess.PIPE, text=True, errors="replace"
            ) as run,
            _stopped_with_us(run),
        ):
            assert run.stderr is not None
            told: list[str] = []
            quiet = False
            for line in run.stderr:
                told.append(line)
                # torchrun's own report of a failure is replaced by ours below.
                quiet = (
                    quiet
                    or "torch.distributed.elastic" in line
                    or "torch/distributed/" in line
                    or line.startswith("Traceback")
                )
                if not quiet and not _TORCH_LOG.match(line):
                    sys.stderr.write(line)
                    sys.stderr.flush()
            code = run.wait()
        if code == 0:
            return 0
        raise _failure(Path(folder), "".join(told), code)


@contextmanager
def _stopped_with_us(run: subprocess.Popen[str]) -> Iterator[None]:
    """While torchrun runs: who stops this process (a scheduler, `timeout`) stops the ranks too, not only us."""

    def stop(number: int, frame: FrameType | None) -> None:
        run.send_signal(signal.SIGTERM)  # torchrun stops its ranks; then its output ends, and so do we
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _failure(folder: Path, told: str, code: int) -> AutoparError:
    """The error of the first rank that failed by itself; else which rank was killed; else what its peers saw of it."""
    reports = [json.loads(file.read_text()) for file in sorted(folder.glob("rank-*.json"))]
    first = min(reports, key=lambda report: (report["secondary"], report["time"]), default=None)
    exits = [(int(match[1]), match[2]) for match in _FAILED.finditer(told)]
    killed = next((found for found in exits if found[0] < 0), None)
    if first is not None and not (first["secondary"] and killed):
        error = TrainingError(first["what"], where=first["where"], hint=first["hint"])
        error.exit_code = first["exit_code"]
        return error
    exit_code, number = killed or next(iter(exits), (code, ""))
    rank = f"rank {number}" if number else "a rank"
    how = f"killed by {_signal_name(-exit_code)}" if exit_code < 0 else f"exit code {exit_code}"
    detail = "" if exits else "".join(f"\n{line}" for line in told.strip().splitlines()[-15:])
    return TrainingError(
        f"{rank} died ({how}); the other ranks were stopped{detail}",
        hint="the same command with --resume: it goes on from the last checkpoint",
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def report_error(error: BaseException, rank: int) -> bool:
    """Leave this rank's error for the launcher. Returns False where there is no launcher to read it.

    A PeerError (a peer went away) is marked as secondary: it is a consequence, not the cause.
    """
    folder = os.environ.get(ERRORS)
    if not folder:
        return False
    own = error if isinstance(error, AutoparError) else None
    report = {
        "what": own.what if own else f"{type(error).__name__}: {error}",
        "where": (own.where if own else None) or f"rank {rank}",
        "hint": own.hint if own else "to report this, with the command and the model",
        "exit_code": own.exit_code if own else 1,
        "secondary": isinstance(error, PeerError),
        "time": time.time(),
    }
    target = Path(folder) / f"rank-{rank}.json"
    part = target.with_suffix(".part")
    part.write_text(json.dumps(report))
    part.rename(target)
    return True
