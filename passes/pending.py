"""Pending: layers left out one after the other are one op while a model is traced, and a node each afterwards.

In:  the calls of left-out layers (`passes/boundary.py`), in order, with what they are given.
Out: results that the graph has only when somebody asks for them; the exported graph, with a node for every layer.

    x = layers[2](x) ... x = layers[125](x)      nothing is traced; x is a `Pending`
    norm(x)                                      left_out_layers([x2, cos, sin], run 0) -> the x of layer 125
    after export                                 left_out_layer([x2, cos, sin], "layers.2"), left_out_layer(...), ...

torch takes some ten milliseconds to trace an op twice, so the stand-ins of a deep model cost more than its layers.
The model's own code still runs for every layer, and a run of layers ends at the first thing it does that is not to read
a shape or dtype: the graph is, node for node, the one that tracing every stand-in gives.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode

from autopar.torch_private import fake_mode_of, plain_dispatch, pytree, wrapper_tensor

torch.library.define(
    "autopar::left_out_layer", "(Tensor[] values, str path, int call, str outputs) -> Tensor[]"
)
torch.library.define("autopar::left_out_layers", "(Tensor[] values, int run, str outputs) -> Tensor[]")
LEFT_OUT = torch.ops.autopar.left_out_layer.default
RUN = torch.ops.autopar.left_out_layers.default

_ANY: Any = Tensor  # whose properties are descriptors, which its types do not say
# What a tensor that does not exist yet can tell, and what changes no order of ops.
_READS = frozenset(
    (
        _ANY.shape.__get__, _ANY.dtype.__get__, _ANY.device.__get__, _ANY.ndim.__get__, Tensor.size, Tensor.dim,
        Tensor.numel, Tensor.is_floating_point, torch.is_floating_point,
    )
)  # fmt: skip


def described_ones(text: str) -> list[Tensor]:
    return [_described(one) for one in text.split(";")]


@torch.library.register_fake("autopar::left_out_layer")  # type: ignore[untyped-decorator]
def _left_out(values: Sequence[Tensor], path: str, call: int, outputs: str) -> list[Tensor]:
    return described_ones(outputs)


@torch.library.register_fake("autopar::left_out_layers")  # type: ignore[untyped-decorator]
def _run(values: Sequence[Tensor], run: int, outputs: str) -> list[Tensor]:
    return described_ones(outputs)


def describe(tensor: Tensor) -> str:
    sizes, strides = (",".join(map(str, numbers)) for numbers in (tensor.shape, tensor.stride()))
    return f"{str(tensor.dtype).removeprefix('torch.')}|{sizes}|{strides}|{tensor.device}"


def _described(text: str) -> Tensor:
    dtype, sizes, strides, device = text.split("|")
    shape, stride = (
        tuple(int(number) for number in numbers.split(",") if number) for numbers in (sizes, strides)
    )
    return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)


class Pending(Tensor):
    """A result of a left-out layer that is not in the graph yet. Whatever is done with it puts it there.

    `run`, `place`: the run of layers that makes it, and where. `made`: the tensor of the graph, once there is one.
    """

    run: Run
    place: _Taken
    made: Tensor | None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _READS:
            with plain_dispatch():
                return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map(settled, (args, dict(kwargs or {})))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(
            f"{func} is given the result of a left-out layer behind the back of torch functions"
        )


def settled(value: Any) -> Any:
    """`value`, or the tensor of the graph that it stands for."""
    if not isinstance(value, Pending):
        return value
    value.run.end()
    assert value.made is not None
    return value.made


@dataclass(frozen=True)
class _Taken:
    """A result of a layer of a run."""

    layer: int
    slot: int


@dataclass(frozen=True)
class _LeftOut:
    """A call of a left-out layer. `arguments`: results of the run, or places among the values from outside of it.
    `outputs`: what its results look like."""

    path: str
    call: int
    arguments: tuple[_Taken | int, ...]
    outputs: tuple[str, ...]


@dataclass
class Run:
    """Calls of left-out layers between which nothing was traced. `wanted`: the results that somebody can still ask
    for at its end."""

    number: int
    gradients: bool
    layers: list[_LeftOut] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)  # id of a value -> its place
    results: list[weakref.ref[Pending]] = field(default_factory=list)
    wanted: list[_Taken] = field(default_factory=list)
    over: bool = False

    def given(self, argument: Tensor) -> _Taken | int:
        if isinstance(argument, Pending) and argument.run is self and not self.over:
            return argument.place
        value = settled(argument)
        place = self.places.setdefault(id(value), len(self.values))
        if place == len(self.values):
            self.values.append(value)
        return place

    def end(self) -> None:
        """Put the run into the graph that is traced, as one op."""
        if self.over:
            return
        self.over = True
        if torch.is_grad_enabled() != self.gradients:
            raise RuntimeError("gradients were switched on or off behind the back of torch functions")
        alive = [pending for result in self.results if (pending := result()) is not None]
        self.wanted = [pending.place for pending in alive]
        self.results.clear()
        if not alive:
            return
        texts = [self.layers[place.layer].outputs[place.slot] for place in self.wanted]
        made = torch.ops.autopar.left_out_layers(self.values, self.number, ";".join(texts))
        for pending, tensor in zip(alive, made, strict=True):
            pending.made = tensor


@dataclass
class Runs:
    """The runs of left-out layers of one capture."""

    all: list[Run] = field(default_factory=list)

    def call(
        self, path: str, call: int, arguments: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """The results of a left-out layer, which look like `outputs`."""
        if not self.all or self.all[-1].over:
            self.all.append(Run(len(self.all), torch.is_grad_enabled()))
        run = self.all[-1]
        given = tuple(run.given(argument) for argument in arguments)
        made: list[Tensor] = []
        with plain_dispatch():
            for slot, output in enumerate(outputs):
                pending: Pending = wrapper_tensor(Pending, output)
                pending.run, pending.place, pending.made = run, _Taken(len(run.layers), slot), None
                made.append(pending)
                run.results.append(weakref.ref(pending))
            texts = tuple(describe(output) for output in outputs)
        run.layers.append(_LeftOut(path, call, given, texts))
        return made

    def end(self) -> None:
        if self.all:
            self.all[-1].end()

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Inside, a run ends before anything else is traced."""
        with _InOrder(self):
            yield

    def expand(self, graph: Graph) -> None:
        """Put a node for every layer in the place of each run."""
        for node in list(graph.nodes):
            if node.target is RUN:
                _expand(graph, node, self.all[node.args[1]])


class _InOrder(TorchFunctionMode):
    def __init__(self, runs: Runs) -> None:
        super().__init__()
        self.runs = runs

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _READS:
            self.runs.end()
        return func(*args, **(kwargs or {}))


def _expand(graph: Graph, node: Node, run: Run) -> None:
    """The layers of `run` before `node`, whose users then take theirs from them."""
    values: Any = node.args[0]
    taken: dict[_Taken, list[Node]] = {}
    for user in list(node.users):
        assert user.target is operator.getitem
        taken.setdefault(run.wanted[user.args[1]], []).append(user)  # type: ignore[index]
    within = {place for layer in run.layers for place in layer.arguments if isinstance(place, _Taken)}
    found: dict[_Taken, Node] = {}
    looks: dict[str, list[Tensor]] = {}
    with fake_mode_of(node.meta["val"][0]), graph.inserting_before(node):
        for number, layer in enumerate(run.layers):
            arguments = [
                found[place] if isinstance(place, _Taken) else values[place] for place in layer.arguments
            ]
            text = ";".join(layer.outputs)
            made = graph.call_function(LEFT_OUT, (arguments, layer.path, layer.call, text))
            if text not in looks:
                looks[text] = described_ones(text)
            made.meta["val"] = looks[text]
            for slot in range(len(layer.outputs)):
                place = _Taken(number, slot)
                for user in taken.get(place, ()):  # which may be outputs of the graph, by their names
                    user.args = (made, slot)
                    node.prepend(user)
                    found[place] = user
                if place in within and place not in found:
                    found[place] = graph.call_function(operator.getitem, (made, slot))
                    found[place].meta["val"] = made.meta["val"][slot]
    graph.erase_node(node)
