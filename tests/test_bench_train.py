"""The bench of training steps runs: autopar and a peer in turns, and a page of what was measured."""

from __future__ import annotations

from typing import Any

from bench.train import Case, measure
from bench.train_page import page


def test_two_in_turns() -> None:
    row: dict[str, Any] = measure(Case("time", "tiny", 2, ("ours/fsdp=2", "fsdp"), "fp32", 2))

    assert [len(seconds) for seconds in row["seconds"].values()] == [2, 2]


def test_page() -> None:
    time = {
        "part": "time", "model": "tiny", "ranks": 2, "contenders": ["ours/dp=2", "ddp"], "precision": "fp32",
        "seconds": {"ours/dp=2": [1.0, 1.0], "ddp": [2.0, 2.0]},
        "cpu_seconds": {"ours/dp=2": [3.0, 3.0], "ddp": [4.0, 4.0]},
    }  # fmt: skip
    memory = [
        {
            "part": "memory", "model": "tiny", "ranks": 2, "contenders": [contender], "precision": "fp32",
            "before_mb": 100.0, "peak_mb": peak,
        }
        for contender, peak in (("ours/dp=2", 300.0), ("ddp", 400.0))
    ]  # fmt: skip

    text = page([time, *memory])

    assert "| tiny, 2 | dp=2 | DDP | 1.00 [1.00, 1.00] | 2.00 [2.00, 2.00] | **0.50** | 0.75 |" in text
    assert "| tiny, 2 | dp=2 | DDP | 300 | 400 | **0.75** | 0.67 |" in text
