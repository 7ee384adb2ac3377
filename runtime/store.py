"""The parameter store: each rank's share of parameters and buffers, gathered before use and reduced after.

In:  a RankProgram's state layouts and the whole tensors of a model.
Out: one local `nn.Parameter` per parameter (cut over tp as the blocks take it, and by rows over fsdp); for each call
     the tensors its block takes; after backward, gradients that are summed over every axis they need.

Rows over fsdp are cut as `torch.chunk` does (the last ranks may hold fewer, or none), which is DTensor's `Shard(0)`.
With fsdp, a call's parameters are gathered in one collective just before the call, dropped after it, gathered again
for its backward, and their gradients reduce-scattered at its end (ZeRO-3).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from autopar.errors import TrainingError
from autopar.passes.lower import RankProgram, StateLayout
from autopar.runtime.groups import Groups

FSDP = "fsdp"
BUCKET_BYTES = 25 << 20  # gradients are reduced in buckets of about this size, as torch's DDP does


@dataclass(frozen=True)
class Entry:
    """One parameter. `shape`: as a block takes it (cut over tp). `rows`: this rank's rows of it under fsdp."""

    name: str
    layout: StateLayout
    shape: tuple[int, ...]
    rows: tuple[int, int]
    parameter: nn.Parameter

    @property
    def chunk(self) -> int:
        """Elements of one rank's (padded) share under fsdp."""
        return self.chunk_rows * math.prod(self.shape[1:])

    @property
    def chunk_rows(self) -> int:
        return self.rows[1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which blocks take it; the parameter itself is the fp32 master."""
        found: torch.dtype = getattr(torch, self.layout.info.dtype)
        return found

    @property
    def sums(self) -> tuple[str, ...]:
        return self.layout.grad_sums


@dataclass(frozen=True)
class _Saved:
    """A view of a gathered parameter that autograd wanted to keep."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class ParameterStore:
    """Holds this rank's share of the model's state."""

    def __init__(self, program: RankProgram, groups: Groups, state: Mapping[str, Tensor]) -> None:
        """`state`: the model's whole tensors by its own canonical names; only this rank's share is kept."""
        self.groups = groups
        self.fsdp = groups.mesh.sizes.get(FSDP, 1)
        self.entries: dict[str, Entry] = {}
        self.buffers: dict[str, Tensor] = {}  # this rank's piece of each; constants too
        self.layouts = program.state
        for name, layout in program.state.items():
            source = layout.info.source(name)
            if source not in state:
                raise TrainingError(
                    f"the model has no tensor {source}", hint="the model that the plan was made for"
                )
            whole = state[source]
            if tuple(whole.shape) != layout.info.source_shape:
                raise TrainingError(
                    f"{source} has shape {list(whole.shape)}, the plan expects {list(layout.info.source_shape)}"
                )
            piece = groups.cut(layout.info.take(whole.detach()), layout.sharding)
            if layout.info.kind == "parameter":
                self.entries[name] = self._entry(name, layout, piece)
            else:
                self.buffers[name] = piece.to(groups.device).clone()
        self.parts = _parts(program)
        self._gathered: dict[
            int, dict[str, Tensor]
        ] = {}  # call -> parameters gathered again for its backward

    def _entry(self, name: str, layout: StateLayout, piece: Tensor) -> Entry:
        shape = tuple(piece.shape)
        rows = shape[0] if shape else 1
        chunk_rows = -(-rows // self.fsdp)
        local = self._own_rows(piece, chunk_rows)
        parameter = nn.Parameter(local.to(self.groups.device, copy=True).contiguous(), layout.info.trainable)
        return Entry(name, layout, shape, (rows, chunk_rows), parameter)

    def _own_rows(self, piece: Tensor, chunk_rows: int) -> Tensor:
        if self.fsdp == 1:
            return piece
        flat = piece.reshape(1) if piece.dim() == 0 else piece
        first = min(self.groups.coordinate[FSDP] * chunk_rows, flat.shape[0])
        return flat[first : min(first + chunk_rows, flat.shape[0])]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's shares by name of state: of a packed parameter one per piece."""
        return {name: entry.parameter for name, entry in self.entries.items()}

    # ---- before a call -------------------------------------------------------------------------------------

    def take(self, call: int, names: Sequence[str]) -> list[Tensor]:
        """The tensors a call's block takes, in order."""
        wanted = [name for name in dict.fromkeys(names) if name in self.entries]
        if self.fsdp == 1 or not wanted:
            return [
                self._compute_copy(name) if name in self.entries else self.buffers[name] for name in names
            ]
        shards = [self.entries[name].parameter for name in wanted]
        whole = dict(zip(wanted, _GatherParameters.apply(self, call, wanted, *shards), strict=True))  # type: ignore[no-untyped-call]
        return [whole[name] if name in whole else self.buffers[name] for name in names]

    def _compute_copy(self, name: str) -> Tensor:
        """The parameter in the dtype that blocks take: itself, or a bf16 copy of the fp32 master."""
        entry = self.entries[name]
        return entry.parameter.to(entry.dtype)

    def gather(self, names: Sequence[str]) -> list[Tensor]:
        """Whole (but for tp) parameters from all ranks' rows, in one collective."""
        entries = [self.entries[name] for name in names]
        local = torch.cat(
            [_padded(entry.parameter.detach().to(entry.dtype), entry.chunk) for entry in entries]
        )
        gathered = local.new_empty(self.fsdp, local.numel())
        dist.all_gather_single(gathered.view(-1), local, group=self.groups.group[FSDP])
        whole = []
        for entry, start in zip(entries, _offsets(entries), strict=True):
            rows = gathered[:, start : start + entry.chunk].reshape(-1)
            whole.append(rows[: math.prod(entry.shape)].reshape(entry.shape))
        return whole

    def reduce_rows(self, names: Sequence[str], gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Own rows of each gradient, summed over fsdp where the gradient came as partial sums."""
        entries = [self.entries[name] for name in names]
        result: dict[str, Tensor] = {}
        summed: list[tuple[Entry, Tensor | None]] = []
        for entry, gradient in zip(entries, gradients, strict=True):
            if FSDP in entry.sums:
                summed.append((entry, gradient))
            else:
                whole = entry.parameter.new_zeros(entry.shape) if gradient is None else gradient
                own_rows = self._own_rows(whole, entry.chunk_rows)
                result[entry.name] = own_rows.to(entry.parameter.dtype).contiguous()
        if summed:
            # Gradients are summed in the master's precision, and padded, put together and cast in one go.
            front = torch.zeros(
                self.fsdp,
                sum(entry.chunk for entry, _ in summed),
                dtype=summed[0][0].parameter.dtype,
                device=self.groups.device,
            )
            for (entry, gradient), start in zip(
                summed, _offsets([entry for entry, _ in summed]), strict=True
            ):
                if gradient is not None:
                    part = front[:, start : start + entry.chunk]
                    part.copy_(_padded(gradient, self.fsdp * entry.chunk).view(self.fsdp, -1))
            own = front.new_empty(front.shape[1])
            dist.reduce_scatter_single(own, front.reshape(-1), group=self.groups.group[FSDP])
            for (entry, _), start in zip(summed, _offsets([entry for entry, _ in summed]), strict=True):
                count = entry.parameter.numel()
                result[entry.name] = own[start : start + count].view(entry.parameter.shape).clone()
        return [result[name] for name in names]

    # ---- saved for backward --------------------------------------------------------------------------------

    def hooks(self, call: int, names: Sequence[str], taken: Sequence[Tensor]) -> Any:
        """While a call runs under fsdp: what autograd saves of gathered parameters is only a note of which one it
        was; backward gathers them again, once per call."""
        owner = {
            tensor.untyped_storage().data_ptr(): name
            for name, tensor in zip(names, taken, strict=True)
            if name in self.entries
        }
        dtypes = {name: tensor.dtype for name, tensor in zip(names, taken, strict=True)}

        def pack(tensor: Tensor) -> Tensor | _Saved:
            name = owner.get(tensor.untyped_storage().data_ptr())
            if name is None or tensor.dtype != dtypes[name] or tensor.is_conj() or tensor.is_neg():
                return tensor  # also a view of other numbers: of pairs as complex ones, of conjugates
            return _Saved(name, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

        def unpack(saved: Tensor | _Saved) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            if call not in self._gathered:
                wanted = [item for item in dict.fromkeys(names) if item in self.entries]
                self._gathered[call] = dict(zip(wanted, self.gather(wanted), strict=True))
            return self._gathered[call][saved.name].as_strided(saved.shape, saved.stride, saved.offset)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def drop(self, call: int) -> None:
        self._gathered.pop(call, None)

    # ---- after backward ------------------------------------------------------------------------------------

    def finish_gradients(self, divide_by: float = 1.0) -> None:
        """Sum gradients over the axes they still are partial sums on (all but fsdp), and divide them."""
        pending: dict[tuple[tuple[str, ...], torch.dtype], list[Tensor]] = defaultdict(list)
        for entry in self.entries.values():
            gradient = entry.parameter.grad
            if gradient is None:
                continue
            if divide_by != 1.0:
                gradient.div_(divide_by)
            axes = tuple(axis for axis in entry.sums if axis != FSDP and self.groups.mesh.sizes[axis] > 1)
            if axes and gradient.numel():
                pending[axes, gradient.dtype].append(gradient)
        for (axes, _), gradients in pending.items():
            for bucket in _buckets(gradients):
                flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
                for axis in axes:
                    dist.all_reduce(flat, group=self.groups.group[axis])
                for gradient, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                    gradient.copy_(piece.view_as(gradient))

    def gradient_norm(self) -> Tensor:
        """L2 norm of the whole gradient: every element counted once, wherever it lies."""
        squares: dict[tuple[str, ...], Tensor] = {}
        for entry in self.entries.values():
            if entry.parameter.grad is None:
                continue
            axes = entry.layout.sharding.axes + ((FSDP,) if self.fsdp > 1 else ())
            split = tuple(axis for axis in axes if self.groups.mesh.sizes[axis] > 1)
            square = entry.parameter.grad.float().square().sum()
            squares[split] = squares[split] + square if split in squares else square
        total = torch.zeros((), device=self.groups.device)
        for axes, square in sorted(squares.items()):
            for axis in axes:
                dist.all_reduce(square, group=self.groups.group[axis])
            total = total + square
        return total.sqrt()

    def clip_gradients(self, max_norm: float, norm: Tensor) -> None:
        """Scale all gradients so that their global norm is at most `max_norm` (as `torch.nn.utils.clip_grad_norm_`)."""
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for entry in self.entries.values():
            if entry.parameter.grad is not None:
                entry.parameter.grad.mul_(scale)

    # ---- whole tensors -------------------------------------------------------------------------------------

    def whole(self, name: str, local: Tensor) -> Tensor:
        """The whole tensor of which `local` (shaped as this rank's parameter) is a share: a parameter, its gradient,
        or its optimizer state. Every rank must call it."""
        entry = self.entries[name]
        piece = local
        if self.fsdp > 1:
            gathered = local.new_empty(self.fsdp * entry.chunk)
            dist.all_gather_single(gathered, _padded(local, entry.chunk), group=self.groups.group[FSDP])
            piece = gathered[: math.prod(entry.shape)].reshape(entry.shape)
        return self.groups.join(piece, entry.layout.sharding)

    def whole_parameter(self, name: str, local: Callable[[Entry], Tensor]) -> Tensor:
        """As `whole`, by the model's own name of the parameter: put together if it is packed. `local` gives the share
        of each of its parts."""
        parts = [self.entries[part] for part in self.parts[name]]
        wholes = [self.whole(entry.name, local(entry)) for entry in parts]
        piece = parts[0].layout.info.piece
        return wholes[0] if piece is None else torch.cat(wholes, piece.dim)

    def share(self, name: str, whole: Tensor) -> Tensor:
        """This rank's share of a whole tensor: the inverse of `whole`."""
        entry = self.entries[name]
        return self._own_rows(self.groups.cut(whole, entry.layout.sharding), entry.chunk_rows)

    def whole_buffer(self, name: str) -> Tensor:
        """The whole of a buffer. Every rank must call it."""
        return self.groups.join(self.buffers[name], self.layouts[name].sharding)

    def set_buffer(self, name: str, whole: Tensor) -> None:
        """Put this rank's piece of `whole` into a buffer."""
        self.buffers[name].copy_(self.groups.cut(whole, self.layouts[name].sharding))


class _GatherParameters(Function):
    """This rank's rows -> whole parameters; backward: whole gradients -> own rows of their sum."""

    @staticmethod
    def forward(
        ctx: Any, store: ParameterStore, call: int, names: list[str], *shards: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.store, ctx.call, ctx.names = store, call, names
        return tuple(store.gather(names))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.store.drop(ctx.call)
        return None, None, None, *ctx.store.reduce_rows(ctx.names, gradients)


def _parts(program: RankProgram) -> dict[str, tuple[str, ...]]:
    """The model's name of each parameter -> the states it consists of: itself, or the pieces of a packed one in
    order."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name, layout in program.state.items():
        if layout.info.kind == "parameter":
            start = layout.info.piece.start if layout.info.piece else 0
            found.setdefault(layout.info.source(name), []).append((start, name))
    return {name: tuple(part for _, part in sorted(parts)) for name, parts in found.items()}


def _padded(tensor: Tensor, length: int) -> Tensor:
    flat = tensor.reshape(-1)
    return flat if flat.numel() == length else torch.cat([flat, flat.new_zeros(length - flat.numel())])


def _offsets(entries: Iterable[Entry]) -> Iterator[int]:
    start = 0
    for entry in entries:
        yield start
        start += entry.chunk


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        bucket.append(gradient)
        size += gradient.numel() * gradient.element_size()
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
