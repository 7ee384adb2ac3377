"""Prepare: documents to a token store, a shard at a time, so that memory does not grow with the text.

A conversation goes through the tokenizer's chat template; only what the assistant says is trained on. Every document
ends with the end-of-text token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.data.documents import Document, documents
from autopar.data.store import TokenStore, checksum, file_name, is_store, write_about
from autopar.errors import UsageError

SHARD_TOKENS = 100_000_000
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")


def prepare(
    sources: Sequence[str | Path],
    *,
    tokenizer: str | Path,
    out: str | Path,
    field: str | None = None,
    shard_tokens: int = SHARD_TOKENS,
    progress: Callable[[str], None] = lambda text: None,
) -> TokenStore:
    """Tokenise files into `out`. Raises UsageError for what cannot be read, or an `out` that holds something."""
    folder = Path(out)
    _fresh(folder)
    words = load_tokenizer(Path(tokenizer))
    dtype = np.uint16 if len(words) <= 1 << 16 else np.uint32
    end = words.eos_token_id
    shards: list[dict[str, Any]] = []
    kept = _Shard(dtype)
    for document in documents(sources, field=field):
        for ids, trained in _tokens(document, words, end):
            kept.add(ids, trained)
        if kept.tokens >= shard_tokens:
            shards.append(kept.write(folder, len(shards)))
            progress(f"{sum(shard['tokens'] for shard in shards):,} tokens")
            kept = _Shard(dtype)
    if kept.tokens:
        shards.append(kept.write(folder, len(shards)))
    if not shards:
        raise UsageError(
            "the files hold no text", where=", ".join(map(str, sources)), hint="files with text in them"
        )
    write_about(
        folder, vocabulary=len(words), tokenizer=tokenizer_fingerprint(Path(tokenizer)), shards=shards
    )
    return TokenStore(folder)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a checkpoint folder, by Transformers; nothing is fetched and no code of the folder runs."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many unrelated classes
        raise UsageError(
            f"there is no tokenizer that can be read: {type(error).__name__}: {str(error).splitlines()[0]}",
            where=str(folder),
            hint="a checkpoint folder with tokenizer.json",
        ) from error


def tokenizer_fingerprint(folder: Path) -> str:
    """The same for tokenizers that are the same files."""
    digest = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    return digest.hexdigest()[:16]


def _fresh(folder: Path) -> None:
    if is_store(folder):
        raise UsageError("the folder holds tokens already", where=str(folder), hint="another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the folder cannot be made: {error.strerror}", where=str(folder), hint="one you can write to"
        ) from error


def _tokens(
    document: Document, words: Any, end: int | None
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_] | None]]:
    """Ids of one document (nothing for an empty one), and which are trained on (None: all)."""
    ending = [] if end is None else [int(end)]
    if document.messages:
        yield _conversation(document, words, ending)
        return
    ids = words(document.text, add_special_tokens=False)["input_ids"]
    if ids:
        yield np.array([*ids, *ending], dtype=np.int64), None


def _conversation(
    document: Document, words: Any, ending: list[int]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The template is applied to every prefix: what the assistant's turn adds to the one before, after the header that
    opens its turn, is trained on. That needs no mark in the template, which few have."""
    messages = list(document.messages)
    if not getattr(words, "chat_template", None):
        raise UsageError(
            "the tokenizer has no chat template to write a conversation with",
            where=document.where,
            hint="the tokenizer of the model that was tuned for chats (a chat_template.jinja in its folder), or text",
        )
    trained: list[bool] = []
    ids: list[int] = []
    try:
        for count, turn in enumerate(messages, 1):
            if turn["role"] != "assistant":
                continue
            opened = _template(words, messages[: count - 1], opened=True)
            closed = _template(words, messages[:count], opened=False)
            if closed[: len(opened)] != opened or opened[: len(ids)] != ids:
                raise ValueError("a turn changes what the template wrote before it")
            trained += [False] * (len(opened) - len(ids)) + [True] * (len(closed) - len(opened))
            ids = closed
    except Exception as error:  # Jinja's, and those that templates raise
        raise UsageError(
            f"the chat template does not take the conversation: {type(error).__name__}: {error}",
            where=document.where,
            hint="the roles that the model's template knows, in the order it expects",
        ) from error
    if not ids:
        raise UsageError(
            "the conversation has no turn of the assistant: there is nothing to train on",
            where=document.where,
            hint='a message with "role": "assistant"',
        )
    closes = not ending or ids[-1] == ending[0]
    return (
        np.array(ids if closes else [*ids, *ending], dtype=np.int64),
        np.array(trained if closes else [*trained, True], dtype=bool),
    )


def _template(words: Any, messages: list[dict[str, Any]], *, opened: bool) -> list[int]:
    text = words.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened)
    return [int(token) for token in words(text, add_special_tokens=False)["input_ids"]]


class _Shard:
    """What the next shard will hold."""

    def __init__(self, dtype: type[np.unsignedinteger[Any]]) -> None:
        self.dtype, self.tokens, self.masked = dtype, 0, False
        self.ids: list[NDArray[Any]] = []
        self.trained: list[NDArray[np.bool_]] = []
        self.starts = [0]

    def add(self, ids: NDArray[np.int64], trained: NDArray[np.bool_] | None) -> None:
        self.ids.append(ids.astype(self.dtype))
        self.trained.append(np.ones(len(ids), dtype=bool) if trained is None else trained)
        self.masked |= trained is not None and not trained.all()
        self.tokens += len(ids)
        self.starts.append(self.tokens)

    def write(self, folder: Path, number: int) -> dict[str, Any]:
        arrays: dict[str, NDArray[Any]] = {
            "tokens": np.concatenate(self.ids),
            "starts": np.array(self.starts, dtype=np.int64),
        }
        if self.masked:
            arrays["trained"] = np.concatenate(self.trained)
        sums = {}
        for kind, array in arrays.items():
            file = folder / file_name(number, kind)
            try:
                np.save(file, array, allow_pickle=False)
            except OSError as error:
                raise UsageError(
                    f"the shard cannot be written: {error.strerror}",
                    where=str(file),
                    hint="a disk with space",
                ) from error
            sums[kind] = checksum(file)
        return {
            "tokens": self.tokens,
            "documents": len(self.starts) - 1,
            "masked": int(self.masked),
            "sha256": sums,
        }
