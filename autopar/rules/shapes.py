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
    repeats = list(call.arg(1, "repeats"))
    shape = call.shapes[0]
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


_TABLE: Mapping[str, RuleFunction] = {
    "aten.view": reshape,
    "aten.reshape": reshape,
    "aten._unsafe_view": reshape,
    "aten.flatten": regroup,
    "aten.unsqueeze": regroup,
    "aten.squeeze": squeeze,
    "aten.unflatten": unflatten,
    "aten.permute": permute,
    "aten.transpose": transpose,
    "aten.swapaxes": transpose,
    "aten.t": transpose,
    "aten.movedim": movedim,
    "aten.expand": expand,
    "aten.broadcast_to": expand,
    "aten.expand_as": expand_as,
    "aten.repeat": repeat,
    "aten.repeat_interleave": repeat_interleave,
    "aten.view_as_complex": complex_view,
    "aten.view_as_real": complex_view,
}
RULES: Mapping[str, RuleFunction] = {name: floats_only(function) for name, function in _TABLE.items()}
