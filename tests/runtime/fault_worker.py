"""Trains `fault_model.py` on two ranks, which are killed at every phase in turn and started again, as torchrun would.

    python fault_worker.py FOLDER FAULT...     FAULT: RANK:PHASE:STEP

Ranks are forks of this process, which has imported everything: a restart takes a moment instead of many seconds.
"""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import redirect_stderr
from pathlib import Path

import torch

from autopar import api
from autopar.plans import Plan
from autopar.runtime.groups import end_rank
from autopar.runtime.optimizers import OptimizerSettings
from autopar.runtime.schedules import Schedule
from autopar.training import TrainOptions, train_rank
from tests.runtime.processes import ROOT

MODEL = f"{ROOT / 'tests' / 'runtime' / 'fault_model.py'}:mlp"
STEPS = 6


def options(out: Path, **other: object) -> TrainOptions:
    return TrainOptions(
        steps=STEPS, optimizer=OptimizerSettings(lr=1e-2, weight_decay=0.1), schedule=Schedule(), ema=0.5, max_norm=0.1, data="pydoc", tokenizer=None, seed=0, out=out,
        save_every=2, resume=False, compiled=False, timeout_s=20, as_json=True, quiet=False, **other,  # type: ignore[arg-type]
    )  # fmt: skip


def rank(number: int, port: int, out: Path, attempt: int, background: bool) -> None:
    os.environ.update(
        RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), AUTOPAR_ATTEMPT=str(attempt),
    )  # fmt: skip
    code = 1
    with (out.parent / f"log-{number}").open("a") as told, redirect_stderr(told):
        try:
            code = train_rank(
                MODEL,
                Plan.load(out.parent / "plan.json"),
                options(out, async_save=background),
                lambda line: None,
            )
        except BaseException:
            traceback.print_exc()
    end_rank(code)


def once(out: Path, attempt: int, *, background: bool) -> list[int]:
    """Exit codes of the ranks; below 0 the signal that killed one. The others of a killed one are killed too."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {}
    for number in range(2):
        pid = os.fork()
        if not pid:
            rank(number, port, out, attempt, background)
        ranks[pid] = number
    codes: dict[int, int] = {}
    end = time.monotonic() + 60
    while len(codes) < len(ranks):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
        if any(codes.values()) or time.monotonic() > end:
            for other in ranks.keys() - codes.keys():
                os.kill(other, signal.SIGKILL)
        time.sleep(0.01)
    return [code for pid, code in sorted(codes.items(), key=lambda item: ranks[item[0]])]


def main(folder: Path, faults: list[str]) -> None:
    torch.set_num_threads(1)
    plan = api.plan(MODEL, "cpu:2", batch=4, seq=8, fix=["batch=dp"], mesh="dp=2")
    plan.save(folder / "plan.json")
    os.environ["FAULTS_DONE"] = str(folder)
    clean = once(folder / "clean", 0, background=False)
    os.environ["FAULTS"] = ",".join(faults)
    attempts = []
    for attempt in range(len(faults) + 1):
        attempts.append(once(folder / "faulty", attempt, background=True))
        if not any(attempts[-1]):
            break
    logs = io.StringIO()
    for number in range(2):
        logs.write((folder / f"log-{number}").read_text())
    print(json.dumps({"clean": clean, "attempts": attempts, "logs": logs.getvalue()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
