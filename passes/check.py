"""Check: that a RankProgram computes what the unsharded program does, by reading it.

In:  a RankProgram, as lowered.
Out: nothing; ShardingError naming block and node for the first thing that is wrong.

Nothing of the lowering's reasoning is used, only what it wrote: its collectives, the op that each node stands for,
and that op's rule. Two walks over every block.

    forward    each value is along every axis whole, split by a dim or a partial sum. Collectives change that as they
               say; an op's operands must lie as one choice of its rule says, and the results then do.
    backward   each gradient is complete along every axis, or one addend of it per rank. What an op does to it follows
               from the choice found; the backward of a collective must get the kind it is written for, and all users
               of a value must give the same.

So a partial sum that is never reduced, or twice, or used by an op that is not linear in it is found, and a gradient
likewise. What blocks hand each other must lie as the taker expects it, parameters must have their gradients as addends
over the very axes that the store sums over, and what the program returns is whole. Ranks have one graph, in which their
coordinates are tensors, so their collectives have one order; that every group named is an axis of the mesh is checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import Node

from autopar.errors import ShardingError
from autopar.passes.check_block import HINT, Axes, BlockCheck, fail, reached, returned, words
from autopar.passes.lower import RankBlock, RankProgram
from autopar.sharding import Sharding


def check(program: RankProgram) -> None:
    """Raise ShardingError for the first value or gradient that is not what the unsharded program has."""
    mesh = program.mesh
    live = tuple(axis for axis, size in mesh.axes if size > 1)
    flows, _ = flowing(program)
    outputs: dict[str, list[Sharding]] = {}
    for name, block in program.blocks.items():
        work = BlockCheck(block, mesh, live, flows[name])
        outputs[name] = work.forward()
        _check_gradients(program, block, work.backward(), live)
    _check_calls(program, outputs)


# ---- between blocks ----------------------------------------------------------------------------------------------


def flowing(program: RankProgram) -> tuple[dict[str, set[str]], set[str]]:
    """Through what a gradient flows back: block -> its placeholders, in any call; and names of values and state."""
    flows: dict[str, set[str]] = {name: set() for name in program.blocks}
    values = {name for name, layout in program.state.items() if layout.info.trainable}
    while True:
        before = sum(map(len, flows.values())) + len(values)
        for call in program.calls:
            block = program.blocks[call.block]
            names = zip((*block.state, *block.inputs), (*call.state, *call.inputs), strict=True)
            flows[call.block] |= {node for node, value in names if value in values}
            within = reached(block, flows[call.block])
            values |= {
                value for value, node in zip(call.outputs, returned(block), strict=True) if node in within
            }
        if sum(map(len, flows.values())) + len(values) == before:
            return flows, values


def _check_gradients(
    program: RankProgram, block: RankBlock, gradients: Mapping[Node, Axes], live: Sequence[str]
) -> None:
    """What arrives at the placeholders is what the store and the blocks before expect."""
    for node, addends in gradients.items():
        if node.name in block.inputs:
            if addends:
                fail(
                    block,
                    node,
                    f"its gradient leaves the block as addends over {words(addends)}",
                    "not summed",
                )
            continue
        position = block.state.index(node.name)
        for call in program.calls:
            if call.block != block.name:
                continue
            layout = program.state[call.state[position]]
            expected = frozenset(layout.grad_sums) & frozenset(live)
            if layout.info.trainable and addends != expected:
                fail(
                    block,
                    node,
                    f"the gradient of {call.state[position]} comes out as addends over {words(addends)}, "
                    f"the store sums it over {words(expected)}",
                    "",
                )


def _check_calls(program: RankProgram, outputs: Mapping[str, list[Sharding]]) -> None:
    values: dict[str, Sharding] = {
        **program.inputs,
        **{name: layout.sharding for name, layout in program.state.items()},
    }
    for call in program.calls:
        block = program.blocks[call.block]
        placeholders = {node.name: node for node in block.graph.graph.nodes if node.op == "placeholder"}
        names = zip((*block.state, *block.inputs), (*call.state, *call.inputs), strict=True)
        for name, value in names:
            node = placeholders[name]
            expected: Sharding = node.meta["sharding"]
            if value not in values:
                fail(block, node, f"{value} is taken before it is made", "")
            if values[value] != expected:
                fail(block, node, f"{value} arrives as {values[value]}", f"{expected} expected")
        values.update(zip(call.outputs, outputs[call.block], strict=True))
    for name, value in program.outputs.items():
        if values[value].axes:
            raise ShardingError(
                f"the program's output {name} ends as {values[value]}, expected whole",
                where=value,
                hint=HINT,
            )
