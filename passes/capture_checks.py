"""What a captured graph cannot say, and would be wrong without: refused, with the line of the model's code.

In:  a module before it is exported; the exported program.
Out: nothing, or a CaptureError.

- gradient hooks (`register_hook` on a parameter, or on a tensor in forward): the graph's gradients come from its ops;
- random numbers: ranks that repeat an op would each draw their own;
- parameters that forward changes in place: only buffers are carried from step to step;
- tensors of unknown values. (`x.data` and `inference_mode` would be such, and are traced as `detach` and `no_grad`.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node

from autopar.errors import CaptureError
from autopar.program import op_name
from autopar.torch_private import gradient_hooks, is_fake

_OFF = {"p": 0, "dropout": 0, "dropout_p": 0, "train": False, "training": False}
_TORCH = str(Path(torch.__file__).parent)
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')


def check_parameters(model: nn.Module, title: str) -> None:
    """No parameter has a hook on its gradient."""
    for name, parameter in model.named_parameters():
        if gradient_hooks(parameter):
            raise CaptureError(
                f"the parameter {name} has a gradient hook, which a captured graph does not run",
                where=title,
                hint="to remove it, and to change gradients between `gradients` and the optimizer's step",
            )


@contextmanager
def traceable_tensors() -> Iterator[None]:
    """While exporting: `register_hook` on a tensor of forward is an error (which export gives the model's line),
    `x.data` is `x.detach()`, which a graph can hold, and `inference_mode` is `no_grad`."""
    tensor: Any = Tensor
    hook, data = tensor.register_hook, tensor.data
    enter, leave = torch.inference_mode.__enter__, torch.inference_mode.__exit__
    regions: list[torch.no_grad | None] = []

    def register_hook(self: Tensor, hook: Any) -> NoReturn:
        raise UnsupportedHookError("register_hook: a captured graph does not run hooks on gradients")

    def enter_no_grad(self: torch.inference_mode) -> None:
        regions.append(torch.no_grad() if self.mode else None)
        if regions[-1] is not None:
            regions[-1].__enter__()

    def leave_no_grad(self: torch.inference_mode, *error: Any) -> None:
        region = regions.pop()
        if region is not None:
            region.__exit__(*error)

    changed: Any = torch.inference_mode
    tensor.register_hook = register_hook
    tensor.data = property(Tensor.detach, data.__set__)
    changed.__enter__, changed.__exit__ = enter_no_grad, leave_no_grad
    try:
        yield
    finally:
        tensor.register_hook = hook
        del tensor.data  # inherited again
        changed.__enter__, changed.__exit__ = enter, leave


def check_constant(constant: Tensor, name: str, users: Iterable[Node]) -> None:
    """A tensor that is no parameter, buffer or input has values."""
    if not (constant.is_meta or is_fake(constant)):
        return
    place = next((place_of(user) for user in users), "its forward")
    raise CaptureError(
        f"forward reads a tensor that is no parameter, buffer or input ({name}), and its values are not known here",
        where=place,
        hint="to keep it in the module by register_buffer (also what forward keeps from an earlier call), or to make it in "
        "forward of inputs or plain numbers",
    )


class UnsupportedHookError(RuntimeError):
    """Raised inside of a model's forward, so that the error names its line."""


def check_exported(exported: ExportedProgram, wanted: Iterable[Node], title: str) -> None:
    """No parameter is changed, and what the outputs need draws no random numbers."""
    for spec in exported.graph_signature.output_specs:
        if spec.kind == OutputKind.PARAMETER_MUTATION:
            raise CaptureError(
                f"forward changes the parameter {spec.target} in place",
                where=title,
                hint="to do so after the optimizer's step, or to make it a buffer",
            )
    reached, left = set(wanted), list(wanted)
    while left:
        node = left.pop()
        fresh = set(node.all_input_nodes) - reached
        reached |= fresh
        left += fresh
        if _draws(node):
            raise CaptureError(
                f"{op_name(node)} draws random numbers, and every rank would draw its own",
                where=f"{title}, {place_of(node)}",
                hint="to make them outside of forward and pass them as an input",
            )


def _draws(node: Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = {argument.name: argument.default_value for argument in arguments}
    given |= dict(zip([argument.name for argument in arguments], node.args, strict=False))
    given |= node.kwargs
    return not any(name in given and given[name] == off for name, off in _OFF.items())


def place_of(node: Node) -> str:
    """file:line of the model's code that a node is from."""
    places = _PLACE.findall(node.meta.get("stack_trace") or "")
    own = [place for place in places if not place[0].startswith(_TORCH)]
    return ":".join((own or places)[-1]) if places else "its forward"


def advice(error: Exception) -> str:
    """What to change in the model's code, by what torch.export said of it."""
    text = f"{type(error).__name__} {error}"
    if isinstance(error, UnsupportedHookError):
        return "to change gradients between `gradients` and the optimizer's step, or by an autograd.Function"
    if ".numpy()" in text or "__array__" in text:
        return "to write it with torch ops there, or to compute it outside of forward and pass the result as an input"
    if "DeviceMismatch" in text:
        return "to keep every tensor of a module as a parameter or a buffer (register_buffer), not as a plain attribute"
    if "SymFloat" in text or "SymInt" in text:
        return "not to print or format the value of a tensor there, or to return it as an output"
    if _DATA_DEPENDENT.search(text):
        return (
            "to remove control flow that depends on tensor values there (torch.where chooses by values), or to compute "
            "it outside of forward and pass the result as an input"
        )
    return "to run the model's forward on the same inputs without autopar"


_DATA_DEPENDENT = re.compile(r"data.dependent|DataDependent|DynamicOutputShape|unbacked|\bu\d+\b")
