"""Normalisations. Those over the last dims split their leading dims; group and instance norm batch and channels; batch
norm everything, its statistics being reduced over what is split by its lowering.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.program import TensorInfo
from autopar.rules.call import OpCall, RuleFunction, names, text_of, tokens
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
    """group_norm(x[n, c, *], groups, weight[c], bias[c]): batch and groups split; a piece has its number of groups."""
    x = call.shapes[0]
    if not isinstance(call.args[0], TensorInfo) or len(call.results) != 1:
        return None
    groups, channels = int(call.args[1]), x[1]
    parts = {"g": groups, "c": channels // groups}
    channel = tuple(name for name, size in parts.items() if size > 1)
    space = [f"x{index}" for index in range(len(x) - 2)]
    rest = {name: size for name, size in zip(["n", *space], (x[0], *x[2:]), strict=True) if size > 1}
    full = (
        ("n",) * (x[0] > 1),
        channel,
        *((name,) * (size > 1) for name, size in zip(space, x[2:], strict=True)),
    )
    sizes = {**rest, **{name: parts[name] for name in channel}}
    return Rule(
        operands=(full, *[(channel,)] * (len(call.operands) - 1)),
        results=(full,),
        sizes=sizes,
        whole=frozenset(["c", *space]) & sizes.keys(),
        flops_per_point=6.0,
        logical={"n": "batch", **({"g": "channels"} if groups > 1 else {})},
        count_args=((1, "g"),) if groups > 1 else (),
    )


def instance_norm(call: OpCall) -> Rule | None:
    """instance_norm(x[n, c, *], weight[c], bias[c], ...) by the input's own statistics: batch and channels split."""
    x = call.shapes[0]
    if (
        len(call.operands) != 1 + sum(isinstance(arg, TensorInfo) for arg in call.args[1:3])
        or not call.args[5]
    ):
        return None  # running statistics
    full = tokens(x, ["n", "c", *(f"x{index}!" for index in range(len(x) - 2))])
    text = text_of([full, *[full[1:2]] * (len(call.operands) - 1)], [full])
    return call.parse(text, flops_per_point=6.0, logical={"n": "batch", "c": "channels"})


def batch_norm(call: OpCall) -> Rule | None:
    """_native_batch_norm_legit_functional(x[n, c, *], weight, bias, running mean and variance, training, ...), and
    the form without running statistics. Statistics are of all but the channels: splitting those needs the lowering
    "batch_norm", which reduces them itself, in both directions (`reduced`)."""
    x = call.shapes[0]
    if not call.args[-3]:
        return frozen_batch_norm(call)
    crossed = ["n", *(f"x{index}" for index in range(len(x) - 2))]
    full = tokens(x, [crossed[0], "c", *crossed[1:]])
    channel = tokens((x[1],), ["c"])
    results = [full, *[channel] * (len(call.results) - 1)]
    return call.parse(
        text_of([full, *[channel] * (len(call.operands) - 1)], results),
        special=frozenset(crossed),
        lowering="batch_norm",
        reduced=frozenset(crossed),
        flops_per_point=8.0,
        logical={"n": "batch", "c": "channels"},
    )


def frozen_batch_norm(call: OpCall) -> Rule | None:
    """_native_batch_norm_legit_no_training: pointwise, by given statistics; its other results are empty."""
    x = call.shapes[0]
    full = tokens(x, ["n", "c", *(f"x{index}" for index in range(len(x) - 2))])
    channel = tokens((x[1],), ["c"])
    empty = [["z!"] if shape == (0,) else channel for shape in call.result_shapes[1:]]
    text = text_of([full, *[channel] * (len(call.operands) - 1)], [full, *empty])
    return call.parse(text, flops_per_point=2.0, logical={"n": "batch", "c": "channels"})


def weight_norm(call: OpCall) -> Rule | None:
    """_weight_norm(v, g, dim): v scaled to the norms g; norms are over all dims but `dim`."""
    v, g = call.shapes
    if len(v) != len(g):
        return None
    full = [name + ("!" if size == 1 else "") for name, size in zip(names(len(v)), g, strict=True)]
    return call.parse(text_of([tokens(v, full), tokens(g, full)], [tokens(v, full)]), flops_per_point=3.0)


RULES: Mapping[str, RuleFunction] = {
    "aten.layer_norm": last_dims,
    "aten.native_layer_norm": last_dims,
    "aten.rms_norm": last_dims,
    "aten._fused_rms_norm": last_dims,
    "aten.group_norm": group_norm,
    "aten.instance_norm": instance_norm,
    "aten._weight_norm": weight_norm,
    "aten._native_batch_norm_legit_functional": batch_norm,
    "aten._native_batch_norm_legit": batch_norm,
    "aten._native_batch_norm_legit_no_training": frozen_batch_norm,
}
