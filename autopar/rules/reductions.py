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


RULES: Mapping[str, RuleFunction] = {
    "aten.sum": total,
    "aten.count_nonzero": total,
    "aten.mean": partial(total, average=True),
    **{
        f"aten.{name}": extreme
        for name in ("amax", "amin", "argmax", "argmin", "any", "all", "prod", "logsumexp")
    },
    "aten.max": larger,
    "aten.min": larger,
    **{f"aten.{name}": spread for name in ("var", "std", "var_mean")},
    "aten.norm": norm,
    "aten.linalg_vector_norm": norm,
    "aten.cumsum": partial(scan, linear=True),
    "aten.cumprod": scan,
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
    "aten.max_pool2d_with_indices": partial(pooled, space=2, linear=False),
    "aten.upsample_nearest2d": partial(pooled, space=2),
    "aten.upsample_bilinear2d": partial(pooled, space=2),
}
