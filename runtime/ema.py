"""EMA: the exponential moving average of the weights, on the shares that a rank holds.

In:  a ParameterStore after each step.
Out: one more tensor per parameter, of the share's shape and in float32, saved and loaded as optimizer state is.

    average <- decay average + (1 - decay) weight          (Polyak and Juditsky 1992; as torch.optim.swa_utils)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from autopar.errors import TrainingError, UsageError
from autopar.runtime.store import ParameterStore


class Ema:
    """The average of all trainable parameters of a store; it begins as the weights of now.

    `decay`: what is kept of it per step, 0 <= decay < 1. Raises UsageError for another.
    """

    FIELD = "ema"  # the name of its tensors beside the optimizer's fields

    def __init__(self, store: ParameterStore, decay: float) -> None:
        if not 0.0 <= decay < 1.0:
            raise UsageError(f"an average that keeps {decay}", where="ema", hint="0.999; from 0 to below 1")
        self.store, self.decay = store, decay
        self._average = get_ema_multi_avg_fn(decay)
        self._tensors = {
            name: parameter.detach().to(torch.float32, copy=True)
            for name, parameter in store.parameters.items()
            if parameter.requires_grad
        }

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights of now: after a step, not after a skipped one."""
        parameters = self.store.parameters
        weights = [parameters[name].detach().float() for name in self._tensors]
        self._average(list(self._tensors.values()), weights, torch.tensor(1))

    def tensors(self) -> Mapping[str, Tensor]:
        """By the store's name of the parameter, tensors of its share's shape: they lie where the share lies."""
        return self._tensors

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from saved shares. Raises TrainingError if one is missing or has another shape; then nothing changed."""
        for name, own in self._tensors.items():
            if name not in tensors or tensors[name].shape != own.shape:
                found = f"has shape {list(tensors[name].shape)}" if name in tensors else "is missing"
                raise TrainingError(
                    f"the average of {name} {found}, the share here has {list(own.shape)}",
                    where="ema",
                    hint="a checkpoint of a run with --ema",
                )
        for name, own in self._tensors.items():
            own.copy_(tensors[name])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the shares are the averages: what saves or exports the model does so with them. Afterwards they are
        what they were, bit for bit. Replicas that blocks take instead of shares (ZeRO 1 and 2) are not touched."""
        parameters = {name: self.store.parameters[name] for name in self._tensors}
        before = {name: parameter.data for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            parameter.data = self._tensors[name].to(parameter.dtype)
        try:
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.data = before[name]
