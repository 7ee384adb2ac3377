"""How a workload's data is checked after it was read: types, signs, sizes, words. In: its dataclasses. Out: nothing, or
a ValueError that says which field is wrong.

    hidden: -1    ->    ValueError: hidden is -1, expected a whole number from 0 to 1000000000000000
"""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from typing import Any

MOST = 10**15  # of any size
MOST_LAYERS = 100_000
MOST_TEXT = 100_000
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_FROM_ONE = {"k", "n", "seq", "losses", "qk_dim", "v_dim"}
_EXPECTED = {"bool": "true or false", "str": f"a text of at most {MOST_TEXT} letters, none of them control"}


def check_fields(value: Any, splits: tuple[str, ...], path: str = "") -> None:
    """Every field of a dataclass, and of those inside it, is of its declared type and in its range."""
    for field in fields(value):
        where, found = f"{path}{field.name}", getattr(value, field.name)
        if field.name == "split":
            _split(found, splits, where)
        elif field.type in ("int", "float", "bool", "str"):
            low = 1 if field.name in _FROM_ONE or (field.name in ("heads", "kv_heads") and path) else 0
            _plain(str(field.type), found, low, 1 if field.name == "frozen" else MOST, where)
        elif isinstance(found, tuple):
            for index, item in enumerate(found):
                _item(item, splits, f"{where}[{index}]")
        else:
            raise ValueError(f"{where} is {found!r:.80}, expected a list")


def _item(item: Any, splits: tuple[str, ...], where: str) -> None:
    if is_dataclass(item):
        check_fields(item, splits, f"{where}.")
    elif isinstance(item, tuple) and len(item) == 2:  # a layer and how many of it
        check_fields(item[0], splits, f"{where}.")
        _plain("int", item[1], 1, MOST_LAYERS, where)
    elif isinstance(item, tuple) and len(item) == 3:  # a parameter
        _plain("str", item[0], 0, 0, where)
        _plain("int", item[1], 0, MOST, where)
        _split(item[2], splits, where)
    else:
        _plain("str", item, 0, 0, where)


def _split(found: Any, splits: tuple[str, ...], where: str) -> None:
    if not isinstance(found, str) or found not in splits:
        raise ValueError(f"{where} is {found!r:.80}, expected one of {', '.join(splits)}")


def _plain(kind: str, found: Any, low: int, high: int, where: str) -> None:
    number = isinstance(found, int if kind == "int" else int | float) and not isinstance(found, bool)
    right = {
        "bool": isinstance(found, bool),
        "str": isinstance(found, str) and len(found) <= MOST_TEXT and not _CONTROL.search(found),
    }.get(kind, number and low <= found <= high)
    if not right:
        wanted = f"a {'whole ' if kind == 'int' else ''}number from {low} to {high}"
        raise ValueError(f"{where} is {found!r:.80}, expected {_EXPECTED.get(kind, wanted)}")
