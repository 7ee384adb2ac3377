"""Where the rows and keys of split attention lie, and how tensors travel around the ring of their ranks.

In order, rank r of n holds the r-th of n pieces. Under causality the last rank then computes nearly twice the mean and
the first next to nothing, at every move. In zigzag, rank r holds two of 2n smaller pieces, r and 2n - 1 - r, one early
and one late, and all ranks compute the same (Brandon et al. 2023, "Striped Attention", name the imbalance; the order is
that of Llama 3's context parallelism, Grattafiori et al. 2024, section 3.3.2):

    n = 2     in order: 0 1 | 2 3     zigzag: 0 3 | 1 2

The inputs of a model and everything else keep their order: `zigzag` and `unzigzag` exchange pieces around attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.torch_private import c10d_functional as c10d
from autopar.torch_private import group_place


class Segment(NamedTuple):
    """Rows or keys that follow each other: `at` in the tensor here, `position` of the first in the whole sequence."""

    at: slice
    position: int


@dataclass(frozen=True)
class Places:
    """Where this rank's rows lie, and the ring its keys travel on. `row_groups`: (this rank's place, size, whether it is
    the ring) of the groups that split the rows, outermost first."""

    row_groups: tuple[tuple[int, int, bool], ...]
    ring: str
    rank: int
    size: int
    zigzag: bool

    @staticmethod
    def of(row_groups: list[str], ring_group: str, zigzag: bool) -> Places:
        groups = tuple((*group_place(group), group == ring_group) for group in row_groups)
        rank, size = group_place(ring_group) if ring_group else (0, 1)
        return Places(groups, ring_group, rank, size, zigzag and size > 1)

    def rows(self, count: int) -> list[Segment]:
        """The `count` rows of queries that are here."""
        if not self.zigzag:
            return [Segment(slice(0, count), self._first(self.rank) * count)]
        half = count // 2
        return [
            Segment(slice(at, at + half), self._first(piece // 2) * count + piece % 2 * half)
            for at, piece in zip((0, half), zigzag_pieces(self.rank, self.size), strict=True)
        ]

    def _first(self, on_ring: int) -> int:
        """How many pieces come before the one of the rank that is at `on_ring` and else where this one is."""
        index = 0
        for place, size, is_ring in self.row_groups:
            index = index * size + (on_ring if is_ring else place)
        return index

    def keys(self, holder: int, count: int) -> list[Segment]:
        """The `count` keys of the rank `holder` of the ring."""
        if not self.zigzag:
            return [Segment(slice(0, count), holder * count)]
        half = count // 2
        return [
            Segment(slice(at, at + half), piece * half)
            for at, piece in zip((0, half), zigzag_pieces(holder, self.size), strict=True)
        ]

    def held(self, step: int) -> int:
        """The rank whose keys this one has after `step` moves."""
        return (self.rank - step) % self.size

    def steps(self, causal: bool, window: int | None, rows: int, keys: int) -> int:
        """After how many steps no rank can need more. The same on all ranks: a windowed causal ring ends early."""
        if not causal or window is None or rows != keys or self.zigzag:
            return self.size
        return min(self.size, (window - 2 + keys) // keys + 1)


class Ring:
    """Tensors that travel around the ring together."""

    def __init__(self, places: Places) -> None:
        self.places = places

    def send(self, tensors: list[Tensor], by: int = 1) -> tuple[list[Tensor], list[Tensor]]:
        """Begin to send to the rank `by` further on, and to receive as much."""
        rank, size = self.places.rank, self.places.size
        coming = []
        for tensor in tensors:
            flat = tensor.contiguous().reshape(-1)
            out, into = [0] * size, [0] * size
            out[(rank + by) % size] = into[(rank - by) % size] = flat.numel()
            coming.append(c10d.all_to_all_single(flat, into, out, self.places.ring))
        return coming, tensors

    def receive(self, sent: tuple[list[Tensor], list[Tensor]]) -> list[Tensor]:
        coming, tensors = sent
        return [
            c10d.wait_tensor(flat).reshape(tensor.shape) for flat, tensor in zip(coming, tensors, strict=True)
        ]


# ---- the order of pieces ---------------------------------------------------------------------------------------------


def zigzag_pieces(rank: int, size: int) -> tuple[int, int]:
    """Which two of 2 * size pieces the rank holds."""
    return rank, 2 * size - 1 - rank


def _exchanged(tensor: Tensor, dim: int, group: str, back: bool) -> Tensor:
    """The two halves of this rank's piece along `dim` for the two it holds in zigzag; `back`: the other way."""
    rank, size = group_place(group)
    plain = (2 * rank, 2 * rank + 1)  # which pieces are here in order
    zigzag = zigzag_pieces(rank, size)
    have, want = (zigzag, plain) if back else (plain, zigzag)

    def other(piece: int) -> int:
        """Who holds a piece in the other order."""
        return piece // 2 if back else min(piece, 2 * size - 1 - piece)

    def source(piece: int) -> int:
        return min(piece, 2 * size - 1 - piece) if back else piece // 2

    halves = tensor.unflatten(dim, (2, -1)).movedim(dim, 0)
    length = halves[0].numel()
    # Two pieces between the same ranks travel in the order of their numbers.
    leaving = sorted((0, 1), key=lambda at: (other(have[at]), have[at]))
    coming = sorted((0, 1), key=lambda at: (source(want[at]), want[at]))
    out, into = [0] * size, [0] * size
    for at in (0, 1):
        out[other(have[at])] += length
        into[source(want[at])] += length
    flat = torch.cat([halves[at].reshape(-1) for at in leaving])
    arrived = c10d.wait_tensor(c10d.all_to_all_single(flat, into, out, group)).reshape(halves.shape)
    ordered = [arrived[coming.index(at)] for at in (0, 1)]
    return torch.cat(ordered, dim)


# Opaque to a compiler, which sees the same graph on every rank, though whom a rank sends to depends on the rank.
torch.library.custom_op(
    "autopar::zigzag",
    _exchanged,
    mutates_args=(),
    schema="(Tensor tensor, int dim, str group, bool back) -> Tensor",
)


def _fake(tensor: Tensor, dim: int, group: str, back: bool) -> Tensor:
    return tensor.new_empty(tensor.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.how = inputs[1:]


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    dim, group, back = ctx.how
    return torch.ops.autopar.zigzag(gradient, dim, group, not back), None, None, None


torch.library.register_fake("autopar::zigzag", _fake)
torch.library.register_autograd("autopar::zigzag", _differentiate, setup_context=_keep)


def zigzag(tensor: Tensor, dim: int, group: str) -> Tensor:
    """This rank's piece along `dim`, of even length, in order -> its two pieces in zigzag, of the same shape."""
    result: Tensor = torch.ops.autopar.zigzag(tensor, dim % tensor.dim(), group, False)
    return result


def unzigzag(tensor: Tensor, dim: int, group: str) -> Tensor:
    """The other way."""
    result: Tensor = torch.ops.autopar.zigzag(tensor, dim % tensor.dim(), group, True)
    return result
