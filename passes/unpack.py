"""Unpack: parameters that hold several matrices side by side become several states.

In:  a normalized graph, its state and its outputs.
Out: the same computation, where a packed parameter (fused query/key/value, gate and up, GPT-2's `c_attn`, Mamba's
     `in_proj`) is read as pieces, each with a placement of its own: a contiguous cut of the packed dim over a mesh
     axis would mix them.

    %y = linear(%x, %qkv)                     %q = linear(%x, %qkv[0:64])
    %q, %k, %v = split(%y, [64, 32, 32])      %k = linear(%x, %qkv[64:96]) ...

A range that is cut from a value (split, chunk, unbind, slice, select, narrow) is computed from ranges of what the
value is made of, back to a parameter: through every op whose factor rule has the dim as one loop of its own, through
reshapes where the range stays one, and through `cat` and grouped convolutions. A range of the parameter itself is
the shortest case. Interleaved packing (each head's q, k and v together) is no range and stays as it is: there the
heads are the leading loop already.

All or nothing: a parameter is cut only if everything that reads it takes ranges along one dim, equal or disjoint,
that leave nothing out; else it stays whole, and the nodes that read it as they were.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.program import Piece, StateInfo
from autopar.rules import localize, operand_nodes, rule_of_node
from autopar.rules.rule import Rule

aten = torch.ops.aten

MAX_PIECES = 12  # more are a loop over heads or experts, which one sharded tensor serves better
MAX_DEPTH = 24  # ops between a cut and the parameter

# Ops with several results, each a range of a dim: target -> (position of `dim`, its default).
_SPLITS: Mapping[object, int] = {
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.split_with_sizes_copy.default: 2,
    aten.chunk.default: 2,
    aten.tensor_split.sections: 2,
    aten.tensor_split.indices: 2,
    aten.unbind.int: 1,
}
_RESHAPES = {aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.flatten.using_ints}
# Position of `groups` in the arguments.
_CONVOLUTIONS: Mapping[object, int] = {
    aten.conv1d.default: 6,
    aten.conv2d.default: 6,
    aten.conv3d.default: 6,
    aten.convolution.default: 8,
}


@dataclass(frozen=True)
class _Cut:
    """A node that is `source` at [start, stop) of `dim`; with `drop`, of one index and without the dim."""

    source: Node
    dim: int
    start: int
    stop: int
    drop: bool = False


@dataclass
class _Work:
    """One graph while it is rewritten.

    `leaf`: slices of parameters -> their piece. `leaves`: nodes made here -> the slices of parameters they are made
    from. `replaced`: cuts -> the nodes that are to replace them. `known`: ranges that were asked for before.
    """

    graph: Graph
    parameters: Mapping[Node, str]
    others: frozenset[Node]  # buffers and constants
    leaf: dict[Node, Piece] = field(default_factory=dict)
    leaves: dict[Node, frozenset[Node]] = field(default_factory=dict)
    replaced: dict[Node, Node] = field(default_factory=dict)
    known: dict[tuple[Node, int, int, int], Node | None] = field(default_factory=dict)
    rules: dict[Node, Rule | None] = field(default_factory=dict)

    def ranged(self, node: Node, dim: int, start: int, stop: int, place: Node, depth: int) -> Node | None:
        """`node` at [start, stop) of `dim` without computing the rest, for a user at `place`; None if there is no
        way that ends at state."""
        node = self.replaced.get(node, node)
        if (start, stop) == (0, int(node.meta["val"].shape[dim])):
            return node
        if node in self.others:
            return self.insert(
                place, aten.slice.Tensor, (node, dim, start, stop), _resized(node, dim, stop - start)
            )
        if depth > MAX_DEPTH:
            return None
        key = (node, dim, start, stop)
        if key not in self.known:
            self.known[key] = _find_range(self, node, dim, start, stop, depth + 1)
        return self.known[key]

    def insert(
        self,
        place: Node,
        target: Any,
        args: Sequence[Any],
        shape: Sequence[int],
        kwargs: Mapping[str, Any] | None = None,
    ) -> Node:
        """A new node just before `place`, of its module."""
        with self.graph.inserting_before(place):
            fresh = self.graph.call_function(target, tuple(args), dict(kwargs or {}))
        like = args[0] if target is aten.slice.Tensor else place
        fresh.meta = {**place.meta, "val": like.meta["val"].new_empty(list(shape))}
        made = [self.leaves[operand] for operand in fresh.all_input_nodes if operand in self.leaves]
        self.leaves[fresh] = frozenset().union(*made)
        return fresh


def _resized(node: Node, dim: int, size: int) -> list[int]:
    """The shape of a node with another size of one dim."""
    shape = [int(length) for length in node.meta["val"].shape]
    return [*shape[:dim], size, *shape[dim + 1 :]]


def unpack(
    graph: Graph,
    placeholders: Mapping[Node, str],
    state: Mapping[str, StateInfo],
    outputs: set[Node],
    whole: Collection[str] = (),
) -> tuple[dict[Node, str], dict[str, StateInfo]]:
    """Rewrite `graph` in place, as far as `outputs` need it. Returns placeholders and state, with packed parameters
    replaced by their pieces; the parameters in `whole` stay as they are."""
    kinds = {node: state[name].kind for node, name in placeholders.items()}
    work = _Work(
        graph,
        {
            node: name
            for node, name in placeholders.items()
            if kinds[node] == "parameter" and name not in whole
        },
        frozenset(node for node, kind in kinds.items() if kind != "parameter"),
    )
    for node in list(graph.nodes):
        cut = cut_of(node)
        if cut is not None and node not in outputs:
            found = _of_cut(work, node, cut)
            if found is not None and work.leaves.get(found):
                work.replaced[node] = found
    _keep_what_fits(work, outputs)
    pieces = _apply(work, state, outputs)
    packed = {piece.parameter for _, piece in pieces}
    if not packed:
        return dict(placeholders), dict(state)
    new_placeholders = {node: name for node, name in placeholders.items() if name not in packed}
    new_placeholders |= {node: piece.name for node, piece in pieces}
    new_state: dict[str, StateInfo] = {}
    for name, info in state.items():
        if name not in packed:
            new_state[name] = info
        for node, piece in pieces:
            if piece.parameter == name:
                shape = tuple(int(size) for size in node.meta["val"].shape)
                new_state[piece.name] = replace(info, shape=shape, piece=piece)
    return new_placeholders, new_state


def with_unread_pieces(state: Mapping[str, StateInfo]) -> frozenset[str]:
    """The parameters of which `state` has some pieces and not all."""
    read: dict[str, int] = {}
    size: dict[str, int] = {}
    for info in state.values():
        if info.piece is not None:
            piece = info.piece
            read[piece.parameter] = read.get(piece.parameter, 0) + piece.stop - piece.start
            size[piece.parameter] = piece.shape[piece.dim]
    return frozenset(name for name, count in read.items() if count < size[name])


# ---- cuts ----------------------------------------------------------------------------------------------------------


def cut_of(node: Node) -> _Cut | None:
    """The range that a node takes of another, if it is one (and not all of it)."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        return _split_part(node)
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or not isinstance(source.meta.get("val"), torch.Tensor):
        return None
    shape = source.meta["val"].shape
    if node.target is aten.slice.Tensor:
        dim = int(_argument(node, 1, "dim", 0)) % len(shape)
        start, step = _argument(node, 2, "start", None) or 0, _argument(node, 4, "step", 1)
        start = max(start + shape[dim], 0) if start < 0 else min(start, shape[dim])
        length = int(node.meta["val"].shape[dim])
        if step != 1 or length in (0, shape[dim]):
            return None
        return _Cut(source, dim, int(start), int(start) + length)
    if node.target is aten.narrow.default:
        dim, start = int(_argument(node, 1, "dim", 0)) % len(shape), int(_argument(node, 2, "start", 0))
        start, length = start % max(shape[dim], 1), int(_argument(node, 3, "length", 0))
        return _Cut(source, dim, start, start + length) if 0 < length < shape[dim] else None
    if node.target is aten.select.int:
        dim = int(_argument(node, 1, "dim", 0)) % len(shape)
        index = int(_argument(node, 2, "index", 0)) % shape[dim]
        return _Cut(source, dim, index, index + 1, drop=True) if shape[dim] > 1 else None
    return None


def _split_part(node: Node) -> _Cut | None:
    split, index = node.args
    if not isinstance(split, Node) or split.target not in _SPLITS or not isinstance(index, int):
        return None
    source = split.args[0]
    assert isinstance(source, Node)
    shape, drop = source.meta["val"].shape, split.target is aten.unbind.int
    dim = int(_argument(split, _SPLITS[split.target], "dim", 0)) % len(shape)
    sizes = [1 if drop else int(value.shape[dim]) for value in split.meta["val"]]
    start = sum(sizes[:index])
    if sizes[index] in (0, shape[dim]):
        return None
    return _Cut(source, dim, start, start + sizes[index], drop)


def _argument(node: Node, index: int, name: str, default: Any) -> Any:
    return node.args[index] if index < len(node.args) else node.kwargs.get(name, default)


# ---- ranges, back to parameters ------------------------------------------------------------------------------------


def _of_cut(work: _Work, node: Node, cut: _Cut) -> Node | None:
    """What a cut takes, computed from ranges."""
    found = work.ranged(cut.source, cut.dim, cut.start, cut.stop, node, 0)
    if found is None or not cut.drop:
        return found
    shape = _resized(found, cut.dim, 1)
    del shape[cut.dim]
    return work.insert(node, aten.select.int, (found, cut.dim, 0), shape)


def _find_range(work: _Work, node: Node, dim: int, start: int, stop: int, depth: int) -> Node | None:
    if node in work.leaf:
        piece, source = work.leaf[node], node.args[0]
        assert isinstance(source, Node)
        if piece.dim != dim:
            return None
        return work.ranged(source, dim, piece.start + start, piece.start + stop, node, depth)
    if node in work.parameters:
        return _leaf(work, node, dim, start, stop)
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    cut = cut_of(node)
    if cut is not None:
        return _range_of_cut(work, node, cut, dim, start, stop, depth)
    if node.target in _RESHAPES:
        return _reshaped(work, node, dim, start, stop, depth)
    if node.target is aten.cat.default and dim == _argument(node, 1, "dim", 0) % node.meta["val"].dim():
        return _concatenated(work, node, dim, start, stop, depth)
    if node.target in _CONVOLUTIONS and dim == 1 and _groups(node) > 1:
        return _grouped_convolution(work, node, start, stop, depth)
    return _by_rule(work, node, dim, start, stop, depth)


def _leaf(work: _Work, node: Node, dim: int, start: int, stop: int) -> Node:
    """A slice of a parameter: a piece to be."""
    shape = tuple(int(size) for size in node.meta["val"].shape)
    with work.graph.inserting_after(node):
        fresh = work.graph.call_function(aten.slice.Tensor, (node, dim, start, stop))
    fresh.meta = {"val": node.meta["val"].new_empty(_resized(node, dim, stop - start))}
    work.leaf[fresh] = Piece(work.parameters[node], dim, start, stop, shape)
    work.leaves[fresh] = frozenset([fresh])
    return fresh


def _range_of_cut(
    work: _Work, node: Node, cut: _Cut, dim: int, start: int, stop: int, depth: int
) -> Node | None:
    """A range of a range: along the same dim one range of the source, along another the same cut of a range."""
    source_dim = dim + 1 if cut.drop and dim >= cut.dim else dim
    if source_dim == cut.dim:
        return work.ranged(cut.source, dim, cut.start + start, cut.start + stop, node, depth)
    found = work.ranged(cut.source, source_dim, start, stop, node, depth)
    if found is None:
        return None
    shape = _resized(node, dim, stop - start)
    if cut.drop:
        return work.insert(node, aten.select.int, (found, cut.dim, cut.start), shape)
    return work.insert(node, aten.slice.Tensor, (found, cut.dim, cut.start, cut.stop), shape)


def _reshaped(work: _Work, node: Node, dim: int, start: int, stop: int, depth: int) -> Node | None:
    """A range of a reshape's dim is a range of the dim that begins at the same place of the source."""
    source = node.args[0]
    assert isinstance(source, Node)
    before = [int(size) for size in source.meta["val"].shape]
    after = [int(size) for size in node.meta["val"].shape]
    ahead, inner = math.prod(after[:dim]), math.prod(after[dim + 1 :])
    led = [at for at, size in enumerate(before) if size > 1 and math.prod(before[:at]) == ahead]
    if not led or 0 in after:
        return None
    step = math.prod(before[led[0] + 1 :])
    if (start * inner) % step or (stop * inner) % step:
        return None
    found = work.ranged(source, led[0], start * inner // step, stop * inner // step, node, depth)
    if found is None:
        return None
    shape = _resized(node, dim, stop - start)
    return work.insert(node, aten.reshape.default, (found, list(shape)), shape)


def _concatenated(work: _Work, node: Node, dim: int, start: int, stop: int, depth: int) -> Node | None:
    parts, at = [], 0
    pieces = node.args[0]
    assert isinstance(pieces, (list, tuple))
    for piece in pieces:
        assert isinstance(piece, Node)
        size = int(piece.meta["val"].shape[dim])
        first, last = max(start - at, 0), min(stop - at, size)
        at += size
        if first < last:
            found = work.ranged(piece, dim, first, last, node, depth)
            if found is None:
                return None
            parts.append(found)
    if len(parts) == 1:
        return parts[0]
    return work.insert(node, aten.cat.default, (parts, dim), _resized(node, dim, stop - start))


def _groups(node: Node) -> int:
    return int(_argument(node, _CONVOLUTIONS[node.target], "groups", 1))


def _grouped_convolution(work: _Work, node: Node, start: int, stop: int, depth: int) -> Node | None:
    """Whole groups of a grouped convolution's output channels: a convolution of as many groups."""
    at, groups = _CONVOLUTIONS[node.target], _groups(node)
    x, weight, bias = node.args[0], node.args[1], _argument(node, 2, "bias", None)
    assert isinstance(x, Node)
    assert isinstance(weight, Node)
    channels, inputs = (int(size) for size in weight.meta["val"].shape[:2])
    each = channels // groups
    transposed = node.target is aten.convolution.default and _argument(node, 6, "transposed", False)
    unbatched = x.meta["val"].dim() != weight.meta["val"].dim()
    if transposed or unbatched or start % each or stop % each or len(node.args) <= at:
        return None
    first, last = start // each, stop // each
    wanted = [(x, 1, first * inputs, last * inputs), (weight, 0, start, stop)]
    wanted += [(bias, 0, start, stop)] if bias is not None else []
    parts = [work.ranged(operand, axis, low, high, node, depth) for operand, axis, low, high in wanted]
    if any(part is None for part in parts):
        return None
    args = (*parts, *([None] if bias is None else []), *node.args[3:at], last - first, *node.args[at + 1 :])
    return work.insert(node, node.target, args, _resized(node, 1, stop - start), node.kwargs)


def _by_rule(work: _Work, node: Node, dim: int, start: int, stop: int, depth: int) -> Node | None:
    """Where the dim is one loop of the op's own, a range of it is the op on that range of the operands that have it."""
    if node not in work.rules:
        work.rules[node] = rule_of_node(node)
    rule = work.rules[node]
    if rule is None or len(rule.results) != 1 or len(rule.results[0][dim]) != 1:
        return None
    factor = rule.results[0][dim][0]
    paired = {name for pair in rule.pairs for name in pair} | {name for _, name in rule.count_args}
    if factor not in rule.splittable() or factor in rule.special or factor in paired:
        return None
    operands = operand_nodes(node)
    ranges: list[Node] = []
    for operand, dims in zip(operands, rule.operands, strict=True):
        places = [at for at, names in enumerate(dims) if factor in names]
        found = operand if not places else work.ranged(operand, places[0], start, stop, node, depth)
        if found is None or len(places) > 1:
            return None
        ranges.append(found)
    if ranges == operands:  # a made value (zeros, a range of numbers): no operand has the dim
        return None
    shape, queue = _resized(node, dim, stop - start), iter(ranges)
    args, kwargs = _replaced((node.args, dict(node.kwargs)), set(operands), queue)
    return work.insert(node, node.target, localize(tuple(args), rule, shape), shape, kwargs)


def _replaced(value: Any, operands: set[Node], queue: Iterator[Node]) -> Any:
    """`value` with its operand nodes replaced by the next ones of `queue`, in order of appearance."""
    if isinstance(value, Node):
        return next(queue) if value in operands else value
    if isinstance(value, (list, tuple)):
        return type(value)([_replaced(item, operands, queue) for item in value])
    if isinstance(value, Mapping):
        return {key: _replaced(item, operands, queue) for key, item in value.items()}
    return value


# ---- all or nothing ------------------------------------------------------------------------------------------------


def _keep_what_fits(work: _Work, outputs: set[Node]) -> None:
    """Take back replacements until every parameter is read either whole or as disjoint pieces that are all of it."""
    while True:
        wrong: set[Node] = set()
        for name, demands in _demands(work, outputs).items():
            wrong |= _misfits(work, name, demands)
        if not wrong:
            return
        kept = {node: found for node, found in work.replaced.items() if not work.leaves[found] & wrong}
        assert len(kept) < len(work.replaced)
        work.replaced = kept


def _demands(work: _Work, outputs: set[Node]) -> dict[str, set[Node | None]]:
    """Parameter name -> the slices of it that are read; None stands for all of it."""
    found: dict[str, set[Node | None]] = {}
    for node in _needed(outputs, work.replaced):
        if node in work.leaf:
            found.setdefault(work.leaf[node].parameter, set()).add(node)
            continue
        for operand in node.all_input_nodes:
            if operand in work.parameters:
                found.setdefault(work.parameters[operand], set()).add(None)
    return found


def _misfits(work: _Work, name: str, demands: set[Node | None]) -> set[Node]:
    """The slices of one parameter that may not stay, given all that is read of it."""
    leaves = {node: work.leaf[node] for node in demands if node is not None}
    every = {node for node, piece in work.leaf.items() if piece.parameter == name}
    if not leaves:
        return set()
    if None in demands or len({piece.dim for piece in leaves.values()}) > 1:
        return every
    spans = sorted({(piece.start, piece.stop) for piece in leaves.values()})
    inside = {
        node
        for node, piece in leaves.items()
        if any(
            start <= piece.start and piece.stop <= stop and (start, stop) != (piece.start, piece.stop)
            for start, stop in spans
        )
    }
    if inside:  # a cut of a cut, where the larger one is read as well: it stays a cut
        return inside
    size = next(iter(leaves.values()))
    tiles = [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
    fits = tiles and spans[-1][1] == size.shape[size.dim] and 1 < len(spans) <= MAX_PIECES
    return set() if fits else every


def _needed(outputs: set[Node], replaced: Mapping[Node, Node]) -> set[Node]:
    """Every node that the outputs need, if the replacements were made."""

    def final(node: Node) -> Node:
        while node in replaced:
            node = replaced[node]
        return node

    needed: set[Node] = set()
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += [final(operand) for operand in node.all_input_nodes]
    return needed


def _apply(work: _Work, state: Mapping[str, StateInfo], outputs: set[Node]) -> list[tuple[Node, Piece]]:
    """Make the replacements that were kept. Returns new placeholders and their pieces, ordered."""
    needed = _needed(outputs, work.replaced)
    for node, found in work.replaced.items():
        node.replace_all_uses_with(found)
    used = [leaf for leaf in work.leaf if leaf in needed]
    by_piece: dict[Piece, Node] = {}
    for leaf in used:
        piece = work.leaf[leaf]
        if piece not in by_piece:
            source = leaf.args[0]
            assert isinstance(source, Node)
            with work.graph.inserting_after(source):
                fresh = work.graph.placeholder(_identifier(piece.name))
            fresh.meta = {**source.meta, "val": leaf.meta["val"]}
            by_piece[piece] = fresh
        leaf.replace_all_uses_with(by_piece[piece])
    order = {name: number for number, name in enumerate(state)}
    return sorted(
        ((node, piece) for piece, node in by_piece.items()),
        key=lambda item: (order[item[1].parameter], item[1].start),
    )


def _identifier(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)
