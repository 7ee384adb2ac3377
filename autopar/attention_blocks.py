"""Attention block by block: what torch's own kernel does not have, without ever holding all scores.

In:  query [b, h, q, d], key [b, kv, k, d], value [b, kv, k, dv] with h a multiple of kv; a mask, sinks, flags.
Out: the result [b, h, q, dv], differentiable in all tensors.

The rows and the keys may be pieces: `row_groups` names the process groups whose ranks hold consecutive pieces of the
rows (outermost first), `ring_group` the one whose ranks hold consecutive pieces of the keys. Keys, values and their
gradients then travel around that ring while each rank works on its own rows (Liu, Zaharia and Abbeel 2023, "Ring
Attention with Blockwise Transformers"). With `zigzag` pieces are exchanged first, so that causality leaves every rank as
much to do (`autopar.attention_ring`).

Scores are taken tile by tile with a running maximum and sum (Milakov and Gimelshein 2018, "Online normalizer
calculation for softmax"), and taken again for the gradient (Dao et al. 2022, "FlashAttention", algorithms 1 and 4):

    s = softcap(scale q k') + mask      p = exp(s - L)      L = log(sum exp s + exp sink)
    o = p v      ds = p (do v' - sum(do o))      dsink = - exp(sink - L) sum(do o)

Tiles in which causality or the window leaves nothing are skipped. A row that may look at nothing gives zeros.

Both directions are opaque ops of torch.library: a compiler sees the same graph on every rank, though what is skipped
and whom a rank sends to depend on the rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from autopar.attention_ring import Places, Ring, Segment, unzigzag, zigzag

TILE = 1024  # rows and keys of a tile


class Flags(TypedDict, total=False):
    """What a row looks at, as the keywords of attention; each may be left out. See `autopar.functional.attention`."""

    causal: bool
    window: int | None
    scale: float | None
    softcap: float | None


class Options(NamedTuple):
    """All that is not a tensor, in the order of the ops' schemas below. `scale` is that of the head's width by default."""

    causal: bool = False
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    row_groups: tuple[str, ...] | list[str] = ()
    ring_group: str = ""
    key_mask: bool = False
    zigzag: bool = False

    @property
    def places(self) -> Places:
        return Places.of(list(self.row_groups), self.ring_group, self.zigzag)

    @property
    def factor(self) -> float:
        """What scores are multiplied by."""
        assert self.scale is not None
        return self.scale


_OPTIONS = "bool causal, int? window, float? scale, float? softcap, str[] row_groups, str ring_group, bool key_mask, bool zigzag"
_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? sinks"


def blockwise_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    options: Options = Options(),  # noqa: B008
) -> Tensor:
    """The meaning of the arguments is that of `autopar.functional.attention`.

    `mask` is broadcastable to [b, h, q, all keys]. With a ring, one that says the same to all rows is split with the
    keys, [b or 1, h or 1, 1, k], if `key_mask`. `sinks`: [h], or broadcastable to [b, h, q, 1]. `zigzag` needs a ring,
    and pieces of rows and of keys of even length.
    """
    if sinks is not None and sinks.dim() == 1:
        sinks = sinks.reshape(1, -1, 1, 1)
    if mask is not None and mask.dim() < 4:
        mask = mask[(None,) * (4 - mask.dim())]
    if options.scale is None:
        options = options._replace(scale=query.shape[-1] ** -0.5)
    ring = options.ring_group
    if not options.zigzag:
        result: Tensor = torch.ops.autopar.attention_blocks(query, key, value, mask, sinks, *options)[0]
        return result
    query, key, value = (zigzag(tensor, 2, ring) for tensor in (query, key, value))
    if mask is not None and mask.shape[2] > 1:
        mask = zigzag(mask, 2, ring)
    elif mask is not None and options.key_mask and mask.shape[3] > 1:
        mask = zigzag(mask, 3, ring)
    if sinks is not None and sinks.shape[2] > 1:
        sinks = zigzag(sinks, 2, ring)
    return unzigzag(torch.ops.autopar.attention_blocks(query, key, value, mask, sinks, *options)[0], 2, ring)


# ---- one tile ----------------------------------------------------------------------------------------------------


def _sees_nothing(options: Options, row: int, rows: int, column: int, columns: int) -> bool:
    """Whether no row of a tile, from position `row` on, may look at any of its keys."""
    if options.causal and column > row + rows - 1:
        return True
    if options.window is None:
        return False
    behind = row - (column + columns - 1)  # the least distance, of the first row to the last key
    ahead = column - (row + rows - 1)
    return behind >= options.window or (not options.causal and ahead >= options.window)


def _allowed(
    options: Options, row: int, rows: int, column: int, columns: int, device: torch.device
) -> Tensor | None:
    """[rows, columns]: which keys each row may look at; None for all of them."""
    after = row - (column + columns - 1)  # the least and the most by which a row is after a key
    most = row + rows - 1 - column
    cut = options.causal and after < 0
    if options.window is not None:
        cut = cut or most >= options.window or (not options.causal and -after >= options.window)
    if not cut:
        return None
    distance = (
        torch.arange(row, row + rows, device=device)[:, None]
        - torch.arange(column, column + columns, device=device)[None, :]
    )
    allowed = distance >= 0 if options.causal else torch.ones_like(distance, dtype=torch.bool)
    if options.window is not None:
        allowed = allowed & (distance < options.window)
        if not options.causal:
            allowed = allowed & (-distance < options.window)
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
    query: Tensor, key: Tensor, mask: Tensor | None, allowed: Tensor | None, options: Options
) -> tuple[Tensor, Tensor | None]:
    """The scores of a tile, minus infinity where a row may not look, and what the softcap's gradient needs."""
    scores = _times(query, key.transpose(-1, -2)).to(_exact(query.dtype)) * options.factor
    bent = None
    if options.softcap is not None:
        bent = torch.tanh(scores / options.softcap)
        scores = bent * options.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores, bent


# ---- which tiles -------------------------------------------------------------------------------------------------


class _Tile(NamedTuple):
    """Rows and keys of one tile, as slices of what is here, and from which position on they lie."""

    rows: slice
    keys: slice
    row: int
    column: int

    def allowed(self, options: Options, device: torch.device) -> Tensor | None:
        high, wide = self.rows.stop - self.rows.start, self.keys.stop - self.keys.start
        return _allowed(options, self.row, high, self.column, wide, device)

    def of(self, mask: Tensor | None, all_keys: bool) -> Tensor | None:
        """This tile of a mask, which may be of size 1 in either dim. `all_keys`: it has those of all ranks."""
        if mask is None:
            return None
        if mask.shape[-2] > 1:
            mask = mask[..., self.rows, :]
        if mask.shape[-1] == 1:
            return mask
        wide = self.keys.stop - self.keys.start
        return mask[..., self.column : self.column + wide] if all_keys else mask[..., self.keys]


def _tiles(options: Options, rows: list[Segment], keys: list[Segment]) -> Iterator[_Tile]:
    """The tiles with something in them."""
    for (above, row), (before, column) in itertools.product(rows, keys):
        for top in range(above.start, above.stop, TILE):
            bottom = min(top + TILE, above.stop)
            for left in range(before.start, before.stop, TILE):
                right = min(left + TILE, before.stop)
                tile = _Tile(
                    slice(top, bottom),
                    slice(left, right),
                    row + top - above.start,
                    column + left - before.start,
                )
                if not _sees_nothing(options, tile.row, bottom - top, tile.column, right - left):
                    yield tile


# ---- forward -----------------------------------------------------------------------------------------------------


def _forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None, *given: Any
) -> tuple[Tensor, Tensor]:
    """(result, log of the sum of each row's exponentials with its sink [b, h, q])."""
    options = Options(*given)
    places, exact = options.places, _exact(query.dtype)
    rows, keys = query.shape[-2], key.shape[-2]
    total = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=exact, device=query.device)
    sums = torch.zeros(query.shape[:-1], dtype=exact, device=query.device)
    peaks = torch.full_like(sums, -torch.inf)
    ring, steps = Ring(places), places.steps(options.causal, options.window, rows, keys)
    travels = mask is not None and options.key_mask
    held = [key, value, *([mask] if mask is not None and travels else [])]
    for step in range(steps):
        sent = ring.send(held) if step + 1 < steps else None
        here = held[2] if travels else mask
        for tile in _tiles(options, places.rows(rows), places.keys(places.held(step), keys)):
            at, across = tile.rows, tile.keys
            allowed = tile.allowed(options, query.device)
            scores, _ = _scores(
                query[..., at, :], held[0][..., across, :], tile.of(here, not travels), allowed, options
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


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return (
        query.new_empty(*query.shape[:-1], value.shape[-1]),
        query.new_empty(query.shape[:-1], dtype=_exact(query.dtype)),
    )


# ---- backward ----------------------------------------------------------------------------------------------------


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
    *given: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, mask and sinks; empty tensors for what is not there or not wanted."""
    options = Options(*given)
    places, exact = options.places, _exact(query.dtype)
    rows, keys = query.shape[-2], key.shape[-2]
    incoming = gradient.to(exact)
    shared = (incoming * result.to(exact)).sum(-1)
    base = torch.where(logs == -torch.inf, torch.zeros_like(logs), logs)
    of_query = torch.zeros(query.shape, dtype=exact, device=query.device)
    of_key = torch.zeros(key.shape, dtype=exact, device=key.device)
    of_value = torch.zeros(value.shape, dtype=exact, device=value.device)
    of_mask = torch.zeros(mask.shape if mask is not None and wants_mask else (0,), dtype=exact, device=query.device)  # fmt: skip
    ring, steps = Ring(places), places.steps(options.causal, options.window, rows, keys)
    travels = mask is not None and options.key_mask
    held = [key, value, *([mask] if mask is not None and travels else [])]
    back = [of_key, of_value, *([of_mask] if travels and wants_mask else [])]
    for step in range(steps):
        sent = ring.send(held) if step + 1 < steps else None
        here = held[2] if travels else mask
        mine = back[2] if len(back) > 2 else of_mask if wants_mask else None
        for tile in _tiles(options, places.rows(rows), places.keys(places.held(step), keys)):
            at, across = tile.rows, tile.keys
            rows_here, keys_here = query[..., at, :], held[0][..., across, :]
            allowed = tile.allowed(options, query.device)
            scores, bent = _scores(rows_here, keys_here, tile.of(here, not travels), allowed, options)
            weights = torch.exp(scores - base[..., at].unsqueeze(-1))
            back[1][..., across, :] += _gathered(weights, incoming[..., at, :], key.shape[1])
            slope = _times(incoming[..., at, :], held[1][..., across, :].to(exact).transpose(-1, -2))
            slope = weights * (slope - shared[..., at].unsqueeze(-1))
            part = tile.of(mine, not travels)
            if part is not None:
                part += slope.sum_to_size(part.shape)
            if bent is not None:
                slope = slope * (1 - bent * bent)
            slope = slope * options.factor
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


def _fake_backward(gradient: Tensor, *given: Any) -> tuple[Tensor, ...]:
    query, key, value, mask, sinks, _, _, wants_mask = given[:8]

    def like(tensor: Tensor | None, there: bool = True) -> Tensor:
        if tensor is None or not there:
            dtype = _exact(query.dtype) if tensor is None else tensor.dtype
            return torch.empty(0, dtype=dtype, device=query.device)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    return like(query), like(key), like(value), like(mask, wants_mask), like(sinks)


# ---- as ops ------------------------------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.options = inputs[:5], inputs[5:]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    wants_mask = bool(ctx.needs_input_grad[3])
    gradients = torch.ops.autopar.attention_blocks_backward(
        gradient, *ctx.saved_tensors, wants_mask, *ctx.options
    )
    wanted = (True, True, True, wants_mask, ctx.saved_tensors[4] is not None)
    found = [each if there else None for each, there in zip(gradients, wanted, strict=True)]
    return (*found, *[None] * len(ctx.options))


torch.library.custom_op(
    "autopar::attention_blocks",
    _forward,
    mutates_args=(),
    schema=f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)",
)
torch.library.custom_op(
    "autopar::attention_blocks_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor gradient, {_TENSORS}, Tensor result, Tensor logs, bool wants_mask, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.register_fake("autopar::attention_blocks", _fake_forward)
torch.library.register_fake("autopar::attention_blocks_backward", _fake_backward)
torch.library.register_autograd("autopar::attention_blocks", _differentiate, setup_context=_keep)
