"""Joining, cutting, padding and shifting: cat, split, slice, pad, roll, diff. All are linear; a dim that the op
joins, cuts or shifts is whole:

    cat             a b!, a b_2! -> a b_3!
    slice, dim 1    a b! -> a b_2!
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.rules.call import (
    OpCall,
    RuleFunction,
    dim_at,
    dims_at,
    floats_only,
    fresh,
    names,
    text_of,
    tokens,
    whole_dims,
)
from autopar.rules.rule import Rule

FIRST = ((0,),)  # linear in the first operand


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
    return call.parse(
        text_of([factors] * len(call.operands), [result]), sums=(tuple(range(len(call.operands))),)
    )


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
    return whole_dims(call, [dim_at(call.arg(1, "dim"), len(call.shapes[0]))], sums=FIRST)


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
    dim, factors = dim_at(call.arg(2, "dim"), len(shape)), names(len(shape))
    factors[dim] += "!"
    target = tokens(shape, factors)
    return call.parse(text_of([target, target[:dim] + target[dim + 1 :]], [target]), sums=((0, 1),))


def pad(call: OpCall) -> Rule | None:
    """pad(x, [before, after, ...] from the last dim, mode, value): padded dims are whole; linear unless it pads
    with a number other than 0."""
    rank = len(call.shapes[0])
    amounts = call.arg(1, "pad")
    constant = call.name.endswith("constant_pad_nd")
    mode, value = (
        ("constant", call.arg(2, "value", 0))
        if constant
        else (call.arg(2, "mode", "constant"), call.arg(3, "value"))
    )
    touched = [rank - 1 - index // 2 for index, amount in enumerate(amounts) if amount]
    if mode != "constant":
        touched = [rank - 1 - index for index in range(len(amounts) // 2)]
    return whole_dims(call, touched, sums=FIRST if mode != "constant" or not value else ())


def roll(call: OpCall) -> Rule | None:
    rank = len(call.shapes[0])
    return whole_dims(call, dims_at(call.arg(2, "dims", ()), rank), sums=FIRST)


def flip(call: OpCall) -> Rule | None:
    return whole_dims(
        call, dims_at(call.arg(1, "dims"), len(call.shapes[0])) if call.arg(1, "dims") else (), sums=FIRST
    )


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
    return call.parse(
        text_of(tensors[:-1], tensors[-1:]), sums=(tuple(range(len(call.operands))),) if floats else ()
    )


def unfold(call: OpCall) -> Rule | None:
    """unfold(x, dim, size, step): windows along a whole dim; the window is a new last dim."""
    shape, dim = call.shapes[0], dim_at(call.arg(1, "dimension"), len(call.shapes[0]))
    factors = names(len(shape))
    factors[dim] += "!"
    result = [*factors, "w!"]
    result[dim] = fresh(factors[dim])
    return call.parse(text_of([tokens(shape, factors)], [tokens(call.result_shapes[0], result)]), sums=FIRST)


def diagonal(call: OpCall) -> Rule | None:
    """diagonal(x, offset, dim1, dim2): both dims are whole, and one of the two's elements a new last dim."""
    rank = len(call.shapes[0])
    at = {dim_at(call.arg(2, "dim1", 0), rank), dim_at(call.arg(3, "dim2", 1), rank)}
    factors = [factor + ("!" if dim in at else "") for dim, factor in enumerate(names(rank))]
    rest = [factor for dim, factor in enumerate(tokens(call.shapes[0], factors)) if dim not in at]
    new = tokens(call.result_shapes[0][-1:], ["n!"])
    return call.parse(text_of([tokens(call.shapes[0], factors)], [[*rest, *new]]), sums=FIRST)


def diag_embed(call: OpCall) -> Rule | None:
    """diag_embed(x, offset, dim1, dim2): the last dim becomes the diagonal of two new ones."""
    rank = len(call.result_shapes[0])
    at = sorted({dim_at(call.arg(2, "dim1", -2), rank), dim_at(call.arg(3, "dim2", -1), rank)})
    factors = names(len(call.shapes[0]))
    factors[-1] += "!"
    rest = iter(tokens(call.shapes[0], factors)[:-1])
    size = call.result_shapes[0][at[0]]
    made = [("1" if size == 1 else f"n{at.index(dim)}!") if dim in at else next(rest) for dim in range(rank)]
    return call.parse(text_of([tokens(call.shapes[0], factors)], [made]), sums=FIRST)


def rotate(call: OpCall) -> Rule | None:
    """rot90(x, k, dims): the two dims change places; both are whole."""
    rank = len(call.shapes[0])
    at = [dim_at(dim, rank) for dim in call.arg(2, "dims", (0, 1))]
    factors = [factor + ("!" if dim in at else "") for dim, factor in enumerate(names(rank))]
    made = list(factors)
    if call.arg(1, "k", 1) % 2:
        made[at[0]], made[at[1]] = factors[at[1]], factors[at[0]]
    return call.parse(
        text_of([tokens(call.shapes[0], factors)], [tokens(call.result_shapes[0], made)]), sums=FIRST
    )


_TABLE: Mapping[str, RuleFunction] = {
    "aten.cat": cat,
    "aten.concat": cat,
    "aten.stack": stack,
    "aten.split": split,
    "aten.split_with_sizes": split,
    "aten.chunk": split,
    "aten.unsafe_split": split,
    "aten.unsafe_chunk": split,
    "aten.tensor_split": split,
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
    "aten.diagonal": diagonal,
    "aten.diag_embed": diag_embed,
    "aten.rot90": rotate,
}
RULES: Mapping[str, RuleFunction] = {name: floats_only(function) for name, function in _TABLE.items()}
