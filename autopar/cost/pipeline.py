"""Pipeline: one layout's virtual stages in seconds, their cut, and the event-by-event time of its step.

In:  a Workload, a Layout, a Cluster, a Software, sequences per step.
Out: Stages (layers and seconds of every virtual stage), a Priced (kinds of time with the simulated pipeline).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Cluster
from autopar.cost import schedule
from autopar.cost.estimate import estimate
from autopar.cost.grid import Grid
from autopar.cost.held import held
from autopar.cost.layout_bound import OUTSIDE, step_of
from autopar.cost.layout_time import BUBBLE, OTHER, LayoutTime
from autopar.cost.software import Software
from autopar.layout import Layout
from autopar.workload import Workload

Floats = NDArray[np.float64]
_STEADY = 3  # times the stages: after so many micro-batches every schedule repeats itself


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
            schedule.bound_s(
                layout.pp, layout.vpp, self.micro_batches, self.forward, self.inputs, self.weights, self.send_s,
                folded=layout.schedule in schedule.FOLDED, split=layout.schedule not in ("gpipe", "1f1b", "interleaved"),
            )
        )  # fmt: skip

    def simulate(self, layout: Layout) -> tuple[float, schedule.Timeline]:
        """(seconds of all micro-batches, the Timeline). Of very many micro-batches the first few are run, and what
        each further one adds in the steady state is added to the time."""
        stages = layout.pp
        count = self.micro_batches
        if count > (_STEADY + 1) * stages:
            count = _STEADY * stages + count % stages
        line = self._run(layout, count)
        if count == self.micro_batches:
            return line.makespan_s, line
        before = self._run(layout, count - stages)
        steady = (line.makespan_s - before.makespan_s) / stages
        return line.makespan_s + steady * (self.micro_batches - count), line

    def _run(self, layout: Layout, count: int) -> schedule.Timeline:
        order = schedule.order(layout.schedule, layout.pp, layout.vpp, count)
        return schedule.simulate(order, self.forward, self.inputs, self.weights, self.send_s)


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
        ends = self.ends
        first_f, first_b, last_f, last_b = (
            float(part[index]) for part in (ends.first_f, ends.first_b, ends.last_f, ends.last_b)
        )
        runs = [(count, seconds[index]) for count, seconds in self.runs]
        send = float(self.send_s[index]) if layout.pp > 1 else 0.0
        blocking = send * self.software.pp_exposed
        cuts = layout.cuts or even_cuts(
            [(float(seconds.sum()), count) for count, seconds in runs],
            layout,
            first_f + first_b,
            last_f + last_b,
        )
        per_layer = np.repeat(
            np.array([seconds for _, seconds in runs]), [count for count, _ in runs], axis=0
        )
        edges = np.concatenate([[0], np.cumsum(cuts)])
        sums = np.concatenate([np.zeros((1, 3)), np.cumsum(per_layer, axis=0)])
        seconds = sums[edges[1:]] - sums[edges[:-1]] + np.array([blocking, blocking, 0.0])
        seconds[0] += (first_f, first_b, 0.0)
        seconds[-1] += (last_f, last_b / 2, last_b / 2)
        return Stages(
            tuple(int(cut) for cut in cuts), seconds[:, 0], seconds[:, 1], seconds[:, 2],
            send, int(self.micro_batches[index]),
        )  # fmt: skip


def even_cuts(
    runs: list[tuple[float, int]], layout: Layout, first_s: float, last_s: float
) -> tuple[int, ...]:
    """Layers per virtual stage, so that the busiest rank has the least to do; by seconds to a thousandth of a layer's,
    so that layouts that differ by less are cut alike."""
    if layout.pp == 1:
        return (sum(count for _, count in runs),)
    longest = max(seconds for seconds, _ in runs)
    relative = tuple((round(seconds / longest, 3), count) for seconds, count in runs)
    return _cut(
        relative,
        layout.pp,
        layout.vpp,
        layout.schedule,
        round(first_s / longest, 2),
        round(last_s / longest, 2),
    )


@lru_cache(maxsize=4096)
def _cut(
    runs: tuple[tuple[float, int], ...], stages: int, chunks: int, name: str, first: float, last: float
) -> tuple[int, ...]:
    return tuple(
        schedule.cut(runs, stages, chunks, schedule=name, first_extra=first, last_extra=last, minimum=0)
    )


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
        whole = float(step_of(found, software, np.array([span]))[0])
        outside = (BUBBLE, OTHER, *OUTSIDE)
        work = sum(seconds for kind, seconds in times.items() if kind not in outside)
        fit = min(1.0, span / work)
        times = {kind: seconds if kind in outside else seconds * fit for kind, seconds in times.items()}
        times[BUBBLE] = span - work * fit
        times[OTHER] = whole - span - sum(times[kind] for kind in OUTSIDE)
    cuts = stages.layers if layout.pp > 1 else layout.cuts
    return Priced(replace(layout, cuts=cuts), times, memory, stages.micro_batches, stages, line)
