"""autopar: give it a PyTorch model and a cluster, it finds the fastest parallel plan that fits, and runs it.

    plan = autopar.plan("llama-3.1-8b", "h100:8x8", batch=128, seq=8192)
    compiled = autopar.compile(model, "cpu:4", example_inputs)

Names are loaded on first use, so that `import autopar` is quick and needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.api import Compiled, compile, load_plan, plan
    from autopar.cluster import Cluster, load_cluster
    from autopar.errors import AutoparError
    from autopar.mesh import Mesh
    from autopar.plans import Plan
    from autopar.profiling import profile
    from autopar.rules import check_rule, register_rule
    from autopar.sharding import Sharding

_PLACES = {
    "AutoparError": "errors",
    "Cluster": "cluster",
    "Compiled": "api",
    "Mesh": "mesh",
    "Plan": "plans",
    "Sharding": "sharding",
    "check_rule": "rules",
    "compile": "api",
    "load_cluster": "cluster",
    "load_plan": "api",
    "plan": "api",
    "profile": "profiling",
    "register_rule": "rules",
}

__version__ = "0.1.0"

__all__ = [
    "AutoparError",
    "Cluster",
    "Compiled",
    "Mesh",
    "Plan",
    "Sharding",
    "check_rule",
    "compile",
    "load_cluster",
    "load_plan",
    "plan",
    "profile",
    "register_rule",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"autopar.{_PLACES[name]}")
    value = getattr(module, name)
    globals()[name] = value
    return value
