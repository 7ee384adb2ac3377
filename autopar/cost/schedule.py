"""Pipeline schedules as data: who runs what in which order, how long it takes, what it must at least take.

In:  a schedule's name, stages (ranks of the pipeline), chunks (virtual stages of a rank), micro-batches, seconds.
Out: orders (a list of Actions per rank), a Timeline of one, seconds in closed form, lower bounds, a cut of layers.

    simulate(order("1f1b", 2, 1, 2), [1, 1], [1, 1], [1, 1], send_s=0).makespan_s  ->  9.0

    rank 0  F0 F1 .  B0 B0 .  B1 B1           F  forward of a micro-batch through one chunk
    rank 1     F0 B0 B0 F1 B1 B1              B  its whole backward; I and W are B's two halves: the gradient of the
                                                 input, which the stage before waits for, and of the weights

schedule_order.py  the orders
schedule.py        the event simulator, which takes any order and any seconds
schedule_time.py   closed forms for stages that are alike, and bounds that hold for every order
schedule_cut.py    how many layers each virtual stage gets
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.cost.schedule_cut import cut, cut_bound_s
from autopar.cost.schedule_order import FOLDED, SCHEDULES, Action, Order, group_sizes, order, placement
from autopar.cost.schedule_time import bound_s, in_flight, step_s
from autopar.errors import UsageError

__all__ = [
    "FOLDED",
    "SCHEDULES",
    "Action",
    "Order",
    "Timeline",
    "bound_s",
    "cut",
    "cut_bound_s",
    "group_sizes",
    "in_flight",
    "order",
    "placement",
    "simulate",
    "step_s",
]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Timeline:
    """When every action of an order ran.

    makespan_s      seconds from the first action's start to the last one's end
    events          per rank, (start, end, Action) in order
    busy_s          per rank, seconds in which it computes; shape [ranks]
    peak_in_flight  per rank, the most micro-batch x chunk activations alive: from F's end to the end of B or W
    peak_waiting    per rank, the most of them that wait between I and W
    """

    makespan_s: float
    events: list[list[tuple[float, float, Action]]]

    @cached_property
    def busy_s(self) -> Floats:
        return np.array([_busy_s(log) for log in self.events])

    @cached_property
    def _most(self) -> NDArray[np.int64]:
        return np.array([_peaks([action for _, _, action in log]) for log in self.events])

    @property
    def peak_in_flight(self) -> NDArray[np.int64]:
        return self._most[:, 0]

    @property
    def peak_waiting(self) -> NDArray[np.int64]:
        return self._most[:, 1]

    @property
    def bubble(self) -> float:
        """The part of the ranks' time, 0 to 1, in which they do not compute."""
        return 1 - float(self.busy_s.sum()) / (len(self.events) * self.makespan_s) if self.makespan_s else 0.0


def simulate(
    order: Order,
    forward: ArrayLike,
    backward_input: ArrayLike,
    backward_weight: ArrayLike,
    send_s: ArrayLike = 0.0,
    *,
    overlap: float = 0.0,
) -> Timeline:
    """Run `order`, each rank in its order and each action as soon as what it needs has come.

    `forward`, `backward_input`, `backward_weight`: seconds, shape [virtual stages]; a whole backward takes the sum
    of its halves. `send_s`: seconds of a hop between virtual stages on different ranks, one number or shape
    [virtual stages - 1]; transfers occupy no rank. `overlap`, 0 to 1: how much of the shorter one a paired forward
    and backward hide; they then start together. Raises UsageError for an order that cannot go on.
    """
    f, i, w = (
        np.asarray(values, dtype=float).tolist() for values in (forward, backward_input, backward_weight)
    )
    stages, virtual = len(order), len(f)
    micro_batches = 1 + max((action.micro_batch for actions in order for action in actions), default=0)
    rank_of = [0] * virtual
    for rank, actions in enumerate(order):
        for action in actions:
            rank_of[action.chunk] = rank
    sends = np.broadcast_to(np.asarray(send_s, dtype=float), (max(virtual - 1, 0),)).tolist()
    sends = [s if rank_of[v] != rank_of[v + 1] else 0.0 for v, s in enumerate(sends)]
    cost = {"F": f, "I": i, "W": w, "B": [a + b for a, b in zip(i, w, strict=True)]}
    # Ends by kind of result: 2 * (virtual stage * micro_batches + k) a forward's, + 1 an input gradient's.
    never = -1.0
    ends = [never] * (2 * virtual * micro_batches)
    waits: dict[int, list[int]] = {}
    events: list[list[tuple[float, float, Action]]] = [[] for _ in order]
    clock, at = [0.0] * stages, [0] * stages
    last = virtual - 1

    ready = list(range(stages))
    while ready:
        rank = ready.pop()
        actions, log, now, position = order[rank], events[rank], clock[rank], at[rank]
        joint = -1.0  # when the forward of the pair that is running started
        while position < len(actions):
            action = actions[position]
            kind, v, k, paired = action
            slot = 2 * (v * micro_batches + k)
            needs = _needs(kind, v, slot, micro_batches, last, sends)
            if overlap and paired:
                after, u, j, _ = actions[position + 1]
                needs = needs + _needs(after, u, 2 * (u * micro_batches + j), micro_batches, last, sends)
            start, blocked = now, -1
            for source, delay in needs:
                end = ends[source]
                if end == never:
                    blocked = source
                    break
                if end + delay > start:
                    start = end + delay
            if blocked >= 0:
                waits.setdefault(blocked, []).append(rank)
                break
            seconds = cost[kind][v]
            if overlap and paired:
                other = cost[after][u]
                seconds = seconds + other - overlap * min(seconds, other)
                joint = start
            elif joint >= 0:
                start, seconds, joint = joint, now - joint, -1.0
            now = start + seconds
            log.append((start, now, action))
            position += 1
            if kind != "W":
                result = slot if kind == "F" else slot + 1
                ends[result] = now
                if waits and result in waits:
                    ready += waits.pop(result)
        clock[rank], at[rank] = now, position
    for rank, actions in enumerate(order):
        if at[rank] < len(actions):
            raise UsageError(f"rank {rank} waits for ever to run {actions[at[rank]]}", where="pipeline order")

    return Timeline(makespan_s=max(clock), events=events)


def _needs(
    kind: str, v: int, slot: int, micro_batches: int, last: int, sends: list[float]
) -> tuple[tuple[int, float], ...]:
    """The results that an action needs, each with the seconds it takes to come."""
    if kind == "F":
        return ((slot - 2 * micro_batches, sends[v - 1]),) if v else ()
    if kind == "W":
        return ((slot + 1, 0.0),)
    if v == last:
        return ((slot, 0.0),)
    return ((slot, 0.0), (slot + 1 + 2 * micro_batches, sends[v]))


def _busy_s(log: list[tuple[float, float, Action]]) -> float:
    busy = until = 0.0
    for start, end, _ in log:
        busy += end - max(start, until)
        until = end
    return busy


def _peaks(actions: list[Action]) -> tuple[int, int]:
    """Peaks of what is alive and of what waits between I and W: a rank's order alone decides them."""
    alive = waiting = most_alive = most_waiting = 0
    for kind, *_ in actions:
        alive += {"F": 1, "I": 0, "B": -1, "W": -1}[kind]
        waiting += {"F": 0, "I": 1, "B": 0, "W": -1}[kind]
        most_alive, most_waiting = max(most_alive, alive), max(most_waiting, waiting)
    return most_alive, most_waiting
