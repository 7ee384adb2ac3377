"""Losses. `autopar.cross_entropy` is the form capture writes, whose tokens and vocabulary may both be split:

    cross_entropy(logits: b s v, labels: b s) -> scalar

The lowering "cross_entropy" reduces over a split vocabulary itself (`reduced`), and over split tokens leaves
addends whose sum is the loss of all tokens, counted once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from autopar.rules.call import OpCall, RuleFunction, names, text_of, tokens
from autopar.rules.rule import Rule

LOGICAL = ("batch", "sequence")


def cross_entropy(call: OpCall) -> Rule | None:
    """cross_entropy(logits[..., v], labels[...], ignore_index, reduction, label_smoothing)."""
    labels = call.shapes[1]
    lead = ["b", "s", *(f"x{index}" for index in range(2, len(labels)))][: len(labels)]
    token = tokens(labels, lead)
    each = call.arg(3, "reduction", "mean") in ("none", 0)
    logits = [*token, *tokens(call.shapes[0][-1:], ["v"])]
    return call.parse(
        text_of([logits, token], [token if each else []]),
        special=frozenset({"v"} if each else {"v", *lead}),
        lowering="cross_entropy",
        reduced=frozenset({"v"}),
        flops_per_point=5.0,
        logical={"v": "vocab", **(dict(zip(lead, LOGICAL, strict=False)) if len(labels) > 1 else {})},
    )


def whole_loss(call: OpCall) -> Rule | None:
    """aten.cross_entropy_loss(logits[n, c], target[n], weight, reduction) and nll_loss: the mean divides by how
    many labels count, so tokens are whole; the sum and the list of losses split by tokens."""
    logits, target = call.shapes[:2]
    reduction = call.arg(3, "reduction", 1)
    if logits == target:
        return cross_entropy_of_chances(call)
    if len(logits) != 2 or len(target) != 1 or len(call.operands) != 2 or len(call.results) != 1:
        return None
    token = tokens(target, ["n!" if reduction == 1 else "n"])
    result = token if reduction == 0 else []
    return call.parse(
        text_of([[*token, *tokens(logits[1:], ["v!"])], token], [result]),
        flops_per_point=5.0,
        logical={"v": "vocab"},
    )


def difference_loss(call: OpCall) -> Rule | None:
    """mse_loss, l1_loss, smooth_l1_loss, huber_loss, soft_margin_loss, kl_div(x, target, reduction): 0 none, 1 mean, 2 sum."""
    reduction = call.arg(2, "reduction", 1)
    if call.shapes[0] != call.shapes[1] or len(call.operands) != 2:
        return None
    text = (
        "..., ... -> ..."
        if reduction == 0
        else text_of([tokens(call.shapes[0], _names(call)), tokens(call.shapes[0], _names(call))], [[]])
    )
    return call.parse(text, average=reduction == 1, flops_per_point=3.0)


def cross_entropy_of_chances(call: OpCall) -> Rule | None:
    """aten.cross_entropy_loss(logits[n, c], target[n, c]) with a chance for every class: averages over the rows."""
    logits, target = call.shapes[:2]
    if logits != target or len(logits) != 2 or len(call.operands) != 2 or not call.operands[1].is_float:
        return None
    reduction = call.arg(3, "reduction", 1)
    row = tokens(logits, ["n", "v!"])
    result = row[:1] if reduction == 0 else []
    return call.parse(
        text_of([row, row], [result]), average=reduction == 1, flops_per_point=5.0, logical={"v": "vocab"}
    )


def weighted_difference(call: OpCall, *, reduction_at: int = 4) -> Rule | None:
    """binary_cross_entropy_with_logits(x, target, weight, pos_weight, reduction) and binary_cross_entropy(x, target,
    weight, reduction): weights broadcast."""
    reduction = call.arg(reduction_at, "reduction", 1)
    shape = call.shapes[0]
    if call.shapes[1] != shape or any(len(weight) > len(shape) for weight in call.shapes[2:]):
        return None
    full = names(len(shape), "x")
    operands = [tokens(other, full[len(shape) - len(other) :]) for other in call.shapes]
    result = [operands[0]] if reduction == 0 else [[]]
    return call.parse(text_of(operands, result), average=reduction == 1, flops_per_point=4.0)


def ctc_loss(call: OpCall) -> Rule | None:
    """ctc_loss(log_probs[t, b, v], labels[b, l], input_lengths[b], blank, reduction, zero_infinity): sequences split."""
    reduction = call.arg(4, "reduction", "mean")
    result = "b" if reduction == "none" else ""
    return call.parse(
        f"t! b v!, b l!, b -> {result}",
        average=reduction == "mean",
        flops_per_point=6.0,
        logical={"b": "batch", "t": "sequence", "v": "vocab"},
    )


def _names(call: OpCall) -> list[str]:
    return [f"x{index}" for index in range(len(call.shapes[0]))]


RULES: Mapping[str, RuleFunction] = {
    "autopar.cross_entropy": cross_entropy,
    "autopar.ctc_loss": ctc_loss,
    "aten.cross_entropy_loss": whole_loss,
    "aten.nll_loss": whole_loss,
    "aten.mse_loss": difference_loss,
    "aten.l1_loss": difference_loss,
    **{
        f"aten.{name}": difference_loss
        for name in ("smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div")
    },
    "aten.binary_cross_entropy_with_logits": weighted_difference,
    "aten.binary_cross_entropy": partial(weighted_difference, reduction_at=3),
}
