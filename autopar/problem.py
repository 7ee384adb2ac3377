"""Problem: what the placement search sees of a Program, without torch; and Solution, what it gives back.

A Problem has one `Op` per node of each unique block, weighted by how often the block is called. Values are named
`block/node`. Values that are handed from block to block (the hidden state, a rotary table) share an `interface`:
every block that makes or takes one agrees on its sharding, so each block is lowered once.

Text form (for tests written by hand, and `--dump`):

    value layers/input0: float32[8, 64, 32] interface=hidden
    value layers/w: float32[128, 32] state trainable
    op layers/linear = aten.linear(layers/input0, layers/w) x4: b s k, n k -> b s n  {b: batch, n: ffn}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.program import TensorInfo
from autopar.rules.rule import Rule
from autopar.sharding import Sharding

Choice = Mapping[str, str | None]  # mesh axis -> the factor it splits, SUMS, or None (repeat the op)


@dataclass(frozen=True)
class Value:
    """A tensor of a block. `state`: bound to a parameter or buffer; `gradient`: a gradient flows back through it;
    `source`: arrives from outside of the program (an input of the model: any rank can read its own piece);
    `interface`: the name it shares with the values it is handed to or from, if any.
    `axes`: logical name per dim ("" where unknown)."""

    name: str
    info: TensorInfo
    axes: tuple[str, ...]
    state: bool = False
    gradient: bool = False
    source: bool = False
    interface: str | None = None

    def __str__(self) -> str:
        words = [word for word in ("state", "gradient", "source") if getattr(self, word)]
        if self.interface:
            words.append(f"interface={self.interface}")
        axes = f" ({' '.join(axis or '_' for axis in self.axes)})" if any(self.axes) else ""
        return f"value {self.name}: {self.info}{axes} {' '.join(words)}".rstrip()


@dataclass(frozen=True)
class Op:
    """One node. `rule` None: kept whole on every rank. `logical`: factor -> logical axis name.
    `times`: how often it runs per step and micro-batch. `free`: moves no data (a view)."""

    name: str
    kind: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    rule: Rule | None
    times: int = 1
    free: bool = False
    logical: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        names = ", ".join(f"{factor}: {name}" for factor, name in self.logical.items())
        rule = f"{self.rule}" if self.rule else "no rule"
        return f"op {self.name} = {self.kind}({', '.join(self.operands)}) x{self.times}: {rule}  {{{names}}}"


@dataclass(frozen=True)
class Problem:
    """`outputs`: values that must end whole on every rank (the loss). `fixed`: op -> choices that a user's
    annotations decide; `asked`: the ops that do so by what was said of a tensor. `batch`: the size of the logical axis `batch` in these shapes."""

    values: Mapping[str, Value]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]
    batch: int
    fixed: Mapping[str, Choice] = field(default_factory=dict)
    asked: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield from map(str, self.values.values())
        for op in self.ops:
            fixed = self.fixed.get(op.name)
            yield str(op) + (f"  fixed {dict(fixed)}" if fixed else "")
        yield f"outputs {', '.join(self.outputs)}"

    def with_batch(self, batch: int) -> Problem:
        """The same problem with another batch size (micro-batches): only sizes on the batch axis change."""
        if batch == self.batch:
            return self

        def scaled(size: int) -> int:
            return size * batch // self.batch

        values = {
            name: replace(
                value,
                info=TensorInfo(
                    tuple(
                        scaled(size) if axis == "batch" else size
                        for size, axis in zip(value.info.shape, value.axes, strict=True)
                    ),
                    value.info.dtype,
                ),
            )
            for name, value in self.values.items()
        }
        ops = tuple(
            op
            if op.rule is None
            else replace(
                op,
                rule=op.rule.with_sizes(
                    {
                        name: scaled(op.rule.sizes[name])
                        for name, axis in op.logical.items()
                        if axis == "batch"
                    }
                ),
            )
            for op in self.ops
        )
        return replace(self, values=values, ops=ops, batch=batch)


@dataclass(frozen=True)
class Solution:
    """`choices`: per op. `shardings`: of every value as it is made (or, for state and block inputs, as it arrives).
    `cost_s`: seconds per micro-batch by kind ("compute", "tp communication", ...), forward and backward, and
    `objective_s` their sum as the search counted it."""

    choices: Mapping[str, Choice]
    shardings: Mapping[str, Sharding]
    cost_s: Mapping[str, float]
    objective_s: float
