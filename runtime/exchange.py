"""What simulated ranks meet in: collectives, messages and a key-value store between threads, under one lock.

In:  calls from rank threads: a collective of a group with its kind and tensors, a wait for a message or a key.
Out: what each member takes away; and an end to every wait: with the failure of another rank, with ranks that differ
     in their collectives, with ranks that all wait for each other, and with the time-out.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.errors import PeerError, UsageError

Combine = Callable[[list[Any]], Sequence[Any]]  # what every member gave -> what every member gets


class Ended(BaseException):
    """Raised in a rank that waits while another one has failed: not to be taken for an error of its own."""


class RankThread(threading.Thread):
    """The thread of one rank. A daemon: a rank that computes for ever does not keep the process."""

    def __init__(self, rank: int) -> None:
        super().__init__(name=f"rank {rank}", daemon=True)
        self.rank = rank


@dataclass
class _Meeting:
    """One collective of one group: what each member brought, and what each is to take away."""

    brought: dict[int, Any] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)
    results: Sequence[Any] | None = None
    left: int = 0


class Simulation:
    """What the ranks share, under one lock: meetings, messages, the store, who waits for what, and the failure."""

    def __init__(self, world: int, timeout_s: float) -> None:
        self.world, self.timeout_s = world, timeout_s
        self.deadline = time.monotonic() + timeout_s
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        self.ended: set[int] = set()
        self.waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self.meetings: dict[tuple[str, int], _Meeting] = defaultdict(_Meeting)
        self.calls: dict[tuple[str, int], int] = defaultdict(int)  # (group, member) -> collectives so far
        self.messages: dict[tuple[str, int, int, int], deque[Tensor]] = defaultdict(deque)
        self.stored: dict[str, bytes] = {}

    # Called with the lock held.

    def fail(self, error: BaseException) -> None:
        """The first failure is the simulation's; the rest follow from it."""
        if self.failure is None:
            self.failure = error
        self.changed.notify_all()

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Until `ready`; raises when that cannot be any more."""
        rank = own_rank()
        self.waiting[rank] = (ready, what)
        try:
            while not ready():
                if self.failure is None and self._stuck():
                    self.fail(_stuck(self))
                if self.failure is None and time.monotonic() >= self.deadline:
                    self.fail(timed_out(self.timeout_s, self, sorted(self.waiting)))
                if self.failure is not None:
                    raise Ended
                self.changed.wait(max(0.0, self.deadline - time.monotonic()))
        finally:
            del self.waiting[rank]

    def _stuck(self) -> bool:
        """Whether every rank that has not ended waits for what only another could do."""
        return len(self.waiting) + len(self.ended) == self.world and not any(
            ready() for ready, _ in self.waiting.values()
        )

    # Called without it.

    def end(self, rank: int) -> None:
        with self.changed:
            self.ended.add(rank)
            self.changed.notify_all()

    def meet(
        self, group: str, ranks: Sequence[int], member: int, kind: str, brought: Any, combine: Combine
    ) -> Any:
        """One collective: `combine` of what all members bring, once all have come with the same `kind`."""
        size = len(ranks)
        with self.changed:
            if self.failure is not None:
                raise Ended
            key = (group, self.calls[group, member])
            self.calls[group, member] += 1
            meeting = self.meetings[key]
            meeting.brought[member], meeting.kinds[member] = brought, kind
            if len(set(meeting.kinds.values())) > 1:
                self.fail(_differ(ranks, key[1], meeting.kinds))
                raise Ended
            if len(meeting.brought) == size:
                with torch.no_grad():
                    meeting.results = combine([meeting.brought[other] for other in range(size)])
                self.changed.notify_all()
            self.wait(lambda: meeting.results is not None, f"{kind} among ranks {list(ranks)}")
            assert meeting.results is not None
            meeting.left += 1
            if meeting.left == size:
                del self.meetings[key]
            return meeting.results[member]


def own_rank() -> int:
    thread = threading.current_thread()
    if not isinstance(thread, RankThread):
        raise UsageError(
            f"a collective of the simulator was called from thread {thread.name!r}",
            hint="collectives in the thread that a rank's function runs in",
        )
    return thread.rank


# ---- what can go wrong -------------------------------------------------------------------------------------------


def _whereabouts(work: Simulation) -> str:
    places = []
    for rank in range(work.world):
        if rank in work.waiting:
            places.append(f"rank {rank} waits in {work.waiting[rank][1]}")
        else:
            places.append(f"rank {rank} " + ("has ended" if rank in work.ended else "computes"))
    return "; ".join(places)


def _stuck(work: Simulation) -> PeerError:
    return PeerError(
        f"the ranks wait for each other: {_whereabouts(work)}",
        hint="the same collectives in the same order on every rank of a group",
    )


def timed_out(timeout_s: float, work: Simulation, late: list[int]) -> PeerError:
    return PeerError(
        f"ranks {late} were not done after {timeout_s:g} s: {_whereabouts(work)}",
        hint="a longer timeout_s if they are only slow",
    )


def _differ(ranks: Sequence[int], call: int, kinds: Mapping[int, str]) -> PeerError:
    said = "; ".join(f"rank {ranks[member]} calls {kinds[member]}" for member in sorted(kinds))
    return PeerError(
        f"the ranks do not agree on collective {call + 1} of their group: {said}",
        where=f"ranks {list(ranks)}",
        hint="the same collectives with the same shapes in the same order on every rank of a group",
    )
