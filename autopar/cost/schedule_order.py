"""Orders of pipeline schedules: what each rank does, one action after the other.

In:  a schedule's name, stages, chunks, micro-batches.
Out: a list of Actions per rank.

    order("1f1b", 2, 1, 2)[0]  ->  F, F, B, B of chunk 0; micro-batches 0, 1, 0, 1

Virtual stages are numbered in model order. Virtual stage `chunk * stages + rank` lies on `rank`; zbv and dualpipev
fold the model back, so that rank `r` holds `r` and `2 * stages - 1 - r`.

Sources of the orders
    gpipe        Huang et al. 2019: all forwards, then all backwards
    1f1b         Narayanan et al. 2021 (PipeDream-Flush): rank r runs `stages - 1 - r` forwards ahead
    interleaved  Narayanan et al. 2021, "Efficient large-scale language model training", section 2.2, in groups of
                 micro-batches (see `group_sizes` for numbers that `stages` does not divide)
    zb-h1        Qi et al. 2023, "Zero bubble pipeline parallelism", section 2: the memory of 1f1b
    zbv          Qi et al. 2024, "Pipeline parallelism with controllable memory"; the order is torch's
                 ScheduleZBVZeroBubble, made for forward = I = W
    dualpipev    Sea AI Lab and DeepSeek 2025 ("cut in half" DualPipe); the order is torch's ScheduleDualPipeV, which
                 is DeepSeek's own
Both V orders exist for every number of micro-batches: fewer than fill the pipeline are the full order with the
micro-batches beyond left out, which keeps an order valid, since a micro-batch depends on no other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.errors import UsageError

FOLDED = ("zbv", "dualpipev")


class Action(NamedTuple):
    """What a rank does at one time. `chunk` is the virtual stage; `paired`: may run together with the next one."""

    kind: str
    chunk: int
    micro_batch: int
    paired: bool = False


Order = list[list[Action]]


def placement(schedule: str, stages: int, chunks: int) -> NDArray[np.int64]:
    """The rank of every virtual stage, shape [stages * chunks]."""
    index = np.arange(stages * chunks)
    if schedule in FOLDED:
        return np.minimum(index, 2 * stages - 1 - index)
    return index % stages


def order(schedule: str, stages: int, chunks: int, micro_batches: int) -> Order:
    """The actions of every rank in the order it runs them. Raises UsageError for chunks the schedule cannot have."""
    if schedule not in SCHEDULES:
        raise UsageError(f"schedule is {schedule!r}", hint=f"one of {', '.join(SCHEDULES)}")
    if min(stages, chunks, micro_batches) < 1:
        raise UsageError(
            f"{stages} stages, {chunks} chunks, {micro_batches} micro-batches: expected 1 or more"
        )
    expected = 2 if schedule in FOLDED else chunks if schedule == "interleaved" else 1
    if chunks != expected:
        raise UsageError(
            f"{schedule} has {expected} chunk(s) per rank, found {chunks}", hint=f"vpp={expected}"
        )
    return [SCHEDULES[schedule](rank, stages, chunks, micro_batches) for rank in range(stages)]


def _gpipe(rank: int, stages: int, chunks: int, micro_batches: int) -> list[Action]:
    return [Action(kind, rank, k) for kind in "FB" for k in range(micro_batches)]


def _one_f_one_b(rank: int, stages: int, chunks: int, micro_batches: int) -> list[Action]:
    forwards = [Action("F", rank, k) for k in range(micro_batches)]
    backwards = [Action("B", rank, k) for k in range(micro_batches)]
    return _alternate(forwards, backwards, stages - 1 - rank)


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    steady = zip(forwards[warmup:], backwards, strict=False)
    pairs = [action for pair in steady for action in pair]
    return forwards[:warmup] + pairs + backwards[len(forwards) - warmup :]


def group_sizes(stages: int, micro_batches: int) -> list[int]:
    """Micro-batches that pass a chunk together in the interleaved order, before the next chunk has its turn.

    Megatron's groups are of `stages`. Where that does not divide, a small group would leave bubbles on every rank,
    so the remainder is spread over the groups, larger ones first. torch does the same where the remainder spreads
    evenly and refuses otherwise; Megatron allows groups larger than `stages` but no smaller last one.
    """
    groups = max(1, micro_batches // stages)
    return [micro_batches // groups + (g < micro_batches % groups) for g in range(groups)]


def _interleaved(rank: int, stages: int, chunks: int, micro_batches: int) -> list[Action]:
    if chunks == 1:
        return _one_f_one_b(rank, stages, chunks, micro_batches)
    forwards, backwards, first = [], [], 0
    sizes = group_sizes(stages, micro_batches)
    for size in sizes:
        group = range(first, first + size)
        first += size
        forwards += [Action("F", c * stages + rank, k) for c in range(chunks) for k in group]
        backwards += [Action("B", c * stages + rank, k) for c in reversed(range(chunks)) for k in group]
    return _alternate(forwards, backwards, 2 * (stages - 1 - rank) + (chunks - 1) * sizes[0])


def _zb_h1(rank: int, stages: int, chunks: int, micro_batches: int) -> list[Action]:
    """1f1b whose rank r puts off r weight gradients: with the `stages - r` in flight the memory of rank 0."""
    inputs = _one_f_one_b(rank, stages, chunks, micro_batches)
    actions: list[Action] = []
    for action in inputs:
        if action.kind == "F":
            actions.append(action)
            continue
        actions.append(action._replace(kind="I"))
        if action.micro_batch >= rank:
            actions.append(Action("W", rank, action.micro_batch - rank))
    return actions + [Action("W", rank, k) for k in range(max(0, micro_batches - rank), micro_batches)]


class _Counter:
    """Appends actions of two chunks to a list, each kind with its next micro-batch; the ones past the end are void."""

    def __init__(self, rank: int, stages: int, micro_batches: int) -> None:
        self.chunk = (rank, 2 * stages - 1 - rank)
        self.micro_batches = micro_batches
        self.next = {(kind, half): 0 for kind in "FIW" for half in (0, 1)}
        self.waiting: list[tuple[int, int]] = []
        self.actions: list[Action] = []

    def add(self, *words: str) -> None:
        """`F0`: the next forward of the first chunk; `W` (`W0`): the weight gradient put off longest (of it), if any."""
        for word in words:
            if word[0] == "W":
                due = [wait for wait in self.waiting if word in ("W", f"W{wait[0]}")][:1]
                for half, k in due:
                    self.waiting.remove((half, k))
                    self._append("W", half, k)
                continue
            kind, half = word[0], int(word[1])
            k = self.next["I" if kind == "B" else kind, half]
            self.next["I" if kind == "B" else kind, half] += 1
            if kind == "I":
                self.waiting.append((half, k))
            self._append(kind, half, k)

    def pair(self, forward: str, backward: str) -> None:
        before = len(self.actions)
        self.add(forward, backward)
        if len(self.actions) == before + 2:
            self.actions[before] = self.actions[before]._replace(paired=True)

    def _append(self, kind: str, half: int, k: int) -> None:
        if k < self.micro_batches:
            self.actions.append(Action(kind, self.chunk[half], k))


def _zbv(rank: int, stages: int, chunks: int, micro_batches: int) -> list[Action]:
    c = _Counter(rank, stages, micro_batches)
    full, rest = max(2 * stages - 1, micro_batches), stages - rank
    c.add(*["F0"] * (2 * rest - 1), *["F1", "F0"] * rank, *["F1", "I1", "W"] * rest)
    while c.next["F", 1] < c.next["F", 0] or c.next["F", 0] < full:
        if c.next["F", 0] < full:
            c.add("F0")
        c.add("I0", "W", "F1", "I1", "W")
    c.add(*["I0", "I1"] * rank)
    c.add(*["I0", "W0"] * rest, *["W1"] * rank, *["W0"] * rank)
    return c.actions


def _dualpipev(rank: int, stages: int, chunks: int, micro_batches: int) -> list[Action]:
    c = _Counter(rank, stages, micro_batches)
    full, rest = max(2 * stages, micro_batches), stages - 1 - rank
    c.add(*["F0"] * (2 * rest), *["F0", "F1"] * (rank + 1), *["I1", "W", "F1"] * rest)
    for step in range(full - 2 * stages + rank + 1):
        if step == 0 and rank == stages - 1:
            c.add("F0", "B1")  # not overlapped, which makes the bubble smaller
        else:
            c.pair("F0", "B1")
        c.pair("F1", "B0")
    for _ in range(rest):
        c.add("B1")
        c.pair("F1", "B0")
    # The second half of these backwards is split, to fill the end with weight gradients.
    words = [f"{'B' if index <= rank else 'I'}{1 - index % 2}" for index in range(2 * (rank + 1))]
    c.add(*words)
    c.add(*["W", "I0" if words[-1][0] == "I" else "B0"] * rest, *["W"] * (rank + 1))
    return c.actions


SCHEDULES: dict[str, Callable[[int, int, int, int], list[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "zb-h1": _zb_h1,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}
