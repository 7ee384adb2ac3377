"""Attention in an exported graph as `autopar.attention`: the one form that rules and lowerings speak of.

In:  a node of `autopar::attention` (Transformers models) or of torch's `scaled_dot_product_attention`.
Out: the same node as a call of `functional.attention(query, key, value, mask, sinks, **flags)`, flags only where they
     are not the default, a mask without dims that merely repeat it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.fx import Node
from torch.fx.node import Argument

from autopar import functional

aten = torch.ops.aten

_FLAGS = ("causal", "window", "scale", "softcap")


def one_attention(node: Node) -> None:
    """`autopar::attention(query, key, value, mask, sinks, causal, window, scale, softcap)`."""
    tensors, flags = node.args[:5], node.args[5:]
    _set(node, tensors, dict(zip(_FLAGS, flags, strict=False)))


def plain_attention(node: Node) -> None:
    """`scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, *, scale, enable_gqa)` of
    batches of heads, without dropout; any other stays."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if given.get("dropout_p"):
        return
    tensors = [given["query"], given["key"], given["value"]]
    shapes = [tuple(tensor.meta["val"].shape) for tensor in tensors if isinstance(tensor, Node)]
    if any(len(shape) != 4 for shape in shapes):
        return
    query, key, value = shapes
    grouped = query[1] != key[1]
    if query[0] != key[0] or key[:3] != value[:3] or (grouped and not given.get("enable_gqa")):
        return
    flags = {"causal": given.get("is_causal", False), "scale": given.get("scale")}
    _set(node, [*tensors, given.get("attn_mask")], flags)


def _set(node: Node, tensors: Sequence[Argument], flags: Mapping[str, Argument]) -> None:
    given = [*tensors, *[None] * (5 - len(tensors))]
    given[3] = _unexpanded(given[3])
    while given[-1] is None:
        given.pop()
    node.target = functional.attention
    node.args = tuple(given)
    node.kwargs = {name: value for name, value in flags.items() if value is not None and value is not False}


def _unexpanded(mask: Argument) -> Argument:
    """A mask broadcasts: what it is expanded from says the same."""
    while isinstance(mask, Node) and mask.target is aten.expand.default:
        source = mask.args[0]
        assert isinstance(source, Node)
        if source.meta["val"].dim() < 2:
            return mask
        mask = source
    return mask
