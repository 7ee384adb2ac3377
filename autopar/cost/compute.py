"""Compute: seconds of one op on local sizes, forward and backward, by roofline.

In:  a Problem (what each op is, what flows back through it), a Device, local bytes and points.
Out: (forward seconds, backward seconds).

The roofline (Williams, Waterman and Patterson, 2009): the larger of arithmetic and memory time, plus the launch of
a kernel. How far a kernel gets below the roof is the device file's business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.cluster import Device
from autopar.problem import Op, Problem

# Pointwise and data-moving ops whose gradient does not need their operands.
LINEAR = frozenset(
    f"aten.{name}"
    for name in (
        "add", "sub", "rsub", "neg", "clone", "contiguous", "_to_copy", "to", "sum", "mean", "cat", "stack", "pad",
        "constant_pad_nd", "expand", "roll", "repeat", "cumsum", "index", "index_select", "gather", "flip", "copy",
    )
)  # fmt: skip
# Ops that a fusing compiler runs in one kernel with their neighbours; reductions end a kernel but read fused operands.
_UNFUSED = ("matmul", "attention", "embedding", "cross_entropy", "opaque")


@dataclass(frozen=True)
class Work:
    """What decides the cost of one op whatever its sharding.

    `kind`: matmul, attention, embedding, cross_entropy, pointwise, opaque (no rule) or free. `backward`: per
    operand, whether a gradient is made for it. `reads`, `writes`: the operands and results that go through memory
    (with fusion, what one pointwise op hands to the next does not).
    """

    kind: str
    backward: tuple[bool, ...]
    reads: tuple[bool, ...]
    writes: tuple[bool, ...]
    linear: bool


def kind_of(op: Op) -> str:
    if op.free:
        return "free"
    if op.rule is None:
        return "opaque"
    if "attention" in op.kind:
        return "attention"
    if op.rule.lowering in ("embedding", "cross_entropy"):
        return op.rule.lowering
    if op.rule.dropped and op.rule.flops_per_point > 0 and len(op.operands) > 1:
        return "matmul"
    return "pointwise"


def works(problem: Problem, fused: bool) -> dict[str, Work]:
    """The Work of every op. `fused`: a compiler joins chains of pointwise ops into one kernel, so a value made and
    used only by pointwise ops of one block never reaches memory."""
    kinds = {op.name: kind_of(op) for op in problem.ops}
    inside = fused_values(problem) if fused else frozenset()
    found = {}
    for op in problem.ops:
        found[op.name] = Work(
            kinds[op.name],
            tuple(problem.values[name].gradient for name in op.operands),
            tuple(name not in inside for name in op.operands),
            tuple(name not in inside for name in op.results),
            op.kind in LINEAR,
        )
    return found


def fused_values(problem: Problem) -> frozenset[str]:
    """Values that live only inside fused kernels: made by a pointwise op or a view of one, used only by such ops of
    the same block, and not handed on."""
    users: dict[str, list[Op]] = {}
    for op in problem.ops:
        for name in op.operands:
            users.setdefault(name, []).append(op)
    inside: set[str] = set()
    for op in reversed(problem.ops):
        if kind_of(op) in _UNFUSED:
            continue
        for name in op.results:
            value = problem.values.get(name)
            if value is None or value.interface or name in problem.outputs:
                continue
            # What leaves through a view is in memory if what the view hands on is.
            if all(
                kind_of(user) not in _UNFUSED
                and (kind_of(user) != "free" or all(result in inside for result in user.results))
                for user in users.get(name, ())
            ):
                inside.add(name)
    return frozenset(inside)


@dataclass(frozen=True)
class Roofline:
    """A device's rates for one compute dtype, in FLOP/s and bytes/s."""

    matmul: float
    attention: float
    memory: float
    half_size: float
    launch_s: float

    @staticmethod
    def of(device: Device, dtype: str) -> Roofline:
        peak = device.peak(dtype)
        return Roofline(
            matmul=peak * device.efficiency["matmul"],
            attention=peak * device.efficiency["attention"],
            memory=device.memory_gbps * 1e9 * device.efficiency["memory"],
            half_size=device.matmul_half_size,
            launch_s=device.launch_s,
        )

    def op_s(
        self,
        work: Work,
        flops: float,
        side: float,
        operand_bytes: Sequence[float],
        result_bytes: Sequence[float],
    ) -> tuple[float, float]:
        """(forward, backward) seconds. `flops`: of the forward; `side`: (m*n*k)**(1/3) of a matmul.

        matmul: backward is one product of the same size per operand that has a gradient (dX = dY W^T, dW = X^T dY).
        attention: backward 2.5 times the forward (Dao 2023, "FlashAttention-2", section 4.1: five matmuls for two).
        embedding: reads and writes only the rows looked up; backward fills a gradient as large as the table.
        cross_entropy: three passes over the logits each way (maximum, sum, difference; gradient in fp32).
        pointwise: each operand read and result written once; backward reads the gradient and, unless linear, the
        operands, and writes one gradient per operand that has one.
        """
        if work.kind == "free":
            return 0.0, 0.0
        if work.kind == "matmul":
            rate = self.matmul * side / (side + self.half_size)
            one = self.launch_s + max(flops / rate, (sum(operand_bytes) + sum(result_bytes)) / self.memory)
            return one, one * sum(work.backward)
        if work.kind == "attention":
            moved = sum(operand_bytes) + sum(result_bytes)
            forward = max(flops / self.attention, moved / self.memory) + self.launch_s
            return forward, 2.5 * forward if any(work.backward) else 0.0
        if work.kind == "embedding":
            rows = 2.0 * sum(result_bytes) / self.memory
            table = max(operand_bytes) / self.memory if any(work.backward) else 0.0
            return rows + self.launch_s, (rows + table + 2 * self.launch_s) if any(work.backward) else 0.0
        if work.kind == "cross_entropy":
            passes = 3.0 * sum(operand_bytes) / self.memory + 3 * self.launch_s
            return passes, passes if any(work.backward) else 0.0
        read = sum(size for size, counts in zip(operand_bytes, work.reads, strict=True) if counts)
        written = sum(size for size, counts in zip(result_bytes, work.writes, strict=True) if counts)
        launches = self.launch_s if written or work.kind == "opaque" else 0.0
        forward = (read + written) / self.memory + launches
        if not any(work.backward):
            return forward, 0.0
        gradients = sum(
            s
            for s, back, counts in zip(operand_bytes, work.backward, work.reads, strict=True)
            if back and counts
        )
        backward = (written + gradients + (0.0 if work.linear else read)) / self.memory + launches
        return forward, backward


def matmul_side(op: Op, local: Mapping[str, float]) -> float:
    """(m*n*k)**(1/3) of one product: factors that every tensor has are batch dims and repeat it."""
    assert op.rule is not None
    if op.kind == "autopar.experts":  # one product per expert: its tokens, if all get as many
        tokens = math.prod(local[name] for dim in op.rule.operands[0][:-1] for name in dim) * local.get(
            "k", 1
        )
        return float(
            (max(tokens / op.rule.sizes.get("e", 1), 1.0) * local.get("f", 1) * local.get("d", 1)) ** (1 / 3)
        )
    tensors = [
        {name for dim in dims for name in dim} for dims in (*op.rule.operands[:2], *op.rule.results[:1])
    ]
    return float(
        math.prod(size for name, size in local.items() if not all(name in have for have in tensors))
        ** (1 / 3)
    )


def model_flops(problem: Problem) -> float:
    """Matmul and attention operations of one forward of the whole problem (its batch), as 6N counts them: times 3 for
    forward and backward (Narayanan et al. 2021, section 5.1, without their factor for recomputation)."""
    return sum(
        op.rule.flops_per_point * op.rule.points * op.times
        for op in problem.ops
        if op.rule is not None and kind_of(op) in ("matmul", "attention")
    )
