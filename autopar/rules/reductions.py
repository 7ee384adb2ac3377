"""Reductions, scans, orderings, pooling: `sum` and `mean` of a split dim are partial sums; every other reduction
keeps it whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from autopar.rules.call import OpCall, RuleFunction, dim_at, dims_at, names, text_of, tokens, whole_dims
from autopar.rules.rule import Rule


def _reduced(call: OpCall, dims: tuple[int, ...], *, whole: bool) -> Rule:
    """`a b -> a` or `a b! -> a`; a kept dim is `1`. All results have the same shape."""
    shape, result = call.shapes[0], call.result_shapes[0]
    factors = [
        factor + ("!" if whole and dim in dims else "") for dim, factor in enumerate(names(len(shape)))
    ]
    source = tokens(shape, factors)
    keep = len(result) == len(shape)
    kept = ["1" if dim in dims else factor for dim, factor in enumerate(source) if keep or dim not in dims]
    return call.parse(text_of([source], [kept] * len(call.results)), flops_per_point=1.0)


def total(call: OpCall, *, average: bool = False) -> Rule | None:
    """sum, mean, count_nonzero(x, dims)."""
    if len(call.operands) != 1:
        return None
    rule = _reduced(call, dims_at(call.arg(1, "dim"), len(call.shapes[0])), whole=False)
    linear = call.name != "aten.count_nonzero" and call.operands[0].is_float and call.results[0].is_float
    return replace(rule, average=average, sums=((0,),) if linear else ())


def extreme(call: OpCall) -> Rule | None:
    """amax, amin, argmax, max, min, any, all, prod, logsumexp(x, dim): reduced dims are whole."""
    if len(call.operands) != 1:
        return None  # max(x, y) is pointwise
    return _reduced(call, dims_at(call.arg(1, "dim"), len(call.shapes[0])), whole=True)


def larger(call: OpCall) -> Rule | None:
    """max and min: of two tensors, or over dims of one."""
    return call.parse("..., ... -> ...", flops_per_point=1.0) if len(call.operands) == 2 else extreme(call)


def spread(call: OpCall) -> Rule | None:
    """var, std, var_mean(x, dim, ...): the first argument may be the old `unbiased` flag."""
    dims = call.arg(1, "dim")
    return _reduced(call, dims_at(None if isinstance(dims, bool) else dims, len(call.shapes[0])), whole=True)


def norm(call: OpCall) -> Rule | None:
    """linalg_vector_norm(x, ord, dim), norm(x, p, dim)."""
    return _reduced(call, dims_at(call.arg(2, "dim"), len(call.shapes[0])), whole=True)


def scan(call: OpCall, *, linear: bool = False) -> Rule | None:
    """cumsum, cumprod, cummax(x, dim)."""
    floats = call.operands[0].is_float and call.results[0].is_float
    return along(call, sums=((0,),) if linear and floats else ())


def along(
    call: OpCall, *, position: int = 1, flops: float = 1.0, sums: tuple[tuple[int, ...], ...] = ()
) -> Rule | None:
    """Ops that work along one dim and keep the shape: softmax, log_softmax, cumsum."""
    shape = call.shapes[0]
    dims = (dim_at(call.arg(position, "dim", -1), len(shape)),) if shape else ()
    return whole_dims(call, dims, flops_per_point=flops, sums=sums)


def ordered(call: OpCall, *, position: int, default: int = -1) -> Rule | None:
    """topk(x, k, dim), sort(x, dim), argsort: the dim is whole and may change its size."""
    shape = call.shapes[0]
    dim = call.arg(position, "dim", default)
    if isinstance(dim, bool):  # sort.stable(x, *, stable, dim)
        dim = call.kwargs.get("dim", default)
    return whole_dims(call, (dim_at(dim, len(shape)),) if shape else ())


def pooled(call: OpCall, *, space: int, linear: bool = True) -> Rule | None:
    """Pooling and resizing: windows run over the last `space` dims, which are whole; batch and channels split."""
    rank = len(call.shapes[0])
    floats = call.operands[0].is_float and linear
    return whole_dims(call, range(rank - space, rank), sums=((0,),) if floats else ())


def histogram(call: OpCall) -> Rule | None:
    """histc(x, bins, min, max): counts of the pieces add up, if the range does not depend on the data."""
    low, high = call.arg(2, "min", 0), call.arg(3, "max", 0)
    source = names(len(call.shapes[0]))
    if low == high:
        source = [f"{name}!" for name in source]
    bins = tokens(call.result_shapes[0], ["bins!"])
    return call.parse(text_of([tokens(call.shapes[0], source)], [bins]))


def trace(call: OpCall) -> Rule | None:
    return call.parse("a! b! ->", sums=((0,),)) if call.operands[0].is_float else call.parse("a! b! ->")


def similarity(call: OpCall) -> Rule | None:
    """cosine_similarity(x, y, dim), after broadcasting: the dim is whole."""
    shape, rank = call.shapes[0], len(call.shapes[0])
    if call.shapes[1] != shape:
        return None
    dim = dim_at(call.arg(2, "dim", 1), rank)
    full = tokens(shape, [name + ("!" if at == dim else "") for at, name in enumerate(names(rank))])
    return call.parse(text_of([full, full], [[*full[:dim], *full[dim + 1 :]]]), flops_per_point=5.0)


def pairwise(call: OpCall) -> Rule | None:
    """pairwise_distance(x, y, p, eps, keepdim) along the last dim."""
    if call.shapes[0] != call.shapes[1]:
        return None
    lead = tokens(call.shapes[0][:-1], names(len(call.shapes[0]) - 1))
    full = [*lead, *tokens(call.shapes[0][-1:], ["d!"])]
    kept = [*lead, "1"] if call.arg(4, "keepdim", False) else lead
    return call.parse(text_of([full, full], [kept]), flops_per_point=3.0)


def grid_sample(call: OpCall) -> Rule | None:
    """grid_sampler_2d(x[n, c, h, w], grid[n, i, j, 2]), _3d: any place of x may be looked at."""
    space = len(call.shapes[0]) - 2
    inside, places = [f"s{dim}!" for dim in range(space)], [f"p{dim}" for dim in range(space)]
    x, grid, result = call.shapes[0], call.shapes[1], call.result_shapes[0]
    operands = [tokens(x, ["n", "c", *inside]), [*tokens(grid[:-1], ["n", *places]), "d!"]]
    return call.parse(
        text_of(operands, [tokens(result, ["n", "c", *places])]),
        sums=((0,),),
        logical={"n": "batch", "c": "channels"},
    )


def one_hot(call: OpCall) -> Rule | None:
    """one_hot(ids, classes): the classes are an argument, so they are whole; without them the data says how many."""
    return call.parse("... -> ... c!") if call.arg(1, "num_classes", -1) != -1 else None


RULES: Mapping[str, RuleFunction] = {
    "aten.sum": total,
    "aten.count_nonzero": total,
    "aten.mean": partial(total, average=True),
    **{
        f"aten.{name}": extreme
        for name in ("amax", "amin", "argmax", "argmin", "any", "all", "prod", "logsumexp", "aminmax", "median",
                     "nanmedian", "nanmean")
    },
    "aten.max": larger,
    "aten.min": larger,
    **{f"aten.{name}": spread for name in ("var", "std", "var_mean", "std_mean")},
    "aten.norm": norm,
    "aten.linalg_vector_norm": norm,
    "aten.cumsum": partial(scan, linear=True),
    **{f"aten.{name}": scan for name in ("cumprod", "cummax", "cummin", "logcumsumexp")},
    "aten.trace": trace,
    "aten.cosine_similarity": similarity,
    "aten.pairwise_distance": pairwise,
    "aten.one_hot": one_hot,
    "aten.grid_sampler_2d": grid_sample,
    "aten.grid_sampler_3d": grid_sample,
    "aten.grid_sampler": grid_sample,
    **{
        f"aten.{name}": partial(along, flops=5.0)
        for name in ("softmax", "_softmax", "log_softmax", "_log_softmax")
    },
    "aten._safe_softmax": partial(along, flops=5.0),
    "aten.topk": partial(ordered, position=2),
    "aten.sort": partial(ordered, position=1),
    "aten.argsort": partial(ordered, position=1),
    "aten.histc": histogram,
    **{
        f"aten.{kind}_pool{space}d": partial(pooled, space=space)
        for kind in ("avg", "adaptive_avg")
        for space in (1, 2, 3)
    },
    **{f"aten.max_pool{space}d": partial(pooled, space=space, linear=False) for space in (1, 2, 3)},
    **{
        f"aten.{name}": partial(pooled, space=space, linear=False)
        for space in (1, 2, 3)
        for name in (f"max_pool{space}d_with_indices", f"adaptive_max_pool{space}d")
    },
    **{
        f"aten.{name}": partial(pooled, space=space)
        for name, space in (
            ("upsample_nearest1d", 1), ("upsample_nearest2d", 2), ("upsample_nearest3d", 3),
            ("_upsample_nearest_exact1d", 1), ("_upsample_nearest_exact2d", 2), ("_upsample_nearest_exact3d", 3),
            ("upsample_linear1d", 1), ("upsample_bilinear2d", 2), ("upsample_trilinear3d", 3),
            ("upsample_bicubic2d", 2), ("_upsample_bilinear2d_aa", 2), ("_upsample_bicubic2d_aa", 2),
            ("reflection_pad1d", 1), ("reflection_pad2d", 2), ("reflection_pad3d", 3),
            ("replication_pad1d", 1), ("replication_pad2d", 2), ("replication_pad3d", 3),
        )
    },
}  # fmt: skip
