"""Ops on positions where a rank must know what the ranks before it do: what a lowered block calls for them."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.collectives import sum_over


def masked_scatter(
    x: Tensor, mask: Tensor, source: Tensor, place: Tensor, groups: list[str], ways: int
) -> Tensor:
    """`x.masked_scatter(mask, source)` of this rank's piece of x and the mask, split by their first dim into `ways`
    pieces of which it has number `place`; the source is whole, and the ranks before take their elements first.

    An index out of range, as where the mask marks more places than the source has elements, is an error of indexing.
    """
    wide = mask.expand_as(x)
    own = wide.sum()
    counts = torch.zeros(ways, dtype=torch.int64, device=x.device)
    counts = sum_over(counts.scatter(0, place.reshape(1), own.reshape(1)), groups)
    before = (counts * (torch.arange(ways, device=x.device) < place)).sum()
    order = wide.reshape(-1).cumsum(0).reshape(x.shape) - 1 + before
    taken = source.reshape(-1)[torch.where(wide, order, torch.zeros_like(order))]
    return torch.where(wide, taken.to(x.dtype), x)
