"""Follow values: while a model is traced, compute beside every op what it makes of the example's inputs.

In:  a (copied) model and a `Knowledge` of its example inputs (`passes/known_values.py`).
Out: the model, whose forward computes with Python numbers of known tensors, and indexes by known masks with fixed sizes.

    x[mask]            x.flatten(0, 1) where all is marked, x[nonzero_static(mask, size=5)] where 5 places are
    int(n), if n:      the example's number

Known are inputs, tensors made of plain numbers, and what is made of known ones alone; a part of a concatenation with known
parts is known again. Tensors changed in place stay known where the change is made of known values only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.passes.host_values import FACTORIES, HostTensor
from autopar.passes.known_values import NOTE, UNDECIDED, Knowledge, Known, Made, Memory, Step, known_of
from autopar.torch_private import outside_of_modes, plain_dispatch, pytree, storage_key, version

_PARTS = "_autopar_parts"
_LARGEST = 2**24  # elements: what is larger (masks of attention over long rows) is not followed
_VALUES: Mapping[Any, Callable[[Any], Any]] = {
    Tensor.__bool__: bool,
    Tensor.__int__: int,
    Tensor.__float__: float,
    Tensor.__index__: int,
    Tensor.item: lambda value: value,
    Tensor.tolist: lambda value: value,
}


def follow_values(model: torch.nn.Module, knowledge: Knowledge) -> None:
    """Make `forward` of a (copied) model run with the values of the example's inputs known."""
    forward = model.forward

    def known(*args: Any, **kwargs: Any) -> Any:
        knowledge.start(kwargs)
        with _Following(knowledge):
            return forward(*args, **kwargs)

    model.forward = known


class _Following(TorchFunctionMode):
    """Computes beside every traced op of known tensors its value."""

    def __init__(self, knowledge: Knowledge) -> None:
        super().__init__()
        self.knowledge = knowledge

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _VALUES:
            known = known_of(args[0])
            if known is None:
                return func(*args, **kwargs)
            value = self.knowledge.decide(known, counted=False)
            return func(*args, **kwargs) if value is UNDECIDED else _VALUES[func](value)
        sized = self._sized(func, args, kwargs)
        if sized is not None:
            return sized
        result = func(*args, **kwargs)
        leaves, tree = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if _in_place(func, kwargs):
            self._change(func, leaves, tree, (*tensors[:1], kwargs.get("out")))
            return result
        if func in FACTORIES if not tensors else _all_known(tensors):
            self._follow(func, leaves, tree, result)
        elif func is torch.cat and len(args) == 1 and isinstance(result, Tensor):
            _note_parts(result, args[0], kwargs.get("dim", 0))
        return result

    def _follow(self, func: Callable[..., Any], leaves: list[Any], tree: Any, result: Any) -> None:
        made = pytree.tree_leaves(result)
        if not any(isinstance(one, Tensor) for one in made):
            return
        if any(isinstance(one, Tensor) and (_unknown(one) or one.numel() > _LARGEST) for one in made):
            return
        known, values = self._values(leaves)
        with outside_of_modes(), plain_dispatch(), torch.no_grad():
            args, kwargs = pytree.tree_unflatten(values, tree)
            try:
                computed = pytree.tree_leaves(func(*args, **kwargs))
            except Exception:  # of a function that only tracing gives its arguments
                return
        if len(computed) != len(made):
            return
        memories = {storage_key(one.value): one.memory for one in known if one is not None}
        number = self.knowledge.number(Step(func, _arguments(known, leaves), tree))
        for place, (traced, value) in enumerate(zip(made, computed, strict=True)):
            if isinstance(traced, Tensor) and isinstance(value, Tensor) and traced.shape == value.shape:
                memory = memories.setdefault(storage_key(value), Memory())
                self.knowledge.memories.setdefault(number, []).append(memory)
                setattr(traced, NOTE, Known(value, number, place, memory))

    def _values(self, leaves: list[Any]) -> tuple[list[Known | None], list[Any]]:
        known = [known_of(leaf) for leaf in leaves]
        return known, [
            one.value
            if one is not None
            else leaf.as_subclass(Tensor)
            if isinstance(leaf, HostTensor)
            else leaf
            for one, leaf in zip(known, leaves, strict=True)
        ]

    def _change(
        self, func: Callable[..., Any], leaves: list[Any], tree: Any, changed: tuple[Any, ...]
    ) -> None:
        """The same change of the values beside; where that cannot be, they are known no more."""
        targets = [known for tensor in changed if (known := getattr(tensor, NOTE, None)) is not None]
        if not targets:
            return
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        memory = targets[0].memory
        alone = len(targets) == 1 and not memory.given and targets[0].step not in self.knowledge.shared
        if alone and _all_known(tensors):
            known, values = self._values(leaves)
            with outside_of_modes(), plain_dispatch(), torch.no_grad(), contextlib.suppress(Exception):
                args, kwargs = pytree.tree_unflatten(values, tree)
                func(*args, **kwargs)
                self.knowledge.change(Step(func, _arguments(known, leaves), tree), memory)
                return
        for target in targets:
            target.memory.unchanged = False

    # ---- sizes ----

    def _run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.__torch_function__(func, (), args, kwargs)

    def _sized(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call returns, with sizes that a known mask decides for the example; None where none does."""
        parts = getattr(args[0], _PARTS, None) if args and isinstance(args[0], Tensor) else None
        if isinstance(parts, _Parts):
            return self._part(parts, func, args, kwargs)
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            return self._indexed(func, args)
        where = func is torch.where and len(args) == 1 and not kwargs
        if where or (func in _NONZERO and len(args) == 1):
            places = self._places(args[0])
            as_tuple = where or kwargs.get("as_tuple")
            return self._run(Tensor.unbind, places, 1) if as_tuple and places is not None else places
        if func in (torch.masked_select, Tensor.masked_select) and len(args) == 2:
            places = self._places(args[1]) if args[0].shape == args[1].shape else None
            return None if places is None else self._run(Tensor.__getitem__, args[0], self._columns(places))
        if func in (torch.masked_scatter, Tensor.masked_scatter) and len(args) == 3:
            return self._scattered(*args)
        return None

    def _part(self, parts: _Parts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What is taken of concatenated tensors, taken of one of them: of the whole, nothing is known."""
        whole, last = args[0], args[0].dim() - 1
        if parts.dim != last or not parts.unchanged(whole):
            return None
        if func in (torch.split, Tensor.split) and len(args) == 2 and kwargs.get("dim") in (-1, last):
            sizes = [part.shape[-1] for part in parts.tensors]
            return (
                tuple(parts.tensors)
                if isinstance(args[1], (list, tuple)) and list(args[1]) == sizes
                else None
            )
        if func is Tensor.__getitem__ and isinstance(args[1], tuple) and len(args[1]) == 2:
            around, place = args[1]
            if around is not Ellipsis or type(place) is not int:
                return None
            place %= whole.shape[-1]
            for part in parts.tensors:
                if place < part.shape[-1]:
                    return self._run(Tensor.__getitem__, part, (..., place))
                place -= part.shape[-1]
        return None

    def _places(self, mask: object) -> Tensor | None:
        """[places, dims] of a known mask."""
        known = known_of(mask)
        if known is None:
            return None
        size = self.knowledge.decide(known, counted=True)
        if size is UNDECIDED:
            return None
        places: Tensor = self._run(torch.nonzero_static, mask, size=size)
        return places

    def _columns(self, places: Tensor) -> tuple[Tensor, ...]:
        return tuple(self._run(Tensor.unbind, places, 1))

    def _indexed(self, func: Any, args: tuple[Any, ...]) -> Any:
        taken, index = args[0], args[1]
        items = index if isinstance(index, tuple) else (index,)
        masks = [one for one in items if isinstance(one, Tensor) and one.dtype == torch.bool and one.dim()]
        if not masks or any(known_of(mask) is None for mask in masks):
            return None
        if func is Tensor.__setitem__ and not (isinstance(args[2], Tensor) and args[2].dim()):
            return None  # one value for all places: no size depends on the mask
        if func is Tensor.__setitem__ and len(masks) == 1:
            known = known_of(masks[0])
            assert known is not None
            if self.knowledge.decide(known, counted=True) == 0:
                return taken  # nothing is written
        if func is Tensor.__getitem__ and len(items) == 1:
            known = known_of(masks[0])
            assert known is not None
            if self.knowledge.decide(known, counted=True) == masks[0].numel():
                return self._run(Tensor.flatten, taken, 0, masks[0].dim() - 1)
        listed: list[Any] = []
        for one in items:
            places = self._places(one) if any(one is mask for mask in masks) else None
            if places is None and any(one is mask for mask in masks):
                return None
            listed += [one] if places is None else self._columns(places)
        return self._run(func, taken, tuple(listed), *args[2:])

    def _scattered(self, taken: Tensor, mask: Tensor, source: Tensor) -> Tensor | None:
        """Rows put nowhere, or everywhere."""
        known = known_of(mask)
        if known is None:
            return None
        with outside_of_modes(), plain_dispatch():
            places = int(known.value.count_nonzero())
        if places not in (0, mask.numel()) or (places and source.numel() != taken.numel()):
            return None
        if self.knowledge.decide(known, counted=True) is UNDECIDED:
            return None
        made: Tensor = (
            self._run(Tensor.reshape, source, taken.shape) if places else self._run(Tensor.clone, taken)
        )
        return made


@dataclass(frozen=True)
class _Parts:
    """The tensors that one was concatenated of, along `dim`, and their versions then, its own last."""

    tensors: tuple[Tensor, ...]
    dim: int
    versions: tuple[int, ...]

    def unchanged(self, whole: Tensor) -> bool:
        return self.versions == tuple(map(version, (*self.tensors, whole)))


def _note_parts(whole: Tensor, parts: Any, dim: object) -> None:
    tensors = tuple(parts)
    if isinstance(dim, int) and any(
        known_of(part) is not None and part.dtype == whole.dtype for part in tensors
    ):
        versions = tuple(map(version, (*tensors, whole)))
        setattr(whole, _PARTS, _Parts(tensors, dim % whole.dim(), versions))


_NONZERO = (torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere)


def _arguments(known: list[Known | None], leaves: list[Any]) -> tuple[Any, ...]:
    return tuple(
        Made(one.step, one.leaf)
        if one is not None
        else leaf.as_subclass(Tensor)
        if isinstance(leaf, HostTensor)
        else leaf
        for one, leaf in zip(known, leaves, strict=True)
    )


def _all_known(tensors: list[Tensor]) -> bool:
    """Host values are constants beside known ones."""
    known = [known_of(tensor) is not None for tensor in tensors]
    return any(known) and all(
        one or isinstance(tensor, HostTensor) for one, tensor in zip(known, tensors, strict=True)
    )


def _unknown(tensor: Tensor) -> bool:
    return any(not isinstance(size, int) for size in tensor.shape)


def _in_place(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    ends = name.endswith("_") and not name.endswith("__")
    return ends or name in _CHANGING or isinstance(kwargs.get("out"), Tensor)


_CHANGING = frozenset(
    ("__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__iand__", "__ior__", "__ixor__",
     "__ifloordiv__", "__imod__", "__ipow__", "__set__")
)  # fmt: skip
