"""Every private torch API that autopar touches, each with what to use when it changes.

Nothing else in the project imports from a private torch module.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

# The in-graph collectives (`torch.distributed._functional_collectives` wraps the same ops publicly, but its
# wrappers return AsyncCollectiveTensor subclasses and have other gradients than `autopar/sharding.py` asks for).
# When they change: the op names are listed by `torch._C._dispatch_get_all_op_names()`.
c10d_functional: Any = torch.ops._c10d_functional


def fake_mode() -> AbstractContextManager[Any]:
    """Tensors made inside have shape, dtype and device but no storage, so 405B parameters cost nothing.

    `torch.device("meta")` is the public way, but it loses the values of constants that a model's forward makes
    (`torch.tensor([...])`) and puts `device="meta"` into the graph. When this moves, fall back to meta.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


def module_path(node: Node) -> str:
    """The path of the innermost module whose forward made this node, '' for the model itself.

    `nn_module_stack` is set by torch.export; when it goes, `node.meta["torch_fn"]`/`stack_trace` tell less.
    """
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    return str(path)
