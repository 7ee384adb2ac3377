"""Logical axes: which dims of all tensors of a Program are split together, and what people call them.

In:  a Program.
Out: the same Program with `meta["axes"]` on every node (a name per dim, "" where nothing is known), and an `Axes`
     table: (block, node, factor) -> name. Two dims are of one axis when some op has them as the leading part of one
     loop, or when one is handed on as the other.

    %linear: float32[4, 16, 128] (batch sequence ffn)
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.program import Program, batch_dim, batch_of, node_info
from autopar.rules import operand_nodes, rule_of_node
from autopar.rules.rule import Dims, Rule

Item = tuple[str, ...]  # ("dim", block, node, index) or ("factor", block, node, factor)

# Where an axis could have several names, the first of these wins.
PRIORITY = ("batch", "heads", "vocab", "sequence", "hidden", "head_dim", "ffn", "expert", "channels")


class Union:
    """Disjoint sets, by path halving."""

    def __init__(self) -> None:
        self.parent: dict[Item, Item] = {}

    def find(self, item: Item) -> Item:
        parent = self.parent
        parent.setdefault(item, item)
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    def join(self, one: Item, other: Item) -> None:
        self.parent[self.find(one)] = self.find(other)


@dataclass(frozen=True)
class Axes:
    """`rules`: (block, node) -> rule of every op that has one. `dims`: (block, node) -> name per dim.
    `factors`: (block, node) -> factor -> name. `sizes`: name -> the sizes met."""

    rules: Mapping[tuple[str, str], Rule]
    dims: Mapping[tuple[str, str], tuple[str, ...]]
    factors: Mapping[tuple[str, str], Mapping[str, str]]
    sizes: Mapping[str, frozenset[int]]


def name_axes(program: Program) -> tuple[Program, Axes]:
    """Discover the logical axes and write their names into the nodes' meta (in place, shared graphs)."""
    union = Union()
    hints: list[tuple[Item, str]] = []
    rules: dict[tuple[str, str], Rule] = {}
    for block in program.blocks.values():
        for node in block.op_nodes:
            rule = rule_of_node(node)
            if rule is None:
                continue
            rules[block.name, node.name] = rule
            for operand, dims in zip(operand_nodes(node), rule.operands, strict=True):
                _join_dims(union, block.name, node.name, operand.name, dims)
            if node_info(node) is not None:
                _join_dims(union, block.name, node.name, node.name, rule.results[0])
            hints += [
                (("factor", block.name, node.name, factor), name) for factor, name in rule.logical.items()
            ]
            hints += [
                (("factor", block.name, node.name, factor), "contracted")
                for factor in rule.dropped
                if rule.flops_per_point > 0 and factor in rule.splittable()
            ]
        for node in block.op_nodes:  # getitem: results of an op with several
            if node.target is operator.getitem:
                source, index = node.args
                parent = rules.get((block.name, str(source)))
                if parent is not None and isinstance(index, int):
                    _join_dims(union, block.name, str(source), node.name, parent.results[index])
    _join_interfaces(program, union)
    batch = batch_of(program.inputs)
    for name, info in program.inputs.items():
        first = batch_dim(name, info.shape)
        for dim, label in enumerate(("batch", "sequence")[: len(info.shape)], first):
            if dim == first and info.shape[dim] != batch:
                hints.append((("value", name, str(dim)), "patches"))  # rows of all images, one after another
            elif dim == first or (not info.is_float and len(info.shape) == 2):
                hints.append((("value", name, str(dim)), label))
    names = _choose_names(program, union, hints)
    return _annotated(program, union, names, rules)


def _join_dims(union: Union, block: str, op: str, value: str, dims: Dims) -> None:
    for index, dim in enumerate(dims):
        if dim:
            union.join(("dim", block, value, str(index)), ("factor", block, op, dim[0]))


def _join_interfaces(program: Program, union: Union) -> None:
    """Dims of what is handed from call to call, and of state that several calls read, are of one axis."""
    for call in program.calls:
        block = program.blocks[call.block]
        pairs = [*zip(block.state, call.state, strict=True), *zip(block.inputs, call.inputs, strict=True)]
        for node_name, value in (*pairs, *zip(block.outputs, call.outputs, strict=True)):
            info = node_info(block.node(node_name))
            for index in range(len(info.shape) if info else 0):
                union.join(("dim", block.name, node_name, str(index)), ("value", value, str(index)))


def _choose_names(program: Program, union: Union, hints: list[tuple[Item, str]]) -> dict[Item, str]:
    """Set representative -> name. Sets that want one name and have other sizes are told apart by a number, the
    largest first; sets of one size (an untied embedding and output head) share the name. So do all sets that are of the
    batch: what data ranks split is the batch of every part of a model, images in a row and sequences alike."""
    wishes: dict[Item, set[str]] = defaultdict(set)
    for item, name in hints:
        wishes[union.find(item)].add(name)
    sizes = _sizes(program, union)
    wanted: dict[str, list[Item]] = defaultdict(list)
    for root, names in wishes.items():
        known = [name for name in PRIORITY if name in names]
        others = sorted(names - set(PRIORITY) - {"contracted"})
        # What is contracted in one matmul, and has no other meaning, is the inner width of an MLP.
        name = known[0] if known else others[0] if others else "ffn"
        if max(sizes.get(root, {1})) > 1:
            wanted[name].append(root)
    chosen: dict[Item, str] = {}
    for name, roots in wanted.items():
        largest = sorted({max(sizes[root]) for root in roots}, reverse=True)
        for root in roots:
            number = 0 if name == "batch" else largest.index(max(sizes[root]))
            chosen[root] = name if number == 0 else f"{name}{number + 1}"
    return chosen


def _sizes(program: Program, union: Union) -> dict[Item, set[int]]:
    sizes: dict[Item, set[int]] = defaultdict(set)
    for block in program.blocks.values():
        for node in block.graph.graph.nodes:
            info = node_info(node)
            for index, size in enumerate(info.shape if info else ()):
                sizes[union.find(("dim", block.name, node.name, str(index)))].add(size)
    return sizes


def _annotated(
    program: Program, union: Union, names: Mapping[Item, str], rules: Mapping[tuple[str, str], Rule]
) -> tuple[Program, Axes]:
    dims: dict[tuple[str, str], tuple[str, ...]] = {}
    factors: dict[tuple[str, str], dict[str, str]] = {}
    sizes: dict[str, set[int]] = defaultdict(set)
    for block in program.blocks.values():
        for node in block.graph.graph.nodes:
            info = node_info(node)
            if info is None:
                continue
            found = tuple(
                names.get(union.find(("dim", block.name, node.name, str(i))), "")
                for i in range(len(info.shape))
            )
            dims[block.name, node.name] = node.meta["axes"] = found
    for (block_name, node_name), rule in rules.items():
        found_factors = {}
        for factor in rule.sizes:
            name = names.get(union.find(("factor", block_name, node_name, factor)), "")
            if name:
                found_factors[factor] = name
                if factor in rule.splittable():
                    sizes[name].add(rule.sizes[factor])
        factors[block_name, node_name] = found_factors
    return program, Axes(rules, dims, factors, {name: frozenset(found) for name, found in sizes.items()})


def describe(axes: Axes) -> Iterator[str]:
    """`heads 32 (8)`: every named axis with its sizes, largest first."""
    for name, sizes in sorted(axes.sizes.items()):
        yield f"{name} {', '.join(str(size) for size in sorted(sizes, reverse=True))}"
