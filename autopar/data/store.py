"""The token store: a folder of tokens, documents and what they were made with, read by position.

    about.json           format, vocabulary, the tokenizer's fingerprint, shards with their counts and checksums
    00000.tokens.npy     uint16 or uint32 [tokens of the shard]
    00000.starts.npy     int64 [documents + 1], where each document begins, and the end
    00000.trained.npy    bool [tokens], only where some tokens (a prompt's) are not to be trained on

numpy's own format, read with `allow_pickle=False`: nothing in it can run.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import UsageError

FORMAT = 1
ABOUT = "about.json"
_AGAIN = "to prepare the data again"


class TokenStore:
    """A folder that `prepare` wrote. Attributes: `tokens` (their number), `vocabulary`, `tokenizer` (a fingerprint),
    `starts` (int64 [documents + 1] over all shards)."""

    def __init__(self, folder: str | Path) -> None:
        """Opens and checks the shards' sizes. Raises UsageError for a folder that is none, or not whole."""
        self.folder = Path(folder)
        self.about = _read_about(self.folder)
        self.vocabulary = int(self.about["vocabulary"])
        self.tokenizer = str(self.about["tokenizer"])
        self._tokens: list[_Array] = []
        self._trained: list[_Array | None] = []
        starts: list[NDArray[np.int64]] = []
        first = 0
        for number, shard in enumerate(self.about["shards"]):
            tokens = self._open(number, "tokens", int(shard["tokens"]))
            begins = self._open(number, "starts", int(shard["documents"]) + 1)
            self._tokens.append(tokens)
            self._trained.append(self._open(number, "trained", tokens.length) if shard["masked"] else None)
            starts.append(begins.read(0, begins.length)[:-1].astype(np.int64) + first)
            first += tokens.length
        self.tokens = first
        self.starts: NDArray[np.int64] = np.concatenate([*starts, np.array([first], dtype=np.int64)])
        self._firsts = np.cumsum([0, *(tokens.length for tokens in self._tokens)])

    @property
    def documents(self) -> int:
        return len(self.starts) - 1

    def read(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Tokens `first` to `first + count - 1` of all shards in a row, and which of them are trained on.

        Raises UsageError for a shard that is gone or shorter than it was."""
        pieces, trained = [], []
        shard = int(np.searchsorted(self._firsts, first, side="right")) - 1
        while count > 0:
            inside = first - int(self._firsts[shard])
            here = min(count, self._tokens[shard].length - inside)
            pieces.append(self._tokens[shard].read(inside, here).astype(np.int64))
            mask = self._trained[shard]
            trained.append(np.ones(here, dtype=bool) if mask is None else mask.read(inside, here))
            first, count, shard = first + here, count - here, shard + 1
        return np.concatenate(pieces), np.concatenate(trained)

    def verify(self, *, most_bytes: int | None = None) -> None:
        """Read all shards, or the first `most_bytes`, and compare checksums. Raises UsageError that names the file that
        differs."""
        left = most_bytes if most_bytes is not None else math.inf
        for number, shard in enumerate(self.about["shards"]):
            for kind, expected in shard["sha256"].items():
                file = self.folder / file_name(number, kind)
                left -= file.stat().st_size
                if left < 0:
                    return
                if checksum(file) != expected:
                    raise UsageError(
                        "the file is not the one that was written (its checksum differs)",
                        where=str(file),
                        hint=_AGAIN,
                    )

    def _open(self, number: int, kind: str, length: int) -> _Array:
        file = self.folder / file_name(number, kind)
        try:
            found: Any = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise UsageError(f"the shard cannot be read: {error}", where=str(file), hint=_AGAIN) from error
        if found.shape != (length,):
            raise UsageError(
                f"the shard has {found.shape[0] if found.ndim else 0} entries, {ABOUT} says {length}",
                where=str(file),
                hint="to prepare the data again: the file is cut short or of another run",
            )
        return _Array(file, found.offset, length, found.dtype)


@dataclass(frozen=True)
class _Array:
    """A file's array, read by position: unlike a mapped file, one that is cut short meanwhile is an error, not a signal
    that ends the process."""

    file: Path
    offset: int
    length: int
    dtype: np.dtype[Any]

    def read(self, first: int, count: int) -> NDArray[Any]:
        wanted = count * self.dtype.itemsize
        try:
            with self.file.open("rb", buffering=0) as opened:
                opened.seek(self.offset + first * self.dtype.itemsize)
                found = opened.read(wanted)
        except OSError as error:
            raise UsageError(
                f"the shard cannot be read: {error.strerror}", where=str(self.file), hint=_AGAIN
            ) from error
        if len(found) != wanted:
            raise UsageError(
                f"the shard ends before its entry {first + count}: it is shorter than it was",
                where=str(self.file),
                hint=_AGAIN,
            )
        return np.frombuffer(found, dtype=self.dtype)


def file_name(number: int, kind: str) -> str:
    return f"{number:05d}.{kind}.npy"


def checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def write_about(folder: Path, *, vocabulary: int, tokenizer: str, shards: Sequence[dict[str, Any]]) -> None:
    """The last file of a store: without it there is none."""
    about = {"format": FORMAT, "vocabulary": vocabulary, "tokenizer": tokenizer, "shards": list(shards)}
    part = folder / f"{ABOUT}.part"
    part.write_text(json.dumps(about, indent=1) + "\n")
    part.replace(folder / ABOUT)


def is_store(folder: Path) -> bool:
    return (folder / ABOUT).is_file()


def _read_about(folder: Path) -> dict[str, Any]:
    hint = "a folder that `autopar prepare` wrote to its end"
    try:
        about = json.loads((folder / ABOUT).read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"there are no tokens: {error}", where=str(folder), hint=hint) from error
    whole = isinstance(about, dict) and {"format", "vocabulary", "tokenizer", "shards"} <= about.keys()
    if not whole or not isinstance(about["shards"], list) or not about["shards"]:
        raise UsageError(f"{ABOUT} does not describe shards of tokens", where=str(folder), hint=hint)
    for shard in about["shards"]:
        numbers = isinstance(shard, dict) and all(
            isinstance(shard.get(key), int) and shard[key] >= 0 for key in ("tokens", "documents", "masked")
        )
        if not numbers or not isinstance(shard.get("sha256"), dict):
            raise UsageError(f"{ABOUT} has a shard without its counts", where=str(folder), hint=hint)
    if about["format"] != FORMAT:
        raise UsageError(
            f"the tokens have format {about['format']}, this autopar reads {FORMAT}",
            where=str(folder),
            hint=hint,
        )
    return dict(about)
