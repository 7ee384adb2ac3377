"""Attention for capture: `scaled_dot_product_attention` told that it is causal, instead of given a mask that says so.

Transformers leaves the mask out of an ordinary causal (or full) attention when it runs, but not while a model is
exported: there it cannot know that the sequence will not change, nor that several sequences were not packed into one
row. A captured program then holds a `[batch, 1, seq, seq]` tensor that rules out flash kernels, costs memory and says
nothing. autopar knows both (shapes are the plan's, and it never packs), so models are built with the attention
registered here:

    captured before:  sdpa(q, expanded k, expanded v, attn_mask)     with some 12 ops to make the mask
    captured now:     sdpa(q, k, v, is_causal=True, enable_gqa=True)

Padding, a sliding window shorter than the sequence, chunks and custom masks are kept as masks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

NAME = "autopar_sdpa"


def use_causal_flag(model: Any) -> None:
    """Switches a Transformers model from its sdpa attention to this one; a model without sdpa is left as it is."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if model.config._attn_implementation == "sdpa" and model._can_set_attn_implementation():
        AttentionInterface.register(NAME, sdpa_attention_forward)
        AttentionMaskInterface.register(NAME, mask_or_none)
        model.set_attn_implementation(NAME)


def mask_or_none(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """None where the kernel's `is_causal` flag says all that the mask would; else the mask of Transformers.

    Takes the keywords of `transformers.masking_utils.sdpa_mask`.
    """
    from transformers import masking_utils

    plain = (
        kwargs.get("attention_mask") is None
        and not kwargs.get("use_vmap")
        and kwargs.get("q_length") == kwargs.get("kv_length")
        and not isinstance(kwargs.get("q_offset"), torch.Tensor)
        and kwargs.get("q_offset", 0) == kwargs.get("kv_offset", 0) == 0
        and "mask_function" in kwargs
        and _says_nothing(kwargs["mask_function"], kwargs["kv_length"])
    )
    build: Any = masking_utils.sdpa_mask
    return None if plain else build(*args, **kwargs)


def _says_nothing(mask: Callable[..., Any], length: int) -> bool:
    """Whether a mask function is plainly causal or full, apart from parts that cut nothing off.

    Transformers composes mask functions as closures; the outer function's name tells which part one is. A part that
    is not known here counts as saying something.
    """
    from transformers import masking_utils
    from transformers.utils.import_utils import is_tracing

    if mask in (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function):
        return True
    if torch.compiler.is_dynamo_compiling() or not inspect.isfunction(mask):
        return False
    part, held = mask.__qualname__.split(".")[0], inspect.getclosurevars(mask).nonlocals
    if part == "and_masks":
        return all(_says_nothing(each, length) for each in held["mask_functions"])
    if part == "packed_sequence_mask_function":  # added whenever the positions' values cannot be looked at
        unknown: bool = is_tracing(held["packed_sequence_mask"])
        return unknown
    if part == "remap_positions_for_packed_sequence":
        return bool(is_tracing(held["position_ids"])) and _says_nothing(held["mask_function"], length)
    if part in ("sliding_window_overlay", "sliding_window_bidirectional_overlay"):
        return bool(held["sliding_window"] >= length)
    return False
