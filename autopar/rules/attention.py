"""Scaled dot product attention, kept whole by capture:

    heads equal     b h q d!, b h s! d!, b h s! d! -> b h q d!
    grouped heads   b (kv rep) q d!, b kv s! d!, b kv s! d! -> b (kv rep) q d!
    one key head    b h q d!, b 1 s! d!, b 1 s! d! -> b h q d!

Batch and heads split freely. The query length splits if each row knows what it may look at: a mask says so, or
everything is visible. With `is_causal` the rows of a piece do not know their position, so the split needs the
lowering "causal_attention". Keys' length and head dim are whole: the softmax and the scores run over them.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.rules.call import OpCall, RuleFunction
from autopar.rules.rule import Rule


def attention(call: OpCall) -> Rule | None:
    """scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)."""
    query, key, value = call.shapes[:3]
    if len(query) < 3 or call.arg(4, "dropout_p", 0.0):
        return None
    causal = bool(call.arg(5, "is_causal", False))
    grouped = bool(call.kwargs.get("enable_gqa", False)) and 1 < key[-3] < query[-3]
    if key[:-1] != value[:-1]:
        return None
    lead = ["b", *(f"b{index}" for index in range(1, len(query) - 3))][: len(query) - 3]
    heads = "(kv rep)" if grouped else "h"
    out = "d!" if query[-1] == value[-1] else "e!"
    keys = [*lead, "kv" if grouped else "h", "s!"]
    operands = [[*lead, heads, "q", "d!"], [*keys, "d!"], [*keys, out], [*lead, heads, "q", "s!"]]
    parts = [_aligned(shape, factors) for shape, factors in zip(call.shapes, operands, strict=False)]
    text = f"{', '.join(parts)} -> {_aligned(call.result_shapes[0], [*lead, heads, 'q', out])}"
    # Scores and weighted values: 2 b h q s d + 2 b h q s e operations, half of them under the diagonal.
    head, head_out = query[-1], value[-1]
    flops = 2.0 * (head + head_out) / (head if out == "d!" else head * head_out)
    return call.parse(
        text,
        special=frozenset({"q"}) if causal else frozenset(),
        lowering="causal_attention" if causal else None,
        flops_per_point=flops / 2 if causal else flops,
        logical={"b": "batch", "kv" if grouped else "h": "heads", "q": "sequence", "d": "head_dim"},
    )


def _aligned(shape: tuple[int, ...], factors: list[str]) -> str:
    """A tensor's dims, aligned at the right; dims of size 1 (one head of keys for all, a mask for all) broadcast."""
    own = factors[len(factors) - len(shape) :]
    return " ".join("1" if size == 1 else name for size, name in zip(shape, own, strict=True))


RULES: Mapping[str, RuleFunction] = {"aten.scaled_dot_product_attention": attention}
