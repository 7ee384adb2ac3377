"""Bounds: seconds that a layout, or any layout with the same core, cannot go below; arrays over a Grid.

A bound takes only what every cut and every order must spend. They are compared with the simulator, layout by
layout, in tests/passes/test_layout_search.py.
"""

from __future__ import annotations

import numpy as np

from autopar.cluster import Cluster
from autopar.cost.estimate import Estimates
from autopar.cost.grid import Array, Grid
from autopar.cost.held import held
from autopar.cost.layer_time import Ends
from autopar.cost.layout_time import DATA, OPTIMIZER, OTHER, LayoutTime
from autopar.cost.software import Software
from autopar.layout import SCHEDULES
from autopar.workload import Layer, Workload

# What a step takes beside its pipeline.
OUTSIDE = (DATA, OPTIMIZER)


def core_bound_s(
    workload: Workload, cores: Grid, cluster: Cluster, software: Software, batch: int
) -> tuple[Array, Array]:
    """(seconds that no layout with this core goes below, bytes that none needs less than): a rank's mean share of the
    work for all micro-batches, nothing recomputed, and the way of one micro-batch through the shortest fill."""
    m = np.maximum(1.0, batch / (cores.dp * cores.mbs))
    model = LayoutTime(workload, cores, held(workload, cores), cluster, software, m)
    mean = model.mean_layer()
    whole = workload.depth * (mean.total - mean.again) + _both_ends(model.ends())
    least = 2.0 * held(workload, cores).split(
        0 * cores.zero + 3, 3
    )  # 16-bit weights, split over all data ranks
    return m * whole / cores.pp + software.step_s, least


def row_bound_s(workload: Workload, found: Estimates, cluster: Cluster, software: Software) -> Array:
    """Seconds that each layout does not go below, whatever its cut."""
    grid = found.grid
    model = LayoutTime(workload, grid, held(workload, grid), cluster, software, found.micro_batches)
    span = pipeline_bound_s(model)
    return np.where(grid.pp == 1, found.step_s, step_of(found, software, span))


def step_of(found: Estimates, software: Software, span: Array) -> Array:
    """Seconds of the step whose pipeline takes `span`: what lies beside it, and what goes with the whole."""
    outside, share = beside(found, software)
    return np.asarray((span + outside) * (1 + share) + software.step_s)


def beside(found: Estimates, software: Software) -> tuple[Array, Array]:
    """(seconds beside the pipeline, what goes with the whole step as a share of it)."""
    times = found.time_s
    closed = sum(seconds for kind, seconds in times.items() if kind != OTHER)
    return np.asarray(sum(times[kind] for kind in OUTSIDE)), np.asarray(
        (times[OTHER] - software.step_s) / closed
    )


def pipeline_bound_s(model: LayoutTime) -> Array:
    """Seconds that the micro-batches take at least: the busiest rank's work; in 1F1B also the way of one micro-batch
    to and fro and what is then left to do."""
    workload, grid, m = model.workload, model.grid, model.micro_batches
    counts: dict[int, tuple[Layer, int]] = {}
    for layer, count in workload.layers:
        counts[id(layer)] = layer, count + counts.get(id(layer), (layer, 0))[1]
    parts = [(count, model.layer(layer).total) for layer, count in counts.values()]
    whole = sum(count * total for count, total in parts) + _both_ends(model.ends())
    load = np.maximum(whole / grid.pp, _busiest(workload.depth, grid, parts))
    # a rank of 1F1B has at most pp micro-batches alive: when the first has come back, all forwards but pp and all
    # backwards but one are to do on every rank
    back = whole + load * (m - np.minimum(m, grid.pp))
    plain = grid.schedule == SCHEDULES.index("1f1b")
    return np.where(plain, np.maximum(m * load, back), m * load)


def _both_ends(ends: Ends) -> Array:
    return ends.first_f + ends.first_b + ends.last_f + ends.last_b


def _busiest(depth: int, grid: Grid, kinds: list[tuple[int, Array]]) -> Array:
    """Seconds of layers on the busiest rank at least, by pigeonhole: where no rank has more than most = ceil(depth /
    pp) layers, r = depth - (most - 1) * pp of them have that many, and at least the r * most cheapest layers' mean;
    where one has more, it has the most + 1 cheapest at least."""
    most = np.ceil(depth / grid.pp)
    full = depth - (most - 1) * grid.pp
    mean = _cheapest(full * most, kinds) / full
    return np.where(grid.pp == 1, 0.0, np.minimum(mean, np.maximum(_cheapest(most + 1, kinds), 0.0)))


def _cheapest(number: Array, kinds: list[tuple[int, Array]]) -> Array:
    """Seconds of the `number` cheapest layers, elementwise over the grid."""
    seconds = np.stack([np.broadcast_to(total, number.shape) for _, total in kinds])
    counts = np.stack([np.full(number.shape, float(count)) for count, _ in kinds])
    turn = np.argsort(seconds, axis=0)
    seconds, counts = np.take_along_axis(seconds, turn, 0), np.take_along_axis(counts, turn, 0)
    before = np.cumsum(counts, axis=0) - counts
    taken = np.clip(number - before, 0.0, counts)
    return np.asarray((taken * seconds).sum(axis=0))
