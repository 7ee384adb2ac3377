"""Documents: texts and conversations out of the files people have.

In:  files or folders of `.txt` (one document each), `.jsonl` (one JSON object a line) or `.parquet`.
Out: Documents in the order of the files' names and of their lines.

A JSON object or a Parquet row has its text under `text`, or a conversation under `messages`:
`[{"role": "user", "content": ".."}, {"role": "assistant", "content": ".."}]`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import UsageError

SUFFIXES = (".txt", ".jsonl", ".parquet")
_FIELDS = ("text", "messages")


@dataclass(frozen=True)
class Document:
    """A text, or a conversation (`messages`). `where`: file and line, for errors."""

    where: str
    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()


def documents(sources: Sequence[str | Path], *, field: str | None = None) -> Iterator[Document]:
    """The documents of files and folders. `field`: the name under which objects and rows hold their text.

    Raises UsageError for files that are not there, cannot be read, or hold something else, with file and line.
    """
    for file in files(sources):
        yield from _READERS[file.suffix](file, field)


def files(sources: Sequence[str | Path]) -> list[Path]:
    """All files to read, folders searched by name."""
    found: list[Path] = []
    for source in map(Path, sources):
        if source.is_dir():
            inside = sorted(path for path in source.rglob("*") if path.suffix in SUFFIXES and path.is_file())
            if not inside:
                raise UsageError(
                    "the folder holds no text", where=str(source), hint=f"{', '.join(SUFFIXES)} files"
                )
            found += inside
        elif not source.is_file():
            raise UsageError("there is no such file", where=str(source), hint="a file or folder that exists")
        elif source.suffix not in SUFFIXES:
            raise UsageError(
                f"files ending in {source.suffix or 'nothing'!r} are not read",
                where=str(source),
                hint=f"{', '.join(SUFFIXES)}",
            )
        else:
            found.append(source)
    return found


def _text_file(file: Path, field: str | None) -> Iterator[Document]:
    try:
        yield Document(str(file), file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(file, error) from error


def _json_lines(file: Path, field: str | None) -> Iterator[Document]:
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                where = f"{file}:{number}"
                try:
                    item = json.loads(line)
                except ValueError as error:
                    raise UsageError(
                        f"the line is not JSON: {error}", where=where, hint="one JSON object per line"
                    ) from error
                yield _of_mapping(item, where, field)
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(file, error) from error


def _parquet(file: Path, field: str | None) -> Iterator[Document]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UsageError(
            "Parquet files need pyarrow", where=str(file), hint="pip install 'autopar[data]'"
        ) from error
    try:
        table = parquet.ParquetFile(file)
        names = [name for name in ([field] if field else _FIELDS) if name in table.schema_arrow.names]
        if not names:
            raise UsageError(
                f"no column {field or ' or '.join(_FIELDS)}; the columns are {', '.join(table.schema_arrow.names)}",
                where=str(file),
                hint="--field NAME",
            )
        row = 0
        for batch in table.iter_batches(columns=names[:1]):
            for value in batch.column(0).to_pylist():
                yield _of_mapping({names[0]: value}, f"{file} row {row}", names[0])
                row += 1
    except (OSError, arrow.ArrowException) as error:
        raise _unreadable(file, error) from error


def _of_mapping(item: object, where: str, field: str | None) -> Document:
    if not isinstance(item, dict):
        raise UsageError(
            f"a {type(item).__name__} where an object was expected", where=where, hint='{"text": ".."}'
        )
    name = field or next((name for name in _FIELDS if name in item), None)
    value = item.get(name) if name else None
    if isinstance(value, str):
        return Document(where, value)
    if isinstance(value, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) for turn in value
    ):
        return Document(where, messages=tuple(value))
    raise UsageError(
        f"no text under {name or ' or '.join(_FIELDS)}; the object has {', '.join(map(str, item)) or 'nothing'}",
        where=where,
        hint="--field NAME, the field that holds a text or a list of messages",
    )


def _unreadable(file: Path, error: Exception) -> UsageError:
    return UsageError(
        f"the file cannot be read: {error}", where=str(file), hint="a whole UTF-8 or Parquet file"
    )


_READERS = {".txt": _text_file, ".jsonl": _json_lines, ".parquet": _parquet}


def total_bytes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)
