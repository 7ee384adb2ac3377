"""Look-ups: embedding, index, gather, scatter. The looked-up dim is whole, other dims and the index's dims split.

A split vocabulary of an embedding needs the lowering "embedding": rows that live elsewhere read as zero, so that
the result is a partial sum.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.program import TensorInfo
from autopar.rules.call import OpCall, RuleFunction, dim_at, names, text_of, tokens
from autopar.rules.rule import Rule


def embedding(call: OpCall) -> Rule | None:
    """embedding(weight[v, h], indices)."""
    return call.parse(
        "v h, ... -> ... h",
        special=frozenset({"v"}),
        lowering="embedding",
        sums=((0,),),
        logical={"v": "vocab", "h": "hidden"},
    )


def index(call: OpCall) -> Rule | None:
    """index(x, [None, i, j, None]): tensors broadcast together; their dims stand where they stood, or in front
    if a None stands between them."""
    indices = list(call.arg(1, "indices"))
    if any(isinstance(item, TensorInfo) and item.dtype in ("bool", "uint8") for item in indices):
        return None  # a mask: the size of the result depends on the data
    at = [dim for dim, item in enumerate(indices) if item is not None]
    if not at:
        return None
    shape = call.shapes[0]
    factors = [factor + ("!" if dim in at else "") for dim, factor in enumerate(names(len(shape), "x"))]
    depth = max(len(indices[dim].shape) for dim in at)
    looked = names(depth, "i")
    adjacent = at == list(range(at[0], at[-1] + 1))
    first = at[0] if adjacent else 0
    rest = [factor for dim, factor in enumerate(factors) if dim not in at]
    result = [*rest[:first], *looked, *rest[first:]]
    operands = [tokens(shape, factors)]
    operands += [tokens(indices[dim].shape, looked[depth - len(indices[dim].shape) :]) for dim in at]
    text = text_of(operands, [tokens(call.result_shapes[0], result)])
    return call.parse(text, sums=((0,),) if call.operands[0].is_float else ())


def index_select(call: OpCall) -> Rule | None:
    """index_select(x, dim, index)."""
    shape, dim = call.shapes[0], dim_at(call.arg(1, "dim"), len(call.shapes[0]))
    if len(call.shapes[1]) != 1:
        return None
    factors = names(len(shape))
    result = [*factors[:dim], "i", *factors[dim + 1 :]]
    factors[dim] += "!"
    text = text_of(
        [tokens(shape, factors), tokens(call.shapes[1], ["i"])], [tokens(call.result_shapes[0], result)]
    )
    # A result of size 1 in the dim would lose its factor: keep it in step with the index.
    return call.parse(text, sums=((0,),) if call.operands[0].is_float else ())


def gather(call: OpCall) -> Rule | None:
    """gather(x, dim, index): other dims of the index may be shorter than those of x; then both are whole."""
    return _gathered(call, call.arg(1, "dim"))


def _gathered(call: OpCall, at: int) -> Rule | None:
    x, position = call.shapes
    if call.result_shapes[0] != position:
        return None
    dim = dim_at(at, len(x))
    source, looked = _aligned(x, position, dim)
    text = text_of([tokens(x, source), tokens(position, looked)], [tokens(position, looked)])
    return call.parse(text, sums=((0,),) if call.operands[0].is_float else ())


def take_along_dim(call: OpCall) -> Rule | None:
    """take_along_dim(x, index, dim): a gather whose other dims broadcast; only the plain case has a rule."""
    dim = call.arg(2, "dim")
    return None if dim is None else _gathered(call, dim)


def scatter(call: OpCall) -> Rule | None:
    """scatter(x, dim, index, source or number), scatter_add, scatter_reduce: the dim is whole in all."""
    x = call.shapes[0]
    dim = dim_at(call.arg(1, "dim"), len(x))
    position = call.shapes[1]
    target, looked = _aligned(x, position, dim)
    looked[dim] += "!"
    operands = [tokens(x, target), tokens(position, looked)]
    if len(call.operands) == 3:
        if call.shapes[2] != position:
            return None
        operands.append(tokens(position, looked))
    adds = call.name == "aten.scatter_add" and all(call.operands[index].is_float for index in (0, 2))
    return call.parse(text_of(operands, [tokens(x, target)]), sums=((0, 2),) if adds else ())


def _aligned(x: tuple[int, ...], position: tuple[int, ...], dim: int) -> tuple[list[str], list[str]]:
    """Factors of x and of the index: shared where the sizes agree, whole where not; `dim` is whole in x."""
    source, looked = names(len(x)), names(len(x))
    for at, (size, other) in enumerate(zip(x, position, strict=True)):
        if at == dim:
            source[at], looked[at] = "n!", "i"
        elif size != other:
            source[at], looked[at] = f"{source[at]}!", f"{looked[at]}_2!"
    return source, looked


def index_put(call: OpCall) -> Rule | None:
    """index_put(x, [i, j], values): indexed leading dims and the index's dims are whole, the rest splits."""
    indices = list(call.arg(1, "indices"))
    if not indices or any(
        not isinstance(item, TensorInfo) or item.dtype in ("bool", "uint8") for item in indices
    ):
        return None
    x, values = call.shapes[0], call.shapes[-1]
    rest = names(len(x) - len(indices), "x")
    depth = max(len(item.shape) for item in indices)
    looked = [f"i{position}!" for position in range(depth)]
    target = tokens(x, [*(f"n{dim}!" for dim in range(len(indices))), *rest])
    operands = [target]
    operands += [tokens(item.shape, looked[depth - len(item.shape) :]) for item in indices]
    into = [*looked, *rest]
    if len(values) > len(into):
        return None
    operands.append(tokens(values, into[len(into) - len(values) :]))
    return call.parse(text_of(operands, [target]))


def index_add(call: OpCall) -> Rule | None:
    """index_add(x, dim, index[i], source), index_copy, index_reduce: the dim is whole in all; adding is linear in x
    and source together."""
    x, source = call.shapes[0], call.shapes[2]
    if len(call.operands) != 3 or not x or len(x) != len(source):
        return None
    dim, factors = dim_at(call.arg(1, "dim"), len(x)), names(len(x))
    into = tokens(x, [*factors[:dim], "n!", *factors[dim + 1 :]])
    taken = tokens(source, [*factors[:dim], "i!", *factors[dim + 1 :]])
    adds = call.name != "aten.index_reduce" and call.operands[0].is_float and call.operands[2].is_float
    return call.parse(
        text_of([into, tokens(call.shapes[1], ["i!"]), taken], [into]), sums=((0, 2),) if adds else ()
    )


def index_fill(call: OpCall) -> Rule | None:
    """index_fill(x, dim, index, number)."""
    x = call.shapes[0]
    if len(call.operands) != 2 or not x:
        return None
    dim, factors = dim_at(call.arg(1, "dim"), len(x)), names(len(x))
    full = tokens(x, [*factors[:dim], "n!", *factors[dim + 1 :]])
    return call.parse(text_of([full, tokens(call.shapes[1], ["i!"])], [full]))


def index_sum(call: OpCall) -> Rule | None:
    """autopar.index_sum(source, index[i], dim, size), capture's form of index_add: a split of i leaves partial sums."""
    source, dim = call.shapes[0], dim_at(call.arg(2, "dim"), len(call.shapes[0]))
    factors = names(len(source))
    factors[dim] = "i"
    made = [*factors[:dim], "n!", *factors[dim + 1 :]]
    return call.parse(
        text_of(
            [tokens(source, factors), tokens(call.shapes[1], ["i"])], [tokens(call.result_shapes[0], made)]
        ),
        sums=((0,),) if call.operands[0].is_float else (),
    )


def masked_scatter(call: OpCall) -> Rule | None:
    """masked_scatter(x, mask, source): the places that the mask marks, in order, take the elements of the source, in
    order. Split by its first dim, a rank must know how many the ranks before it take: the lowering "masked_scatter"."""
    x, mask, source = call.shapes
    first = next((dim for dim, size in enumerate(x) if size != 1), None)
    if first is None or len(mask) > len(x) or call.result_shapes[0] != x:
        return None
    factors = [name if dim == first else f"{name}!" for dim, name in enumerate(names(len(x), "x"))]
    taken = [f"s{index}!" for index in range(len(source))]
    text = text_of(
        [tokens(x, factors), tokens(mask, factors[len(x) - len(mask) :]), tokens(source, taken)],
        [tokens(x, factors)],
    )
    return call.parse(text, special=frozenset({factors[first]}), lowering="masked_scatter")


def embedding_bag(call: OpCall) -> Rule | None:
    """embedding_bag(weight[v, h], ids[i], offsets[o], ...): bags of unequal lengths; only the width splits."""
    if len(call.operands) != 3 or len(call.shapes[1]) != 1:
        return None
    results = [["o!", "h"], *([f"z{index}d{dim}!" for dim in range(len(shape))] for index, shape in
               enumerate(call.result_shapes[1:]))]  # fmt: skip
    text = text_of([["v!", "h"], ["i!"], ["p!"]], [tokens(shape, made) for shape, made in
                   zip(call.result_shapes, results, strict=True)])  # fmt: skip
    return call.parse(text) if call.arg(4, "mode", 0) in (0, 1) else None


RULES: Mapping[str, RuleFunction] = {
    "aten.embedding": embedding,
    "aten.index": index,
    "aten._unsafe_index": index,
    "aten.index_select": index_select,
    "aten.gather": gather,
    "aten.take_along_dim": take_along_dim,
    **{f"aten.{name}": scatter for name in ("scatter", "scatter_add", "scatter_reduce")},
    "aten.index_put": index_put,
    **{f"aten.{name}": index_add for name in ("index_add", "index_copy", "index_reduce")},
    "aten.index_fill": index_fill,
    "autopar.index_sum": index_sum,
    "aten.masked_scatter": masked_scatter,
    "aten.embedding_bag": embedding_bag,
}
