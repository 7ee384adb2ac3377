"""Connectionist temporal classification as one op, whose labels are padded: nothing's size depends on their values.

In:  log-probabilities [t, b, v], labels [b, l] with a negative number wherever there is none, lengths of the frames [b].
Out: the loss, as `torch.nn.functional.ctc_loss` (Graves et al. 2006, "Connectionist Temporal Classification") has it,
     whose kernel computes it, with a split of the batch for data parallelism.

Torch's function wants lengths as Python numbers and, from most models, the labels of all sequences in one row; the
sizes of both follow from values. `CTC_LOSS` is what torch.export sees, `ctc_loss` what capture puts in its place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from autopar.torch_private import ctc_backward, ctc_forward

_SCHEMA = "(Tensor log_probs, Tensor labels, Tensor input_lengths, int blank, str reduction, bool zero_infinity) -> Tensor"
torch.library.define("autopar::ctc_loss", _SCHEMA)
CTC_LOSS = torch.ops.autopar.ctc_loss.default


@torch.library.register_fake("autopar::ctc_loss")  # type: ignore[untyped-decorator]
def _fake_loss(
    log_probs: Tensor, labels: Tensor, lengths: Tensor, blank: int, reduction: str, *_: object
) -> Tensor:
    return log_probs.new_empty(labels.shape[:1] if reduction == "none" else ())


def ctc_loss(
    log_probs: Tensor,
    labels: Tensor,
    input_lengths: Tensor,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """log_probs [t, b, v], labels [b, l], input_lengths [b] -> a scalar, or [b] for reduction "none".

    Labels that are negative are none, wherever in a row they stand. "mean" divides each sequence's loss by its number of
    labels (at least 1) and averages over the batch, as torch does. `zero_infinity`: a sequence with more labels than
    frames counts 0 instead of infinity.
    """
    real = labels >= 0
    lengths = real.sum(-1)
    order = torch.argsort((~real).to(torch.uint8), dim=-1, stable=True)
    targets = labels.gather(-1, order).clamp(min=0)
    losses: Tensor
    losses, _ = torch.ops.autopar.ctc_losses(log_probs, targets, input_lengths, lengths, blank, zero_infinity)
    if zero_infinity:
        losses = torch.where(torch.isinf(losses), 0.0, losses)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return (losses / lengths.clamp(min=1).to(losses.dtype)).mean()


# ---- the losses of the sequences: torch's kernel, as one node to a compiler ------------------------------------------


def _losses(
    log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    """log_probs [t, b, v], targets [b, l] of which the first `lengths` [b] count -> [b], and what backward reads
    [b, t, 2 l + 1]: of a size that does not follow from values."""
    losses, kept = ctc_forward(log_probs, targets, inputs, lengths, blank, zero_infinity)
    return losses, pad(kept, (0, 2 * targets.shape[1] + 1 - kept.shape[-1]))


def _losses_backward(
    gradient: Tensor, log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, losses: Tensor,
    kept: Tensor, blank: int, zero_infinity: bool,
) -> Tensor:  # fmt: skip
    narrow = kept[..., : 2 * int(lengths.max()) + 1].contiguous()
    return ctc_backward(gradient, log_probs, targets, inputs, lengths, losses, narrow, blank, zero_infinity)


_ARGUMENTS = "Tensor log_probs, Tensor targets, Tensor inputs, Tensor lengths"
_FLAGS = "int blank, bool zero_infinity"
torch.library.custom_op(
    "autopar::ctc_losses", _losses, mutates_args=(), schema=f"({_ARGUMENTS}, {_FLAGS}) -> (Tensor, Tensor)"
)
torch.library.custom_op(
    "autopar::ctc_losses_backward",
    _losses_backward,
    mutates_args=(),
    schema=f"(Tensor gradient, {_ARGUMENTS}, Tensor losses, Tensor kept, {_FLAGS}) -> Tensor",
)


def _fake_losses(log_probs: Tensor, targets: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    frames, batch = log_probs.shape[:2]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, frames, 2 * targets.shape[1] + 1)


def _fake_losses_backward(gradient: Tensor, log_probs: Tensor, *_: object) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.flags = inputs[4:]
    ctx.mark_non_differentiable(output[1])


def _slopes(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    slope: Tensor = torch.ops.autopar.ctc_losses_backward(gradient, *ctx.saved_tensors, *ctx.flags)
    return slope, None, None, None, None, None


torch.library.register_fake("autopar::ctc_losses", _fake_losses)
torch.library.register_fake("autopar::ctc_losses_backward", _fake_losses_backward)
torch.library.register_autograd("autopar::ctc_losses", _slopes, setup_context=_keep)
