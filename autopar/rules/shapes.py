"""Ops that move elements about: views, permutations, concatenation, slices, padding.

All are linear. A dim that the op cuts, joins or shifts is whole; a reshape is factored from its sizes alone:

    view [8, 32] -> [8, 4, 8]        a (b c) -> a b c
    view [6, 4] -> [4, 6]            (a b!) c! -> (a d!) e!
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar.program import TensorInfo
from autopar.rules.call import (
    OpCall,
    RuleFunction,
    dim_at,
    dims_at,
    fresh,
    is_size_list,
    names,
    text_of,
    tokens,
    whole_dims,
)
from autopar.rules.rule import Rule

FIRST = ((0,),)  # linear in the first operand


def factor_reshape(source: Sequence[int], target: Sequence[int]) -> str:
    """The finest rule text for a reshape: greedily match the products of the sizes, major to minor.

    Where the next sizes share a common divisor that is a factor of both; where they share none, the rest of
    both, up to where the products meet again, is whole.
    """
    if math.prod(source) != math.prod(target):
        raise ValueError(f"cannot reshape {list(source)} to {list(target)}")
    count = 0
    left: list[list[str]] = [[] for _ in source]
    right: list[list[str]] = [[] for _ in target]

    def factor() -> str:
        nonlocal count
        count += 1
        return names(26)[count - 1] if count <= 26 else f"a{count}"

    if math.prod(source) == 0:  # an empty tensor: sizes tell nothing
        left, right = [[factor() + "!"] for _ in source], [[factor() + "!"] for _ in target]
    else:
        i = j = 0
        rest_i, rest_j = (source[0] if source else 1), (target[0] if target else 1)
        while i < len(source) or j < len(target):
            if rest_i == 1 and i < len(source):
                i += 1
                rest_i = source[i] if i < len(source) else 1
            elif rest_j == 1 and j < len(target):
                j += 1
                rest_j = target[j] if j < len(target) else 1
            elif (common := math.gcd(rest_i, rest_j)) > 1:
                name = factor()
                left[i].append(name)
                right[j].append(name)
                rest_i, rest_j = rest_i // common, rest_j // common
            else:  # coprime: whole up to where the products meet again
                product_i, product_j = rest_i, rest_j
                left[i].append(factor() + "!")
                right[j].append(factor() + "!")
                while product_i != product_j:
                    if product_i < product_j:
                        i += 1
                        product_i *= source[i]
                        left[i] += [factor() + "!"] if source[i] > 1 else []
                    else:
                        j += 1
                        product_j *= target[j]
                        right[j] += [factor() + "!"] if target[j] > 1 else []
                rest_i = rest_j = 1

    def dims(groups: list[list[str]]) -> list[str]:
        return ["1" if not group else group[0] if len(group) == 1 else f"({' '.join(group)})" for group in groups]

    return text_of([dims(left)], [dims(right)])


def reshape(call: OpCall) -> Rule | None:
    """view, reshape, _unsafe_view: the sizes are argument 1. `view(dtype)` of the same item size is pointwise."""
    if len(call.operands) != 1:
        return None
    if len(call.args) < 2 or not is_size_list(call.args[1]):
        same = call.shapes[0] == call.result_shapes[0]
        return call.parse("... -> ...") if same else None
    return call.parse(factor_reshape(call.shapes[0], call.result_shapes[0]), sums=FIRST, shape_arg=1)


def regroup(call: OpCall) -> Rule | None:
    """flatten, unsqueeze: a reshape whose arguments hold no sizes."""
    return call.parse(factor_reshape(call.shapes[0], call.result_shapes[0]), sums=FIRST)


def squeeze(call: OpCall) -> Rule | None:
    """squeeze(x, dims): a named dim that is not of size 1 stays, and must stay so on every device."""
    if len(call.args) < 2:
        return None  # which dims go would depend on the size of the pieces
    shape = call.shapes[0]
    named = dims_at(call.args[1], len(shape)) if call.args[1] not in ((), []) else ()
    factors = [factor + ("!" if dim in named else "") for dim, factor in enumerate(names(len(shape)))]
    kept = [factor for dim, factor in enumerate(factors) if dim not in named or shape[dim] != 1]
    sizes = [size for dim, size in enumerate(shape) if dim not in named or size != 1]
    return call.parse(text_of([tokens(shape, factors)], [tokens(sizes, kept)]), sums=FIRST)


def unflatten(call: OpCall) -> Rule | None:
    """unflatten(x, dim, sizes): the sizes stay as they are written, so the dim they replace is whole."""
    shape, dim = call.shapes[0], dim_at(call.args[1], len(call.shapes[0]))
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
    source, target = dims_at(call.args[1], rank), dims_at(call.args[2], rank)
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


# ---- joining and cutting ----------------------------------------------------------------------------------


def cat(call: OpCall) -> Rule | None:
    """cat(tensors, dim): `a b!, a b_2! -> a b_3!`."""
    rank = len(call.result_shapes[0])
    if any(len(shape) != rank for shape in call.shapes):
        return None  # the old form, where an empty 1-D tensor may stand among others
    dim, factors = dim_at(call.arg(1, "dim", 0), rank), names(rank)
    factor, operands = factors[dim] + "!", []
    for shape in (*call.shapes, call.result_shapes[0]):
        operands.append(tokens(shape, [*factors[:dim], factor, *factors[dim + 1 :]]))
        factor = fresh(factor)
    return call.parse(text_of(operands[:-1], operands[-1:]), sums=(tuple(range(len(call.operands))),))


def stack(call: OpCall) -> Rule | None:
    """stack(tensors, dim): the new dim is whole."""
    rank = len(call.result_shapes[0])
    dim = dim_at(call.arg(1, "dim", 0), rank)
    factors = tokens(call.shapes[0], names(rank - 1))
    result = [*factors[:dim], "1" if len(call.operands) == 1 else "n!", *factors[dim:]]
    return call.parse(text_of([factors] * len(call.operands), [result]), sums=(tuple(range(len(call.operands))),))


def split(call: OpCall) -> Rule | None:
    """split, split_with_sizes, chunk: every result is a whole range of the dim."""
    shape = call.shapes[0]
    dim, factors = dim_at(call.arg(2, "dim", 0), len(shape)), names(len(shape))
    factor = factors[dim] + "!"
    source, results = tokens(shape, [*factors[:dim], factor, *factors[dim + 1 :]]), []
    for result in call.result_shapes:
        factor = fresh(factor)
        results.append(tokens(result, [*factors[:dim], factor, *factors[dim + 1 :]]))
    return call.parse(text_of([source], results), sums=FIRST)


def unbind(call: OpCall) -> Rule | None:
    return _without_dim(call, dim_at(call.arg(1, "dim", 0), len(call.shapes[0])))


def select(call: OpCall) -> Rule | None:
    return _without_dim(call, dim_at(call.arg(1, "dim", 0), len(call.shapes[0])))


def _without_dim(call: OpCall, dim: int) -> Rule | None:
    shape = call.shapes[0]
    factors = names(len(shape))
    factors[dim] += "!"
    source = tokens(shape, factors)
    return call.parse(text_of([source], [source[:dim] + source[dim + 1 :]] * len(call.results)), sums=FIRST)


def slice_(call: OpCall) -> Rule | None:
    """slice(x, dim, start, end, step): a slice of everything is nothing; any other makes the dim whole."""
    shape, dim = call.shapes[0], dim_at(call.arg(1, "dim", 0), len(call.shapes[0]))
    taken = call.result_shapes[0][dim]
    end = call.arg(3, "end")
    # With a finite end a piece of the dim would still be cut right: end >= its size.
    everything = taken == shape[dim] and call.arg(4, "step", 1) == 1 and (end is None or end >= shape[dim])
    if everything and (call.arg(2, "start") or 0) == 0:
        return call.parse("... -> ...", sums=FIRST)
    return whole_dims(call, [dim], sums=FIRST)


def narrow(call: OpCall) -> Rule | None:
    return whole_dims(call, [dim_at(call.args[1], len(call.shapes[0]))], sums=FIRST)


def slice_scatter(call: OpCall) -> Rule | None:
    """slice_scatter(x, source, dim, start, end): x with a range of `dim` replaced."""
    shape = call.shapes[0]
    dim, factors = dim_at(call.arg(2, "dim", 0), len(shape)), names(len(shape))
    end = call.arg(4, "end")
    everything = call.shapes[1][dim] == shape[dim] and (end is None or end >= shape[dim])
    if not everything:
        factors[dim] += "!"
    target = tokens(shape, factors)
    source = list(factors)
    source[dim] = factors[dim] if everything else fresh(factors[dim])
    return call.parse(text_of([target, tokens(call.shapes[1], source)], [target]), sums=((0, 1),))


def select_scatter(call: OpCall) -> Rule | None:
    """select_scatter(x, source, dim, index)."""
    shape = call.shapes[0]
    dim, factors = dim_at(call.args[2], len(shape)), names(len(shape))
    factors[dim] += "!"
    target = tokens(shape, factors)
    return call.parse(text_of([target, target[:dim] + target[dim + 1 :]], [target]), sums=((0, 1),))


def pad(call: OpCall) -> Rule | None:
    """pad(x, [before, after, ...] from the last dim, mode, value): padded dims are whole; linear unless it pads
    with a number other than 0."""
    rank = len(call.shapes[0])
    amounts = call.args[1]
    constant = call.name.endswith("constant_pad_nd")
    mode, value = ("constant", call.arg(2, "value", 0)) if constant else (call.arg(2, "mode", "constant"), call.arg(3, "value"))
    touched = [rank - 1 - index // 2 for index, amount in enumerate(amounts) if amount]
    if mode != "constant":
        touched = [rank - 1 - index for index in range(len(amounts) // 2)]
    return whole_dims(call, touched, sums=FIRST if mode != "constant" or not value else ())


def roll(call: OpCall) -> Rule | None:
    rank = len(call.shapes[0])
    return whole_dims(call, dims_at(call.arg(2, "dims", ()), rank), sums=FIRST)


def flip(call: OpCall) -> Rule | None:
    return whole_dims(call, dims_at(call.args[1], len(call.shapes[0])) if call.args[1] else (), sums=FIRST)


def triangle(call: OpCall) -> Rule | None:
    """tril, triu: which elements stay depends on the position in the last two dims."""
    rank = len(call.shapes[0])
    return whole_dims(call, (rank - 2, rank - 1), sums=FIRST)


def difference(call: OpCall) -> Rule | None:
    """diff(x, n, dim, prepend, append): neighbours along `dim` meet, so it is whole."""
    rank = len(call.shapes[0])
    dim, factors = dim_at(call.arg(2, "dim", -1), rank), names(rank)
    factor, tensors = factors[dim] + "!", []
    for shape in (*call.shapes, call.result_shapes[0]):
        tensors.append(tokens(shape, [*factors[:dim], factor, *factors[dim + 1 :]]))
        factor = fresh(factor)
    floats = all(info.is_float for info in call.operands)
    return call.parse(text_of(tensors[:-1], tensors[-1:]), sums=(tuple(range(len(call.operands))),) if floats else ())


def unfold(call: OpCall) -> Rule | None:
    """unfold(x, dim, size, step): windows along a whole dim; the window is a new last dim."""
    shape, dim = call.shapes[0], dim_at(call.args[1], len(call.shapes[0]))
    factors = names(len(shape))
    factors[dim] += "!"
    result = [*factors, "w!"]
    result[dim] = fresh(factors[dim])
    return call.parse(text_of([tokens(shape, factors)], [tokens(call.result_shapes[0], result)]), sums=FIRST)


def complex_view(call: OpCall) -> Rule | None:
    """view_as_complex: the last dim of size 2 becomes the parts of a number; view_as_real: the reverse."""
    text = "... p! -> ..." if call.name.endswith("complex") else "... -> ... p!"
    return call.parse(text, sums=FIRST)


def _floats_only(function: RuleFunction) -> RuleFunction:
    """Partial sums of booleans mean nothing; those of whole numbers are not worth a thought."""

    def rule(call: OpCall) -> Rule | None:
        found = function(call)
        if found is None or all(isinstance(info, TensorInfo) and info.is_float for info in (*call.operands, *call.results)):
            return found
        from dataclasses import replace

        return replace(found, sums=())

    return rule


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
    "aten.cat": cat,
    "aten.stack": stack,
    "aten.split": split,
    "aten.split_with_sizes": split,
    "aten.chunk": split,
    "aten.unbind": unbind,
    "aten.select": select,
    "aten.slice": slice_,
    "aten.narrow": narrow,
    "aten.slice_scatter": slice_scatter,
    "aten.select_scatter": select_scatter,
    "aten.pad": pad,
    "aten.constant_pad_nd": pad,
    "aten.roll": roll,
    "aten.flip": flip,
    "aten.tril": triangle,
    "aten.triu": triangle,
    "aten.diff": difference,
    "aten.unfold": unfold,
    "aten.view_as_complex": complex_view,
    "aten.view_as_real": complex_view,
}
RULES: Mapping[str, RuleFunction] = {name: _floats_only(function) for name, function in _TABLE.items()}
