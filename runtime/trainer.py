"""The trainer: one optimizer step of a rank model from a whole batch.

In:  a RankModel, how many micro-batches a batch is cut into, an optimizer over the local parameters.
Out: per step the loss of the whole batch (the same on every rank) and the global gradient norm.

With micro-batches, each loss that is a mean over labels is weighted by its number of labels, and the gradients are
divided by the total at the end: the result is the mean over the whole batch, however the ignored labels fall.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.errors import NonFiniteError, TrainingError
from autopar.nested import flat_inputs
from autopar.passes.limits import IdLimit
from autopar.program import TensorInfo, batch_dim, tensor_info
from autopar.runtime.ema import Ema
from autopar.runtime.groups import Groups, peer_errors
from autopar.runtime.model import RankModel
from autopar.runtime.nonfinite import Skips, explain, kept_buffers
from autopar.runtime.pipeline import Pipeline
from autopar.runtime.schedules import Schedule
from autopar.runtime.store import ParameterStore


@dataclass(frozen=True)
class StepResult:
    """`loss`: mean over the batch. `gradient_norm`: before clipping. `skipped`: of a step that was not taken, why."""

    step: int
    loss: float
    gradient_norm: float
    skipped: str | None = None


class Trainer:
    """Steps a RankModel or a Pipeline. `optimizer` is any torch optimizer over `model.store.parameters`.

    `schedule`: what the optimizer's learning rates are multiplied by (None: they are the caller's). `ema`: takes in the weights after every step.
    `skips`: how many steps in a row may be skipped because a loss or gradient is not finite.
    """

    def __init__(
        self,
        model: RankModel | Pipeline,
        optimizer: torch.optim.Optimizer,
        *,
        micro_batches: int = 1,
        max_norm: float | None = 1.0,
        schedule: Schedule | None = None,
        ema: Ema | None = None,
        skips: Skips | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.micro_batches, self.max_norm = micro_batches, max_norm
        self.schedule, self.ema, self.skips = schedule, ema, skips or Skips()
        self.step_count = 0
        self.reduction = model.gradients()

    @property
    def store(self) -> ParameterStore:
        return self.model.store

    @property
    def groups(self) -> Groups:
        return self.model.groups

    def step(self, batch: Mapping[str, Tensor]) -> StepResult:
        """Forward, backward, reduction, clipping, optimizer. `batch` is the whole batch; each rank takes its piece.

        A step whose loss or gradient is not finite is skipped: nothing changes but the count of steps, and the result
        says where the first such value came from. Raises TrainingError where too many are skipped in a row, and for a
        batch of another shape than the plan's; PeerError where another rank died or is stuck.
        """
        with peer_errors(f"step {self.step_count + 1}"):
            pieces = self._pieces(batch)
            with kept_buffers(self.model) as restore:
                try:
                    loss = self._reduced(pieces)
                    norm = float(self.gradient_norm())
                    if not math.isfinite(norm):
                        raise NonFiniteError(f"the gradient norm is {norm}, the loss {loss:.6g}")
                except NonFiniteError as error:
                    cause = explain(self.model, pieces)
                    self._forget()
                    restore()
                    told = self.skips.skipped(self.step_count + 1, error.what, cause)
                    self.step_count += 1
                    return StepResult(self.step_count, math.nan, math.nan, told)
            self._update(norm)
            return StepResult(self.step_count, loss, norm)

    def _update(self, norm: float) -> None:
        if self.max_norm is not None:
            self.reduction.clip(self.max_norm, norm)
        if self.schedule is not None:
            self.schedule.apply(self.optimizer, self.step_count)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.reduction.publish()
        if self.ema is not None:
            self.ema.update()
        self.step_count += 1
        self.skips.passed()

    def gradient_norm(self) -> Tensor:
        """L2 norm of the whole gradient, after `gradients`. All ranks must call it."""
        return self.reduction.norm()

    def gradients(self, batch: Mapping[str, Tensor]) -> float:
        """Gradients of the whole batch's loss into the local parameters' `.grad`; returns the loss.

        Raises TrainingError for a loss that is not finite, and for a batch that does not fit.
        """
        pieces = self._pieces(batch)
        try:
            return self._reduced(pieces)
        except TrainingError:
            self._forget()
            raise

    def _pieces(self, batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The micro-batches of a batch that has been checked."""
        batch = flat_inputs(batch)
        self._check(batch)
        self._check_fixed(batch)
        self._check_conditions(batch)
        return [self._micro(batch, number) for number in range(self.micro_batches)]

    def _reduced(self, pieces: Sequence[Mapping[str, Tensor]]) -> float:
        where = f"step {self.step_count + 1}"
        try:
            total, weights = self.model.accumulate(pieces)
        except TrainingError as error:
            raise type(error)(error.what, where=f"{where}, {error.where}", hint=error.hint) from None
        if not weights:
            raise TrainingError(
                "no label in the batch counts: all are ignored",
                where=where,
                hint="to look at that batch's labels; the parameters are those before this step",
            )
        self.reduction.finish(divide_by=weights)
        return total / weights

    def _forget(self) -> None:
        """Leave nothing of a step that failed."""
        self.optimizer.zero_grad(set_to_none=True)
        self.reduction.forget()

    def _check(self, batch: Mapping[str, Tensor]) -> None:
        for name, info in self.model.program.input_info.items():
            if name not in self.model.program.inputs:
                continue
            if name not in batch:
                parts = [part for part in batch if part.startswith(f"{name}.")]
                raise TrainingError(
                    f"{name} is several ({', '.join(parts)}), the plan is for one tensor"
                    if parts
                    else f"the batch has no {name!r}; it has {', '.join(batch)}",
                    where=f"step {self.step_count + 1}",
                    hint=f"a batch with {name!r}",
                )
            value = batch[name]
            shape = list(info.shape)
            if shape:
                shape[batch_dim(name, info.shape)] *= self.micro_batches
            expected = TensorInfo(tuple(shape), info.dtype)
            found = tensor_info(value) if isinstance(value, Tensor) else type(value).__name__
            if found != expected:
                raise TrainingError(
                    f"{name} is {found}, the plan is for {expected}",
                    where=f"step {self.step_count + 1}",
                    hint="batches of the planned size, or a plan for these (--batch, --seq)",
                )
            if name in self.model.program.limits:
                self._check_ids(name, value, self.model.program.limits[name])

    def _check_ids(self, name: str, ids: Tensor, limit: IdLimit) -> None:
        wrong = (ids < 0) | (ids >= limit.size)
        if limit.ignore is not None:
            wrong &= ids != limit.ignore
        if bool(wrong.any()):
            place = wrong.nonzero()[0].tolist()
            raise TrainingError(
                f"{name}{place} is {int(ids[tuple(place)])}, the model knows ids 0 to {limit.size - 1}"
                + ("" if limit.ignore is None else f" and {limit.ignore} for what is ignored"),
                where=f"step {self.step_count + 1}",
                hint="the tokenizer of this model",
            )

    def _micro(self, batch: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
        pieces = {}
        for name in self.model.program.inputs:
            pieces[name] = self._piece(name, batch[name], number)
        return pieces

    def _piece(self, name: str, value: Tensor, number: int) -> Tensor:
        if self.micro_batches == 1 or not value.dim():
            return value
        dim = batch_dim(name, tuple(value.shape))
        size = value.shape[dim] // self.micro_batches
        return value.narrow(dim, number * size, size)

    def _check_fixed(self, batch: Mapping[str, Tensor]) -> None:
        """Inputs that the program has as constants are the same in every batch, and in every micro-batch."""
        for name, fixed in self.model.program.fixed.items():
            if name not in batch:
                continue
            for number in range(self.micro_batches):
                found = self._piece(name, batch[name], number).cpu()
                if found.shape != fixed.shape or not bool((found == fixed).all()):
                    raise TrainingError(
                        f"{name} is {found.tolist()}, the plan is for {fixed.tolist()}: its values decide the shapes of what "
                        "is computed",
                        where=f"step {self.step_count + 1}"
                        + (f", micro-batch {number + 1}" if self.micro_batches > 1 else ""),
                        hint=f"batches with this {name} (images of one size), or compile with a batch that has the other",
                    )

    def _check_conditions(self, batch: Mapping[str, Tensor]) -> None:
        """What the program takes for granted holds of every micro-batch."""
        for condition in self.model.program.conditions:
            for name in condition.inputs:
                if name not in batch:
                    raise TrainingError(
                        f"the batch has no {name!r}; it has {', '.join(batch)}",
                        where=f"step {self.step_count + 1}",
                        hint=f"a batch with {name!r}",
                    )
            for number in range(self.micro_batches):
                piece = {name: self._piece(name, batch[name], number) for name in condition.inputs}
                violated = condition.violated(piece)
                if violated is not None:
                    micro = f", micro-batch {number + 1}" if self.micro_batches > 1 else ""
                    raise TrainingError(
                        violated,
                        where=f"step {self.step_count + 1}{micro}; {condition.where}",
                        hint=condition.hint,
                    )
