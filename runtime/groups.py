"""Process groups: one per mesh axis, from torchrun's environment or for a single process.

In:  a Mesh, and RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT as torchrun sets them.
Out: `Groups`: the group of every axis of size > 1, this rank's coordinate on it, the device.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from autopar.errors import PeerError, TrainingError
from autopar.mesh import Mesh
from autopar.sharding import Sharding

# A rank that waits longer than this for another gives up: a dead or stuck peer must not hang the run.
TIMEOUT_S = 300.0

SIMULATED = "simulated"  # the backend of `autopar.runtime.simulate`, whose ranks are threads, on the CPU

# What gloo, NCCL and torch's store say (as a RuntimeError of no class of its own) when a peer is late, or gone.
_LATE = re.compile(r"timed? ?out|timeout", re.IGNORECASE)
_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_GONE = re.compile(r"connection|broken pipe|gloo|nccl|socket|peer", re.IGNORECASE)


@dataclass(frozen=True)
class Span:
    """The ranks along some axes taken together, outermost axis first: `index` is this rank's place among `size`.
    `group` is None where that is this rank alone."""

    axes: tuple[str, ...]
    size: int
    index: int
    group: ProcessGroup | None


@dataclass(frozen=True)
class Groups:
    """`group[axis]` exists for every axis larger than 1. `coordinate[axis]` is this rank's place on it."""

    mesh: Mesh
    rank: int
    device: torch.device
    group: Mapping[str, ProcessGroup]
    coordinate: Mapping[str, int]
    _spans: dict[tuple[str, ...], Span] = field(default_factory=dict, compare=False, repr=False)

    def span(self, axes: Iterable[str]) -> Span:
        """The ranks along `axes` together; axes of size 1, or that the mesh does not have, count for nothing.

        The first call for several axes makes a group: all of its ranks must make it, in the same order of spans.
        """
        wanted = set(axes)
        active = tuple(axis for axis, size in self.mesh.axes if axis in wanted and size > 1)
        if active not in self._spans:
            self._spans[active] = self._new_span(active)
        return self._spans[active]

    def all_groups(self) -> dict[tuple[str, ...], ProcessGroup]:
        """The groups that there are now, by their axes."""
        found: dict[tuple[str, ...], ProcessGroup] = {(axis,): group for axis, group in self.group.items()}
        found.update({span.axes: span.group for span in self._spans.values() if span.group is not None})
        return found

    def _new_span(self, axes: tuple[str, ...]) -> Span:
        size, index = 1, 0
        for axis in axes:
            size *= self.mesh.sizes[axis]
            index = index * self.mesh.sizes[axis] + self.coordinate[axis]
        if not axes:
            return Span(axes, 1, 0, None)
        if len(axes) == 1:
            return Span(axes, size, index, self.group[axes[0]])
        ranks = [rank for rank in range(self.mesh.device_count) if self._agrees(rank, axes)]
        return Span(axes, size, index, dist.new_group(ranks, use_local_synchronization=True))

    def _agrees(self, rank: int, axes: tuple[str, ...]) -> bool:
        """Whether a rank has this one's place on every axis but `axes`."""
        place = self.mesh.coordinate(rank)
        return all(place[axis] == self.coordinate[axis] for axis in self.mesh.names if axis not in axes)

    def name(self, axis: str) -> str:
        return str(self.group[axis].group_name)

    def coordinate_tensor(self, axis: str) -> Tensor:
        return torch.tensor(self.coordinate[axis], dtype=torch.int64, device=self.device)

    def cut(self, tensor: Tensor, sharding: Sharding) -> Tensor:
        """This rank's piece of a whole tensor (a view). The dims must divide."""
        for dim, axes in enumerate(sharding.dims):
            for axis in axes:
                size = self.mesh.sizes[axis]
                if size > 1:
                    length = tensor.shape[dim] // size
                    tensor = tensor.narrow(dim, self.coordinate[axis] * length, length)
        return tensor

    def join(self, tensor: Tensor, sharding: Sharding) -> Tensor:
        """The whole tensor from this rank's piece; every rank gets it. The inverse of `cut`."""
        for dim, axes in enumerate(sharding.dims):
            for axis in reversed(axes):
                if self.mesh.sizes[axis] > 1:
                    pieces = [
                        torch.empty_like(tensor, memory_format=torch.contiguous_format)
                        for _ in range(self.mesh.sizes[axis])
                    ]
                    dist.all_gather(pieces, tensor.contiguous(), group=self.group[axis])
                    tensor = torch.cat(pieces, dim)
        return tensor


@contextmanager
def peer_errors(where: str) -> Iterator[None]:
    """Turns the RuntimeError of a collective whose peer is stuck or gone into a PeerError."""
    try:
        yield
    except RuntimeError as error:
        text = next(iter(str(error).splitlines()), "")
        if _TAKEN.search(str(error)):  # before any group is there
            raise TrainingError(
                f"the port of the rendezvous is in use by another program ({text})",
                where=f"MASTER_PORT={os.environ.get('MASTER_PORT', '')}",
                hint="another MASTER_PORT (torchrun --master-port), or --standalone, which finds one that is free",
            ) from error
        if _LATE.search(str(error)):
            what = f"a collective timed out: another rank did not take part in it ({text})"
            hint = "to look at what the other ranks do (py-spy dump), or a longer --timeout if they are only slow"
        elif isinstance(error, dist.DistError) or _GONE.search(str(error)):
            what, hint = f"another rank went away during a collective ({text})", "its own error, or its log"
        else:
            raise
        rank = f"rank {dist.get_rank()}, " if dist.is_initialized() else ""
        raise PeerError(what, where=rank + where, hint=hint) from error


def check_world(mesh: Mesh) -> None:
    """Raise TrainingError if another number of processes was launched than the mesh has devices."""
    found = world_size()
    if found != mesh.device_count:
        raise TrainingError(
            f"the plan is for {mesh.device_count} processes ({mesh}), {found} "
            + ("was launched" if found == 1 else "were launched"),
            hint=f"torchrun --nproc-per-node {mesh.device_count} ..., or a plan for {found} devices",
        )


def world_size() -> int:
    """How many ranks there are: of the running process group, else WORLD_SIZE as torchrun sets it, else 1."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def join_mesh(mesh: Mesh, *, timeout_s: float = TIMEOUT_S) -> Groups:
    """Start torch.distributed for this process (once) and make a group per axis."""
    check_world(mesh)
    simulated = dist.is_initialized() and dist.get_backend() == SIMULATED
    on_gpu = torch.cuda.is_available() and not simulated
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if mesh.device_count == 1:
        return Groups(mesh, 0, device, {}, dict.fromkeys(mesh.names, 0))
    if on_gpu:
        torch.cuda.set_device(device)
    with peer_errors("joining the mesh"):
        if not dist.is_initialized():
            _join("nccl" if on_gpu else "gloo", timedelta(seconds=timeout_s))
        devices = init_device_mesh(
            device.type, tuple(size for _, size in mesh.axes), mesh_dim_names=mesh.names
        )
    group = {axis: devices.get_group(axis) for axis, size in mesh.axes if size > 1}
    rank = dist.get_rank()
    return Groups(mesh, rank, device, group, mesh.coordinate(rank))


def _join(backend: str, timeout: timedelta) -> None:
    """Start the default group. Ranks that torchrun started again meet under keys of their own: its store may be the one of
    the attempt before (with a static rendezvous it is), and then gloo waits for addresses of ranks that are dead."""
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if again == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=timeout)
        return
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    meeting = dist.TCPStore(host, port, ranks, False, timeout)  # type: ignore[attr-defined]
    store = dist.PrefixStore(f"attempt {again}", meeting)  # type: ignore[attr-defined]
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=ranks)


def leave() -> None:
    """Destroy the process groups, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def wait_for_all() -> None:
    """Wait until every rank has come here: at the end of a run, before any leaves.

    A plan may have no collectives (a small model is fastest repeated), and then one rank is done while another still
    makes its groups, through the store that lives in rank 0's process.
    """
    if dist.is_initialized():
        with peer_errors("waiting for the other ranks to end"):
            dist.barrier()


def end_rank(code: int = 0) -> NoReturn:
    """End this process as one rank of several, its work done and its groups left.

    Not through the interpreter's shutdown: threads of a process group that ask for the interpreter while it goes away
    abort the process now and then ("terminate called without an active exception"), and a run that succeeded would
    be told as failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
