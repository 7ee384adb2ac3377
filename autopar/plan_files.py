"""Plans as files: written whole or not at all; read with an error that says where the text is wrong."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from autopar.errors import PlanError

VERSION = 1
_MAX_BYTES = 256 * 2**20  # larger files are no plans


def write_text(path: str | Path, text: str) -> None:
    """Write a plan's text: to a temporary file beside it, then renamed. Raises PlanError."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise PlanError(
            f"cannot write {target}: {error.strerror}",
            where=str(target),
            hint="a path in a folder that exists",
        ) from None


def read_text(path: str | Path) -> str:
    """The text of a plan's file. Raises PlanError for one that is no file, too large, or no UTF-8."""
    file = Path(path)
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise PlanError(
                f"{file} is larger than any plan ({_MAX_BYTES >> 20} MiB)",
                where=str(file),
                hint="a plan file",
            )
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(
            f"cannot read {file}: {error.strerror}", where=str(file), hint="the path of a saved plan"
        ) from None
    except UnicodeDecodeError:
        raise PlanError(
            f"{file} is not UTF-8 text", where=str(file), hint="a file that `autopar plan -o` wrote"
        ) from None
    return text


def read_fields(text: str, where: str) -> dict[str, Any]:
    """The fields of a plan's text, unchecked but for the version. Raises PlanError; `where` names the text in it."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        place = f"{where}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else where
        cut = isinstance(error, json.JSONDecodeError) and error.pos >= len(text.rstrip())
        what = "the plan ends too early: it is truncated" if cut else f"not readable as JSON: {_short(error)}"
        raise PlanError(what, where=place, hint="to plan again, or the original file") from None
    if not isinstance(data, dict):
        raise PlanError(
            f"a plan is a JSON object, found {type(data).__name__}", where=where, hint="to plan again"
        )
    version = data.get("version")
    if isinstance(version, int) and not isinstance(version, bool) and version > VERSION:
        raise PlanError(
            f"plan version {version} is newer than this autopar reads (up to {VERSION})",
            where=f"{where}, version",
            hint="a newer autopar, or to plan again",
        )
    return data


def plan_error(error: ValidationError, where: str) -> PlanError:
    """The first fault that the types found, as a PlanError."""
    faults = error.errors(include_url=False, include_context=False)
    fault = faults[0]
    place = ".".join(str(part) for part in fault["loc"]) or "top level"
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    kind = fault["type"]
    if kind == "missing":
        what, hint = f"{place} is missing", "the original file, or to plan again"
    elif kind == "extra_forbidden":
        what, hint = f"unknown field {place}", "to take it out, or a newer autopar"
    else:
        message = fault["msg"]
        what = f"{place}: {message[0].lower()}{message[1:]}, found {_short(repr(fault['input']))}"
        hint = "the original file, or to plan again"
    return PlanError(what + more, where=f"{where}, {place}", hint=hint)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
