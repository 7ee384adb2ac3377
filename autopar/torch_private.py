"""Every private torch API that autopar touches, each with what to use when it changes.

Nothing else in the project imports from a private torch module.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
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


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of `fake_mode`."""
    return isinstance(tensor, FakeTensor)


def module_path(node: Node) -> str:
    """The path of the innermost module whose forward made this node, '' for the model itself.

    `nn_module_stack` is set by torch.export; when it goes, `node.meta["torch_fn"]`/`stack_trace` tell less.
    """
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    return str(path)


# A process group written in Python: torch calls its methods, from `torch.distributed` and from in-graph collectives
# alike. Public as `torch.distributed.ProcessGroup`; that it may be derived from, and which methods it then has, is
# only shown by torch's own threaded test group (`torch/testing/_internal/distributed/multi_threaded_pg.py`), which
# is where to look when they change.
PythonProcessGroup: Any = torch.distributed.ProcessGroup


@contextmanager
def process_groups_by_thread() -> Iterator[None]:
    """Inside, each thread has process groups of its own, by name and by default, as if it were a process.

    The switch of torch's multi-threaded tests; the process's own groups are back afterwards.
    """
    from torch._C._distributed_c10d import _set_thread_isolation_mode  # type: ignore[attr-defined]
    from torch.testing._internal.distributed.multi_threaded_pg import (
        _install_threaded_pg,
        _uninstall_threaded_pg,
    )

    _set_thread_isolation_mode(True)
    _install_threaded_pg()
    try:
        yield
    finally:
        _uninstall_threaded_pg()
        _set_thread_isolation_mode(False)


def done(result: Any) -> Any:
    """The handle of a collective that is over (`torch.distributed.Work` has no public way to make one)."""
    from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

    future: Any = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


def later(wait: Callable[[], None]) -> Any:
    """The handle of a collective that `wait` carries out, once."""

    class Later(torch.distributed.Work):
        over = False

        def wait(self, timeout: Any = None) -> bool:
            if not self.over:
                wait()
                self.over = True
            return True

        def is_completed(self) -> bool:
            return self.over

    return Later()


# Arguments of a call as a flat list and back. `torch.utils.pytree` is the public successor, without export's
# registrations of model outputs.
pytree: Any = importlib.import_module("torch.utils._pytree")


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place (autograd's own counter; there is no public one)."""
    return tensor._version


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share storage. `untyped_storage().data_ptr()` is the public way; it is 0 without memory."""
    return int(tensor.untyped_storage()._cdata)


def group_place(name: str) -> tuple[int, int]:
    """(this rank's place in the process group of that name, its size).

    In-graph collectives know their groups by name; `torch.distributed` has no public way from the name to the group.
    """
    from torch._C._distributed_c10d import _resolve_process_group

    group = _resolve_process_group(name)  # type: ignore[arg-type]
    return int(group.rank()), int(group.size())


def outside_of_modes() -> AbstractContextManager[Any]:
    """Inside, ops run for real: neither fake tensors nor a tracer sees them. There is no public way out of a
    `TorchDispatchMode` that somebody else entered."""
    from torch.utils._python_dispatch import _disable_current_modes

    context: AbstractContextManager[Any] = _disable_current_modes()
    return context


def plain_dispatch() -> AbstractContextManager[Any]:
    """Inside, `__torch_function__` of tensors and of modes is not called."""
    context: AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return context


def gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether hooks were registered on the gradient of a leaf (there is no public way to list them)."""
    after: object = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return bool(parameter._backward_hooks) or bool(after)
