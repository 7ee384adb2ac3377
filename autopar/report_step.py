"""Report step: the predicted step of a plan, action by action, with the memory that each pipeline rank holds.

In:  a Plan with a layout and a workload.
Out: a Step: what every pipeline rank runs and when, what follows the pipeline, and bytes over time; None without those.

    step = predicted_step(plan, most_actions=4000); step.ranks[0].actions[0]  ->  (0.0, 0.013, F of micro-batch 0)

All of it is the cost model's own: `price` and `stages_of` say how long an action takes, the simulator when it runs,
`layout_memory.timeline` what a rank holds at each moment. Of a long step the first micro-batches are run and then
drained, so that filling, a part of the steady state and draining are all there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Cluster
from autopar.cost import schedule
from autopar.cost.grid import Grid
from autopar.cost.kept import in_flight, saved_of_run
from autopar.cost.layout_memory import ACTIVATIONS, BUFFERS, LOGITS, RESERVED, timeline
from autopar.cost.layout_time import (
    AGAIN,
    BACKWARD,
    CONTEXT,
    DATA,
    EXPERT,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PIPELINE,
    TENSOR,
)
from autopar.cost.pipeline import Priced, price
from autopar.cost.schedule import Action
from autopar.cost.software import Software, default_software, load_software
from autopar.layout import Layout
from autopar.passes.decisions import parse_decisions
from autopar.passes.layout_mixed import search_mixed
from autopar.passes.layout_space import Space
from autopar.plans import Plan
from autopar.workload import Workload

Event = tuple[float, float, Action]
Change = tuple[float, float]  # (second, bytes held from then on)
_COLLECTIVES = (TENSOR, CONTEXT, EXPERT)


@dataclass(frozen=True)
class RankStep:
    """One pipeline rank: its actions in order; `stored_bytes`: what lies there all the time; `held`: (second, bytes)
    at every change; `chunks`: virtual stage -> layers."""

    actions: tuple[Event, ...]
    stored_bytes: float
    held: tuple[Change, ...]
    chunks: dict[int, int]

    @property
    def peak_bytes(self) -> float:
        return max(size for _, size in self.held)


@dataclass(frozen=True)
class Step:
    """`shown` of `micro_batches` are run; they end at `span_s`, then comes `after`: (kind, seconds). `exposed`: action
    kind -> the share of it in which the rank waits for collectives; `send_s`: a hop from rank to rank."""

    priced: Priced
    ranks: tuple[RankStep, ...]
    micro_batches: int
    shown: int
    span_s: float
    after: tuple[tuple[str, float], ...]
    exposed: dict[str, float]
    send_s: float

    @property
    def layout(self) -> Layout:
        return self.priced.layout

    @property
    def end_s(self) -> float:
        return self.span_s + sum(seconds for _, seconds in self.after)

    @cached_property
    def fullest(self) -> int:
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].peak_bytes)

    def rank_of_chunk(self, chunk: int) -> int:
        return next(rank for rank, step in enumerate(self.ranks) if chunk in step.chunks)


def predicted_step(plan: Plan, most_actions: int, per_rank: int | None = None) -> Step | None:
    """The step in at most about `most_actions` actions, and with `per_rank` in about so many on a rank, or two turns
    of the pipeline if those are more; None if the plan has no layout or no workload. Raises
    UsageError for a stack that this version does not know."""
    if plan.layout is None or plan.workload is None:
        return None
    workload, cluster = plan.parsed_workload, plan.parsed_cluster
    software = load_software(plan.software) if plan.software else default_software(cluster.device.name)
    priced = _priced(workload, plan.parsed_layout, cluster, software, plan.data.batch)
    layout, stages = priced.layout, priced.stages
    count = _shown(layout, stages.micro_batches, most_actions, per_rank)
    order = schedule.order(layout.schedule, layout.pp, layout.vpp, count)
    line = schedule.simulate(order, stages.forward, stages.inputs, stages.weights, stages.send_s)
    place = schedule.placement(layout.schedule, layout.pp, layout.vpp).tolist()
    times = priced.time_s
    ranks = []
    memory = _Memory(workload, priced, cluster, software, plan.data.batch)
    for rank, events in enumerate(line.events):
        chunks = {chunk: stages.layers[chunk] for chunk, where in enumerate(place) if where == rank}
        ranks.append(memory.rank(rank, tuple(events), chunks, line.makespan_s))
    return Step(
        priced=priced,
        ranks=tuple(ranks),
        micro_batches=stages.micro_batches,
        shown=count,
        span_s=line.makespan_s,
        after=tuple((kind, times[kind]) for kind in (DATA, OPTIMIZER, OTHER) if times.get(kind, 0.0) > 0),
        exposed=_exposed(times, float(stages.inputs.sum()), float(stages.weights.sum())),
        send_s=stages.send_s,
    )


def _priced(workload: Workload, layout: Layout, cluster: Cluster, software: Software, batch: int) -> Priced:
    """The layout's price; on unlike nodes with every stage at the speed of its pool, if the planner can lay it so."""
    if cluster.mixed and layout.pp > 1:
        names = ("dp", "tp", "cp", "pp", "ep", "etp", "zero", "mbs", "recompute", "precision", "schedule")
        words = parse_decisions([f"{name}={getattr(layout, name)}" for name in names])
        found = search_mixed(Space(workload, cluster, batch, words, (layout.precision,)), software)
        if found is not None:
            return found.best
    return price(workload, layout, cluster, software, batch)


def _shown(layout: Layout, micro_batches: int, most_actions: int, per_rank: int | None) -> int:
    """Micro-batches to run: all if they are few enough, else what fits, in whole turns of the pipeline."""
    each = layout.pp * layout.vpp * (2 if layout.schedule in ("gpipe", "1f1b", "interleaved") else 3)
    most = most_actions // each
    if per_rank is not None:
        most = min(most, max(per_rank * layout.pp // each, 2 * layout.pp))
    if micro_batches <= most:
        return micro_batches
    return most // layout.pp * layout.pp or max(1, most)


def _exposed(times: dict[str, float], inputs_s: float, weights_s: float) -> dict[str, float]:
    """Half of the collectives that nothing hides lies in forwards, half in backwards (as Pipelines puts them)."""
    half = sum(times.get(kind, 0.0) for kind in _COLLECTIVES) / 2
    sending = times.get(PIPELINE, 0.0) / 2
    forward = times[FORWARD] + half + sending
    backward = times[BACKWARD] + times[AGAIN] + half + sending
    inputs = backward * inputs_s / max(inputs_s + weights_s, 1e-30)
    return {
        "F": half / forward if forward else 0.0,
        "B": half / backward if backward else 0.0,
        "I": min(1.0, half / inputs) if inputs else 0.0,
        "W": 0.0,
    }


class _Memory:
    """Bytes over time, from the moments of layout_memory and what each layer keeps."""

    def __init__(
        self, workload: Workload, priced: Priced, cluster: Cluster, software: Software, batch: int
    ) -> None:
        layout = priced.layout
        grid = Grid.of([layout.with_(cuts=())])
        self.layout, self.fragmentation, self.depth = layout, software.fragmentation, workload.depth
        kept = [
            (float(saved_of_run(layer, workload, grid, software)[0]), count)
            for layer, count in workload.layers
        ]
        self.layers = np.repeat([size for size, _ in kept], [count for _, count in kept])
        # what the prediction counts beside tensors: a share of what comes and goes, and the device's own
        moving = sum(priced.memory_bytes[kind] for kind in (ACTIVATIONS, LOGITS, BUFFERS))
        self.device = max(0.0, priced.memory_bytes[RESERVED] - self.fragmentation * moving)
        micro_batches = np.array([max(1.0, batch / (layout.dp * layout.mbs))])
        self.moments: dict[str, dict[str, dict[str, float]]] = {}
        self.flight: dict[str, float] = {}
        for place, rank in (("first", 0), ("middle", min(1, layout.pp - 1)), ("last", layout.pp - 1)):
            found = timeline(workload, layout, cluster, software, batch, rank=place, kind="allocated")
            self.moments[place] = dict(found)
            self.flight[place] = float(in_flight(grid, micro_batches, np.array([rank]))[0])

    def rank(self, rank: int, events: tuple[Event, ...], chunks: dict[int, int], end_s: float) -> RankStep:
        """What a rank holds: what is stored; the activations of a chunk from its forward's end to its backward's
        end; the logits from the last forward's end to its backward's start; what a backward works with."""
        place = "first" if rank == 0 else "last" if rank == self.layout.pp - 1 else "middle"
        moments, flight = self.moments[place], self.flight[place]
        more = 1 + self.fragmentation
        stored = (
            sum(moments["stored"].values()) + self.fragmentation * moments["stored"][BUFFERS] + self.device
        )
        one, kept, logits = (
            moments["first forward"][ACTIVATIONS], moments["loss"][ACTIVATIONS], moments["loss"][LOGITS]
        )  # fmt: skip
        working = max(0.0, moments["backward"][ACTIVATIONS] - kept)
        away = self.layout.offload in ("activations", "all")
        # With offload, a part of each micro-batch stays (`each`), and what is on its way is there once (`passing`).
        each = self._staying() if away and flight > 1 else one
        passing = one - each if away else 0.0
        into_head = max(0.0, kept - each * flight - passing) if logits else 0.0
        mean = float(self.layers.sum()) / self.layout.pp
        scale = each / mean if away and mean else 1.0
        own = {chunk: float(self._of(chunk, count).sum()) * scale for chunk, count in chunks.items()}
        head = max(chunks)
        changes: list[
            tuple[float, int, float, int]
        ] = []  # second, order, bytes, micro-batches that come or go
        for start, end, (kind, chunk, _, _) in events:
            loss = logits > 0 and chunk == head
            if kind == "F":
                changes.append((end, 0, own[chunk] + (logits + into_head if loss else 0.0), 1))
                continue
            if kind in "BI":
                changes.append((start, 1, working - (logits if loss else 0.0), 0))
                changes.append((end, 2, -working, 0))
            if kind in "BW":
                changes.append((end, 2, -own[chunk] - (into_head if loss else 0.0), -1))
        held, moving, alive = [(0.0, stored)], 0.0, 0
        for time, _, size, count in sorted(changes):
            moving, alive = moving + size, alive + count
            held.append((time, stored + more * max(0.0, moving + (passing if alive else 0.0))))
        update = moments["optimizer step"][BUFFERS] - moments["stored"][BUFFERS]
        held.append((end_s, stored + more * max(0.0, update)))
        return RankStep(events, stored, tuple(held), chunks)

    def _staying(self) -> float:
        """Bytes of each micro-batch that offload leaves on a rank: what another one adds, where there is no loss."""
        for place, moments in self.moments.items():
            if self.flight[place] > 1 and not moments["loss"][LOGITS]:
                added = moments["loss"][ACTIVATIONS] - moments["first forward"][ACTIVATIONS]
                return added / (self.flight[place] - 1)
        return 0.0

    def _of(self, chunk: int, count: int) -> NDArray[np.float64]:
        """What each layer of a chunk keeps."""
        start = sum((self.layout.cuts or (self.depth,))[:chunk])
        return self.layers[start : start + count]
