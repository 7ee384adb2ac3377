"""Kept: what a layer keeps of a micro-batch for its backward, and how many micro-batches are in flight; over a Grid.

Bytes per layer follow Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models": for a
GPT with dropout and unfused attention s*b*h*(34 + 5*a*s/h), with tensor parallelism s*b*h*(10 + 24/t + 5*a*s/(h*t)),
with sequence parallelism all over t. The entries stand in `TransformerShape`; here they are split and summed.
"""

from __future__ import annotations

import numpy as np

from autopar.cost import schedule
from autopar.cost.grid import Array, Grid, over_distinct
from autopar.cost.software import Software
from autopar.layout import PRECISIONS, RECOMPUTE, SCHEDULES
from autopar.workload import Attention, Layer, Matmul, Saved, Workload

_SELECTIVE, _FULL = RECOMPUTE.index("selective"), RECOMPUTE.index("full")


@over_distinct
def saved_of_run(layer: Layer, workload: Workload, grid: Grid, software: Software) -> Array:
    """Bytes that one such layer keeps of a micro-batch under the layout's recompute choice."""
    g = grid
    share = recompute_share(workload, g)
    none = saved_bytes(layer, workload, g, software)
    some = saved_bytes(layer, workload, g, software, selective=True)
    chosen = np.where(
        g.recompute == _FULL, _input(layer, workload, g), np.where(g.recompute == _SELECTIVE, some, none)
    )
    return np.asanyarray(share * chosen + (1 - share) * none)


@over_distinct
def largest_layer(workload: Workload, grid: Grid, software: Software) -> Array:
    """Bytes that recompute brings back for the one layer whose backward runs, of the layer with most."""
    most = np.zeros(len(grid))
    for layer in workload.kinds:
        again = saved_bytes(layer, workload, grid, software) - saved_of_run(layer, workload, grid, software)
        most = np.maximum(most, again)
    return np.where(grid.recompute > 0, most, 0.0)


@over_distinct
def working_set(workload: Workload, grid: Grid, software: Software) -> Array:
    """Bytes that come and go in one layer's backward: gradients of the residual stream (in and out), of the widest
    product's input and output or of unfused scores (two at once), and the weight gradient that is then added up."""
    g, w = grid, workload
    tokens = g.mbs * w.seq / g.cp
    low = np.where(g.precision == 0, 4.0, 2.0)
    most = np.zeros(len(g))
    for layer in w.kinds:
        square = sum(item.elements for item in layer.saved if item.square)
        stream = 2 * layer.hidden / sequence_ways(g)
        for op in layer.ops:
            if isinstance(op, Matmul):
                k, n = (op.k, op.n / g.tp) if op.split == "column" else (op.k / g.tp, op.n)
                rows = tokens * op.share / (g.tp / g.etp if op.experts else 1.0)
                local = (
                    op.k * op.n / g.tp * np.where(op.trained and op.weight and op.split != "none", 1.0, 0.0)
                )
                local = np.where(op.experts > 0, 0.0, local) * software.weight_gradient_copy
                most = np.maximum(most, (rows * (k + n) + tokens * stream + local) * low)
            elif isinstance(op, Attention) and square:
                most = np.maximum(most, tokens * low * (2 * square * w.seq / g.tp + stream))
    return most


def saved_bytes(
    layer: Layer, workload: Workload, grid: Grid, software: Software, *, selective: bool = False
) -> Array:
    """Bytes one layer keeps of one micro-batch on one rank. Where products are in 8 bits, so is what is kept for them
    alone, if the stack quantizes once (Transformer Engine's linear layers do, torchao's keep 16 bits)."""
    total = 0.0 * grid.mbs
    for item in layer.saved:
        if selective and item.selective:
            continue
        share: Array | float = 1.0 - software.selective_matmul if selective and item.matmul else 1.0
        if item.operand and software.keeps_quantized:
            share = np.where(grid.precision >= PRECISIONS.index("fp8"), 0.5 * share, share)
        total = total + _one(item, workload, grid) * share
    return np.asanyarray(total)


def _input(layer: Layer, workload: Workload, grid: Grid) -> Array:
    """Bytes of a layer's input, which full recompute keeps."""
    tokens = grid.mbs * workload.seq / grid.cp
    return np.asanyarray(
        tokens * layer.hidden * np.where(grid.precision == 0, 4.0, 2.0) / sequence_ways(grid)
    )


def _one(item: Saved, workload: Workload, grid: Grid) -> Array:
    g = grid
    tokens = g.mbs * workload.seq / g.cp
    size = np.where(g.precision == 0, 2.0 * item.item, item.item) if item.item == 2.0 else item.item
    inner = item.split in ("column", "row", "inner")
    if item.expert:
        # each rank sends its own tokens/tp rows; ranks that split an expert get each other's rows too
        ways = g.tp / np.where(inner, 1, g.etp)
    else:
        ways = g.tp if inner else sequence_ways(g) if item.split == "sequence" else 1
    return np.asanyarray(
        tokens * item.elements * item.share * size / ways * (workload.seq if item.square else 1)
    )


def sequence_ways(grid: Grid) -> Array:
    return np.where(grid.sp.astype(bool), grid.tp, 1)


def recompute_share(workload: Workload, grid: Grid) -> Array:
    """Share of a rank's layers to which the recompute choice applies."""
    some = np.minimum(1.0, np.maximum(grid.recompute_layers, 0) * grid.pp / max(1, workload.depth))
    return np.where(grid.recompute_layers >= 0, some, 1.0)


def in_flight(grid: Grid, micro_batches: Array, rank: Array) -> Array:
    """Micro-batches whose activations a pipeline rank holds at once, in units of all its layers."""
    g = grid
    m = np.ceil(micro_batches)
    out = np.ones(len(g))
    for code, name in enumerate(SCHEDULES):
        chosen = (g.schedule == code) & (g.pp > 1)
        if not chosen.any():
            continue
        chunks = np.where(np.isin(name, schedule.FOLDED), 2, g.vpp)
        count = schedule.in_flight(name, g.pp, chunks, m, rank)
        out = np.where(chosen, count / chunks, out)
    return out
