"""The batches of `autopar train`: from prepared tokens, a text, or the model's own example.

In: a model, a plan, where the data is. Out: a function from step and position to a whole batch, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from autopar.data import Ahead, Stream, TokenStore
from autopar.data.prepare import tokenizer_fingerprint
from autopar.data.store import is_store
from autopar.errors import UsageError
from autopar.models.model_source import ModelSource
from autopar.models.text import batch_at, pydoc_tokens, text_file_tokens
from autopar.plans import Plan

VERIFIED_BYTES = 4 << 30  # of prepared tokens, whose checksums are compared before a run


def batches(
    source: ModelSource, plan: Plan, *, data: str, tokenizer: Path | None, seed: int, packing: str = "cut"
) -> Ahead:
    """Whole batches by step and position, made ahead in a thread; to be closed. As `batch_function`."""
    make = batch_function(source, plan, data=data, tokenizer=tokenizer, seed=seed, packing=packing)
    return Ahead(make, batch=plan.data.batch)


def batch_function(
    source: ModelSource, plan: Plan, *, data: str, tokenizer: Path | None, seed: int, packing: str = "cut"
) -> Callable[[int, int], dict[str, Tensor]]:
    """(step, position) -> whole batch: text for language models, the source's example (the same each step) for others.
    `position`: how many sequences the run has seen before; prepared tokens go on from there, whatever the batch size
    was. Raises UsageError for data that does not fit the model."""
    batch, seq = plan.data.batch, plan.data.seq
    if source.task not in ("causal-lm", "seq2seq", "masked-lm"):
        if data != "pydoc" or tokenizer is not None:
            raise UsageError(
                f"--data and --tokenizer are for language models; {source.name} is trained on its own example",
                hint="to leave them out, or autopar.compile(...).train_step(batch) in Python",
            )
        example = source.example_inputs(batch, seq)
        return lambda step, position: example
    if tokenizer is not None and not tokenizer.is_dir():
        raise UsageError(
            "there is no such tokenizer folder", where=str(tokenizer), hint="a folder with tokenizer.json"
        )
    vocabulary = int(getattr(source.config, "vocab_size", 256))
    folder = tokenizer or source.path
    if Path(data).is_dir():
        stream = _prepared(Path(data), plan, folder, vocabulary, seed, packing)
        return lambda step, position: stream.at(position)
    if packing != "cut":
        raise UsageError(
            f"--packing {packing} is for prepared documents; {data} is one text", hint="autopar prepare"
        )
    if folder is not None and folder.is_dir():
        tokens = pydoc_tokens(folder) if data == "pydoc" else text_file_tokens(Path(data), folder)
        if len(tokens) and int(tokens.max()) >= vocabulary:
            raise UsageError(
                f"the tokenizer gives token {int(tokens.max())}, the model has a vocabulary of {vocabulary}",
                where=str(folder),
                hint="the tokenizer that belongs to the model",
            )
    else:  # no tokenizer: bytes are tokens
        try:
            text = _pydoc_text() if data == "pydoc" else Path(data).read_bytes()
        except OSError as error:
            raise UsageError(
                f"the text cannot be read: {error.strerror}", where=data, hint="a text file that exists"
            ) from None
        tokens = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).astype(np.int64)) % vocabulary
    batch_at(
        tokens, batch, seq, seed=seed, step=0
    )  # a text that is too short is told before the model is built
    return lambda step, position: batch_at(tokens, batch, seq, seed=seed, step=step)


def check_data(data: str) -> None:
    """Compare the checksums of a prepared folder's shards, up to VERIFIED_BYTES of them (some seconds). Raises UsageError
    that names the one that is not as it was written."""
    if data != "pydoc" and is_store(Path(data)):
        TokenStore(data).verify(most_bytes=VERIFIED_BYTES)


def _prepared(
    data: Path, plan: Plan, tokenizer: Path | None, vocabulary: int, seed: int, packing: str
) -> Stream:
    """A folder that `autopar prepare` wrote, if its tokens are those of this model."""
    store = TokenStore(data)
    if tokenizer is not None and tokenizer.is_dir() and tokenizer_fingerprint(tokenizer) != store.tokenizer:
        raise UsageError(
            "the tokens were made with another tokenizer than the model's",
            where=f"{data} and {tokenizer}",
            hint="autopar prepare with this tokenizer, or --tokenizer with the one they were made with",
        )
    if store.vocabulary > vocabulary:
        raise UsageError(
            f"the tokens are of a vocabulary of {store.vocabulary}, the model has {vocabulary}",
            where=str(data),
            hint="the tokenizer that belongs to the model",
        )
    return Stream(store, batch=plan.data.batch, seq=plan.data.seq, seed=seed, packing=packing)


def _pydoc_text() -> bytes:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()
