"""Mesh: named axes laid over the devices of a cluster.

The first axis is the outermost (slowest-varying rank), the last the innermost, so `dp=8,tp=8` on nodes of
eight devices keeps every `tp` group inside one node.

    Mesh.parse("dp=2,tp=4").group_ranks("tp", 0) == (0, 1, 2, 3)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.errors import ShardingError

_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Mesh:
    """Axis names and sizes, outermost first. Axes of size 1 are allowed and cost nothing."""

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for name, size in self.axes:
            if not _NAME.fullmatch(name):
                raise ShardingError(
                    f"mesh axis name {name!r} is not a lower-case word", hint="a name such as 'dp' or 'tp'"
                )
            if name in seen:
                raise ShardingError(
                    f"mesh axis {name!r} appears twice in {self.axes}", hint="one size per axis"
                )
            if not isinstance(size, int) or size < 1:
                raise ShardingError(
                    f"mesh axis {name!r} has size {size!r}, expected a positive integer", hint=f"{name}=1"
                )
            seen.add(name)

    @staticmethod
    def of(sizes: Mapping[str, int] | Iterable[tuple[str, int]]) -> Mesh:
        return Mesh(tuple(sizes.items() if isinstance(sizes, Mapping) else sizes))

    @staticmethod
    def parse(text: str) -> Mesh:
        """Read `dp=2,tp=4`."""
        axes = []
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            name, equals, size = part.partition("=")
            if not equals or not size.strip().isdigit():
                raise ShardingError(f"mesh {text!r}: cannot read {part!r}", hint="a form such as 'dp=2,tp=4'")
            axes.append((name.strip(), int(size)))
        return Mesh(tuple(axes))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    @property
    def device_count(self) -> int:
        return math.prod(size for _, size in self.axes)

    def size(self, *names: str) -> int:
        """Product of the sizes of the named axes (1 for none)."""
        sizes = self.sizes
        for name in names:
            if name not in sizes:
                raise ShardingError(f"mesh {self} has no axis {name!r}", hint=f"one of {', '.join(sizes)}")
        return math.prod(sizes[name] for name in names)

    def stride(self, name: str) -> int:
        """How far apart in rank two neighbours along `name` are."""
        index = self.names.index(name)
        return math.prod(size for _, size in self.axes[index + 1 :])

    def coordinate(self, rank: int) -> dict[str, int]:
        return {name: rank // self.stride(name) % size for name, size in self.axes}

    def group_ranks(self, name: str, rank: int) -> tuple[int, ...]:
        """The ranks of the `name` group that `rank` belongs to, in order."""
        stride, size = self.stride(name), self.sizes[name]
        first = rank - self.coordinate(rank)[name] * stride
        return tuple(first + step * stride for step in range(size))
