"""Host values: small integer inputs whose values decide shapes, as they are, while the rest of a model is traced.

In:  the grids of images, the sizes of patches, lengths: inputs that a model turns into Python numbers.
Out: tensors that compute for real among themselves, so that `.tolist()`, masks by index and loops work; where one
     meets a traced tensor it is a constant of the graph.

    grid = host([[1, 4, 6]])
    lengths = grid.prod(-1)                      computed now: 24
    x.split(lengths.tolist())                    a split of the graph, with 24 in it

A tensor made by a function that holds a host value (`torch.arange(height)`) is a host value as well.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.passes.pending import settled
from autopar.torch_private import outside_of_modes, plain_dispatch, pytree

# Inputs that tell how others are cut, by what they are called (Transformers 5.24: image_grid_thw, image_sizes,
# spatial_shapes, target_sizes, num_patches, feature_lens, ...).
_OF_SHAPES = re.compile(
    r"(^|_)(grid|grids|thw|hws|sizes|shapes|lens|lengths|seqlens|num_patches|num_crops|tile_sizes)(_|$)"
)
# Inputs that differ from batch to batch, whatever is made of them.
_OF_DATA = re.compile(r"ids$|labels|mask|target")

# Masks of features, patches and tiles: of these, batches that are full are alike.
_OF_TOWERS = re.compile(r"(feature|pixel|patch|image|audio|video|aspect_ratio|input_features).*mask")

FACTORIES = frozenset(
    (
        torch.arange,
        torch.zeros,
        torch.ones,
        torch.full,
        torch.empty,
        torch.linspace,
        torch.tensor,
        torch.eye,
        torch.as_tensor,
    )
)


# Frames between a caller and `HostFactories`.
_BETWEEN = ("torch.", "autopar.passes.pending")


class HostTensor(Tensor):
    """A real tensor beside traced ones (see the module's docstring)."""

    @property
    def described(self) -> tuple[str, tuple[int, ...], bytes]:
        """Equal for equal values."""
        with outside_of_modes(), plain_dispatch():
            plain = self.as_subclass(Tensor)
            return str(plain.dtype), tuple(plain.shape), plain.contiguous().numpy().tobytes()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        leaves, spec = pytree.tree_flatten((args, dict(kwargs or {})))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if all(isinstance(tensor, HostTensor) for tensor in tensors):
            with outside_of_modes(), plain_dispatch():
                plain_args, plain_kwargs = pytree.tree_unflatten([_plain(leaf) for leaf in leaves], spec)
                return pytree.tree_map(_host, func(*plain_args, **plain_kwargs))
        with plain_dispatch():
            plain_args, plain_kwargs = pytree.tree_unflatten([_plain(leaf) for leaf in leaves], spec)
            return func(*plain_args, **plain_kwargs)


def _plain(leaf: Any) -> Any:
    return leaf.as_subclass(Tensor) if isinstance(leaf, HostTensor) else settled(leaf)


def _host(leaf: Any) -> Any:
    return leaf.as_subclass(HostTensor) if isinstance(leaf, Tensor) else leaf


def host(tensor: Tensor) -> HostTensor:
    """A copy of a tensor with values, as a host value."""
    with outside_of_modes(), plain_dispatch():
        made: HostTensor = tensor.detach().cpu().clone().as_subclass(HostTensor)
        return made


class HostFactories(TorchFunctionMode):
    """Inside, tensors made from numbers alone are host values, in functions that hold one."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func not in FACTORIES:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if tensors and all(isinstance(tensor, HostTensor) for tensor in tensors):
            return HostTensor.__torch_function__(func, types, args, kwargs)
        if tensors:
            return func(*args, **kwargs)
        caller = sys._getframe(1)
        while caller.f_globals.get("__name__", "").startswith(_BETWEEN):
            if caller.f_back is None:
                return func(*args, **kwargs)
            caller = caller.f_back
        if not any(isinstance(value, HostTensor) for value in caller.f_locals.values()):
            return func(*args, **kwargs)
        with outside_of_modes(), plain_dispatch():
            return _host(func(*args, **kwargs))


def values_for_shapes(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The inputs that tell shapes, by their names, where they have values."""
    return {
        name: value
        for name, value in inputs.items()
        if _is_host(value) and _OF_SHAPES.search(name) and not _OF_DATA.search(name)
    }


def other_values(inputs: Mapping[str, Any], known: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Further inputs that could tell shapes, the likeliest first: other integers, then masks of what is not text."""
    integers = {
        name: value
        for name, value in inputs.items()
        if name not in known and _is_host(value) and not _OF_DATA.search(name)
    }
    masks = {name: value for name, value in inputs.items() if _is_host(value) and _OF_TOWERS.search(name)}
    if integers:
        yield integers
    if masks:
        yield {**integers, **masks}


def _is_host(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and value.device.type != "meta"
        and not value.is_floating_point()
        and not value.is_complex()
    )


def describe_values(value: Tensor) -> str:
    text = str(value.tolist())
    return text if len(text) <= 60 else f"{text[:60]}..."


def give_values(model: torch.nn.Module, fixed: Mapping[str, Tensor]) -> None:
    """Make `forward` of a (copied) model take these inputs as host values, without being given them."""
    if not fixed:
        return
    forward, values = model.forward, {name: host(value) for name, value in fixed.items()}
    signature = inspect.signature(forward)

    def given(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs, **values)

    remaining = [parameter for name, parameter in signature.parameters.items() if name not in fixed]
    given.__signature__ = signature.replace(parameters=remaining)  # type: ignore[attr-defined]
    model.forward = given
