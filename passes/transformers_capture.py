"""Attention for capture of Transformers models: masks only where there is something to mask.

In:  a (copied) Transformers model whose attention implementation is `sdpa`.
Out: inside the context, causal attention without padding is `is_causal=True` and has no mask tensor. At sequence
     8192 that is 64 MB per sequence and layer that no rank ever holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

NAME = "autopar_sdpa"


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(NAME, sdpa_attention_forward)
    AttentionMaskInterface.register(NAME, mask_or_flag)


def mask_or_flag(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask Transformers would build for sdpa, or None where attention's own flag says all of it."""
    from transformers.masking_utils import sdpa_mask

    causal_skip = kwargs.get("allow_is_causal_skip", True)
    full_skip = kwargs.get("allow_is_bidirectional_skip", False)
    query, key = kwargs.get("q_length"), kwargs.get("kv_length")
    local = kwargs.get("local_size")
    from_start = isinstance(kwargs.get("q_offset", 0), int) and kwargs.get("q_offset", 0) == 0
    unmasked = (
        kwargs.get("attention_mask") is None
        and from_start
        and (local is None or (key is not None and key < local))
    )
    if unmasked and (full_skip or (causal_skip and query == key)):
        return None
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


@contextlib.contextmanager
def attention_for_capture(model: nn.Module, packed: bool) -> Iterator[None]:
    """Use `mask_or_flag` for `model` (changes the model's config, which is the copy's own); unless `packed`, skip
    the search for sequences packed into one row, which needs position ids given by the caller."""
    from transformers import masking_utils

    _register()
    config: Any = model.config
    if getattr(config, "_attn_implementation", None) == "sdpa":
        config._attn_implementation = NAME
    find = masking_utils.find_packed_sequence_indices
    if not packed:
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find
