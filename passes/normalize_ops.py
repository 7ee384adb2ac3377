"""Normalize, op by op: the rewrites of single ops that `passes/normalize.py` makes.

In:  a node of the exported graph.
Out: the same value by ops that split better.

    convolution(x, w, b)                           convolution(x, w) + reshape(b): its channels may leave partial sums
    copy(x, y)                                     y in the dtype of x, expanded to its shape: has a gradient
    broadcast_tensors(x, y)                        each expanded by itself
    index_add(x, 0, i, y)                          x + index_sum(y, i): a split of y leaves partial sums
    embedding_bag(w, view(ids), arange(0, n, k))   sum(embedding(w, ids), 1): batch and vocabulary split
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.index_functions import index_sum

aten = torch.ops.aten

CONVOLUTIONS = frozenset(
    (
        aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.convolution.default,
        aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding,
        aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input,
    )
)  # fmt: skip


def insert(graph: Graph, before: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A node that stands for a part of `before`, with its meta; shape and dtype by running the op on fake tensors."""
    with graph.inserting_before(before):
        node = graph.call_function(target, args, kwargs)
    node.meta = dict(before.meta)
    values = torch.fx.map_arg((args, kwargs), lambda operand: operand.meta["val"])
    with torch.no_grad():
        node.meta["val"] = target(*values[0], **values[1])
    return node


def has_bias(node: Node) -> bool:
    return len(node.args) > 2 and node.args[2] is not None


def split_convolution_bias(graph: Graph, node: Node) -> None:
    """`x[n, ci, *], w, b[co]` to `convolution(x, w) + b[co, 1, ...]`."""
    bias = node.args[2]
    assert isinstance(bias, Node)
    weight, target = node.args[1], node.target
    assert isinstance(weight, Node)
    space = weight.meta["val"].dim() - 2
    product = insert(graph, node, target, *node.args[:2], None, *node.args[3:], **node.kwargs)
    column = insert(graph, node, aten.reshape.default, bias, [-1, *[1] * space])
    column.args = (bias, [bias.meta["val"].shape[0], *[1] * space])
    node.target, node.args, node.kwargs = aten.add.Tensor, (product, column), {}


def copy_as_expansion(graph: Graph, node: Node) -> None:
    """`copy(x, y)`: x gives only its shape and dtype."""
    target, source = node.args[:2]
    assert isinstance(target, Node)
    assert isinstance(source, Node)
    wanted, found = target.meta["val"], source.meta["val"]
    if found.dtype != wanted.dtype:
        source = insert(graph, node, aten._to_copy.default, source, dtype=wanted.dtype)
    if found.shape != wanted.shape:
        node.target, node.args, node.kwargs = aten.expand.default, (source, list(wanted.shape)), {}
    else:
        node.target, node.args, node.kwargs = aten.alias.default, (source,), {}


def classes_last(graph: Graph, node: Node, logits: Node) -> Node:
    """Logits [n, classes, ...] as [n, ..., classes]."""
    rank = logits.meta["val"].dim()
    return insert(graph, node, aten.permute.default, logits, [0, *range(2, rank), 1])


def broadcast_by_expansion(node: Node) -> None:
    """`broadcast_tensors([x, y])`: each by itself, and as it is where it has that shape."""
    tensors = node.args[0]
    assert isinstance(tensors, (list, tuple))
    for user in list(node.users):
        assert user.target is operator.getitem
        source = tensors[user.args[1]]  # type: ignore[index]
        assert isinstance(source, Node)
        shape = list(user.meta["val"].shape)
        if list(source.meta["val"].shape) == shape:
            user.target, user.args = aten.alias.default, (source,)
        else:
            user.target, user.args = aten.expand.default, (source, shape)


def index_add_as_sum(graph: Graph, node: Node) -> None:
    """`index_add(x, dim, index, source, alpha=1)` of floats."""
    given = [*node.args, *[None] * 4][:4]
    x, dim, index, source = given
    if (
        node.kwargs.get("alpha", 1) != 1
        or len(node.args) > 4
        or not all(isinstance(v, Node) for v in (x, index, source))
    ):
        return
    assert isinstance(x, Node)
    assert isinstance(source, Node)
    assert isinstance(dim, int)
    value = x.meta["val"]
    if value.dim() == 0 or value.dtype != source.meta["val"].dtype or not value.is_floating_point():
        return
    added = insert(graph, node, index_sum, source, index, dim, value.shape[dim])
    node.target, node.args, node.kwargs = aten.add.Tensor, (x, added), {}


def equal_bags(graph: Graph, node: Node) -> None:
    """`embedding_bag(weight, ids, offsets, scale_grad, mode, sparse, per_sample_weights, last, padding_idx)` whose bags
    torch made of the rows of a matrix: mode 0 sums, 1 averages."""
    names = ("weight", "indices", "offsets", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights",
             "include_last_offset", "padding_idx")  # fmt: skip
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    weight, flat, offsets = given["weight"], given["indices"], given["offsets"]
    if (
        not isinstance(flat, Node)
        or not isinstance(offsets, Node)
        or not isinstance(weight, Node)
        or flat.target not in (aten.view.default, aten.reshape.default)
        or offsets.target is not aten.arange.start_step
        or given.get("mode") not in (None, 0, 1)  # the largest of equals gets all of the gradient
        or any(given.get(name) for name in ("scale_grad_by_freq", "include_last_offset"))
        or given.get("padding_idx") is not None
        or any(user.args[1] != 0 for user in node.users)
    ):
        return
    ids = flat.args[0]
    assert isinstance(ids, Node)
    shape = ids.meta["val"].shape
    if len(shape) != 2 or list(offsets.args[:3]) != [0, shape[0] * shape[1], shape[1]]:
        return
    rows = insert(graph, node, aten.embedding.default, weight, ids)
    weights = given.get("per_sample_weights")
    if isinstance(weights, Node):
        matrix = insert(graph, node, aten.reshape.default, weights, [*shape, 1])
        rows = insert(graph, node, aten.mul.Tensor, rows, matrix)
    result = insert(graph, node, aten.mean.dim if given.get("mode") else aten.sum.dim_IntList, rows, [1])
    for user in list(node.users):
        user.target, user.args = aten.alias.default, (result,)
