"""Inputs that a multimodal model computes on the host, from the values of others, before a step.

In:  a model and a batch as its processor makes it: token ids, the kind of every token, the grids of its images.
Out: the batch with what forward would compute of these by Python loops: for models whose positions count in three
     directions (Qwen2-VL and its kin), `position_ids` [3, batch, seq] in place of `mm_token_type_ids`.

    batch = with_positions(model, processor(...))         before `compile`, and for every batch of a run
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

NEEDS = "mm_token_type_ids"


def with_positions(model: torch.nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with `position_ids` by the model's own helper, where it has one and the batch tells kinds of tokens."""
    owner: Any = next(
        (module for module in model.modules() if hasattr(module, "compute_3d_position_ids")), None
    )
    if owner is None or batch.get(NEEDS) is None or batch.get("position_ids") is not None:
        return dict(batch)
    compute = owner.compute_3d_position_ids
    known = {"inputs_embeds": None, "cache": None, "past_key_values": None, **batch}
    names = inspect.signature(compute).parameters
    arguments = {name: known.get(name) for name in names if name in known or name not in ("args", "kwargs")}
    with torch.no_grad():
        positions = compute(**{name: value for name, value in arguments.items() if name in names})
    owner.rope_deltas = None  # of this batch; forward would go on from them
    rest = {name: value for name, value in batch.items() if name != NEEDS}
    return rest if positions is None else {**rest, "position_ids": positions}
