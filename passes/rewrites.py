"""Rewrites: methods of Transformers models that index by a mask, as the same computation with fixed shapes.

In:  the copy of a model that is captured.
Out: the copy, with the methods of `REWRITES` replaced wherever a module of it has them.

`x[mask] = x[mask] + rows` has a size that depends on the mask's values; where the number of rows is known to be that
of the mask, `x + zeros.masked_scatter(mask, rows)` says the same.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


def _deepstack_process(
    self: nn.Module, hidden_states: Tensor, visual_pos_masks: Tensor, visual_embeds: Tensor
) -> Tensor:
    """Qwen3-VL and its kin: features of the image added to the hidden states of its tokens."""
    rows = visual_embeds.to(hidden_states.dtype)
    mask = visual_pos_masks.unsqueeze(-1).expand_as(hidden_states)
    return hidden_states + torch.zeros_like(hidden_states).masked_scatter(mask, rows)


REWRITES: Mapping[str, Callable[..., Tensor]] = {"_deepstack_process": _deepstack_process}


def rewrite(model: nn.Module) -> None:
    """Replace the methods on the instances of a (copied) Transformers model."""
    for module in model.modules():
        if type(module).__module__.startswith("transformers."):
            for name, function in REWRITES.items():
                if hasattr(type(module), name):
                    setattr(module, name, types.MethodType(function, module))
