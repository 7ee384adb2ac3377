"""Held: parameters that one rank of a layout holds, and the groups that share them; arrays over a Grid.

In:  a Workload and a Grid.
Out: `held` -> Held, of the fullest rank; `stage` -> Stage, of a rank of the first, a middle or the last pipeline stage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.cost.grid import Array, Grid
from autopar.layout import SCHEDULES
from autopar.workload import Layer, Matmul, Workload

PLACES = ("first", "middle", "last")

# More runs of layers than this are hybrids, evenly mixed: every stage then holds the same share of each.
_RUNS = 6


@dataclass(frozen=True)
class Held:
    """`dense`, `experts`: parameter elements of the fullest rank before ZeRO splits them; `ranks`: over which dense
    ones are replicated; `shard`: ranks of one ZeRO copy; `expert_ranks`: over which one expert is replicated;
    `layers`: most layers on a rank; `trained`: share of the parameters that are trained."""

    dense: Array
    experts: Array
    ranks: Array
    shard: Array
    expert_ranks: Array
    expert_shard: Array
    layers: Array
    trained: float

    def split(self, zero: Array, level: int, stage: Stage | None = None) -> Array:
        """Elements on a rank (of `stage`, else the fullest) of what ZeRO splits from `level` on."""
        dense = self.dense if stage is None else stage.dense
        experts = self.experts if stage is None else stage.experts
        return np.where(zero >= level, dense / self.shard + experts / self.expert_shard, dense + experts)


@dataclass(frozen=True)
class Stage:
    """What a rank of one pipeline stage holds. `rank`: its index along pp; `counts`: layers of each run of the
    workload; `layers`: their sum; `dense`, `experts`: elements before ZeRO splits them; `largest`: elements of its
    largest unit (a layer or a table) as tensor and expert parallelism leave it; `head`: 1 where it has the loss."""

    rank: Array
    counts: tuple[Array, ...]
    layers: Array
    dense: Array
    experts: Array
    largest: Array
    head: Array


def held(workload: Workload, grid: Grid) -> Held:
    g, w = grid, workload
    inside = sum(count * split_parameters(layer) for layer, count in w.layers)
    whole = sum(count * layer.dense_parameters for layer, count in w.layers) - inside
    experts = sum(count * layer.expert_parameters for layer, count in w.layers)
    layers = np.ceil(w.depth / g.pp)
    ends = np.where(g.pp == 1, w.embedding + w.head, max(w.embedding, w.head or w.embedding)) / g.tp
    ranks = g.dp * g.cp
    shard = np.where((g.shard > 0) & (g.shard < ranks), g.shard, ranks)
    expert_ranks = np.maximum(1, ranks * g.tp // (g.ep * g.etp))
    return Held(
        dense=(inside / g.tp + whole) * layers / w.depth + ends,
        experts=experts / (np.minimum(g.ep, max(1, w.experts)) * g.etp) * layers / w.depth,
        ranks=ranks,
        shard=shard,
        expert_ranks=expert_ranks,
        expert_shard=np.maximum(1, expert_ranks * shard // ranks),
        layers=layers,
        trained=1.0 - w.frozen,
    )


def stage(workload: Workload, grid: Grid, place: str) -> Stage:
    """A rank of the first, a middle or the last pipeline stage; the first holds the input tables, the last the output
    projection, or a copy of the table it is tied to (Megatron-LM keeps tied tables on both ends). Where the schedule
    folds its chunks back, the first rank holds both ends."""
    g, w = grid, workload
    rank = {"first": 0 * g.pp, "middle": np.minimum(1, g.pp - 1), "last": g.pp - 1}[place]
    start, layers = _layers(w, g, rank)
    counts, position = [], 0
    for _, count in w.layers:
        within = np.minimum(start + layers, position + count) - np.maximum(start, position)
        mixed = (g.vpp > 1) | (len(w.layers) > _RUNS)
        counts.append(np.where(mixed, count * layers / w.depth, np.maximum(0, within)))
        position += count
    folded = np.isin(g.schedule, [SCHEDULES.index("zbv"), SCHEDULES.index("dualpipev")]) & (g.pp > 1)
    head = np.where(folded, rank == 0, rank == g.pp - 1)
    table = w.head or w.vocab * w.hidden
    output = np.where((rank == 0) & (w.head == 0), 0, table) * head / g.tp
    # further predictions embed the tokens they are given, where the head is (Megatron-LM's multi-token prediction)
    again = np.where((rank > 0) & (w.head > 0), w.vocab * w.hidden, 0) * head * (w.losses > 1)
    tables = (w.embedding * (rank == 0) + again) / g.tp
    expert_ways = np.minimum(g.ep, max(1, w.experts)) * g.etp
    dense, experts, largest = tables + output + w.final_parameters * head, 0.0 * output, tables
    largest = np.maximum(largest, output)
    for (layer, _), some in zip(w.layers, counts, strict=True):
        inside = split_parameters(layer)
        own = inside / g.tp + layer.dense_parameters - inside
        theirs = layer.expert_parameters / expert_ways
        dense, experts = dense + some * own, experts + some * theirs
        largest = np.maximum(largest, np.where(some > 0, own + theirs, 0.0))
    return Stage(rank, tuple(counts), layers, dense, experts, largest, head * 1.0)


def _layers(workload: Workload, grid: Grid, rank: Array) -> tuple[Array, Array]:
    """(first layer, layers) of a pipeline rank whose layers lie together. What doesn't divide goes to the middle, whose
    ranks hold no table: bloom's 70 layers on 12 stages are 5 on each end and 6 between."""
    each, rest = workload.depth // grid.pp, workload.depth % grid.pp
    at_first = (rest > 0) & (rest >= grid.pp - 1)  # the last stage is the last to take one more
    skip = np.where(at_first, 0, 1)
    extra = (rank >= skip) & (rank < skip + rest)
    return rank * each + np.clip(rank - skip, 0, rest), each + extra


def split_parameters(layer: Layer) -> int:
    """Dense parameters of a layer that tp splits."""
    return sum(
        op.k * op.n + (op.n if op.bias and op.split == "column" else 0)
        for op in layer.ops
        if isinstance(op, Matmul) and op.weight and not op.experts and op.split in ("column", "row")
    )
