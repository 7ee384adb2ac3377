"""The observer: where this rank is in a step, and what its seconds go to.

In:  a trainer's model, and the collectives of this process as `torch_private.watch_collectives` tells of them.
Out: seconds by kind (they add up to the wall time), and at any moment, for a thread that looks, a Place: step, kind,
     block, node, and the collective that is waited for.

    {"data": 0.001, "compute": 0.41, "communication tp": 0.12, "bubble": 0.0, "optimizer": 0.02, ...}

Kinds: `data`, `compute`, `communication AXIS` (waiting for a collective that nothing hides, its slowest member
included), `bubble` (sending to and receiving from other pipeline stages: mostly waiting for them, and the transfer,
which gloo does not tell apart), `optimizer`, `checkpoint`, `other`. On a CPU a wait blocks, and is timed where it blocks. On CUDA it does not: two events around it
on the stream are read when the step is over, and their time is taken off compute.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.profiler import record_function

from autopar.program import Call
from autopar.runtime.groups import SIMULATED, Groups
from autopar.torch_private import in_backward, watch_collectives

DATA, COMPUTE, BUBBLE, OPTIMIZER, CHECKPOINT, OTHER = (
    "data", "compute", "bubble", "optimizer", "checkpoint", "other"
)  # fmt: skip
COMMUNICATION = "communication "  # and the axis
EVERYONE = "all ranks"
_MOST_HANDLES = 4096  # launches whose wait nobody has asked for yet


# Named tuples, and texts only when asked for: some of these are made for every collective.
class Collective(NamedTuple):
    """One collective: its kind, the mesh axis (several: `dp+fsdp`), the ranks that take part, and of what tensor."""

    kind: str
    axis: str
    ranks: tuple[int, ...]
    what: tuple[torch.dtype, torch.Size] | None = None

    def __str__(self) -> str:
        text = f"{self.kind} over {self.axis} ({ranks_text(self.ranks)})"
        if self.what is None:
            return text
        return f"{text} of {str(self.what[0]).removeprefix('torch.')}{list(self.what[1])}"


class Place(NamedTuple):
    """Where a rank is. `part`: forward, backward, forward again (recomputed), or nothing. `path`: of the call (the
    module path of a layer, else the block's name). `node`: of the block's graph, if it is in a collective of it."""

    step: int = 0
    kind: str = OTHER
    part: str = ""
    path: str = ""
    block: str = ""
    node: str = ""
    waiting: Collective | None = None
    note: str = ""

    def __str__(self) -> str:
        where = f"{self.part} of {self.path}" if self.path else self.note or self.part or self.kind
        if self.path and self.block and self.block != self.path:
            where += f" (block {self.block})"
        return where + (f", node {self.node}" if self.node else "")


class Observer:
    """Watches one rank. One thread is the one that trains (`start` is called on it); others may look at `place`."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        """`model`: a RankModel or a Pipeline of them."""
        self.groups: Groups = model.groups
        self.models = [stage.ranks for stage in model.models] if hasattr(model, "models") else [model]
        self.optimizer = optimizer
        self.place = Place()
        self.changed = time.monotonic()
        self.seconds: dict[str, float] = defaultdict(float)
        self.profiling = False
        self.named: dict[
            str, tuple[Collective, Place]
        ] = {}  # while profiling: what the names of ranges stand for
        self._kinds = [OTHER]
        self._mark = time.perf_counter()
        self._thread = threading.get_ident()
        self._launched: dict[int, Collective] = {}
        self._axes: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._events: list[tuple[str, Collective | None, torch.cuda.Event, torch.cuda.Event]] = []
        self._undo: list[Callable[[], None]] = []

    # ---- beginning and end ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch, from the thread that trains."""
        self._thread = threading.get_ident()
        self._mark = time.perf_counter()
        for model in self.models:
            model.observer = self
        for graph in {id(each): each for model in self.models for each in model.functions.values()}.values():
            if isinstance(
                graph, GraphModule
            ):  # torch.compile makes others, in which collectives have no names
                self._undo.append(_name_collectives(graph, self))
        if dist.is_initialized() and dist.get_backend() != SIMULATED:
            self._undo.append(watch_collectives(self))
        begun: list[Any] = []
        before = self.optimizer.register_step_pre_hook(lambda *_: begun.append(self.begin_kind(OPTIMIZER)))
        after = self.optimizer.register_step_post_hook(lambda *_: self.end_kind(begun.pop()))
        self._undo += [before.remove, after.remove]

    def stop(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        for model in self.models:
            model.observer = None

    # ---- kinds of time -------------------------------------------------------------------------------------

    @contextmanager
    def doing(self, kind: str, note: str = "") -> Iterator[None]:
        """Time inside is of this kind, but for what is told apart inside of it."""
        begun = self.begin_kind(kind, note)
        try:
            yield
        finally:
            self.end_kind(begun)

    def begin_kind(self, kind: str, note: str = "") -> Any:
        before = self.place
        self._enter(kind)
        self._move(before._replace(kind=kind, part="", path="", block="", node="", note=note))
        named = record_function(kind) if self.profiling else None
        event = None
        if named is not None:
            named.__enter__()
        if kind == OPTIMIZER and self.groups.device.type == "cuda":
            event = _event()
        return before, named, event

    def end_kind(self, begun: Any) -> None:
        before, named, event = begun
        if event is not None:
            self._events.append((OPTIMIZER, None, event, _event()))
        if named is not None:
            named.__exit__(None, None, None)
        self._leave()
        self._move(before._replace(step=self.place.step))

    def at_step(self, step: int) -> None:
        self._move(self.place._replace(step=step))

    def take_seconds(self) -> dict[str, float]:
        """Seconds by kind since the last call."""
        self._charge()
        self._read_events()
        found, self.seconds = dict(self.seconds), defaultdict(float)
        return found

    def _enter(self, kind: str) -> None:
        self._charge()
        self._kinds.append(kind)

    def _leave(self) -> None:
        self._charge()
        self._kinds.pop()

    def _charge(self) -> None:
        now = time.perf_counter()
        self.seconds[self._kinds[-1]] += now - self._mark
        self._mark = now

    def _read_events(self) -> None:
        """Device time that has ended: from compute, in which the host waited for it, to what it was."""
        rest = []
        for kind, waiting, start, end in self._events:
            if not end.query():
                rest.append((kind, waiting, start, end))
                continue
            seconds = min(start.elapsed_time(end) / 1e3, self.seconds[COMPUTE])
            self.seconds[COMPUTE] -= seconds
            self.seconds[kind] += seconds
        self._events = rest

    # ---- calls of blocks -----------------------------------------------------------------------------------

    def run_call(self, run: Callable[..., tuple[Tensor, ...]], index: int, call: Call, *rest: Any) -> Any:
        """`run(index, call, *rest)`, which runs the call's block, with this rank's place told."""
        again = in_backward()
        part, path = "forward again" if again else "forward", call.path or call.block
        before = self.place
        self._move(before._replace(part=part, path=path, block=call.block, node=""))
        try:
            if self.profiling:
                with record_function(f"{part} {path}"):
                    results = run(index, call, *rest)
            else:
                results = run(index, call, *rest)
        finally:
            self._move(before._replace(step=self.place.step))
        if not again:
            self._follow_call(results, path, call.block)
        return results

    def _follow_call(self, results: tuple[Tensor, ...], path: str, block: str) -> None:
        """Backward of a call begins with the gradient of a result."""

        def arrived(_: Tensor) -> None:
            self._move(self.place._replace(part="backward", path=path, block=block, node=""))
            if self.profiling:
                with record_function(f"backward {path}"):  # where it begins; it ends where the next one does
                    pass

        for result in results:
            if isinstance(result, Tensor) and result.grad_fn is not None:
                result.register_hook(arrived)
                return

    def call_node(self, function: Callable[..., Any], node: str, *args: Any, **kwargs: Any) -> Any:
        """A graph's collective, with its name in this rank's place, in its backward too."""
        before = self.place
        self.place = before._replace(node=node)
        try:
            result = function(*args, **kwargs)
        finally:
            self.place = self.place._replace(node=before.node)
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        step = first.grad_fn if isinstance(first, Tensor) else None
        if step is not None:
            path, block = before.path, before.block

            def began(_: Any) -> None:
                self.place = self.place._replace(part="backward", path=path, block=block, node=node)

            def ended(*_: Any) -> None:
                self.place = self.place._replace(node="")

            step.register_prehook(began)
            step.register_hook(ended)
        return result

    # ---- collectives (what torch_private.watch_collectives calls) ------------------------------------------

    def launched(self, kind: str, group: str, tensor: Tensor | None, handle: int) -> None:
        axis, ranks = self._axis(group)
        what = None if tensor is None else (tensor.dtype, tensor.shape)
        if len(self._launched) >= _MOST_HANDLES:
            self._launched.pop(next(iter(self._launched)))
        self._launched[handle] = Collective(kind, axis, ranks, what)

    def begin(self, handle: int, tensor: Tensor | None) -> Any:
        collective = self._launched.pop(handle, None)
        here = threading.get_ident() == self._thread
        if collective is None or not (here or collective.axis in self._told_axes()):
            return None
        before = self.place
        between = collective.kind in ("send", "recv")
        place = before
        if between or (before.part == "backward" and not in_backward()):  # it is over
            note = "the pipeline's schedule" if between else "reducing gradients"
            place = before._replace(part="", path="", block="", node="", note=note)
        self._move(place._replace(waiting=collective))
        counted = self._kinds[-1] in (COMPUTE, OPTIMIZER) and before.waiting is None
        kind = BUBBLE if between else COMMUNICATION + collective.axis
        blocks = self.groups.device.type != "cuda"
        if counted and blocks and here:
            self._enter(kind)
        event = _event() if counted and not blocks else None
        named = self._range(collective, place) if self.profiling else None
        return before, counted and blocks and here, event, kind, named, collective

    def end(self, begun: Any) -> None:
        if begun is None:
            return
        before, counted, event, kind, named, collective = begun
        if named is not None:
            named.__exit__(None, None, None)
        if counted:
            self._leave()
        if event is not None:
            self._events.append((kind, collective, event, _event()))
        self._move(before._replace(step=self.place.step))

    def waits_for(self) -> Collective | None:
        """The collective this rank waits in now. On CUDA, where the host goes on, the first that the device has not
        got past."""
        if self.place.waiting is not None or self.groups.device.type != "cuda":
            return self.place.waiting
        for _, collective, _, end in tuple(self._events):
            if collective is not None and not end.query():
                return collective
        return None

    def _range(self, collective: Collective, place: Place) -> Any:
        name = f"{collective.kind} over {collective.axis}: {place}"
        self.named[name] = collective, place
        opened = record_function(name)
        opened.__enter__()
        return opened

    def _told_axes(self) -> set[str]:
        return {axis for axis, _ in self._axes.values() if axis != EVERYONE}

    def _axis(self, group: str) -> tuple[str, tuple[int, ...]]:
        """The axes of the group of that name, and its ranks."""
        if group not in self._axes:
            if dist.is_initialized() and dist.group.WORLD is not None:
                world = dist.group.WORLD
                self._axes[str(world.group_name)] = (EVERYONE, tuple(dist.get_process_group_ranks(world)))
            for axes, found in self.groups.all_groups().items():
                ranks = tuple(dist.get_process_group_ranks(found))
                self._axes[str(found.group_name)] = ("+".join(axes), ranks)
        return self._axes.get(group, ("other", ()))

    def _move(self, place: Place) -> None:
        self.place = place
        self.changed = time.monotonic()


def ranks_text(ranks: tuple[int, ...]) -> str:
    """`ranks 0 to 3`, `ranks 0, 2`, `rank 1`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


def _name_collectives(graph: GraphModule, observer: Observer) -> Callable[[], None]:
    """Make the collectives of a block's graph tell their node; returns what undoes it."""
    changed: list[tuple[Node, Any]] = []
    for node in graph.graph.nodes:
        module = str(getattr(node.target, "__module__", ""))
        if node.op == "call_function" and (module == "autopar.collectives" or module.endswith("_steps")):
            changed.append((node, node.target))
            source = node.args[0].name if node.args and isinstance(node.args[0], Node) else ""
            node.target = _named(node.target, f"{node.name}{source and f' of {source}'}", observer)
    if changed:
        graph.recompile()

    def back() -> None:
        for node, target in changed:
            node.target = target
        if changed:
            graph.recompile()

    return back


def _named(function: Any, node: str, observer: Observer) -> Any:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return observer.call_node(function, node, *args, **kwargs)

    return call


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
