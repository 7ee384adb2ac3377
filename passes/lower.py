"""Lower: a Program and the placement of its ops to what each rank runs.

In:  a Program, its Problem (rules), a Solution (choice per op, sharding per value) and the mesh.
Out: a RankProgram: per unique block one graph of local shapes, with the steps between shardings written out as
     calls of `autopar.collectives`. Ranks run the same graph; a rank's own coordinates come in as tensors.

    %linear: [8@dp, 4096, 14336@tp]      linear(%x, %w)            x gathered once for all its users
    %down: [8@dp, 4096, 4096] + sum(tp)  linear(%act, %w2)
                                         reduce_scatter(%down, 1, 'tp', 2)

Every user of a value states what it wants (a Use); equal wishes share one step, so that gradients are summed before
they are reduced. A parameter whose every use lacks a split loop gets its gradient as partial sums; that reduction is
left to the parameter store (`StateLayout.grad_sums`), which does it once per step for all of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from autopar import collectives
from autopar.errors import ShardingError
from autopar.mesh import Mesh
from autopar.passes.limits import IdLimit, id_limits
from autopar.passes.lowerings import LOWERINGS
from autopar.passes.problem import value_name
from autopar.problem import Choice, Op, Problem, Solution
from autopar.program import Block, Call, Condition, Program, StateInfo, TensorInfo, node_info
from autopar.rules import localize, operand_nodes
from autopar.rules.rule import PAIR, Sharded
from autopar.sharding import Sharding, Step, Use, reshard_steps


@dataclass(frozen=True)
class StateLayout:
    """How a parameter or buffer lies on the mesh as the blocks take it (`sharding`), and the axes over which its
    gradient comes out of the blocks as partial sums."""

    info: StateInfo
    sharding: Sharding
    grad_sums: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankBlock:
    """A block in local shapes. Placeholders: one coordinate per axis in `coordinates`, then state, then inputs.
    `shardings`: of the inputs and of the outputs."""

    name: str
    graph: GraphModule
    coordinates: tuple[str, ...]
    state: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class RankProgram:
    """What every rank runs: blocks, the same calls as the Program's, the layout of state and inputs.

    `limits`: the range of ids per input. `count`: the value that holds the number of labels the loss averages over, if the loss is such a mean: with
    micro-batches their losses are weighted by it. `fixed`: inputs whose values are constants of the program.
    `conditions`: what must hold of a batch.
    """

    name: str
    mesh: Mesh
    blocks: Mapping[str, RankBlock]
    calls: tuple[Call, ...]
    state: Mapping[str, StateLayout]
    inputs: Mapping[str, Sharding]
    input_info: Mapping[str, TensorInfo]
    outputs: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    limits: Mapping[str, IdLimit]
    count: str | None
    fixed: Mapping[str, torch.Tensor] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()

    def __str__(self) -> str:
        lines = [f"rank program {self.name} on {self.mesh}"]
        for block in self.blocks.values():
            lines += ["", f"block {block.name}", *(f"  {line}" for line in _format(block.graph.graph))]
        return "\n".join(lines)


def lower(program: Program, problem: Problem, solution: Solution, mesh: Mesh) -> RankProgram:
    """Lower every unique block once. Raises ShardingError where a sharding does not divide."""
    work = _Lowering(program, problem, solution, mesh)
    blocks = {name: work.block(block) for name, block in program.blocks.items()}
    state = {
        name: StateLayout(program.state[name], work.value_sharding(value), work.state_sums.get(value, ()))
        for name, value in work.state_values.items()
    }
    source = {value: name for name, value in work.input_values.items()}
    calls, count = _calls_with_count(program, work.count_block)
    return RankProgram(
        program.name,
        mesh,
        blocks,
        calls,
        state,
        {name: work.value_sharding(value) for value, name in source.items()},
        dict(program.inputs),
        dict(program.outputs),
        program.constants,
        id_limits(program, problem),
        count,
        program.fixed,
        program.conditions,
    )


def _calls_with_count(program: Program, count_block: str | None) -> tuple[tuple[Call, ...], str | None]:
    if count_block is None:
        return program.calls, None
    calls = tuple(
        Call(call.block, call.state, call.inputs, (*call.outputs, "label count"), call.path)
        if call.block == count_block
        else call
        for call in program.calls
    )
    return calls, "label count"


class _Lowering:
    def __init__(self, program: Program, problem: Problem, solution: Solution, mesh: Mesh) -> None:
        self.program, self.problem, self.solution, self.mesh = program, problem, solution, mesh
        self.ops: dict[str, Op] = {op.name: op for op in problem.ops}
        self.sharded: dict[str, Sharded | None] = {op.name: self._shard(op) for op in problem.ops}
        self.state_values: dict[str, str] = {}  # state name -> a value that stands for it
        self.input_values: dict[str, str] = {}
        for call in program.calls:
            block = program.blocks[call.block]
            for node, name in zip(block.state, call.state, strict=True):
                self.state_values.setdefault(name, value_name(block.name, node))
            for node, name in zip(block.inputs, call.inputs, strict=True):
                if name in program.inputs:
                    self.input_values.setdefault(name, value_name(block.name, node))
        self.state_sums = self._state_sums()
        self.count_block: str | None = None
        self.loss = program.outputs.get("loss")

    # ---- what was decided ----------------------------------------------------------------------------------

    def live(self, choice: Choice) -> dict[str, str | None]:
        """A choice without axes of size 1, in mesh order."""
        return {axis: choice.get(axis) for axis, size in self.mesh.axes if size > 1}

    def _shard(self, op: Op) -> Sharded | None:
        if op.rule is None:
            return None
        try:
            return op.rule.shard(self.live(self.solution.choices.get(op.name, {})), self.mesh.sizes)
        except ShardingError as error:
            raise ShardingError(
                error.what, where=f"{op.name} = {op.kind}, mesh {self.mesh}", hint=error.hint
            ) from error

    def value_sharding(self, value: str) -> Sharding:
        sharding = self.solution.shardings[value]
        return sharding.without(axis for axis, size in self.mesh.axes if size == 1)

    def op_uses(self, op: Op) -> Iterator[tuple[str, Use]]:
        """(operand value, how the op takes it)."""
        sharded = self.sharded[op.name]
        for index, operand in enumerate(op.operands):
            value = self.problem.values[operand]
            use = sharded.uses[index] if sharded else Use(Sharding.whole(len(value.info.shape)))
            yield operand, (use if value.gradient else Use(use.sharding))

    def _state_sums(self) -> dict[str, tuple[str, ...]]:
        """Per state value the axes over which every use, in all blocks, takes it whole with its gradient as sums."""
        uses: dict[str, list[Use]] = {}
        group: dict[str, str] = {}
        for name, value in self.problem.values.items():
            if value.state:
                group[name] = value.interface or name
        for op in self.problem.ops:
            for operand, use in self.op_uses(op):
                if operand in group:
                    uses.setdefault(group[operand], []).append(use)
        sums: dict[str, tuple[str, ...]] = {}
        for name, interface in group.items():
            if not self.problem.values[name].gradient:
                continue
            stored = self.value_sharding(name)
            sums[name] = tuple(
                axis
                for axis in self.mesh.names
                if stored.dim_of(axis) is None
                and uses.get(interface)
                and all(axis in use.grad_sums for use in uses[interface])
            )
        return sums

    # ---- one block -----------------------------------------------------------------------------------------

    def block(self, block: Block) -> RankBlock:
        build = _BlockBuilder(self, block)
        for node in block.graph.graph.nodes:
            if node.op == "placeholder":
                build.placeholder(node)
            elif node.op == "call_function":
                build.call(node)
        return build.finish()


class _BlockBuilder:
    def __init__(self, lowering: _Lowering, block: Block) -> None:
        self.work, self.block = lowering, block
        self.graph = Graph()
        self.coordinates: dict[str, Node] = {}
        self.local: dict[Node, Node] = {}
        self.forms: dict[tuple[Node, Use], Node] = {}
        self.count: Node | None = None

    def placeholder(self, node: Node) -> None:
        fresh = self.graph.placeholder(node.name)
        self._describe(fresh, node)
        self.local[node] = fresh

    def _describe(self, fresh: Node, node: Node) -> None:
        info = node_info(node)
        if info is None:
            return
        sharding = self.sharding(node)
        fresh.meta["sharding"] = sharding
        fresh.meta["global"] = info
        fresh.meta["axes"] = node.meta.get("axes")  # names, for the text of an exported program
        fresh.meta["local_shape"] = sharding.local_shape(
            info.shape, self.work.mesh, where=value_name(self.block.name, node.name)
        )

    def sharding(self, node: Node) -> Sharding:
        """How a node lies as it is made."""
        if node.op == "placeholder":
            return self.work.value_sharding(value_name(self.block.name, node.name))
        source = node.args[0] if node.target is operator.getitem else node
        assert isinstance(source, Node)
        sharded = self.work.sharded[value_name(self.block.name, source.name)]
        if sharded is None:
            info = node_info(node)
            return Sharding.whole(len(info.shape) if info else 0)
        index = node.args[1] if source is not node else 0
        assert isinstance(index, int)
        return sharded.results[index]

    def coordinate(self, axis: str) -> Node:
        if axis not in self.coordinates:
            first = next(iter(self.graph.nodes))
            with self.graph.inserting_before(first):
                self.coordinates[axis] = self.graph.placeholder(f"coordinate_{axis}")
        return self.coordinates[axis]

    def form(self, node: Node, use: Use, *, delegated: tuple[str, ...] = ()) -> Node:
        """`node` as a user wants it; made once for all users that want the same."""
        use = Use(use.sharding, tuple(axis for axis in use.grad_sums if axis not in delegated))
        key = (node, use)
        if key not in self.forms:
            value = self.local[node]
            for step in reshard_steps(self.sharding(node), use):
                value = self.step(value, step)
            self.forms[key] = value
        return self.forms[key]

    def step(self, value: Node, step: Step) -> Node:
        axis, size = step.axis, self.work.mesh.sizes[step.axis]
        function: Callable[..., torch.Tensor]
        arguments: tuple[Any, ...]
        if step.kind == "copy":
            function, arguments = collectives.copy, (axis,)
        elif step.kind == "all_reduce":
            function, arguments = collectives.all_reduce, (axis, step.grad_sums)
        elif step.kind == "all_gather":
            function, arguments = (
                collectives.all_gather,
                (step.dim, axis, size, self.coordinate(axis), step.grad_sums),
            )
        elif step.kind == "reduce_scatter":
            function, arguments = collectives.reduce_scatter, (step.dim, axis, size)
        elif step.kind == "slice":
            function, arguments = collectives.slice_own, (step.dim, axis, size, self.coordinate(axis))
        else:
            function, arguments = collectives.all_to_all, (step.dim, step.to_dim, axis, size)
        return self.graph.call_function(function, (value, *arguments))

    def call(self, node: Node) -> None:
        if node.target is operator.getitem:
            source = node.args[0]
            assert isinstance(source, Node)
            fresh = self.graph.call_function(operator.getitem, (self.local[source], node.args[1]))
        else:
            fresh = self._op(node)
        fresh.meta["source"] = node  # which op of the program it stands for: `passes/check.py` reads it
        self._describe(fresh, node)
        self.local[node] = fresh

    def _op(self, node: Node) -> Node:
        op = self.work.ops[value_name(self.block.name, node.name)]
        sharded = self.work.sharded[op.name]
        operands = []
        for operand, (value, use) in zip(operand_nodes(node), self.work.op_uses(op), strict=True):
            is_state = self.work.problem.values[value].state
            operands.append(
                self.form(operand, use, delegated=self.work.state_sums.get(value, ()) if is_state else ())
            )
        if op.rule is None or sharded is None:
            return self._plain(node, operands, node.args)
        if op.rule.lowering == "cross_entropy" and self.is_loss(node):
            return self._special(node, op, sharded, operands)  # also where it is whole: for its label count
        if not sharded.by_factor:
            return self._plain(node, operands, node.args)
        split_special = {
            factor: axes
            for factor, axes in sharded.by_factor.items()
            if factor in op.rule.special or PAIR in factor
        }
        if split_special:
            return self._special(node, op, sharded, operands)
        args = node.args
        if op.rule.shape_arg is not None or op.rule.count_args:
            info = node_info(node)
            local = (
                ()
                if info is None
                else sharded.results[0].local_shape(info.shape, self.work.mesh, where=op.name)
            )
            args = localize(args, op.rule, local, op.rule.counts(sharded, self.work.mesh.sizes))
        result = self._plain(node, operands, args)
        if op.rule.average:
            ways = op.rule.average_ways(sharded, self.work.mesh.sizes)
            if ways > 1:
                result = self.graph.call_function(collectives.scaled_sum, (result, ways))
        return result

    def _plain(self, node: Node, operands: list[Node], args: tuple[Any, ...]) -> Node:
        """The op itself on `operands`, which stand for the tensors of args and kwargs in order."""
        remaining = iter(operands)
        new_args = map_arg(args, lambda _: next(remaining))
        new_kwargs = map_arg(dict(node.kwargs), lambda _: next(remaining))
        assert callable(node.target)
        fresh = self.graph.call_function(node.target, new_args, new_kwargs)
        fresh.meta["stack_trace"] = node.meta.get("stack_trace")
        return fresh

    # ---- ops whose split needs their own lowering ----------------------------------------------------------

    def _special(self, node: Node, op: Op, sharded: Sharded, operands: list[Node]) -> Node:
        assert op.rule is not None
        lowering = LOWERINGS.get(op.rule.lowering or "")
        if lowering is None:
            raise ShardingError(
                f"no lowering {op.rule.lowering!r} for a split of {dict(sharded.by_factor)}", where=op.name
            )
        return lowering(self, node, op, sharded, operands)

    @property
    def mesh(self) -> Mesh:
        return self.work.mesh

    def place(self, axes: Sequence[str]) -> tuple[Node, int]:
        """This rank's place among the pieces that `axes`, major to minor, make of one loop; and how many there are."""
        place, ways = self.coordinate(axes[0]), self.mesh.sizes[axes[0]]
        for axis in axes[1:]:
            coordinate, size = self.coordinate(axis), self.mesh.sizes[axis]
            place = self.graph.call_function(collectives.place_of, (place, size, coordinate))
            ways *= size
        return place, ways

    def is_loss(self, node: Node) -> bool:
        """Whether the program's loss is this node itself."""
        return any(
            call.block == self.block.name
            and self.work.loss in call.outputs
            and self.block.outputs[call.outputs.index(self.work.loss)] == node.name
            for call in self.work.program.calls
        )

    def count_labels(self, count: Node) -> None:
        self.count = count
        self.work.count_block = self.block.name

    def finish(self) -> RankBlock:
        block = self.block
        outputs = []
        for name in block.outputs:
            node = block.node(name)
            outputs.append(self.form(node, Use(self._interface(node))))
        if self.count is not None:
            outputs.append(self.count)
        self.graph.output(tuple(outputs))
        module = GraphModule(torch.nn.Module(), self.graph)
        names = (*block.outputs, "label count") if self.count is not None else block.outputs
        return RankBlock(
            block.name, module, tuple(reversed(self.coordinates)), block.state, block.inputs, names
        )

    def _interface(self, node: Node) -> Sharding:
        """The sharding in which this block's output is handed on: what the blocks that take it expect, whole for
        what the program returns."""
        value = self.work.problem.values[value_name(self.block.name, node.name)]
        for name, other in self.work.problem.values.items():
            if other.interface == value.interface and self._is_input(name):
                return self.work.value_sharding(name)
        return Sharding.whole(len(value.info.shape))

    def _is_input(self, name: str) -> bool:
        block, _, node = name.partition("/")
        return node in self.work.program.blocks[block].inputs


def _format(graph: Graph) -> Iterator[str]:
    for node in graph.nodes:
        if node.op == "output":
            yield f"return {node.args[0]}"
            continue
        sharding, info = node.meta.get("sharding"), node.meta.get("global")
        shape = f" {sharding.format(info.shape)}" if sharding is not None and info is not None else ""
        if node.op == "placeholder":
            yield f"%{node.name}:{shape or ' coordinate'}"
        else:
            name = getattr(node.target, "__name__", str(node.target))
            arguments = ", ".join(
                [*map(str, node.args), *(f"{key}={value}" for key, value in node.kwargs.items())]
            )
            yield f"%{node.name}:{shape} = {name}({arguments})"
