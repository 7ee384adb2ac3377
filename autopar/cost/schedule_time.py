"""Seconds and memory of pipeline schedules in closed form, and bounds below which no order goes.

In:  numbers or arrays of stages, chunks, micro-batches and seconds.
Out: arrays: `step_s` and `in_flight` of a schedule whose stages are alike, `bound_s` of stages that are not.

    step_s("1f1b", 4, 1, [8, 16], f=1, b=1, w=1)  ->  [33, 57]: (micro-batches + stages - 1) * 3

`step_s` predicts what `schedule.simulate` finds and never goes above it. With hops that take no time it is equal for
every schedule, but for zbv with between one and two micro-batches per stage.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.cost.schedule_order import FOLDED, placement

Floats = NDArray[np.float64]
Path = tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike]


def step_s(
    schedule: str,
    stages: ArrayLike,
    chunks: ArrayLike,
    micro_batches: ArrayLike,
    f: ArrayLike,
    b: ArrayLike,
    w: ArrayLike,
    send: ArrayLike = 0.0,
    *,
    overlap: ArrayLike = 0.0,
) -> Floats:
    """Seconds of a step whose stages are alike; every number may be an array, they are broadcast.

    `f`, `b`, `w`: seconds of all the chunks of a rank for one micro-batch, forward and the two halves of the
    backward; `send`: of one hop; `overlap` as in `simulate`.

    Each term is the length of a path through the order's dependencies, written by how many forwards, input gradients,
    weight gradients and hops it has: the longest is never above the simulated time. The paths of gpipe, 1f1b and
    interleaved are argued beside them. Those of zb-h1, zbv and dualpipev were read off the simulator (the derivatives
    of its time by each cost, up to 6 stages) and hold in tests of random costs up to 20 stages: for a proof, simulate
    or take `bound_s`. With hops longer than half a chunk's forward, loops of the steady part that some schedules
    lack here make them slower than said.
    """
    p, v, m = (_floats(count) for count in (stages, chunks, micro_batches))
    forward, inputs, weights, hop = (_floats(seconds) for seconds in (f, b, w, send))
    return _STEP_S[schedule](p, v, m, forward, inputs, weights, hop, np.asarray(overlap, dtype=float))


def _floats(values: ArrayLike) -> Floats:
    """As floats, but for arrays of symbols."""
    array = np.asanyarray(values)
    return array if array.dtype == object else array.astype(float)


def _gpipe_s(
    p: Floats, v: Floats, m: Floats, f: Floats, b: Floats, w: Floats, s: Floats, o: Floats
) -> Floats:
    return (m + p - 1) * (f + b + w) + 2 * (p - 1) * s


def _one_f_one_b_s(
    p: Floats, v: Floats, m: Floats, f: Floats, b: Floats, w: Floats, s: Floats, o: Floats
) -> Floats:
    """A backward on the rank `d` before the last one lets the forward of `d + 1` micro-batches later begin, whose way
    to the last rank and back has 2 d hops: as often as the micro-batches allow, with d at most p - 1."""
    loops = np.ceil((m - 1) / p)
    return (m + p - 1) * (f + b + w) + 2 * s * np.where(p > 1, p - 1 + m - 1 - loops, 0)


def _interleaved_s(
    p: Floats, v: Floats, m: Floats, f: Floats, b: Floats, w: Floats, s: Floats, o: Floats
) -> Floats:
    """All the work of the last rank, and the way to it and back. In the first forwards (and last backwards) a pass
    through all ranks can take longer than a group takes on one; with slow hops so can the loops of the steady part."""
    f, b = f / v, (b + w) / v
    groups = np.maximum(1, m // p)
    largest, smallest = np.ceil(m / groups), m // groups
    ways = (p - 1) * (f + b + 2 * s) + (v - 1) * (
        np.maximum(0, p * (f + s) - largest * f) + np.maximum(0, p * (b + s) - smallest * b)
    )
    steady = v * (m - largest) + largest - 1
    loops = np.floor((steady - np.ceil(steady / (2 * p - 1))) / 2)
    around = (groups - 1) * (v - 1) * (p * (np.maximum(f, b) + s) - largest * (f + b))
    slow = np.maximum(np.maximum(0, loops * (2 * s - f - b)), around)
    long = m * v * (f + b) + ways + np.where(p > 1, slow, 0)
    return np.where(v > 1, np.where(p > 1, long, m * v * (f + b)), _one_f_one_b_s(p, v, m, f, b, 0 * w, s, o))


def _zb_h1_s(
    p: Floats, v: Floats, m: Floats, f: Floats, b: Floats, w: Floats, s: Floats, o: Floats
) -> Floats:
    n, few = p - 1, np.maximum(p - m, 0)
    filled = m > p
    steady = np.maximum(m - p - 1, 0)
    loops = np.maximum(0, 2 * s - w) * (steady - np.ceil(steady / p))
    hops = np.where(filled, 4 * n, 2 * n + 2 * np.maximum(np.minimum(m, p) - 2, 0))
    paths = [
        n * (f + b) - (np.minimum(m, p) - 1) * w + hops * s + loops,
        n * f + few * b + np.where(filled, 3 * n, np.maximum(n, 2 * n + m - 3)) * s + loops,
        n * b + few * f + 2 * n * s,
    ]
    return m * (f + b + w) + np.where(p > 1, reduce(np.maximum, paths), 0)


def _longest(paths: list[Path], costs: tuple[Floats, ...]) -> Floats:
    """The longest of paths given by their forwards, input gradients, weight gradients and hops."""
    longest = np.asarray(-np.inf)
    for path in paths:
        longest = np.maximum(
            longest, sum(np.asanyarray(n) * cost for n, cost in zip(path, costs, strict=True))
        )
    return longest


def _zbv_s(p: Floats, v: Floats, m: Floats, f: Floats, b: Floats, w: Floats, s: Floats, o: Floats) -> Floats:
    """By how full the micro-batches make the pipeline: from 2 p - 1 on the paths are the work and a constant."""
    n, a, costs = p - 1, 2 * m, (f / v, b / v, w / v, s)
    early = 2 * p - 1 - m
    filled: list[Path] = [
        (a, a + 2 * n, a - 2 * n, 6 * n - 2),
        (a, a + 2 * n, a - 2 * n - 1, 6 * n),
        (a, a + n, a, 5 * n - 2),
        (a, a + n, a - 1, 5 * n),
        (a, a + 1, a + n - 1, 3 * n),
        (a + 1, a, a + n - 1, 3 * n - 2),
        (a + n, a, a - 1, 5 * n),
        (a + n, a + n, a - 2 * n - 1, 6 * n),
        (a + 2 * n - 1, a + 1 - n, a, 3 * n - 2),
        (a + 2 * n - 1, a + 1, a - 2 * n, 4 * n - 2),
        (a + 2 * n, a - n, a - 1, 3 * n),
        (a + 2 * n, a, a - 2 * n - 1, 4 * n),
    ]
    partly: list[Path] = [
        (a, a + 2 * n, 2 * p, np.minimum(6 * n - 2, 4 * n + 2 * np.maximum(0, m - p - 1))),
        (a, 2 * p + 2 * n, a, 4 * n - 2 * (m - p)),
        (a, m + 2 * p + n - 1, 3 * m - 2 * p + 1, 5 * n - 2 - early),
        (a, m + 2 * p, 3 * m - p - 1, 3 * n),
        (m + 2 * p, a, 3 * m - p - 1, 3 * n - 2 - 2 * early),
        (m + p + n, m + p + n, a, 2 * n),
        (3 * m - 2, m + p + 1, a, 3 * n - 2 - 2 * early),
        (3 * m - 2, m + 2 * p, 2 * p, 2 * (m - 2)),
        (a + 2 * n, a - n, a - n, 2 * n),
        (a + 2 * n, a - n, np.minimum(a - 1, 4 * m - 4 * p + 1), 3 * n),
        (a + 2 * n, a, np.maximum(2, a - 2 * n - 1), 4 * n),
    ]
    few: list[Path] = [
        (2 * p, a + 2 * n, a, 4 * n),
        (2 * p + m - 1, 2 * p + m - 1, a, 4 * n - 2 * (m - 1)),
        (a + 2 * n, 2 * p, 2, 4 * n),
        (a + 2 * n, 2 * p + 1 - m, m + 1, 4 * n - 2 * (m - 1)),
    ]
    seconds = np.where(m <= p, _longest(few, costs), _longest(partly, costs))
    seconds = np.where(m >= 2 * p - 1, _longest(filled, costs), seconds)
    return np.where(p > 1, seconds, m * (f + b + w))


def _dualpipev_s(
    p: Floats, v: Floats, m: Floats, f: Floats, b: Floats, w: Floats, s: Floats, o: Floats
) -> Floats:
    """No path holds both parts of more pairs than a rank has at most, 2 (m - p) - 1."""
    n, a, costs = p - 1, 2 * m, (f / v, b / v, w / v, s)
    some, more = m > p, np.maximum(a, m + 2 * p)
    late = np.minimum(a + n, np.maximum(4 * p, a) - n)
    hops = np.where(m < 2 * p, 2 * (3 * n + 2 - m), 3 * n)
    always: list[Path] = [
        (np.maximum(2 * p, a - 1), a + 2 * n, late, np.minimum(6 * n, 4 * n + 2 * np.maximum(0, m - 2))),
        (np.maximum(2 * p + m - 1, a + n), np.maximum(2 * p + m - 1, a + n), late, 4 * n),
        (a + 2 * n, np.maximum(2 * p, a), np.where(some, np.maximum(4 * p, a) - 2 * n, m + p), 4 * n),
    ]
    later: list[Path] = [
        (a + n, more, more, hops),
        (a - 1, more + n, more, hops + 2 * n),
        (a + 2 * n, np.maximum(m + p + 1, a - n), np.maximum(m + p + 1, a - n), hops),
    ]
    hidden = o * np.minimum(f, b + w) / v * np.maximum(0, 2 * (m - p) - 1)
    seconds = np.maximum(_longest(always, costs), np.where(some, _longest(later, costs), 0))
    return np.where(p > 1, seconds, m * (f + b + w)) - hidden


_STEP_S: dict[str, Callable[..., Floats]] = {
    "gpipe": _gpipe_s,
    "1f1b": _one_f_one_b_s,
    "interleaved": _interleaved_s,
    "zb-h1": _zb_h1_s,
    "zbv": _zbv_s,
    "dualpipev": _dualpipev_s,
}


def in_flight(
    schedule: str,
    stages: ArrayLike,
    chunks: ArrayLike,
    micro_batches: ArrayLike,
    rank: ArrayLike | None = None,
) -> NDArray[np.int64]:
    """Peak number of micro-batch x chunk activations alive on `rank` (None: on the rank that holds most).

    Arrays are broadcast. It is what `simulate` counts, whatever the seconds: a rank's order alone decides it.
    """
    symbols = isinstance(micro_batches, np.ndarray) and micro_batches.dtype.hasobject
    p, v, m = (
        np.asanyarray(count) if symbols else np.asarray(count, dtype=np.int64)
        for count in (stages, chunks, micro_batches)
    )
    if schedule == "gpipe":
        peak = m + 0 * p if rank is None else m + 0 * (p + np.asarray(rank))
    elif schedule == "zb-h1":
        peak = np.minimum(m, p) if rank is None else np.minimum(m, p) + 0 * np.asarray(rank)
    elif schedule in FOLDED:
        r = p - 1 if rank is None else np.asarray(rank)
        peak = np.minimum(np.minimum(2 * m, m + 1 + r), 2 * p + (schedule == "dualpipev"))
    else:
        r = np.asarray(0 if rank is None else rank)
        groups = np.maximum(1, m // p)
        ahead = np.where(v > 1, 2 * (p - 1 - r) + (v - 1) * -(-m // groups), p - 1 - r)
        peak = np.minimum(v * m, ahead + 1)
    return peak if symbols else np.asarray(peak, dtype=np.int64)


def bound_s(
    stages: int,
    chunks: int,
    micro_batches: ArrayLike,
    f: ArrayLike,
    b: ArrayLike,
    w: ArrayLike,
    send: ArrayLike = 0.0,
    *,
    folded: bool = False,
    split: bool = True,
) -> Floats:
    """Seconds that no order goes below, for virtual stages that need not be alike.

    `micro_batches`: one number or shape [..., 1]; `f`, `b`, `w`: seconds per virtual stage, shape [..., stages *
    chunks]; `send`: of a hop, one number or shape
    [..., stages * chunks - 1]. `folded`: the placement of the V schedules. `split`: whether the order may hand the
    input gradient on before the weights'; False is tighter, and right for gpipe, 1f1b and interleaved.

    For each rank the largest of
      the way to its first forward, all its work, and the way that must follow the last backward;
      the way of the first micro-batch to its first backward, all its backwards, and what must follow;
      the way to its first forward, all its forwards, and the way of the last of them to the end and back.
    """
    forward, inputs, weights = (np.asarray(seconds, dtype=float) for seconds in (f, b, w))
    virtual, m = stages * chunks, np.asarray(micro_batches)
    ranks = placement("zbv" if folded else "interleaved", stages, chunks)
    hops = np.broadcast_to(np.asarray(send, dtype=float), (*np.shape(send)[:-1], max(virtual - 1, 0)))
    hops = hops * (ranks[1:] != ranks[:-1])
    backward = inputs if split else inputs + weights
    left = weights[..., 0] if split else 0 * weights[..., 0]  # after the input gradient of the first stage

    first = np.zeros((*hops.shape[:-1], 1))
    hop_in = np.concatenate([first, hops], axis=-1)  # of the hop into a stage
    down = np.cumsum(forward + hop_in, axis=-1)  # until the end of a stage's first forward
    up = np.cumsum(
        backward + hop_in, axis=-1
    )  # from the start of a stage's backward to the end of the first stage's
    to_forward, after_backward = down - forward, up - backward
    whole_down, whole_up = down[..., -1:], up[..., -1:]
    to_backward = whole_down + whole_up - up
    after_forward = whole_down - down + whole_up + left[..., None]

    # [..., chunks, rank]: the virtual stages of each rank
    place = np.argsort(ranks, kind="stable").reshape(stages, chunks).T
    f_work, b_work, w_work = (m * seconds[..., place].sum(axis=-2) for seconds in (forward, inputs, weights))
    start = to_forward[..., place].min(axis=-2)
    turn = to_backward[..., place].min(axis=-2)
    tail = after_backward[..., place].min(axis=-2)
    last = left[..., None]
    if split:
        bounds = [start + f_work + b_work + w_work, start + f_work + b_work + tail + last]
        bounds += [turn + b_work + w_work, turn + b_work + tail + last]
    else:
        bounds = [start + f_work + b_work + w_work + tail, turn + b_work + w_work + tail]
    bounds.append(start + f_work + after_forward[..., place].min(axis=-2))
    longest = np.maximum.reduce(np.broadcast_arrays(*bounds)).max(axis=-1)
    return np.asarray(np.maximum(longest, whole_down[..., 0] + whole_up[..., 0] + left))
