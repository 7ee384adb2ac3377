"""Elimination: the exact minimum of a sum of small cost tables (min-sum bucket elimination).

In:  the number of choices of each variable, and factors: tables over a few variables.
Out: the choice of each variable that minimises the sum of all tables, and the sum.

    minimise([2, 2], [Factor((0,), [1, 0]), Factor((0, 1), [[0, 5], [3, 9]])]) -> ([0, 0], 1.0)

A variable is eliminated by adding up the tables that mention it and keeping, for every choice of its neighbours,
the best of its own choices (Bertele and Brioschi 1972; Dechter 1999, "Bucket elimination"). The cost is exponential
only in the treewidth, which is small for a model's blocks: they are chains with a few parallel paths.

Where it is not small, `improve` holds the variables that stand in the way at the choice they have and finds the minimum
over all others, again and again with other variables held, until nothing gets better (cutset conditioning, Dechter
1990, as a large neighbourhood search): never worse than where it began, and no longer certainly the least.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]

MAX_ENTRIES = 40_000_000  # the largest table made, in entries of 8 bytes
_HELD_ENTRIES = (
    1_000_000  # the same while variables are held: many rounds of small tables find more than few large
)
_IDLE_ROUNDS = 3  # without anything better, each with other variables held


class TooWideError(Exception):
    """The tables would outgrow MAX_ENTRIES; the caller has to relax the problem."""


@dataclass(frozen=True)
class Factor:
    """One axis of `table` per variable, in order; `inf` marks what is not allowed."""

    variables: tuple[int, ...]
    table: Table


def minimise(sizes: Sequence[int], factors: Iterable[Factor]) -> tuple[list[int], float]:
    """Choices and their sum; equal sums are decided for the lower choice. Raises TooWideError."""
    chosen, total, _ = _eliminate(sizes, factors, None)
    return chosen, total


def improve(sizes: Sequence[int], factors: Sequence[Factor]) -> tuple[list[int], float]:
    """Choices and their sum, from the first choice of every variable on; for what `minimise` finds too wide."""
    chosen = [0] * len(sizes)
    total = sum(float(factor.table[(0,) * factor.table.ndim]) for factor in factors)
    held_before: dict[int, int] = {}  # variable -> rounds in which it was held
    idle = 0
    while idle < _IDLE_ROUNDS:

        def hold(around: Sequence[int], now: list[int] = chosen) -> tuple[int, int]:
            variable = min(around, key=lambda v: (held_before.get(v, 0), -sizes[v], v))
            return variable, now[variable]

        found, value, held = _eliminate(sizes, factors, hold)
        for variable in held:
            held_before[variable] = held_before.get(variable, 0) + 1
        idle = 0 if value < total - abs(total) * 1e-9 else idle + 1
        if value < total:
            chosen, total = found, value
    return chosen, total


def _eliminate(
    sizes: Sequence[int],
    factors: Iterable[Factor],
    hold: Callable[[Sequence[int]], tuple[int, int]] | None,
) -> tuple[list[int], float, set[int]]:
    """Choices, their sum, and the variables that were held. `hold`: of some variables, one to hold and its choice."""
    chosen = [0] * len(sizes)
    held: set[int] = set()
    touching: list[dict[int, Factor]] = [{} for _ in sizes]
    neighbours: list[set[int]] = [set() for _ in sizes]
    serial = 0
    constant = 0.0

    def insert(factor: Factor) -> None:
        nonlocal serial, constant
        if not factor.variables:
            constant += float(factor.table)
            return
        serial += 1
        for variable in factor.variables:
            touching[variable][serial] = factor
            neighbours[variable].update(factor.variables)
            neighbours[variable].discard(variable)

    for factor in factors:
        insert(factor)
    logs = [math.log(max(size, 1)) for size in sizes]

    def weight_of(v: int) -> float:
        return round(sum(logs[n] for n in neighbours[v]) + logs[v], 6)

    weight = {v: weight_of(v) for v in range(len(sizes))}
    heap = [(seen, v) for v, seen in weight.items()]
    heapq.heapify(heap)
    order: list[tuple[int, tuple[int, ...], NDArray[np.intp]]] = []
    while weight:
        seen, variable = heapq.heappop(heap)
        if weight.get(variable) != seen:
            continue  # an older weight
        del weight[variable]
        around = tuple(sorted(neighbours[variable]))
        shape = (*(sizes[n] for n in around), sizes[variable])
        if math.prod(shape) > MAX_ENTRIES and hold is None:
            raise TooWideError(f"a table of {shape} entries")
        if math.prod(shape) > (MAX_ENTRIES if hold is None else _HELD_ENTRIES):
            assert hold is not None
            one, chosen[one] = hold(around)
            held.add(one)
            weight.pop(one, None)
            for used, factor in touching[one].items():
                for n in factor.variables:
                    if n != one:
                        del touching[n][used]
                axis = factor.variables.index(one)
                insert(
                    Factor(
                        factor.variables[:axis] + factor.variables[axis + 1 :],
                        np.asarray(factor.table.take(chosen[one], axis=axis)),
                    )
                )
            touching[one] = {}
            for n in neighbours[one]:
                neighbours[n].discard(one)
                if n in weight:
                    weight[n] = weight_of(n)
                    heapq.heappush(heap, (weight[n], n))
            if variable not in weight:
                weight[variable] = weight_of(variable)
                heapq.heappush(heap, (weight[variable], variable))
            continue
        total = _sum(touching[variable].values(), (*around, variable), shape)
        best = np.argmin(total, axis=-1)
        order.append((variable, around, best))
        reduced = np.take_along_axis(total, best[..., None], axis=-1)[..., 0]
        for used, factor in touching[variable].items():
            for n in factor.variables:
                if n != variable:
                    del touching[n][used]
        for n in around:
            neighbours[n].discard(variable)
        insert(Factor(around, reduced))
        for n in around:
            weight[n] = weight_of(n)
            heapq.heappush(heap, (weight[n], n))
    for variable, around, best in reversed(order):
        chosen[variable] = int(best[tuple(chosen[n] for n in around)])
    return chosen, constant, held


def _sum(factors: Iterable[Factor], variables: tuple[int, ...], shape: tuple[int, ...]) -> Table:
    """The factors added up over `variables` (those of each factor brought into that order and broadcast).

    Small tables are joined with each other before they are spread over the whole shape.
    """
    place = {variable: index for index, variable in enumerate(variables)}
    pending: dict[tuple[int, ...], Table] = {}
    for factor in factors:
        axes = sorted(range(len(factor.variables)), key=lambda axis: place[factor.variables[axis]])
        scope = tuple(factor.variables[axis] for axis in axes)
        table = factor.table.transpose(axes)
        pending[scope] = pending[scope] + table if scope in pending else table
    total = np.zeros((1,) * len(shape))
    for scope, table in sorted(pending.items(), key=lambda item: item[1].size):
        expanded = [1] * len(shape)
        for axis, variable in enumerate(scope):
            expanded[place[variable]] = table.shape[axis]
        total = total + table.reshape(expanded)
    return np.broadcast_to(total, shape)
