"""Launch: the same command on N processes of this machine, and one clear report when one of them fails.

In:  the arguments of an `autopar` command and a number of processes.
Out: torchrun runs them (`python -m torch.distributed.run`); the exit code is that of the first rank that failed.

Ranks leave their error in a folder that the launcher names (`AUTOPAR_ERRORS`) instead of printing it, so that what
all of them found is said once. A rank that left nothing was killed.

With `restarts`, ranks that were killed, or lost a peer, are all started anew (with a rendezvous of their own: the restart
inside a c10d rendezvous failed with gloo), and go on from the last checkpoint. An error that would only come again (a
loss that is not finite, a bad option) is not tried a second time.

SIGTERM to the launcher goes to the ranks that can save before they end (`StopRequest`); a second one ends them at once.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from autopar.errors import AutoparError, HangError, PeerError, TrainingError, UsageError

ERRORS = "AUTOPAR_ERRORS"
ATTEMPT = "AUTOPAR_ATTEMPT"
# What a run that was asked to end returns once its checkpoint is there: EX_TEMPFAIL of sysexits.h, "try again later".
EXIT_STOPPED = 75
_STOPPED = "stopped"  # the file that says so to the launcher

_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
# What torch and torchrun log (`W1130 14:10:53.59 ...`), and torchrun's box about OMP_NUM_THREADS.
_TORCH_LOG = re.compile(r"\[?[IWEF]\d{4} |USDT:|\*{20}|Setting OMP_NUM_THREADS")
_MOST_PER_CORE = 64


def launched() -> bool:
    """Whether this process is one rank of several (torchrun sets WORLD_SIZE)."""
    return "WORLD_SIZE" in os.environ


def attempt() -> int:
    """How often this run was started again after a failure, by `launch` or by torchrun (--max-restarts)."""
    return int(os.environ.get(ATTEMPT) or os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def launch(arguments: Sequence[str], processes: int, *, threads: int | None = None, restarts: int = 0) -> int:
    """Run `python -m autopar ARGUMENTS` on `processes` ranks. Returns 0, EXIT_STOPPED after a SIGTERM with a checkpoint
    written, or raises the error of the first rank that failed.

    `restarts`: how often ranks that died are started again. Raises UsageError for more processes than this machine can
    run.
    """
    cores = os.cpu_count() or 1
    if processes > _MOST_PER_CORE * cores:
        raise UsageError(
            f"{processes} processes were asked for, this machine has {cores} cores",
            hint="torchrun on the cluster",
        )
    for number in range(restarts + 1):
        with tempfile.TemporaryDirectory(prefix="autopar-") as folder:
            environment = {**os.environ, ERRORS: folder, ATTEMPT: str(number)}
            environment.setdefault("OMP_NUM_THREADS", str(threads or max(1, cores // processes)))
            code, told = _run_once(arguments, processes, environment, Path(folder))
            if (Path(folder) / _STOPPED).exists():
                return EXIT_STOPPED
            if code == 0:
                return 0
            failure, again = _failure(Path(folder), told, code)
        if number == restarts or not again:
            raise failure
        print(f"restart {number + 1} of {restarts}: {failure.what}", file=sys.stderr, flush=True)
    raise AssertionError("the last failure is raised above")


def _run_once(
    arguments: Sequence[str], processes: int, environment: Mapping[str, str], folder: Path
) -> tuple[int, str]:
    """torchrun's exit code, and what it and the ranks wrote to standard error."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "autopar", *arguments]
    with (
        subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True, errors="replace"
        ) as run,
        _stopped_with_us(run, folder),
    ):
        assert run.stderr is not None
        told: list[str] = []
        quiet = False
        for line in run.stderr:
            told.append(line)
            # torchrun's own report of a failure is replaced by ours.
            quiet = (
                quiet
                or "torch.distributed.elastic" in line
                or "torch/distributed/" in line
                or line.startswith("Traceback")
            )
            if not quiet and not _TORCH_LOG.match(line):
                sys.stderr.write(line)
                sys.stderr.flush()
        return run.wait(), "".join(told)


@contextmanager
def _stopped_with_us(run: subprocess.Popen[str], folder: Path) -> Iterator[None]:
    """While torchrun runs: who stops this process (a scheduler, `timeout`) stops the ranks too, not only us. Ranks that
    can save first are asked to; at a second signal, or without any such, torchrun stops them at once."""
    asked = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        ranks = [] if asked else [int(file.name.partition("-")[2]) for file in folder.glob("pid-*")]
        asked = True
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGTERM)
        if not ranks:
            run.send_signal(signal.SIGTERM)  # torchrun stops its ranks; then its output ends, and so do we
            raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class StopRequest:
    """As a context, on a rank: SIGTERM (a scheduler's warning) only sets `asked`, and the loop ends when it has saved."""

    def __init__(self, rank: int) -> None:
        self.rank, self.asked = rank, False
        self._before: Any = None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._ask)
            folder = os.environ.get(ERRORS)
            if folder:
                (Path(folder) / f"pid-{os.getpid()}").touch()
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def code(self) -> int:
        """The exit code once the checkpoint is there: EXIT_STOPPED, which a launcher is told in another way (for torchrun
        a rank that returns anything but 0 has failed)."""
        folder = os.environ.get(ERRORS)
        if not folder:
            return EXIT_STOPPED
        (Path(folder) / _STOPPED).touch()
        return 0


def _failure(folder: Path, told: str, code: int) -> tuple[AutoparError, bool]:
    """The error of the first rank that failed by itself; else which rank was killed; else what its peers saw of it. And
    whether starting again may help."""
    reports = [json.loads(file.read_text()) for file in sorted(folder.glob("rank-*.json"))]
    first = min(reports, key=lambda report: (report["secondary"], report["time"]), default=None)
    exits = [(int(match[1]), match[2]) for match in _FAILED.finditer(told)]
    killed = next((found for found in exits if found[0] < 0), None)
    if first is not None and not (first["secondary"] and killed):
        error = TrainingError(first["what"], where=first["where"], hint=first["hint"])
        error.exit_code = first["exit_code"]
        return error, bool(first.get("again", first["secondary"]))
    exit_code, number = killed or next(iter(exits), (code, ""))
    rank = f"rank {number}" if number else "a rank"
    how = f"killed by {_signal_name(-exit_code)}" if exit_code < 0 else f"exit code {exit_code}"
    detail = "" if exits else "".join(f"\n{line}" for line in told.strip().splitlines()[-15:])
    error = TrainingError(
        f"{rank} died ({how}); the other ranks were stopped{detail}",
        hint="the same command with --resume (it goes on from the last checkpoint), or --restarts N to have that done",
    )
    return error, True


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
        # what the device or the system did may not happen again; what autopar itself found would
        "again": own is None or isinstance(error, (PeerError, HangError)),
        "time": time.time(),
    }
    target = Path(folder) / f"rank-{rank}.json"
    part = target.with_suffix(".part")
    part.write_text(json.dumps(report))
    part.rename(target)
    return True
