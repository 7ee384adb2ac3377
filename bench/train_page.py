"""What `bench/train.py` measured, as a table and as docs/training_speed.md.

In: rows as `bench.train.measure` returns them. Out: Markdown.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
PEERS = {"ddp": "DDP", "fsdp": "`fully_shard`", "fsdp+tp": "`fully_shard` + `tensor.parallel`"}

HEAD = """# Training steps beside torch's own

Written by `python bench/train.py --page docs/training_speed.md`, on gloo processes of one machine with 2 cores, one
thread each, that other work shared: only ratios of what ran in turns mean something. Both sides train the same model on the same
batches with fused AdamW and clip to the global norm 1; their losses agree to 1e-3 in every step, or the bench refuses.

- **time**: autopar and the peer in the same processes, in turns step by step; median over steps of the slowest rank, the
  quartiles in brackets. `CPU` is what a process computed in a step, all of its threads, which other work disturbs
  less. Where both do not fit into memory together, each runs in processes of its own, in turns.
- **memory**: each alone; high-water mark of the resident memory of a process after set-up (VmHWM, reset once the model is
  there and freed memory given back), of the rank with most. `beyond imports`: less what was resident before the model was built.
  Autopar's includes what capturing and planning in the same process have left, some 60 MB.
- The peers: DDP with gradients as views of buckets; `fully_shard` of every layer; `fully_shard` over 2 with
  `tensor.parallel` over 2, sequence-parallel norms and `loss_parallel` (SmolLM2's 9 heads do not divide by 2: there the
  peer's attention is whole on every rank). Llamas have hidden size 512, 8 heads, 8,192 words. The whole batch is 4
  rows, of 64 tokens for SmolLM2 and of 256 for Llamas.

What autopar overlaps: the all-reduces of gradients over `dp` (of parameters that are not split by rows over it) with the
last micro-batch's backward; the gathers of one call's parameters with each other, and the reduce-scatters of one call's gradients
with each other. What waits: a ZeRO-3 call for its gathers and its backward for the reduce-scatters, steps between shardings over
`tp`, and the update of ZeRO-1 and ZeRO-2 for its reduction and gathers.

"""


def page(rows: Sequence[Row]) -> str:
    return HEAD + table(rows)


def table(rows: Sequence[Row]) -> str:
    parts = [_times(rows), _memory(rows), _compile(rows)]
    return "\n".join(part for part in parts if part)


def _times(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        if row["part"] == "time":
            ours, theirs = row["contenders"]
            lines.append(
                f"| {_what(row)} | {ours.removeprefix('ours/')} | {PEERS[theirs]} | {_spread(row['seconds'][ours])} "
                f"| {_spread(row['seconds'][theirs])} | **{_ratio(row['seconds'], ours, theirs):.2f}** "
                f"| {_ratio(row['cpu_seconds'], ours, theirs):.2f} |"
            )
    head = "| model, ranks | autopar | peer | autopar, s | peer, s | ratio | ratio, CPU |\n|---|---|---|---|---|---|---|\n"
    return "## Time of a step\n\n" + head + "\n".join(lines) + "\n" if lines else ""


def _memory(rows: Sequence[Row]) -> str:
    alone = {
        (row["model"], row["ranks"], row["contenders"][0], row["precision"]): row
        for row in rows
        if row["part"] == "memory"
    }
    lines = []
    for (model, ranks, contender, precision), row in alone.items():
        peer = _peer_of(contender)
        other = alone.get((model, ranks, peer, precision)) if peer else None
        if other is not None:
            beyond = [each["peak_mb"] - each["before_mb"] for each in (row, other)]
            lines.append(
                f"| {_what(row)} | {contender.removeprefix('ours/')} | {PEERS[peer]} | {row['peak_mb']:.0f} "
                f"| {other['peak_mb']:.0f} | **{row['peak_mb'] / other['peak_mb']:.2f}** | {beyond[0] / beyond[1]:.2f} |"
            )
    head = (
        "| model, ranks | autopar | peer | autopar, MiB | peer, MiB | ratio | ratio beyond imports |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    return "## Peak memory of a process\n\n" + head + "\n".join(lines) + "\n" if lines else ""


def _peer_of(contender: str) -> str:
    mesh = contender.removeprefix("ours/")
    if mesh == contender:
        return ""
    return "fsdp+tp" if "tp=" in mesh else "fsdp" if mesh.startswith("fsdp") else "ddp"


def _compile(rows: Sequence[Row]) -> str:
    lines = [
        f"| {row['model']} | {statistics.median(each[0] for each in row['compile']):.1f} "
        f"| {statistics.median(each[1] for each in row['compile']):.1f} |"
        for row in rows
        if row["part"] == "compile"
    ]
    head = "| model | `autopar.compile`, s | CPU s |\n|---|---|---|\n"
    return "## Compiling\n\n" + head + "\n".join(lines) + "\n" if lines else ""


def _what(row: Row) -> str:
    precision = "" if row["precision"] == "fp32" else f", {row['precision']}"
    return f"{row['model']}, {row['ranks']}{precision}"


def _spread(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def _ratio(values: dict[str, Sequence[float]], ours: str, theirs: str) -> float:
    return statistics.median(values[ours]) / statistics.median(values[theirs])
