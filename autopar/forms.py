"""What a model is captured with: the model as a ModelSource, and the shapes of a whole batch of its inputs.

In: what a user hands over (a name, a module; example inputs, or how many sequences of how many tokens). Out: a `Form`,
tensors without storage. `Form.of_batch(2)` of `input_ids [8, 128]` is `input_ids [2, 128]`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autopar.errors import UsageError
from autopar.models.model_source import ModelSource
from autopar.models.source import find_model
from autopar.nested import flat_inputs, map_inputs, map_named
from autopar.program import batch_dim, batch_of, tensor_info
from autopar.workload import check_sizes

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Form:
    """The shapes a model is captured with: the whole batch's inputs, as tensors without storage."""

    inputs: Mapping[str, Any]
    batch: int
    seq: int

    def of_batch(self, batch: int) -> dict[str, Any]:
        """The same inputs for another number of sequences."""
        return map_named(self.inputs, lambda name, value: self._resized(name, value, batch))

    def _resized(self, name: str, value: Any, batch: int) -> Any:
        if not isinstance(value, Tensor) or not value.dim() or batch == self.batch:
            return value
        dim = batch_dim(name, tuple(value.shape))
        size, rest = divmod(value.shape[dim] * batch, self.batch)
        if rest:
            raise UsageError(
                f"{name} has {value.shape[dim]} rows for {self.batch} sequences, which cannot be cut to {batch} of them",
                hint="the same number of images (or patches) for every sequence",
            )
        copies = -(-size // value.shape[dim])
        return torch.cat([value] * copies, dim).narrow(dim, 0, size)


def source_of(model: str | nn.Module | PretrainedConfig | ModelSource) -> ModelSource:
    """The model behind whatever names it. Raises ModelError for a name that is none."""
    return model if isinstance(model, ModelSource) else find_model(model)


def _by_name(
    source: ModelSource, example_inputs: Mapping[str, Tensor] | Sequence[Tensor]
) -> Mapping[str, Any]:
    """Example inputs by the names of forward's parameters; positional ones are bound to them."""
    if isinstance(example_inputs, Mapping):
        return example_inputs
    with torch.device("meta"):
        signature = inspect.signature(source.build().forward)
    try:
        return dict(signature.bind(*example_inputs).arguments)
    except TypeError as error:
        raise UsageError(
            f"the example inputs do not fit forward{signature}: {error}",
            where=source.name,
            hint="a dict of keyword inputs",
        ) from None


def form_of(
    source: ModelSource,
    example_inputs: Mapping[str, Tensor] | Sequence[Tensor] | None,
    batch: int | None,
    seq: int | None,
) -> Form:
    """The inputs of a whole batch: the example's, or the model's own of `batch` (8) sequences of `seq` (128) tokens.

    An example of another batch size is cut or repeated to `batch`. Raises UsageError for inputs without a batch dim,
    of different batch sizes, or that do not fit the model's forward.
    """
    check_sizes(batch or 1, seq or 1)
    if example_inputs is None:
        with torch.device("meta"):
            inputs: Mapping[str, Any] = source.example_inputs(batch or 8, seq or 128)
    else:
        inputs = map_inputs(
            _by_name(source, example_inputs),
            # integers keep their values: those of grids decide shapes
            lambda value: (
                value.to("meta") if isinstance(value, Tensor) and value.is_floating_point() else value
            ),
        )
    flat = flat_inputs(inputs)
    tensors = [value for value in flat.values() if isinstance(value, Tensor) and value.dim()]
    if not tensors:
        raise UsageError(
            "the example inputs hold no tensor with a batch dim", hint="{'input_ids': ..., 'labels': ...}"
        )
    infos = {
        name: info for name, value in flat.items() if (info := tensor_info(value)) is not None and info.shape
    }
    found = batch_of(infos)
    assert found is not None
    odd = [
        name
        for name, info in infos.items()
        if info.shape[batch_dim(name, info.shape)] % found
        or (name in ("input_ids", "labels", "attention_mask") and info.shape[0] != found)
    ]  # there may be several images for a sequence
    if odd:
        raise UsageError(
            f"the example inputs have different batch sizes: {odd[0]} has {flat[odd[0]].shape[0]}, another {found}"
        )
    ids = [value for value in tensors if value.dim() == 2 and not value.is_floating_point()]
    form = Form(inputs, found, int(ids[0].shape[1]) if ids else 1)  # without token ids, a row counts as one
    if batch is not None and batch != found:
        form = Form(form.of_batch(batch), batch, form.seq)
    return form
