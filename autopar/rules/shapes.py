"""Views: reshapes, permutations, expansions. All are linear. A reshape is factored from its sizes alone:

view [8, 32] -> [8, 4, 8]        a (b c) -> a b c
view [6, 4] -> [4, 6]            (a b!) e! -> (a c!) d!
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.rules.call import (
    OpCall,
    RuleFunction,
    dim_at,
    dims_at,
    floats_only,
    is_size_list,
    names,
    text_of,
    tokens,
)
from autopar.rules.rule import Rule

FIRST = ((0,),)  # linear in the first operand


def factor_reshape(source: Sequence[int], target: Sequence[int]) -> Rule:
    """The finest rule for a reshape: greedily match the products of the sizes, major to minor.

    Where the next sizes share a common divisor, that is a factor of both; where they share none, the rest of
    both, up to where the products meet again, is whole.
    """
    if math.prod(source) != math.prod(target):
        raise ValueError(f"cannot reshape {list(source)} to {list(target)}")
    left, right = _Factors(source), _Factors(target)
    sizes: dict[str, int] = {}
    whole: set[str] = set()

    def take(side: _Factors, size: int, *, fixed: bool) -> str:
        name = names(26)[len(sizes)] if len(sizes) < 26 else f"a{len(sizes)}"
        sizes[name] = size
        if fixed:
            whole.add(name)
        side.take(name, size)
        return name

    if math.prod(source) == 0:  # an empty tensor: its sizes tell nothing
        for side in (left, right):
            while side.next_size != 1:
                take(side, side.next_size, fixed=True)
        return Rule((left.dims,), (right.dims,), sizes, frozenset(whole))
    while left.next_size != 1 or right.next_size != 1:
        common = math.gcd(left.next_size, right.next_size)
        if common > 1:
            right.take(take(left, common, fixed=False), common)
            continue
        ahead, behind = 1, 1  # what each side has covered since the sizes parted
        while ahead != behind or ahead == 1:
            side, size = (left, left.next_size) if ahead <= behind else (right, right.next_size)
            take(side, size, fixed=True)
            ahead, behind = (ahead * size, behind) if side is left else (ahead, behind * size)
    return Rule((left.dims,), (right.dims,), sizes, frozenset(whole))


class _Factors:
    """The dims of one side of a reshape while their factors are taken off, major to minor."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._rest = list(shape)
        self._dims: list[tuple[str, ...]] = [() for _ in shape]

    @property
    def next_size(self) -> int:
        """What is left of the first dim that is not used up; 1 at the end."""
        return next((size for size in self._rest if size != 1), 1)

    def take(self, name: str, size: int) -> None:
        dim = next(dim for dim, rest in enumerate(self._rest) if rest != 1)
        self._dims[dim] += (name,)
        self._rest[dim] = self._rest[dim] // size if size else 1

    @property
    def dims(self) -> tuple[tuple[str, ...], ...]:
        return tuple(self._dims)


def reshape(call: OpCall) -> Rule | None:
    """view, reshape, _unsafe_view: the sizes are argument 1. `view(dtype)` of the same item size is pointwise."""
    if len(call.operands) != 1:
        return None
    if len(call.args) < 2 or not is_size_list(call.args[1]):
        same = call.shapes[0] == call.result_shapes[0]
        return call.parse("... -> ...") if same else None
    return replace(factor_reshape(call.shapes[0], call.result_shapes[0]), sums=FIRST, shape_arg=1)


def regroup(call: OpCall) -> Rule | None:
    """flatten, unsqueeze: a reshape whose arguments hold no sizes."""
    return replace(factor_reshape(call.shapes[0], call.result_shapes[0]), sums=FIRST)


def squeeze(call: OpCall) -> Rule | None:
    """squeeze(x, dims): a named dim that is not of size 1 stays, and must stay so on every device."""
    if call.arg(1, "dim") is None:
        return None  # which dims go would depend on the size of the pieces
    shape = call.shapes[0]
    dims = call.arg(1, "dim")
    named = dims_at(dims, len(shape)) if dims not in ((), []) else ()
    factors = [factor + ("!" if dim in named else "") for dim, factor in enumerate(names(len(shape)))]
    kept = [factor for dim, factor in enumerate(factors) if dim not in named or shape[dim] != 1]
    sizes = [size for dim, size in enumerate(shape) if dim not in named or size != 1]
    return call.parse(text_of([tokens(shape, factors)], [tokens(sizes, kept)]), sums=FIRST)


def unflatten(call: OpCall) -> Rule | None:
    """unflatten(x, dim, sizes): the sizes stay as they are written, so the dim they replace is whole."""
    shape, dim = call.shapes[0], dim_at(call.arg(1, "dim"), len(call.shapes[0]))
    factors = names(len(shape))
    factors[dim] += "!"
    new = len(call.result_shapes[0]) - len(shape) + 1
    inside = [f"{factors[dim].rstrip('!')}_{index + 2}!" for index in range(new)]
    result = [*factors[:dim], *inside, *factors[dim + 1 :]]
    text = text_of([tokens(shape, factors)], [tokens(call.result_shapes[0], result)])
    return call.parse(text, sums=FIRST)


# ---- permutations -----------------------------------------------------------------------------------------


def _permuted(call: OpCall, order: Sequence[int]) -> Rule:
    factors = tokens(call.shapes[0], names(len(call.shapes[0])))
    return call.parse(text_of([factors], [[factors[dim] for dim in order]]), sums=FIRST)


def permute(call: OpCall) -> Rule | None:
    rank = len(call.shapes[0])
    return _permuted(call, [dim_at(dim, rank) for dim in call.arg(1, "dims")])


def transpose(call: OpCall) -> Rule | None:
    """transpose(x, dim0, dim1); t(x) swaps the two dims of a matrix."""
    rank = len(call.shapes[0])
    order = list(range(rank))
    if rank >= 2:
        a, b = dim_at(call.arg(1, "dim0", -2), rank), dim_at(call.arg(2, "dim1", -1), rank)
        order[a], order[b] = order[b], order[a]
    return _permuted(call, order)


def movedim(call: OpCall) -> Rule | None:
    rank = len(call.shapes[0])
    source, target = dims_at(call.arg(1, "source"), rank), dims_at(call.arg(2, "destination"), rank)
    order: list[int | None] = [None] * rank
    for a, b in zip(source, target, strict=True):
        order[b] = a
    others = iter(dim for dim in range(rank) if dim not in source)
    return _permuted(call, [next(others) if dim is None else dim for dim in order])


# ---- expansion --------------------------------------------------------------------------------------------


def expand(call: OpCall) -> Rule | None:
    """expand(x, sizes): new and widened dims belong to the result alone, and may be split there."""
    if len(call.args) < 2:
        return None
    return call.parse("... -> ...", sums=FIRST, shape_arg=1)


def expand_as(call: OpCall) -> Rule | None:
    """expand_as(x, y): y gives its shape and no values."""
    return call.parse("..., ... -> ...", sums=FIRST)


def repeat(call: OpCall) -> Rule | None:
    """repeat(x, repeats): a repeated dim is whole; a size-1 or new dim becomes whole too (its count is an argument)."""
    repeats = list(call.arg(1, "dims" if call.name.endswith("tile") else "repeats"))
    shape = call.shapes[0]
    repeats = [1] * (len(shape) - len(repeats)) + repeats  # tile takes fewer
    factors = names(len(shape))
    padded = [1] * (len(repeats) - len(shape)) + list(shape)
    inside = ["", ""]
    source, target = [], []
    for dim, (times, size) in enumerate(zip(repeats, padded, strict=True)):
        own = dim - (len(repeats) - len(shape))
        factor = "1" if size == 1 else factors[own] + ("!" if times != 1 else "")
        if own >= 0:
            source.append(factor)
        inside = [f"r{dim}!"] * (times != 1) + [factor] * (size != 1)
        target.append("1" if not inside else inside[0] if len(inside) == 1 else f"({' '.join(inside)})")
    return call.parse(text_of([source], [target]), sums=FIRST)


def repeat_interleave(call: OpCall) -> Rule | None:
    """repeat_interleave(x, count, dim): `a -> (a r)`, each element followed by its copies."""
    if len(call.operands) != 1 or not isinstance(call.arg(1, "repeats"), int) or call.arg(2, "dim") is None:
        return None
    shape, dim = call.shapes[0], dim_at(call.arg(2, "dim"), len(call.shapes[0]))
    factors = tokens(shape, names(len(shape)))
    result = list(factors)
    if call.arg(1, "repeats") != 1:
        result[dim] = "r!" if factors[dim] == "1" else f"({factors[dim]} r!)"
    return call.parse(text_of([factors], [result]), sums=FIRST)


def complex_view(call: OpCall) -> Rule | None:
    """view_as_complex: the last dim of size 2 becomes the parts of a number; view_as_real: the reverse."""
    text = "... p! -> ..." if call.name.endswith("complex") else "... -> ... p!"
    return call.parse(text, sums=FIRST)


def like_second(call: OpCall) -> Rule | None:
    """view_as(x, y), reshape_as: y gives its shape and no values, and lies as the result does."""
    if len(call.operands) != 2 or call.shapes[1] != call.result_shapes[0]:
        return None
    rule = factor_reshape(call.shapes[0], call.result_shapes[0])
    return replace(rule, operands=(rule.operands[0], rule.results[0]), sums=FIRST)


def reversed_dims(call: OpCall) -> Rule | None:
    """numpy_T: all dims the other way round."""
    return _permuted(call, range(len(call.shapes[0]))[::-1])


def pixel_shuffle(call: OpCall) -> Rule | None:
    """pixel_shuffle(x, r): `... (c r s) h w -> ... c (h r) (w s)`."""
    return _shuffled(call, call.shapes[0], call.result_shapes[0], int(call.arg(1, "upscale_factor")))


def pixel_unshuffle(call: OpCall) -> Rule | None:
    """pixel_unshuffle(x, r): the reverse."""
    return _shuffled(call, call.result_shapes[0], call.shapes[0], int(call.arg(1, "downscale_factor")))


def _shuffled(call: OpCall, deep: Sequence[int], wide: Sequence[int], ratio: int) -> Rule | None:
    lead = tokens(deep[:-3], names(len(deep) - 3, "l"))
    inner = [] if ratio == 1 else ["r", "s"]

    def dim(first: str, size: int, more: list[str]) -> str:
        parts = [first] * (size > 1) + more
        return "1" if not parts else parts[0] if len(parts) == 1 else f"({' '.join(parts)})"

    short = [*lead, dim("c", wide[-3], inner), dim("h", deep[-2], []), dim("w", deep[-1], [])]
    long = [*lead, dim("c", wide[-3], []), dim("h", deep[-2], inner[:1]), dim("w", deep[-1], inner[1:])]
    both = (
        (short, long)
        if call.shapes[0] == tuple(deep) and call.name.endswith("pixel_shuffle")
        else (long, short)
    )
    # The parts of a pixel are whole: alone in a dim they would be its leading factor.
    whole = frozenset(inner)
    return call.parse(text_of([both[0]], [both[1]]), sums=FIRST, whole=whole, logical={"c": "channels"})


def channel_shuffle(call: OpCall) -> Rule | None:
    """channel_shuffle(x, groups): channels change places, so they are whole."""
    factors = names(len(call.shapes[0]))
    factors[1] += "!"
    full = tokens(call.shapes[0], factors)
    return call.parse(text_of([full], [full]), sums=FIRST)


def im2col(call: OpCall) -> Rule | None:
    """im2col(x[n, c, h, w], window, ...) -> [n, (c window), places]."""
    x, result = call.shapes[0], call.result_shapes[0]
    if len(x) != 4:
        return None
    window = result[1] // x[1]
    columns = _channels_of(x[1], window)
    text = text_of(
        [tokens(x, ["n", "c", "h!", "w!"])], [[*tokens(x[:1], ["n"]), columns, *tokens(result[2:], ["p!"])]]
    )
    return call.parse(text, sums=FIRST, logical={"n": "batch", "c": "channels"})


def col2im(call: OpCall) -> Rule | None:
    """col2im(x[n, (c window), places], size, ...) -> [n, c, h, w]."""
    x, result = call.shapes[0], call.result_shapes[0]
    if len(x) != 3:
        return None
    columns = _channels_of(result[1], x[1] // result[1])
    text = text_of(
        [[*tokens(x[:1], ["n"]), columns, *tokens(x[2:], ["p!"])]], [tokens(result, ["n", "c", "h!", "w!"])]
    )
    return call.parse(text, sums=FIRST, logical={"n": "batch", "c": "channels"})


def _channels_of(channels: int, window: int) -> str:
    parts = ["c"] * (channels > 1) + ["k!"] * (window > 1)
    return "1" if not parts else parts[0] if len(parts) == 1 else f"({' '.join(parts)})"


_TABLE: Mapping[str, RuleFunction] = {
    "aten.view": reshape,
    "aten.reshape": reshape,
    "aten._unsafe_view": reshape,
    "aten.view_as": like_second,
    "aten.reshape_as": like_second,
    "aten.flatten": regroup,
    "aten.ravel": regroup,
    **{f"aten.atleast_{count}d": regroup for count in (1, 2, 3)},
    "aten.unsqueeze": regroup,
    "aten.squeeze": squeeze,
    "aten.unflatten": unflatten,
    "aten.permute": permute,
    "aten.transpose": transpose,
    "aten.swapaxes": transpose,
    "aten.swapdims": transpose,
    "aten.mT": transpose,
    "aten.numpy_T": reversed_dims,
    "aten.moveaxis": movedim,
    "aten.pixel_shuffle": pixel_shuffle,
    "aten.pixel_unshuffle": pixel_unshuffle,
    "aten.channel_shuffle": channel_shuffle,
    "aten.im2col": im2col,
    "aten.col2im": col2im,
    "aten.t": transpose,
    "aten.movedim": movedim,
    "aten.expand": expand,
    "aten.broadcast_to": expand,
    "aten.expand_as": expand_as,
    "aten.repeat": repeat,
    "aten.tile": repeat,
    "aten.repeat_interleave": repeat_interleave,
    "aten.view_as_complex": complex_view,
    "aten.view_as_real": complex_view,
}
RULES: Mapping[str, RuleFunction] = {name: floats_only(function) for name, function in _TABLE.items()}
