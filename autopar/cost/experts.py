"""Experts: what goes on inside of one `autopar.experts` op, per device: rows kept, bytes moved, bytes sent.

In:  the op with its rule, the axes that split each factor, their sizes.
Out: `Inside`: rows and widths on one device, as if every expert got as many tokens as every other.

A slot is a token and one of its k experts. Along an axis that splits experts alone every device holds all slots of its
tokens and computes those of its experts; along one that splits tokens too it gets, on average, as many as it sends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.problem import Op
from autopar.rules.rule import PAIR

KIND = "autopar.experts"


@dataclass(frozen=True)
class Inside:
    """`slots` on this device, `width` of a row that goes in, `inner` of one between the matrices, `out` of a result;
    `matrices` before the last one (2 with a gate), `rows` of one product. `pairs`: axes that send slots away."""

    slots: float
    width: float
    inner: float
    out: float
    matrices: int
    rows: float
    pairs: tuple[str, ...]

    def kept_elements(self, fused: bool) -> float:
        """What the backward needs: rows as they go in, each product's result, what is between them, the result.
        Unfused, the activation's own result too."""
        between = self.matrices + 1 + (0 if fused or self.matrices == 1 else 1)
        return self.slots * (self.width + between * self.inner + self.out)

    @property
    def sent_elements(self) -> tuple[float, float]:
        """Of the rows on their way to the experts, and of the results on their way back."""
        return self.slots * self.width, self.slots * self.out


def inside(op: Op, by_factor: Mapping[str, tuple[str, ...]], axis_sizes: Mapping[str, int]) -> Inside:
    """One `autopar.experts` op under a choice."""
    assert op.rule is not None
    local = op.rule.local_sizes(by_factor, axis_sizes)
    x, index = op.rule.operands[:2]
    slots = math.prod(local[name] for dims in (x[:-1], index[-1:]) for dim in dims for name in dim)
    pairs = tuple(axis for factor, axes in by_factor.items() if PAIR in factor for axis in axes)
    experts = op.rule.sizes.get("e", 1)
    ways = math.prod(axis_sizes[axis] for axis in pairs)
    shapes = [tuple(dim[0] if dim else "" for dim in dims) for dims in op.rule.operands]
    matrices = sum(shape[:1] == ("e",) and shape[-1:] == ("d",) for shape in shapes)
    return Inside(
        slots=slots,
        width=local.get("d", 1),
        inner=local.get("f", 1),
        out=local.get("o", local.get("f", 1)),
        matrices=max(1, matrices),
        rows=max(1.0, slots * ways / experts),
        pairs=pairs,
    )


def is_experts(op: Op) -> bool:
    return op.kind == KIND and op.rule is not None
