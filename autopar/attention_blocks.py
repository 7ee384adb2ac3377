"""Attention block by block: what torch's own kernel does not have, without ever holding all scores.

In:  query [b, h, q, d], key [b, kv, k, d], value [b, kv, k, dv] with h a multiple of kv; a mask, sinks, flags.
Out: the result [b, h, q, dv], differentiable in all tensors.

The rows and the keys may be pieces: `row_groups` names the process groups whose ranks hold consecutive pieces of the
rows (outermost first), `ring_group` the one whose ranks hold consecutive pieces of the keys. Keys, values and their
gradients then travel around that ring while each rank works on its own rows (Liu, Zaharia and Abbeel 2023, "Ring
Attention with Blockwise Transformers").

Scores are taken tile by tile with a running maximum and sum (Milakov and Gimelshein 2018, "Online normalizer
calculation for softmax"), and taken again for the gradient (Dao et al. 2022, "FlashAttention", algorithms 1 and 4):

    s = softcap(scale q k') + mask      p = exp(s - L)      L = log(sum exp s + exp sink)
    o = p v      ds = p (do v' - sum(do o))      dsink = - exp(sink - L) sum(do o)

Tiles in which causality or the window leaves nothing are skipped. A row that may look at nothing gives zeros.

Both directions are opaque ops of torch.library: a compiler sees the same graph on every rank, though what is skipped
and whom a rank sends to depend on the rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.torch_private import c10d_functional as c10d
from autopar.torch_private import group_place

TILE = 1024  # rows and keys of a tile


def blockwise_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    row_groups: list[str] | None = None,
    ring_group: str | None = None,
    key_mask: bool = False,
) -> Tensor:
    """The meaning of the arguments is that of `autopar.functional.attention`.

    `mask` is broadcastable to [b, h, q, all keys]. With a ring, one that says the same to all rows is split with the
    keys, [b or 1, h or 1, 1, k], if `key_mask`. `sinks`: [h], or broadcastable to [b, h, q, 1].
    """
    if sinks is not None and sinks.dim() == 1:
        sinks = sinks.reshape(1, -1, 1, 1)
    if mask is not None and mask.dim() < 4:
        mask = mask[(None,) * (4 - mask.dim())]
    width = query.shape[-1] ** -0.5 if scale is None else scale
    result: Tensor = _forward(
        query,
        key,
        value,
        mask,
        sinks,
        causal,
        window,
        width,
        softcap,
        row_groups or [],
        ring_group or "",
        key_mask,
    )[0]
    return result


# ---- one tile ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Flags:
    causal: bool
    window: int | None
    scale: float
    softcap: float | None

    def sees_nothing(self, row: int, rows: int, column: int, columns: int) -> bool:
        """Whether no row of a tile, from position `row` on, may look at any of its keys."""
        if self.causal and column > row + rows - 1:
            return True
        if self.window is None:
            return False
        behind = row - (column + columns - 1)  # the least distance, of the first row to the last key
        ahead = column - (row + rows - 1)
        return behind >= self.window or (not self.causal and ahead >= self.window)

    def allowed(self, row: int, rows: int, column: int, columns: int, device: torch.device) -> Tensor | None:
        """[rows, columns]: which keys each row may look at; None for all of them."""
        after = row - (column + columns - 1)  # the least and the most by which a row is after a key
        most = row + rows - 1 - column
        cut = self.causal and after < 0
        if self.window is not None:
            cut = cut or most >= self.window or (not self.causal and -after >= self.window)
        if not cut:
            return None
        distance = (
            torch.arange(row, row + rows, device=device)[:, None]
            - torch.arange(column, column + columns, device=device)[None, :]
        )
        allowed = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window is not None:
            allowed = allowed & (distance < self.window)
            if not self.causal:
                allowed = allowed & (-distance < self.window)
        return allowed


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _by_key_head(tensor: Tensor, kv_heads: int) -> Tensor:
    """[b, h, m, x] to [b, kv, h / kv * m, x]: the rows of all heads that share one head of keys."""
    batch, heads, rows, width = tensor.shape
    return tensor.reshape(batch, kv_heads, heads // kv_heads * rows, width)


def _times(left: Tensor, right: Tensor) -> Tensor:
    """[b, h, m, x] @ [b, kv, x, y] -> [b, h, m, y]."""
    batch, heads, rows, _ = left.shape
    return (_by_key_head(left, right.shape[1]) @ right).reshape(batch, heads, rows, right.shape[-1])


def _gathered(left: Tensor, right: Tensor, kv_heads: int) -> Tensor:
    """[b, h, m, x], [b, h, m, y] -> [b, kv, x, y]: the product summed over the rows of all heads of a key head."""
    return _by_key_head(left, kv_heads).transpose(-1, -2) @ _by_key_head(right, kv_heads)


def _scores(
    query: Tensor, key: Tensor, mask: Tensor | None, allowed: Tensor | None, flags: _Flags
) -> tuple[Tensor, Tensor | None]:
    """The scores of a tile, minus infinity where a row may not look, and what the softcap's gradient needs."""
    scores = _times(query, key.transpose(-1, -2)).to(_exact(query.dtype)) * flags.scale
    bent = None
    if flags.softcap is not None:
        bent = torch.tanh(scores / flags.softcap)
        scores = bent * flags.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores, bent


# ---- which tiles -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Places:
    """Where this rank's rows begin, and the ring its keys travel on."""

    row: int
    ring: str
    rank: int
    size: int

    @staticmethod
    def of(query: Tensor, row_groups: list[str], ring_group: str) -> _Places:
        index = 0
        for group in row_groups:
            place, size = group_place(group)
            index = index * size + place
        rank, size = group_place(ring_group) if ring_group else (0, 1)
        return _Places(index * query.shape[-2], ring_group, rank, size)

    def held(self, step: int) -> int:
        """The rank whose keys this one has after `step` moves."""
        return (self.rank - step) % self.size

    def steps(self, flags: _Flags, rows: int, keys: int) -> int:
        """After how many steps no rank can need more. The same on all ranks: a windowed causal ring ends early."""
        if not flags.causal or flags.window is None or rows != keys:
            return self.size
        return min(self.size, (flags.window - 2 + keys) // keys + 1)


def _tiles(flags: _Flags, row: int, rows: int, column: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """The tiles with something in them, as slices of the local rows and of the keys at hand."""
    for top in range(0, rows, TILE):
        high = min(TILE, rows - top)
        for left in range(0, columns, TILE):
            wide = min(TILE, columns - left)
            if not flags.sees_nothing(row + top, high, column + left, wide):
                yield slice(top, top + high), slice(left, left + wide)


def _tile_of(mask: Tensor | None, rows: slice, columns: slice) -> Tensor | None:
    """A tile of a mask, which may be of size 1 in either dim."""
    if mask is None:
        return None
    if mask.shape[-2] > 1:
        mask = mask[..., rows, :]
    return mask[..., columns] if mask.shape[-1] > 1 else mask


class _Ring:
    """Tensors that travel around the ring together."""

    def __init__(self, places: _Places) -> None:
        self.places = places

    def send(self, tensors: list[Tensor], by: int = 1) -> tuple[list[Tensor], list[Tensor]]:
        """Begin to send to the rank `by` further on, and to receive as much."""
        rank, size = self.places.rank, self.places.size
        coming = []
        for tensor in tensors:
            flat = tensor.contiguous().reshape(-1)
            out, into = [0] * size, [0] * size
            out[(rank + by) % size] = into[(rank - by) % size] = flat.numel()
            coming.append(c10d.all_to_all_single(flat, into, out, self.places.ring))
        return coming, tensors

    def receive(self, sent: tuple[list[Tensor], list[Tensor]]) -> list[Tensor]:
        coming, tensors = sent
        return [
            c10d.wait_tensor(flat).reshape(tensor.shape) for flat, tensor in zip(coming, tensors, strict=True)
        ]


def _columns_of(mask: Tensor | None, holder: int, keys: int, size: int) -> Tensor | None:
    """The part of a mask of all keys that belongs to those of one rank of the ring."""
    if mask is None or size == 1 or mask.shape[-1] == 1:
        return mask
    return mask[..., holder * keys : (holder + 1) * keys]


# ---- forward -----------------------------------------------------------------------------------------------------


_FLAGS = (
    "bool causal, int? window, float scale, float? softcap, str[] row_groups, str ring_group, bool key_mask"
)


@torch.library.custom_op(
    "autopar::attention_blocks",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? sinks, {_FLAGS}) -> (Tensor, Tensor)",
)
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    row_groups: list[str],
    ring_group: str,
    key_mask: bool,
) -> tuple[Tensor, Tensor]:
    """(result, log of the sum of each row's exponentials with its sink [b, h, q])."""
    flags, places = _Flags(causal, window, scale, softcap), _Places.of(query, row_groups, ring_group)
    exact, rows, keys = _exact(query.dtype), query.shape[-2], key.shape[-2]
    total = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=exact, device=query.device)
    sums = torch.zeros(query.shape[:-1], dtype=exact, device=query.device)
    peaks = torch.full_like(sums, -torch.inf)
    ring, steps = _Ring(places), places.steps(flags, rows, keys)
    held = [key, value, *([mask] if mask is not None and key_mask else [])]
    for step in range(steps):
        sent = ring.send(held) if step + 1 < steps else None
        here = held[2] if len(held) > 2 else _columns_of(mask, places.held(step), keys, places.size)
        column = places.held(step) * keys
        for at, across in _tiles(flags, places.row, rows, column, keys):
            allowed = flags.allowed(
                places.row + at.start,
                at.stop - at.start,
                column + across.start,
                across.stop - across.start,
                query.device,
            )
            scores, _ = _scores(
                query[..., at, :], held[0][..., across, :], _tile_of(here, at, across), allowed, flags
            )
            peak = torch.maximum(peaks[..., at], scores.amax(-1))
            base = torch.where(peak == -torch.inf, torch.zeros_like(peak), peak)
            weights = torch.exp(scores - base.unsqueeze(-1))
            before = torch.exp(peaks[..., at] - base)
            sums[..., at] = sums[..., at] * before + weights.sum(-1)
            total[..., at, :] = total[..., at, :] * before.unsqueeze(-1) + _times(
                weights, held[1][..., across, :].to(exact)
            )
            peaks[..., at] = peak
        if sent is not None:
            held = ring.receive(sent)
    logs = torch.where(sums > 0, peaks + torch.log(sums), torch.full_like(sums, -torch.inf))
    if sinks is not None:
        logs = torch.logaddexp(logs, sinks.squeeze(-1).to(exact).expand_as(logs))
    # A row that sees nothing has minus infinity twice, and total 0.
    share = torch.where(peaks == -torch.inf, torch.zeros_like(peaks), torch.exp(peaks - logs))
    return (total * share.unsqueeze(-1)).to(query.dtype), logs


@_forward.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    row_groups: list[str],
    ring_group: str,
    key_mask: bool,
) -> tuple[Tensor, Tensor]:
    return (
        query.new_empty(*query.shape[:-1], value.shape[-1]),
        query.new_empty(query.shape[:-1], dtype=_exact(query.dtype)),
    )


# ---- backward ----------------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "autopar::attention_blocks_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? sinks, Tensor result, "
    f"Tensor logs, bool wants_mask, {_FLAGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    result: Tensor,
    logs: Tensor,
    wants_mask: bool,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    row_groups: list[str],
    ring_group: str,
    key_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, mask and sinks; empty tensors for what is not there or not wanted."""
    flags, places = _Flags(causal, window, scale, softcap), _Places.of(query, row_groups, ring_group)
    exact, rows, keys = _exact(query.dtype), query.shape[-2], key.shape[-2]
    incoming = gradient.to(exact)
    shared = (incoming * result.to(exact)).sum(-1)
    base = torch.where(logs == -torch.inf, torch.zeros_like(logs), logs)
    of_query = torch.zeros(query.shape, dtype=exact, device=query.device)
    of_key = torch.zeros(key.shape, dtype=exact, device=key.device)
    of_value = torch.zeros(value.shape, dtype=exact, device=value.device)
    of_mask = torch.zeros(mask.shape if mask is not None and wants_mask else (0,), dtype=exact, device=query.device)  # fmt: skip
    ring, steps = _Ring(places), places.steps(flags, rows, keys)
    travels = mask is not None and key_mask
    held = [key, value, *([mask] if mask is not None and key_mask else [])]
    back = [of_key, of_value, *([of_mask] if travels and wants_mask else [])]
    for step in range(steps):
        sent = ring.send(held) if step + 1 < steps else None
        holder = places.held(step)
        here = held[2] if travels else _columns_of(mask, holder, keys, places.size)
        mine = back[2] if len(back) > 2 else _columns_of(of_mask, holder, keys, places.size) if wants_mask else None  # fmt: skip
        for at, across in _tiles(flags, places.row, rows, holder * keys, keys):
            allowed = flags.allowed(
                places.row + at.start,
                at.stop - at.start,
                holder * keys + across.start,
                across.stop - across.start,
                query.device,
            )
            rows_here, keys_here = query[..., at, :], held[0][..., across, :]
            scores, bent = _scores(rows_here, keys_here, _tile_of(here, at, across), allowed, flags)
            weights = torch.exp(scores - base[..., at].unsqueeze(-1))
            back[1][..., across, :] += _gathered(weights, incoming[..., at, :], key.shape[1])
            slope = _times(incoming[..., at, :], held[1][..., across, :].to(exact).transpose(-1, -2))
            slope = weights * (slope - shared[..., at].unsqueeze(-1))
            if mine is not None:
                tile = _tile_of(mine, at, across)
                assert tile is not None
                tile += slope.sum_to_size(tile.shape)
            if bent is not None:
                slope = slope * (1 - bent * bent)
            slope = slope * flags.scale
            of_query[..., at, :] += _times(slope, keys_here.to(exact))
            back[0][..., across, :] += _gathered(slope, rows_here.to(exact), key.shape[1])
        if sent is not None:
            held, back = ring.receive(sent), ring.receive(ring.send(back))
    home = places.size - (steps - 1)
    if places.size > 1 and home % places.size:
        back = ring.receive(ring.send(back, home))
    if len(back) > 2:
        of_mask = back[2]
    of_sinks = torch.zeros(0, dtype=exact, device=query.device)
    if sinks is not None:
        fraction = torch.exp(sinks.squeeze(-1).to(exact).expand_as(logs) - base)
        of_sinks = (-fraction * shared).unsqueeze(-1).sum_to_size(sinks.shape)
    return (
        of_query.to(query.dtype),
        back[0].to(key.dtype),
        back[1].to(value.dtype),
        of_mask if mask is None else of_mask.to(mask.dtype),
        of_sinks if sinks is None else of_sinks.to(sinks.dtype),
    )


@_backward.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    result: Tensor,
    logs: Tensor,
    wants_mask: bool,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    row_groups: list[str],
    ring_group: str,
    key_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    def like(tensor: Tensor | None, there: bool = True) -> Tensor:
        if tensor is None or not there:
            dtype = _exact(query.dtype) if tensor is None else tensor.dtype
            return torch.empty(0, dtype=dtype, device=query.device)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    return like(query), like(key), like(value), like(mask, wants_mask), like(sinks)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, sinks, *ctx.flags = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, mask, sinks, *output)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    query, key, value, mask, sinks, result, logs = ctx.saved_tensors
    wants_mask = bool(ctx.needs_input_grad[3])
    gradients = _backward(gradient, query, key, value, mask, sinks, result, logs, wants_mask, *ctx.flags)
    return (
        *gradients[:3],
        gradients[3] if wants_mask else None,
        gradients[4] if sinks is not None else None,
        *[None] * 7,
    )


_forward.register_autograd(_differentiate, setup_context=_keep)
