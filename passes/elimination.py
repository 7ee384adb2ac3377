"""Elimination: the exact minimum of a sum of small cost tables (min-sum bucket elimination).

In:  the number of choices of each variable, and factors: tables over a few variables.
Out: the choice of each variable that minimises the sum of all tables, and the sum.

    minimise([2, 2], [Factor((0,), [1, 0]), Factor((0, 1), [[0, 5], [3, 9]])]) -> ([0, 0], 1.0)

A variable is eliminated by adding up the tables that mention it and keeping, for every choice of its neighbours,
the best of its own choices (Bertele and Brioschi 1972; Dechter 1999, "Bucket elimination"). The cost is exponential
only in the treewidth, which is small for a model's blocks: they are chains with a few parallel paths.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]

MAX_ENTRIES = 40_000_000  # the largest table made, in entries of 8 bytes


class TooWideError(Exception):
    """The tables would outgrow MAX_ENTRIES; the caller has to relax the problem."""


@dataclass(frozen=True)
class Factor:
    """One axis of `table` per variable, in order; `inf` marks what is not allowed."""

    variables: tuple[int, ...]
    table: Table


def minimise(sizes: Sequence[int], factors: Iterable[Factor]) -> tuple[list[int], float]:
    """Choices and their sum; equal sums are decided for the lower choice. Raises TooWideError."""
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
        if math.prod(shape) > MAX_ENTRIES:
            raise TooWideError(f"a table of {shape} entries")
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
    chosen = [0] * len(sizes)
    for variable, around, best in reversed(order):
        chosen[variable] = int(best[tuple(chosen[n] for n in around)])
    return chosen, constant


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
