"""Storages, and what of them is alive, by kind of memory, at the fullest moment of a walk through a call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

# The kinds of memory that a call has to do with.
BUFFERS, ACTIVATIONS, LOGITS, WORKSPACE = (
    "gather and reduce buffers",
    "activations",
    "logits and loss",
    "workspace",
)
WEIGHTS, GRADIENTS = "weights", "gradients"


@dataclass(eq=False)
class Storage:
    """Bytes that several values may view. `last`: the op after which the forward needs it no more."""

    size: float
    kind: str = WORKSPACE
    last: int = -1
    savers: list[int] = field(default_factory=list)
    owners: int = 0


class Alive:
    """What is alive, by kind, and its fullest moment."""

    def __init__(self, start: Iterable[Storage] = ()) -> None:
        self.now: dict[str, float] = defaultdict(float)
        self.most: dict[str, float] = {}
        self.held: set[Storage] = set()
        for storage in start:
            self.hold(storage)
        self.look()

    def hold(self, storage: Storage) -> None:
        if storage not in self.held:
            self.held.add(storage)
            self.now[storage.kind] += storage.size

    def free(self, storage: Storage) -> None:
        if storage in self.held:
            self.held.discard(storage)
            self.now[storage.kind] -= storage.size

    def look(self, extra: float = 0.0, kind: str = WORKSPACE) -> None:
        """Note this moment, with `extra` that is gone right after, if it is the fullest."""
        if sum(self.now.values()) + extra > sum(self.most.values()):
            self.most = {**self.now, kind: self.now[kind] + extra}
