"""Memory of a layout: bytes a rank holds at the peak of a training step, by kind; arrays over a Grid.

In:  a Workload, a Grid of layouts, what a rank holds, a Software.
Out: `layout_memory` -> {kind: bytes} at the peak of one rank; `timeline` -> the moments of a step that can be it.

The peak is the largest of a few moments, not a sum of everything:

    stored             weights, gradients, optimizer states, fixed workspaces: there at all moments
    loss               + activations of the micro-batches in flight + logits and the loss's copies (where the head is)
    backward           + activations of the micro-batches in flight + what one layer's backward needs besides
    optimizer step     + the optimizer's own temporaries

Checked against torch's allocator peaks of some 430 Megatron-LM test runs: tests/cost/test_layout_memory.py holds the
formulas against the published ones, bench/published.py prints the errors.
"""

from __future__ import annotations

import numpy as np

from autopar.cluster import Cluster
from autopar.cost.grid import Array, Grid
from autopar.cost.held import PLACES, Held, Stage, held, stage
from autopar.cost.kept import (
    in_flight,
    largest_layer,
    recompute_share,
    saved_of_run,
    sequence_ways,
    working_set,
)
from autopar.cost.software import Software
from autopar.layout import OFFLOAD, Layout
from autopar.workload import Workload

__all__ = ["KINDS", "MEMORY", "RANKS", "layout_memory", "recompute_share", "sequence_ways", "timeline"]

WEIGHTS, GRADIENTS, STATES = "weights", "gradients", "optimizer"
ACTIVATIONS, LOGITS, BUFFERS, WORKSPACE = "activations", "logits and loss", "buffers", "workspace"
RESERVED = "reserved"
MEMORY = (WEIGHTS, GRADIENTS, STATES, ACTIVATIONS, LOGITS, BUFFERS, WORKSPACE, RESERVED)

# Whose memory: the rank that needs most, or one of the first, a middle or the last pipeline stage.
RANKS = ("fullest", *PLACES)
# Which count: tensors (torch's max_memory_allocated), the allocator's share of the device (max_memory_reserved), or
# all that is gone from the device (nvidia-smi), with the context and the communication library's buffers.
KINDS = ("allocated", "reserved", "device")

Bytes = dict[str, Array]


def layout_memory(
    workload: Workload,
    grid: Grid,
    held: Held,
    software: Software,
    micro_batches: Array,
    *,
    rank: str = "fullest",
    kind: str = "device",
    reserved_bytes: float = 0.0,
) -> Bytes:
    """Bytes by kind at the peak of `rank` (see RANKS), counted as `kind` (see KINDS).

    `held`: the groups that share parameters; `reserved_bytes`: the device file's, part of kind "device".
    """
    assert rank in RANKS, rank
    assert kind in KINDS, kind
    most: Bytes = {}
    for place in PLACES if rank == "fullest" else (rank,):
        for _, found in moments(workload, grid, held, software, micro_batches, place):
            most = _larger(most, found)
    return counted_as(most, software, kind, reserved_bytes)


def timeline(
    workload: Workload,
    layout: Layout,
    cluster: Cluster,
    software: Software,
    batch: int,
    *,
    rank: str = "fullest",
    kind: str = "device",
) -> list[tuple[str, dict[str, float]]]:
    """The moments of a step on one rank, in order: (what happens, {kind: bytes}). `batch`: sequences per step."""
    grid = Grid.of([layout])
    micro_batches = np.maximum(1.0, batch / (grid.dp * grid.mbs))
    groups = held(workload, grid)
    lines: dict[str, list[tuple[str, Bytes]]] = {
        place: moments(workload, grid, groups, software, micro_batches, place)
        for place in (PLACES if rank == "fullest" else (rank,))
    }
    fullest = max(lines.values(), key=lambda line: max(float(_total(found)[0]) for _, found in line))
    return [
        (
            label,
            {
                name: float(np.ravel(size)[0])
                for name, size in counted_as(found, software, kind, cluster.device.reserved_bytes).items()
            },
        )
        for label, found in fullest
    ]


def moments(
    workload: Workload, grid: Grid, held: Held, software: Software, micro_batches: Array, place: str
) -> list[tuple[str, Bytes]]:
    """The moments of a step that can be the peak of a rank of one pipeline stage, as tensors: (label, {kind: bytes})."""
    g, w = grid, workload
    own = stage(w, g, place)
    stored = _stored(g, held, own, software, experts=w.experts > 0)
    saved = {layer: saved_of_run(layer, w, g, software) for layer in w.kinds}
    one = sum(
        (some * saved[layer] for (layer, _), some in zip(w.layers, own.counts, strict=True)),
        start=np.zeros(len(g)),
    )
    flight = in_flight(g, micro_batches, own.rank)
    # the host holds what lies between its uses; here stay what is at work and what is on its way: two chunks of a
    # pipeline, as Megatron-Kwai's runs with everything offloaded show, else two layers
    away = np.where(
        np.isin(g.offload, [OFFLOAD.index("activations"), OFFLOAD.index("all")]), software.offloaded, 0.0
    )
    here = one * np.minimum(1.0, 2 / np.where(g.pp > 1, g.vpp, np.maximum(1.0, own.layers)))
    tokens = g.mbs * w.seq / g.cp
    low = np.where(g.precision == 0, 4.0, 2.0)
    logits = tokens * w.vocab / g.tp * (software.loss_bytes + 4.0 * (w.losses - 1)) * own.head * (low / 2)
    head_input = (
        2 * tokens * w.hidden * low / sequence_ways(g) * own.head
    )  # into the last norm, into the head
    one, many = (1 - away) * one + away * here, (1 - away) * one * flight + away * here
    kept = many + head_input
    needed = working_set(w, g, software) + largest_layer(w, g, software)
    zero = 0.0 * kept
    return [
        ("stored", stored | {ACTIVATIONS: zero, LOGITS: zero}),
        ("first forward", stored | {ACTIVATIONS: one, LOGITS: zero}),
        ("loss", stored | {ACTIVATIONS: kept, LOGITS: logits}),
        ("backward", stored | {ACTIVATIONS: kept + needed, LOGITS: zero}),
        (
            "optimizer step",
            stored
            | {
                ACTIVATIONS: zero,
                LOGITS: zero,
                BUFFERS: held.split(g.zero, 1, own)
                * np.where(_host(g), 0.0, held.trained * software.optimizer_bytes),
            },
        ),
    ]


def _stored(grid: Grid, held: Held, own: Stage, software: Software, *, experts: bool) -> Bytes:
    """What lies on a rank all the time. Mixed-precision Adam holds 2 + 2 (or 4) + 12 bytes per parameter, which ZeRO
    splits level by level (Rajbhandari et al. 2020, section 3.1 and 5). Megatron-LM's gradient buffer is fp32; where
    gradients are 16-bit, the optimizer keeps fp32 copies of what it updates."""
    g = grid
    whole = g.precision == 0
    weight = np.where(whole, 4.0, software.weight_bytes)
    gradient = np.where(whole, 4.0, software.gradient_bytes)
    states = 8.0 + np.where(whole | (not software.master), 0.0, 4.0) + np.where(gradient < 4, 4.0, 0.0)
    states = held.split(g.zero, 1, own) * states * held.trained
    # ZeRO-2 makes one unit's gradients before it reduces them to their owners; ZeRO-3 also gathers the parameters of
    # the unit in use and of the next (Rajbhandari et al. 2020, section 5.2; Zhao et al. 2023, "PyTorch FSDP");
    # under a pipeline, where each micro-batch would gather again, some stacks keep all that they gathered
    low = np.where(whole, 4.0, 2.0)
    unit = own.largest * (2 * low + gradient * held.trained)
    if software.keeps_gathered:
        unit = np.where(g.pp > 1, (own.dense + own.experts) * (low + gradient * held.trained), unit)
    return {
        WEIGHTS: held.split(g.zero, 3, own) * weight,
        GRADIENTS: held.split(g.zero, 2, own) * gradient * held.trained,
        STATES: np.where(_host(g), 0.0, states),
        BUFFERS: np.where(
            g.zero == 3, unit, np.where(g.zero == 2, own.largest * gradient * held.trained, 0.0)
        ),
        WORKSPACE: software.workspace_bytes
        + (software.expert_workspace_bytes if experts else 0.0)
        + 0.0 * unit,
    }


def _host(grid: Grid) -> Array:
    """Where the optimizer lies, and steps, in host memory (Ren et al. 2021, "ZeRO-Offload")."""
    return np.isin(grid.offload, [OFFLOAD.index("optimizer"), OFFLOAD.index("all")])


def counted_as(found: Bytes, software: Software, kind: str, reserved_bytes: float) -> Bytes:
    """The same with what the allocator holds beyond tensors, and the context, as `kind` asks. The allocator splits
    and rounds what comes and goes; what is stored is allocated once and leaves no holes."""
    moving = found[ACTIVATIONS] + found[LOGITS] + found[BUFFERS]
    extra = 0.0 * moving
    if kind != "allocated":
        extra = extra + software.fragmentation * moving
    if kind == "device":
        extra = extra + reserved_bytes
    return found | {RESERVED: extra}


def _larger(one: Bytes, other: Bytes) -> Bytes:
    """Layout by layout whichever is larger in sum."""
    if not one:
        return other
    above = _total(other) > _total(one)
    return {kind: np.where(above, other[kind], one[kind]) for kind in one}


def _total(found: Bytes) -> Array:
    return np.asanyarray(sum(found.values()))
