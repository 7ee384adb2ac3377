"""Ops on positions that capture writes in place of ATen's, so that a rule can say how they split."""

from __future__ import annotations

from torch import Tensor


def index_sum(source: Tensor, index: Tensor, dim: int, size: int) -> Tensor:
    """Slices of `source` along `dim` added up by where `index` [source.shape[dim]] puts them among `size` places."""
    shape = list(source.shape)
    shape[dim] = size
    return source.new_zeros(shape).index_add(dim, index, source)
