"""A pipeline stage at run time: its module, its place among the ranks, and gradients through all stages.

In:  Stages of `passes/stages.py`, on a mesh with the axis `pp` outermost.
Out: `StageModel`, an nn.Module whose forward takes what the stage before sent and returns what the next one receives;
     `pipeline_gradients`, a step's gradients over all stages and micro-batches (all forwards, then all backwards).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from autopar.errors import TrainingError
from autopar.mesh import Mesh
from autopar.passes.stages import Crossing, Stage
from autopar.runtime.groups import TIMEOUT_S, Groups, join_mesh
from autopar.runtime.model import RankModel
from autopar.runtime.store import ParameterStore

PP = "pp"


@dataclass(frozen=True)
class StageGroups:
    """This rank's place: `index` of its stage, `inner` as the ranks of one stage see each other, `peers` the ranks at
    its place in every stage, by stage, and their `group`."""

    index: int
    inner: Groups
    peers: tuple[int, ...]
    group: ProcessGroup


def join_stages(mesh: Mesh, stages: int, *, timeout_s: float = TIMEOUT_S) -> StageGroups:
    """Join `stages` times the ranks of `mesh`, the mesh of one stage."""
    outer = Mesh.of({PP: stages, **mesh.sizes})
    groups = join_mesh(outer, timeout_s=timeout_s)
    inner = Groups(
        mesh,
        groups.rank % mesh.device_count,
        groups.device,
        {axis: group for axis, group in groups.group.items() if axis != PP},
        {axis: place for axis, place in groups.coordinate.items() if axis != PP},
    )
    return StageGroups(groups.coordinate[PP], inner, outer.group_ranks(PP, groups.rank), groups.group[PP])


class StageModel(nn.Module):
    """One stage's calls on this rank's share of its state.

    `forward(*received, **inputs)`: values as `stage.receives` lists them, this rank's pieces of the model's inputs by
    name (those in `stage.program.inputs`). It returns what `stage.sends` lists; the last stage returns the outputs in
    the order of `outputs`, the loss first. Other outputs of a stage (updates of buffers) are in `kept` afterwards.
    """

    def __init__(
        self, stage: Stage, groups: Groups, state: Mapping[str, Tensor], *, recompute: bool = False
    ) -> None:
        super().__init__()
        self.stage = stage
        self.store = ParameterStore(stage.program, groups, state)
        self.ranks = RankModel(stage.program, groups, self.store, recompute=recompute)
        self.kept: dict[str, Tensor] = {}
        sent = {f"send {each.name}" for each in stage.sends}
        own = [name for name in stage.program.outputs if name not in sent]
        if stage.program.count is not None:
            own.append(stage.program.count)
        self.outputs = tuple(sorted(own, key=lambda name: name != "loss"))
        for name, parameter in self.store.parameters.items():
            self.register_parameter(name.replace(".", "/"), parameter)  # a dot would mean a module

    def forward(self, *received: Tensor, **inputs: Tensor) -> tuple[Tensor, ...]:
        values = dict(inputs)
        values.update(zip((each.name for each in self.stage.receives), received, strict=True))
        results = self.ranks(values)
        self.kept = {name: results[name] for name in self.outputs}
        if self.stage.is_last:
            return tuple(results[name] for name in self.outputs)
        # What only passes through would leave as the very tensor that came in, without a step of autograd's.
        return tuple(
            results[f"send {each.name}"].view_as(results[f"send {each.name}"]) for each in self.stage.sends
        )


def pipeline_gradients(
    model: StageModel, place: StageGroups, batch: Mapping[str, Tensor], *, micro_batches: int = 1
) -> float:
    """Gradients of the whole batch's loss into the parameters' `.grad` on every stage; returns the loss, everywhere.

    Every rank gets the whole batch. Losses that are means over labels are weighted by their numbers of labels.
    """
    stage, device = model.stage, place.inner.device
    runs: list[tuple[list[Tensor], tuple[Tensor, ...]]] = []
    before = place.peers[stage.index - 1] if stage.index else None
    after = None if stage.is_last else place.peers[stage.index + 1]
    total = torch.zeros(2, dtype=torch.float64, device=device)  # weighted loss, and weight
    weights: list[float] = []
    for number in range(micro_batches):
        inputs = model.ranks.local_inputs(_part(batch, stage.program.inputs, number, micro_batches))
        received = []
        for each in stage.receives:
            tensor = _empty(each, device)
            dist.recv(tensor, before)
            received.append(tensor.requires_grad_(each.gradient))
        results = model(*received, **inputs)
        if after is not None:
            for result in results:
                dist.send(result.detach().contiguous(), after)
        else:
            weights.append(_count(model, total))
        _update_buffers(model)
        runs.append((received, results))
    for number, (received, results) in enumerate(runs):
        if after is not None:
            _backward_from(stage.sends, results, after, device)
        elif weights[number]:
            (results[0] * weights[number]).backward()
        for each, tensor in zip(stage.receives, received, strict=True):
            if each.gradient:
                assert before is not None
                gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                dist.send(gradient.contiguous(), before)
    dist.broadcast(total, place.peers[-1], group=place.group)
    loss, weight = total.tolist()
    if not weight:
        raise TrainingError(
            "no label in the batch counts: all are ignored", hint="to look at that batch's labels"
        )
    sum_shared(model, place)
    model.store.finish_gradients(divide_by=weight)
    return float(loss / weight)


def sum_shared(model: StageModel, place: StageGroups) -> None:
    """Gradients of state that several stages have become those of all its uses, on each."""
    # Every stage walks the same list, so that the exchanges of one parameter meet.
    shared = model.stage.shared
    for name, members in sorted(shared.items()):
        parameter = model.store.entries[name].parameter if name in model.store.entries else None
        if parameter is None or not parameter.requires_grad:
            continue
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        first = place.peers[members[0]]
        if model.stage.index == members[0]:  # the first adds up, in order of the stages, and hands back
            for other in members[1:]:
                part = torch.empty_like(gradient)
                dist.recv(part, place.peers[other])
                gradient = gradient + part
            for other in members[1:]:
                dist.send(gradient, place.peers[other])
        else:
            dist.send(gradient.contiguous(), first)
            gradient = torch.empty_like(gradient)
            dist.recv(gradient, first)
        parameter.grad = gradient


def pipeline_norm(model: StageModel, place: StageGroups) -> Tensor:
    """L2 norm of the whole gradient over all stages; shared state counts once."""
    elsewhere = [name for name, members in model.stage.shared.items() if members[0] != model.stage.index]
    hidden = {}
    for name in elsewhere:
        if name in model.store.entries:
            hidden[name] = model.store.entries[name].parameter.grad
            model.store.entries[name].parameter.grad = None
    square = model.store.gradient_norm().square()
    for name, gradient in hidden.items():
        model.store.entries[name].parameter.grad = gradient
    dist.all_reduce(square, group=place.group)
    return square.sqrt()


def _part(
    batch: Mapping[str, Tensor], names: Mapping[str, Any], number: int, count: int
) -> dict[str, Tensor]:
    return {
        name: batch[name].narrow(0, number * (batch[name].shape[0] // count), batch[name].shape[0] // count)
        for name in names
    }


def _empty(each: Crossing, device: torch.device) -> Tensor:
    return torch.empty(each.shape, dtype=getattr(torch, each.dtype), device=device)


def _count(model: StageModel, total: Tensor) -> float:
    """The weight of the micro-batch just run; loss and weight are added to `total`."""
    count = model.stage.program.count
    weight = float(model.kept[count]) if count is not None else 1.0
    value = float(model.kept["loss"].detach())
    if weight and not math.isfinite(value):
        raise TrainingError(
            f"the loss is {value}", hint="to look at that batch, a lower learning rate, or fp32"
        )
    if weight:
        total += torch.tensor([value * weight, weight], dtype=total.dtype, device=total.device)
    return weight


def _update_buffers(model: StageModel) -> None:
    for name, value in model.kept.items():
        if name.startswith("update "):
            model.store.set_buffer(name.removeprefix("update "), value.detach())


def _backward_from(
    sends: Sequence[Crossing], results: Sequence[Tensor], after: int, device: torch.device
) -> None:
    """Receive the gradients of what was sent, and go back from them."""
    tensors, gradients = [], []
    for each, result in zip(sends, results, strict=True):
        if each.gradient:
            gradient = _empty(each, device)
            dist.recv(gradient, after)
            if result.requires_grad:
                tensors.append(result)
                gradients.append(gradient)
    torch.autograd.backward(tensors, gradients)
