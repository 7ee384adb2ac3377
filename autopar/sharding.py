"""Sharding: how one tensor lies on a mesh, its text form, and the steps from one sharding to another.

Along each mesh axis a tensor is *split* (every device holds an equal piece of one dim), a *partial sum*
(the value is the sum over the axis of what the devices hold), or *whole* (every device holds all of it).

    [8@dp, 4096, 14336@tp]          split: dim 0 over dp, dim 2 over tp
    [8@dp, 4096, 4096] + sum(tp)    a partial sum over tp
    [49152@tp.fsdp, 576]            dim 0 over tp (major), each piece over fsdp (minor)

An operand of an op that is split along an axis by a loop the operand does not have (the weight under data
parallelism) is whole forward, while its gradient arrives as partial sums. That use is written in
`Use.grad_sums`, and it is what decides the backward of every step (docs/design.md):

| step | forward | backward |
|---|---|---|
| copy           | whole -> whole, gradient sums | nothing | all-reduce |
| all_gather     | split -> whole | all-gather | own slice, or reduce-scatter when the gradient arrives as sums |
| all_reduce     | partial -> whole | all-reduce | nothing, or all-reduce when the gradient arrives as sums |
| reduce_scatter | partial -> split | reduce-scatter | all-gather |
| slice          | whole -> split | own slice | all-gather |
| all_to_all     | split -> split by another dim | all-to-all | all-to-all |
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autopar.errors import ShardingError

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

    from autopar.mesh import Mesh

_TEXT = re.compile(r"\[(?P<dims>[^\]]*)\]\s*(?:\+\s*sum\((?P<sums>[^)]*)\))?")
_DIM = re.compile(r"(?P<size>\d+|_)?(?:@(?P<axes>[a-z0-9_]+(?:\.[a-z0-9_]+)*))?")


@dataclass(frozen=True)
class Sharding:
    """`dims[i]`: the mesh axes that split dim i, major to minor. `sums`: axes of partial sums, sorted."""

    dims: tuple[tuple[str, ...], ...]
    sums: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        used = [axis for axes in self.dims for axis in axes] + list(self.sums)
        for axis in used:
            if used.count(axis) > 1:
                raise ShardingError(
                    f"axis {axis!r} is used twice in {self}", hint="each axis once: it splits one dim or sums"
                )
        if self.sums != tuple(sorted(self.sums)):
            object.__setattr__(self, "sums", tuple(sorted(self.sums)))

    @staticmethod
    def whole(rank: int) -> Sharding:
        return Sharding(((),) * rank)

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis along which the tensor is not whole."""
        return tuple(axis for axes in self.dims for axis in axes) + self.sums

    def dim_of(self, axis: str) -> int | None:
        """The dim that `axis` splits, or None."""
        return next((dim for dim, axes in enumerate(self.dims) if axis in axes), None)

    def with_dim(self, dim: int, axes: tuple[str, ...]) -> Sharding:
        return replace(self, dims=(*self.dims[:dim], axes, *self.dims[dim + 1 :]))

    def without(self, axes: Iterable[str]) -> Sharding:
        """The same with the given axes made whole."""
        drop = set(axes)
        return Sharding(
            tuple(tuple(axis for axis in dim if axis not in drop) for dim in self.dims),
            tuple(axis for axis in self.sums if axis not in drop),
        )

    # ---- shapes -------------------------------------------------------------------------------------------

    def local_shape(self, shape: Sequence[int], mesh: Mesh, *, where: str | None = None) -> tuple[int, ...]:
        """The shape one device holds. Raises ShardingError if a dim does not divide evenly."""
        if len(shape) != len(self.dims):
            raise ShardingError(
                f"{self} has {len(self.dims)} dims, the tensor {list(shape)} has {len(shape)}", where=where
            )
        local = []
        for dim, (size, axes) in enumerate(zip(shape, self.dims, strict=True)):
            ways = mesh.size(*axes)
            if size % ways:
                named = ".".join(axes)
                fits = [str(way) for way in range(2, min(size, 65)) if size % way == 0][:6]
                raise ShardingError(
                    f"dim {dim} has size {size}, axis {named!r} has size {ways}: {size} is not divisible by {ways}",
                    where=where,
                    hint=f"an axis of size {' or '.join(fits) or '1'}, or pad the dim",
                )
            local.append(size // ways)
        return tuple(local)

    # ---- text ---------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return self.format(None)

    def format(self, shape: Sequence[int] | None) -> str:
        sizes = ["_"] * len(self.dims) if shape is None else [str(size) for size in shape]
        dims = [
            size + ("@" + ".".join(axes) if axes else "") for size, axes in zip(sizes, self.dims, strict=True)
        ]
        return f"[{', '.join(dims)}]" + (f" + sum({', '.join(self.sums)})" if self.sums else "")

    @staticmethod
    def parse(text: str) -> Sharding:
        """Read the text form; sizes may be numbers, `_` or left out (`[@dp, _, @tp]`)."""
        match = _TEXT.fullmatch(text.strip())
        if not match:
            raise ShardingError(
                f"cannot read sharding {text!r}", hint="a form such as '[8@dp, 4096, 14336@tp] + sum(cp)'"
            )
        dims = []
        body = match["dims"].strip()
        for part in body.split(",") if body else []:
            piece = _DIM.fullmatch(part.strip())
            if not piece or not part.strip():
                raise ShardingError(
                    f"cannot read dim {part.strip()!r} of sharding {text!r}", hint="'4096', '4096@tp' or '_'"
                )
            dims.append(tuple(piece["axes"].split(".")) if piece["axes"] else ())
        sums = tuple(axis.strip() for axis in (match["sums"] or "").split(",") if axis.strip())
        return Sharding(tuple(dims), sums)

    # ---- DTensor ------------------------------------------------------------------------------------------

    def to_placements(self, mesh: Mesh) -> tuple[Placement, ...]:
        """DTensor placements, one per mesh axis. A dim split by several axes must have them in mesh order."""
        from torch.distributed.tensor import Partial, Replicate, Shard

        order = {name: index for index, name in enumerate(mesh.names)}
        for axes in self.dims:
            if list(axes) != sorted(axes, key=order.__getitem__):
                raise ShardingError(
                    f"{self}: DTensor splits a dim in mesh order, but {'.'.join(axes)} is not in the order of {mesh}",
                    hint="reorder the mesh axes",
                )
        placements: list[Placement] = []
        for name in mesh.names:
            dim = self.dim_of(name)
            placements.append(Partial() if name in self.sums else Replicate() if dim is None else Shard(dim))
        return tuple(placements)

    @staticmethod
    def from_placements(placements: Sequence[Placement], mesh: Mesh, rank: int) -> Sharding:
        dims: list[tuple[str, ...]] = [()] * rank
        sums = []
        for name, placement in zip(mesh.names, placements, strict=True):
            if placement.is_shard():
                dim = placement.dim  # type: ignore[attr-defined]
                dims[dim] = (*dims[dim], name)
            elif placement.is_partial():
                sums.append(name)
        return Sharding(tuple(dims), tuple(sums))


@dataclass(frozen=True)
class Use:
    """What one user of a value wants: its sharding there, and the axes over which its gradient comes back as sums."""

    sharding: Sharding
    grad_sums: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """One data movement along one mesh axis. `dim`: the dim gathered, scattered or sliced; for an all-to-all
    the dim that becomes whole, and `to_dim` the one that becomes split. `grad_sums`: the gradient of the
    result arrives as partial sums along `axis`."""

    kind: str
    axis: str
    dim: int = -1
    to_dim: int = -1
    grad_sums: bool = False

    def __str__(self) -> str:
        dims = "" if self.dim < 0 else f" dim {self.dim}" + ("" if self.to_dim < 0 else f"->{self.to_dim}")
        return f"{self.kind}({self.axis}){dims}" + (" +grad" if self.grad_sums else "")


# What each step sends forward and backward; `cost/communication.py` prices these names.
COLLECTIVES: Mapping[tuple[str, bool], tuple[str | None, str | None]] = {
    ("copy", True): (None, "all_reduce"),
    ("all_gather", False): ("all_gather", None),
    ("all_gather", True): ("all_gather", "reduce_scatter"),
    ("all_reduce", False): ("all_reduce", None),
    ("all_reduce", True): ("all_reduce", "all_reduce"),
    ("reduce_scatter", False): ("reduce_scatter", "all_gather"),
    ("slice", False): (None, "all_gather"),
    ("all_to_all", False): ("all_to_all", "all_to_all"),
}


def reshard_steps(source: Sharding, use: Use) -> tuple[Step, ...]:
    """The steps that take a value from `source` to `use`, in order.

    Per dim the common prefix of axes stays; other source axes are gathered (minor first), new ones sliced
    (major first). A gather and a slice along one axis become an all-to-all, a sum and a slice a reduce-scatter.
    """
    target = use.sharding
    if len(source.dims) != len(target.dims):
        raise ShardingError(f"cannot reshard {source} to {target}: different number of dims")
    created = set(target.sums) - set(source.sums)
    if created:
        raise ShardingError(
            f"cannot reshard {source} to {target}: it would have to become a sum over {sorted(created)}"
        )
    gathers: list[tuple[int, str]] = []
    slices: list[tuple[int, str]] = []
    for dim, (have, want) in enumerate(zip(source.dims, target.dims, strict=True)):
        keep = 0
        while keep < min(len(have), len(want)) and have[keep] == want[keep]:
            keep += 1
        gathers += [(dim, axis) for axis in reversed(have[keep:])]
        slices += [(dim, axis) for axis in want[keep:]]
    steps: list[Step] = []
    moved: set[str] = set()
    for dim, axis in gathers:
        wanted = next((to for to, name in slices if name == axis), None)
        # An all-to-all needs its axis to be the next one to split the new dim, and the last one of the old.
        if wanted is not None and wanted != dim and _is_minor_everywhere(axis, dim, wanted, gathers, slices):
            steps.append(Step("all_to_all", axis, dim, wanted))
            moved.add(axis)
        else:
            steps.append(Step("all_gather", axis, dim, grad_sums=axis in use.grad_sums))
    for axis in source.sums:
        if axis in target.sums:
            continue
        wanted = next((to for to, name in slices if name == axis), None)
        if wanted is not None and next(name for to, name in slices if to == wanted) == axis:
            steps.append(Step("reduce_scatter", axis, wanted))
            moved.add(axis)
        else:
            steps.append(Step("all_reduce", axis, grad_sums=axis in use.grad_sums))
    steps += [Step("slice", axis, dim) for dim, axis in slices if axis not in moved]
    covered = {step.axis for step in steps}
    steps += [Step("copy", axis, grad_sums=True) for axis in use.grad_sums if axis not in covered]
    return tuple(steps)


def _is_minor_everywhere(
    axis: str, dim: int, to_dim: int, gathers: list[tuple[int, str]], slices: list[tuple[int, str]]
) -> bool:
    """True if moving `axis` from `dim` to `to_dim` alone keeps both dims' axis order (nothing else changes there)."""
    others_here = [name for at, name in gathers if at in (dim, to_dim) and name != axis]
    others_there = [name for at, name in slices if at in (dim, to_dim) and name != axis]
    return not others_here and not others_there


def sent_bytes(step: Step, local_bytes: float, size: int) -> tuple[float, float]:
    """Full size of the tensor each direction's collective works on, given the bytes the step starts from.

    The convention is that of cost models: for an all-gather the gathered bytes, for a reduce-scatter the bytes
    before scattering, for an all-reduce or all-to-all the bytes one device holds. Returns (forward, backward).
    """
    grown = local_bytes * size
    forward = {"all_gather": grown}.get(step.kind, local_bytes)
    backward = {"all_gather": grown, "slice": local_bytes}.get(step.kind, local_bytes)
    return forward, backward


def bytes_of(shape: Sequence[int], item_bytes: int) -> int:
    return math.prod(shape) * item_bytes
