"""Regions under `torch.no_grad`: torch.export keeps them as submodules, and decomposing puts their ops among the
others, where a gradient would flow through them.

In:  an exported program before it is decomposed.
Out: the same, with what enters such a region detached: nothing made of it has a gradient, whether it is returned or
     written into a buffer.

    with torch.no_grad(): y = f(x)     %y = f(%x)     ->     %d = detach(%x), %y = f(%d)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from autopar.errors import CaptureError

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


def _detach_inputs(region: GraphModule) -> None:
    placeholders = [node for node in region.graph.nodes if node.op == "placeholder"]
    first = next(node for node in region.graph.nodes if node.op != "placeholder")
    for node in placeholders:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            continue
        with region.graph.inserting_before(first):
            detached = region.graph.call_function(torch.ops.aten.detach.default, (node,))
        detached.meta = dict(node.meta)
        node.replace_all_uses_with(detached, delete_user_cb=lambda user, own=detached: user is not own)
    region.graph.lint()
    region.recompile()
