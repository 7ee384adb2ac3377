"""Problem from Program: what the placement search sees.

In:  a Program with named axes.
Out: one `Op` per node of each unique block, weighted by how often its block is called, and one `Value` per tensor.
     Values that calls hand to each other, and parameters that several blocks read, share an interface.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch.fx import Node

from autopar.passes.axes import Axes
from autopar.problem import Op, Problem, Value
from autopar.program import Block, Program, batch_of, node_info, op_name
from autopar.rules import operand_nodes

# Ops that only describe their operand anew: no bytes move.
FREE = frozenset(
    f"aten.{name}"
    for name in (
        "view", "reshape", "_unsafe_view", "transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "slice",
        "select", "alias", "detach", "split", "split_with_sizes", "chunk", "unbind", "flatten", "unflatten", "movedim",
    )
)  # fmt: skip


def value_name(block: str, node: str) -> str:
    return f"{block}/{node}"


def build_problem(program: Program, axes: Axes) -> Problem:
    """The Problem of a Program at the batch it was captured with."""
    interfaces = _interfaces(program)
    gradients = _gradients(program)
    sources = {value_name(*place) for place in _source_inputs(program)}
    values: dict[str, Value] = {}
    ops: list[Op] = []
    times = program.multiplicity
    for block in program.blocks.values():
        for node in block.graph.graph.nodes:
            info = node_info(node)
            if info is None:
                continue
            name = value_name(block.name, node.name)
            values[name] = Value(
                name,
                info,
                axes.dims[block.name, node.name],
                state=node.name in block.state,
                gradient=name in gradients,
                source=name in sources,
                interface=interfaces.get(name),
            )
        for node in block.op_nodes:
            if node.target is not operator.getitem:
                ops.append(_op(block, node, axes, times[block.name]))
    outputs = {value: call for call in program.calls for value in call.outputs}
    finals = []
    for value in program.outputs.values():
        call = outputs[value]
        finals.append(value_name(call.block, program.blocks[call.block].outputs[call.outputs.index(value)]))
    return Problem(values, tuple(ops), tuple(dict.fromkeys(finals)), _batch(program, axes))


def _batch(program: Program, axes: Axes) -> int:
    sizes = axes.sizes.get("batch", frozenset())
    found = batch_of(program.inputs)
    return max(sizes, default=1) if found is None else found


def _op(block: Block, node: Node, axes: Axes, times: int) -> Op:
    place = (block.name, node.name)
    return Op(
        name=value_name(*place),
        kind=op_name(node),
        operands=tuple(value_name(block.name, operand.name) for operand in operand_nodes(node)),
        results=tuple(value_name(block.name, name) for name in _result_nodes(node)),
        rule=axes.rules.get(place),
        times=times,
        free=op_name(node) in FREE,
        logical=axes.factors.get(place, {}),
    )


def _result_nodes(node: Node) -> Iterator[str]:
    """The node itself, or for an op with several results its getitem nodes (an unused result has a made-up name)."""
    results = node.meta.get("val")
    if not isinstance(results, (list, tuple)):
        yield node.name
        return
    items = {int(user.args[1]): user.name for user in node.users if user.target is operator.getitem}  # type: ignore[arg-type]
    for index in range(len(results)):
        yield items.get(index, f"{node.name}#{index}")


def _interfaces(program: Program) -> dict[str, str]:
    """Value name -> interface name, for block inputs and outputs, and for state read in several places."""
    parent: dict[str, str] = {}

    def find(item: str) -> str:
        parent.setdefault(item, item)
        root = item
        while parent[root] != root:
            root = parent[root]
        while parent[item] != root:  # the way there is short next time
            parent[item], item = root, parent[item]
        return root

    def join(one: str, other: str) -> None:
        parent[find(one)] = find(other)

    members: dict[str, bool] = {}
    for call in program.calls:
        block = program.blocks[call.block]
        for node, state in zip(block.state, call.state, strict=True):
            name = value_name(call.block, node)
            join(name, f"state {state}")
            members[name] = True
        for node, value in (
            *zip(block.inputs, call.inputs, strict=True),
            *zip(block.outputs, call.outputs, strict=True),
        ):
            name = value_name(call.block, node)
            join(name, f"value {value}")
            members[name] = False
    groups: dict[str, list[str]] = {}
    for name in members:
        groups.setdefault(find(name), []).append(name)
    return {
        name: group[0] for group in groups.values() for name in group if len(group) > 1 or not members[name]
    }


def _source_inputs(program: Program) -> Iterator[tuple[str, str]]:
    for call in program.calls:
        for node, value in zip(program.blocks[call.block].inputs, call.inputs, strict=True):
            if value in program.inputs:
                yield call.block, node


def _gradients(program: Program) -> set[str]:
    """Names of the values through which a gradient flows: floats that depend on a trainable parameter."""
    found: set[str] = set()
    flowing: set[str] = {name for name, info in program.state.items() if info.trainable}
    walked: set[str] = set()
    for _ in range(2):  # twice: a block's inputs are those of any of its calls
        for call in program.calls:
            block = program.blocks[call.block]
            into = {
                value_name(block.name, node)
                for node, value in zip(
                    (*block.state, *block.inputs), (*call.state, *call.inputs), strict=True
                )
                if value in flowing
            }
            # a call through which no more flows than through those before it shows nothing new
            if block.name not in walked or not into <= found:
                walked.add(block.name)
                _walk(block, into, found)
            for node_name, value in zip(block.outputs, call.outputs, strict=True):
                if value_name(block.name, node_name) in found:
                    flowing.add(value)
    return found


def _walk(block: Block, into: set[str], found: set[str]) -> None:
    """Add to `found` what a gradient flows through in one block, when it flows into `into`."""
    for node in block.graph.graph.nodes:
        name = value_name(block.name, node.name)
        if node.op == "placeholder":
            flows = name in into or name in found
        else:
            flows = any(value_name(block.name, source.name) in found for source in node.all_input_nodes)
        if flows:
            info = node_info(node)
            if info is None or info.is_float:
                found.add(name)
