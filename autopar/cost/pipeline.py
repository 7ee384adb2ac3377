"""Pipeline: one layout's virtual stages in seconds, their cut, and the event-by-event time of its step.

In:  a Workload, a Layout, a Cluster, a Software, sequences per step.
Out: Stages (layers and seconds of every virtual stage), a Priced (kinds of time with the simulated pipeline).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Cluster
from autopar.cost import schedule
from autopar.cost.estimate import estimate
from autopar.cost.grid import Array, Grid
from autopar.cost.held import held
from autopar.cost.layer_time import Ends
from autopar.cost.layout_bound import OUTSIDE, step_of
from autopar.cost.layout_memory import ACTIVATIONS, GRADIENTS, STATES, WEIGHTS
from autopar.cost.layout_time import BUBBLE, OTHER, LayoutTime
from autopar.cost.software import Software
from autopar.layout import SCHEDULES, Layout
from autopar.workload import Workload

# Kinds of memory that grow with the layers of a rank.
PER_LAYER = (WEIGHTS, GRADIENTS, STATES, ACTIVATIONS)
Floats = NDArray[np.float64]
_STEADY = 3  # times the stages: after so many micro-batches a schedule nearly repeats itself
_SIMULATED = 2048  # micro-batches times virtual stages that are simulated in any case
_AT_ONCE = 2_000_000  # numbers in an array


_order = lru_cache(maxsize=4)(schedule.order)  # of layouts in turn, many have the same


@dataclass(frozen=True)
class Stages:
    """Per virtual stage: `layers`, and seconds of one micro-batch forward, input and weight gradient, with the
    traffic that nothing hides; `send_s`: one hop; `micro_batches` per data rank."""

    layers: tuple[int, ...]
    forward: Floats
    inputs: Floats
    weights: Floats
    send_s: float
    micro_batches: int

    def bound_s(self, layout: Layout) -> float:
        """No order of this placement is faster."""
        if layout.pp == 1:
            return float(self.micro_batches * (self.forward + self.inputs + self.weights).sum())
        return float(
            _bound_s(layout.schedule, layout.pp, layout.vpp, self.micro_batches, self.forward, self.inputs, self.weights,
                     self.send_s)
        )  # fmt: skip

    def simulate(self, layout: Layout) -> tuple[float, schedule.Timeline]:
        """(seconds of all micro-batches, the Timeline). Of very many micro-batches the first few are run, and what
        each further one adds in the steady state, no less than the busiest rank's work, is added to the time."""
        stages = layout.pp
        least = max(_STEADY, _SIMULATED // (stages * stages * layout.vpp))
        count = self.micro_batches
        if count > (least + 1) * stages:
            count = least * stages + count % stages
        line = self._run(layout, count)
        if count == self.micro_batches:
            return line.makespan_s, line
        before = self._run(layout, count - stages)
        work = (self.forward + self.inputs + self.weights).tolist()
        busiest = np.bincount(schedule.placement(layout.schedule, stages, layout.vpp), work).max()
        steady = max((line.makespan_s - before.makespan_s) / stages, float(busiest))
        whole = line.makespan_s + steady * (self.micro_batches - count)
        return max(whole, self.bound_s(layout)), line

    def _run(self, layout: Layout, count: int) -> schedule.Timeline:
        order = _order(layout.schedule, layout.pp, layout.vpp, count)
        return schedule.simulate(order, self.forward, self.inputs, self.weights, self.send_s)


def _bound_s(
    name: str, stages: int, chunks: int, micro_batches: int | Floats, *seconds: float | Floats
) -> Floats:
    """Seconds that no order of a schedule's placement goes below; see `schedule.bound_s`."""
    return schedule.bound_s(
        stages, chunks, micro_batches, *seconds,
        folded=name in schedule.FOLDED, split=name not in ("gpipe", "1f1b", "interleaved"),
    )  # fmt: skip


@dataclass(frozen=True)
class Priced:
    """One layout: seconds by kind, bytes by kind on the fullest rank, its stages and simulated timeline."""

    layout: Layout
    time_s: dict[str, float]
    memory_bytes: dict[str, float]
    micro_batches: int
    stages: Stages
    timeline: schedule.Timeline | None

    @property
    def step_s(self) -> float:
        return sum(self.time_s.values())

    @property
    def memory_total(self) -> float:
        return sum(self.memory_bytes.values())


class Pipelines:
    """The virtual stages of many layouts of one workload, which share their layers' prices."""

    def __init__(
        self, workload: Workload, grid: Grid, cluster: Cluster, software: Software, batch: int
    ) -> None:
        self.workload, self.grid, self.software = workload, grid, software
        self.micro_batches = np.maximum(1.0, batch / (grid.dp * grid.mbs))
        model = LayoutTime(workload, grid, held(workload, grid), cluster, software, self.micro_batches)
        self.send_s = model.send_s()
        self.ends = model.ends()
        kinds: dict[int, Floats] = {}
        for layer, _ in workload.layers:
            if id(layer) not in kinds:
                one = model.layer(layer)
                half = (one.tensor + one.context + one.expert) / 2
                kinds[id(layer)] = np.stack(
                    [one.f + half, one.b + one.again + one.hidden + half, one.w], axis=-1
                )
        self.runs = [(count, kinds[id(layer)]) for layer, count in workload.layers]

    def stages(self, index: int, layout: Layout) -> Stages:
        """The stages of the grid's row `index`, which is `layout`."""
        rows = np.array([index])
        cuts = layout.cuts or self.cuts(rows)[0][0]
        seconds, send = self._seconds(rows, cuts)
        return Stages(
            cuts, seconds[0, :, 0], seconds[0, :, 1], seconds[0, :, 2],
            float(send[0]), int(self.micro_batches[index]),
        )  # fmt: skip

    def bounds_s(self, rows: Array) -> Floats:
        """`Stages.bound_s` of some rows with pipelines."""
        g, out = self.grid, np.zeros(len(rows))
        cuts, place = self.cuts(rows)
        _, place = np.unique(np.stack([place, g.schedule[rows]]), axis=1, return_inverse=True)
        every = max(1, _AT_ONCE // (3 * self.workload.depth))
        for group in np.split(np.argsort(place, kind="stable"), np.cumsum(np.bincount(place))[:-1]):
            for start in range(0, len(group), every):
                some = group[start : start + every]
                first = rows[some[0]]
                name = SCHEDULES[int(g.schedule[first])]
                seconds, send = self._seconds(rows[some], cuts[some[0]])
                out[some] = _bound_s(
                    name, int(g.pp[first]), int(g.vpp[first]), self.micro_batches[rows[some], None],
                    seconds[..., 0], seconds[..., 1], seconds[..., 2], send[:, None],
                )  # fmt: skip
        return out

    def cuts(self, rows: Array) -> tuple[list[tuple[int, ...]], Array]:
        """(layers per virtual stage of each row, which rows are cut alike): so that the busiest rank has the least to
        do, by seconds to a thousandth of the longest layer's, so that layouts that differ by less are cut alike."""
        g, ends = self.grid, self.ends
        layers = np.stack([seconds[rows].sum(axis=-1) for _, seconds in self.runs], axis=-1)
        extra = np.stack([(ends.first_f + ends.first_b)[rows], (ends.last_f + ends.last_b)[rows]], axis=-1)
        longest = layers.max(axis=-1, keepdims=True)
        keys = [g.pp[rows, None], g.vpp[rows, None], g.schedule[rows, None]]
        keys += [np.rint(1000 * layers / longest), np.rint(10 * extra / longest)]
        distinct, place = np.unique(
            np.concatenate(keys, axis=-1).astype(np.int64), axis=0, return_inverse=True
        )
        counts = [count for count, _ in self.runs]
        cut = [_cut(tuple(key.tolist()), tuple(counts)) for key in distinct]
        return [cut[which] for which in place.ravel()], place.ravel()

    def _seconds(self, rows: Array, cuts: tuple[int, ...]) -> tuple[Floats, Floats]:
        """(seconds [row, virtual stage, (forward, input, weight gradients)], of a hop) of rows that are cut alike."""
        ends = Ends(*(part[rows] for part in self.ends))
        send = np.where(self.grid.pp[rows] > 1, self.send_s[rows], 0.0)
        blocking = send * self.software.pp_exposed
        before = np.cumsum([0, *(count for count, _ in self.runs)])
        edges = np.cumsum([0, *cuts])
        seconds = np.zeros((len(rows), len(cuts), 3))
        for index, (_, one) in enumerate(self.runs):
            low, high = np.clip(edges[:-1], before[index], None), np.clip(edges[1:], None, before[index + 1])
            seconds += np.maximum(high - low, 0)[:, None] * one[rows][:, None, :]
        seconds[..., :2] += blocking[:, None, None]
        seconds[:, 0, 0] += ends.first_f
        seconds[:, 0, 1] += ends.first_b
        seconds[:, -1, 0] += ends.last_f
        seconds[:, -1, 1:] += ends.last_b[:, None] / 2
        return seconds, send


@lru_cache(maxsize=4096)
def _cut(key: tuple[int, ...], counts: tuple[int, ...]) -> tuple[int, ...]:
    """The cut for stages, chunks, the code of a schedule, thousandths of the longest layer's seconds of each run of
    layers, and tenths of both ends'."""
    stages, chunks, code, *layers, first, last = key
    if stages == 1:
        return (sum(counts),)
    runs = [(layer / 1000, count) for layer, count in zip(layers, counts, strict=True)]
    cut = partial(
        schedule.cut, runs, stages, chunks,
        schedule=SCHEDULES[code], first_extra=first / 10, last_extra=last / 10, minimum=0,
    )  # fmt: skip
    best = cut()
    # no rank may hold more layers than the memory of a layout is counted with
    layout = Layout(pp=stages, vpp=chunks, schedule=SCHEDULES[code], cuts=best)
    if overfull(layout, sum(counts)) == 1.0:
        return best
    ranks = schedule.placement(SCHEDULES[code], stages, chunks)
    even = [sum(counts) // len(ranks)] * len(ranks)
    for _ in range(sum(counts) - sum(even)):  # one layer more where the rank has fewest
        held_layers = np.bincount(ranks, weights=np.array(even, dtype=float))
        even[min(range(len(ranks)), key=lambda at: (held_layers[ranks[at]], even[at], at))] += 1
    return tuple(even)


def overfull(layout: Layout, depth: int) -> float:
    """Layers on the fullest rank of a layout with its own cuts, over those of an even cut; 1 without cuts."""
    if not layout.cuts or layout.pp == 1:
        return 1.0
    ranks = schedule.placement(layout.schedule, layout.pp, layout.vpp)
    held_layers = np.bincount(ranks, weights=np.array(layout.cuts, dtype=float))
    return max(1.0, float(held_layers.max()) / -(-depth // layout.pp))


def stages_of(workload: Workload, layout: Layout, cluster: Cluster, software: Software, batch: int) -> Stages:
    """Cut the layers over the virtual stages (as `layout.cuts` says, else as evenly in seconds as they go)."""
    return Pipelines(workload, Grid.of([layout]), cluster, software, batch).stages(0, layout)


def price(workload: Workload, layout: Layout, cluster: Cluster, software: Software, batch: int) -> Priced:
    """One layout, its pipeline simulated event by event. Everything but the pipeline is the closed form's."""
    stages = stages_of(workload, layout, cluster, software, batch)
    span, line = stages.simulate(layout) if layout.pp > 1 else (0.0, None)
    return priced(workload, layout, cluster, software, batch, stages, span, line)


def priced(
    workload: Workload,
    layout: Layout,
    cluster: Cluster,
    software: Software,
    batch: int,
    stages: Stages,
    span: float,
    line: schedule.Timeline | None,
) -> Priced:
    """The layout's closed form with a pipeline of `span` seconds: what a rank computes and sends stays, the rest of
    the span is waiting. Without a pipeline `span` is not used."""
    found = estimate(workload, Grid.of([layout]), cluster, software, batch)
    times = {kind: float(seconds[0]) for kind, seconds in found.time_s.items()}
    memory = {kind: float(size[0]) for kind, size in found.memory_bytes.items()}
    if layout.pp > 1:
        whole = float(step_of(found.time_s, software, np.array([span]))[0])
        outside = (BUBBLE, OTHER, *OUTSIDE)
        work = sum(seconds for kind, seconds in times.items() if kind not in outside)
        fit = min(1.0, span / work)
        times = {kind: seconds if kind in outside else seconds * fit for kind, seconds in times.items()}
        times[BUBBLE] = span - work * fit
        times[OTHER] = whole - span - sum(times[kind] for kind in OUTSIDE)
    chosen = replace(layout, cuts=stages.layers if layout.pp > 1 else layout.cuts)
    more = overfull(chosen, workload.depth)
    memory = {kind: size * (more if kind in PER_LAYER else 1.0) for kind, size in memory.items()}
    return Priced(chosen, times, memory, stages.micro_batches, stages, line)
