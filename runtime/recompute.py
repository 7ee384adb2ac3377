"""Recompute: what of a layer's activations is kept for its backward, and what is computed again.

In:  how much (none, selective, full) and for how many layers.
Out: a function that runs a call so.

    none       everything that backward reads is kept
    selective  results of matrix products and of collectives are kept; attention and all cheap ops are computed again
    full       only what enters the layer is kept
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

NONE, SELECTIVE, FULL = "none", "selective", "full"

# As they reach the dispatcher below autograd: a linear is one of the first three there.
_KEPT = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm", "_scaled_mm"})


@dataclass(frozen=True)
class Recompute:
    """`layers`: how many of a stage's layers are recomputed, the first ones (None: all). `offload`: what is kept of a
    layer lies in host memory until its backward."""

    kind: str = NONE
    layers: int | None = None
    offload: bool = False

    def of_layer(self, number: int) -> str:
        """What to do with a stage's layer of that number, from 0 on."""
        return self.kind if self.layers is None or number < self.layers else NONE


def run_call(
    kind: str,
    offload: bool,
    function: Callable[..., tuple[Tensor, ...]],
    *arguments: Any,
    early_stop: bool = True,
) -> tuple[Tensor, ...]:
    """`function(*arguments)`, keeping for backward what `kind` says. `early_stop`: computing again may end as soon as
    backward has all it needs, by an exception."""
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()) if offload else nullcontext():
        if kind == NONE:
            return function(*arguments)
        contexts = partial(create_selective_checkpoint_contexts, _policy) if kind == SELECTIVE else None
        results: tuple[Tensor, ...] = (
            checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts, early_stop=early_stop)
            if contexts is not None
            else checkpoint(function, *arguments, use_reentrant=False, early_stop=early_stop)
        )
        return results


def _policy(context: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    namespace, _, name = str(getattr(op, "_schema", op)).partition("(")[0].partition("::")
    kept = namespace.startswith("_c10d_functional") or name.partition(".")[0] in _KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
