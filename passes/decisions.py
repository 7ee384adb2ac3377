"""Decisions: what a user fixes or forbids of a layout, in words: `tp=8`, `tp=4|8`, `pp<=8`, `schedule=zbv`.

In:  the words of --fix and --forbid.
Out: a Decisions that says which rows of a Grid are allowed, and which word stands in the way where none is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from autopar.cost.grid import Array, Grid, code_of
from autopar.errors import AutoparError, UsageError
from autopar.layout import Layout

NAMES = tuple(field.name for field in fields(Layout) if field.name not in ("cuts",))
_COMPARE = {"=": np.equal, "<=": np.less_equal, ">=": np.greater_equal, "<": np.less, ">": np.greater}


@dataclass(frozen=True)
class Word:
    """One constraint. `text` as the user wrote it; `values`: codes of a Grid's column; `forbids`: its opposite."""

    text: str
    name: str
    compare: str
    values: tuple[int, ...]
    forbids: bool = False

    def allows(self, grid: Grid) -> Array:
        column = getattr(grid, self.name)
        matches = np.zeros(len(grid), dtype=bool)
        for value in self.values:
            matches |= _COMPARE[self.compare](column, value)
        return ~matches if self.forbids else matches


@dataclass(frozen=True)
class Decisions:
    """All constraints on the layout; empty allows everything."""

    words: tuple[Word, ...] = ()

    def allows(self, grid: Grid) -> Array:
        allowed = np.ones(len(grid), dtype=bool)
        for word in self.words:
            allowed &= word.allows(grid)
        return allowed

    def only(self, name: str) -> list[int] | None:
        """The codes that `name` may take if a fixed `=` names them all, else None."""
        sets = [
            set(word.values)
            for word in self.words
            if word.name == name and word.compare == "=" and not word.forbids
        ]
        return sorted(set.intersection(*sets)) if sets else None

    def without(self, dropped: Iterable[Word]) -> Decisions:
        gone = set(dropped)
        return Decisions(tuple(word for word in self.words if word not in gone))


def is_decision(text: str) -> bool:
    """Whether a constraint is about the layout (`tp=8`) rather than about shardings (`heads=tp`)."""
    name = re.split(r"[<>=]", text, maxsplit=1)[0].strip()
    return name in NAMES


def parse_decisions(fix: Sequence[str] = (), forbid: Sequence[str] = ()) -> Decisions:
    """Read the words. Raises UsageError for what is no decision."""
    words = [_parse(text, False) for text in fix] + [_parse(text, True) for text in forbid]
    return Decisions(tuple(words))


def _parse(text: str, forbids: bool) -> Word:
    match = re.fullmatch(r"\s*([a-z_]+)\s*(<=|>=|=|<|>)\s*(\S+)\s*", text)
    if match is None or match[1] not in NAMES:
        raise UsageError(
            f"{text!r} is no decision of a layout",
            where="forbid" if forbids else "fix",
            hint=f"NAME=VALUE, NAME<=VALUE or NAME=A|B with one of {', '.join(NAMES)}",
        )
    name, compare = match[1], match[2]
    try:
        values = tuple(code_of(name, part) for part in match[3].split("|"))
    except (ValueError, AutoparError):
        raise UsageError(
            f"{text!r}: {match[3]!r} is no value of {name}",
            where="forbid" if forbids else "fix",
            hint=f"{name}=1",
        ) from None
    return Word(text.strip(), name, compare, values, forbids)
