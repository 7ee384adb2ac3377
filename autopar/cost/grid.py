"""Grid: layouts as columns of numpy arrays, so that a cost is one expression over all of them.

grid = Grid.of([Layout.parse("tp=8,dp=4"), Layout(tp=4, dp=8)]); grid.tp -> array([8, 4]); grid.layout(1)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, wraps
from typing import Any, ParamSpec

import numpy as np
from numpy.typing import NDArray

from autopar.layout import OFFLOAD, ORDERS, PRECISIONS, RECOMPUTE, SCHEDULES, Layout

Array = NDArray[Any]
P = ParamSpec("P")

# What a layer's time and activations depend on, of all that a layout says.
_LAYER = ("mbs", "tp", "cp", "ep", "etp", "sp", "precision", "recompute", "schedule")
_PARTLY = ("recompute_layers", "pp")  # besides, where only some layers are recomputed


@dataclass(frozen=True)
class Grid:
    """Layouts as columns: one array per field of Layout, words as their index. `layout(i)` gives one back."""

    columns: dict[str, Any]

    @staticmethod
    def of(layouts: Sequence[Layout]) -> Grid:
        columns: dict[str, Any] = {}
        for field in fields(Layout):
            if field.name == "cuts":
                continue
            columns[field.name] = np.array(
                [_code(field.name, getattr(layout, field.name)) for layout in layouts]
            )
        return Grid(columns)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.columns[name]
        except KeyError:
            raise AttributeError(name) from None

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def take(self, index: Any) -> Grid:
        return Grid({name: column[index] for name, column in self.columns.items()})

    @cached_property
    def known(self) -> dict[tuple[Any, ...], tuple[Array, tuple[Any, ...]]]:
        """Results of `over_distinct`."""
        return {}

    def with_(self, **columns: Any) -> Grid:
        """The same rows with other columns, each an array or one value for all."""
        count = len(self)
        return Grid(
            {
                name: np.broadcast_to(columns.get(name, column), (count,))
                for name, column in self.columns.items()
            }
        )

    @cached_property
    def compact(self) -> tuple[Grid, Array]:
        """(the distinct rows in what a layer's time and activations depend on, each row's place there)."""
        partly = _PARTLY if np.any(self.columns["recompute_layers"] >= 0) else ()
        first, place = distinct([self.columns[name] for name in (*_LAYER, *partly)])
        return self.take(first), place

    def layout(self, index: int) -> Layout:
        values = {name: _word(name, int(column[index])) for name, column in self.columns.items()}
        return Layout(**values)


def strides(grid: Grid) -> tuple[Array, Array]:
    """(how far apart in rank neighbours along dp are, and along pp); tp is innermost, then cp."""
    inside = grid.tp * grid.cp
    outer = grid.order == ORDERS.index("dp-outer")
    return np.where(outer, inside * grid.pp, inside), np.where(outer, inside, inside * grid.dp)


def distinct(columns: Sequence[Array]) -> tuple[Array, Array]:
    """(where each distinct combination of whole numbers from -1 on first stands, each row's place among them)."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    radix = 1
    for column in columns:
        size = int(column.max(initial=0)) + 2
        if radix * size >= 2**62:  # number the combinations so far anew
            key = np.unique(key, return_inverse=True)[1].astype(np.int64)
            radix = int(key.max(initial=0)) + 1
        key = key * size + column + 1
        radix *= size
    _, first, place = np.unique(key, return_index=True, return_inverse=True)
    return first, place


def over_distinct(function: Callable[P, Array]) -> Callable[P, Array]:
    """`function` of a Grid (among other things) evaluated at the grid's `compact` rows only, and spread from there. The
    grid keeps the result, for the next who asks with the very same other arguments."""

    @wraps(function)
    def spread(*args: P.args, **kwargs: P.kwargs) -> Array:
        grid = next(one for one in args if isinstance(one, Grid))
        few, place = grid.compact
        others = tuple(one for one in (*args, *kwargs.values()) if one is not grid)
        key = (function.__name__, *map(id, others))
        if key not in grid.known:  # with the others, whose ids are then no one else's
            some = function(*(few if one is grid else one for one in args), **kwargs)  # type: ignore[arg-type]
            grid.known[key] = np.asanyarray(some), others
        return grid.known[key][0][place]

    return spread


_WORDS = {
    "precision": PRECISIONS,
    "recompute": RECOMPUTE,
    "schedule": SCHEDULES,
    "offload": OFFLOAD,
    "order": ORDERS,
}


def _code(name: str, value: Any) -> int:
    if name in _WORDS:
        return _WORDS[name].index(value)
    return -1 if value is None else int(value)


def code_of(name: str, text: str) -> int:
    """The code in a column of a value's text (`zbv`, `8`). Raises ValueError for what is no value."""
    return _code(name, text)


def _word(name: str, code: int) -> Any:
    if name in _WORDS:
        return _WORDS[name][code]
    if name == "recompute_layers" and code < 0:
        return None
    return bool(code) if name == "sp" else code
