"""Memory of a training step: what plans predict beside what their tensors take, on CPU processes.

    python bench/memory.py [CASE ...]

A case is `model/mesh/recompute/micro-batches/precision/what is fixed`, such as `llama/fsdp=2/full/4/bf16/planned`; the
default are those that `tests/runtime/test_memory.py` holds to 5 %. Measured are tensors: without what gloo copies for
itself, and without fragmentation and reserved memory, which GPUs have.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.runtime.processes import run_on
from tests.runtime.test_memory import QUICK_ON_FOUR, QUICK_ON_TWO, REST_ON_FOUR, REST_ON_TWO


def devices(case: str) -> int:
    total = 1
    for axis in case.split("/")[1].split(","):
        total *= int(axis.split("=")[1])
    return total


def main(cases: list[str]) -> None:
    print(
        f"{'case':42} {'predicted':>10} {'measured':>10} {'ratio':>6}  at its most in   largest predicted, MB"
    )
    worst = 0.0
    for count in sorted({devices(case) for case in cases}):
        chosen = [case for case in cases if devices(case) == count]
        ranks = run_on(count, "memory_worker.py", *chosen, timeout=60.0 * len(chosen))
        for case in chosen:
            rows = [rank[case] for rank in ranks]
            row = max(rows, key=lambda row: max(row["phases"].values()))
            phase, measured = max(row["phases"].items(), key=lambda item: item[1])
            ratio = row["predicted"] / measured
            worst = max(worst, abs(ratio - 1))
            parts = sorted(row["kinds"].items(), key=lambda item: -item[1])[:4]
            text = ", ".join(f"{kind} {size / 1e6:.1f}" for kind, size in parts if size)
            print(
                f"{case:42} {row['predicted'] / 1e6:7.2f} MB {measured / 1e6:7.2f} MB {ratio:6.3f}  {phase:15}  {text}"
            )
    print(f"largest difference {100 * worst:.1f} %")


if __name__ == "__main__":
    main(sys.argv[1:] or [*QUICK_ON_TWO, *REST_ON_TWO, *QUICK_ON_FOUR, *REST_ON_FOUR])
