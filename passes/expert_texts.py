"""Expert texts: what an expert does between its matrices, as the text that `autopar.expert_functions` evaluates.

In:  a module, a function of it on one tensor of slots, and how wide the tensor is.
Out: an `ExpertText`: the text, the module's parameters it reads (`extra0`, ...), and for a product of gate and up in
     one matrix which of its columns are which.

    _apply_gate(gate_up): gate, up = chunk(2); silu(gate) * up     ->  "mul.Tensor(silu(gate), up)", halves
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.fx import Node

from autopar.errors import CaptureError

_ROWS = 4
_END = 2**31  # slices to the end of a dim are written with a huge number


@dataclass(frozen=True)
class ExpertText:
    """`layout`: "halves" (gate, then up), "pairs" (gate and up in turn) or "" where the text reads one tensor."""

    text: str
    extras: tuple[str, ...]
    layout: str = ""


class _Function(nn.Module):
    def __init__(self, owner: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.owner = owner
        self.functions = (function,)  # in a tuple: were it a module, its parameters would be here twice

    def forward(self, slots: Tensor) -> Tensor:
        return self.functions[0](slots)


def expert_text(
    owner: nn.Module,
    function: Callable[[Tensor], Tensor],
    width: int,
    dtype: torch.dtype,
    name: str,
    first: int,
) -> ExpertText:
    """The text of `function`, a function of [slots, width] that may read parameters of `owner`.

    `name`: what the text calls its argument, where that is not taken apart into gate and up; `first`: the number of its
    first extra. Raises CaptureError for what is no chain of ATen ops.
    """
    wrapped = _Function(owner, function)
    with torch.no_grad():
        exported = torch.export.export(wrapped, (torch.empty(_ROWS, width, dtype=dtype),), strict=False)
        exported = exported.run_decompositions({})
    nodes = {node.name: node for node in exported.graph.nodes}
    names: dict[Node, str] = {}
    parameters: dict[Node, str] = {}
    slots: Node | None = None
    for spec in exported.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        if spec.kind == InputKind.USER_INPUT:
            slots = node
        elif node.users:
            if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER) or not str(spec.target).startswith(
                "owner."
            ):
                raise CaptureError(f"an expert reads {spec.target}, which is no parameter of its layer")
            parameters[node] = str(spec.target).removeprefix("owner.")
    assert slots is not None
    names[slots] = name
    parts, layout = _gate_and_up(slots, width)
    names |= parts
    extras = tuple(dict.fromkeys(parameters.values()))
    names |= {node: f"extra{first + extras.index(path)}" for node, path in parameters.items()}
    results = next(node for node in exported.graph.nodes if node.op == "output").args[0]
    return ExpertText(_text(results[0], names), extras, layout)


def _gate_and_up(slots: Node, width: int) -> tuple[dict[Node, str], str]:
    """The nodes that are the gate's and the up's columns of `slots`, if it is only read so."""
    half = width // 2
    layouts = {
        "halves": {"gate": range(half), "up": range(half, width)},
        "pairs": {"gate": range(0, width, 2), "up": range(1, width, 2)},
    }
    columns: dict[Node, range] = {}
    for user in slots.users:
        if user.target is torch.ops.aten.slice.Tensor:
            given: list[Any] = [*user.args[1:], *[0, None, None, 1][len(user.args) - 1 :]]
            dim, start, stop, step = given
            if dim not in (1, -1):
                return {}, ""
            columns[user] = range(width)[start : width if stop is None or stop > _END else stop : step]
        elif user.target in (torch.ops.aten.split.Tensor, torch.ops.aten.split_with_sizes.default):
            sizes, dim = user.args[1], user.args[2] if len(user.args) > 2 else 0
            if dim not in (1, -1) or sizes not in (half, [half, half]):
                return {}, ""
            for item in user.users:
                at = item.args[1]
                assert isinstance(at, int)
                columns[item] = range(at * half, (at + 1) * half)
        else:
            return {}, ""
    for layout, places in layouts.items():
        found = {
            node: word for node, taken in columns.items() for word, place in places.items() if taken == place
        }
        if columns and len(found) == len(columns):
            return found, layout
    return {}, ""


def _text(result: Node, names: dict[Node, str]) -> str:
    """Statements for `result`; what is used once is written where it is used."""
    if result in names:
        return ""
    statements: list[str] = []

    def write(value: Any) -> str:
        if isinstance(value, Node):
            if value in names:
                return names[value]
            text = call(value)
            if len(value.users) > 1:
                names[value] = f"part{len(statements)}"
                statements.append(f"{names[value]} = {text}")
                return names[value]
            return text
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(write(item) for item in value) + "]"
        if isinstance(value, torch.dtype):
            return str(value).removeprefix("torch.")
        if value is None or isinstance(value, (bool, int, float, str)):
            return _number(value)
        raise CaptureError(f"an expert calls an op with {value!r}, which has no text")

    def call(node: Node) -> str:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.name.startswith("aten::"):
            raise CaptureError(f"an expert calls {node.target}, which is no ATen op")
        overload = schema.overload_name
        name = schema.name.removeprefix("aten::") + (f".{overload}" if overload else "")
        arguments = [write(item) for item in node.args]
        arguments += [
            f"{key}={write(item)}"
            for key, item in node.kwargs.items()
            if item is not None and key not in _IGNORED
        ]
        return f"{name}({', '.join(arguments)})"

    final = call(result)
    return "; ".join([*statements, final])


_IGNORED = ("device", "layout", "pin_memory", "memory_format")


def _number(value: Any) -> str:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f"{'-' if value < 0 else ''}1e999" if value == value else "nan"
    return repr(value)
