"""Normalize: an exported graph to the few forms the rules speak of.

In:  the functional graph of torch.export.
Out: the same graph, with
     - assertions removed;
     - `linear(x, w, b)` as `linear(x, w) + b`, `addmm(b, x, w)` as `mm(x, w) + b`: with the contraction split the
       product is a partial sum, and the bias must be added once;
     - convolutions with a bias likewise; `copy(x, y)` as `y` expanded and cast to the shape of x; bags of an embedding
       that are equally long as its rows, reduced;
     - `view` as `reshape`: a kernel may lay out a local piece otherwise than the whole;
     - `type_as(x, y)` as a cast: the sharding of y, of which only the dtype is read, is then free;
     - `cat` without empty pieces;
     - attention of every kind as `autopar.attention` (see `normalize_attention`, `attention_pieces`), experts and CTC losses as ours;
     - `cross_entropy_loss(view(logits), view(labels))` as `autopar.cross_entropy(logits, labels)` on the unflattened
       tokens, so that batch and sequence can be split apart.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from autopar import functional
from autopar.ctc_functions import CTC_LOSS, ctc_loss
from autopar.expert_functions import ONE_OP, experts
from autopar.passes.attention_pieces import pieces_as_batch
from autopar.passes.normalize_attention import one_attention, plain_attention
from autopar.passes.normalize_ops import (
    CONVOLUTIONS,
    broadcast_by_expansion,
    classes_last,
    copy_as_expansion,
    equal_bags,
    has_bias,
    index_add_as_sum,
    split_convolution_bias,
)

aten = torch.ops.aten

_DROPPED = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.msg,
    aten.sym_constrain_range_for_size.default,
}
_SEE_STRIDES = {aten.as_strided.default, aten.view.dtype, aten.view_as_complex.default}
_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints}


def normalize(graph: Graph, outputs: set[Node]) -> None:
    """Rewrite `graph` in place; the nodes in `outputs` stay."""
    for node in list(graph.nodes):
        if node.target in _DROPPED:
            graph.erase_node(node)
        elif (node.target in (aten.alias.default, aten.lift_fresh_copy.default) and node not in outputs) or (
            node.target is aten.clone.default and node not in outputs and _needs_no_copy(node)
        ):
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
        elif node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        elif node.target is aten.type_as.default:
            node.target, node.args = aten._to_copy.default, node.args[:1]
            node.kwargs = {"dtype": node.meta["val"].dtype}
        elif node.target is aten.cat.default:
            _drop_empty_pieces(node)
        elif node.target is aten.linear.default and len(node.args) > 2 and node.args[2] is not None:
            _split_bias(graph, node, aten.linear.default, node.args[:2], node.args[2])
        elif node.target is aten.addmm.default and not node.kwargs:
            _split_bias(graph, node, aten.mm.default, node.args[1:3], node.args[0])
        elif node.target is functional.ATTENTION:
            one_attention(node)
        elif node.target is aten.scaled_dot_product_attention.default:
            plain_attention(node)
        elif node.target is ONE_OP:
            node.target = experts
        elif node.target is CTC_LOSS:
            node.target = ctc_loss
        elif node.target in CONVOLUTIONS and has_bias(node):
            split_convolution_bias(graph, node)
        elif node.target is aten.copy.default:
            copy_as_expansion(graph, node)
        elif node.target is aten.broadcast_tensors.default:
            broadcast_by_expansion(node)
        elif node.target is aten.index_add.default:
            index_add_as_sum(graph, node)
        elif node.target is aten.embedding_bag.padding_idx:
            equal_bags(graph, node)
        elif node.target is aten.cross_entropy_loss.default:
            _unflatten_loss(graph, node)
    pieces_as_batch(graph)


def _needs_no_copy(clone: Node) -> bool:
    """Whether nothing that takes a copy sees how it lies in memory. (`contiguous()` traces as a copy or as nothing, by
    the size of the batch; of a graph without mutation it is nothing.)"""
    return all(
        isinstance(user.target, torch._ops.OpOverload)
        and user.target.namespace == "aten"
        and user.target not in _SEE_STRIDES
        for user in clone.users
    )


def _drop_empty_pieces(node: Node) -> None:
    """`cat` with an empty cache (a decoder's first step) is its other operand."""
    pieces = node.args[0]
    assert isinstance(pieces, (list, tuple))
    full = [piece for piece in pieces if isinstance(piece, Node) and piece.meta["val"].numel() > 0]
    if len(full) == 1 and full[0].meta["val"].shape == node.meta["val"].shape:
        node.target = aten.clone.default
        node.args = (full[0],)
        node.kwargs = {}
    elif 0 < len(full) < len(pieces):
        node.args = (full, *node.args[1:])


def _split_bias(graph: Graph, node: Node, target: object, args: tuple[object, ...], bias: object) -> None:
    assert isinstance(bias, Node)
    with graph.inserting_before(node):
        product = graph.call_function(target, args)  # type: ignore[arg-type]
        product.meta = dict(node.meta)
    node.target = aten.add.Tensor
    node.args = (product, bias)
    node.kwargs = {}


def _unflatten_loss(graph: Graph, node: Node) -> None:
    """`cross_entropy_loss(logits, labels, weight, reduction, ignore_index, label_smoothing)` on class indices."""
    defaults: list[object] = [None, None, None, 1, -100, 0.0]
    named = ["self", "target", "weight", "reduction", "ignore_index", "label_smoothing"]
    values = [
        node.args[i] if i < len(node.args) else node.kwargs.get(named[i], defaults[i]) for i in range(6)
    ]
    logits, labels, weight, reduction, ignore_index, smoothing = values
    assert isinstance(logits, Node)
    assert isinstance(labels, Node)
    logits_shape, labels_shape = logits.meta["val"].shape, labels.meta["val"].shape
    if weight is None and len(logits_shape) > 2 and len(labels_shape) == len(logits_shape) - 1:
        logits = classes_last(graph, node, logits)  # a label per pixel or position, classes in dim 1
        _set_loss(node, logits, labels, ignore_index, reduction, smoothing)
        return
    if (
        weight is not None
        or len(logits_shape) != 2
        or len(labels_shape) != 1
        or labels.meta["val"].dtype != torch.int64
    ):
        return
    source, target = _unviewed(logits, 1), _unviewed(labels, 0)
    if (
        source is not None
        and target is not None
        and source.meta["val"].shape[:-1] == target.meta["val"].shape
    ) and reduction != 0:
        logits, labels = source, target
    _set_loss(node, logits, labels, ignore_index, reduction, smoothing)


def _set_loss(
    node: Node, logits: Node, labels: Node, ignore: object, reduction: object, smoothing: object
) -> None:
    node.target = functional.cross_entropy
    names = {0: "none", 1: "mean", 2: "sum"}
    assert isinstance(reduction, int)
    node.args = (logits, labels, ignore, names[reduction], smoothing)  # type: ignore[assignment]
    node.kwargs = {}


def _unviewed(node: Node, kept_dims: int) -> Node | None:
    """The value before a view that flattened all but the last `kept_dims` dims."""
    if node.target not in _VIEWS or not isinstance(node.args[0], Node):
        return None
    source = node.args[0]
    if source.meta["val"].dim() < 1 + kept_dims:
        return None
    if kept_dims and source.meta["val"].shape[-kept_dims:] != node.meta["val"].shape[-kept_dims:]:
        return None
    return source
