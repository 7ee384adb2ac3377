"""Cells of one published row: numbers out of text, and a list of what had to be assumed.

Cells({"tp": "8(16-way)", "notes": "24.09 recipe"}, "row 1", families).whole("tp")  ->  8
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any


class RowError(Exception):
    """A row that cannot be priced; the text says why."""


@dataclass
class Cells:
    """One row's cells by column. `assumed` grows with each open cell."""

    cells: dict[str, str]
    name: str
    families: list[dict[str, Any]]
    assumed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        notes = self.cells.get("notes", "")
        self.notes = notes.lower()
        keys = ("model", "precision", "interconnect", "recompute", "zero_or_fsdp", "gpu", "evidence")
        self.text = "; ".join([notes, *(self.cells.get(key, "") for key in keys)]).lower()
        self.source = self.cells.get("source", "").lower()
        self.golden = "functional_tests" in self.source
        self.framework, self.year, self.families_known = "", 0.0, False

    def assume(self, cell: str, value: object, why: str = "") -> None:
        self.assumed.append(f"{cell}: {value}" + (f" ({why})" if why else ""))

    def number(self, cell: str) -> float | None:
        """The first number of a cell: 8(16-way) is 8, 1,024 is 1024, 128k is 131072, 0.5 is 0.5."""
        text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", self.cells.get(cell, ""))
        found = re.search(r"-?\d+(\.\d+)?([eE][+-]?\d+)?\s*([kKmM](?![a-zA-Z]))?", text)
        if not found:
            return None
        scale = {"k": 1024.0, "m": 1024.0**2}.get((found.group(3) or "").lower(), 1.0)
        return float(found.group(0).rstrip("kKmM ")) * scale

    def whole(self, cell: str) -> int:
        """The cell as a count; 0 where it says nothing."""
        number = self.number(cell)
        return int(number) if number is not None and number > 0 else 0

    def says(self, pattern: str) -> re.Match[str] | None:
        return re.search(pattern, self.text)

    def _note_number(self, name: str) -> int:
        found = self.says(rf"{name}=(\d+)")
        return int(found[1]) if found else 0
