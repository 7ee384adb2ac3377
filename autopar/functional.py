"""Ops that capture puts in place of a family of ATen patterns, so that one rule can say how they split."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor
from torch.nn import functional

from autopar.attention_blocks import Flags, Options, blockwise_attention

# Attention as it stands in an exported graph, until `normalize` puts `attention` in its place.
torch.library.define(
    "autopar::attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? sinks, bool causal, int? window, float? scale, "
    "float? softcap) -> Tensor",
)
ATTENTION = torch.ops.autopar.attention.default


@torch.library.register_fake("autopar::attention")  # type: ignore[untyped-decorator]
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    batch, heads, rows = query.shape[:3]
    # In memory rows before heads, as torch's kernels have it: what puts the heads together again is then no copy.
    return query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross-entropy of logits [..., vocabulary] against labels [...], tokens not flattened.

    `mean` divides by the number of labels that are not `ignore_index`, as torch does. Result: a scalar, or the
    labels' shape for reduction "none".
    """
    flat = functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        labels.reshape(-1),
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return flat.reshape(labels.shape) if reduction == "none" else flat


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    **flags: Unpack[Flags],
) -> Tensor:
    """Attention of query [b, h, q, d] over key [b, kv, k, d] and value [b, kv, k, dv]: [b, h, q, dv].

    h is a multiple of kv: consecutive heads share one head of keys. `mask` is broadcastable to [b, h, q, k]: bool (True
    may look), or added to the scores. `causal`: row i looks at keys up to i. `window`: at keys less than that far away
    (with `causal`: at itself and the window - 1 before it). `scale`: of the scores, d ** -0.5 by default. `softcap`:
    scores become softcap tanh(scores / softcap), before the mask (Gemma 2). `sinks` [h], or broadcastable to
    [b, h, q, 1]: one more score in every softmax, with no value (GPT-OSS). A row that a bool mask leaves nothing gives
    zeros, as in torch's kernel.
    """
    rows, keys = query.shape[-2], key.shape[-2]
    causal, window, scale = flags.get("causal", False), flags.get("window"), flags.get("scale")
    if window is not None and window >= max(rows, keys):
        window = None
    # Torch's kernel knows no sinks and no softcap, and would compute what a short window leaves out.
    narrow = window is not None and keys >= 2048 and 4 * window <= keys
    if sinks is not None or flags.get("softcap") is not None or narrow:
        options = Options(causal, window, scale, flags.get("softcap"))
        return blockwise_attention(query, key, value, mask, sinks, options)
    if window is not None or (causal and mask is not None):
        mask = _visible(mask, rows, keys, causal, window, query)
        causal = False
    return scaled_dot_product(query, key, value, mask, causal=causal, scale=scale)


def scaled_dot_product(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool, scale: float | None
) -> Tensor:
    """Torch's kernel, for grouped heads of keys too. `causal` or a mask, not both."""
    grouped = query.shape[-3] != key.shape[-3]
    if grouped and mask is not None:  # with both, torch falls back to a kernel that holds all scores
        times = query.shape[-3] // key.shape[-3]
        key, value, grouped = repeat_heads(key, times), repeat_heads(value, times), False
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def repeat_heads(tensor: Tensor, times: int) -> Tensor:
    """[b, kv, k, d] to [b, kv * times, k, d], each head `times` times in a row."""
    batch, heads, keys, width = tensor.shape
    return tensor.unsqueeze(2).expand(batch, heads, times, keys, width).reshape(batch, -1, keys, width)


def _visible(
    mask: Tensor | None, rows: int, keys: int, causal: bool, window: int | None, query: Tensor
) -> Tensor:
    """`mask` where the flags let a row look, as one mask."""
    distance = (
        torch.arange(rows, device=query.device)[:, None] - torch.arange(keys, device=query.device)[None, :]
    )
    return restrict(mask, distance, causal, window, query.dtype)


def restrict(
    mask: Tensor | None, distance: Tensor, causal: bool, window: int | None, dtype: torch.dtype
) -> Tensor:
    """`mask`, and no more than the flags allow; `distance` [q, k]: by how much a row comes after a key."""
    allowed = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        allowed = allowed & (distance < window)
        if not causal:
            allowed = allowed & (-distance < window)
    if mask is None:
        return allowed
    if mask.dtype == torch.bool:
        return mask & allowed
    return torch.where(allowed, mask, -torch.inf).to(dtype)
