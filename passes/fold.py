"""Fold before capture: of a stack of layers keep the first two of every kind.

In:  an `nn.Module` (on any device).
Out: a copy without storage in which the other layers are skeletons (modules without parameters, `passes/boundary.py`
     puts stand-ins for them into the graph), and a `Stack` for each list of layers, saying which were left out and of
     which kind each is. Of a 126-layer Llama 2 layers are traced; of a DeepSeek-V3 (3 dense, 58 expert layers) 4.

Two copies of a kind are kept so that capture can see, rather than assume, that they give the same graph.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from autopar.torch_private import is_fake, pytree

_INDEX_NAME = re.compile(r"(^|_)(idx|index|layer|id|number)(_|$)|layer_?(id|idx|index|number)")


class FoldError(Exception):
    """Layers that cannot be folded as hoped; `path` is their stack. Capture then traces more of them: those that
    `kinds` tells apart, if it is known better now, or all."""

    def __init__(self, message: str, path: str, kinds: tuple[int, ...] | None = None) -> None:
        super().__init__(message)
        self.path, self.kinds = path, kinds


@dataclass(frozen=True)
class Stack:
    """A ModuleList or Sequential whose children repeat. `kinds[i]` is the kind of layer i; the first `copies` layers
    of each kind are kept in the copy. `shared`: a lone layer, which forward may call many times."""

    path: str
    kinds: tuple[int, ...]
    copies: int = 2
    shared: bool = False

    @cached_property
    def kept(self) -> frozenset[int]:
        met: Counter[int] = Counter()
        kept = []
        for index, kind in enumerate(self.kinds):
            if met[kind] < self.copies:
                kept.append(index)
            met[kind] += 1
        return frozenset(kept)

    @property
    def folded(self) -> bool:
        """Whether some of its layers' calls are not traced."""
        return self.shared or len(self.kept) < len(self.kinds)

    def whole(self) -> Stack:
        return replace(self, copies=len(self.kinds), shared=False)

    def layer_path(self, index: int) -> str:
        return f"{self.path}.{index}" if self.path else str(index)


def find_stacks(model: nn.Module) -> tuple[Stack, ...]:
    """The outermost lists of layers in which some kind of layer appears more than once; and lists of one class whose
    layers all differ, where nothing inside of them repeats."""
    return tuple(_stacks(model, ""))


def _stacks(module: nn.Module, path: str) -> Iterator[Stack]:
    kinds: tuple[int, ...] = ()
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1 and _has_parameters(module):
        signatures = [
            (signature(child, index), _listed(child, index, len(module)))
            for index, child in enumerate(module)
        ]
        order: dict[Hashable, int] = {}
        kinds = tuple(order.setdefault(item, len(order)) for item in signatures)
        if len(order) < len(kinds):
            yield Stack(path, kinds)
            return
    inner = [
        stack
        for name, child in module.named_children()
        for stack in _stacks(child, f"{path}.{name}" if path else name)
    ]
    classes = {type(child) for child in module.children()}
    layers = isinstance(module, nn.ModuleList) and all(_has_inner(child) for child in module)
    if not inner and kinds and (len(classes) == 1 or layers):
        yield Stack(path, kinds).whole()
    elif not inner and layers and len(list(module.children())) == 1:
        yield Stack(path, (0,), shared=True)
    yield from inner


def _has_inner(layer: nn.Module) -> bool:
    """Whether a layer is made of modules with parameters, as a lone matmul is not."""
    return any(_has_parameters(child) for child in layer.children())


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


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


def _listed(layer: nn.Module, index: int, total: int) -> Hashable:
    """What lists with an entry per layer, of the layer's modules and their configs, say of this one: a layer may look
    its own entry up when it runs."""
    owners: list[object] = list(layer.modules())
    owners += {
        id(value): value
        for module in layer.modules()
        for value in vars(module).values()
        if hasattr(value, "model_type") and hasattr(value, "to_dict")
    }.values()
    return tuple(
        (name, str(value[index]))
        for owner in owners
        for name, value in sorted(vars(owner).items())
        if isinstance(value, (list, tuple)) and len(value) == total
    )


def _contents(value: torch.Tensor) -> Hashable:
    """Equal for equal values, of tensors that a module keeps as plain attributes: they become constants."""
    if value.device.type == "meta" or is_fake(value):
        return None
    if value.numel() > 65536:
        return id(value)
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def is_own_index(name: str, value: object, index: int) -> bool:
    """Whether an attribute counts the layer: as `index`, or as one of two (or three) halves of every layer."""
    if type(value) is not int or _INDEX_NAME.search(name) is None:
        return False
    return any(value - halves * index in range(halves) for halves in (1, 2, 3))


def _plain(value: object, name: str, index: int, depth: int = 0) -> Hashable:
    if is_own_index(name, value, index):
        return "its own index"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype)):
        return (type(value).__name__, value)
    if isinstance(value, (list, tuple)) and depth < 3:
        return tuple(_plain(item, name, index, depth + 1) for item in value)
    if isinstance(value, dict) and depth < 3:
        return tuple((str(key), _plain(item, str(key), index, depth + 1)) for key, item in value.items())
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), str(value.dtype), _contents(value))
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return id(value) if hasattr(value, "__dict__") else type(value).__qualname__


def storage_free_copy(
    model: nn.Module, stacks: Sequence[Stack], make: Callable[[torch.Tensor], torch.Tensor]
) -> nn.Module:
    """A deep copy of `model` whose parameters and buffers are `make(tensor)` (ties kept) and whose left-out layers
    are skeletons. The model itself is not changed."""
    left_out: list[tuple[str, str, nn.Module, nn.Module]] = []
    try:
        for stack in stacks:
            layers = model.get_submodule(stack.path)
            for index, name in enumerate(list(layers._modules)):
                if index in stack.kept:
                    continue
                layer = layers._modules[name]
                assert layer is not None
                left_out.append((stack.path, name, layers, layer))
                layers._modules[name] = None
        memo: dict[int, object] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            if id(tensor) not in memo:
                fresh = make(tensor)
                memo[id(tensor)] = (
                    nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh
                )
        for module in model.modules():  # tensors that a module keeps as plain attributes are constants
            plain = [value for key, value in vars(module).items() if not key.startswith("_")]
            for leaf in pytree.tree_leaves(plain):
                if isinstance(leaf, torch.Tensor):
                    memo.setdefault(id(leaf), leaf)
        copied = copy.deepcopy(model, memo)
    finally:
        for _, name, layers, layer in left_out:
            layers._modules[name] = layer
    for path, name, _, layer in left_out:
        copied.get_submodule(path)._modules[name] = skeleton(layer)
    return copied


def skeleton(layer: nn.Module) -> nn.Module:
    """The tree of a layer's modules with their plain attributes, without parameters and buffers."""
    bare = object.__new__(type(layer))
    bare.__dict__.update(layer.__dict__)
    bare.__dict__.update(_parameters={}, _buffers={}, _forward_hooks=layer._forward_hooks.copy())
    bare.__dict__["_modules"] = {
        name: None if child is None else skeleton(child) for name, child in layer._modules.items()
    }
    return bare
