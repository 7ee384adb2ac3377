"""Bounds: seconds that a layout, or any layout with the same core, cannot go below; arrays over a Grid.

A bound takes only what every cut and every order must spend. They are compared with the simulator, layout by
layout, in tests/passes/test_layout_search.py.
"""

from __future__ import annotations

import numpy as np

from autopar.cluster import Cluster
from autopar.cost.grid import Array, Grid
from autopar.cost.held import PLACES, Held, held
from autopar.cost.layer_time import Ends
from autopar.cost.layout_memory import BUFFERS, moments
from autopar.cost.layout_time import DATA, HOST, OPTIMIZER, OTHER, LayoutTime
from autopar.cost.software import Software
from autopar.layout import OFFLOAD, RECOMPUTE, SCHEDULES
from autopar.workload import Layer, Workload

_FULL = RECOMPUTE.index("full")
_ALL = OFFLOAD.index("all")

# What a step takes beside its pipeline.
OUTSIDE = (DATA, HOST, OPTIMIZER)


def core_bound_s(
    workload: Workload, cores: Grid, cluster: Cluster, software: Software, batch: int
) -> tuple[Array, Array]:
    """(seconds that no layout with this core goes below, bytes that none needs less than): the busiest rank's work for
    all micro-batches, nothing recomputed, and what goes with the whole step as a share of it."""
    m = np.maximum(1.0, batch / (cores.dp * cores.mbs))
    groups = held(workload, cores)
    model = LayoutTime(workload, cores, groups, cluster, software, m)
    # the share depends on the number of nodes alone: one core stands for all
    first = cores.take(slice(0, 1))
    some = LayoutTime(workload, first, held(workload, first), cluster, software, m[:1]).kinds()
    share = beside(some, software)[1][0]
    return m * load_bound_s(model) * (1 + share) + software.step_s, _least_bytes(
        workload,
        cores if cluster.device.host_gbps is None else cores.with_(offload=_ALL),
        groups,
        software,
        m,
    )


def _least_bytes(workload: Workload, cores: Grid, groups: Held, software: Software, m: Array) -> Array:
    """Bytes that no layout with this core needs less than: everything split over all data ranks, inputs of layers only,
    the optimizer on the host where the cores may have it there; of the stages the fullest, of the ways to lay them
    the leanest. In flight an interleaved order has g + c / vpp micro-batches: the least is at one end of vpp."""
    least = np.full(len(cores), np.inf)
    for schedule, vpp in (("1f1b", 1), ("interleaved", 2), ("interleaved", 10**6), ("zbv", 2)):
        columns = {"schedule": SCHEDULES.index(schedule), "vpp": vpp, "zero": 3, "recompute": _FULL}
        grid = cores.with_(**columns)
        fullest = np.zeros(len(cores))
        for place in PLACES:
            for label, found in moments(workload, grid, groups, software, m, place):
                if label in ("stored", "loss"):
                    size = sum(part for kind, part in found.items() if kind != BUFFERS)
                    fullest = np.maximum(fullest, size)
        least = np.minimum(least, fullest)
        if not np.any(cores.pp > 1):
            break
    return least


def row_bound_s(model: LayoutTime, times: dict[str, Array]) -> Array:
    """Seconds that each layout does not go below, whatever its cut. `times`: what `model.kinds()` says."""
    whole = np.asarray(sum(times.values()))
    span = pipeline_bound_s(model)
    return np.where(model.grid.pp == 1, whole, step_of(times, model.software, span))


def step_of(times: dict[str, Array], software: Software, span: Array) -> Array:
    """Seconds of the step whose pipeline takes `span`: what lies beside it, and what goes with the whole."""
    outside, share = beside(times, software)
    return np.asarray((span + outside) * (1 + share) + software.step_s)


def beside(times: dict[str, Array], software: Software) -> tuple[Array, Array]:
    """(seconds beside the pipeline, what goes with the whole step as a share of it)."""
    closed = sum(seconds for kind, seconds in times.items() if kind != OTHER)
    return np.asarray(sum(times[kind] for kind in OUTSIDE)), np.asarray(
        (times[OTHER] - software.step_s) / closed
    )


def pipeline_bound_s(model: LayoutTime) -> Array:
    """Seconds that the micro-batches take at least: the busiest rank's work; in 1F1B also the way of one micro-batch
    to and fro and what is then left to do."""
    grid, m = model.grid, model.micro_batches
    load = load_bound_s(model)
    # until the first micro-batch has come back, a rank of 1F1B has begun pp micro-batches at most: of the others
    # all the work is left to do
    back = _whole(model) + load * (m - np.minimum(m, grid.pp))
    plain = grid.schedule == SCHEDULES.index("1f1b")
    return np.where(plain, np.maximum(m * load, back), m * load)


def load_bound_s(model: LayoutTime) -> Array:
    """Seconds that the busiest rank works on one micro-batch at least: its share, or that of whole layers."""
    grid, depth = model.grid, model.workload.depth
    parts = [(count, model.layer(layer).total) for layer, count in _kinds(model.workload)]
    return np.asarray(np.maximum(_whole(model) / grid.pp, _busiest(depth, grid, parts)))


def _whole(model: LayoutTime) -> Array:
    """Seconds of one micro-batch through the whole model, to and fro."""
    return np.asarray(model.workload.depth * model.mean_layer().total + _both_ends(model.ends()))


def _kinds(workload: Workload) -> list[tuple[Layer, int]]:
    """The distinct layers, each with its number."""
    counts: dict[int, tuple[Layer, int]] = {}
    for layer, count in workload.layers:
        counts[id(layer)] = layer, count + counts.get(id(layer), (layer, 0))[1]
    return list(counts.values())


def _both_ends(ends: Ends) -> Array:
    return np.asarray(ends.first_f + ends.first_b + ends.last_f + ends.last_b)


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
