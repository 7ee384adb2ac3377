"""The metrics file: one JSON object per line, gone on with over restarts; and the goodput that follows from it.

In:  a path, records as dicts.
Out: lines `{"event": "start" | "step" | "end", "step": ..., "time": ...}` (time: seconds since 1970, of the record).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends records. What cannot be written is told once, and the run goes on without it."""

    def __init__(self, path: Path, *, go_on: bool, say: Callable[[str], None]) -> None:
        """`go_on`: after the records that are there; else they are put aside as `NAME.old`."""
        self.path, self.say = path, say
        self.began = process_began()  # of the run: of its first process
        self.useful: dict[int, float] = {}  # step -> seconds, of the last time it was run
        self._broken = False
        self._step, self._counted_s = -1, 0.0  # the last step told, and the seconds up to it that count
        self._cut = path.exists() and path.stat().st_size > 0 and not _ends_a_line(path)  # by a kill
        if path.exists() and not go_on:
            self._try(lambda: path.replace(path.with_name(path.name + ".old")))
        for record in read(path):
            self.began = min(self.began, float(record["time"]))
            if record["event"] == "step":
                self.useful[int(record["step"])] = float(record.get("useful_s", 0.0))

    def write(self, record: Mapping[str, Any]) -> None:
        if not self._broken:
            self._try(lambda: self._append(json.dumps(finite(record)) + "\n"))

    def goodput(self, step: int, useful_s: float, now: float) -> float:
        """The share of the wall time since the first start in which steps that count were made, this one included."""
        if step != self._step + 1:
            self._counted_s = sum(spent for other, spent in self.useful.items() if other < step)
        self._step, self.useful[step] = step, useful_s
        self._counted_s += useful_s
        return min(1.0, self._counted_s / max(now - self.began, 1e-9))

    def _append(self, line: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" + line if self._cut else line)
        self._cut = False

    def _try(self, do: Callable[[], object]) -> None:
        try:
            do()
        except OSError as error:
            self._broken = True
            self.say(
                f"metrics cannot be written to {self.path}: {error.strerror or error}; the run goes on without"
            )


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file; a line that is none (cut off by a crash) is left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("event") in ("start", "step", "end") and _number(record):
            yield record


def process_began() -> float:
    """When this process was started, in seconds since 1970; now, where the kernel does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.time()
    return time.time() - max(0.0, age)


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def _number(record: Mapping[str, Any]) -> bool:
    return all(isinstance(record.get(key), (int, float)) for key in ("step", "time"))


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
