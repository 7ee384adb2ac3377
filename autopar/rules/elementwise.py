"""Pointwise ops: `a b c, c -> a b c`. Every dim may be split; operands broadcast as in torch.

Which operands may be partial sums is the only thing that differs: none for `exp`, both together for `add`,
either for `mul`. That is what the second table says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from autopar.program import TensorInfo
from autopar.rules.call import OpCall, RuleFunction, Sums, dim_at, tensor_positions, tokens, whole_dims, words
from autopar.rules.rule import Rule

UNARY = words("""
    abs absolute acos acosh angle arccos arcsin arctan asin asinh atan atanh bitwise_not ceil celu clamp clamp_max
    clamp_min clip cos cosh digamma elu erf erfc erfinv exp exp2 expm1 fill fix floor frac gelu hardshrink
    hardsigmoid hardswish hardtanh i0 isfinite isinf isnan isneginf isposinf leaky_relu lgamma log log10 log1p log2
    log_sigmoid logical_not logit mish nan_to_num reciprocal relu relu6 round rsqrt selu sgn sigmoid sign signbit
    silu sin sinc sinh softplus softshrink special_entr special_expit special_log_ndtr special_ndtr sqrt square tan
    tanh threshold trunc
""")
BINARY = words("""
    __and__ __or__ __xor__ __lshift__ __rshift__ arctan2 atan2 bitwise_and bitwise_left_shift bitwise_or
    bitwise_right_shift bitwise_xor copysign eq float_power floor_divide fmax fmin fmod ge gt greater greater_equal
    heaviside hypot le less less_equal logaddexp logaddexp2 logical_and logical_or logical_xor lt maximum minimum
    ne not_equal pow remainder sigmoid_backward special_xlog1py true_divide xlogy
""")
LINEAR = words("""
    _to_copy alias clone conj conj_physical contiguous deg2rad detach lift_fresh_copy neg negative positive
    rad2deg real resolve_conj resolve_neg
""")


def pointwise(
    call: OpCall, sums: Callable[[OpCall], Sums] | None = None, *, flops: float = 1.0
) -> Rule | None:
    """All operands broadcast to the result."""
    if (
        not call.results
        or not call.operands
        or any(len(shape) > len(call.result_shapes[0]) for shape in call.shapes)
    ):
        return None
    text = ", ".join(["..."] * len(call.operands)) + " -> " + ", ".join(["..."] * len(call.results))
    groups = sums(call) if sums and call.results[0].is_float else ()
    return call.parse(text, sums=groups, flops_per_point=flops)


# ---- which operands may be partial sums -------------------------------------------------------------------


def first(call: OpCall) -> Sums:
    """Linear in the first operand, if that is a number that adds up."""
    return ((0,),) if call.operands[0].is_float else ()


def together(call: OpCall) -> Sums:
    """add, sub: both tensors, or nothing if one of the two is a number (a constant would be added on each device)."""
    return ((0, 1),) if len(call.operands) == 2 and all(info.is_float for info in call.operands) else ()


def either(call: OpCall) -> Sums:
    """mul: linear in each operand while the other is whole."""
    return tuple((index,) for index, info in enumerate(call.operands) if info.is_float)


def divided(call: OpCall) -> Sums:
    """div: linear in the numerator unless it rounds."""
    if call.kwargs.get("rounding_mode") is not None or not isinstance(call.args[0], TensorInfo):
        return ()
    return first(call)


def chosen(call: OpCall) -> Sums:
    """where(condition, x, y): linear in x and y together; a number in place of one of them must be 0."""
    positions = tensor_positions(call)
    tensors = tuple(index for index in positions[1:] if index is not None)
    if any(not call.operands[index].is_float for index in tensors):
        return ()
    numbers = [value for value in call.args[1:] if not isinstance(value, TensorInfo)]
    return (tensors,) if tensors and all(number == 0 for number in numbers) else ()


def filled(call: OpCall) -> Sums:
    """masked_fill(x, mask, value): linear in x if what it fills with is 0."""
    return first(call) if call.arg(2, "value") == 0 else ()


def blended(call: OpCall) -> Sums:
    """lerp(x, y, weight): linear in x and y together."""
    return ((0, 1),) if all(info.is_float for info in call.operands[:2]) else ()


def where(call: OpCall) -> Rule | None:
    """where(condition) alone is nonzero, whose size depends on the data: no rule."""
    return pointwise(call, chosen) if len(call.args) == 3 else None


def add_product(call: OpCall) -> Rule | None:
    """addcmul(x, y, z), addcdiv: linear in x and y together."""
    return pointwise(call, lambda _: ((0, 1),), flops=2.0)


def dropout(call: OpCall) -> Rule | None:
    """dropout(x, p, train): nothing at all when off; when on it draws random numbers, which has no rule."""
    off = call.arg(2, "train", True) is False or call.arg(1, "p", 0.5) == 0
    return pointwise(call, first, flops=0.0) if off else None


def first_like_second(call: OpCall) -> Rule | None:
    """type_as(x, y): y gives nothing but its dtype."""
    if len(call.operands) != 2:
        return None
    other = [f"y{index}" for index in range(len(call.shapes[1]))]
    reduced = frozenset(other)
    linear = first(call) if call.results[0].is_float else ()
    return call.parse(f"..., {' '.join(other)} -> ...", reduced=reduced, sums=linear)


def converted(call: OpCall) -> Rule | None:
    """to(x, dtype or device), to(x, other): other gives nothing but its dtype."""
    return first_like_second(call) if len(call.operands) == 2 else pointwise(call, first, flops=0.0)


def copy(call: OpCall) -> Rule | None:
    """copy(x, source): source broadcast to the shape of x, whose values are not read."""
    return pointwise(call, lambda call: ((1,),) if call.operands[1].is_float else (), flops=0.0)


def gated(call: OpCall) -> Rule | None:
    """glu(x, dim): the halves of `dim` belong together, so it is whole."""
    dim = dim_at(call.arg(1, "dim", -1), len(call.shapes[0]))
    return whole_dims(call, [dim], flops_per_point=2.0 / max(call.shapes[0][dim], 1))


def prelu(call: OpCall) -> Rule | None:
    """prelu(x, weight): weight of one value, or one per dim 1."""
    rank, count = len(call.shapes[0]), call.shapes[1][0] if call.shapes[1] else 1
    if count == 1 or rank < 2:
        return call.parse("..., " + " ".join("1" * len(call.shapes[1])) + " -> ...", flops_per_point=1.0)
    rest = " ".join(f"x{index}" for index in range(2, rank))
    return call.parse(f"n c {rest}, c -> n c {rest}", flops_per_point=1.0)


def complex_of(call: OpCall) -> Rule | None:
    """complex(real, imaginary): linear in both together."""
    return pointwise(call, lambda _: ((0, 1),), flops=0.0)


def broadcast_tensors(call: OpCall) -> Rule | None:
    """broadcast_tensors(tensors): each expanded to the shape of all."""
    floats = all(info.is_float for info in call.operands)
    return pointwise(call, lambda call: (tuple(range(len(call.operands))),) if floats else (), flops=0.0)


def looked_up(call: OpCall) -> Rule | None:
    """bucketize(x, boundaries), isin(x, values): each element of x against all of a list."""
    if len(call.operands) != 2 or not isinstance(call.args[0], TensorInfo):
        return None
    other = [f"y{index}!" for index in range(len(call.shapes[1]))]
    return call.parse(f"..., {' '.join(tokens(call.shapes[1], other))} -> ...", flops_per_point=0.0)


def searched(call: OpCall) -> Rule | None:
    """searchsorted(sorted, values): leading dims together, or one sorted list for all values."""
    if len(call.operands) != 2:
        return None
    if len(call.shapes[0]) == 1:
        return call.parse("y!, ... -> ...")
    return call.parse("... y!, ... v -> ... v")


RULES: Mapping[str, RuleFunction] = {
    **{f"aten.{name}": pointwise for name in (*UNARY, *BINARY)},
    **{f"aten.{name}": partial(pointwise, sums=first, flops=0.0) for name in LINEAR},
    "aten.add": partial(pointwise, sums=together),
    "aten.sub": partial(pointwise, sums=together),
    "aten.rsub": partial(pointwise, sums=together),
    "aten.mul": partial(pointwise, sums=either),
    "aten.div": partial(pointwise, sums=divided),
    "aten.lerp": partial(pointwise, sums=blended),
    "aten.masked_fill": partial(pointwise, sums=filled),
    "aten.where": where,
    "aten.addcmul": add_product,
    "aten.addcdiv": add_product,
    "aten.dropout": dropout,
    "aten.polar": pointwise,
    # autograd.Functions of Transformers, which capture keeps as one op
    "transformers.SqrtBoundDerivative": pointwise,
    "transformers.GeLUFunction": pointwise,
    "aten._conj": partial(pointwise, sums=first, flops=0.0),
    "aten.complex": complex_of,
    "aten.broadcast_tensors": broadcast_tensors,
    "aten.bucketize": looked_up,
    "aten.isin": looked_up,
    "aten.searchsorted": searched,
    "aten.subtract": partial(pointwise, sums=together),
    "aten.multiply": partial(pointwise, sums=either),
    "aten.divide": partial(pointwise, sums=divided),
    **{f"aten.{name}": dropout for name in ("feature_dropout", "alpha_dropout")},
    "aten.to": converted,
    "aten.type_as": first_like_second,
    "aten.copy": copy,
    "aten.glu": gated,
    "aten.prelu": prelu,
}
