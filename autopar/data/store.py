"""The token store: a folder of tokens, documents and what they were made with, read by memory mapping.

    about.json           format, vocabulary, the tokenizer's fingerprint, shards with their counts and checksums
    00000.tokens.npy     uint16 or uint32 [tokens of the shard]
    00000.starts.npy     int64 [documents + 1], where each document begins, and the end
    00000.trained.npy    bool [tokens], only where some tokens (a prompt's) are not to be trained on

numpy's own format, read with `allow_pickle=False`: nothing in it can run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import UsageError

FORMAT = 1
ABOUT = "about.json"


class TokenStore:
    """A folder that `prepare` wrote. Attributes: `tokens` (their number), `vocabulary`, `tokenizer` (a fingerprint),
    `starts` (int64 [documents + 1] over all shards)."""

    def __init__(self, folder: str | Path) -> None:
        """Opens and checks the shards' sizes. Raises UsageError for a folder that is none, or not whole."""
        self.folder = Path(folder)
        self.about = _read_about(self.folder)
        self.vocabulary = int(self.about["vocabulary"])
        self.tokenizer = str(self.about["tokenizer"])
        self._tokens: list[NDArray[Any]] = []
        self._trained: list[NDArray[np.bool_] | None] = []
        starts: list[NDArray[np.int64]] = []
        first = 0
        for number, shard in enumerate(self.about["shards"]):
            tokens = self._open(number, "tokens", int(shard["tokens"]))
            begins = self._open(number, "starts", int(shard["documents"]) + 1)
            self._tokens.append(tokens)
            self._trained.append(self._open(number, "trained", len(tokens)) if shard["masked"] else None)
            starts.append(np.asarray(begins[:-1], dtype=np.int64) + first)
            first += len(tokens)
        self.tokens = first
        self.starts: NDArray[np.int64] = np.concatenate([*starts, np.array([first], dtype=np.int64)])
        self._firsts = np.cumsum([0, *(len(tokens) for tokens in self._tokens)])

    @property
    def documents(self) -> int:
        return len(self.starts) - 1

    def read(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Tokens `first` to `first + count - 1` of all shards in a row, and which of them are trained on."""
        pieces, trained = [], []
        shard = int(np.searchsorted(self._firsts, first, side="right")) - 1
        while count > 0:
            inside = first - int(self._firsts[shard])
            here = min(count, len(self._tokens[shard]) - inside)
            pieces.append(np.asarray(self._tokens[shard][inside : inside + here], dtype=np.int64))
            mask = self._trained[shard]
            trained.append(
                np.ones(here, dtype=bool) if mask is None else np.asarray(mask[inside : inside + here])
            )
            first, count, shard = first + here, count - here, shard + 1
        return np.concatenate(pieces), np.concatenate(trained)

    def verify(self) -> None:
        """Read everything and compare checksums. Raises UsageError that names the file that differs."""
        for number, shard in enumerate(self.about["shards"]):
            for kind, expected in shard["sha256"].items():
                file = self.folder / file_name(number, kind)
                if checksum(file) != expected:
                    raise UsageError(
                        "the file is not the one that was written (its checksum differs)",
                        where=str(file),
                        hint="to prepare the data again",
                    )

    def _open(self, number: int, kind: str, length: int) -> NDArray[Any]:
        file = self.folder / file_name(number, kind)
        try:
            found: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise UsageError(
                f"the shard cannot be read: {error}", where=str(file), hint="to prepare the data again"
            ) from error
        if found.shape != (length,):
            raise UsageError(
                f"the shard has {found.shape[0] if found.ndim else 0} entries, {ABOUT} says {length}",
                where=str(file),
                hint="to prepare the data again: the file is cut short or of another run",
            )
        return found


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
