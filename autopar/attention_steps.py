"""Attention whose loops are split: what a lowered block calls in place of `autopar.functional.attention`.

In:  this rank's pieces of query, key, value, mask and sinks, and by which loops they are split.
Out: this rank's piece of the result, [b, h / n, q / m, dv].

    rows     query and result are split by rows, keys and values are whole: each rank knows where its rows lie
    ring     query by rows, key and value by keys, over one axis: keys and values travel around it
    heads    query and result are split by heads, key and value hold more heads than these need: of grouped heads,
             where there are more ranks than heads of keys. Their gradients are then partial sums

Splits of the batch, and of heads that take their keys' heads along, are the plain op on pieces. All may be combined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from autopar.attention_blocks import Flags, Options, blockwise_attention
from autopar.functional import attention, restrict, scaled_dot_product


def split_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    row_groups: Sequence[str] = (),
    row_place: Tensor | None = None,
    ring_group: str = "",
    key_mask: bool = False,
    zigzag: bool = False,
    head_ways: int = 1,
    head_place: Tensor | None = None,
    **flags: Unpack[Flags],
) -> Tensor:
    """This rank's piece of `functional.attention`, whose flags are `flags`.

    rows     `row_groups`: the process groups that split them, outermost first; `row_place`: this rank's number among
             all pieces. A mask that has rows is split by them and has all keys
    ring     `ring_group`, which is one of `row_groups`. With `key_mask` the mask says the same to all rows, and is split
             with the keys. `zigzag`: pieces change hands first, and the result's do afterwards
    heads    split into `head_ways` pieces beyond what keys and values are; `head_place`: the number of this one
    """
    if head_place is not None:
        key = own_heads(query, key, head_ways, head_place)
        value = own_heads(query, value, head_ways, head_place)
    causal, window = flags.get("causal", False), flags.get("window")
    if not ring_group and (row_place is None or not (causal or window is not None)):
        return attention(query, key, value, mask, sinks, **flags)
    tiled = sinks is not None or flags.get("softcap") is not None or window is not None
    if row_place is None or ring_group or tiled:
        options = Options(
            **flags, row_groups=list(row_groups), ring_group=ring_group, key_mask=key_mask, zigzag=zigzag
        )
        return blockwise_attention(query, key, value, mask, sinks, options)
    length, keys = query.shape[-2], key.shape[-2]
    own = torch.arange(length, device=query.device) + row_place * length
    distance = own[:, None] - torch.arange(keys, device=query.device)[None, :]
    visible = restrict(mask, distance, causal, window, query.dtype)
    return scaled_dot_product(query, key, value, visible, causal=False, scale=flags.get("scale"))


def own_heads(query: Tensor, keys: Tensor, ways: int, place: Tensor) -> Tensor:
    """The heads of `keys` [b, kv, k, d] that this rank's heads of `query` [b, h, q, e], piece `place` of `ways`, need."""
    heads, kv_heads = query.shape[1], keys.shape[1]
    share = heads * ways // kv_heads  # heads of queries to one of keys
    first = place * heads
    if share % heads == 0:
        wanted = (first // share).reshape(1)
    elif heads % share == 0:
        wanted = first // share + torch.arange(heads // share, device=keys.device)
    else:  # a rank's heads begin or end in the middle of a group: one head of keys for each
        wanted = (first + torch.arange(heads, device=keys.device)) // share
    return keys.index_select(1, wanted)
