"""Values that are not finite: a step with one is skipped, and where it came from is found by running the step again.

In:  a rank model (or a pipeline) and the micro-batches of the step whose loss or gradient norm is nan or infinite.
Out: one sentence, the same on every rank: the first op that made such a value, its layer, block and rank.

    4,096 infinite of 4,096 values in %linear_5 = aten.linear of %copy_1 up to 3.9, %mlp_up_proj_weight up to 3e+38;
    block model_layers, layer model.layers.2, rank 1, at modeling_llama.py:183

Every op of the step is looked at, forward and backward, on every rank; the collectives are those of any step, so all
ranks do it together. An infinity that a graph writes (a mask filled with -inf), and what only hands one on, is not
one that was made; nor is one that the call it is made in takes away again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from autopar.errors import PeerError, TrainingError
from autopar.program import op_name
from autopar.runtime.groups import Groups
from autopar.runtime.model import RankModel, bind
from autopar.runtime.store import ParameterStore
from autopar.torch_private import in_backward

_TEXT_BYTES = 2000
STATE, FORWARD, BACKWARD, SUM, NOTHING = range(5)  # where a finding is of, in the order of a step


class Runs(Protocol):
    """A RankModel, or a Pipeline of several."""

    groups: Groups
    store: ParameterStore

    def accumulate(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> tuple[float, float]: ...


@dataclass
class Skips:
    """What is skipped because it was not finite: in all, and without a step between. With `limit` in a row the run ends."""

    limit: int = 3
    total: int = 0
    in_row: int = 0

    def passed(self) -> None:
        """A step was taken."""
        self.in_row = 0

    def skipped(self, step: int, what: str, cause: str) -> str:
        """Count a skipped step; returns what to tell. Raises TrainingError where it is one too many.

        `what` was not finite ("the loss is nan"); `cause` as `explain` tells it.
        """
        self.total += 1
        self.in_row += 1
        if self.in_row >= self.limit:
            raise TrainingError(
                f"{what} at step {step}"
                + (f", the last of {self.in_row} in a row that were skipped" if self.in_row > 1 else "")
                + f"; {cause}",
                where=f"step {step}",
                hint="a lower learning rate, fp32, or to look at these batches; the parameters are those before it",
            )
        return f"step {step} is skipped: {what}; {cause}"


@dataclass(frozen=True)
class Finding:
    """`place`: (part of the step, micro-batch, stage, call, node), smaller where earlier; stage, call and node count down
    in the backward. `text`: what is told of it, without its rank."""

    place: tuple[int, int, int, int, int]
    text: str = ""
    rank: int = 0


def explain(model: Runs, micro_batches: Sequence[Mapping[str, Tensor]]) -> str:
    """Where the first value that is not finite came from. All ranks must call it, after a step that had one, with that
    step's micro-batches; gradients that it left may still be there. It leaves gradients that are of no use.

    Buffers that the forward changes are left as they were.
    """
    nothing = Finding((NOTHING, 0, 0, 0, 0))
    # Every rank learns what all have found before it does anything that needs the others.
    earliest = _earliest(_in_state(model.store) or nothing, model.groups)
    if earliest.place[0] == NOTHING:
        left = _in_gradients(model.store) or nothing
        watched = [_Watch(each, stage) for stage, each in _rank_models(model).items()]
        with _kept_buffers(model), _watching(watched):
            try:
                model.accumulate(micro_batches)
            except PeerError:
                raise
            except TrainingError:  # the loss is not finite, as it was
                pass
        found = min((each.first for each in watched), key=lambda finding: finding.place)
        earliest = _earliest(left if found.place[0] == NOTHING else found, model.groups)
    if earliest.place[0] == NOTHING:
        return "run again, every value was finite: an op that does not give the same twice, or a fault of the machine"
    where = f", rank {earliest.rank}" if model.groups.mesh.device_count > 1 else ""
    return earliest.text.replace("{rank}", where)


@contextmanager
def kept_buffers(model: Runs) -> Iterator[Callable[[], None]]:
    """Inside a step: gives what puts the buffers that the forward changes back to what they were before it."""
    names = {
        name.removeprefix("update ")
        for each in _rank_models(model).values()
        for name in each.program.outputs
        if name.startswith("update ")
    }
    before = {name: model.store.buffers[name].clone() for name in names & model.store.buffers.keys()}

    def restore() -> None:
        for name, value in before.items():
            model.store.buffers[name].copy_(value)

    yield restore


@contextmanager
def _kept_buffers(model: Runs) -> Iterator[None]:
    with kept_buffers(model) as restore:
        try:
            yield
        finally:
            restore()


def _rank_models(model: Any) -> dict[int, RankModel]:
    """By stage: a RankModel is one, a pipeline has several."""
    if isinstance(model, RankModel):
        return {0: model}
    return {stage.stage.index: stage.ranks for stage in model.models}


# ---- before and after the ops of a step --------------------------------------------------------------------------


def _in_state(store: ParameterStore) -> Finding | None:
    for index, (name, entry) in enumerate(store.entries.items()):
        counts = _counts(entry.parameter.detach())
        if counts is not None:
            return Finding((STATE, 0, 0, 0, index), f"the parameter {name} itself has {counts}{{rank}}")
    return None


def _in_gradients(store: ParameterStore) -> Finding | None:
    """What the gradients that the step left tell, for where no op has made such a value: a sum did."""
    largest, which = 0.0, ""
    for index, (name, entry) in enumerate(store.entries.items()):
        gradient = entry.parameter.grad
        if gradient is None or not gradient.numel():
            continue
        counts = _counts(gradient)
        if counts is not None:
            return Finding(
                (SUM, 0, 0, 0, index),
                f"the gradient of {name} has {counts}{{rank}}, after sums over ranks and micro-batches whose terms are finite",
            )
        size = float(gradient.abs().max())
        if size > largest:
            largest, which = size, name
    # Squares of more than this are beyond float32.
    if largest > math.sqrt(torch.finfo(torch.float32).max) / 1e3:
        text = f"all gradients are finite, their squares are not: {which} has one of {largest:.2g}{{rank}}"
        return Finding((SUM, 1, 0, 0, 0), text)
    return None


def _earliest(found: Finding, groups: Groups) -> Finding:
    """The first of the findings of all ranks, on all ranks."""
    mine = Finding(found.place, found.text, groups.rank)
    span = groups.span(groups.mesh.names)
    if span.group is None:
        return mine
    text = json.dumps(asdict(mine))
    while len(text.encode()) > _TEXT_BYTES:
        mine = Finding(mine.place, mine.text[: len(mine.text) // 2], mine.rank)
        text = json.dumps(asdict(mine))
    own = torch.zeros(_TEXT_BYTES, dtype=torch.uint8, device=groups.device)
    own[: len(text.encode())] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    everyone = own.new_empty(span.size * _TEXT_BYTES)
    dist.all_gather_single(everyone, own, group=span.group)
    texts = [bytes(part.tolist()).rstrip(b"\0").decode() for part in everyone.cpu().view(span.size, -1)]
    findings = [Finding(tuple(each["place"]), each["text"], each["rank"]) for each in map(json.loads, texts)]
    return min(findings, key=lambda finding: (finding.place, finding.rank))


# ---- the ops of a step -------------------------------------------------------------------------------------------


@dataclass
class _Watch:
    """Looks at every op of one rank model, and keeps the first finding."""

    model: RankModel
    stage: int
    first: Finding = field(default_factory=lambda: Finding((NOTHING, 0, 0, 0, 0)))
    runs: int = 0  # calls of the forward so far
    handles: list[Any] = field(default_factory=list)

    def keep(self, finding: Finding) -> None:
        if finding.place < self.first.place:
            self.first = finding

    def function(self, graph: GraphModule) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            if in_backward():  # recomputed: looked at already
                return graph(*arguments)
            calls = self.model.program.calls
            micro, index = divmod(self.runs, len(calls))
            self.runs += 1
            look = _Look(graph, self, micro, index)
            results = look.run(*arguments)
            look.env = {}  # hooks hold on to `look`, and need no values
            return results

        return run


@contextmanager
def _watching(watched: Sequence[_Watch]) -> Iterator[None]:
    """The models' blocks run op by op, looked at. Nothing of it is left afterwards."""
    before = [each.model.functions for each in watched]
    for each in watched:
        each.model.functions = {
            name: each.function(bind(block, each.model.groups))
            for name, block in each.model.program.blocks.items()
        }
    try:
        yield
    finally:
        for each, functions in zip(watched, before, strict=True):
            each.model.functions = functions
            for handle in each.handles:
                handle.remove()


class _Look(Interpreter):
    """Runs one call's graph and looks at the result of every node, and later at its gradient."""

    def __init__(self, graph: GraphModule, watch: _Watch, micro: int, index: int) -> None:
        super().__init__(graph)
        self.watch, self.micro, self.index = watch, micro, index
        self.call = watch.model.program.calls[index]
        self.bad: dict[Node, tuple[bool, bool]] = {}  # node -> whether it has nan, has an infinity
        self.born: list[tuple[int, str]] = []
        self.count = 0

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        self.count += 1
        if n.op == "output":
            self._end(n)
        elif isinstance(result, Tensor):
            self._look(n, result)
            if result.requires_grad and torch.is_grad_enabled():
                hook = partial(self._gradient, n, self.count)
                self.watch.handles.append(result.register_hook(hook))
        elif isinstance(result, (tuple, list)):
            self._look(n, *(part for part in result if isinstance(part, Tensor)))
        return result

    def _look(self, node: Node, *results: Tensor) -> None:
        flags = [_flags(result) for result in results]
        nan, infinite = any(nan for nan, _ in flags), any(infinite for _, infinite in flags)
        self.bad[node] = nan, infinite
        if not (nan or infinite) or node.op != "call_function":
            return
        inputs = [self.bad.get(each, (False, False)) for each in node.all_input_nodes]
        new_nan = nan and not any(each[0] for each in inputs)
        new_infinity = infinite and not any(map(any, inputs)) and not _writes_infinity(node)
        if new_nan or new_infinity:
            self.born.append((self.count, self._text(node, results)))

    def _end(self, output: Node) -> None:
        """What was made here counts if it leaves the call: else a mask or a softmax has taken it away."""
        if self.born and any(any(self.bad.get(node, ())) for node in output.all_input_nodes):
            count, text = self.born[0]
            self.watch.keep(Finding((FORWARD, self.micro, self.watch.stage, self.index, count), text))

    def _gradient(self, node: Node, count: int, gradient: Tensor) -> None:
        nan, infinite = _flags(gradient)
        if not nan and not infinite:
            return
        place = (BACKWARD, self.micro, -self.watch.stage, -self.index, -count)
        if place < self.watch.first.place:
            users = ", ".join(f"%{user.name} = {op_name(user)}" for user in node.users if user.op != "output")
            after = f", from the backward of {users}" if users else ", which came from the call after it"
            text = f"{_counts(gradient)} in the gradient of %{node.name}{after}; {self._place(node)}"
            self.watch.keep(Finding(place, text))

    def _text(self, node: Node, results: Sequence[Tensor]) -> str:
        counts = " and ".join(filter(None, map(_counts, results)))
        inputs = ", ".join(
            f"%{each.name} up to {_largest(self.env[each]):.2g}"
            for each in node.all_input_nodes
            if isinstance(self.env.get(each), Tensor) and self.env[each].is_floating_point()
        )
        made = f"{counts} in %{node.name} = {op_name(node)}"
        return made + (f" of {inputs}" if inputs else "") + f"; {self._place(node)}"

    def _place(self, node: Node) -> str:
        layer = f", layer {self.call.path}" if self.call.path else ""
        line = _line(node)
        return f"block {self.call.block}{layer}{{rank}}" + (f", {line}" if line else "")


def _flags(value: Any) -> tuple[bool, bool]:
    """Whether a tensor has nan, and infinities."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return False, False
    if bool(torch.isfinite(value).all()):
        return False, False
    return bool(torch.isnan(value).any()), bool(torch.isinf(value).any())


def _counts(value: Tensor) -> str | None:
    """`12 nan of 4,096 values`; None if all are finite."""
    if not any(_flags(value)):
        return None
    counted = {"nan": int(torch.isnan(value).sum()), "infinite": int(torch.isinf(value).sum())}
    return " and ".join(f"{n:,} {name}" for name, n in counted.items() if n) + f" of {value.numel():,} values"


def _largest(value: Tensor) -> float:
    return float(value.detach().abs().max()) if value.numel() else 0.0


def _writes_infinity(node: Node) -> bool:
    """Whether the graph itself has the infinity as a number: `masked_fill(%scores, %mask, -inf)`."""
    numbers = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, float)]
    return any(math.isinf(value) for value in numbers)


def _line(node: Node) -> str:
    """The line of the model's code: the last of the node's stack trace that is not torch's own."""
    lines = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines() if "File " in line]
    own = [line for line in lines if "/torch/nn/" not in line] or lines
    if not own:
        return ""
    _, _, rest = own[-1].partition('File "')
    file, _, rest = rest.partition('", line ')
    return f"at {file.rsplit('/', 1)[-1]}:{rest.partition(',')[0]}"
