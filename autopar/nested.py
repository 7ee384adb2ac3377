"""Nested inputs: dicts, lists and tuples of a model's inputs as flat names, and mapped leaf by leaf.

flat_inputs({"x": a, "features": {"ids": b}, "pair": (c, None)})
  -> {"x": a, "features.ids": b, "pair.0": c, "pair.1": None}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def flat_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Every leaf by its path, in order; what is not a dict, list or tuple is a leaf."""
    return {name: leaf for key, value in inputs.items() for name, leaf in _leaves(str(key), value)}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{name}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(f"{name}.{index}", item)
    else:
        yield name, value


def map_inputs(inputs: Mapping[str, Any], function: Callable[[Any], Any]) -> dict[str, Any]:
    """The same nesting with `function` applied to every leaf."""
    return {key: _mapped(value, function) for key, value in inputs.items()}


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    if type(value) is dict:
        return {key: _mapped(item, function) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, function) for item in value))
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, function) for item in value)
    return function(value)


def map_named(inputs: Mapping[str, Any], function: Callable[[str, Any], Any]) -> dict[str, Any]:
    """The same nesting with `function(name, leaf)` for every leaf, named as by `flat_inputs`."""
    names = iter(flat_inputs(inputs))
    return map_inputs(inputs, lambda leaf: function(next(names), leaf))
