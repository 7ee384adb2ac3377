"""Condition source: what a program takes for granted of a batch, as Python functions.

In:  the conditions of a rank program: counts of places, and decisions by values.
Out: the text of a module with one function of the batch's tensors, for each.

    def condition_0(labels: Tensor) -> Tensor:
        step_1 = leaves(torch.Tensor.ge(labels, 0))
        return step_1[0]
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name

from autopar.block_source import Names, graph_source, plain
from autopar.errors import UsageError
from autopar.op_source import plain_value
from autopar.passes.known_values import Decision, Made, Step
from autopar.passes.place_counts import PlaceCount
from autopar.program import Condition
from autopar.torch_private import pytree

_FEW = 64  # elements of a constant that is written into the text


def condition_source(condition: Condition, name: str) -> str:
    """The module of one condition. Raises UsageError for one that cannot be written."""
    if isinstance(condition, PlaceCount):
        about = f"How many places a batch marks ({condition.where}); there must be {condition.rows}."
        return graph_source(condition.graph, name, about)
    if isinstance(condition, Decision):
        return _decision(condition, name)
    raise _unable(condition.where, f"a check of {', '.join(condition.inputs)}")


def _decision(decision: Decision, name: str) -> str:
    names = Names(["torch", "Tensor", "leaves", "slice", *(f"step_{number}" for number, _ in decision.steps)])
    inputs = {each: names.fresh(each) for each in decision.inputs}
    values: dict[int, str] = {}
    lines = []
    for number, step in decision.steps:
        if step.function is None:
            values[number] = inputs[step.input]
            continue
        code = _call(step, values, decision.where)
        values[number] = f"step_{number}"
        lines.append(f"    step_{number} = leaves({code})")
    what = "how many are true" if decision.counted else "the values"
    return "\n".join(
        [
            f'"""What the model decides by the values of a batch ({plain(decision.where)}): {what}."""',
            "",
            "import torch",
            "from torch import Tensor",
            "",
            "from autopar.torch_private import pytree",
            "",
            "leaves = pytree.tree_leaves",
            "",
            "",
            f"def {name}({', '.join(f'{each}: Tensor' for each in inputs.values())}) -> Tensor:",
            *lines,
            f"    return {_made(decision.made, values)}",
            "",
        ]
    )


def _made(made: Made, values: Mapping[int, str]) -> str:
    """An input by its name, a result of a step by its place."""
    name = values[made.step]
    return f"{name}[{made.leaf}]" if name.startswith("step_") else name


def _call(step: Step, values: Mapping[int, str], where: str) -> str:
    args, kwargs = pytree.tree_unflatten(list(step.leaves), step.tree)

    def write(value: Any) -> str:
        if isinstance(value, Made):
            return _made(value, values)
        if isinstance(value, list):
            return f"[{', '.join(map(write, value))}]"
        if isinstance(value, tuple):
            return f"({''.join(f'{write(each)}, ' for each in value)})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {write(each)}' for key, each in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({write(value.start)}, {write(value.stop)}, {write(value.step)})"
        if value is Ellipsis:
            return "..."
        if isinstance(value, Tensor) and value.numel() <= _FEW:
            return f"torch.tensor({value.tolist()!r}, dtype={value.dtype})"
        if isinstance(value, torch.device):
            return 'torch.device("cpu")'  # a batch is looked at on the host
        text = plain_value(value)
        if text is None:
            raise _unable(where, f"a {type(value).__name__}")
        return text

    written = [*map(write, args), *(f"{key}={write(value)}" for key, value in kwargs.items())]
    return f"{_name(step.function, where)}({', '.join(written)})"


def _name(function: Any, where: str) -> str:
    """`torch.Tensor.ge`: under which name torch has it."""
    name = str(resolve_name(function) or "")
    parts = name.split(".")
    try:
        found = reduce(getattr, parts[1:], torch) if parts[0] == "torch" else None
    except AttributeError:
        found = None
    if found is None or found != function:
        raise _unable(where, name or repr(function))
    return name


def _unable(where: str, what: str) -> UsageError:
    return UsageError(
        f"a check of every batch that the model needs cannot be written as text ({what})",
        where=where,
        hint="autopar train with the plan",
    )
