"""The parameter store: each rank's share of parameters and buffers, gathered before use and reduced after.

In:  a RankProgram's state layouts, the whole tensors of a model, and what ZeRO splits over which axes.
Out: one local `nn.Parameter` per parameter (cut over tp as the blocks take it, and by rows where ZeRO splits it); for
     each call the tensors its block takes; after backward, gradients that are summed over every axis they need.

    zero 0   parameters, gradients and optimizer state whole on every data rank
    zero 1   optimizer state by rows: gradients are reduce-scattered once per step, updated rows gathered again
    zero 2   gradients too: reduce-scattered as backward makes them, in buckets
    zero 3   parameters too: gathered just before a call, dropped after it, gathered again for its backward

Rows are cut as `torch.chunk` does (the last ranks may hold fewer, or none), which is DTensor's `Shard(0)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from autopar.errors import TrainingError
from autopar.passes.lower import RankProgram, StateLayout
from autopar.runtime.groups import Groups, Span
from autopar.runtime.regions import Region, region_of

FSDP = "fsdp"
ALONE_BYTES = 1 << 20  # a tensor of this size or more is sent as it lies; smaller ones are put together


@dataclass(frozen=True)
class Zero:
    """What is split over the ranks that would hold the same: `level` as in ZeRO, over `axes`.

    `offload`: masters and optimizer state lie in host memory, and blocks use a copy on the device.
    """

    level: int = 0
    axes: tuple[str, ...] = ()
    offload: bool = False


@dataclass(frozen=True)
class Entry:
    """One parameter. `shape`: as a block takes it (cut over tp). `rows`: of all ranks of `span`, and of one.

    `parameter`: this rank's own rows, which the optimizer works on (the fp32 master). `replica`: where blocks do not
    take those, all rows, in the dtype that blocks take.
    """

    name: str
    layout: StateLayout
    shape: tuple[int, ...]
    rows: tuple[int, int]
    parameter: nn.Parameter
    span: Span
    replica: nn.Parameter | None = None

    @property
    def chunk(self) -> int:
        """Elements of one rank's (padded) share."""
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

    @property
    def gathered(self) -> bool:
        """Whether blocks take it from all ranks' rows, put together just before (ZeRO-3)."""
        return self.span.size > 1 and self.replica is None

    @property
    def leaf(self) -> nn.Parameter:
        """What backward leaves gradients at."""
        return self.parameter if self.replica is None else self.replica

    def own_rows(self, piece: Tensor) -> Tensor:
        """This rank's rows of the whole piece."""
        if self.span.size == 1:
            return piece
        flat = piece.reshape(1) if piece.dim() == 0 else piece
        first, end = self.own_range
        return flat[first:end]

    @property
    def own_range(self) -> tuple[int, int]:
        first = min(self.span.index * self.chunk_rows, self.rows[0])
        return first, min(first + self.chunk_rows, self.rows[0])


@dataclass(frozen=True)
class _Saved:
    """A view of a gathered parameter that autograd wanted to keep."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class ParameterStore:
    """Holds this rank's share of the model's state."""

    def __init__(
        self, program: RankProgram, groups: Groups, state: Mapping[str, Tensor], *, zero: Zero | None = None
    ) -> None:
        """`state`: the model's whole tensors by its own canonical names; only this rank's share is kept. `zero`: by
        default ZeRO-3 over the axis fsdp."""
        self.groups = groups
        self.zero = zero or Zero(3, (FSDP,))
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
        self.any_gathered = any(entry.gathered for entry in self.entries.values())
        self._gathered: dict[
            Hashable, dict[str, Tensor]
        ] = {}  # call -> parameters gathered again for its backward
        self.held_longer: set[Hashable] = set()  # calls whose inputs say when their backward is done

    def _entry(self, name: str, layout: StateLayout, piece: Tensor) -> Entry:
        zero, trainable = self.zero, layout.info.trainable
        split = zero.level == 3 or (zero.level > 0 and trainable)
        free = [axis for axis in zero.axes if axis not in layout.sharding.axes]
        span = self.groups.span(free if split else ())
        shape = tuple(piece.shape)
        rows = shape[0] if shape else 1
        device = self.groups.device
        master = torch.device("cpu") if zero.offload and trainable else device
        replica = None
        if trainable and zero.level < 3 and (span.size > 1 or zero.offload):
            dtype: torch.dtype = getattr(torch, layout.info.dtype)
            replica = nn.Parameter(piece.to(device, dtype, copy=True).contiguous())
        entry = Entry(
            name, layout, shape, (rows, -(-rows // span.size)), nn.Parameter(piece, False), span, replica
        )
        own = entry.own_rows(piece).to(master, copy=True).contiguous()
        return replace(entry, parameter=nn.Parameter(own, trainable))

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's shares by name of state: of a packed parameter one per piece."""
        return {name: entry.parameter for name, entry in self.entries.items()}

    def region(self, name: str) -> Region:
        """Where this rank's share of a parameter lies in the model's own."""
        entry = self.entries[name]
        return region_of(name, entry.layout, self.groups, entry.own_range if entry.span.size > 1 else None)

    def buffer_region(self, name: str) -> Region:
        """Where this rank's piece of a buffer lies in the model's own."""
        return region_of(name, self.layouts[name], self.groups)

    # ---- before a call -------------------------------------------------------------------------------------

    def take(self, call: Hashable, names: Sequence[str]) -> list[Tensor]:
        """The tensors a call's block takes, in order."""
        ready: dict[str, Tensor] = {}
        for span, wanted in self._gathered_together(names).items():
            shards = [self.entries[name].parameter for name in wanted]
            gathered = _GatherParameters.apply(self, call, span, wanted, *shards)  # type: ignore[no-untyped-call]
            ready.update(zip(wanted, gathered, strict=True))
        return [ready[name] if name in ready else self._held(name) for name in names]

    def _held(self, name: str) -> Tensor:
        """What needs no gathering: a buffer, a replica, or the parameter (its bf16 copy) in the dtype blocks take."""
        if name not in self.entries:
            return self.buffers[name]
        entry = self.entries[name]
        return entry.leaf.to(self.groups.device, entry.dtype)

    def _gathered_together(self, names: Sequence[str]) -> dict[tuple[str, ...], list[str]]:
        """The names to gather, by the axes over which; those of one go in one collective."""
        together: dict[tuple[str, ...], list[str]] = {}
        if self.any_gathered:
            for name in dict.fromkeys(names):
                if name in self.entries and self.entries[name].gathered:
                    together.setdefault(self.entries[name].span.axes, []).append(name)
        return together

    def gather(self, names: Sequence[str]) -> list[Tensor]:
        """Whole (but for tp) parameters from all ranks' rows; `names` of one span. Small ones go in one collective,
        large ones each in one of its own, without copies."""
        entries = [self.entries[name] for name in names]
        span = entries[0].span
        local = [
            padded(entry.parameter.detach().to(self.groups.device, entry.dtype), entry.chunk)
            for entry in entries
        ]
        whole: dict[str, Tensor] = {}
        waiting = []
        together: list[tuple[Entry, Tensor]] = []
        for entry, own in zip(entries, local, strict=True):
            if own.nbytes * span.size < ALONE_BYTES:
                together.append((entry, own))
                continue
            rows = own.new_empty(span.size * own.numel())
            waiting.append(dist.all_gather_single(rows, own.contiguous(), group=span.group, async_op=True))
            whole[entry.name] = rows[: math.prod(entry.shape)].view(entry.shape)
        if together:
            whole.update(_gathered_small(span, together))
        for work in waiting:
            work.wait()
        return [whole[name] for name in names]

    def reduce_rows(self, names: Sequence[str], gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Own rows of each gradient, summed over the span where the gradient came as partial sums; `names` of one
        span."""
        entries = [self.entries[name] for name in names]
        span = entries[0].span
        result: dict[str, Tensor] = {}
        summed: list[tuple[Entry, Tensor | None]] = []
        for entry, gradient in zip(entries, gradients, strict=True):
            partial = [axis for axis in span.axes if axis in entry.sums]
            if len(partial) == len(span.axes):
                summed.append((entry, gradient))
                continue
            whole = entry.parameter.new_zeros(entry.shape) if gradient is None else gradient
            whole = whole.to(entry.parameter.dtype)
            if partial:
                whole = whole.contiguous().clone()
                dist.all_reduce(whole, group=self.groups.span(partial).group)
            result[entry.name] = entry.own_rows(whole).contiguous()
        large, small = _by_size(summed, self.groups.device)
        result.update(_scattered_large(span, large))
        if small:
            result.update(self._scattered(span, small))
        return [result[entry.name].to(entry.parameter.device) for entry in entries]

    def _scattered(self, span: Span, summed: Sequence[tuple[Entry, Tensor | None]]) -> dict[str, Tensor]:
        """Own rows of the sums of gradients over `span`, in one collective."""
        # Gradients are summed in the master's precision, and padded, put together and cast in one go.
        entries = [entry for entry, _ in summed]
        dtype = entries[0].parameter.dtype
        front = torch.zeros(
            span.size, sum(entry.chunk for entry in entries), dtype=dtype, device=self.groups.device
        )
        for (entry, gradient), start in zip(summed, offsets(entries), strict=True):
            if gradient is not None:
                part = front[:, start : start + entry.chunk]
                part.copy_(padded(gradient, span.size * entry.chunk).view(span.size, -1))
        own = front.new_empty(front.shape[1])
        dist.reduce_scatter_single(own, front.reshape(-1), group=span.group)
        return {
            entry.name: own[start : start + entry.parameter.numel()].view(entry.parameter.shape).clone()
            for entry, start in zip(entries, offsets(entries), strict=True)
        }

    # ---- saved for backward --------------------------------------------------------------------------------

    def hooks(self, call: Hashable, names: Sequence[str], taken: Sequence[Tensor]) -> Any:
        """While a call runs under ZeRO-3: what autograd saves of gathered parameters is only a note of which one it
        was; backward gathers them again, once per call."""
        owner = {
            tensor.untyped_storage().data_ptr(): name
            for name, tensor in zip(names, taken, strict=True)
            if name in self.entries and self.entries[name].gathered
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
                self._gathered[call] = {}
                for wanted in self._gathered_together(names).values():
                    self._gathered[call].update(zip(wanted, self.gather(wanted), strict=True))
            return self._gathered[call][saved.name].as_strided(saved.shape, saved.stride, saved.offset)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def until_backward(self, call: Hashable, names: Sequence[str], inputs: Sequence[Tensor]) -> list[Tensor]:
        """A call's inputs, changed so that what its backward gathers is dropped when that is done. Needed where some of
        it is frozen: the gradients of the others may be complete, or there be none, before its last use."""
        flowing = [index for index, value in enumerate(inputs) if value.requires_grad]
        frozen = any(
            self.entries[name].gathered and not self.entries[name].parameter.requires_grad
            for name in names
            if name in self.entries
        )
        if not frozen or not flowing:
            return list(inputs)
        self.held_longer.add(call)
        passed = _DropAfter.apply(self, call, *(inputs[index] for index in flowing))  # type: ignore[no-untyped-call]
        changed = dict(zip(flowing, passed, strict=True))
        return [changed.get(index, value) for index, value in enumerate(inputs)]

    def drop(self, call: Hashable) -> None:
        self._gathered.pop(call, None)

    # ---- whole tensors -------------------------------------------------------------------------------------

    def whole(self, name: str, local: Tensor) -> Tensor:
        """The whole tensor of which `local` (shaped as this rank's parameter) is a share: a parameter, its gradient,
        or its optimizer state. Every rank must call it."""
        entry = self.entries[name]
        piece = local.to(self.groups.device)
        if entry.span.size > 1:
            gathered = piece.new_empty(entry.span.size * entry.chunk)
            dist.all_gather_single(gathered, padded(piece, entry.chunk), group=entry.span.group)
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
        return entry.own_rows(self.groups.cut(whole, entry.layout.sharding))

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
        ctx: Any,
        store: ParameterStore,
        call: Hashable,
        span: tuple[str, ...],
        names: list[str],
        *shards: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.store, ctx.call, ctx.names = store, call, names
        ctx.set_materialize_grads(False)
        whole = store.gather(names)
        frozen = [tensor for tensor, shard in zip(whole, shards, strict=True) if not shard.requires_grad]
        ctx.mark_non_differentiable(*frozen)  # else their gradients would be computed, and reduced
        return tuple(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        store: ParameterStore = ctx.store
        if ctx.call not in store.held_longer:
            store.drop(ctx.call)
        trained = [name for name in ctx.names if store.entries[name].parameter.requires_grad]
        arrived = [gradients[ctx.names.index(name)] for name in trained]
        reduced = dict(zip(trained, store.reduce_rows(trained, arrived), strict=True))
        return None, None, None, None, *(reduced.get(name) for name in ctx.names)


class _DropAfter(Function):
    """A call's inputs as they are; backward, when all their gradients are there: the call's parameters are dropped."""

    @staticmethod
    def forward(ctx: Any, store: ParameterStore, call: Hashable, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.store, ctx.call = store, call
        ctx.set_materialize_grads(False)
        return tuple(each.view_as(each) for each in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.store.drop(ctx.call)
        return None, None, *gradients


def _parts(program: RankProgram) -> dict[str, tuple[str, ...]]:
    """The model's name of each parameter -> the states it consists of: itself, or the pieces of a packed one in
    order."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name, layout in program.state.items():
        if layout.info.kind == "parameter":
            start = layout.info.piece.start if layout.info.piece else 0
            found.setdefault(layout.info.source(name), []).append((start, name))
    return {name: tuple(part for _, part in sorted(parts)) for name, parts in found.items()}


def _gathered_small(span: Span, local: Sequence[tuple[Entry, Tensor]]) -> dict[str, Tensor]:
    """Whole tensors of these rows, in one collective."""
    own = torch.cat([rows.reshape(-1) for _, rows in local])
    gathered = own.new_empty(span.size, own.numel())
    dist.all_gather_single(gathered.view(-1), own, group=span.group)
    whole = {}
    entries = [entry for entry, _ in local]
    for entry, start in zip(entries, offsets(entries), strict=True):
        rows = gathered[:, start : start + entry.chunk].reshape(-1)
        whole[entry.name] = rows[: math.prod(entry.shape)].reshape(entry.shape)
    return whole


def _scattered_large(span: Span, summed: Sequence[tuple[Entry, Tensor]]) -> dict[str, Tensor]:
    """Own rows of the sums of gradients over `span`, of each in a collective of its own, as it lies."""
    result = {}
    waiting = []
    for entry, gradient in summed:
        own = gradient.new_empty(entry.parameter.shape, dtype=entry.parameter.dtype)
        whole = gradient.to(own.dtype).contiguous().view(-1)
        waiting.append(dist.reduce_scatter_single(own.view(-1), whole, group=span.group, async_op=True))
        result[entry.name] = own
    for work in waiting:
        work.wait()
    return result


def _by_size(
    gradients: Sequence[tuple[Entry, Tensor | None]], device: torch.device
) -> tuple[list[tuple[Entry, Tensor]], list[tuple[Entry, Tensor | None]]]:
    """Those to send as they lie (large, and all ranks with equally many rows), and the others."""
    large: list[tuple[Entry, Tensor]] = []
    small: list[tuple[Entry, Tensor | None]] = []
    for entry, gradient in gradients:
        elements = entry.chunk * entry.span.size
        alone = elements * entry.parameter.dtype.itemsize >= ALONE_BYTES
        if (
            gradient is not None
            and alone
            and elements == math.prod(entry.shape)
            and gradient.device == device
        ):
            large.append((entry, gradient))
        else:
            small.append((entry, gradient))
    return large, small


def padded(tensor: Tensor, length: int) -> Tensor:
    flat = tensor.reshape(-1)
    return flat if flat.numel() == length else torch.cat([flat, flat.new_zeros(length - flat.numel())])


def offsets(entries: Iterable[Entry]) -> Iterator[int]:
    """Where each entry's chunk starts among them all."""
    start = 0
    for entry in entries:
        yield start
        start += entry.chunk
