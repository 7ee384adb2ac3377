"""Recurrences for capture of Transformers models: linear attention in chunks, with no more steps written out than needed.

In:  a (copied) Transformers model with gated delta rules (Qwen3-Next, Kimi Linear, OLMo Hybrid, ...), while exported.
Out: inside the context, their functions work
     - in chunks of at most half the sequence (the result does not depend on it): a sequence of 16 padded to a chunk of
       64 has 63 steps in the graph, in two chunks of 8 it has 7;
     - with torch's triangular solver, as they do outside of torch.export, instead of 63 written-out steps of forward
       substitution (eight ops each) per layer.

Such a function is known by its arguments: query, key, value [b, s, h, d], g, beta and chunk_size.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_ARGUMENTS = frozenset(("query", "key", "value", "g", "beta", "chunk_size"))
_EXPORTING = "is_torchdynamo_exporting"


def _chunked(module: Any) -> dict[str, Callable[..., Any]]:
    """The functions of a Python module that compute a recurrence in chunks."""
    found: dict[str, Callable[..., Any]] = {}
    for name, value in vars(module).items():
        if inspect.isfunction(value) and "chunk" in name:
            with contextlib.suppress(TypeError, ValueError):
                if set(inspect.signature(value).parameters) >= _ARGUMENTS:
                    found[name] = value
    return found


def _short(function: Callable[..., Any], module: Any) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def chunked(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        length = given.arguments["key"].shape[1]
        given.arguments["chunk_size"] = max(1, min(given.arguments["chunk_size"], (length + 1) // 2))
        exporting = getattr(module, _EXPORTING, None)
        if exporting is not None:
            setattr(module, _EXPORTING, lambda: False)
        try:
            return function(*given.args, **given.kwargs)
        finally:
            if exporting is not None:
                setattr(module, _EXPORTING, exporting)

    return chunked


@contextlib.contextmanager
def short_recurrences(model: nn.Module) -> Iterator[None]:
    """While exporting: the recurrences of the model's own Python modules in short chunks."""
    names = {type(module).__module__ for module in model.modules()}
    before = [
        (sys.modules[name], functions)
        for name in names
        if name.startswith(("transformers.models.", "transformers_modules"))
        and (functions := _chunked(sys.modules[name]))
    ]
    for module, functions in before:
        for name, function in functions.items():
            setattr(module, name, _short(function, module))
    try:
        yield
    finally:
        for module, functions in before:
            for name, function in functions.items():
                setattr(module, name, function)
