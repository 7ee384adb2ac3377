"""One rank of `bench/train.py`: runs the contenders of a case in turns and writes what it measured.

    train_worker.py '{"model": "tiny", "contenders": ["ours/dp=2", "ddp"], "rows": 4, "length": 32, "rounds": 3,
                      "precision": "fp32"}'

In turns means step by step: A B A B ... . Every step starts after a barrier. `seconds` is by the clock; `cpu_seconds` is
what this process computed, its threads together, which other work on the machine disturbs less. Memory is this process's high-water mark of
resident memory (VmHWM, reset through /proc/self/clear_refs after set-up, when freed memory has been given back to the
system), and what was resident before the model was built.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.train_models import batch_of
from bench.train_peers import make


def resident_mb(field: str = "VmRSS") -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status has no {field}")


def settle() -> None:
    """Give freed memory back, and start the high-water mark anew."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def measure(case: dict[str, Any]) -> dict[str, Any]:
    settle()
    before = resident_mb()
    name, rows, length = case["model"], case["rows"], case["length"]
    steps = {}
    setup = {}
    for contender in case["contenders"]:
        start = time.perf_counter()
        steps[contender] = make(contender, name, batch_of(name, rows, length, 0), case["precision"])
        setup[contender] = time.perf_counter() - start
    settle()
    after = resident_mb()
    seconds: dict[str, list[float]] = {contender: [] for contender in steps}
    busy: dict[str, list[float]] = {contender: [] for contender in steps}
    losses: dict[str, list[float]] = {contender: [] for contender in steps}
    for number in range(case["rounds"] + 1):
        batch = batch_of(name, rows, length, number)
        for contender, step in steps.items():
            dist.barrier()
            start, start_busy = time.perf_counter(), time.process_time()
            loss = step(batch)
            taken, taken_busy = time.perf_counter() - start, time.process_time() - start_busy
            losses[contender].append(loss)
            if number:  # the first is to warm up
                seconds[contender].append(taken)
                busy[contender].append(taken_busy)
    return {
        "seconds": seconds, "cpu_seconds": busy, "losses": losses, "setup_s": setup, "before_mb": before, "after_setup_mb": after,
        "peak_mb": resident_mb("VmHWM"),
    }  # fmt: skip


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = measure(json.loads(sys.argv[1]))
    Path(os.environ["RESULT"]).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
