"""Normalisations over the last dims: leading dims split, normalised dims are whole.

`batch_norm` has no rule: its statistics cross the batch, so it is kept whole.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.program import TensorInfo
from autopar.rules.call import OpCall, RuleFunction, text_of, tokens
from autopar.rules.rule import Rule


def last_dims(call: OpCall) -> Rule | None:
    """layer_norm, native_layer_norm, rms_norm(x, normalized_shape, weight, bias, eps).

    Further results (mean, rstd) have size 1 in the normalised dims.
    """
    x = call.shapes[0]
    normal = len(call.arg(1, "normalized_shape"))
    names = [f"d{index}!" for index in range(normal)]
    lead = [f"l{index}" for index in range(len(x) - normal)]
    full = [*lead, *names]
    operands = [tokens(x, full)] + [tokens(shape, names) for shape in call.shapes[1:]]
    return call.parse(
        text_of(operands, [tokens(shape, full) for shape in call.result_shapes]), flops_per_point=6.0
    )


def group_norm(call: OpCall) -> Rule | None:
    """group_norm(x[n, c, *], groups, weight[c], bias[c]): only the batch splits."""
    x = call.shapes[0]
    if not isinstance(call.args[0], TensorInfo) or len(call.results) != 1:
        return None
    full = tokens(x, ["n", "c!", *(f"x{index}!" for index in range(len(x) - 2))])
    channel = tokens(x[1:2], ["c!"])
    text = text_of([full, *[channel] * (len(call.operands) - 1)], [full])
    return call.parse(text, flops_per_point=6.0, logical={"n": "batch"})


RULES: Mapping[str, RuleFunction] = {
    "aten.layer_norm": last_dims,
    "aten.native_layer_norm": last_dims,
    "aten.rms_norm": last_dims,
    "aten._fused_rms_norm": last_dims,
    "aten.group_norm": group_norm,
}
