"""The steps between shardings as differentiable functions: what a lowered block calls.

Each takes the local piece, the name of the process group of one mesh axis and the axis's size, and follows the
table of `autopar/sharding.py`, backward included. `rank` is a 0-dim int64 tensor with this device's coordinate on
the axis: rank numbers are data, so every rank runs the same graph and collectives cannot be reordered between ranks.

All are plain functional collectives (`_c10d_functional`) inside `torch.autograd.Function`s: eager mode and
`torch.compile(fullgraph=True)` see the same thing in both directions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from autopar.torch_private import c10d_functional as c10d

# ---- plain collectives along a dim -------------------------------------------------------------------------------


def _all_reduce(tensor: Tensor, group: str, kind: str = "sum") -> Tensor:
    result: Tensor = c10d.wait_tensor(c10d.all_reduce(tensor.contiguous(), kind, group))
    return result


def sum_over(tensor: Tensor, groups: list[str]) -> Tensor:
    """Summed over each group; no gradient goes through (inside of a Function, or of what has none)."""
    for group in groups:
        tensor = _all_reduce(tensor, group)
    return tensor


def _all_gather(tensor: Tensor, dim: int, group: str, size: int) -> Tensor:
    gathered = c10d.wait_tensor(c10d.all_gather_into_tensor(tensor.contiguous(), size, group))
    if dim == 0:
        return gathered  # type: ignore[no-any-return]
    pieces = gathered.unflatten(0, (size, tensor.shape[0]))
    return pieces.movedim(0, dim).flatten(dim, dim + 1)  # type: ignore[no-any-return]


def _reduce_scatter(tensor: Tensor, dim: int, group: str, size: int) -> Tensor:
    front = _split_to_front(tensor, dim, size).flatten(0, 1) if dim else tensor
    result: Tensor = c10d.wait_tensor(c10d.reduce_scatter_tensor(front.contiguous(), "sum", size, group))
    return result


def _split_to_front(tensor: Tensor, dim: int, size: int) -> Tensor:
    """[..., n, ...] to [size, ..., n / size, ...]."""
    pieces: Tensor = tensor.unflatten(dim, (size, tensor.shape[dim] // size)).movedim(dim, 0)
    return pieces


def _own_slice(tensor: Tensor, dim: int, size: int, rank: Tensor) -> Tensor:
    return _split_to_front(tensor, dim, size).index_select(0, rank.reshape(1)).squeeze(0)


def _all_to_all(tensor: Tensor, gather_dim: int, split_dim: int, group: str, size: int) -> Tensor:
    """The piece split by `gather_dim` becomes one split by `split_dim`."""
    pieces = _split_to_front(tensor, split_dim, size).contiguous()
    even = [1] * size
    flat = pieces.reshape(size, -1)
    received = c10d.wait_tensor(c10d.all_to_all_single(flat, even, even, group)).reshape(pieces.shape)
    return received.movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1)  # type: ignore[no-any-return]


# ---- steps ---------------------------------------------------------------------------------------------------------


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: str) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(gradient, ctx.group), None


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: str, grad_sums: bool) -> Tensor:
        ctx.group, ctx.grad_sums = group, grad_sums
        return _all_reduce(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return (_all_reduce(gradient, ctx.group) if ctx.grad_sums else gradient), None, None


class _AllGather(Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, dim: int, group: str, size: int, rank: Tensor, grad_sums: bool
    ) -> Tensor:
        ctx.dim, ctx.group, ctx.size, ctx.grad_sums = dim, group, size, grad_sums
        ctx.save_for_backward(rank)
        return _all_gather(tensor, dim, group, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (rank,) = ctx.saved_tensors
        if ctx.grad_sums:
            result = _reduce_scatter(gradient, ctx.dim, ctx.group, ctx.size)
        else:
            result = _own_slice(gradient, ctx.dim, ctx.size, rank)
        return result, None, None, None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: str, size: int) -> Tensor:
        ctx.dim, ctx.group, ctx.size = dim, group, size
        return _reduce_scatter(tensor, dim, group, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _all_gather(gradient, ctx.dim, ctx.group, ctx.size), None, None, None


class _Slice(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: str, size: int, rank: Tensor) -> Tensor:
        ctx.dim, ctx.group, ctx.size = dim, group, size
        return _own_slice(tensor, dim, size, rank).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _all_gather(gradient, ctx.dim, ctx.group, ctx.size), None, None, None, None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gather_dim: int, split_dim: int, group: str, size: int) -> Tensor:
        ctx.dims, ctx.group, ctx.size = (gather_dim, split_dim), group, size
        return _all_to_all(tensor, gather_dim, split_dim, group, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        gather_dim, split_dim = ctx.dims
        return _all_to_all(gradient, split_dim, gather_dim, ctx.group, ctx.size), None, None, None, None


def copy(tensor: Tensor, group: str) -> Tensor:
    """Whole to whole for an op that is split along the axis by a loop this operand lacks."""
    return _Copy.apply(tensor, group)  # type: ignore[no-any-return, no-untyped-call]


def all_reduce(tensor: Tensor, group: str, grad_sums: bool) -> Tensor:
    """Partial sums to the whole value."""
    return _AllReduce.apply(tensor, group, grad_sums)  # type: ignore[no-any-return, no-untyped-call]


def all_gather(tensor: Tensor, dim: int, group: str, size: int, rank: Tensor, grad_sums: bool) -> Tensor:
    """A piece, split by `dim`, to the whole value."""
    return _AllGather.apply(tensor, dim, group, size, rank, grad_sums)  # type: ignore[no-any-return, no-untyped-call]


def reduce_scatter(tensor: Tensor, dim: int, group: str, size: int) -> Tensor:
    """Partial sums to a piece of their sum, split by `dim`."""
    return _ReduceScatter.apply(tensor, dim, group, size)  # type: ignore[no-any-return, no-untyped-call]


def slice_own(tensor: Tensor, dim: int, group: str, size: int, rank: Tensor) -> Tensor:
    """The whole value to this rank's piece, split by `dim`."""
    return _Slice.apply(tensor, dim, group, size, rank)  # type: ignore[no-any-return, no-untyped-call]


def all_to_all(tensor: Tensor, gather_dim: int, split_dim: int, group: str, size: int) -> Tensor:
    """A piece split by `gather_dim` to one split by `split_dim`."""
    return _AllToAll.apply(tensor, gather_dim, split_dim, group, size)  # type: ignore[no-any-return, no-untyped-call]


# ---- ops whose split needs more than the plain op on pieces ------------------------------------------------------


def scaled_sum(tensor: Tensor, ways: int) -> Tensor:
    """A mean over a split dim: each rank's mean divided by the number of ranks is its share of the sum."""
    return tensor / ways


def place_of(major: Tensor, size: int, minor: Tensor) -> Tensor:
    """A rank's place among the pieces that two axes make of one loop, `size` pieces by the minor one."""
    return major * size + minor


def vocab_embedding(
    weight: Tensor,
    ids: Tensor,
    rank: Tensor,
    padding_idx: int = -1,
    scale_grad: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Rows of an embedding whose vocabulary is split: zero for the ids that other ranks hold, so the result is a
    partial sum. weight [vocabulary / n, hidden], ids [...] -> [..., hidden]."""
    local = ids - rank * weight.shape[0]
    mine = (local >= 0) & (local < weight.shape[0])
    if padding_idx >= 0:  # a padding row gets no gradient, as in aten.embedding
        mine_trained = mine & (ids != padding_idx)
        rows = torch.nn.functional.embedding(local.clamp(0, weight.shape[0] - 1), weight)
        frozen = rows.detach() * mine.unsqueeze(-1).to(rows.dtype)
        return torch.where(mine_trained.unsqueeze(-1), rows, frozen)
    rows = torch.nn.functional.embedding(local.clamp(0, weight.shape[0] - 1), weight)
    return rows * mine.unsqueeze(-1).to(rows.dtype)


class _CrossEntropy(Function):
    """The loss of every token, with the vocabulary whole (no `groups`) or split over them; then the result is whole on
    the groups.

    loss = log sum exp(logits) - (1 - s) logits[label] - s mean(logits), s the label smoothing. The gradient is
    softmax(logits) - (1 - s) onehot(label) - s / vocabulary, locally.

    Used for a whole vocabulary too: torch's CPU kernel adds up the exponentials of a row in a few running sums, which
    at 49,152 words costs 1e-5 of relative accuracy (this: 2e-7), and plans should differ by less than that.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        groups: list[str],
        size: int,
        rank: Tensor | None,
        ignore: int,
        smooth: float,
    ) -> Tensor:
        exact = logits.dtype if logits.dtype == torch.float64 else torch.float32
        width = logits.shape[-1]

        def over_vocabulary(tensor: Tensor, kind: str = "sum") -> Tensor:
            for group in groups:
                tensor = _all_reduce(tensor, group, kind)
            return tensor

        # One tensor of the logits' size is made, and becomes the softmax in place: with a large vocabulary each more
        # would be most of a rank's memory.
        peak = over_vocabulary(logits.amax(-1).to(exact), "max")
        softmax = (logits - peak.unsqueeze(-1)).exp_()  # in `exact`, the wider dtype
        total = over_vocabulary(softmax.sum(-1))
        softmax.div_(total.unsqueeze(-1))
        counted = labels != ignore
        local = labels if rank is None else labels - rank * width
        mine = (local >= 0) & (local < width) & counted
        index = local.clamp(0, width - 1).unsqueeze(-1)
        target = over_vocabulary(logits.gather(-1, index).squeeze(-1).to(exact) * mine)
        losses = total.log() + peak - (1 - smooth) * target
        if smooth:
            losses = losses - smooth * over_vocabulary(logits.sum(-1, dtype=exact)) / (width * size)
        ctx.save_for_backward(softmax, index, mine, counted)
        ctx.smooth, ctx.vocabulary, ctx.dtype = smooth, width * size, logits.dtype
        return torch.where(counted, losses, torch.zeros_like(losses))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        probabilities, index, mine, counted = ctx.saved_tensors
        factor = (counted.to(probabilities.dtype) * gradient).unsqueeze(-1)
        hit = (1 - ctx.smooth) * mine.to(probabilities.dtype).unsqueeze(-1)
        slope = (probabilities * factor).scatter_add_(-1, index, -hit * factor)
        if ctx.smooth:
            slope.sub_(factor * (ctx.smooth / ctx.vocabulary))
        return slope.to(ctx.dtype), None, None, None, None, None, None


def split_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    token_groups: list[str],
    vocab_groups: list[str],
    vocab_size: int,
    vocab_rank: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of this rank's tokens [..., vocabulary (/ n)] and labels [...].

    Returns this rank's share of the loss, a partial sum over `token_groups` and whole over `vocab_groups` (with
    reduction "none" the tokens' own losses), and the number of counted labels of all ranks. A mean divides by that
    number: ranks may have unequal numbers of ignored labels, so a mean of means would be wrong. Without any counted
    label the mean is NaN, as torch's is.
    """
    losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, labels, vocab_groups, vocab_size, vocab_rank, ignore_index, label_smoothing
    )
    count = (labels != ignore_index).sum().to(losses.dtype)
    if reduction == "none":
        return losses.to(logits.dtype), count
    total = losses.sum()
    for group in token_groups:
        count = _all_reduce(count, group)
    return total / count if reduction == "mean" else total, count


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, size: int, rank: Tensor, **options: Any
) -> Tensor:
    """Causal attention of this rank's slice of the queries against all keys.

    query [batch, heads, sequence / size, head_dim]; key, value [batch, kv heads, sequence, head_dim].
    """
    length = query.shape[-2]
    first = rank * length
    rows = torch.arange(length, device=query.device) + first
    columns = torch.arange(key.shape[-2], device=query.device)
    mask = columns.unsqueeze(0) <= rows.unsqueeze(1)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
