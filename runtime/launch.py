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
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from autopar.errors import AutoparError, TrainingError

ERRORS = "AUTOPAR_ERRORS"

_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")


def launched() -> bool:
    """Whether this process is one rank of several (torchrun sets WORLD_SIZE)."""
    return "WORLD_SIZE" in os.environ


def launch(arguments: Sequence[str], processes: int, *, threads: int | None = None) -> int:
    """Run `python -m autopar ARGUMENTS` on `processes` ranks. Returns 0 or raises TrainingError."""
    with tempfile.TemporaryDirectory(prefix="autopar-") as folder:
        environment = {**os.environ, ERRORS: folder}
        environment.setdefault("OMP_NUM_THREADS", str(threads or max(1, (os.cpu_count() or 1) // processes)))
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={processes}",
        ]
        command += ["-m", "autopar", *arguments]
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as run:
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
                if not quiet and not line.startswith(("W", "E", "*", "Setting OMP")):
                    sys.stderr.write(line)
                    sys.stderr.flush()
            code = run.wait()
        if code == 0:
            return 0
        raise _failure(Path(folder), "".join(told), code)


def _failure(folder: Path, told: str, code: int) -> AutoparError:
    reports = [json.loads(file.read_text()) for file in sorted(folder.glob("rank-*.json"))]
    first = min(reports, key=lambda report: (report["secondary"], report["time"]), default=None)
    if first is not None and not first["secondary"]:
        error = TrainingError(first["what"], where=first["where"], hint=first["hint"])
        error.exit_code = first["exit_code"]
        return error
    match = _FAILED.search(told)
    rank = f"rank {match[2]}" if match else "a rank"
    signal = (
        f" (killed by signal {-int(match[1])})"
        if match and int(match[1]) < 0
        else f" (exit code {match[1] if match else code})"
    )
    detail = "\n".join(told.strip().splitlines()[-15:]) if not match else ""
    return TrainingError(
        f"{rank} died{signal}; the other ranks were stopped" + (f"\n{detail}" if detail else ""),
        hint="the same command with --resume: it goes on from the last checkpoint",
    )


def report_error(error: BaseException, rank: int) -> bool:
    """Leave this rank's error for the launcher. Returns False where there is no launcher to read it.

    An error of a collective (a peer went away) is marked as secondary: it is a consequence, not the cause.
    """
    folder = os.environ.get(ERRORS)
    if not folder:
        return False
    import time

    own = isinstance(error, AutoparError)
    secondary = not own and isinstance(error, RuntimeError) and _is_connection_error(str(error))
    report = {
        "what": error.what if isinstance(error, AutoparError) else f"{type(error).__name__}: {error}",
        "where": (error.where if isinstance(error, AutoparError) else None) or f"rank {rank}",
        "hint": error.hint
        if isinstance(error, AutoparError)
        else "to report this, with the command and the model",
        "exit_code": error.exit_code if isinstance(error, AutoparError) else 1,
        "secondary": secondary,
        "time": time.time(),
    }
    target = Path(folder) / f"rank-{rank}.json"
    part = target.with_suffix(".part")
    part.write_text(json.dumps(report))
    part.rename(target)
    return True


def _is_connection_error(text: str) -> bool:
    return any(
        word in text
        for word in (
            "Connection reset",
            "Connection closed",
            "Timed out",
            "timeout",
            "gloo",
            "NCCL",
            "Broken pipe",
        )
    )
