"""Ops whose split needs more than the op on pieces: what the lowering writes in their place.

In:  an op's node, its rule under the choice made, its operands in the forms the rule asks for.
Out: the node of the local result. One function per `Rule.lowering`, listed in `LOWERINGS`; the functions that the
     lowered graph calls are in `autopar/collectives.py` and the `*_steps.py` files beside it.

    embedding(%weight [_@tp, _], %ids)  ->  vocab_embedding(%weight, %ids, %coordinate_tp): a partial sum
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autopar import attention_steps, collectives, expert_steps, index_steps, norm_steps
from autopar.errors import ShardingError
from autopar.mesh import Mesh
from autopar.problem import Op
from autopar.rules.attention import RINGS
from autopar.rules.rule import PAIR, Sharded


class Builder(Protocol):
    """What a lowering sees of the block that is being built."""

    graph: Graph

    @property
    def mesh(self) -> Mesh: ...

    def coordinate(self, axis: str) -> Node:
        """The placeholder of this rank's place on an axis."""

    def place(self, axes: Sequence[str]) -> tuple[Node, int]:
        """This rank's place among the pieces that `axes`, major to minor, make of one loop; and how many there are."""

    def is_loss(self, node: Node) -> bool:
        """Whether the program's loss is this node itself."""

    def count_labels(self, count: Node) -> None:
        """Hand out the number of labels that the loss is a mean over."""


Lowering = Callable[[Builder, Node, Op, Sharded, Sequence[Node]], Node]


def embedding(build: Builder, node: Node, op: Op, sharded: Sharded, operands: Sequence[Node]) -> Node:
    """Rows that live elsewhere read as zero: the result is a partial sum."""
    assert op.rule is not None
    (vocabulary,) = op.rule.special
    place, _ = build.place(sharded.by_factor[vocabulary])
    return build.graph.call_function(collectives.vocab_embedding, (*operands, place, *node.args[2:]))


def cross_entropy(build: Builder, node: Node, op: Op, sharded: Sharded, operands: Sequence[Node]) -> Node:
    """The vocabulary is reduced over inside; over tokens the loss is a partial sum, divided by the count of all."""
    assert op.rule is not None
    vocabulary = op.rule.operands[0][-1][0]
    vocabulary_axes = sharded.by_factor.get(vocabulary, ())
    token_axes = [axis for factor, axes in sharded.by_factor.items() if factor != vocabulary for axis in axes]
    options = list(node.args[2:])
    place, ways = build.place(vocabulary_axes) if vocabulary_axes else (None, 1)
    both = build.graph.call_function(
        collectives.split_cross_entropy,
        (*operands, *options, token_axes, list(vocabulary_axes), ways, place),
    )
    if options[1] == "mean" and build.is_loss(node):
        build.count_labels(build.graph.call_function(operator.getitem, (both, 1)))
    return build.graph.call_function(operator.getitem, (both, 0))


def causal_attention(build: Builder, node: Node, op: Op, sharded: Sharded, operands: Sequence[Node]) -> Node:
    """The rows that live here against all keys."""
    assert op.rule is not None
    (rows,) = op.rule.special
    place, ways = build.place(sharded.by_factor[rows])
    options = {key: value for key, value in node.kwargs.items() if key in ("scale", "enable_gqa")}
    return build.graph.call_function(collectives.causal_attention, (*operands[:3], ways, place), options)


def attention(build: Builder, node: Node, op: Op, sharded: Sharded, operands: Sequence[Node]) -> Node:
    """Pieces of the rows, rows and keys around a ring, heads finer than the keys' heads: all may be combined."""
    assert op.rule is not None
    if op.kind != "autopar.attention":
        return causal_attention(build, node, op, sharded, operands)
    remaining = iter(operands)
    args = map_arg(node.args, lambda _: next(remaining))
    options = dict(map_arg(dict(node.kwargs), lambda _: next(remaining)))
    way = next((way for way in RINGS if way in sharded.by_factor), None)
    ring = sharded.by_factor[way] if way else ()
    if len(ring) > 1:
        raise ShardingError(f"{op.kind}: keys travel around a ring of one axis, not of {ring}", where=op.name)
    query = sharded.uses[0].sharding.dims
    rows = query[-2] if ring or "q" in op.rule.special else ()
    if rows:
        options |= {"row_groups": list(rows), "row_place": build.place(rows)[0]}
    if ring:
        mask = op.rule.operands[3] if node.args[3:4] and node.args[3] is not None else ()
        options["ring_group"] = ring[0]
        if way != RINGS[0]:
            options["zigzag"] = True
        options["key_mask"] = mask[-1:] == (("k",),) and mask[-2:-1] in ((), ((),))
    for joint in op.rule.joint:
        if joint in sharded.by_factor:
            place, ways = build.place(sharded.by_factor[joint])
            options |= {"head_ways": ways, "head_place": place}
    return build.graph.call_function(attention_steps.split_attention, args, options)


def batch_norm(build: Builder, node: Node, op: Op, sharded: Sharded, operands: Sequence[Node]) -> Node:
    """Statistics are summed over the axes that split the batch or the space."""
    assert op.rule is not None
    axes = [axis for factor, axes in sharded.by_factor.items() if factor in op.rule.special for axis in axes]
    remaining = iter(operands)
    args = map_arg(node.args, lambda _: next(remaining))
    tensors, momentum, eps = args[:-3], args[-2], args[-1]
    if len(tensors) == 3:  # no running statistics
        tensors = (*tensors, None, None)
    ways = build.mesh.size(*axes)
    return build.graph.call_function(norm_steps.batch_norm, (*tensors, momentum, eps, axes, ways))


def experts(build: Builder, node: Node, op: Op, sharded: Sharded, operands: Sequence[Node]) -> Node:
    """Along an axis of experts alone each rank adds up the slots of its experts; along one of tokens and experts slots
    are sent to their experts and back. Pieces of experts nest in the order of the mesh."""
    remaining = iter(operands)
    args = map_arg(node.args, lambda _: next(remaining))
    apart = sharded.by_factor.get("e", ())
    paired = [axis for factor, axes in sharded.by_factor.items() if PAIR in factor for axis in axes]
    levels = [
        (axis, build.mesh.sizes[axis], build.coordinate(axis), axis in paired)
        for axis in build.mesh.names
        if axis in apart or axis in paired
    ]
    addends = [(axis, build.mesh.sizes[axis]) for axis in sharded.by_factor.get("f", ())]
    return build.graph.call_function(expert_steps.split_experts, (*args, levels, addends))


def masked_scatter(build: Builder, node: Node, op: Op, sharded: Sharded, operands: Sequence[Node]) -> Node:
    """The elements of the source that the ranks before take are counted first."""
    assert op.rule is not None
    (first,) = op.rule.special
    axes = sharded.by_factor[first]
    place, ways = build.place(axes)
    return build.graph.call_function(index_steps.masked_scatter, (*operands, place, list(axes), ways))


LOWERINGS: Mapping[str, Lowering] = {
    "experts": experts,
    "embedding": embedding,
    "cross_entropy": cross_entropy,
    "attention": attention,
    "causal_attention": attention,
    "window_attention": attention,
    "batch_norm": batch_norm,
    "masked_scatter": masked_scatter,
}
