"""Op source: one node of a lowered graph as a Python expression.

In:  an FX node, the names of its operands.
Out: text such as `F.linear(x, q_proj_weight)` or `collectives.all_reduce(x, group=tp, grad_sums=False)`, which calls the
     very op that the node calls; and what the text needs imported.

A sum is written `a + b` only where that is the same op. What has one meaning as a method is written as one.
"""

from __future__ import annotations

import importlib
import inspect
import keyword
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node

from autopar import collectives
from autopar.errors import UsageError
from autopar.mesh import Mesh
from autopar.sharding import Sharding

aten = torch.ops.aten

# With two operands and nothing else, these are what Python's operators call.
_INFIX: Mapping[Any, str] = {
    aten.add.Tensor: "+", aten.sub.Tensor: "-", aten.mul.Tensor: "*", aten.div.Tensor: "/", aten.pow.Tensor_Scalar: "**",
}  # fmt: skip
_METHODS = frozenset(
    {
        aten.reshape.default, aten.view.default, aten.transpose.int, aten.unsqueeze.default, aten.permute.default,
        aten.expand.default, aten.rsqrt.default, aten.cos.default, aten.sin.default, aten.exp.default, aten.detach.default,
        aten.clone.default,
    }
)  # fmt: skip
_FUNCTIONAL: Mapping[Any, str] = {
    aten.linear.default: "linear", aten.silu.default: "silu", aten.relu.default: "relu",
}  # fmt: skip
# Arguments that are plain without their name.
_PLAIN = frozenset({"other", "exponent", "size", "shape", "repeats", "dim0", "dim1", "dims"})


class Imports:
    """What the text of a block needs: modules, groups of axes, the device."""

    RESERVED = (
        "aten",
        "torch",
        "Tensor",
        "F",
        "device",
        "float",
        "tuple",
        "str",
        "slice",
        "ops",
        "collectives",
    )

    def __init__(self, axes: set[str]) -> None:
        self.axes = axes
        self.groups: set[str] = set()
        self.device = False
        self._modules: set[tuple[str, str]] = set()
        self._uses: set[str] = set()

    def module(self, name: str) -> str:
        """What a module's functions are called by: `collectives` for autopar.collectives."""
        package, _, short = name.rpartition(".")
        self._modules.add((package, short))
        return short

    def use(self, what: str) -> str:
        self._uses.add(what)
        return what

    def lines(self) -> Iterator[str]:
        if "torch" in self._uses or "aten" in self._uses or self.device:
            yield "import torch"
        yield "from torch import Tensor"
        if "F" in self._uses:
            yield "from torch.nn import functional as F"
        if self._modules:
            yield ""
        for package in sorted({package for package, _ in self._modules}):
            names = ", ".join(sorted(short for owner, short in self._modules if owner == package))
            yield f"from {package} import {names}" if package else f"import {names}"
        if "aten" in self._uses:
            yield ""
            yield "aten = torch.ops.aten"


def expression(node: Node, named: Mapping[Node, str], imports: Imports) -> str:
    """The node's call. Raises UsageError for one that cannot be written as text."""
    target: Any = node.target
    write = _Values(node, named, imports)
    if target is operator.getitem:
        return f"{write(node.args[0])}[{write(node.args[1])}]"
    if getattr(target, "_schema", None) is not None:
        return _op(node, target, write, imports)
    return _function(node, target, write, imports)


def _op(node: Node, target: Any, write: _Values, imports: Imports) -> str:
    args = node.args
    first = args[0] if args else None
    if (
        target in _INFIX
        and len(args) == 2
        and not node.kwargs
        and isinstance(first, Node)
        and _operand(args[1])
    ):
        return f"{write(first)} {_INFIX[target]} {write(args[1])}"
    if target is aten.neg.default:
        return f"-{write(first)}"
    arguments = [
        (argument.name, value) for argument, value in zip(target._schema.arguments, args, strict=False)
    ]
    arguments = _without_defaults(target, arguments)
    keywords = {key: value for key, value in node.kwargs.items() if not _is_default(target, key, value)}
    if target in _METHODS and isinstance(first, Node):
        rest = [write(value) for _, value in arguments[1:]] + [
            f"{key}={write(value)}" for key, value in keywords.items()
        ]
        return f"{write(first)}.{target._schema.name.partition('::')[2]}({', '.join(rest)})"
    text = ", ".join(
        [
            *write.arguments(arguments),
            *(f"{key}={write.option(key, value)}" for key, value in keywords.items()),
        ]
    )
    if target in _FUNCTIONAL:
        return f"{imports.use('F')}.{_FUNCTIONAL[target]}({text})"
    return f"{_op_name(target, imports)}({text})"


def _operand(value: object) -> bool:
    return isinstance(value, (Node, int, float)) and not isinstance(value, bool)


def _op_name(target: Any, imports: Imports) -> str:
    """`aten.topk`, `aten.mean.dim`: without the overload where there is no other to confuse it with."""
    space, _, name = target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, space), name)
    others = [each for each in packet.overloads() if each != "default" and "out" not in each]
    overload = target._overloadname
    short = name if overload == "default" and not others else f"{name}.{overload}"
    if space == "aten":
        return f"{imports.use('aten')}.{short}"
    imports.use("torch")
    owner = _OWNERS.get(space)
    if owner is None:
        raise UsageError(
            f"torch.ops.{space}.{name} is registered by a library that the written program would not import",
            where="export --format python",
            hint="autopar train with the plan",
        )
    for module in owner:
        imports.module(module)
    return f"torch.ops.{space}.{short}"


# Who registers the ops of a namespace that is not torch's own.
_OWNERS: Mapping[str, tuple[str, ...]] = {
    "autopar": ("autopar.functional", "autopar.ctc_functions"), "prims": (), "_c10d_functional": (), "torchvision": ("torchvision",),
}  # fmt: skip


def _function(node: Node, target: Callable[..., Any], write: _Values, imports: Imports) -> str:
    """A call of a Python function: tensors by place, everything else by name."""
    module, name = str(getattr(target, "__module__", "")), str(getattr(target, "__name__", ""))
    found = None
    if module in sys.modules or module:
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError:
            found = None
    if found is not target or module == "__main__":
        raise UsageError(
            f"{module}.{name} cannot be written as text: it is not a function that a module has under its name",
            where="export --format python",
            hint="functions of your own in a module that can be imported",
        )
    groups = takes_groups(target)
    write.groups = groups
    arguments = [(str(index), value) for index, value in enumerate(node.args)]
    signature = inspect.signature(target) if inspect.isfunction(target) else None
    if signature is not None:
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
        parameters = list(signature.parameters.values())
        if all(each.kind in kinds for each in parameters[: len(node.args)]):
            arguments = [(each.name, value) for each, value in zip(parameters, node.args, strict=False)]
    keywords = [f"{key}={write.option(key, value)}" for key, value in node.kwargs.items()]
    text = ", ".join([*write.arguments(arguments), *keywords])
    write.groups = False
    return f"{imports.module(module)}.{name}({text})"


def takes_groups(target: object) -> bool:
    """Whether a function takes names of groups: those of `collectives` and of the `*_steps` modules beside it."""
    module = str(getattr(target, "__module__", ""))
    return module == collectives.__name__ or (module.startswith("autopar.") and module.endswith("_steps"))


def _without_defaults(target: Any, arguments: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Without the last ones that are as they would be anyway."""
    while len(arguments) > 1 and _is_default(target, *arguments[-1]):
        arguments = arguments[:-1]
    return arguments


def _is_default(target: Any, name: str, value: object) -> bool:
    if name == "pin_memory":
        return not value
    if name == "device":
        return False
    if name == "end" and value == sys.maxsize and "slice" in str(target):
        return True
    for argument in target._schema.arguments:
        if argument.name == name and argument.has_default_value():
            default = argument.default_value
            return value is None if default is None else type(value) is type(default) and value == default
    return False


class _Values:
    """Arguments as text."""

    def __init__(self, node: Node, named: Mapping[Node, str], imports: Imports) -> None:
        self.node, self.named, self.imports = node, named, imports
        self.groups = False

    def arguments(self, arguments: list[tuple[str, Any]]) -> list[str]:
        """By place as long as they are tensors, or plain without their name; by name from then on."""
        first_named = next(
            (
                index
                for index, (name, value) in enumerate(arguments)
                if index and name not in _PLAIN and not _has_node(value)
            ),
            len(arguments),
        )
        names = [name for name, _ in arguments[first_named:]]
        if any(name.isdigit() or name == "self" or keyword.iskeyword(name) for name in names):
            first_named = len(arguments)
        return [
            self(value) if index < first_named else f"{name}={self.option(name, value)}"
            for index, (name, value) in enumerate(arguments)
        ]

    def option(self, name: str, value: object) -> str:
        if name == "device":
            self.imports.device = True
            return "device"
        return self(value)

    def __call__(self, value: object) -> str:
        if isinstance(value, Node):
            return self.named[value]
        if isinstance(value, str):
            if self.groups and value in self.imports.axes:
                self.imports.groups.add(value)
                return value
            return repr(value)
        if isinstance(value, list):
            return f"[{', '.join(self(each) for each in value)}]"
        if isinstance(value, tuple):
            inner = ", ".join(self(each) for each in value)
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        if isinstance(value, slice):
            return f"slice({self(value.start)}, {self(value.stop)}, {self(value.step)})"
        if isinstance(value, torch.device):
            self.imports.device = True
            return "device"
        text = plain_value(value)
        if text is not None:
            if text.startswith("torch."):
                self.imports.use("torch")
            return text
        raise UsageError(
            f"an argument of {self.node.name} is a {type(value).__name__}, which cannot be written as text",
            where="export --format python",
            hint="autopar train with the plan",
        )


def plain_value(value: object) -> str | None:
    """A number, a text, a dtype and the like as Python writes it; None for anything else."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    return None


def _has_node(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_has_node(each) for each in value)
    return isinstance(value, Node)


def step_sharding(node: Node, before: Sharding, mesh: Mesh) -> Sharding | None:
    """How a value lies after a step between shardings; None for a node that is no such step."""
    target, args = node.target, node.args[1:]
    if target is collectives.copy:
        return before
    if target is collectives.all_reduce:
        return before.without([str(args[0])])
    if target is collectives.all_gather:
        return before.without([str(args[1])])
    if target in (collectives.reduce_scatter, collectives.slice_own):
        dim, axis = int(args[0]), str(args[1])  # type: ignore[arg-type]
        rest = before.without([axis])
        return rest.with_dim(dim, (*rest.dims[dim], axis))
    if target is collectives.all_to_all:
        dim, axis = int(args[1]), str(args[2])  # type: ignore[arg-type]
        rest = before.without([axis])
        return rest.with_dim(dim, (*rest.dims[dim], axis))
    return None
