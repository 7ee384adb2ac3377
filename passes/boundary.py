"""Boundary: while a model is captured, its repeated layers are marked, and all but a few of them stand-ins.

In:  the storage-free copy of a model, its stacks of layers (`passes/fold.py`), those left out as skeletons.
Out: the copy, whose layers call three ops that exist only in the exported graph:

    layer_inputs([x, cos, sin], "layers.1", 0)               what a traced layer takes: its nodes are between
    layer_outputs([y], "layers.1", 0)                        these two
    left_out_layer([x, cos, sin], "layers.7", 0, ...)        a layer that was not traced: one node of the same outputs

So the code around the layers runs for every one of them: what it hands to a layer, collects from it, or computes in
between is in the graph as it is, and only the inside of a left-out layer is taken from a layer of its kind.

A layer is stood in for only if two of its kind were traced, and called just as it is: the same structure of
arguments, shapes, dtypes and plain values. Whatever else could tell the difference is a FoldError: tensors
changed in place, containers changed, an index that forward computes with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar.passes.fold import FoldError, Stack, is_own_index
from autopar.passes.host_values import HostTensor
from autopar.passes.known_values import identity, keep
from autopar.passes.mask_flags import note, noted
from autopar.passes.pending import LEFT_OUT, Runs, describe, settled
from autopar.torch_private import plain_dispatch, pytree, storage_key, version

torch.library.define("autopar::layer_inputs", "(Tensor[] values, str path, int call) -> Tensor[]")
torch.library.define("autopar::layer_outputs", "(Tensor[] values, str path, int call) -> Tensor[]")

LAYER_INPUTS = torch.ops.autopar.layer_inputs.default
LAYER_OUTPUTS = torch.ops.autopar.layer_outputs.default
MARKERS = (LAYER_INPUTS, LAYER_OUTPUTS, LEFT_OUT)


def _alike(values: Sequence[Tensor], path: str, call: int) -> list[Tensor]:
    return [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]


torch.library.register_fake("autopar::layer_inputs", _alike)
torch.library.register_fake("autopar::layer_outputs", _alike)


class OwnIndex(int):
    """A layer's own index, which tells when forward computes with it."""

    used: set[str]
    path: str

    def __new__(cls, value: int, path: str, used: set[str]) -> OwnIndex:
        made = super().__new__(cls, value)
        made.path, made.used = path, used
        return made

    def __deepcopy__(self, memo: dict[int, object]) -> int:
        return int(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return (int, (int(self),))

    __hash__ = int.__hash__


def _telling(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def method(self: OwnIndex, *others: Any) -> Any:
        self.used.add(self.path)
        return plain(int(self), *others)

    return method


_COMPUTING = (
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__add__", "__radd__", "__sub__", "__rsub__",
    "__mul__", "__rmul__", "__mod__", "__rmod__", "__floordiv__", "__rfloordiv__", "__truediv__",
    "__rtruediv__", "__pow__", "__rpow__", "__bool__", "__float__", "__neg__",
)  # fmt: skip
for _name in _COMPUTING:
    setattr(OwnIndex, _name, _telling(_name))


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer in the exported graph, known there by (path, call)."""

    stack: int
    index: int
    path: str
    call: int
    group: int  # calls of one group are of one kind of layer and called alike
    traced: bool


@dataclass
class _Pattern:
    """How the traced calls of a group return: what a stand-in builds its result from."""

    outputs: list[Tensor]
    result: Any  # leaves: _Slot for a made tensor, _Passed for an argument handed back, else plain values
    result_spec: Any
    hooked: list[tuple[str, Any, Any]]  # submodule, leaves as above, spec
    times: int = 0


@dataclass(frozen=True)
class _Slot:
    number: int


@dataclass(frozen=True)
class _Passed:
    position: int


@dataclass
class Boundaries:
    """What was called while the model was exported."""

    stacks: Sequence[Stack]
    runs: Runs | None  # None: every left-out layer is traced on its own
    calls: list[LayerCall] = field(default_factory=list)
    patterns: dict[tuple[int, int, Hashable], _Pattern] = field(default_factory=dict)
    groups: dict[tuple[int, int, Hashable], int] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)
    index_used: set[str] = field(default_factory=set)
    # (stack, layer) -> group of its first call; stack -> what was not met in a traced layer
    called_as: dict[tuple[int, int], int] = field(default_factory=dict)
    otherwise: dict[int, str] = field(default_factory=dict)

    def install(self, model: nn.Module, folded: Sequence[int]) -> None:
        """Mark the layers of the stacks with these numbers."""
        if self.runs is not None:
            self.runs.all.clear()
        for number in folded:
            stack = self.stacks[number]
            layers = model.get_submodule(stack.path)
            for index, layer in enumerate(layers.children()):
                self._wrap(layer, number, index)
                if index in stack.kept:
                    _track_index(layer, index, stack.path, self.index_used)
        if folded and self.runs is not None:
            _run_in_order(model, self.runs)

    def check(self) -> None:
        """Raises FoldError where a layer computed with its own index (layers of other indices may do otherwise), and
        where a left-out layer was called otherwise than the traced ones of its kind."""
        for path in self.index_used:
            raise FoldError(f"layers of {path} compute with their own index", path)
        for number, message in self.otherwise.items():
            stack = self.stacks[number]
            kinds: dict[tuple[int, int | None], int] = {}
            refined = tuple(
                kinds.setdefault((kind, self.called_as.get((number, index))), len(kinds))
                for index, kind in enumerate(stack.kinds)
            )
            raise FoldError(message, stack.path, refined)

    def _wrap(self, layer: nn.Module, number: int, index: int) -> None:
        stack = self.stacks[number]
        path, forward = stack.layer_path(index), layer.forward
        real = index in stack.kept

        def called(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            with plain_dispatch():  # quicker: nothing here is an op
                key = (number, stack.kinds[index], _call_signature(leaves, spec, stack))
            group = self.groups.setdefault(key, len(self.groups))
            call = self.count[path] = self.count.get(path, -1) + 1
            pattern = self.patterns.get(key)
            times = pattern.times if pattern else 0
            traced = real and times < stack.copies
            self.called_as.setdefault((number, index), group)
            if not traced and times < 2:
                # go on with a pattern that may not fit, to see how the other layers are called
                self.otherwise[number] = f"{path} is called otherwise than the traced layers of its kind"
                alike = [found for other, found in self.patterns.items() if other[:2] == key[:2]]
                if not alike:
                    self.check()
                pattern = alike[-1]
            self.calls.append(LayerCall(number, index, path, call, group, traced))
            if traced:
                leaves = [settled(leaf) for leaf in leaves]
                return self._trace(layer, forward, key, path, call, leaves, spec, stack)
            assert pattern is not None
            return self._stand_in(layer, pattern, path, call, leaves, stack)

        layer.forward = called

    def _trace(
        self,
        layer: nn.Module,
        forward: Callable[..., Any],
        key: tuple[int, int, Hashable],
        path: str,
        call: int,
        leaves: list[Any],
        spec: Any,
        stack: Stack,
    ) -> Any:
        places = [place for place, leaf in enumerate(leaves) if _is_traced(leaf)]
        inner = list(leaves)
        marked = torch.ops.autopar.layer_inputs([leaves[place] for place in places], path, call)
        for place, tensor in zip(places, marked, strict=True):
            note(tensor, noted(leaves[place]))
            keep(tensor, leaves[place])
            inner[place] = tensor
        versions = [version(tensor) for tensor in marked]
        args, kwargs = pytree.tree_unflatten(inner, spec)
        with _DeferredHooks(layer) as deferred:
            result = forward(*args, **kwargs)
        after, after_spec = pytree.tree_flatten((args, kwargs))
        if after_spec != spec or any(one is not other for one, other in zip(after, inner, strict=True)):
            raise FoldError(f"{path} changes the containers it is given", stack.path)
        if [version(tensor) for tensor in marked] != versions:
            raise FoldError(f"{path} changes a tensor it is given in place", stack.path)
        outputs: list[Tensor] = []
        storages = {storage_key(tensor) for tensor in marked}

        def coded(leaf: Any) -> Any:
            if _is_traced(leaf):
                for position, tensor in enumerate(marked):
                    if leaf is tensor:
                        return _Passed(position)
                if storage_key(leaf) in storages:
                    raise FoldError(f"{path} returns a view of what it is given", stack.path)
                outputs.append(leaf)
                return _Slot(len(outputs) - 1)
            if not _is_plain(leaf):
                raise FoldError(f"{path} returns a {type(leaf).__name__}", stack.path)
            return leaf

        result_leaves, result_spec = pytree.tree_flatten(result)
        result_coded = [coded(leaf) for leaf in result_leaves]
        hooked = []
        for name, output in deferred:
            hook_leaves, hook_spec = pytree.tree_flatten(output)
            hooked.append((name, [coded(leaf) for leaf in hook_leaves], hook_spec))
        if not outputs:
            raise FoldError(f"{path} returns no tensor", stack.path)
        times = self.patterns[key].times if key in self.patterns else 0
        pattern = _Pattern(outputs, result_coded, result_spec, hooked, times + 1)
        self.patterns[key] = pattern
        made = torch.ops.autopar.layer_outputs(outputs, path, call)
        return _built(layer, pattern, made, [leaves[place] for place in places], stack)

    def _stand_in(
        self, layer: nn.Module, pattern: _Pattern, path: str, call: int, leaves: Sequence[Any], stack: Stack
    ) -> Any:
        arguments = [leaf for leaf in leaves if _is_traced(leaf)]
        if self.runs is not None:
            made = self.runs.call(path, call, arguments, pattern.outputs)
        else:
            text = ";".join(describe(output) for output in pattern.outputs)
            made = torch.ops.autopar.left_out_layer(arguments, path, call, text)
        return _built(layer, pattern, made, arguments, stack)


def _is_traced(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, HostTensor)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device))


def _call_signature(leaves: Sequence[Any], spec: Any, stack: Stack) -> Hashable:
    described: list[Hashable] = [str(spec), torch.is_grad_enabled()]
    for leaf in leaves:
        if isinstance(leaf, HostTensor):
            described.append(leaf.described)
        elif isinstance(leaf, Tensor):
            described.append((tuple(leaf.shape), leaf.dtype, leaf.device, noted(leaf), identity(leaf)))
        elif _is_plain(leaf):
            described.append((type(leaf).__name__, leaf))
        elif callable(leaf) or type(leaf).__module__.startswith("transformers."):
            described.append(id(leaf))
        else:
            raise FoldError(f"layers of {stack.path} are given a {type(leaf).__name__}", stack.path)
    return tuple(described)


def _built(
    layer: nn.Module, pattern: _Pattern, made: Sequence[Tensor], arguments: Sequence[Tensor], stack: Stack
) -> Any:
    """The layer's result from the tensors it made; hooks inside of it are called with theirs."""

    def decoded(leaf: Any) -> Any:
        if isinstance(leaf, _Slot):
            return made[leaf.number]
        return arguments[leaf.position] if isinstance(leaf, _Passed) else leaf

    names = {name for name, _, _ in pattern.hooked}
    for name, module in layer.named_modules():
        if name and name not in names and module._forward_hooks:
            raise FoldError(f"{name} of {stack.path} has a hook that the traced layer has not", stack.path)
    for name, leaves, spec in pattern.hooked:
        module = layer.get_submodule(name)
        output = pytree.tree_unflatten([decoded(leaf) for leaf in leaves], spec)
        for hook in module._forward_hooks.values():
            if hook(module, (), output) is not None:
                raise FoldError(f"a hook on {name} of {stack.path} changes its output", stack.path)
    return pytree.tree_unflatten([decoded(leaf) for leaf in pattern.result], pattern.result_spec)


def _run_in_order(model: nn.Module, runs: Runs) -> None:
    """Make `forward` of a (copied) model put left-out layers into the graph before what comes after them."""
    forward = model.forward

    @functools.wraps(forward)
    def ordered(*args: Any, **kwargs: Any) -> Any:
        with runs.in_order():
            return forward(*args, **kwargs)

    model.forward = ordered


class _DeferredHooks:
    """Hooks on modules inside of a layer are not called where the layer runs; what they would be given is kept."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.removed: list[tuple[nn.Module, Any]] = []
        self.outputs: list[tuple[str, Any]] = []

    def __enter__(self) -> list[tuple[str, Any]]:
        for name, module in self.layer.named_modules():
            if name and module._forward_hooks and not module._forward_hooks_with_kwargs:
                self.removed.append((module, module._forward_hooks))
                module._forward_hooks = type(module._forward_hooks)()
                module.register_forward_hook(self._keep(name))
        return self.outputs

    def _keep(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self.outputs.append((name, output))

        return keep

    def __exit__(self, *error: object) -> None:
        for module, hooks in self.removed:
            module._forward_hooks = hooks


def _track_index(layer: nn.Module, index: int, path: str, used: set[str]) -> None:
    """Make a traced layer's own index an `OwnIndex`."""
    for module in layer.modules():
        for name, value in list(vars(module).items()):
            if is_own_index(name, value, index):
                module.__dict__[name] = OwnIndex(value, path, used)
