"""Fold before capture: shorten stacks of layers to the shortest prefix that shows every kind of layer twice.

In:  an `nn.Module` (on any device).
Out: a copy without storage whose stacks are shortened, and a `Stack` for each, saying which layers were left out
     and of which kind each is. A 126-layer Llama becomes 2 layers; a DeepSeek-V3 (3 dense, 58 expert layers) 5.

Two copies of a kind are kept so that capture can see, rather than assume, that they give the same graph and how
a layer's inputs come from the layer before (see `passes/partition.py`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

_INDEX_NAME = re.compile(r"(^|_)(idx|index|layer|id|number)(_|$)|layer_?(id|idx|index|number)")


@dataclass(frozen=True)
class Stack:
    """A ModuleList or Sequential whose children repeat. `kinds[i]` is the kind of layer i, `kept` how many the
    shortened copy has (a prefix)."""

    path: str
    kinds: tuple[int, ...]
    kept: int

    def layer_path(self, index: int) -> str:
        return f"{self.path}.{index}" if self.path else str(index)


def find_stacks(model: nn.Module) -> tuple[Stack, ...]:
    """The outermost lists of layers in which some kind of layer appears more than once; and lists of one class whose
    layers all differ, where nothing inside of them repeats."""
    return tuple(_stacks(model, ""))


def _stacks(module: nn.Module, path: str) -> Iterator[Stack]:
    kinds: tuple[int, ...] = ()
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1 and _has_parameters(module):
        signatures = [signature(child, index) for index, child in enumerate(module)]
        order: dict[Hashable, int] = {}
        kinds = tuple(order.setdefault(item, len(order)) for item in signatures)
        if len(order) < len(kinds):
            yield Stack(path, kinds, _prefix(kinds))
            return
    inner = [
        stack
        for name, child in module.named_children()
        for stack in _stacks(child, f"{path}.{name}" if path else name)
    ]
    if not inner and kinds and len({type(child) for child in module.children()}) == 1:
        yield Stack(path, kinds, len(kinds))
    yield from inner


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _prefix(kinds: tuple[int, ...]) -> int:
    """Length of the shortest prefix with every kind, twice if it appears more than once in all."""
    need = {kind: min(2, kinds.count(kind)) for kind in kinds}
    for length in range(1, len(kinds) + 1):
        if all(kinds[:length].count(kind) >= times for kind, times in need.items()):
            return length
    return len(kinds)


def signature(module: nn.Module, index: int) -> Hashable:
    """What makes two layers the same kind: classes, shapes, and plain attributes, a layer's own index aside."""
    tensors = tuple(
        (name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        for source in (module._parameters, module._buffers)
        for name, tensor in source.items()
        if tensor is not None
    )
    attributes = tuple(
        (name, _plain(value, name, index))
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and name != "training"
    )
    children = tuple((name, signature(child, index)) for name, child in module.named_children())
    return (type(module), tensors, attributes, children)


def _plain(value: object, name: str, index: int, depth: int = 0) -> Hashable:
    if isinstance(value, int) and not isinstance(value, bool) and value == index and _INDEX_NAME.search(name):
        return "its own index"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype)):
        return (type(value).__name__, value)
    if isinstance(value, (list, tuple)) and depth < 3:
        return tuple(_plain(item, name, index, depth + 1) for item in value)
    if isinstance(value, dict) and depth < 3:
        return tuple((str(key), _plain(item, str(key), index, depth + 1)) for key, item in value.items())
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), str(value.dtype))
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return id(value) if hasattr(value, "__dict__") else type(value).__qualname__


def storage_free_copy(
    model: nn.Module, shorten: tuple[Stack, ...], make: Callable[[torch.Tensor], torch.Tensor]
) -> nn.Module:
    """A deep copy of `model` whose parameters and buffers are `make(tensor)` (ties kept) and whose given stacks
    are cut to their prefix. The model itself is not changed."""
    removed: list[tuple[nn.Module, str, nn.Module | None]] = []
    try:
        for stack in shorten:
            layers = model.get_submodule(stack.path)
            for index in range(stack.kept, len(stack.kinds)):
                removed.append((layers, str(index), layers._modules[str(index)]))
                del layers._modules[str(index)]
        memo: dict[int, object] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            if id(tensor) not in memo:
                fresh = make(tensor)
                memo[id(tensor)] = (
                    nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh
                )
        return copy.deepcopy(model, memo)
    finally:
        for layers, name, child in removed:
            layers._modules[name] = child
