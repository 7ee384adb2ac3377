"""Formula: a layout's seconds and bytes as sympy expressions in the sequence length S and the batch B.

In:  a Workload, a Layout, a Cluster, a Software.
Out: a Formula. It is the cost model's own code, run on symbols (`symbols.py`): nothing is fitted or modelled twice.

    f = 5.7e-9*S**2 + ...     seconds of one layer's forward for one micro-batch, and other parts of a layer
    forward = 32*M*f + ...    seconds of a step by kind, in the parts and in M = B / (dp * mbs) micro-batches

The pipeline is the closed form's, not the simulator's, and the constants of the device and the stack are numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property, reduce
from typing import Any

import numpy as np
import sympy

from autopar.cluster import Cluster
from autopar.cost.grid import Array, Grid
from autopar.cost.held import PLACES, held
from autopar.cost.layer_time import Ends, LayerTime
from autopar.cost.layout_memory import RESERVED, counted_as, moments
from autopar.cost.layout_time import LayoutTime
from autopar.cost.rates import ALIGNED
from autopar.cost.software import Software
from autopar.cost.symbols import lifted, symbolic
from autopar.layout import Layout
from autopar.workload import Workload

S = sympy.Symbol("S", positive=True, integer=True)
B = sympy.Symbol("B", positive=True, integer=True)
M = sympy.Symbol("M", positive=True, integer=True)
_UNITS = sympy.Symbol("units", positive=True, integer=True)  # S in steps that divide evenly
SHORTEST, LONGEST = 1024, 2**18  # tokens for which a formula holds
_NAMES = {
    "f": "f",
    "b": "b",
    "w": "w",
    "again": "r",
    "tensor": "t",
    "context": "c",
    "expert": "e",
    "hidden": "h",
}
_MODULES: list[Any] = [
    {
        "Max": lambda *parts: reduce(np.maximum, parts),
        "Min": lambda *parts: reduce(np.minimum, parts),
        "ceiling": np.ceil,
    },
    "numpy",
]


@dataclass(frozen=True)
class Formula:
    """`parts`: symbol -> (expression in S, what it is); `time_s`: kind -> expression in parts, S and M;
    `moments`: (when, kind -> bytes in S and M), one of which is the peak. M is B / `per_micro_batch`; S a multiple of
    `step` from SHORTEST to LONGEST tokens, for which terms of Max and Min are left out that never win."""

    layout: Layout
    parts: dict[sympy.Symbol, tuple[sympy.Expr, str]]
    time_s: dict[str, sympy.Expr]
    moments: list[tuple[str, dict[str, sympy.Expr]]]
    per_micro_batch: int
    step: int

    def evaluate(self, seq: Any, batch: Any) -> tuple[dict[str, Array], dict[str, Array]]:
        """(seconds by kind, bytes by kind at the peak), vectorised over arrays of S and B that broadcast."""
        tokens, batches = np.broadcast_arrays(np.asarray(seq, dtype=float), np.asarray(batch, dtype=float))
        micro = batches / self.per_micro_batch
        values = [self._call(one, (S,), (tokens,)) for one, _ in self.parts.values()]
        names, given = (S, M, *self.parts), (tokens, micro, *values)
        times = {kind: self._call(one, names, given) for kind, one in self.time_s.items()}
        peaks = [
            {kind: self._call(one, (S, M), (tokens, micro)) for kind, one in kinds.items()}
            for _, kinds in self.moments
        ]
        tensors = [sum(size for kind, size in peak.items() if kind != RESERVED) for peak in peaks]
        which = np.stack(tensors).argmax(axis=0)
        memory = {
            kind: np.take_along_axis(np.stack([peak[kind] for peak in peaks]), which[None], 0)[0]
            for kind in peaks[0]
        }
        return times, memory

    def lines(self) -> Iterator[str]:
        """As text, numbers to four digits."""
        yield f"formula for {self.layout}"
        yield f"  S tokens per sequence, {SHORTEST} to {LONGEST} in multiples of {self.step}; B sequences per step;"
        yield f"  M = B / {self.per_micro_batch} micro-batches on a rank"
        yield "seconds"
        for symbol, (one, what) in self.parts.items():
            yield f"  {symbol} = {rounded(sympy.expand(one))}   ({what})"
        for kind, one in self.time_s.items():
            yield f"  {kind} = {rounded(one)}"
        peaks = self._peaks()
        same = {kind for kind in peaks[0][1] if len({str(kinds[kind]) for _, kinds in peaks}) == 1}
        yield "bytes at the peak" + (
            ", the largest of several moments" if len(peaks) > 1 else f" ({peaks[0][0]})"
        )
        yield from (f"  {kind} = {rounded(peaks[0][1][kind])}" for kind in peaks[0][1] if kind in same)
        for label, kinds in peaks:
            for kind in kinds.keys() - same if len(peaks) > 1 else ():
                yield f"  {kind} = {rounded(kinds[kind])}   ({label})"

    def _peaks(self) -> list[tuple[str, dict[str, sympy.Expr]]]:
        """The moments that are the peak for some S and B."""
        tokens, micro = np.meshgrid(
            np.geomspace(SHORTEST, LONGEST, 33), [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
        )
        totals = [
            sum(self._call(one, (S, M), (tokens, micro)) for kind, one in kinds.items() if kind != RESERVED)
            for _, kinds in self.moments
        ]
        return [self.moments[index] for index in np.unique(np.stack(totals).argmax(axis=0))]

    @staticmethod
    def _call(expression: sympy.Expr, names: tuple[sympy.Symbol, ...], values: tuple[Array, ...]) -> Array:
        run = sympy.lambdify(names, expression, modules=_MODULES)
        return np.broadcast_to(np.asarray(run(*values), dtype=float), values[0].shape)


class _Named(LayoutTime):
    """A LayoutTime whose layers and ends are symbols, noted with what they stand for."""

    step: int = 1

    @cached_property
    def parts(self) -> dict[sympy.Symbol, tuple[sympy.Expr, str]]:
        return {}

    def _name(self, name: str, value: Any, what: str) -> Any:
        expression = _lasting(_aligned(lifted(value).ravel()[0], self.step), self.step)
        if not expression.free_symbols:
            return symbolic(expression)
        symbol = sympy.Symbol(name, positive=True)
        self.parts[symbol] = expression, what
        return symbolic(symbol)

    @cached_property
    def _mean(self) -> LayerTime:
        one = super().mean_layer()
        said = dict(zip(_NAMES, ("forward", "input gradients", "weight gradients", "recomputed", "tensor traffic",
                                 "context traffic", "expert traffic", "lost to hidden traffic"), strict=True))  # fmt: skip
        return LayerTime(
            *(
                self._name(_NAMES[part.name], getattr(one, part.name), f"{said[part.name]}, one layer")
                for part in fields(LayerTime)
            )
        )

    def mean_layer(self) -> LayerTime:
        return self._mean

    @cached_property
    def _ends(self) -> Ends:
        names = ("f_first", "b_first", "f_last", "b_last")
        said = ("embedding forward", "embedding backward", "head and loss forward", "head and loss backward")
        return Ends(
            *(
                self._name(name, part, what)
                for name, part, what in zip(names, super().ends(), said, strict=True)
            )
        )

    def ends(self) -> Ends:
        return self._ends

    @cached_property
    def _send(self) -> Any:
        return self._name("p", super().send_s(), "one hop of the pipeline")

    def send_s(self) -> Any:
        return self._send


def formula(workload: Workload, layout: Layout, cluster: Cluster, software: Software) -> Formula:
    """The seconds and bytes of a layout for any sequence length and batch."""
    plain = layout.with_(cuts=())
    grid = Grid.of([plain])
    length, micro = workload.at(symbolic(S)), symbolic(M)  # type: ignore[arg-type]
    step = ALIGNED * layout.cp * layout.tp
    model = _Named(length, grid, held(workload, grid), cluster, software, micro)
    model.step = step
    times = {kind: lifted(seconds).ravel()[0] for kind, seconds in model.kinds().items()}
    return Formula(
        plain,
        model.parts,
        {kind: seconds for kind, seconds in times.items() if seconds != 0},
        list(_moments(length, grid, software, micro, step, cluster.device.reserved_bytes)),
        layout.dp * layout.mbs,
        step,
    )


def _moments(
    length: Workload, grid: Grid, software: Software, micro: Any, step: int, reserved: float
) -> Iterator[tuple[str, dict[str, sympy.Expr]]]:
    """The moments that can be the peak, of the ranks that differ."""
    seen: list[dict[str, sympy.Expr]] = []
    pp = int(grid.pp[0])
    for place in PLACES if pp > 2 else ("first", "last") if pp > 1 else ("first",):
        found = moments(length, grid, held(length, grid), software, micro, place)
        for label, kinds in found:
            whole = counted_as(kinds, software, "device", reserved)
            exact = {kind: _aligned(lifted(size).ravel()[0], step) for kind, size in whole.items()}
            if exact in seen or label == "stored":  # what is stored is there at all moments
                continue
            seen.append(exact)
            where = f"{label}, {place} stage" if pp > 1 else label
            yield where, {kind: _lasting(size, step) for kind, size in exact.items()}


def _aligned(expression: Any, step: int) -> Any:
    """The expression for S that are multiples of `step`, of which the remainders are nought."""
    if expression.has(sympy.Mod):
        return expression.subs(S, step * _UNITS).subs(_UNITS, S / step)
    return expression


def _lasting(expression: Any, step: int) -> Any:
    """Without the terms of Max and Min that never win for a multiple of `step` up to LONGEST: all of them are tried."""
    tokens = np.arange(-(-SHORTEST // step) * step, LONGEST + 1, step, dtype=float)

    def value(one: Any) -> Array:
        return Formula._call(one, (S,), (tokens,))

    def pruned(one: Any) -> Any:
        if not one.args:
            return one
        parts = [pruned(part) for part in one.args]
        if not isinstance(one, sympy.Max | sympy.Min) or one.free_symbols != {S}:
            return one.func(*parts)
        values = np.stack([value(part) for part in parts])
        wins = np.unique(values.argmax(axis=0) if isinstance(one, sympy.Max) else values.argmin(axis=0))
        return one.func(*(parts[index] for index in wins))

    return pruned(expression)


def rounded(one: Any) -> Any:
    """The expression with its factors to four digits, whole ones as they are."""
    if one.is_number:
        return one if one.is_Integer else one.evalf(4)
    if isinstance(one, sympy.Mul):
        factor, rest = one.as_independent(*one.free_symbols, as_Add=False)
        others = [rounded(part) for part in sympy.Mul.make_args(rest)]
        return sympy.Mul(rounded(factor), *others, evaluate=False) if factor != 1 else sympy.Mul(*others)
    if isinstance(one, sympy.Pow):
        return one.func(rounded(one.base), one.exp)
    if isinstance(one, sympy.Add):
        return sympy.Add(*map(rounded, one.args))
    if isinstance(one, sympy.Max | sympy.Min):
        return one.func(*map(rounded, one.args), evaluate=False)
    return one
