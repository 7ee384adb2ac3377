"""The rank model: a RankProgram bound to this process's groups and its share of the parameters.

In:  a RankProgram, Groups and a ParameterStore.
Out: a callable: this rank's pieces of the inputs -> the program's outputs (whole on every rank).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autopar import collectives
from autopar.errors import NonFiniteError, UsageError
from autopar.passes.lower import RankBlock, RankProgram
from autopar.program import Call
from autopar.runtime.gradients import Gradients
from autopar.runtime.groups import Groups
from autopar.runtime.observe import Observer
from autopar.runtime.recompute import NONE, SELECTIVE, Recompute, run_call
from autopar.runtime.store import ParameterStore

Functions = Mapping[str, Callable[..., tuple[Tensor, ...]]]


def functions_of(program: RankProgram, groups: Groups, *, compiled: bool = False) -> Functions:
    """What runs each unique block in this process; through `torch.compile` once, however many layers call it."""
    bound = {name: bind(block, groups) for name, block in program.blocks.items()}
    if not compiled:
        return bound
    return {name: torch.compile(graph, fullgraph=True, dynamic=False) for name, graph in bound.items()}


class RankModel:
    """Runs the calls of a RankProgram one after the other.

    `functions`: what runs the blocks, where several models share them (default: the program's own, eager).
    """

    def __init__(
        self,
        program: RankProgram,
        groups: Groups,
        store: ParameterStore,
        *,
        functions: Functions | None = None,
        compiled: bool = False,
        recompute: Recompute | bool = False,
    ) -> None:
        self.program, self.groups, self.store = program, groups, store
        if isinstance(recompute, bool):
            recompute = Recompute("full" if recompute else NONE)
        self.offload = recompute.offload
        self.coordinates = {axis: groups.coordinate_tensor(axis) for axis in groups.group}
        self.functions = functions or functions_of(program, groups, compiled=compiled)
        # An exception through a compiled block makes dynamo compile what it passes on its way, and fail.
        self.early_stop = all(isinstance(each, GraphModule) for each in self.functions.values())
        if not self.early_stop and recompute.kind == SELECTIVE:
            raise UsageError(
                "blocks compiled by torch.compile cannot be recomputed selectively: which of their results to keep is "
                "decided op by op, and they have no ops left",
                where="recompute",
                hint="recompute=full, or without --compile",
            )
        self.last_use = _last_uses(program)
        self._reduction: Gradients | None = None
        self.observer: Observer | None = None  # told of every call, while a run is monitored
        layers = [index for index, call in enumerate(program.calls) if call.path]
        self.kinds = {index: recompute.of_layer(number) for number, index in enumerate(layers)}

    def gradients(self) -> Gradients:
        """For the gradients of this model's store: one for its life, since it listens to backward."""
        self._reduction = Gradients(self.store)
        return self._reduction

    def local_inputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's pieces of whole inputs."""
        return {
            name: self.groups.cut(inputs[name], sharding).to(self.groups.device).contiguous()
            for name, sharding in self.program.inputs.items()
        }

    def accumulate(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> tuple[float, float]:
        """Forward and backward of whole micro-batches, one after the other. Returns the sum of their losses, each
        times its weight (its number of labels, where the loss is a mean over labels), and the sum of the weights.

        Raises NonFiniteError for a loss that is not finite.
        """
        if self._reduction is not None:
            self._reduction.begin()
        total, weights = 0.0, 0.0
        for number, batch in enumerate(micro_batches):
            outputs = self(self.local_inputs(batch))
            loss = outputs["loss"]
            weight = weight_of(outputs, self.program, len(micro_batches))
            value = float(loss.detach())
            if weight == 0.0:  # without a single label the mean is undefined, and counts for nothing
                continue
            check_loss(value, number, len(micro_batches))
            if number == len(micro_batches) - 1 and self._reduction is not None:
                self._reduction.last_backward()
            (loss * weight).backward()
            self.update_buffers(outputs)
            total += value * weight
            weights += weight
        return total, weights

    def update_buffers(self, outputs: Mapping[str, Tensor]) -> None:
        """What the forward makes of buffers (batch statistics) into the store."""
        for name, value in outputs.items():
            if name.startswith("update "):
                self.store.set_buffer(name.removeprefix("update "), value.detach())

    def __call__(self, local_inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs by name, and `label count` if the program counts labels."""
        values: dict[str, Tensor] = dict(local_inputs)
        for index, call in enumerate(self.program.calls):
            inputs = [values[name] for name in call.inputs]
            results = self._run_as_planned(index, call, inputs)
            values.update(zip(call.outputs, results, strict=True))
            for name in self.last_use[index]:
                values.pop(name, None)
        outputs = {name: values[value] for name, value in self.program.outputs.items()}
        if self.program.count is not None:
            outputs[self.program.count] = values[self.program.count]
        return outputs

    def _run_as_planned(self, index: int, call: Call, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        kind = self.kinds.get(index, NONE)
        offload = self.offload and bool(call.path)
        run = self._run if self.observer is None else partial(self.observer.run_call, self._run)
        if not torch.is_grad_enabled() or (kind == NONE and not offload):
            return run(index, call, False, *inputs)
        return run_call(kind, offload, run, index, call, kind != NONE, *inputs, early_stop=self.early_stop)

    def _run(self, index: int, call: Call, recomputed: bool, *inputs: Tensor) -> tuple[Tensor, ...]:
        block = self.program.blocks[call.block]
        function = self.functions[call.block]
        coordinates = [self.coordinates[axis] for axis in block.coordinates]
        key = (self.program.name, index)
        state = self.store.take(key, call.state)
        # A recomputed call keeps nothing, and has its parameters again when it is run again: hooks of its own would
        # take what it saves from the checkpoint's, which then would keep all of it.
        if self.store.any_gathered and torch.is_grad_enabled() and not recomputed:
            passed = self.store.until_backward(key, call.state, inputs)
            with self.store.hooks(key, call.state, state):
                return function(*coordinates, *state, *passed)
        return function(*coordinates, *state, *inputs)


def weight_of(outputs: Mapping[str, Tensor], program: RankProgram, micro_batches: int) -> float:
    """What a micro-batch's loss counts: its number of labels, where there are others to compare with."""
    return float(outputs[program.count]) if micro_batches > 1 and program.count is not None else 1.0


def check_loss(value: float, number: int, micro_batches: int) -> None:
    """Raise NonFiniteError for a micro-batch's loss that is not finite."""
    if not math.isfinite(value):
        raise NonFiniteError(
            f"the loss is {value}",
            where=f"micro-batch {number + 1} of {micro_batches}",
            hint="to look at that batch (are all its labels ignored?), a lower learning rate, or fp32; "
            "the parameters are those before this step",
        )


def bind(block: RankBlock, groups: Groups) -> GraphModule:
    """The block's graph with the names of mesh axes replaced by the names of this process's groups, and tensors made
    on this process's device."""
    fresh = torch.fx.Graph()
    mapping: dict[Node, Node] = {}
    names = {axis: groups.name(axis) for axis in groups.group}

    def bound(value: Any) -> Any:
        if isinstance(value, str):
            return names.get(value, value)
        if isinstance(value, (list, tuple)):
            return type(value)(bound(item) for item in value)
        return value

    for node in block.graph.graph.nodes:
        copied = fresh.node_copy(node, mapping.__getitem__)
        if node.op == "call_function":
            if _names_groups(node.target) or node.meta.get("groups"):  # the latter: a whole block, as source
                copied.args = tuple(bound(argument) for argument in copied.args)
                copied.kwargs = {key: bound(argument) for key, argument in copied.kwargs.items()}
            if "device" in copied.kwargs:
                copied.kwargs = {**copied.kwargs, "device": groups.device}
        mapping[node] = copied
    fresh.lint()
    return GraphModule(torch.nn.Module(), fresh)


def _names_groups(target: object) -> bool:
    """Whether a function takes names of groups: those of `collectives` and of the `*_steps` modules beside it."""
    module = str(getattr(target, "__module__", ""))
    return module == collectives.__name__ or (module.startswith("autopar.") and module.endswith("_steps"))


def _last_uses(program: RankProgram) -> list[list[str]]:
    """Per call the values that nothing later needs."""
    last: dict[str, int] = {}
    for index, call in enumerate(program.calls):
        for name in (*call.inputs, *call.outputs):
            last[name] = index
    kept = {*program.outputs.values(), program.count}
    result: list[list[str]] = [[] for _ in program.calls]
    for name, index in last.items():
        if name not in kept:
            result[index].append(name)
    return result
