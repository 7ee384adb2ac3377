"""Ops that capture puts in place of a family of ATen patterns, so that one rule can say how they split."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


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
