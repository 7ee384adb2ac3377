"""Mixed clusters: a pipeline whose stages lie on pools of different devices, each as long as its pool is fast.

In:  a Space whose cluster has several pools (`cluster.pools`), a Software.
Out: a Found like the layout search's, or None where no number of ranks per stage divides every pool.

Stages lie whole in one pool, in the pools' order; tensor, context, expert and data parallelism stay inside a stage, so
that only the pipeline's sends cross pools. For each choice of those, layers are cut so that the slowest stage has the
least to do within its own device's memory; the most promising pipelines are simulated. The bound lets
every stage hold as many layers as its speed and memory allow, with nothing waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost.estimate import Estimates, estimate
from autopar.cost.grid import Array, Grid
from autopar.cost.held import held
from autopar.cost.layout_bound import OUTSIDE
from autopar.cost.layout_memory import LOGITS, WORKSPACE
from autopar.cost.layout_time import (
    AGAIN,
    BACKWARD,
    BUBBLE,
    CONTEXT,
    EXPERT,
    FORWARD,
    OTHER,
    PIPELINE,
    TENSOR,
    LayoutTime,
)
from autopar.cost.pipeline import Priced, Stages
from autopar.cost.software import Software
from autopar.errors import InfeasibleError
from autopar.hardware import Cluster, Pool
from autopar.layout import SCHEDULES
from autopar.passes.layout_relax import search_or_relax
from autopar.passes.layout_search import Alternative, Found, search_layouts
from autopar.passes.layout_space import Space

_SIMULATED = 24
_CUT = 4000  # rows, best bound first, whose layers are cut
_SCHEDULES = ("1f1b", "zb-h1")
# Bytes that do not grow with the layers of a stage.
_FIXED = (LOGITS, WORKSPACE, "reserved")


@dataclass(frozen=True)
class _Part:
    """One pool's view of all rows: its stages, seconds of one layer [rows, 3] (forward, input, weight gradients), of
    the ends [rows, 4], of a send, what lies beside the pipeline, and bytes: fixed, and of one layer."""

    pool: Pool
    stages: Array
    layer: Array
    ends: Array
    send: Array
    beside: dict[str, Array]
    kinds: dict[str, Array]
    share: Array
    fixed: Array
    each: Array
    memory: dict[str, Array]


def search_any(
    space: Space,
    software: Software,
    *,
    objective: str = "time",
    progress: Callable[[str], None] | None = None,
) -> tuple[Found, Cluster, str | None]:
    """The best layout, the cluster it is on, and what is to be said of it: on a cluster of equal nodes the layout
    search's; on a mixed one the best of a pipeline over all pools, of every device taken for the slowest, and of each
    pool by itself. Raises InfeasibleError if none of these runs."""
    cluster = space.cluster
    if not cluster.mixed:
        return search_or_relax(space, software, objective=objective, progress=progress), cluster, None
    found: list[tuple[Found, Cluster, str | None]] = []
    refusals: list[InfeasibleError] = []
    mixed = search_mixed(space, software)
    if mixed is not None:
        names = " + ".join(
            f"{pool.nodes} x {pool.devices_per_node} {pool.device.name}" for pool in cluster.pools
        )
        found.append(
            (mixed, cluster, f"stages lie on {names} in this order, each as long as its pool is fast")
        )
    ways: list[tuple[Cluster, str]] = [
        (cluster, f"every device is taken for the slowest, {cluster.device.name}")
    ]
    ways += [
        (
            pool.as_cluster(),
            f"runs on the {pool.device_count} {pool.device.name} alone: with the others it is slower",
        )
        for pool in cluster.pools
    ]
    for part, note in ways:
        try:
            found.append(
                (search_layouts(replace(space, cluster=part), software, objective=objective), part, note)
            )
        except InfeasibleError as error:
            refusals.append(error)
    if not found:
        raise refusals[0]
    return min(found, key=lambda one: one[0].best.step_s)


def search_mixed(space: Space, software: Software) -> Found | None:
    """The best pipeline over all pools, or None."""
    rows = _rows(space)
    if rows is None:
        return None
    grid, per_stage = rows
    parts = [_part(space, grid, per_stage, pool, software) for pool in space.cluster.pools]
    micro = np.maximum(1.0, space.batch / (grid.dp * grid.mbs))
    outside = np.maximum.reduce([np.asarray(sum(part.beside.values())) for part in parts])
    share = np.maximum.reduce([part.share for part in parts])
    bounds = (micro * _load(space.workload.depth, parts) + outside) * (1 + share) + software.step_s
    best: Priced | None = None
    others: list[Alternative] = []
    limit = float(max(pool.device.usable_bytes for pool in space.cluster.pools))
    turn = np.argsort(bounds, kind="stable")
    turn = turn[np.isfinite(bounds[turn])]
    cut: list[tuple[float, int, list[int]]] = []
    for row in turn[:_CUT]:
        layers = _cut(space, int(row), parts)
        if layers is not None:
            load, cuts = layers
            cut.append(
                ((micro[row] * load + outside[row]) * (1 + share[row]) + software.step_s, int(row), cuts)
            )
    left = float(bounds[turn[_CUT]]) if len(turn) > _CUT else np.inf
    cut.sort(key=lambda one: one[0])
    for bound, row, cuts in cut:
        if best is not None and bound >= best.step_s:
            break
        if len(others) >= _SIMULATED:
            left = min(left, bound)
            break
        found = _price(
            space, grid, row, cuts, parts, int(micro[row]), software, float(outside[row]), float(share[row])
        )
        others.append(Alternative(found.layout, found.step_s, found.memory_total, True))
        if best is None or found.step_s < best.step_s:
            best = found
    if best is None:
        return None
    simulated = len(others)
    others = sorted((one for one in others if one.layout != best.layout), key=lambda one: one.step_s)
    return Found(
        best=best, bound_s=min(left, best.step_s), limit_bytes=limit, cores=len(grid), rows=len(grid),
        simulated=simulated, alternatives=tuple(others[:12]),
    )  # fmt: skip


def _rows(space: Space) -> tuple[Grid, Array] | None:
    """(every layout whose stages fit the pools, ranks per stage of each)."""
    cores = space.cores()
    ranks = cores.dp * cores.tp * cores.cp
    fits = cores.pp > 1
    for pool in space.cluster.pools:
        fits &= pool.device_count % ranks == 0
    if not fits.any():
        return None
    grid = space.expand(cores.take(fits))
    grid = grid.take(np.isin(grid.schedule, [SCHEDULES.index(word) for word in _SCHEDULES]) & (grid.vpp == 1))
    return (grid, grid.dp * grid.tp * grid.cp) if len(grid) else None


def _part(space: Space, grid: Grid, per_stage: Array, pool: Pool, software: Software) -> _Part:
    workload, cluster = space.workload, pool.as_cluster()
    found: Estimates = estimate(workload, grid, cluster, software, space.batch)
    model = LayoutTime(workload, grid, held(workload, grid), cluster, software, found.micro_batches)
    one, ends = model.mean_layer(), model.ends()
    half = (one.tensor + one.context + one.expert) / 2
    layer = np.stack([one.f + half, one.b + one.again + one.hidden + half, one.w], axis=1)
    most = np.ceil(workload.depth / grid.pp)
    memory = found.memory_bytes
    fixed = sum((memory[kind] for kind in _FIXED if kind in memory), np.zeros(len(grid)))
    closed = sum(seconds for kind, seconds in found.time_s.items() if kind != OTHER)
    kinds = {
        FORWARD: one.f,
        BACKWARD: one.b + one.w + one.hidden,
        AGAIN: one.again,
        TENSOR: one.tensor,
        CONTEXT: one.context,
        EXPERT: one.expert,
    }
    return _Part(
        pool=pool,
        stages=pool.device_count // per_stage,
        layer=layer,
        ends=np.stack([ends.first_f, ends.first_b, ends.last_f, ends.last_b], axis=1),
        send=model.send_s(),
        beside={kind: found.time_s[kind] for kind in OUTSIDE},
        kinds=kinds,
        share=(found.time_s[OTHER] - software.step_s) / closed,
        fixed=fixed,
        each=(found.memory_total - fixed) / most,
        memory={kind: size / (1.0 if kind in _FIXED else most) for kind, size in memory.items()},
    )


def _load(depth: int, parts: list[_Part]) -> Array:
    """Seconds that the slowest stage of each row needs per micro-batch at least: the least load under which the pools'
    stages together hold all layers, each no more than fit. Infinite where they do not fit at all."""
    seconds = [part.layer.sum(axis=1) for part in parts]
    rooms = [
        np.clip(np.floor((part.pool.device.usable_bytes - part.fixed) / part.each), 0, depth)
        for part in parts
    ]
    low, high = np.zeros(len(seconds[0])), depth * np.maximum.reduce(seconds)
    for _ in range(40):
        middle = (low + high) / 2
        holds = sum(
            part.stages * np.minimum(room, np.floor(middle / each + 1e-9))
            for part, each, room in zip(parts, seconds, rooms, strict=True)
        )
        low, high = np.where(holds >= depth, low, middle), np.where(holds >= depth, middle, high)
    fits = sum(part.stages * room for part, room in zip(parts, rooms, strict=True)) >= depth
    return np.where(fits, low, np.inf)


def _own(row: int, parts: list[_Part]) -> list[_Part]:
    """The part that each stage of a row lies on."""
    return [part for part in parts for _ in range(int(part.stages[row]))]


def _cut(space: Space, row: int, parts: list[_Part]) -> tuple[float, list[int]] | None:
    """(seconds of the slowest stage per micro-batch, layers per stage); None if the layers do not fit."""
    own = _own(row, parts)
    room = [(part.pool.device.usable_bytes - part.fixed[row]) / part.each[row] for part in own]
    seconds = np.array([part.layer[row].sum() for part in own])
    extra = np.zeros(len(own))
    extra[0] = own[0].ends[row, :2].sum()
    extra[-1] += own[-1].ends[row, 2:].sum()
    cuts = cut_by_speed(space.workload.depth, seconds, extra, room)
    return None if cuts is None else (float((extra + seconds * cuts).max()), cuts)


def _price(
    space: Space, grid: Grid, row: int, cuts: list[int], parts: list[_Part], micro_batches: int,
    software: Software, outside: float, share: float,
) -> Priced:  # fmt: skip
    """One row with its cut, simulated."""
    layout = grid.layout(row)
    own = _own(row, parts)
    seconds = np.array([part.layer[row] for part in own])
    first, last = own[0].ends[row, :2], own[-1].ends[row, 2:]
    send = max(float(part.send[row]) for part in own)
    stage = seconds * np.array(cuts)[:, None] + send * software.pp_exposed * np.array([1.0, 1.0, 0.0])
    stage[0] += (first[0], first[1], 0.0)
    stage[-1] += (last[0], last[1] / 2, last[1] / 2)
    stages = Stages(tuple(cuts), stage[:, 0], stage[:, 1], stage[:, 2], send, micro_batches)
    span, line = stages.simulate(layout)
    busiest = int(np.argmax(stage.sum(axis=1)))
    part, layers = own[busiest], cuts[busiest]
    times = {kind: float(value[row]) * layers * micro_batches for kind, value in part.kinds.items()}
    times[PIPELINE] = 2 * send * software.pp_exposed * micro_batches
    times[BUBBLE] = max(0.0, span - sum(times.values()))
    times |= {kind: max(float(one.beside[kind][row]) for one in own) for kind in OUTSIDE}
    times[OTHER] = software.step_s + share * (span + outside)
    fullest = max(
        range(len(own)),
        key=lambda at: (own[at].fixed[row] + own[at].each[row] * cuts[at]) / own[at].pool.device.usable_bytes,
    )
    held_by = own[fullest]
    memory = {
        kind: float(size[row]) * (1.0 if kind in _FIXED else cuts[fullest])
        for kind, size in held_by.memory.items()
    }
    return Priced(replace(layout, cuts=tuple(cuts)), times, memory, micro_batches, stages, line)


def cut_by_speed(depth: int, seconds: Array, extra: Array, room: list[float]) -> list[int] | None:
    """Layers per stage, so that the slowest stage is as fast as can be: `seconds` of a layer on each stage, `extra`
    of its ends, `room`: most layers that fit. None if they do not fit together. Exact: of all loads that a stage can
    have, the least under which the stages together hold all layers."""
    most = np.floor(np.minimum(np.array(room) + 1e-9, depth)).astype(int)
    if (most < 0).any() or most.sum() < depth:
        return None

    def holds(load: float) -> Array:
        return np.clip(np.floor((load - extra) / seconds + 1e-9), 0, most).astype(int)

    loads = np.unique(
        np.concatenate([extra[s] + seconds[s] * np.arange(0, most[s] + 1) for s in range(len(most))])
    )
    low, high = 0, len(loads) - 1
    while low < high:
        middle = (low + high) // 2
        if holds(float(loads[middle])).sum() >= depth:
            high = middle
        else:
            low = middle + 1
    cuts = holds(float(loads[low]))
    for stage in _slowest(cuts, seconds, extra, int(cuts.sum()) - depth):
        cuts[stage] -= 1
    return [int(cut) for cut in cuts]


def _slowest(cuts: Array, seconds: Array, extra: Array, surplus: int) -> Iterator[int]:
    """The stages that give up what is beyond all layers: each time the one that is busiest."""
    left = cuts.copy()
    for _ in range(surplus):
        load = np.where(left > 0, extra + seconds * left, -np.inf)
        stage = int(np.argmax(load))
        left[stage] -= 1
        yield stage
