"""Step: seconds of one training step from what its parts take: micro-batches, data-parallel traffic, optimizer.

In:  seconds per micro-batch of compute and in-graph communication, parameter elements per call, mesh, prices.
Out: {"forward compute": s, ..., "optimizer": s}, whose sum is the step.

With overlap (accelerators; a stream of its own carries data-parallel traffic): gathers of the next call's parameters
hide behind a call's compute, reductions behind the backward of the calls before; what exceeds that compute is
exposed, and so are the first gather and the last reduction. Tensor-parallel communication is never hidden. Without
(CPU processes) everything is exposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.cost.memory import BUCKET_BYTES, GRADIENT_BYTES
from autopar.cost.prices import Prices

FORWARD, BACKWARD, RECOMPUTE = "forward compute", "backward compute", "recompute"
TENSOR, FSDP, DP, OPTIMIZER = "tensor communication", "fsdp communication", "dp communication", "optimizer"


@dataclass(frozen=True)
class MicroBatch:
    """Seconds of one micro-batch's forward and backward; `again_*`: the forward of what recomputation runs twice."""

    forward: float
    backward: float
    forward_moves: float
    backward_moves: float
    again: float
    again_moves: float


@dataclass(frozen=True)
class Holdings:
    """Trainable elements as the blocks take them (divided over tp, not over fsdp): `stored` of the whole model,
    `calls`: (elements of one call, number of calls, whether recomputed), in the order of the calls. `summed`: of the
    axes ep and cp, the elements whose gradients are summed over them."""

    stored: float
    calls: tuple[tuple[float, int, bool], ...]
    summed: Mapping[str, float] = field(default_factory=dict)

    @property
    def largest_call(self) -> float:
        return max((elements for elements, _, _ in self.calls), default=0.0)


def optimizer_s(stored: float, prices: Prices) -> float:
    """AdamW is bound by memory: read weight, gradient and two moments, write weight and moments, in fp32 (28 bytes
    per element), and a bf16 copy (2)."""
    per_element = 28 + (2 if prices.precision == "bf16" else 0)
    return stored * per_element / prices.roofline.memory


def parameter_s(prices: Prices, micro_batches: int) -> float:
    """What `Prices.parameter_s` should be on a mesh whose data axes are one `dp`: the optimizer's traffic and one
    all-reduce of the gradient per step, not hidden."""
    mesh = prices.mesh
    reduce_s = (
        prices.collective_s("all_reduce", "dp", 2.0**30 * GRADIENT_BYTES) / 2**30
        if mesh.sizes["dp"] > 1
        else 0.0
    )
    return (optimizer_s(1.0, prices) + reduce_s) / micro_batches


def step_s(
    part: MicroBatch, holdings: Holdings, prices: Prices, micro_batches: int, recompute: bool
) -> dict[str, float]:
    """Seconds by kind of one step.

    fsdp (ZeRO-3; Rajbhandari et al. 2020, section 7): per micro-batch every call's parameters are all-gathered in the
    forward, again in the backward (and once more where it is recomputed), in the compute precision, and the fp32
    gradients reduce-scattered. dp: one all-reduce of what a rank stores, after the last micro-batch.
    """
    sizes = prices.mesh.sizes
    overlap = prices.fused
    again = part.again if recompute else 0.0
    exposed_fsdp = window = 0.0
    if sizes["fsdp"] > 1:
        copy = 2 if prices.precision == "bf16" else 4
        gathers = reduces = regathers = first = last = 0.0
        for elements, count, recomputed in holdings.calls:
            gather = prices.collective_s("all_gather", "fsdp", elements * copy) if elements else 0.0
            reduce = (
                prices.collective_s("reduce_scatter", "fsdp", elements * GRADIENT_BYTES) if elements else 0.0
            )
            first, last = first or gather, last or reduce
            gathers += count * gather
            reduces += count * reduce
            regathers += count * gather if recompute and recomputed else 0.0
        backward_traffic = gathers + regathers + reduces
        if overlap:
            exposed_fsdp = max(first, gathers - part.forward) + max(
                last, backward_traffic - part.backward - again
            )
            window = max(0.0, part.backward + again - backward_traffic)
        else:
            exposed_fsdp = gathers + backward_traffic
    elif overlap:
        window = part.backward + again
    dp = 0.0
    if sizes["dp"] > 1:
        owned = holdings.stored / sizes["fsdp"] * GRADIENT_BYTES
        whole = prices.collective_s("all_reduce", "dp", owned)
        tail = prices.collective_s("all_reduce", "dp", min(owned, BUCKET_BYTES))
        dp = max(tail, whole - window)
    for axis, elements in holdings.summed.items():
        dp += prices.collective_s("all_reduce", axis, elements / sizes["fsdp"] * GRADIENT_BYTES)
    moves = part.forward_moves + part.backward_moves + (part.again_moves if recompute else 0.0)
    return {
        FORWARD: micro_batches * part.forward,
        BACKWARD: micro_batches * part.backward,
        RECOMPUTE: micro_batches * again,
        TENSOR: micro_batches * moves,
        FSDP: micro_batches * exposed_fsdp,
        DP: dp,
        OPTIMIZER: optimizer_s(holdings.stored / sizes["fsdp"], prices),
    }


def total(kinds: Mapping[str, float]) -> float:
    return sum(kinds.values())
