"""Where a model is cut into pipeline stages.

In:  runs of like layers (seconds, count), stages, chunks per rank, what the first and last stage have besides.
Out: layers per virtual stage, in model order.

    cut([(1.0, 8)], 3, last_extra=1.5)  ->  (3, 3, 2)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.cost.schedule_order import placement
from autopar.errors import InfeasibleError, UsageError

Floats = NDArray[np.float64]


def cut(
    times: Sequence[tuple[float, int]],
    stages: int,
    chunks: int = 1,
    *,
    schedule: str = "1f1b",
    first_extra: float = 0.0,
    last_extra: float = 0.0,
    memory: Sequence[float] | None = None,
    limits: Sequence[float] | None = None,
    minimum: int = 1,
) -> tuple[int, ...]:
    """Layers per virtual stage, contiguous and in model order, with the largest load of a rank as small as can be.

    `times`: runs of like layers in model order, (seconds per layer, layers). `first_extra`, `last_extra`: seconds
    that the first and last virtual stage have besides (embedding, output and loss). `memory`, `limits`: bytes per
    layer of each run, and bytes each rank has for them. `minimum`: layers of a virtual stage at least.

    Exact for one chunk: a bound on the load is tried by filling stage after stage, and halved (parametric search);
    what is left to choose is spread evenly. With more chunks a rank's load is a sum over distant stages, which no
    such argument covers: of an even cut, its remainder on the ranks with least load, and the exact cut into virtual
    stages the better one is improved layer by layer. `cut_bound_s` says how far it can be from the best.

    Raises UsageError with fewer layers than `minimum` asks for, InfeasibleError where memory cannot hold them.
    """
    seconds = np.repeat([t for t, _ in times], [count for _, count in times]).astype(float)
    virtual = stages * chunks
    if len(seconds) < virtual * minimum:
        raise UsageError(
            f"{len(seconds)} layers for {virtual} virtual stages of {minimum} or more",
            hint=f"pp * vpp of at most {len(seconds) // max(minimum, 1)}",
        )
    extras = np.zeros(virtual)
    extras[0] += first_extra
    extras[-1] += last_extra
    held = np.repeat(
        [0.0] * len(times) if memory is None or limits is None else memory, [count for _, count in times]
    )
    room = np.full(stages, np.inf) if limits is None else np.asarray(limits, dtype=float)
    before, held_before = (np.concatenate([[0.0], np.cumsum(values)]) for values in (seconds, held))
    if chunks == 1:
        ends = _exact_cut(before.tolist(), extras.tolist(), held_before.tolist(), room.tolist(), minimum)
        if ends is None:
            raise InfeasibleError("no cut keeps every stage's layers within its memory", hint="more stages")
    else:
        ranks = placement(schedule, stages, chunks)
        ends = _improved_cut(before, extras, held_before, room, minimum, ranks)
    return tuple(np.diff(ends, prepend=0).tolist())


def cut_bound_s(
    times: Sequence[tuple[float, int]], stages: int, *, first_extra: float = 0.0, last_extra: float = 0.0
) -> float:
    """Seconds that the largest load of a rank cannot go below, whatever the chunks: even shares, the longest layer,
    and for layers that are all alike whole layers."""
    times = [(t, count) for t, count in times if count]
    total = sum(t * count for t, count in times) + first_extra + last_extra
    longest, layers = max(t for t, _ in times), sum(count for _, count in times)
    least = max(total / stages, longest, first_extra, last_extra)
    if all(t == longest for t, _ in times) and longest > 0 and first_extra == last_extra == 0:
        least = max(least, longest * -(-layers // stages))
    return least


def _exact_cut(
    before: list[float],
    extras: list[float],
    held: list[float],
    room: list[float],
    minimum: int,
    precision: float = 4e-12,
) -> list[int] | None:
    """The last layer + 1 of every stage, or None. `before`, `held`: sums before each layer, one more than layers.
    `precision`: how far from the least load, as a part of all the work."""
    layers, stages = len(before) - 1, len(extras)
    slack = 1e-12 * (before[-1] + sum(extras))

    def reach(start: int, stage: int, most: float) -> int:
        end = bisect_right(before, before[start] + most - extras[stage] + slack) - 1
        if held[-1]:
            end = min(end, bisect_right(held, (held[start] + room[stage]) * (1 + 1e-12)) - 1)
        return end

    def fill(most: float) -> list[int] | None:
        ends, start = [], 0
        for stage in range(stages):
            end = min(reach(start, stage, most), layers - minimum * (stages - 1 - stage))
            if end < start + minimum or (end == start and extras[stage] > most + slack):
                return None
            ends.append(end)
            start = end
        return ends if start == layers else None

    def load(ends: list[int]) -> float:
        return max(before[e] - before[s] + x for s, e, x in zip([0, *ends], ends, extras, strict=False))

    best = fill(before[-1] + sum(extras))
    if best is None:
        return None
    low, high = max(extras), load(best)
    low = max(low, (before[-1] + sum(extras)) / stages) - 2 * slack
    while high - low > precision * slack * 1e12:
        middle = (low + high) / 2
        ends = fill(middle)
        if ends is None:
            low = middle
        else:
            best, high = ends, min(middle, load(ends))
    return _even(best, before, extras, high, reach, minimum)


def _even(
    ends: list[int],
    before: list[float],
    extras: list[float],
    most: float,
    reach: Callable[[int, int, float], int],
    minimum: int,
) -> list[int]:
    """The fullest-first cut with what its last stages have too little of spread evenly, no load above `most`."""
    layers, stages = len(before) - 1, len(ends)
    # The least end of every stage from which the stages after it can still hold the rest.
    least = [layers] * stages
    for stage in range(stages - 1, 0, -1):
        end = start = least[stage]
        while start > 0 and reach(start - 1, stage, most) >= end:
            start -= 1
        least[stage - 1] = max(min(start, end - minimum), stage * minimum)
    spread, start = [], 0
    for stage in range(stages):
        share = start + round((layers - start) / (stages - stage))
        end = min(max(share, least[stage], start + minimum), ends[stage], reach(start, stage, most))
        spread.append(end)
        start = end
    return spread


def _improved_cut(
    before: Floats, extras: Floats, held: Floats, room: Floats, minimum: int, ranks: NDArray[np.int64]
) -> list[int]:
    virtual, stages, layers = len(extras), len(room), len(before) - 1
    member = (ranks[:, None] == np.arange(stages)).astype(float)
    limited = bool(held[-1]) and bool(np.isfinite(room).any())

    def loads(ends: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Seconds of every rank and how bad a cut is, of cuts [..., virtual]: over the memory, the largest load."""
        full = np.concatenate([np.zeros_like(ends[..., :1]), ends], axis=-1)
        seconds = (np.diff(before[full], axis=-1) + extras) @ member
        worst = seconds.max(axis=-1) + 1e-6 * (seconds**2).sum(axis=-1) / (before[-1] + extras.sum() + 1e-300)
        if limited:
            over = np.maximum(np.diff(held[full], axis=-1) @ member / room - 1 - 1e-12, 0).sum(axis=-1)
            worst = worst + (before[-1] + extras.sum()) * 1e3 * over
        return seconds, worst

    counts = np.full(virtual, layers // virtual)
    rank_load = extras @ member
    for _ in range(layers % virtual):
        open_stages = np.flatnonzero(counts == layers // virtual)
        stage = open_stages[np.argmin(rank_load[ranks[open_stages]])]
        counts[stage] += 1
        rank_load[ranks[stage]] += before[-1] / layers
    candidates = [np.cumsum(counts)]
    exact = _exact_cut(before.tolist(), extras.tolist(), held.tolist(), [np.inf] * virtual, minimum, 1e-4)
    if exact is not None:
        candidates.append(np.array(exact))
    place = np.arange(virtual)
    least = (before[-1] + extras.sum()) / stages

    def improved(ends: NDArray[np.int64]) -> tuple[float, NDArray[np.int64]]:
        seconds, bad = loads(ends)
        for _ in range(max(2, 1024 // virtual)):
            if seconds.max() <= least * (1 + 1e-9) and not limited:
                break
            # A layer goes from a stage of the fullest rank to one of an emptier, through all the stages between.
            sources = np.flatnonzero(ranks == np.argmax(seconds))
            targets = np.flatnonzero(np.isin(ranks, np.argsort(seconds)[: max(2, 64 // virtual)]))
            a, b = (grid.ravel()[:, None] for grid in np.meshgrid(sources, targets))
            moved = ends - ((place >= a) & (place < b)) + ((place >= b) & (place < a))
            moved = moved[(np.diff(moved, axis=-1, prepend=0) >= minimum).all(axis=-1)]
            if not len(moved):
                break
            worst = loads(moved)[1]
            if worst.min() >= bad - 1e-12 * abs(bad):
                break
            ends = moved[np.argmin(worst)]
            seconds, bad = loads(ends)
        return float(bad), ends

    ends = min((improved(cut) for cut in candidates), key=lambda found: found[0])[1]
    if limited and (np.diff(held[np.concatenate([[0], ends])]) @ member > room * (1 + 1e-9)).any():
        raise InfeasibleError(
            "found no cut that keeps every rank's layers within its memory", hint="more stages"
        )
    return [int(end) for end in ends]
