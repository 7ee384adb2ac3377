"""Regions under `torch.no_grad`: torch.export keeps them as submodules, and decomposing puts their ops among the
others, where a gradient would flow through them.

In:  an exported program before it is decomposed.
Out: the same, with what enters such a region detached: nothing made of it has a gradient, whether it is returned or
     written into a buffer.

    with torch.no_grad(): y = f(x)     %y = f(%x)     ->     %d = detach(%x), %y = f(%d)

What a region hands out is not always made in it: `x.to(x.dtype)` is `x` itself, and whoever uses `x` afterwards is
traced as using what the region returned. That is `x`, gradient and all.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from autopar.errors import CaptureError

# These return their operand itself where there is nothing to do.
_MAYBE_ITSELF = (
    torch.ops.aten.to,
    torch.ops.aten.contiguous,
    torch.ops.aten.type_as,
    torch.ops.aten.dropout,
    torch.ops.aten.feature_dropout,
    torch.ops.aten.alpha_dropout,
)
_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled


def stop_gradients(exported: ExportedProgram, title: str) -> None:
    """Edit the regions of `exported` in place. Raises CaptureError for `enable_grad` inside of a `no_grad`."""
    _stop(exported.graph_module, inside=False, title=title)


def _stop(module: GraphModule, *, inside: bool, title: str) -> None:
    for node in module.graph.nodes:
        for region in _regions(module, node):
            enabled = node.target is not _REGION or bool(node.args[0])
            if node.target is _REGION and enabled and inside:
                raise CaptureError(
                    "gradients are enabled again inside of torch.no_grad, which is not captured",
                    where=title,
                    hint="to leave the no_grad region before",
                )
            if not enabled:
                _detach_inputs(region)
            _stop(region, inside=inside or not enabled, title=title)


def _regions(module: GraphModule, node: Node) -> list[GraphModule]:
    """The submodules that a node runs."""
    if node.op != "call_function":
        return []
    names = [str(operand.target) for operand in node.all_input_nodes if operand.op == "get_attr"]
    found = [getattr(module, name, None) for name in names]
    return [region for region in found if isinstance(region, GraphModule)]


def _itself(node: Node) -> Node:
    """The region's input that `node` is, where ops that did nothing lie between; else `node`."""
    found = node
    while found.op == "call_function" and getattr(found.target, "overloadpacket", None) in _MAYBE_ITSELF:
        source = found.args[0]
        if not isinstance(source, Node) or not _alike(source.meta.get("val"), found.meta.get("val")):
            break
        if _argument(found, "train") or _argument(found, "copy"):
            break
        found = source
    return found if found.op == "placeholder" else node


def _argument(node: Node, name: str) -> object:
    """An argument of an ATen op by the name its schema has for it; None if it has none, or it was left out."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    index = names.index(name) if name in names else len(node.args)
    return node.args[index] if index < len(node.args) else node.kwargs.get(name)


def _alike(one: object, other: object) -> bool:
    return (
        isinstance(one, Tensor)
        and isinstance(other, Tensor)
        and (one.dtype, one.device, one.shape, one.stride())
        == (other.dtype, other.device, other.shape, other.stride())
    )


def _detach_inputs(region: GraphModule) -> None:
    placeholders = [node for node in region.graph.nodes if node.op == "placeholder"]
    first = next(node for node in region.graph.nodes if node.op != "placeholder")
    output = region.graph.output_node()
    output.args = map_arg(output.args, _itself)
    for node in placeholders:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            continue
        with region.graph.inserting_before(first):
            detached = region.graph.call_function(torch.ops.aten.detach.default, (node,))
        detached.meta = dict(node.meta)
        node.replace_all_uses_with(
            detached, delete_user_cb=lambda user, own=detached: user not in (own, output)
        )
    region.graph.lint()
    region.recompile()
