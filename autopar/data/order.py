"""Order: which sample comes at which place of training, as a pure function of (seed, place).

No table is kept and nothing is drawn in sequence, so any rank can ask for any place at any time: a resumed run, or one
on another number of ranks, sees the samples it would have seen. Every epoch is a permutation of its own: each sample
once, none left out.

The permutation is a Feistel network of four rounds (Luby and Rackoff, 1988) on the next even power of two, with the
places that fall outside walked on until they fall inside (Black and Rogaway, 2002, "cycle walking").
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.errors import UsageError

_ROUNDS = 4


@dataclass(frozen=True)
class Order:
    """The order of `samples` samples under `seed`. `shuffle=False`: as they are stored, every epoch alike."""

    samples: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UsageError("there is no sample to order", hint="more text, or shorter sequences")

    def at(self, first: int, count: int) -> NDArray[np.int64]:
        """The samples at the places `first` to `first + count - 1`, counted from the start of training."""
        places = np.arange(first, first + count, dtype=np.int64)
        epochs, inside = np.divmod(places, self.samples)
        if not self.shuffle:
            return inside
        found = np.empty_like(inside)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            found[here] = self._permuted(inside[here], int(epoch))
        return found

    def _permuted(self, places: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        half = max(1, ((self.samples - 1).bit_length() + 1) // 2)
        digest = hashlib.sha256(f"autopar order {self.seed} {epoch}".encode()).digest()
        keys = np.frombuffer(digest, dtype=np.uint64)[:_ROUNDS]
        values = places.astype(np.uint64)
        outside = np.ones(len(values), dtype=bool)
        while outside.any():
            values[outside] = _feistel(values[outside], keys, half)
            outside = values >= np.uint64(self.samples)
        return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], keys: NDArray[np.uint64], half: int) -> NDArray[np.uint64]:
    """One pass over 2 * half bits; a bijection whatever the round function is."""
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << shift) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014): every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
