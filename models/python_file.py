"""A model from the user's own Python: `file.py:function`, or a module already built.

The function is called without arguments, each time the model is built, under the default device of that
moment. It returns an `nn.Module`, or a pair (module, keyword inputs of its training forward as tensors).
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from autopar.errors import ModelError

from .examples import example_for
from .huggingface import task_of
from .model_source import ModelSource


def source_from_function(spec: str) -> ModelSource:
    """The model of `file.py:function`. The file is run now, the function too (on the meta device, to
    see what kind of model it is) and each time the model is built."""
    file_text, _, function_name = spec.rpartition(":")
    if not file_text:
        raise ModelError(
            f"{spec!r} names a Python file and no function in it",
            hint=f"{spec}:FUNCTION, a function that returns the module",
        )
    file = Path(file_text).expanduser()
    function = _function(file, function_name)
    where = f"{file}:{function_name}"

    def call() -> tuple[torch.nn.Module, Mapping[str, Any] | None]:
        return _checked(_guarded(function, file, where), where)

    def build() -> torch.nn.Module:
        return call()[0]

    def example_inputs(batch: int, seq: int) -> dict[str, torch.Tensor]:
        module, example = call()
        if example is None:
            return _example_of_module(module, batch, seq, where)
        return _checked_example(example, batch, seq, where)

    with torch.device("meta"):
        built = build()
    config: Any = getattr(built, "config", None)
    return ModelSource(
        name=function_name,
        task=_task_of_module(built) or "module",
        config=config if hasattr(config, "model_type") else None,
        build=build,
        load=build,
        example_inputs=example_inputs,
        path=None,
    )


def source_from_module(module: torch.nn.Module) -> ModelSource:
    """The model that a module is. `build` copies it to the default device (on meta without taking memory)."""
    config: Any = getattr(module, "config", None)
    name = type(module).__name__

    def build() -> torch.nn.Module:
        return _copy_to(module, torch.get_default_device())

    def load() -> torch.nn.Module:
        return module

    return ModelSource(
        name=name,
        task=_task_of_module(module) or "module",
        config=config if hasattr(config, "model_type") else None,
        build=build,
        load=None if any(p.is_meta for p in module.parameters()) else load,
        example_inputs=lambda batch, seq: _example_of_module(module, batch, seq, name),
        path=None,
    )


def _function(file: Path, name: str) -> Callable[[], Any]:
    if not file.is_file():
        raise ModelError("there is no such file", where=str(file), hint="the path of a .py file that exists")
    resolved = file.resolve()
    module_name = f"autopar_model_{file.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(module_name, resolved)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(resolved.parent))  # as when Python runs the file: its neighbours can be imported
    try:
        _guarded(lambda: spec.loader.exec_module(module), file, str(file))  # type: ignore[union-attr]
    finally:
        sys.path.remove(str(resolved.parent))
    found = getattr(module, name, None)
    if not callable(found):
        functions = sorted(
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module_name
        )
        raise ModelError(
            f"{name!r} is not a function in this file",
            where=str(file),
            hint=f"one of {', '.join(functions)}" if functions else "a file that defines a function",
        )
    return found  # type: ignore[no-any-return]


def _guarded(function: Callable[[], Any], file: Path, where: str) -> Any:
    """Calls the user's code; what it raises becomes a ModelError that names the line in the user's file."""
    try:
        return function()
    except ModelError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, SyntaxError) and error.filename:
            where = f"{error.filename}:{error.lineno}"
        for frame in traceback.extract_tb(error.__traceback__):
            if Path(frame.filename).resolve() == file.resolve():
                where = f"{file}:{frame.lineno} in {frame.name}"
        raise ModelError(
            f"the model's Python raised {type(error).__name__}: {error}",
            where=where,
            hint=f"running it alone: python {file}",
        ) from error


def _checked(result: Any, where: str) -> tuple[torch.nn.Module, Mapping[str, Any] | None]:
    module, example = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(module, torch.nn.Module) or not (example is None or isinstance(example, Mapping)):
        found = f"({type(module).__name__}, {type(example).__name__})" if result is not module else ""
        raise ModelError(
            f"the function returned {found or type(result).__name__}; expected an nn.Module, "
            "or (nn.Module, dict of example keyword inputs)",
            where=where,
            hint="return model, {'x': torch.randn(8, 16), 'labels': ...}",
        )
    return module, example


def _checked_example(example: Mapping[str, Any], batch: int, seq: int, where: str) -> dict[str, torch.Tensor]:
    """The user's tensors as they are, if they have this batch and, where they have one, this sequence."""
    for name, value in example.items():
        if not isinstance(value, torch.Tensor):
            raise ModelError(
                f"example input {name!r} is a {type(value).__name__}; expected a tensor",
                where=where,
                hint="torch.tensor(...), or a default value in forward",
            )
        tokens = value.dim() == 2 and not value.is_floating_point()
        sequence = tokens or value.dim() == 3
        if value.dim() and value.shape[0] != batch:
            raise ModelError(
                f"example input {name!r} has batch {value.shape[0]}; batch {batch} was asked for",
                where=where,
                hint=f"batch {value.shape[0]}, or an example with batch {batch}",
            )
        if sequence and value.shape[1] != seq:
            raise ModelError(
                f"example input {name!r} has sequence {value.shape[1]}; sequence {seq} was asked for",
                where=where,
                hint=f"sequence {value.shape[1]}, or an example with sequence {seq}",
            )
    return dict(example)


def _task_of_module(module: torch.nn.Module) -> str | None:
    """The task of a Transformers model, by its class; None for any other module."""
    config = getattr(module, "config", None)
    if not hasattr(config, "model_type") or not hasattr(config, "to_dict"):
        return None
    shown: Any = copy.copy(config)
    shown.architectures = [type(module).__name__]
    try:
        return task_of(shown)
    except ModelError:
        return None


def _example_of_module(module: torch.nn.Module, batch: int, seq: int, where: str) -> dict[str, torch.Tensor]:
    task = _task_of_module(module)
    if task is None:
        raise ModelError(
            f"{type(module).__name__} does not say what its inputs look like",
            where=where,
            hint="example_inputs={...}, or a function that returns (module, example keyword inputs)",
        )
    return example_for(module.config, task, batch, seq)


def _copy_to(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """A deep copy whose tensors are on `device`, put there one by one, so that meta takes no memory."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        moved = tensor.detach().to(device) if tensor.device != device else tensor.detach().clone()
        if isinstance(tensor, torch.nn.Parameter):
            moved = torch.nn.Parameter(moved, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = moved
    return copy.deepcopy(module, memo)
