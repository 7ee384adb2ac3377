"""Combinations: the meshes and batch splits a search goes through, and refusals of those a user asked for.

In:  the device count, the batch, what the user forced.
Out: meshes of dp, fsdp, tp, and of ep and cp where they are larger than 1; micro-batch counts; UsageError where nothing divides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.errors import UsageError
from autopar.mesh import Mesh

AXES = ("dp", "fsdp", "ep", "cp", "tp")
ALWAYS = ("dp", "fsdp", "tp")  # named in a mesh even at size 1
MAX_TP = 64  # wider tensor parallelism leaves no device enough to do


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def mesh_of(**sizes: int) -> Mesh:
    """The mesh of the given sizes, outermost first; ep and cp are left out where they are 1."""
    named = ((axis, sizes.get(axis, 1)) for axis in AXES)
    return Mesh(tuple((axis, size) for axis, size in named if axis in ALWAYS or size > 1))


def data_ways(mesh: Mesh) -> int:
    """Into how many pieces a mesh cuts the batch."""
    return math.prod(mesh.sizes.get(axis, 1) for axis in ("dp", "fsdp", "ep"))


def forced_mesh(mesh: Mesh, devices: int) -> Mesh:
    """The user's mesh in the axes of the runtime. Raises UsageError for other axes, or another number of devices."""
    unknown = [name for name in mesh.names if name not in AXES]
    if unknown:
        raise UsageError(f"mesh {mesh} has the axis {unknown[0]!r}", hint=f"axes among {', '.join(AXES)}")
    full = mesh_of(**mesh.sizes)
    if full.device_count != devices:
        raise UsageError(
            f"mesh {mesh} has {full.device_count} devices, the cluster {devices}",
            where=f"mesh {mesh}",
            hint=f"sizes whose product is {devices}, or a cluster of {full.device_count}",
        )
    return full


def meshes(devices: int, forced: Mesh | None, experts: Sequence[int] = ()) -> list[Mesh]:
    """Every dp x fsdp x tp of the devices, and dp x ep x tp for a model whose layers have so many `experts`; or the
    forced one."""
    if forced is not None:
        return [forced_mesh(forced, devices)]
    widths = [tp for tp in divisors(devices) if tp <= MAX_TP]
    found = [
        mesh_of(dp=devices // tp // fsdp, fsdp=fsdp, tp=tp)
        for tp in widths
        for fsdp in divisors(devices // tp)
    ]
    found += [
        mesh_of(dp=devices // tp // ep, ep=ep, tp=tp)
        for tp in widths
        for ep in divisors(devices // tp)[1:]
        if experts and all(count % ep == 0 for count in experts)
    ]
    return found


def splits(batch: int, found: list[Mesh], micro_batches: int | None) -> dict[Mesh, list[int]]:
    """Mesh -> micro-batch counts that divide the batch, fewest first; meshes without any are left out.

    Raises UsageError, with the nearest batch sizes, if none is left.
    """
    counts: dict[Mesh, list[int]] = {}
    for mesh in found:
        data = data_ways(mesh)
        if batch % data:
            continue
        able = divisors(batch // data)
        able = [count for count in able if micro_batches is None or count == micro_batches]
        if able:
            counts[mesh] = able
    if counts:
        return counts
    ways = min(data_ways(mesh) for mesh in found) * (micro_batches or 1)
    below, above = batch // ways * ways, -(-batch // ways) * ways
    near = f"a batch of {below} or {above}" if below else f"a batch of {above}"
    split = "dp*fsdp" + ("*micro-batches" if micro_batches else "")
    raise UsageError(
        f"batch {batch} does not divide over the data ranks: {split} is {ways} at least",
        where=f"batch {batch}" + (f", mesh {found[0]}" if len(found) == 1 else ""),
        hint=near,
    )
