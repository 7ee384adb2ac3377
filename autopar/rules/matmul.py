"""Contractions: `m k, k n -> m n`. A split of the contracted factor leaves partial sums, so it is allowed only
where nothing is added on top: `linear` with a bias keeps `k` whole (capture writes linear + add).
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.program import TensorInfo
from autopar.rules.call import OpCall, RuleFunction, is_size_list, leaves, text_of, tokens
from autopar.rules.rule import Rule

EITHER = ((0,), (1,))  # linear in each factor of the product


def linear(call: OpCall) -> Rule | None:
    """linear(x, weight, bias): weight is [out, in]."""
    if len(call.operands) == 2:
        return call.parse("... k, n k -> ... n", sums=EITHER, flops_per_point=2.0)
    return call.parse("... k!, n k!, n -> ... n", flops_per_point=2.0)


def matmul(call: OpCall) -> Rule | None:
    """matmul, mm, bmm, dot, mv with batch dims broadcast."""
    a, b = (min(len(shape), 2) for shape in call.shapes[:2])
    texts = {
        (1, 1): "k, k ->",
        (1, 2): "k, ... k n -> ... n",
        (2, 1): "... k, k -> ...",
        (2, 2): "... m k, ... k n -> ... m n",
    }
    return call.parse(texts[a, b], sums=EITHER, flops_per_point=2.0)


def outer(call: OpCall) -> Rule | None:
    """outer(x, y)."""
    return call.parse("m, n -> m n", sums=EITHER, flops_per_point=1.0)


def distances(call: OpCall) -> Rule | None:
    """cdist(x[..., m, d], y[..., n, d]): rows against rows."""
    return call.parse("... m d!, ... n d! -> ... m n", flops_per_point=3.0)


def bilinear(call: OpCall) -> Rule | None:
    """bilinear(x, y, weight[n, i, j], bias)."""
    whole = "!" if len(call.operands) == 4 else ""
    bias = ", n" if whole else ""
    sums = () if whole else ((0,), (1,), (2,))
    return call.parse(
        f"... i{whole}, ... j{whole}, n i{whole} j{whole}{bias} -> ... n", sums=sums, flops_per_point=3.0
    )


def addmm(call: OpCall) -> Rule | None:
    """addmm(bias, a, b), baddbmm, addmv: the bias would be added on every piece of a split `k`."""
    bias = call.shapes[0]
    dims = ["b"] * (len(call.shapes[1]) == 3) + ["m"] + ["n"] * (len(call.shapes[2]) > 1)
    own = dims[len(dims) - len(bias) :]
    added = " ".join("1" if size == 1 else name for size, name in zip(bias, own, strict=True))
    batch = "b " * (len(call.shapes[1]) == 3)
    right = f"{batch}k! n" if len(call.shapes[2]) > 1 else "k!"
    return call.parse(f"{added}, {batch}m k!, {right} -> {' '.join(dims)}", flops_per_point=2.0)


def einsum(call: OpCall) -> Rule | None:
    """einsum(equation, tensors): the equation is the rule."""
    equation = str(call.args[0]).replace(" ", "")
    if "->" not in equation:
        left = equation
        letters = sorted(name for name in set(left) if name.isalpha() and left.count(name) == 1)
        equation += "->" + ("..." if "..." in left else "") + "".join(letters)
    left, _, right = equation.partition("->")
    parts = [*left.split(","), right]
    if len(parts) != len(call.operands) + 1 or any(
        part.count(letter) > 1 for part in parts for letter in part if letter != "."
    ):
        return None  # a diagonal
    # Dims of size 1 in one operand broadcast in einsum; a rule says so with `1`.
    texts = []
    for part, shape in zip(parts, (*call.shapes, call.result_shapes[0]), strict=True):
        pieces = part.replace("...", ".")
        spread = len(shape) - (len(pieces) - 1)
        sizes, words = list(shape), []
        for letter in pieces:
            if letter == ".":
                words.append("...")
                del sizes[:spread]
            else:
                words.append("1" if sizes.pop(0) == 1 else letter)
        texts.append(" ".join(words))
    groups = tuple((index,) for index in range(len(call.operands)))
    flops = float(max(len(call.operands), 1))
    return call.parse(f"{', '.join(texts[:-1])} -> {texts[-1]}", sums=groups, flops_per_point=flops)


def convolution(call: OpCall) -> Rule | None:
    """conv1d, conv2d, conv3d, convolution(x[n, ci, *], weight[co, ci / groups, *], bias): batch, output channels and
    input channels split (a bias, added once, keeps the latter whole: capture writes convolution + add).

    With groups, x[n, (g ci), *], weight[(g co), ci, *]: whole groups split, and a piece has its number of them.
    """
    x, weight = call.shapes[:2]
    if len(x) != len(weight):
        return None  # no batch dim
    general = call.name == "aten.convolution"
    at = 8 if general else 6
    if general and call.arg(6, "transposed", False):
        return _transposed(call, at)
    groups = int(call.arg(at, "groups", 1))
    bias = len(call.operands) == 3
    inside, outside = weight[1], weight[0] // groups
    whole = "!" if bias or groups > 1 else ""
    channels = [(groups, "g"), (inside, f"ci{whole}")]
    weights = [_dim((groups, "g"), (outside, "co" if groups == 1 else "co!")), _dim((inside, f"ci{whole}"))]
    unread = 1  # two operations for each (output, weight) pair: the input's own space is not looped over
    for size in x[2:]:
        unread *= size
    return _convolution(call, _dim(*channels), weights, weights[0], groups, at, unread)


def transposed_convolution(call: OpCall) -> Rule | None:
    """conv_transpose1d, 2d, 3d(x[n, ci, *], weight[ci, co / groups, *], bias), as the above."""
    return _transposed(call, 6)


def _transposed(call: OpCall, at: int) -> Rule | None:
    x, weight = call.shapes[:2]
    if len(x) != len(weight):
        return None
    groups = int(call.arg(at, "groups", 1))
    whole = "!" if len(call.operands) == 3 or groups > 1 else ""
    inside = (weight[0] // groups, f"ci{whole}")
    outside = (weight[1], "co" if groups == 1 else "co!")
    channels = _dim((groups, "g"), inside)
    unread = 1  # here it is the output's
    for size in call.result_shapes[0][2:]:
        unread *= size
    return _convolution(
        call, channels, [channels, _dim(outside)], _dim((groups, "g"), outside), groups, at, unread
    )


def _dim(*factors: tuple[int, str]) -> str:
    """A dim of the factors larger than 1: `1`, `co`, `(g co)`."""
    names = [name for size, name in factors if size != 1]
    return "1" if not names else names[0] if len(names) == 1 else f"({' '.join(names)})"


def _convolution(
    call: OpCall, channels: str, weights: list[str], made: str, groups: int, at: int, unread: int
) -> Rule | None:
    x, weight, result = *call.shapes[:2], call.result_shapes[0]
    space = range(len(x) - 2)
    inside, window, outside = ([f"{name}{dim}!" for dim in space] for name in ("i", "k", "o"))
    operands = [
        [*tokens(x[:1], ["n"]), channels, *tokens(x[2:], inside)],
        [*weights, *tokens(weight[2:], window)],
        *[[made]] * (len(call.operands) - 2),
    ]
    text = text_of(operands, [[*tokens(x[:1], ["n"]), made, *tokens(result[2:], outside)]])
    return call.parse(
        text,
        sums=() if len(call.operands) == 3 else EITHER,
        flops_per_point=2.0 / max(unread, 1),
        count_args=((at, "g"),) if groups > 1 else (),
        logical={"n": "batch", "co": "channels", "g": "channels"},
    )


def grouped_mm(call: OpCall) -> Rule | None:
    """Grouped matmul x[t, k], weight[e, k, n], offsets[e]: rows of x go to experts by the offsets.

    Tokens and experts are whole here (their split is a dispatch); `n` and `k` split as in a matmul.
    """
    if len(call.operands) != 3 or [len(shape) for shape in call.shapes] != [2, 3, 1]:
        return None
    experts = call.shapes[1][0]
    return call.parse(
        "t! k, e! k n, e! -> t! n",
        sums=EITHER,
        flops_per_point=2.0 / max(experts, 1),
        logical={"e": "expert"},
    )


def _tensors_in_list(function: RuleFunction) -> RuleFunction:
    def rule(call: OpCall) -> Rule | None:
        found = len(call.args) == 2 and not is_size_list(call.args[1])
        return (
            function(call)
            if found and all(isinstance(leaf, TensorInfo) for leaf in leaves(call.args[1]))
            else None
        )

    return rule


RULES: Mapping[str, RuleFunction] = {
    "aten.linear": linear,
    **{f"aten.{name}": matmul for name in ("matmul", "mm", "bmm", "dot", "mv")},
    **{f"aten.{name}": addmm for name in ("addmm", "baddbmm", "addmv")},
    "aten.outer": outer,
    "aten.ger": outer,
    "aten.cdist": distances,
    "aten.bilinear": bilinear,
    "aten.einsum": _tensors_in_list(einsum),
    **{f"aten.{name}": convolution for name in ("conv1d", "conv2d", "conv3d", "convolution")},
    **{f"aten.conv_transpose{space}d": transposed_convolution for space in (1, 2, 3)},
    "aten._grouped_mm": grouped_mm,
    "transformers.grouped_mm_fallback": grouped_mm,
}
