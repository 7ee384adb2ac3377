"""Text to train on, as tokens: what ships with every Python, or the user's own file.

`pydoc_tokens` takes Python's own help texts (`pydoc_data.topics`, some 460,000 characters): real English and
code, on every machine, without a download. `batch_at` cuts a batch out of a row of tokens for any step at any
time, so that a resumed run, or a run on other ranks, sees the same batches.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autopar.errors import ModelError, UsageError


def pydoc_tokens(tokenizer_folder: Path, cache: Path | None = None) -> torch.Tensor:
    """Python's help topics, by name, as one row of tokens: int64 `[tokens]`.

    `cache` is a folder in which the tokens are kept, under a name that tells the text and the tokenizer.
    """
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    if cache is None:
        return _encode(text, tokenizer_folder)
    key = hashlib.sha256(text.encode() + _tokenizer_bytes(tokenizer_folder)).hexdigest()[:16]
    file = Path(cache) / f"pydoc-tokens-{key}.npy"
    if not file.is_file():
        _save(_encode(text, tokenizer_folder), file)
    return torch.from_numpy(np.load(file, allow_pickle=False).astype(np.int64))


def text_file_tokens(path: Path, tokenizer_folder: Path) -> torch.Tensor:
    """A UTF-8 text file as one row of tokens: int64 `[tokens]`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the text cannot be read: {error}", where=str(path), hint="a UTF-8 text file that exists"
        ) from error
    if not text.strip():
        raise UsageError("the text is empty", where=str(path), hint="a file with text in it")
    return _encode(text, tokenizer_folder)


def batch_at(tokens: torch.Tensor, batch: int, seq: int, *, seed: int, step: int) -> dict[str, torch.Tensor]:
    """The batch of one step: `input_ids` and `labels`, int64 `[batch, seq]`, cut at random from `tokens`.

    The labels are the inputs: the model shifts them. The same arguments give the same batch.
    """
    if batch < 1 or seq < 2:
        raise UsageError(
            f"batch {batch}, sequence {seq}: expected at least 1 and 2", hint="--batch 8 --seq 128"
        )
    if tokens.dim() != 1 or len(tokens) < seq:
        raise UsageError(
            f"the text has {tokens.numel()} tokens; a sequence of {seq} was asked for",
            hint=f"more text, or a sequence of at most {tokens.numel()}",
        )
    mixed = hashlib.sha256(f"{seed}:{step}".encode()).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(mixed[:7], "big"))
    starts = torch.randint(len(tokens) - seq + 1, (batch, 1), generator=generator, device="cpu")
    input_ids = tokens[starts + torch.arange(seq, device="cpu")]
    return {"input_ids": input_ids, "labels": input_ids.clone()}


def batches(
    tokens: torch.Tensor, batch: int, seq: int, *, seed: int, steps: int, start: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """The batches of the steps `start` to `steps - 1`."""
    for step in range(start, steps):
        yield batch_at(tokens, batch, seq, seed=seed, step=step)


def _encode(text: str, tokenizer_folder: Path) -> torch.Tensor:
    """By the `tokenizers` library if there is a tokenizer.json: it loads in a tenth of the time."""
    file = Path(tokenizer_folder) / "tokenizer.json"
    try:
        if file.is_file():
            from tokenizers import Tokenizer

            ids = Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids
        else:
            from transformers import AutoTokenizer

            slow: Any = AutoTokenizer.from_pretrained(str(tokenizer_folder), local_files_only=True)
            ids = slow(text, add_special_tokens=False)["input_ids"]
    except Exception as error:
        raise ModelError(
            f"there is no tokenizer that can be read: {type(error).__name__}: {error}",
            where=str(tokenizer_folder),
            hint="a checkpoint folder with tokenizer.json",
        ) from error
    return torch.tensor(ids, dtype=torch.int64, device="cpu")


def _tokenizer_bytes(folder: Path) -> bytes:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")
    return b"".join(
        hashlib.sha256((Path(folder) / n).read_bytes()).digest()
        for n in names
        if (Path(folder) / n).is_file()
    )


def _save(tokens: torch.Tensor, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=file.parent, prefix=".tokens-", suffix=".npy")
    with os.fdopen(handle, "wb") as out:
        np.save(out, tokens.numpy().astype(np.int32))
    Path(part).replace(file)
