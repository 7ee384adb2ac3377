"""The rank model: a RankProgram bound to this process's groups and its share of the parameters.

In:  a RankProgram, Groups and a ParameterStore.
Out: a callable: this rank's pieces of the inputs -> the program's outputs (whole on every rank).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint

from autopar import collectives
from autopar.passes.lower import RankBlock, RankProgram
from autopar.program import Call
from autopar.runtime.groups import Groups
from autopar.runtime.store import ParameterStore


class RankModel:
    """Runs the calls of a RankProgram one after the other.

    `compiled`: each unique block through `torch.compile` (once, however many layers call it). `recompute`: the
    activations of every layer are computed again in backward instead of being kept.
    """

    def __init__(
        self,
        program: RankProgram,
        groups: Groups,
        store: ParameterStore,
        *,
        compiled: bool = False,
        recompute: bool = False,
    ) -> None:
        self.program, self.groups, self.store, self.recompute = program, groups, store, recompute
        self.coordinates = {axis: groups.coordinate_tensor(axis) for axis in groups.group}
        self.functions: dict[str, Callable[..., tuple[Tensor, ...]]] = {}
        for name, block in program.blocks.items():
            bound = bind(block, groups)
            self.functions[name] = torch.compile(bound, fullgraph=True, dynamic=False) if compiled else bound
        self.last_use = _last_uses(program)

    def local_inputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's pieces of whole inputs."""
        return {
            name: self.groups.cut(inputs[name], sharding).to(self.groups.device).contiguous()
            for name, sharding in self.program.inputs.items()
        }

    def __call__(self, local_inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs by name, and `label count` if the program counts labels."""
        values: dict[str, Tensor] = dict(local_inputs)
        for index, call in enumerate(self.program.calls):
            inputs = [values[name] for name in call.inputs]
            if self.recompute and call.path and torch.is_grad_enabled():
                results = checkpoint(self._run, index, call, *inputs, use_reentrant=False)
            else:
                results = self._run(index, call, *inputs)
            values.update(zip(call.outputs, results, strict=True))
            for name in self.last_use[index]:
                values.pop(name, None)
        outputs = {name: values[value] for name, value in self.program.outputs.items()}
        if self.program.count is not None:
            outputs[self.program.count] = values[self.program.count]
        return outputs

    def _run(self, index: int, call: Call, *inputs: Tensor) -> tuple[Tensor, ...]:
        block = self.program.blocks[call.block]
        function = self.functions[call.block]
        coordinates = [self.coordinates[axis] for axis in block.coordinates]
        state = self.store.take(index, call.state)
        # A recomputed call keeps nothing, and has its parameters again when it is run again: hooks of its own would
        # take what it saves from the checkpoint's, which then would keep all of it.
        recomputed = self.recompute and call.path
        if self.store.fsdp > 1 and torch.is_grad_enabled() and not recomputed:
            with self.store.hooks(index, call.state, state):
                return function(*coordinates, *state, *inputs)
        return function(*coordinates, *state, *inputs)


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
            if _names_groups(node.target):
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
