"""Grid: layouts as columns of numpy arrays, so that a cost is one expression over all of them.

grid = Grid.of([Layout.parse("tp=8,dp=4"), Layout(tp=4, dp=8)]); grid.tp -> array([8, 4]); grid.layout(1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.layout import OFFLOAD, PRECISIONS, RECOMPUTE, SCHEDULES, Layout

Array = NDArray[Any]


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
        return len(self.columns["dp"])

    def take(self, index: Any) -> Grid:
        return Grid({name: column[index] for name, column in self.columns.items()})

    def layout(self, index: int) -> Layout:
        values = {name: _word(name, int(column[index])) for name, column in self.columns.items()}
        return Layout(**values)


_WORDS = {"precision": PRECISIONS, "recompute": RECOMPUTE, "schedule": SCHEDULES, "offload": OFFLOAD}


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
