"""Experts split over ranks: what a lowered block calls where an axis splits experts.

In:  this rank's tokens and its experts' matrices; for each axis that splits experts, in the order in which their
     pieces nest, whether it splits tokens too.
Out: what its tokens get. Along an axis on which tokens are whole that is a partial sum over the ranks' experts; along
     one that splits tokens as well it is the whole of it: every slot (a token and one of its experts) goes to the rank
     that has the expert, and back.

Nothing is dropped and nothing padded: ranks first tell each other how many rows go to each expert, and exchange just
these. The numbers of rows are needed as plain numbers, which costs an accelerator one wait per layer and direction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from autopar.expert_functions import Experts, combine, slot_outputs
from autopar.torch_private import c10d_functional as c10d

# (group of the axis, its size, this rank's place on it, whether it splits the tokens too)
Level = tuple[str, int, Tensor, bool]


def split_experts(x: Tensor, index: Tensor, weights: Tensor, *given: Any) -> Tensor:
    """`autopar.expert_functions.experts` on local tokens and experts; `index` counts the experts of all ranks.

    `given`: the fields of `Experts`, `levels` (a list of Level, outermost first) and `addends`: the axes over which a split of f makes the result a partial sum, with their sizes: each rank adds its
    share of `down_bias`.
    """
    *fields, levels, addends = given
    local = Experts(*fields)
    if local.down_bias is not None:
        ways = math.prod(size for _, size in addends)
        local = local._replace(down_bias=local.down_bias / ways)
    slots = _slots(x.reshape(-1, x.shape[-1]), index.reshape(-1), index.shape[-1], levels, local)
    return combine(slots, weights, x.dtype)


def _slots(rows: Tensor, index: Tensor, share: int, levels: Sequence[Level], experts: Experts) -> Tensor:
    """rows [n, d], index [n * share] among the experts of all `levels` -> [n * share, o], slots not weighted."""
    if not levels:
        return slot_outputs(rows, index, share, experts)
    (group, size, rank, tokens), *others = levels
    block = experts.up.shape[0]
    for level in others:
        block *= level[1]
    if not tokens:
        local = index - rank * block
        mine = (index >= 0) & (local >= 0) & (local < block)
        return _slots(rows, torch.where(mine, local, -1), share, others, experts)
    count = block * size
    known = (index >= 0) & (index < count)
    sorted_index, order = torch.sort(torch.where(known, index, count), stable=True)
    numbers = torch.arange(count, device=index.device, dtype=index.dtype)
    ends = torch.searchsorted(sorted_index, numbers, right=True)
    to_experts = torch.diff(ends, prepend=ends.new_zeros(1))
    from_ranks = _exchanged(to_experts, [block] * size, [block] * size, group).view(size, block)
    sizes = torch.stack([to_experts.view(size, block).sum(1), from_ranks.sum(1)]).tolist()
    sent, received = sizes
    picked = order[: sum(sent)]
    arrived = exchange(rows.index_select(0, picked // share), sent, received, group)
    at = torch.arange(block, device=index.device).repeat(size)
    at = torch.repeat_interleave(at, from_ranks.reshape(-1), output_size=sum(received))
    made = exchange(_slots(arrived, at, 1, others, experts), received, sent, group)
    return made.new_zeros(index.shape[0], made.shape[1]).index_put((picked,), made)


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        sent, received = ctx.sizes
        return _exchanged(gradient, received, sent, ctx.group), None, None, None


def exchange(rows: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    """The first `sent[0]` rows go to rank 0 of the group, the next `sent[1]` to rank 1, ...; -> the rows that came,
    `received[0]` of rank 0 first. Gradients go the way back."""
    result: Tensor = _Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return result


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    result: Tensor = c10d.wait_tensor(c10d.all_to_all_single(rows.contiguous(), received, sent, group))
    return result
