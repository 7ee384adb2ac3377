"""A layer of experts as one op: what capture puts in place of a model's own way of sending tokens to experts.

In:  tokens x [..., d], the experts each is sent to (index [..., k]) and how much each counts (weights [..., k]), and
     the experts' stacked matrices, `gate` and `up` [e, f, d], `down` [e, d, f].
Out: [..., d]; per token, sum over its k slots of  weight * outer(down(inner(gate(x), up(x)))).

No token is dropped and no expert padded, however uneven the loads. `inner` and `outer` are texts of a small language of
ATen calls (`mul.Tensor(silu(gate), up)`), so that they print, and layers of a kind compare equal.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.errors import CaptureError


class Experts(NamedTuple):
    """The experts themselves: gate and up [e, f, d], down [e, o, f], biases [e, f] and [e, o].

    `inner` reads `gate` and `up` ([slots, f] each), `outer` reads `out` ([slots, o]), both `extra0`, ... (small
    parameters, whole); an empty text changes nothing. Without `down` an expert is the one matrix `up`.
    """

    gate: Tensor | None
    up: Tensor
    down: Tensor | None
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    extras: Sequence[Tensor]
    inner: str
    outer: str


def experts(x: Tensor, index: Tensor, weights: Tensor, *given: Any) -> Tensor:
    """x [..., d], index and weights [..., k], then the fields of `Experts` -> [..., o], without `down` [..., f].

    Slots whose index is not among the e experts count nothing.
    """
    slots = slot_outputs(x.reshape(-1, x.shape[-1]), index.reshape(-1), index.shape[-1], Experts(*given))
    return combine(slots, weights, x.dtype)


def combine(slots: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """slots [tokens * k, o], weights [..., k] -> [..., o]."""
    weighted = slots.reshape(*weights.shape, slots.shape[-1]) * weights.unsqueeze(-1)
    return weighted.sum(-2).to(dtype)


def slot_outputs(rows: Tensor, index: Tensor, share: int, given: Experts) -> Tensor:
    """What the experts make of each slot, not weighted: rows [n, d], index [n * share] -> [n * share, o].

    Slot i reads row i // share. Slots are sorted by expert, so each expert is one matrix product.
    """
    count = given.up.shape[0]
    known = (index >= 0) & (index < count)
    sorted_index, order = torch.sort(torch.where(known, index, count), stable=True)
    ends = torch.searchsorted(
        sorted_index, torch.arange(count, device=index.device, dtype=index.dtype), right=True
    )
    at = sorted_index.clamp(max=count - 1)
    read = rows.index_select(0, order // share if share > 1 else order)
    hidden = {"up": _linear(read, given.up, ends, given.up_bias, at)}
    if given.gate is not None:
        hidden["gate"] = _linear(read, given.gate, ends, given.gate_bias, at)
    small = {f"extra{number}": extra for number, extra in enumerate(given.extras)}
    result = evaluate(given.inner, {**hidden, **small}) if given.inner else hidden["up"]
    if given.down is not None:
        result = _linear(result, given.down, ends, given.down_bias, at)
    if given.outer:
        result = evaluate(given.outer, {"out": result, **small})
    result = torch.where((sorted_index < count).unsqueeze(-1), result, 0.0)
    return torch.zeros_like(result).index_put(
        (order,), result
    )  # index_copy would keep `result` for its backward


def _linear(rows: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None, at: Tensor) -> Tensor:
    product: Tensor = torch.ops.autopar.grouped_linear(rows.to(weight.dtype), weight, ends)
    return product if bias is None else product + bias.index_select(0, at)


# ---- one matrix per expert -----------------------------------------------------------------------------------------
# torch's own grouped matrix product (`torch.nn.functional.grouped_mm`) has no float64, and leaves the rows after the
# last group as it finds them; these give zeros there. As registered ops they are one node to a compiler.


def _native(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and tensor.dtype == torch.bfloat16


def _counts(ends: Tensor) -> list[int]:
    return [0, *ends.tolist()]


def _grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [n, d], sorted by group; weight [e, f, d]; ends [e], where each group ends -> [n, f], zero after the last."""
    if _native(x):
        made = torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=ends.int())
        return _zero_after(made, ends)
    bounds = _counts(ends)
    result = x.new_zeros(x.shape[0], weight.shape[1])
    for expert in range(weight.shape[0]):
        first, last = bounds[expert], bounds[expert + 1]
        if first < last:
            torch.mm(x[first:last], weight[expert].t(), out=result[first:last])
    return result


def _grouped_linear_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    gradient = gradient.contiguous()
    if _native(x):
        offsets = ends.int()
        rows = _zero_after(torch.nn.functional.grouped_mm(gradient, weight, offs=offsets), ends)
        return rows, torch.nn.functional.grouped_mm(gradient.t(), x, offs=offsets)
    bounds = _counts(ends)
    rows = x.new_zeros(x.shape)
    slope = weight.new_zeros(weight.shape)
    for expert in range(weight.shape[0]):
        first, last = bounds[expert], bounds[expert + 1]
        if first < last:
            torch.mm(gradient[first:last], weight[expert], out=rows[first:last])
            torch.mm(gradient[first:last].t(), x[first:last], out=slope[expert])
    return rows, slope


def _zero_after(rows: Tensor, ends: Tensor) -> Tensor:
    inside = torch.arange(rows.shape[0], device=rows.device) < ends[-1]
    return torch.where(inside.unsqueeze(-1), rows, 0.0)


torch.library.custom_op(
    "autopar::grouped_linear",
    _grouped_linear,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor ends) -> Tensor",
)
torch.library.custom_op(
    "autopar::grouped_linear_backward",
    _grouped_linear_backward,
    mutates_args=(),
    schema="(Tensor gradient, Tensor x, Tensor weight, Tensor ends) -> (Tensor, Tensor)",
)


def _fake(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _fake_backward(gradient: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _slopes(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, slope = torch.ops.autopar.grouped_linear_backward(gradient, *ctx.saved_tensors)
    return rows, slope, None


torch.library.register_fake("autopar::grouped_linear", _fake)
torch.library.register_fake("autopar::grouped_linear_backward", _fake_backward)
torch.library.register_autograd("autopar::grouped_linear", _slopes, setup_context=_keep)


# ---- the op that torch.export sees ---------------------------------------------------------------------------------
# `experts` itself would be traced through; capture puts it back in place of this one.

_SCHEMA = (
    "(Tensor x, Tensor index, Tensor weights, Tensor? gate, Tensor up, Tensor? down, Tensor? gate_bias, "
    "Tensor? up_bias, Tensor? down_bias, Tensor[] extras, str inner, str outer) -> Tensor"
)


def _clone_of(*args: Any) -> Tensor:
    return experts(*args).clone()


def _fake_experts(x: Tensor, index: Tensor, weights: Tensor, *given: Any) -> Tensor:
    last = Experts(*given).up if Experts(*given).down is None else Experts(*given).down
    assert last is not None
    return x.new_empty(*x.shape[:-1], last.shape[1])


torch.library.custom_op("autopar::experts", _clone_of, mutates_args=(), schema=_SCHEMA)
torch.library.register_fake("autopar::experts", _fake_experts)

ONE_OP = torch.ops.autopar.experts.default


# ---- the language of `inner` and `outer` ---------------------------------------------------------------------------

# A step: (result name, ATen op, overload, arguments, keyword arguments). An argument is ("name", a name),
# ("torch", an attribute of torch, such as a dtype) or ("value", a number or a list of them).
Step = tuple[str, str, str, tuple[tuple[str, Any], ...], tuple[tuple[str, tuple[str, Any]], ...]]


def evaluate(text: str, values: Mapping[str, Tensor]) -> Tensor:
    """The value of the last statement of `a = silu(gate); mul.Tensor(a, up)` with names bound to `values`."""
    names: dict[str, Any] = dict(values)
    result = ""
    for result, name, overload, arguments, options in _steps(text):
        operation = getattr(getattr(torch.ops.aten, name), overload)
        names[result] = operation(
            *[_argument(item, names) for item in arguments],
            **{key: _argument(item, names) for key, item in options},
        )
    final: Tensor = names[result]
    return final


def _argument(item: tuple[str, Any], names: Mapping[str, Any]) -> Any:
    kind, value = item
    return names[value] if kind == "name" else getattr(torch, value) if kind == "torch" else value


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # a compiler takes the steps as they are; it could not trace the parser
def _steps(text: str) -> tuple[Step, ...]:
    return steps_of(text)


@lru_cache(maxsize=256)
def steps_of(text: str) -> tuple[Step, ...]:
    """The calls of a text in order, nested ones before those they are in."""
    steps: list[Step] = []
    known: set[str] = set()

    def argument(node: ast.expr) -> tuple[str, Any]:
        if isinstance(node, ast.Call):
            return ("name", call(node, f"%{len(steps)}"))
        if isinstance(node, ast.Name):
            return ("name" if node.id in known or not hasattr(torch, node.id) else "torch", node.id)
        return ("value", ast.literal_eval(node))

    def call(node: ast.Call, result: str) -> str:
        arguments = tuple(argument(item) for item in node.args)
        options = tuple((str(item.arg), argument(item.value)) for item in node.keywords)
        name, _, overload = ast.unparse(node.func).partition(".")
        if result.startswith("%"):
            result = f"%{len(steps)}"
        steps.append((result, name, overload or "default", arguments, options))
        known.add(result)
        return result

    known.update(("gate", "up", "out"))
    for part in text.split(";"):
        statement = ast.parse(part.strip()).body[0]
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
            assert isinstance(statement.targets[0], ast.Name)
            call(statement.value, statement.targets[0].id)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call(statement.value, "%")
        else:
            raise CaptureError(f"cannot read {part.strip()!r} in the text of an expert")
    return tuple(steps)
