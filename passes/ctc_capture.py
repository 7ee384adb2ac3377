"""CTC losses for capture: one op with padded labels, whatever way the model hands its labels over.

In:  a (copied) model while it is exported.
Out: inside the context, `torch.nn.functional.ctc_loss` (and `torch.nn.CTCLoss`) with a row of labels per sequence, and
     the CTC loss of Transformers' models, are `autopar.ctc_loss` (see `autopar/ctc_functions.py`).

    ctc_loss(log_probs [t, b, v], labels.masked_select(mask), frames, mask.sum(-1))      how many, depends on values
    ctc_loss(log_probs [t, b, v], where(mask, labels, -100) [b, l], frames)

Labels of all sequences in one row, which no split of the batch fits, are refused.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autopar.ctc_functions import CTC_LOSS
from autopar.errors import CaptureError

_NONE = -100


def _lengths(given: Any, like: Tensor) -> Tensor:
    """Lengths as torch takes them: a tensor, or numbers."""
    return given if isinstance(given, Tensor) else torch.tensor(given, device=like.device)


def _one_op(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`functional.ctc_loss` with a row of labels for each sequence of a batch."""

    def ctc_loss(
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        reduction: str = "mean",
        zero_infinity: bool = False,
    ) -> Tensor:
        if log_probs.dim() == 3 and targets.dim() == 1:
            raise CaptureError(
                "ctc_loss is given the labels of all sequences in one row, whose pieces follow from values",
                hint="padded labels [batch, longest] with their lengths [batch], which torch takes too",
            )
        if log_probs.dim() != 3 or targets.dim() != 2 or reduction not in ("none", "mean", "sum"):
            return original(
                log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity
            )
        place = torch.arange(targets.shape[1], device=targets.device)
        real = place < _lengths(target_lengths, targets).unsqueeze(-1)
        labels = torch.where(real, targets, _NONE)
        frames = _lengths(input_lengths, targets)
        result: Tensor = CTC_LOSS(log_probs, labels, frames, blank, reduction, zero_infinity)
        return result

    return ctc_loss


def _of_transformers(
    logits: Tensor,
    labels: Tensor,
    logit_lengths: Tensor,
    blank_token_id: int,
    reduction: str = "mean",
    zero_infinity: bool = False,
    ignore_index: int = -100,
    **_: Any,
) -> Tensor:
    """`transformers.loss.loss_ctc.ForCTCLoss` (5.24): logits [b, t, v], labels [b, l]; neither padding nor the blank is
    a label."""
    real = (labels != ignore_index) & (labels != blank_token_id)
    log_probs = functional.log_softmax(logits, dim=-1, dtype=torch.float32).transpose(0, 1)
    padded = torch.where(real, labels, _NONE)
    result: Tensor = CTC_LOSS(log_probs, padded, logit_lengths, blank_token_id, reduction, zero_infinity)
    return result


@contextlib.contextmanager
def ctc_for_capture() -> Iterator[None]:
    """While exporting: CTC losses are the one op."""
    original = functional.ctc_loss
    losses: dict[str, Any] = getattr(sys.modules.get("transformers.loss.loss_utils"), "LOSS_MAPPING", {})
    theirs = losses.get("ForCTC")
    functional.ctc_loss = _one_op(original)
    if theirs is not None:
        losses["ForCTC"] = _of_transformers
    try:
        yield
    finally:
        functional.ctc_loss = original
        if theirs is not None:
            losses["ForCTC"] = theirs
