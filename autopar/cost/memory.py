"""Memory: bytes one rank holds at the fullest moment of a training step, by kind.

In:  the Calls of the blocks (`lifetimes.py`), how many parameter elements a rank stores, micro-batches, recompute.
Out: {"weights": ..., "gradients": ..., "optimizer": ..., "activations": ..., ...}.

The step is walked through: forward of every call, backward in reverse, reduction of the gradients, optimizer. With
one micro-batch, gradients come into being as the backward goes, while what the forward kept is let go; with several,
they are there from the first on. The bytes per parameter are those of mixed-precision AdamW (Rajbhandari et al. 2020,
"ZeRO", section 3.1), with fp32 gradients:

    fp32   weight 4 + gradient 4 + moments 8
    bf16   fp32 master 4 + gradient 4 + moments 8 + a bf16 copy 2 while a call needs it (autograd keeps that of products)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost.alive import ACTIVATIONS, BUFFERS, GRADIENTS, LOGITS, WEIGHTS, WORKSPACE
from autopar.cost.lifetimes import Call

OPTIMIZER = "optimizer"
# The kinds of memory: what a rank stores of the parameters, and what scales with the micro-batch.
STORED = (WEIGHTS, GRADIENTS, OPTIMIZER)
SCALING = (ACTIVATIONS, LOGITS, WORKSPACE)
KINDS = (*STORED, BUFFERS, *SCALING)
FRAGMENTS, RESERVED = "fragmentation", "reserved"
GRADIENT_BYTES = 4
FRAGMENTATION = (
    0.04  # of what comes and goes within a step; assumed, beside the floor in a device's `reserved_bytes`
)
BUCKET_BYTES = (
    25 * 2**20
)  # gradients in flight of data-parallel reduction, torch's DistributedDataParallel default


@dataclass(frozen=True)
class Stored:
    """Elements of trainable parameters on a rank, divided over tp but not over fsdp: `all`, the `largest` parameter,
    the `largest_call`, and those `summed` over an axis at the end of the step. `frozen_bytes`: parameters and buffers
    without a gradient."""

    all: float
    largest: float
    largest_call: float
    summed: float
    frozen_bytes: float


@dataclass(frozen=True)
class Run:
    """One block's calls: how often it is called, and whether its activations are computed again."""

    call: Call
    times: int
    recomputed: bool

    @property
    def kept(self) -> float:
        return self.call.entering if self.recomputed else self.call.kept


def fullest(
    runs: Sequence[Run], stored: Stored, *, fsdp: int, added: bool, copy_bytes: int, overlap: bool
) -> dict[str, float]:
    """Bytes by kind at the fullest moment of a step. `added`: there are several micro-batches. `copy_bytes`: of an
    element as blocks take it. `overlap`: gathers and reductions run beside compute (accelerators)."""
    most: dict[str, float] = {}
    for moment in _moments(runs, stored, fsdp, added, copy_bytes, overlap):
        if sum(moment.values()) > sum(most.values()):
            most = moment
    own = stored.all / fsdp
    fixed = {WEIGHTS: 4 * own + stored.frozen_bytes, OPTIMIZER: 8 * own}
    return {kind: most.get(kind, 0.0) + fixed.get(kind, 0.0) for kind in KINDS}


def _moments(
    runs: Sequence[Run], stored: Stored, fsdp: int, added: bool, copy_bytes: int, overlap: bool
) -> Iterator[dict[str, float]]:
    """The moments that can be the fullest: of the calls of one block, which keep and free the same each, the first or
    the last is."""
    own = stored.all / fsdp * GRADIENT_BYTES
    flight = in_flight_bytes(stored, fsdp, copy_bytes) if overlap else 0.0
    shared: dict[str, float] = {}
    for run in runs:
        shared.update(run.call.shared)
    before = {ACTIVATIONS: sum(shared.values()), BUFFERS: flight, GRADIENTS: own if added else 0.0}
    after = 0.0 if added else sum(run.call.gradients * run.times for run in runs)
    for run in runs:
        for index in {0, run.times - 1}:
            copies = 0.0 if run.recomputed else run.call.copies
            held = {
                **before,
                ACTIVATIONS: before[ACTIVATIONS] + index * (run.kept - copies),
                WEIGHTS: before.get(WEIGHTS, 0.0) + index * copies,
            }
            yield _sum(held, run.call.passing if run.recomputed else run.call.forward)
            later = min(own, after - (index + 1) * run.call.gradients) if not added else own
            yield _sum({**held, GRADIENTS: later}, run.call.again if run.recomputed else run.call.backward)
        before[ACTIVATIONS] += run.times * (run.kept - copies)
        before[WEIGHTS] = before.get(WEIGHTS, 0.0) + run.times * copies
        after -= run.times * run.call.gradients if not added else 0.0
    summed = stored.summed * GRADIENT_BYTES
    yield {
        GRADIENTS: own,
        BUFFERS: min(summed, BUCKET_BYTES + stored.largest * GRADIENT_BYTES) if not overlap else flight,
    }
    # AdamW's denominator: a root and its quotient, of one parameter at a time, or of all at once where it is one kernel
    # for all (torch's `foreach`, the default on accelerators).
    yield {GRADIENTS: own, WORKSPACE: own if overlap else 2 * 4 * stored.largest / fsdp}


def _sum(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {kind: one.get(kind, 0.0) + other.get(kind, 0.0) for kind in {**one, **other}}


def in_flight_bytes(stored: Stored, fsdp: int, copy_bytes: int) -> float:
    """Parameters and gradients on their way beside compute: with fsdp two calls' parameters are gathered at a time (one
    in use, one on its way), and one call's gradient is whole before it is reduced; else two buckets of gradients."""
    if fsdp > 1:
        needed = stored.largest_call * (2 * copy_bytes + GRADIENT_BYTES)
    else:
        needed = 2.0 * BUCKET_BYTES if stored.summed else 0.0
    return min(needed, stored.all * (copy_bytes + GRADIENT_BYTES))
