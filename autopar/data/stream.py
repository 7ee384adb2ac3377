"""Stream: the batch of any place of training, packed from a token store, made ahead by a background thread.

In:  a TokenStore, the batch, the sequence length, a seed.
Out: `input_ids`, `labels` int64 [batch, seq] (the model shifts labels), and with `documents=True` `position_ids`, which
     start again with each document: models mask attention between documents by them.

The state of a stream is one integer: the number of samples consumed. Slot i of the batch at position p is sample
`order.at(p + i)`, whatever the layout, so no resume and no change of ranks loses or repeats one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autopar.data.ahead import Ahead, Waited
from autopar.data.order import Order
from autopar.data.store import TokenStore
from autopar.errors import UsageError

IGNORED = -100  # a label that does not count, as torch's cross-entropy has it
PACKINGS = ("cut", "whole")


class Stream:
    """Batches of rows of `seq` tokens.

    packing="cut": all documents in a row, cut every `seq` tokens (pretraining). packing="whole": documents are put
    into rows whole, one after the other, a row being padded where the next does not fit, and those longer than a row
    cut off (fine-tuning). Attributes: `samples` per epoch; `waited`; `cut_off`: documents longer than a row.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        batch: int,
        seq: int,
        seed: int = 0,
        packing: str = "cut",
        documents: bool = False,
        shuffle: bool = True,
        padding: int = 0,
    ) -> None:
        if packing not in PACKINGS:
            raise UsageError(f"unknown packing {packing!r}", hint=f"one of {', '.join(PACKINGS)}")
        if batch < 1 or seq < 2:
            raise UsageError(
                f"batch {batch}, sequence {seq}: expected at least 1 and 2", hint="--batch 8 --seq 128"
            )
        self.store, self.batch, self.seq, self.documents, self.padding = store, batch, seq, documents, padding
        self.cut_off = 0
        self._rows = self._whole_rows() if packing == "whole" else None
        self.samples = store.tokens // seq if self._rows is None else len(self._rows) - 1
        if not self.samples:
            raise UsageError(
                f"the data has {store.tokens} tokens; a sequence of {seq} was asked for",
                where=str(store.folder),
                hint=f"more text, or a sequence of at most {store.tokens}",
            )
        self.order = Order(self.samples, seed, shuffle)
        self.waited = Waited()

    def at(self, position: int, rows: range | None = None) -> dict[str, Tensor]:
        """The batch after `position` samples; with `rows` only these of its rows, as a rank that holds them needs."""
        wanted = rows if rows is not None else range(self.batch)
        order = self.order.at(position, self.batch)
        made = [self._row(int(order[slot])) for slot in wanted]
        names = ("input_ids", "labels", "position_ids") if self.documents else ("input_ids", "labels")
        return {name: torch.from_numpy(np.stack([row[name] for row in made])) for name in names}

    def from_position(self, position: int, *, ahead: int = 2) -> Iterator[dict[str, Tensor]]:
        """Batches without end from `position` on, up to `ahead` of them made before they are asked for.

        An error of the background thread (a shard that vanished) is raised here.
        """
        with Ahead(lambda step, at: self.at(at), batch=self.batch, depth=ahead, waited=self.waited) as reader:
            for step in itertools.count():
                yield reader.get(step, position + step * self.batch)

    # ---- rows ----------------------------------------------------------------------------------------------

    def _row(self, sample: int) -> dict[str, NDArray[np.int64]]:
        if self._rows is None:
            first, end = sample * self.seq, (sample + 1) * self.seq
            within = self._starts_between(first, end)
            pieces = [(first, end - first)]
        else:
            low, high = int(self._rows[sample]), int(self._rows[sample + 1])
            begins = self.store.starts[low : high + 1]
            pieces = [(int(b), int(min(e - b, self.seq))) for b, e in itertools.pairwise(begins)]
            lengths = np.array([length for _, length in pieces], dtype=np.int64)
            within = np.cumsum(lengths) - lengths
        read = [self.store.read(*piece) for piece in pieces]
        ids = np.concatenate([tokens for tokens, _ in read])
        trained = np.concatenate([mask for _, mask in read])
        labels = np.where(trained, ids, IGNORED)
        # The token before a document's first belongs to another: it is not asked to predict it.
        labels[within[within > 0]] = IGNORED
        used = len(ids)
        positions = np.arange(self.seq, dtype=np.int64)
        bounds = [*within.tolist(), used] if used < self.seq else within.tolist()
        for bound in bounds:
            positions[bound:] = np.arange(self.seq - bound)
        missing = self.seq - used
        return {
            "input_ids": np.pad(ids, (0, missing), constant_values=self.padding),
            "labels": np.pad(labels, (0, missing), constant_values=IGNORED),
            "position_ids": positions,
        }

    def _starts_between(self, first: int, end: int) -> NDArray[np.int64]:
        """Where documents begin in a window, from its start."""
        low, high = np.searchsorted(self.store.starts, [first, end])
        return self.store.starts[low:high] - first

    def _whole_rows(self) -> NDArray[np.int64]:
        """The first document of each row, and the end."""
        lengths = np.diff(self.store.starts)
        self.cut_off = int((lengths > self.seq).sum())
        rows, used = [0], 0
        for document, length in enumerate(np.minimum(lengths, self.seq).tolist()):
            if used and used + length > self.seq:
                rows.append(document)
                used = 0
            used += length
        return np.array([*rows, len(lengths)], dtype=np.int64)
