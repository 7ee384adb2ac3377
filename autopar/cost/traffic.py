"""Traffic: seconds of collectives over whole grids of layouts; `communication.py` prices one.

In:  the cluster's links, arrays of group sizes and strides (in ranks), bytes.
Out: arrays of seconds.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from autopar.cluster import Link
from autopar.cost.communication import fixed_and_rate, group_levels
from autopar.cost.grid import Array

_STRIDES = 2_000_003  # above any stride, so that size * _STRIDES + stride names a pair


def slowed(links: tuple[Link, ...], within: float, across: float) -> tuple[Link, ...]:
    """The links at the bandwidth that training reaches: the outermost times `across`, the others times `within`."""
    inner = tuple(replace(link, efficiency=link.efficiency * within) for link in links[:-1])
    return (*inner, replace(links[-1], efficiency=links[-1].efficiency * across))


class Groups:
    """Groups of ranks as arrays of their size and stride: finds the distinct pairs once for all collectives."""

    def __init__(self, links: tuple[Link, ...], size: Any, stride: Any) -> None:
        sizes, strides = np.broadcast_arrays(
            np.asarray(size, dtype=np.int64), np.asarray(stride, dtype=np.int64)
        )
        self.links = links
        codes, self.index = np.unique(sizes * _STRIDES + strides, return_inverse=True)
        self.pairs = [divmod(int(code), _STRIDES) for code in codes]

    def seconds(self, kind: str, total_bytes: Any) -> Array:
        """One collective of each group."""
        known = [
            fixed_and_rate(self.links, kind, size, stride) if size > 1 else (0.0, 0.0)
            for size, stride in self.pairs
        ]
        return self._apply(known, total_bytes)

    def dispatch(self, token_bytes: Any, topk: float, distinct: float) -> Array:
        """Tokens to the ranks of their experts (or back): `token_bytes` of a rank's tokens, each once."""
        known = [dispatch(self.links, size, stride, topk, distinct) for size, stride in self.pairs]
        return self._apply(known, token_bytes)

    def send(self, total_bytes: Any) -> Array:
        """A message to the rank one stride further."""
        known = []
        for _, stride in self.pairs:
            link = next((one for one in self.links if one.size == 0 or one.size > stride), self.links[-1])
            known.append((link.latency_s + link.collective_latency_s, 1.0 / link.bytes_per_s))
        return self._apply(known, total_bytes)

    def _apply(self, known: list[tuple[float, float]], total_bytes: Any) -> Array:
        fixed = np.array([one for one, _ in known])[self.index]
        rate = np.array([one for _, one in known])[self.index]
        return np.asanyarray(fixed + rate * total_bytes)


class Replicas:
    """Groups of `size` ranks of which `inside` are `stride` apart, and the rest of them `step` apart: collectives go
    over the inner part first, and then over the outer on the pieces (where all are inside, in one)."""

    def __init__(self, links: tuple[Link, ...], size: Any, stride: Any, inside: Any, step: Any) -> None:
        self.inside = np.maximum(1, inside)
        self.inner = Groups(links, self.inside, stride)
        outer = np.maximum(1, size // self.inside)
        self.outer = Groups(links, outer, step) if np.any(outer > 1) else None

    def seconds(self, kind: str, total_bytes: Any) -> Array:
        inner = self.inner.seconds(kind, total_bytes)
        return inner if self.outer is None else inner + self.outer.seconds(kind, total_bytes / self.inside)


@lru_cache(maxsize=16384)
def dispatch(
    links: tuple[Link, ...], size: int, stride: int, topk: float, distinct: float
) -> tuple[float, float]:
    """(seconds before the first byte, seconds per byte of a rank's tokens) of an expert dispatch over `size` ranks.

    With `topk` experts drawn evenly, a token meets g (1 - (1 - 1/g)^topk) of g places. `distinct` = 1: it crosses a
    level of the network once to each place there and is copied on inside (DeepEP, HybridEP); 0: once to each expert
    (all-to-all of NCCL). The levels work at once: the slowest decides.
    """
    if size < 2:
        return 0.0, 0.0
    fixed_s = rate = 0.0
    for level in group_levels(links, size, stride):
        reach = min(size, level.inner * level.fan)
        outside = (reach - level.inner) / size  # share of experts that this level leads to
        copies = topk * outside
        places = size / level.inner
        once = places * (1.0 - (1.0 - 1.0 / places) ** topk) * outside
        sent = distinct * min(once, copies) + (1.0 - distinct) * copies
        hops = min(level.fan - 1, math.ceil(math.log2(level.fan)) + 1)
        fixed_s = max(fixed_s, level.link.collective_latency_s + hops * level.link.latency_s)
        rate = max(rate, sent / level.link.bytes_per_s)
    return fixed_s, rate
