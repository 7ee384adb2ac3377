"""Roles: what a model's parameters are, by what its graph does with them.

In:  the blocks and calls of a RankProgram.
Out: `Roles`: the names of the states that are embeddings, heads, routers, and matrices of products at all.

    embedding(%wte, %ids)                                wte      embedding
    cross_entropy(linear(%norm, %lm_head), %labels)      lm_head  head: the product that the loss looks at
    topk(softmax(linear(%x, %gate)))                     gate     router: the product that a choice is made by

Names differ from model to model, uses do not. Optimizers (Muon is for the matrices between embedding and head) and fp8
(which leaves head and routers alone) go by this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from autopar import collectives, functional
from autopar.passes.lower import RankProgram

aten = torch.ops.aten

EMBEDDINGS = frozenset({aten.embedding.default, collectives.vocab_embedding})
LOSSES = frozenset(
    {collectives.split_cross_entropy, functional.cross_entropy, aten.cross_entropy_loss.default}
)
CHOICES = frozenset({aten.topk.default, aten.argmax.default})
# A product and which of its operands may be a parameter: the second for `linear` and `mm` as models use them.
PRODUCTS = frozenset(
    {aten.linear.default, aten.mm.default, aten.matmul.default, aten.bmm.default, aten.addmm.default}
)


@dataclass(frozen=True)
class Roles:
    """Names of states (of a packed parameter: of its pieces). `matrices`: those that a product takes, heads and routers
    among them."""

    embeddings: frozenset[str] = frozenset()
    heads: frozenset[str] = frozenset()
    routers: frozenset[str] = frozenset()
    matrices: frozenset[str] = frozenset()

    def __or__(self, other: Roles) -> Roles:
        return Roles(
            self.embeddings | other.embeddings,
            self.heads | other.heads,
            self.routers | other.routers,
            self.matrices | other.matrices,
        )


def roles(*programs: RankProgram) -> Roles:
    """The roles of the states of a program, or of all stages of one."""
    found = Roles()
    for program in programs:
        for name, block in program.blocks.items():
            graph = block.graph.graph
            products = [node for node in graph.nodes if node.target in PRODUCTS]
            heads, routers = products_before(graph, LOSSES), products_before(graph, CHOICES)
            tables = [
                node.args[0]
                for node in graph.nodes
                if node.target in EMBEDDINGS and isinstance(node.args[0], Node)
            ]
            for call in (call for call in program.calls if call.block == name):
                bound = dict(zip(block.state, call.state, strict=True))
                found |= Roles(
                    _names(tables, bound),
                    _names(_factors(heads), bound),
                    _names(_factors(routers), bound),
                    _names(_factors(products), bound),
                )
    return found


def products_before(graph: Graph, targets: frozenset[object]) -> list[Node]:
    """The products whose results reach a node of `targets` without another product between."""
    found: dict[Node, None] = {}
    seen: set[Node] = set()
    front = [
        node.args[0] for node in graph.nodes if node.target in targets and isinstance(node.args[0], Node)
    ]
    while front:
        node = front.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.target in PRODUCTS:
            found[node] = None
        elif node.op == "call_function":
            front += node.all_input_nodes
    return list(found)


def origin(node: Node) -> Node:
    """The node of which this one is another form (gathered, cast, transposed): where functions of one tensor began."""
    while node.op == "call_function":
        tensors = [each for each in node.all_input_nodes if not each.name.startswith("coordinate_")]
        if len(tensors) != 1:
            break
        node = tensors[0]
    return node


def _factors(products: Iterable[Node]) -> Iterator[Node]:
    for product in products:
        yield from product.all_input_nodes


def _names(nodes: Iterable[Node], bound: dict[str, str]) -> frozenset[str]:
    """The states that these nodes are, of one call."""
    names = (origin(node).name for node in nodes)
    return frozenset(bound[name] for name in names if name in bound)
