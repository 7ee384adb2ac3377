"""Rewrites: methods of Transformers models that index by a mask, as the same computation with fixed shapes.

In:  the copy of a model that is captured.
Out: the copy, with the methods of `REWRITES` replaced wherever a module of it has them, and the forwards of the classes
     in `FORWARDS`.

`x[mask] = x[mask] + rows` has a size that depends on the mask's values; where the number of rows is known to be that
of the mask, `x + zeros.masked_scatter(mask, rows)` says the same.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.passes.mask_flags import Flags, noted


def _deepstack_process(
    self: nn.Module, hidden_states: Tensor, visual_pos_masks: Tensor, visual_embeds: Tensor
) -> Tensor:
    """Qwen3-VL and its kin: features of the image added to the hidden states of its tokens."""
    rows = visual_embeds.to(hidden_states.dtype)
    mask = visual_pos_masks.unsqueeze(-1).expand_as(hidden_states)
    return hidden_states + torch.zeros_like(hidden_states).masked_scatter(mask, rows)


def _select_blocks(
    self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor, cache: Any = None
) -> Tensor:
    """Qwen4's indexer (`Qwen4ExpTextQSAIndexer`) under a causal mask: which keys [b, 1, q, k] a query may look at.

    The model loops over sequences and queries, since a mask may hide any key. Under a causal one the blocks of keys are
    the same for all queries: query i may choose among the (i + 1) // ratio blocks that are complete, and sees the rest
    of its own.
    """
    if cache is not None or noted(attention_mask) != Flags(True):
        return type(self).forward(  # type: ignore[no-any-return]
            self, hidden_states, position_embeddings, attention_mask, cache
        )
    rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb
    batch, rows, _ = hidden_states.shape
    ratio, width = self.compress_ratio, self.index_head_dim
    blocks = rows // ratio
    cos, sin = position_embeddings
    both = self.index_qk_proj(hidden_states)
    query, key = both.split([self.index_n_heads * width, self.index_kv_heads * width], dim=-1)
    query = rotate(self.q_layernorm(query.reshape(batch, rows, -1, width)), cos=cos, sin=sin, unsqueeze_dim=2)
    grouped = key[:, : blocks * ratio].reshape(batch, blocks, ratio, width)
    pooled = self.k_layernorm(grouped.float().mean(2).to(key.dtype)).unsqueeze(2)
    starts = slice(0, blocks * ratio, ratio)
    pooled = rotate(pooled, cos=cos[:, starts], sin=sin[:, starts], unsqueeze_dim=2).transpose(1, 2)
    products = torch.matmul(query.float(), pooled.float().transpose(-1, -2))  # [b, q, h, blocks]
    scores = torch.relu(products).sum(2) / math.sqrt(width)
    place = torch.arange(rows, device=scores.device)
    complete = (place.unsqueeze(-1) + 1) // ratio
    open_to = torch.arange(blocks, device=scores.device) < complete  # [q, blocks]
    best = scores.masked_fill(~open_to, -torch.inf).topk(min(self.block_topk, blocks), dim=-1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & open_to
    tokens = chosen.unsqueeze(-1).expand(batch, rows, blocks, ratio).reshape(batch, rows, blocks * ratio)
    tokens = torch.nn.functional.pad(tokens, (0, rows - blocks * ratio))
    own = (place >= complete * ratio) & (place <= place.unsqueeze(-1))
    visible: Tensor = (tokens | own).unsqueeze(1)
    return visible


REWRITES: Mapping[str, Callable[..., Tensor]] = {"_deepstack_process": _deepstack_process}
FORWARDS: Mapping[str, Callable[..., Tensor]] = {"Qwen4ExpTextQSAIndexer": _select_blocks}


def rewrite(model: nn.Module) -> None:
    """Replace the methods on the instances of a (copied) Transformers model."""
    for module in model.modules():
        if type(module).__module__.startswith("transformers."):
            for name, function in REWRITES.items():
                if hasattr(type(module), name):
                    setattr(module, name, types.MethodType(function, module))
            forward = FORWARDS.get(type(module).__name__)
            if forward is not None:
                module.forward = types.MethodType(forward, module)
