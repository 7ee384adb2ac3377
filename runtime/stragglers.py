"""Stragglers: ranks that take longer than the others for the same work.

In:  seconds by kind of every rank, means over its last steps, with the time left out in which it waits for others.
Out: a Straggler for each rank that is slower than the median by a factor, with the kind of time that makes it so.

Ranks of different pipeline stages have different work, so each is compared with the ranks of its own stage.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.mesh import Mesh

PP = "pp"
_LEAST_S = 1e-3  # below this a difference says nothing


@dataclass(frozen=True)
class Straggler:
    """`times`: its own time as a multiple of the median; `kind`: where most of the difference is."""

    rank: int
    times: float
    kind: str
    seconds: float
    median_s: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow: {self.seconds:.3f} s of its own per step, {self.times:.1f} times the median of "
            f"{self.median_s:.3f} s, most of it in {self.kind}"
        )


class Stragglers:
    """`now`: rank -> Straggler. A rank is one once it was slow `patience` times on end, until as often it was not."""

    def __init__(self, mesh: Mesh, slower: float, patience: int = 3) -> None:
        self.mesh, self.slower, self.patience = mesh, slower, patience
        self.now: dict[int, Straggler] = {}
        self._other: dict[int, int] = {}  # rank -> for how many updates it was not what is said of it

    def update(self, ranks: Mapping[int, Mapping[str, float]]) -> list[str]:
        """Take the newest seconds; returns a line for each rank that has become slow, or is so no more."""
        found, told = self.find(ranks), []
        for rank in {*found, *self.now}:
            if (rank in found) == (rank in self.now):
                self._other.pop(rank, None)
            else:
                self._other[rank] = self._other.get(rank, 0) + 1
        for rank in [rank for rank in self._other if rank not in found and rank not in self.now]:
            del self._other[rank]
        for rank in [rank for rank, times in self._other.items() if times >= self.patience]:
            del self._other[rank]
            if rank in self.now:
                del self.now[rank]
                told.append(f"rank {rank} is as fast as the others again")
            else:
                self.now[rank] = found[rank]
                told.append(str(found[rank]))
        self.now.update({rank: found[rank] for rank in self.now if rank in found})
        return told

    def find(self, ranks: Mapping[int, Mapping[str, float]]) -> dict[int, Straggler]:
        stages: dict[int, list[int]] = defaultdict(list)
        for rank, means in sorted(ranks.items()):
            if means:
                stages[self.mesh.coordinate(rank).get(PP, 0)].append(rank)
        found = {}
        for members in stages.values():
            for rank in members:
                # Of two, each is compared with the other; of more, with the median of all.
                others = [member for member in members if member != rank] if len(members) == 2 else members
                straggler = self._compared(rank, ranks, others)
                if straggler is not None:
                    found[rank] = straggler
        return found

    def _compared(
        self, rank: int, ranks: Mapping[int, Mapping[str, float]], others: list[int]
    ) -> Straggler | None:
        if not others:
            return None
        own = sum(ranks[rank].values())
        median = statistics.median(sum(ranks[other].values()) for other in others)
        if own - median < _LEAST_S or own <= self.slower * median:
            return None

        def more(kind: str) -> float:
            return ranks[rank][kind] - statistics.median(ranks[other].get(kind, 0.0) for other in others)

        return Straggler(rank, own / max(median, 1e-9), max(ranks[rank], key=more), own, median)
