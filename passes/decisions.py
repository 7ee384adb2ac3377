"""Decisions: what a user fixes or forbids of a layout, in words: `tp=8`, `tp=4|8`, `pp<=8`, `schedule=zbv`.

In:  the words of --fix and --forbid.
Out: a Decisions that says which rows of a Grid are allowed, and which word stands in the way where none is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches

import numpy as np

from autopar.cost.grid import Array, Grid, code_of
from autopar.errors import UsageError
from autopar.layout import OFFLOAD, ORDERS, PRECISIONS, RECOMPUTE, SCHEDULES, Layout

NAMES = tuple(field.name for field in fields(Layout) if field.name not in ("cuts",))
WORDS = {
    "precision": PRECISIONS,
    "recompute": RECOMPUTE,
    "schedule": SCHEDULES,
    "offload": OFFLOAD,
    "order": ORDERS,
}
_RANGE = {
    "zero": (0, 3),
    "shard": (0, None),
    "recompute_layers": (0, None),
    "sp": (0, 1),
}  # of others: from 1 on
_COMPARE = {"=": np.equal, "<=": np.less_equal, ">=": np.greater_equal, "<": np.less, ">": np.greater}


@dataclass(frozen=True)
class Word:
    """One constraint. `text` as the user wrote it; `values`: codes of a Grid's column; `forbids`: its opposite."""

    text: str
    name: str
    compare: str
    values: tuple[int, ...]
    forbids: bool = False

    @property
    def said(self) -> str:
        return f"not {self.text}" if self.forbids else self.text

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
    """Whether a constraint is about the layout (`tp=8`) rather than about shardings (`heads=tp`). No sharding is a
    number, so `tpp=8` is a decision too, which `parse_decisions` refuses."""
    name, *values = re.split(r"<=|>=|[<>=]", text, maxsplit=1)
    return name.strip() in (*NAMES, "cuts") or (
        name.strip().isidentifier() and values[:1] != [] and values[0].strip().isdigit()
    )


def parse_decisions(fix: Sequence[str] = (), forbid: Sequence[str] = ()) -> Decisions:
    """Read the words. Raises UsageError for what is no decision."""
    words = [_parse(text, False) for text in fix] + [_parse(text, True) for text in forbid]
    return Decisions(tuple(words))


def _parse(text: str, forbids: bool) -> Word:
    where = "forbid" if forbids else "fix"
    match = re.fullmatch(r"\s*([A-Za-z_]+)\s*(<=|>=|=|<|>)\s*(\S+)\s*", text)
    if match is not None and match[1] == "cuts":
        raise UsageError(
            f"{text!r}: where a pipeline is cut is found by the search, and cannot be fixed or forbidden",
            where=where,
            hint="pp=.. and vpp=.., or autopar estimate --layout with cuts=..",
        )
    if match is None or match[1] not in NAMES:
        near = get_close_matches(re.split(r"[<>=]", text, maxsplit=1)[0].strip().lower(), NAMES, 1)
        raise UsageError(
            f"{text!r} is no decision of a layout",
            where=where,
            hint=f"{near[0]}=.."
            if near
            else f"NAME=VALUE, NAME<=VALUE or NAME=A|B with one of {', '.join(NAMES)}",
        )
    name, compare = match[1], match[2]
    if name in WORDS and compare != "=":
        raise UsageError(
            f"{text!r}: {name} is a word, which is not more or less than another",
            where=where,
            hint=f"{name}=A|B",
        )
    values = tuple(_value(name, part, text, where) for part in match[3].split("|"))
    return Word(text.strip(), name, compare, values, forbids)


def _value(name: str, part: str, text: str, where: str) -> int:
    low, high = _RANGE.get(name, (1, None))
    try:
        code = code_of(name, part)
        if name in WORDS or (code >= low and (high is None or code <= high)):
            return code
    except ValueError:
        pass
    known = "a whole number from " + str(low) + (f" to {high}" if high else " on")
    raise UsageError(
        f"{text!r}: {part!r} is no value of {name}",
        where=where,
        hint=f"one of {', '.join(WORDS[name])}" if name in WORDS else known,
    ) from None
