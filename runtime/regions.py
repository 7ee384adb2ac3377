"""Regions: where what one rank holds lies in a model's own whole tensor.

In:  the layout of a state on the mesh, and this rank's rows of it.
Out: a Region: one rectangle of the tensor that the model itself has under that name.

What a rank holds is always a rectangle: a packed parameter's piece is a range of one dim, mesh axes divide dims evenly,
and ZeRO takes a range of the first dim of what is left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.passes.lower import StateLayout
from autopar.runtime.groups import Groups


@dataclass(frozen=True)
class Region:
    """`sizes` elements from `offsets` on of the model's tensor `name`, whose whole shape is `shape`. A tensor without
    dims is held whole, or not at all (`empty`)."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    empty: bool = False

    @property
    def elements(self) -> int:
        return 0 if self.empty else math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What takes the region out of the whole tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))


def region_of(name: str, layout: StateLayout, groups: Groups, rows: tuple[int, int] | None = None) -> Region:
    """The region of a state as the blocks take it, or of `rows` (first, end) of its first dim only."""
    info = layout.info
    offsets, sizes = [0] * len(info.shape), list(info.shape)
    for dim, axes in enumerate(layout.sharding.dims):
        for axis in axes:
            sizes[dim] //= groups.mesh.sizes[axis]
            offsets[dim] += groups.coordinate[axis] * sizes[dim]
    empty = False
    if rows is not None and not sizes:
        empty = rows[0] >= rows[1]
    elif rows is not None:
        offsets[0] += rows[0]
        sizes[0] = rows[1] - rows[0]
        empty = rows[0] >= rows[1]
    if info.piece is not None:
        offsets[info.piece.dim] += info.piece.start
    return Region(info.source(name), info.source_shape, tuple(offsets), tuple(sizes), empty)
