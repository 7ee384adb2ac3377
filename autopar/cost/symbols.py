"""Symbols: numpy arrays of sympy expressions, so that the cost model itself prints as a formula.

In:  a symbol in the place of a number (`workload.at(symbolic(S))`, micro-batches `symbolic(M)`).
Out: what the same numpy code makes of it: sums, products, Max, Min, powers of sympy.

    np.maximum(2.0 * symbolic(S), 3.0)  ->  [Max(3, 2*S)]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import sympy


class Symbolic(np.ndarray):
    """An object array whose elements are sympy expressions; numpy's functions act on them as on numbers."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        made = _MADE.get(ufunc.__name__)
        options.pop("out", None)
        if made is None or method != "__call__" or options:
            return NotImplemented
        lifted_inputs = [lifted(value).view(np.ndarray) for value in inputs]
        shape = np.broadcast_shapes(*(value.shape for value in lifted_inputs))
        columns = [np.broadcast_to(value, shape).ravel() for value in lifted_inputs]
        out = np.empty(len(columns[0]), dtype=object)
        for index, values in enumerate(zip(*columns, strict=True)):
            out[index] = made(*values)
        return out.reshape(shape).view(Symbolic)

    def __array_function__(self, function: Any, types: Any, inputs: Any, options: Any) -> Any:
        if function is np.where:
            condition, yes, no = inputs
            return _chosen(condition, lifted(yes), lifted(no))
        return super().__array_function__(function, types, inputs, options)


def symbolic(*symbols: sympy.Expr) -> Symbolic:
    """A one-dimensional array of the symbols."""
    out = np.empty(len(symbols), dtype=object)
    out[:] = symbols
    return out.view(Symbolic)


def lifted(value: Any) -> Symbolic:
    """Numbers as expressions; whole ones as integers, so that they cancel."""
    if isinstance(value, Symbolic):
        return value
    array = np.asarray(value)
    out = np.empty(array.size, dtype=object)
    for index, number in enumerate(array.ravel().tolist()):
        out[index] = _number(number)
    return out.reshape(array.shape).view(Symbolic)


def _number(number: Any) -> Any:
    if isinstance(number, bool):
        return sympy.true if number else sympy.false
    if isinstance(number, float) and number.is_integer() and abs(number) < 2**53:
        return sympy.Integer(int(number))
    return sympy.sympify(number)


def _chosen(condition: Any, yes: Symbolic, no: Symbolic) -> Symbolic:
    """np.where; where the condition itself has symbols, a Piecewise."""
    shape = np.broadcast_shapes(np.shape(condition), yes.shape, no.shape)
    which = np.broadcast_to(lifted(condition).view(np.ndarray), shape).ravel()
    one, other = (np.broadcast_to(part.view(np.ndarray), shape).ravel() for part in (yes, no))
    out = np.empty(len(which), dtype=object)
    for index, (test, first, second) in enumerate(zip(which, one, other, strict=True)):
        truth = test if isinstance(test, sympy.logic.boolalg.Boolean) else sympy.Ne(test, 0)
        if truth is sympy.true or truth is sympy.false:
            out[index] = first if truth is sympy.true else second
        else:
            out[index] = sympy.Piecewise((first, truth), (second, True))
    return out.reshape(shape).view(Symbolic)


def _extreme(kind: Any, one: Any, other: Any) -> Any:
    """Max or Min, flat; sympy decides only what takes no effort, as its comparisons of long expressions take minutes."""
    if one.is_number and other.is_number:
        return kind(one, other)
    parts = {part for side in (one, other) for part in (side.args if isinstance(side, kind) else (side,))}
    parts.discard(sympy.S.NegativeInfinity if kind is sympy.Max else sympy.S.Infinity)
    if len(parts) == 1:
        return next(iter(parts))
    simple = all(part.is_number or part.is_Symbol for part in parts)
    return kind(*sorted(parts, key=sympy.default_sort_key), evaluate=simple)


_MADE: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "true_divide": lambda a, b: a / b,
    "floor_divide": lambda a, b: sympy.floor(a / b),
    "remainder": lambda a, b: sympy.Mod(a, b),
    "negative": lambda a: -a,
    "power": lambda a, b: a**b,
    "cbrt": lambda a: a ** sympy.Rational(1, 3),
    "sqrt": lambda a: a ** sympy.Rational(1, 2),
    "log2": lambda a: sympy.log(a, 2),
    "ceil": sympy.ceiling,
    "floor": sympy.floor,
    "maximum": lambda a, b: _extreme(sympy.Max, a, b),
    "minimum": lambda a, b: _extreme(sympy.Min, a, b),
    "less": sympy.Lt,
    "less_equal": sympy.Le,
    "greater": sympy.Gt,
    "greater_equal": sympy.Ge,
    "equal": sympy.Eq,
    "not_equal": sympy.Ne,
    "bitwise_and": sympy.And,
    "bitwise_or": sympy.Or,
    "logical_and": sympy.And,
    "logical_or": sympy.Or,
}
