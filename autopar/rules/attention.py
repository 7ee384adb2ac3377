"""Attention. `autopar.attention` is the form capture writes; the rule of torch's op is that of what it is made from.

    heads equal     b h q d!, b h k! d!, b h k! d! -> b h q d!
    grouped heads   b (kv rep) q d!, b kv k! d!, b kv k! d! -> b (kv rep) q d!
    one key head    b h q d!, b 1 k! d!, b 1 k! d! -> b h q d!

    with a mask     ..., b 1 q k! ->       with sinks   ..., (kv rep) ->

Batch and heads split freely. Heads split finer than the keys' are (`kv.rep`) have keys and values whole, whose
gradients are then sums. The rows split if each knows what it may look at: a mask says so, or everything is visible;
under causality or a window that needs the lowering, since the rows of a piece do not know their position. Rows and
keys split over one axis as the pair `q~k`: keys and values travel around a ring; under causality also as `q~k~zigzag`,
for which pieces change hands before and after, so that all ranks compute as much. Apart from that the keys are whole,
and so are the head dims: the softmax and the scores run over them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.rules.call import OpCall, RuleFunction
from autopar.rules.rule import JOINT, ZIGZAG, Rule, pair_choice

# What is lowered alike has three names, by what a device with a slice of the rows computes of all scores.
FULL, CAUSAL, WINDOW = "attention", "causal_attention", "window_attention"
ROWS_AND_KEYS = ("q", "k")  # the pair
EVEN_LOAD = (*ROWS_AND_KEYS, ZIGZAG)  # the same, every rank with an early and a late piece
RINGS = (pair_choice(ROWS_AND_KEYS), pair_choice(EVEN_LOAD))


def attention(call: OpCall) -> Rule | None:
    """attention(query, key, value, mask, sinks, *, causal, window, scale, softcap)."""
    query, key = call.shapes[:2]
    window = call.kwargs.get("window")
    causal = bool(call.kwargs.get("causal", False))
    if len(query) != 4 or len(key) != 4:
        return None
    if window is not None and window >= max(query[-2], key[-2]):
        window = None
    return _rule(
        call,
        grouped=1 < key[-3] < query[-3],
        causal=causal,
        window=window,
        sinks=call.arg(4, "sinks") is not None,
        lowered=True,
    )


def scaled_dot_product_attention(call: OpCall) -> Rule | None:
    """scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa): what capture leaves
    of it, such as attention without a dim of heads."""
    query, key = call.shapes[:2]
    if len(query) < 3 or call.arg(4, "dropout_p", 0.0):
        return None
    grouped = bool(call.kwargs.get("enable_gqa", False)) and 1 < key[-3] < query[-3]
    causal = bool(call.arg(5, "is_causal", False))
    return _rule(call, grouped=grouped, causal=causal, window=None, sinks=False, lowered=False)


def _rule(
    call: OpCall, *, grouped: bool, causal: bool, window: int | None, sinks: bool, lowered: bool
) -> Rule | None:
    query, key, value = call.shapes[:3]
    if key[:-1] != value[:-1]:
        return None
    lead = ["b", *(f"b{index}" for index in range(1, len(query) - 3))][: len(query) - 3]
    heads = "(kv rep)" if grouped else "h"
    out = "d!" if query[-1] == value[-1] else "e!"
    keys = [*lead, "kv" if grouped else "h", "k!"]
    operands = [[*lead, heads, "q", "d!"], [*keys, "d!"], [*keys, out]]
    rest = call.shapes[3:]
    masks = rest[:-1] if sinks else rest
    operands += [[*lead, heads, "q", "k!"] for _ in masks]
    if sinks:
        operands.append([heads] if len(rest[-1]) == 1 else [*lead, heads, "q", "x!"])
    parts = [_aligned(shape, factors) for shape, factors in zip(call.shapes, operands, strict=False)]
    text = f"{', '.join(parts)} -> {_aligned(call.result_shapes[0], [*lead, heads, 'q', out])}"
    flops = _operations(query[-1], value[-1])
    special = {"q"} if causal or window is not None else set()
    joint = JOINT.join(("kv", "rep"))
    ring = lowered and min(query[-2], key[-2]) > 1
    # A window leaves all ranks but the first as much to do, and keys in zigzag would have to go all the way around.
    uneven = causal and window is None and query[-2] == key[-2]
    fields: dict[str, Any] = {
        "special": frozenset(special | ({joint} if grouped and lowered else set())),
        "pairs": ((ROWS_AND_KEYS, EVEN_LOAD) if uneven else (ROWS_AND_KEYS,)) if ring else (),
        "joint": (joint,) if grouped and lowered else (),
        "lowering": lowering_of(causal, window) if lowered else CAUSAL if causal else None,
    }
    return call.parse(
        text,
        flops_per_point=flops * visible(query[-2], key[-2], causal, window),
        logical={"b": "batch", "kv" if grouped else "h": "heads", "q": "sequence", "d": "head_dim"},
        **fields,
    )


def lowering_of(causal: bool, window: int | None) -> str:
    return WINDOW if window is not None else CAUSAL if causal else FULL


def visible(rows: int, keys: int, causal: bool, window: int | None) -> float:
    """The share of all scores that the flags leave to be computed; a half under the diagonal."""
    if window is None:
        return 0.5 if causal else 1.0
    back = min(window, keys)
    ahead = 0 if causal else min(window, keys) - 1
    # Rows near either end see fewer keys than the window holds.
    seen = rows * (back + ahead) - back * (back - 1) / 2 - ahead * (ahead + 1) / 2
    return max(0.0, min(1.0, seen / (rows * keys)))


def _operations(width: int, width_out: int) -> float:
    """Per point, when every row sees every key. Scores and weighted values: 2 b h q k d + 2 b h q k e operations, of
    one product of sizes that has d once if the two are equal."""
    return 2.0 * (width + width_out) / (width if width == width_out else width * width_out)


def visible_share(rule: Rule) -> float:
    """What `visible` said when the rule was made."""
    sizes = [rule.sizes.get(name, 1) for name in ("d", "e")]
    return rule.flops_per_point / _operations(sizes[0], sizes[1] if "e" in rule.sizes else sizes[0])


def row_excess(rule: Rule, by_factor: Mapping[str, Any]) -> float:
    """How many times its share of the operations a device runs that has the last rows: under causality they see
    nearly all keys, and the first next to none, unless every device has early and late ones."""
    rows_split = "q" in by_factor or RINGS[0] in by_factor
    return 2.0 if rule.lowering == CAUSAL and rows_split else 1.0


def _aligned(shape: tuple[int, ...], factors: list[str]) -> str:
    """A tensor's dims, aligned at the right; dims of size 1 (one head of keys for all, a mask for all) broadcast."""
    own = factors[len(factors) - len(shape) :]
    return " ".join("1" if size == 1 else name for size, name in zip(shape, own, strict=True))


RULES: Mapping[str, RuleFunction] = {
    "autopar.attention": attention,
    "aten.scaled_dot_product_attention": scaled_dot_product_attention,
}
