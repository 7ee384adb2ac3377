"""Every private torch API that autopar touches, each with what to use when it changes.

Nothing else in the project imports from a private torch module.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

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


def shares_storage(tensor: torch.Tensor) -> bool:
    """Whether other tensors lie in the same storage: changing one in place would change them. One reference is the
    tensor's own, one that of the storage object asked here."""
    return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2)


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


def ctc_forward(
    log_probs: torch.Tensor, targets: torch.Tensor, inputs: torch.Tensor, lengths: torch.Tensor, blank: int,
    zero_infinity: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The kernel under `torch.nn.functional.ctc_loss`: losses [b], infinite ones too, and what its backward reads
    [b, t, 2 m + 1], m the longest of `lengths`."""
    losses, kept = torch.ops.aten._ctc_loss.Tensor(log_probs, targets, inputs, lengths, blank, zero_infinity)
    return losses, kept


def ctc_backward(
    gradient: torch.Tensor, log_probs: torch.Tensor, targets: torch.Tensor, inputs: torch.Tensor,
    lengths: torch.Tensor, losses: torch.Tensor, kept: torch.Tensor, blank: int, zero_infinity: bool,
) -> torch.Tensor:  # fmt: skip
    """Its backward: the gradient of log_probs, as torch defines it (that of the logits under a log-softmax)."""
    slope: torch.Tensor = torch.ops.aten._ctc_loss_backward.Tensor(
        gradient, log_probs, targets, inputs, lengths, losses, kept, blank, zero_infinity
    )
    return slope


def wrapper_tensor(kind: Any, like: torch.Tensor) -> Any:
    """A tensor of the subclass `kind` that has the shape, strides, dtype and device of `like`, and no storage. Subclasses
    with `__torch_dispatch__` have no public constructor for that."""
    make: Any = torch.Tensor._make_wrapper_subclass
    return make(kind, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device)


def fake_mode_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """The `fake_mode` that a fake tensor was made in."""
    assert isinstance(tensor, FakeTensor)
    return tensor.fake_mode


def orthogonal(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """The Newton-Schulz iteration of `torch.optim.Muon` [m, n] in bfloat16: nearly U V' of matrix = U S V'.

    The optimizer itself is public, but it takes whole parameters only. When this moves: it is 15 lines in its source.
    """
    from torch.optim import _muon

    result: torch.Tensor = _muon._zeropower_via_newtonschulz(matrix, coefficients, steps, eps)
    return result


def muon_rate(lr: float, rule: str | None, shape: torch.Size) -> float:
    """The learning rate that `torch.optim.Muon` takes for a matrix of this shape."""
    from torch.optim import _muon

    return float(_muon._adjust_lr(lr, rule, shape))


def in_backward() -> bool:
    """Whether this thread is inside of autograd's backward. There is no public way to ask."""
    return torch._C._current_graph_task_id() != -1


def default_store() -> Any:
    """A connection of its own to the store through which `torch.distributed` made its groups: its keys are those of
    this start of the ranks, so what an earlier start left is not seen. The store itself has no public name."""
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    return store.clone()


class CollectiveWatcher(Protocol):
    """What `watch_collectives` tells. `handle` names a collective between its launch and its wait."""

    def launched(self, kind: str, group: str, tensor: torch.Tensor | None, handle: int) -> None: ...
    def begin(self, handle: int, tensor: torch.Tensor | None) -> Any: ...
    def end(self, begun: Any) -> None: ...


# In-graph collectives; their group's name is the last argument.
_IN_GRAPH = {
    "all_reduce": "all_reduce", "all_reduce_": "all_reduce", "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter", "all_to_all_single": "all_to_all", "broadcast": "broadcast",
    "broadcast_": "broadcast",
}  # fmt: skip
# Methods of a process group, which are what the functions of `torch.distributed` call.
_OF_GROUPS = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce", "allgather": "all_gather",
    "_allgather_base": "all_gather", "all_gather_single": "all_gather", "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter", "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all", "alltoall_base": "all_to_all", "all_to_all_single": "all_to_all",
    "broadcast": "broadcast", "reduce": "reduce", "gather": "gather", "scatter": "scatter", "barrier": "barrier",
    "send": "send", "recv": "recv", "recv_anysource": "recv",
}  # fmt: skip


def watch_collectives(watcher: CollectiveWatcher) -> Callable[[], None]:
    """Tell `watcher` of every collective that this process launches and of every wait for one, whoever asks for it:
    blocks run eagerly, blocks that inductor compiled, `torch.distributed`, pipelining. Returns what undoes it.

    There is no public way (gloo has no completion hooks), so the functions themselves are replaced: of the in-graph
    ops what a call goes through (`_op` of the op and of its overload, which inductor's code calls), of process groups
    their methods, of handles `wait`. What no longer exists is left alone: its waits are then counted as compute. A
    kernel registered through `torch.library` would not do: it holds the interpreter's lock while it waits.
    """
    undo: list[Callable[[], None]] = []

    def replace(holder: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(holder, name, None)
        if original is None:
            return
        own = vars(holder).get(
            name
        )  # not `original`: a class gives its methods out unbound, and would keep them so
        setattr(holder, name, make(original))
        undo.append(lambda: delattr(holder, name) if own is None else setattr(holder, name, own))

    for name, kind in _IN_GRAPH.items():
        packet = getattr(c10d_functional, name, None)
        for holder in (packet, getattr(packet, "default", None)):
            replace(holder, "_op", partial(_told_launch, kind, watcher))
    for holder in (c10d_functional.wait_tensor, c10d_functional.wait_tensor.default):
        replace(holder, "_op", partial(_told_wait, watcher))
    for name, kind in _OF_GROUPS.items():
        replace(torch.distributed.ProcessGroup, name, partial(_told_group, kind, watcher))
    replace(torch.distributed.Work, "wait", partial(_told_work, watcher))

    def back() -> None:
        for each in reversed(undo):
            each()

    return back


def _address(tensor: Any) -> int | None:
    """Where a tensor lies; None of one that a tracer made."""
    if type(tensor) is not torch.Tensor:
        return None
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return None


def _told_launch(kind: str, watcher: CollectiveWatcher, original: Any) -> Any:
    def launch(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        handle = _address(result)
        if handle is not None and args and isinstance(args[-1], str):
            watcher.launched(kind, args[-1], args[0], handle)
        return result

    return launch


def _told_wait(watcher: CollectiveWatcher, original: Any) -> Any:
    def wait(tensor: torch.Tensor) -> Any:
        handle = _address(tensor)
        if handle is None:
            return original(tensor)
        begun = watcher.begin(handle, tensor)
        try:
            return original(tensor)
        finally:
            watcher.end(begun)

    return wait


def _told_group(kind: str, watcher: CollectiveWatcher, original: Any) -> Any:
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        work = original(group, *args, **kwargs)
        first: Any = args[0] if args else None
        while isinstance(first, (list, tuple)) and first:
            first = first[0]
        watcher.launched(
            kind, str(group.group_name), first if isinstance(first, torch.Tensor) else None, id(work)
        )
        return work

    return call


def _told_work(watcher: CollectiveWatcher, original: Any) -> Any:
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        begun = watcher.begin(id(work), None)
        try:
            return original(work, *args, **kwargs)
        finally:
            watcher.end(begun)

    return wait


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd has a tensor as a view of another. If `_is_view` goes: always say yes, which costs a copy of what
    pipeline stages send."""
    return bool(tensor._is_view())
