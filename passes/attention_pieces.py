"""Attention of pieces: rows that are cut into equal pieces, each of which looks at itself, as one batch of pieces.

In:  a normalized graph of a tower whose rows are the patches of all images, one after the other (Qwen2-VL and its kin),
     or the windows of them; how many patches an image has is a constant of the capture.

         split(q [1, h, (n p), d]), likewise k and v; attention(q_i, k_i, v_i) for each; cat

Out: the same rows by one attention, however many images there are:

         attention(q [n, h, p, d], k, v) -> [n, h, p, d] -> [1, h, (n p), d]

Then the rows can be split wherever n can be, by the data axes for instance: before, attention had to see all of them.
Pieces of different sizes stay as they are, and their rows whole.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from autopar import functional
from autopar.passes.normalize_ops import insert

aten = torch.ops.aten

_SPLITS = (aten.split_with_sizes.default, aten.split.Tensor)
_COPIES = (aten.clone.default, aten.contiguous.default)
_ROWS = 2  # the dim of [1, h, rows, d]


@dataclass(frozen=True)
class _Pieces:
    """What a `cat` puts together: attentions of all pieces of three tensors in their order."""

    attentions: tuple[Node, ...]
    sources: tuple[Node, Node, Node]  # query, key, value before they were cut


def pieces_as_batch(graph: Graph) -> None:
    """Rewrite `graph` in place."""
    for node in list(graph.nodes):
        if node.target is aten.cat.default:
            _rewrite(graph, node)


def _rewrite(graph: Graph, cat: Node) -> None:
    parts = cat.args[0]
    dim = cat.args[1] if len(cat.args) > 1 else 0
    if not isinstance(parts, (list, tuple)) or len(parts) < 2 or not isinstance(dim, int):
        return
    peeled = [_peeled(part) for part in parts if isinstance(part, Node)]
    turned = {turns for _, turns in peeled}
    if len(turned) != 1 or dim % 4 != (1 if turned == {True} else _ROWS):
        return
    found = _pieces([attention for attention, _ in peeled])
    if found is None:
        return
    count, (first, *_) = len(parts), found.attentions
    batch = [_as_batch(graph, cat, source, count) for source in found.sources]
    made = insert(graph, cat, functional.attention, *batch, **first.kwargs)
    made.meta["stack_trace"] = first.meta.get("stack_trace")
    # [n, h, p, d] -> [n, p, h, d] -> [1, (n p), h, d], or -> [h, n, p, d] -> [1, h, (n p), d]
    order = [0, 2, 1, 3] if turned == {True} else [1, 0, 2, 3]
    back = insert(graph, cat, aten.permute.default, made, order)
    whole = insert(graph, cat, aten.reshape.default, back, list(cat.meta["val"].shape))
    cat.replace_all_uses_with(whole)
    graph.erase_node(cat)


def _as_batch(graph: Graph, before: Node, source: Node, count: int) -> Node:
    """[1, h, (n p), d] -> [n, h, p, d]."""
    _, heads, rows, width = source.meta["val"].shape
    apart = insert(graph, before, aten.reshape.default, source, [heads, count, rows // count, width])
    return insert(graph, before, aten.permute.default, apart, [1, 0, 2, 3])


def _peeled(node: Node) -> tuple[Node, bool]:
    """What a copy or a transpose of heads and rows is of, and whether there was one."""
    turned = False
    while True:
        if node.target in _COPIES:
            pass
        elif node.target is aten.transpose.int and {d % 4 for d in node.args[1:3]} == {1, _ROWS}:  # type: ignore[operator]
            turned = not turned
        else:
            return node, turned
        node = node.all_input_nodes[0]


def _pieces(attentions: list[Node]) -> _Pieces | None:
    """The attentions, if they are alike and of all pieces of three tensors, one after the other."""
    first = attentions[0]
    for attention in attentions:
        if attention.target is not functional.attention or len(attention.args) != 3:
            return None  # masks and sinks would have to be cut too
        if attention.kwargs != first.kwargs or attention.meta["val"].dim() != 4:
            return None
    sources = []
    for operand in range(3):
        source = _cut([attention.args[operand] for attention in attentions])
        if source is None or source.meta["val"].shape[0] != 1:
            return None
        sources.append(source)
    query, key, value = sources
    return _Pieces(tuple(attentions), (query, key, value))


def _cut(pieces: list[object]) -> Node | None:
    """The tensor whose equal pieces along the rows these are, all of them and in order."""
    split: Node | None = None
    for index, piece in enumerate(pieces):
        if not isinstance(piece, Node) or piece.target is not operator.getitem or piece.args[1] != index:
            return None
        maker = piece.args[0]
        if not isinstance(maker, Node) or maker.target not in _SPLITS or (split or maker) is not maker:
            return None
        split = maker
    assert split is not None
    source, dim = split.args[0], split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    lengths = {piece.meta["val"].shape[_ROWS] for piece in pieces if isinstance(piece, Node)}
    if not isinstance(source, Node) or not isinstance(dim, int) or dim % 4 != _ROWS or len(lengths) != 1:
        return None
    return source if source.meta["val"].shape[_ROWS] == len(pieces) * lengths.pop() else None
