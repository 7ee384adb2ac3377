"""A pipeline stage at run time: its calls as a module, on this rank's share of the state.

In:  a Stage of `passes/stages.py`, and the store that has its state.
Out: `StageModel`, an nn.Module whose forward takes what the stage before sent and returns what the next one receives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar import torch_private
from autopar.passes.stages import Stage
from autopar.runtime.groups import Groups
from autopar.runtime.model import Functions, RankModel, weight_of
from autopar.runtime.recompute import Recompute
from autopar.runtime.store import ParameterStore


class StageModel(nn.Module):
    """One stage's calls.

    `forward(*received, number)`: values as `stage.receives` lists them, and the number of the micro-batch (a tensor
    of one element), whose inputs `load` was given. It returns what `stage.sends` lists; the last stage returns the
    loss, with `total` and `weights` added up over micro-batches.
    """

    def __init__(
        self,
        stage: Stage,
        groups: Groups,
        store: ParameterStore,
        *,
        functions: Functions | None = None,
        recompute: Recompute | bool = False,
    ) -> None:
        super().__init__()
        self.stage = stage
        self.ranks = RankModel(stage.program, groups, store, functions=functions, recompute=recompute)
        self.inputs: list[dict[str, Tensor]] = []
        self.losses: dict[int, tuple[float, float]] = {}  # of each micro-batch: loss and weight
        for name in stage.program.state:
            if (
                name in store.entries
            ):  # for zero-bubble schedules, which look for what weights to differentiate by
                self.register_parameter(
                    name.replace(".", "/"), store.entries[name].leaf
                )  # a dot would mean a module

    def load(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> None:
        """The whole micro-batches of the step to come."""
        self.losses.clear()
        self.inputs = [self.ranks.local_inputs(batch) for batch in micro_batches]

    def forward(self, *received: Tensor, number: Tensor) -> Any:
        micro = int(number)
        values = dict(self.inputs[micro])
        values.update(zip((each.name for each in self.stage.receives), received, strict=True))
        results = self.ranks(values)
        self.ranks.update_buffers(results)
        if not self.stage.is_last:
            return tuple(_sent(results[f"send {each.name}"], received) for each in self.stage.sends)
        return self._weighted(micro, results, received)

    def _weighted(self, micro: int, results: Mapping[str, Tensor], received: Sequence[Tensor]) -> Tensor:
        loss = results["loss"]
        weight = weight_of(results, self.stage.program, len(self.inputs))
        self.losses[micro] = float(loss.detach()), weight
        if weight:
            return loss * weight
        # Not a single label: the mean is undefined, and its gradients are none rather than not a number.
        nothing = [value.sum() * 0.0 for value in received if value.requires_grad]
        return torch.stack(nothing).sum()


def _sent(value: Tensor, received: Sequence[Tensor]) -> Tensor:
    """A tensor that may leave: contiguous, and of its own. Torch's schedules detach what they have gone back from in
    place, which a view cannot be; and what only passes through needs a step of autograd's."""
    passes = any(value is each for each in received)
    return value.clone() if passes or torch_private.is_view(value) else value.contiguous()
