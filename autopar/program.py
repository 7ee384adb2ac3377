"""Program: the model as a short list of calls to unique blocks.

A 126-layer model is one decoder block called 126 times between a prologue and an epilogue. Each block is one
functional `torch.fx.GraphModule` of ATen ops whose placeholders are, in order, the state it reads (parameters,
buffers, constants; named relative to the layer) and the values it takes. `str(program)` shows all of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from autopar.sharding import Sharding, Use, bytes_of

if TYPE_CHECKING:
    import torch
    from torch.fx import GraphModule, Node

# Bytes per element by dtype name (torch's names without the prefix).
ITEM_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype (torch's name without the prefix) of a tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return bytes_of(self.shape, ITEM_BYTES[self.dtype])

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("float", "bfloat", "complex"))

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Piece:
    """A range of one dim of a packed parameter of the model. `shape`: of the whole parameter.

    A state that is a piece is named as Python would take it: `h.0.attn.c_attn.weight[:, 64:128]`.
    """

    parameter: str
    dim: int
    start: int
    stop: int
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.parameter}[{':, ' * self.dim}{self.start}:{self.stop}]"


@dataclass(frozen=True)
class StateInfo(TensorInfo):
    """A parameter, buffer or constant of the model, or a piece of a packed parameter (see `passes/unpack.py`).
    `trainable` parameters get gradients and optimizer state."""

    kind: str = "parameter"  # or "buffer", "constant"
    trainable: bool = False
    piece: Piece | None = None

    def source(self, name: str) -> str:
        """The model's own name of what the state called `name` is, or is a piece of."""
        return self.piece.parameter if self.piece else name

    @property
    def source_shape(self) -> tuple[int, ...]:
        return self.piece.shape if self.piece else self.shape

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This state out of the model's whole tensor: a view of the piece, or all of it."""
        if self.piece is None:
            return whole
        return whole.narrow(self.piece.dim, self.piece.start, self.piece.stop - self.piece.start)

    def named(self, name: str) -> StateInfo:
        """The same state of another layer, where it is called `name`."""
        if self.piece is None:
            return self
        suffix = self.piece.name.removeprefix(self.piece.parameter)
        return replace(self, piece=replace(self.piece, parameter=name.removesuffix(suffix)))


@dataclass(frozen=True)
class Block:
    """One unique piece of the model.

    `state` and `inputs` are placeholder names of `graph` in order (all of `state` first); the graph returns a
    tuple of `len(outputs)` tensors.
    """

    name: str
    graph: GraphModule
    state: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]  # the nodes returned

    def node(self, name: str) -> Node:
        found: Node = next(node for node in self.graph.graph.nodes if node.name == name)
        return found

    @property
    def op_nodes(self) -> list[Node]:
        return [node for node in self.graph.graph.nodes if node.op == "call_function"]


@dataclass(frozen=True)
class Call:
    """One call of a block: what each placeholder is bound to (a state name, or a value), and the values it makes.

    `path` is the module path of the layer (`model.layers.3`), empty for what stands outside of layers.
    """

    block: str
    state: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    path: str = ""


class Condition(ABC):
    """What must hold of the values of a batch (of a micro-batch, if there are several) for a program to be right for it.

    `inputs`: what it looks at. `where`: the line of the model's code.
    """

    inputs: tuple[str, ...]
    where: str

    @property
    @abstractmethod
    def hint(self) -> str:
        """What to try where it does not hold."""

    @abstractmethod
    def violated(self, batch: Mapping[str, torch.Tensor]) -> str | None:
        """What does not hold, in a sentence; None if it does."""


@dataclass(frozen=True)
class Program:
    """Blocks, the calls that make the model of them, and the model's state.

    `inputs`: the names of the model's tensor inputs (values). `outputs`: name -> value; a training program has
    `loss`. `tied`: alias -> the state name that stands for it. `notes`: what capture had to decide or leave out.
    `fixed`: inputs whose values are constants of the program: a batch with other values is not for it. `conditions`: what must hold of a batch
    (`passes/place_counts.py`, `passes/known_values.py`).
    """

    name: str
    blocks: Mapping[str, Block]
    calls: tuple[Call, ...]
    state: Mapping[str, StateInfo]
    inputs: Mapping[str, TensorInfo]
    outputs: Mapping[str, str]
    tied: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    fixed: Mapping[str, torch.Tensor] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()

    @property
    def multiplicity(self) -> Counter[str]:
        """How often each block is called."""
        return Counter(call.block for call in self.calls)

    @property
    def parameter_count(self) -> int:
        return sum(_count(info) for info in self.state.values() if info.kind == "parameter")

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"program {self.name}: {len(self.calls)} calls of {len(self.blocks)} blocks, {self.parameter_count:,} parameters"
        for name, info in self.inputs.items():
            yield f"input %{name}: {info}"
        for alias, name in self.tied.items():
            yield f"tied {alias} = {name}"
        for note in self.notes:
            yield f"note {note}"
        for name, times in self.multiplicity.items():
            yield ""
            yield f"block {name} (called {times}x)"
            yield from (f"  {line}" for line in format_block(self.blocks[name]))
        yield ""
        for call in self.calls:
            arguments = ", ".join(f"%{value}" for value in call.inputs)
            results = ", ".join(f"%{value}" for value in call.outputs)
            yield f"{results or '()'} = {call.block}({arguments})" + (f"  # {call.path}" if call.path else "")
        for name, value in self.outputs.items():
            yield f"return {name} = %{value}"


def _count(info: TensorInfo) -> int:
    total = 1
    for size in info.shape:
        total *= size
    return total


def format_block(block: Block) -> Iterator[str]:
    """One line per node: `%view: float32[4, 16, 4, 16] [4@dp, 16, 4@tp, 16] = aten.view(%linear, ...)`."""
    for node in block.graph.graph.nodes:
        info = node_info(node)
        shape = info.shape if info else ()
        notes = []
        sharding: Sharding | None = node.meta.get("sharding")
        if sharding is not None:
            notes.append(sharding.format(shape if len(shape) == len(sharding.dims) else None))
        names = node.meta.get("axes")
        if names and any(names):
            notes.append("(" + " ".join(name or "_" for name in names) + ")")
        described = f"%{node.name}: {info}" if info else f"%{node.name}"
        described = " ".join([described, *notes])
        if node.op == "placeholder":
            yield f"{described} = {'state' if node.name in block.state else 'input'}"
        elif node.op == "output":
            yield "return " + ", ".join(f"%{name}" for name in block.outputs)
        else:
            arguments = [_argument(argument) for argument in node.args]
            arguments += [f"{key}={_argument(value)}" for key, value in node.kwargs.items()]
            yield f"{described} = {op_name(node)}({', '.join(arguments)})"
            uses: Mapping[str, Use] = node.meta.get("uses", {})
            for operand, use in uses.items():
                sums = f" gradient sums over {', '.join(use.grad_sums)}" if use.grad_sums else ""
                yield f"    takes %{operand} as {use.sharding}{sums}"


def _argument(value: object) -> str:
    from torch.fx import Node

    if isinstance(value, Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_argument(item) for item in value) + "]"
    return str(value)


def op_name(node: Node) -> str:
    """`aten.linear`, `autopar.cross_entropy`: the op of a call_function node, as rules and plans write it."""
    target = node.target
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return f"{schema.name.replace('::', '.')}"
    return f"{getattr(target, '__module__', '?').split('.')[0]}.{getattr(target, '__name__', target)}"


def node_info(node: Node) -> TensorInfo | None:
    """Shape and dtype of a node's (single) tensor result, from `meta["val"]`; None for other results."""
    return tensor_info(node.meta.get("val"))


def batch_of(inputs: Mapping[str, TensorInfo]) -> int | None:
    """The number of sequences (or images) in a batch: of token ids and labels, where there are any. Pixels of all
    images may lie one after another, with another number of rows."""
    named = [inputs[name] for name in ("input_ids", "decoder_input_ids", "labels") if name in inputs]
    firsts = [info.shape[0] for info in (*named, *inputs.values()) if info.shape]
    return firsts[0] if firsts else None


def batch_dim(name: str, shape: tuple[int, ...]) -> int:
    """Which dim of an input counts sequences: the first, except of positions in several directions [3, batch, seq]."""
    return 1 if name.endswith("position_ids") and len(shape) == 3 else 0


def tensor_info(value: object) -> TensorInfo | None:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return None
    return TensorInfo(tuple(int(size) for size in shape), str(dtype).removeprefix("torch."))
