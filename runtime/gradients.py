"""Gradients: what is between backward and the optimizer's step, over all of a store's parameters.

In:  a ParameterStore whose blocks have left gradients of this rank's part of the batch.
Out: `.grad` of each local parameter: own rows of the whole batch's gradient; its global norm; and after the step, the
     rows of all ranks in the replicas again.

Sums over axes are taken in buckets of 25 MiB, as torch's DDP does, in the masters' precision; a tensor of 1 MiB or more
is summed where it lies, without a copy. Those of the last micro-batch start while its backward still runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from autopar.runtime.groups import Span
from autopar.runtime.store import ALONE_BYTES, Entry, ParameterStore, offsets, padded
from autopar.torch_private import shares_storage

BUCKET_BYTES = 25 << 20
BUCKETS_IN_FLIGHT = 2  # copies of gradients that are being summed
NORM_ELEMENTS = 1 << 18  # squared at a time on a CPU, so that the squares stay in its cache


class Gradients:
    """The gradients of one store.

    `shared`: parameters that this rank has together with others of a group beside the mesh axes of the store (those of
    several pipeline stages): their gradients are summed over it. `counted_elsewhere`: those of them that another rank
    counts in the norm. `whole`: the ranks that together have all parameters.
    """

    def __init__(
        self,
        store: ParameterStore,
        *,
        shared: Mapping[str, ProcessGroup] = MappingProxyType({}),
        counted_elsewhere: Collection[str] = (),
        whole: Span | None = None,
    ) -> None:
        self.store, self.shared, self.counted_elsewhere, self.whole = store, shared, counted_elsewhere, whole
        self._sums: dict[str, Tensor] = {}  # replicas' gradients of the micro-batches so far, in fp32
        self._bucket: dict[tuple[str, ...], dict[str, tuple[Entry, Tensor]]] = defaultdict(dict)
        self._last = False  # whether the backward that runs is the last one before `finish`
        self._ready: dict[tuple[tuple[str, ...], torch.dtype], list[Tensor]] = defaultdict(list)
        self._summed: set[str] = set()  # whose sums have been asked for
        self._flying: list[_Sum] = []
        for entry in store.entries.values():
            if entry.replica is None and entry.parameter.requires_grad:
                entry.parameter.register_post_accumulate_grad_hook(
                    lambda leaf, entry=entry: self._left(entry, leaf)
                )
            if entry.replica is not None and entry.replica.requires_grad:
                entry.replica.register_post_accumulate_grad_hook(
                    lambda leaf, entry=entry: self._arrived(entry, leaf)
                )

    # ---- during backward -----------------------------------------------------------------------------------

    def _arrived(self, entry: Entry, leaf: Tensor) -> None:
        """A micro-batch's gradient of a replica is there. All ranks of a span get theirs in the same order."""
        if leaf.grad is None:
            return
        if self.store.zero.level == 2 and entry.span.size > 1:
            gradient, leaf.grad = leaf.grad, None
            bucket = self._bucket[entry.span.axes]
            waiting = bucket.get(entry.name)
            bucket[entry.name] = entry, gradient if waiting is None else waiting[1] + gradient
            if sum(each.chunk * each.span.size for each, _ in bucket.values()) * 4 >= BUCKET_BYTES:
                self._scatter(list(bucket.values()))
                bucket.clear()
        elif leaf.grad.dtype != entry.parameter.dtype:
            gradient, leaf.grad = leaf.grad, None
            if entry.name in self._sums:
                self._sums[entry.name] += gradient
            else:
                self._sums[entry.name] = gradient.to(entry.parameter.dtype)

    def begin(self) -> None:
        """Before the first backward of a step: nothing of one that was not finished counts."""
        self._land()
        self._start_over()

    def last_backward(self) -> None:
        """The next backward is the last one before `finish`: what it leaves at parameters is summed as it comes. All
        ranks must call it, or none."""
        self._last = True

    def _left(self, entry: Entry, leaf: Tensor) -> None:
        """Backward has left a gradient at a parameter. Sums change it in place, so that it must not lie where others
        of this backward do (autograd hands on views: of `x + p.view(...)`, the gradient of both is one storage)."""
        if leaf.grad is not None and shares_storage(leaf.grad):
            leaf.grad = leaf.grad.clone()
        if self._last and entry.name not in self.shared:
            self._sum_early(entry)

    def _sum_early(self, entry: Entry) -> None:
        """All ranks of a span get their gradients in the same order."""
        gradient, span = entry.parameter.grad, self._span(entry)
        if gradient is None or span.size == 1 or not gradient.numel() or entry.name in self._summed:
            return
        self._summed.add(entry.name)
        ready = self._ready[span.axes, gradient.dtype]
        ready.append(gradient)
        if sum(each.nbytes for each in ready) >= BUCKET_BYTES:
            self._sum(span, ready)
            ready.clear()

    def _span(self, entry: Entry) -> Span:
        """Over which a parameter's gradient still is a partial sum, when backward has left it at the parameter."""
        return self.store.groups.span(axis for axis in entry.sums if axis not in entry.span.axes)

    def _sum(self, span: Span, gradients: Sequence[Tensor]) -> None:
        """Start the sums of these gradients in place; `_land` waits for them."""
        together: list[Tensor] = []
        for gradient in gradients:
            here = gradient.device == self.store.groups.device and gradient.is_contiguous()
            if here and gradient.nbytes >= ALONE_BYTES:
                work = dist.all_reduce(gradient, group=span.group, async_op=True)
                self._flying.append(_Sum(work, gradient))
            else:
                together.append(gradient)
        for bucket in _buckets(together, lambda gradient: gradient.nbytes):
            copies = [each for each in self._flying if each.parts]
            if len(copies) >= BUCKETS_IN_FLIGHT:
                copies[0].land()
                self._flying.remove(copies[0])
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).to(self.store.groups.device)
            work = dist.all_reduce(flat, group=span.group, async_op=True)
            self._flying.append(_Sum(work, flat, tuple(bucket)))

    def _land(self) -> None:
        while self._flying:
            self._flying.pop(0).land()

    def _scatter(self, bucket: Sequence[tuple[Entry, Tensor]]) -> None:
        """Reduce-scatter a bucket and add the own rows to the masters' gradients."""
        entries = [entry for entry, _ in bucket]
        rows = self.store.reduce_rows([entry.name for entry in entries], [gradient for _, gradient in bucket])
        for entry, own in zip(entries, rows, strict=True):
            _add(entry, own)

    def forget(self) -> None:
        """Drop what a step that failed has left."""
        self.begin()
        self._sums.clear()
        self._bucket.clear()
        for entry in self.store.entries.values():
            entry.parameter.grad = entry.leaf.grad = None

    # ---- after backward ------------------------------------------------------------------------------------

    def finish(self, divide_by: float = 1.0) -> None:
        """Sum gradients over the axes they still are partial sums on, and divide them."""
        self._gather_up()
        self._sum_shared()
        for entry in self.store.entries.values():
            if entry.parameter.grad is not None:
                self._sum_early(entry)
        for (axes, _), gradients in self._ready.items():
            self._sum(self.store.groups.span(axes), gradients)
        self._land()
        self._start_over()
        if divide_by != 1.0:
            for entry in self.store.entries.values():
                if entry.parameter.grad is not None:
                    entry.parameter.grad.div_(divide_by)

    def _start_over(self) -> None:
        self._last = False
        self._ready.clear()
        self._summed.clear()

    def _gather_up(self) -> None:
        """What backward left at replicas becomes the masters' gradient, of own rows."""
        for bucket in self._bucket.values():
            if bucket:
                self._scatter(list(bucket.values()))
                bucket.clear()
        left: dict[tuple[str, ...], list[tuple[Entry, Tensor]]] = defaultdict(list)
        for entry in self.store.entries.values():
            gradient = self._sums.pop(entry.name, None)
            if entry.replica is None:
                continue
            if entry.replica.grad is not None:  # zero-bubble schedules write it past the hooks
                own = entry.replica.grad.to(entry.parameter.dtype)
                gradient = own if gradient is None else gradient.add_(own)
                entry.replica.grad = None
            if gradient is None:
                continue
            if entry.span.size == 1:
                _add(entry, gradient)
            else:
                left[entry.span.axes].append((entry, gradient))
        for entries in left.values():
            for together in _buckets(entries, lambda each: each[0].chunk * each[0].span.size * 4):
                self._scatter(together)

    def _sum_shared(self) -> None:
        # All members walk the same names in the same order, so that the sums of one parameter meet.
        for name, group in sorted(self.shared.items()):
            parameter = self.store.entries[name].parameter
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                summed = gradient.to(self.store.groups.device)
                dist.all_reduce(summed, group=group)
                parameter.grad = summed.to(parameter.device)

    def norm(self) -> Tensor:
        """L2 norm of the whole gradient: every element counted once, wherever it lies."""
        groups = self.store.groups
        squares: dict[tuple[str, ...], Tensor] = {}
        for entry in self.store.entries.values():
            if entry.parameter.grad is None or entry.name in self.counted_elsewhere:
                continue
            split = groups.span((*entry.layout.sharding.axes, *entry.span.axes)).axes
            square = _square(entry.parameter.grad).to(groups.device)
            squares[split] = squares[split] + square if split in squares else square
        total = torch.zeros((), device=groups.device)
        for axes, square in sorted(squares.items()):
            for axis in axes:
                dist.all_reduce(square, group=groups.group[axis])
            total = total + square
        if self.whole is not None and self.whole.size > 1:
            dist.all_reduce(total, group=self.whole.group)
        return total.sqrt()

    def clip(self, max_norm: float, norm: float) -> None:
        """Scale all gradients so that their global norm is at most `max_norm` (as `torch.nn.utils.clip_grad_norm_`)."""
        scale = max_norm / (norm + 1e-6)
        if scale < 1.0:
            for entry in self.store.entries.values():
                if entry.parameter.grad is not None:
                    entry.parameter.grad.mul_(scale)

    # ---- after the optimizer's step ------------------------------------------------------------------------

    @torch.no_grad()
    def publish(self) -> None:
        """The rows that the optimizer has changed, of all ranks, into the replicas."""
        apart: dict[tuple[tuple[str, ...], torch.dtype], list[Entry]] = defaultdict(list)
        for entry in self.store.entries.values():
            if entry.replica is None or not entry.parameter.requires_grad:
                continue
            if entry.span.size == 1:
                entry.replica.copy_(entry.parameter)
            else:
                apart[entry.span.axes, entry.dtype].append(entry)
        for entries in apart.values():
            for bucket in _buckets(
                entries, lambda entry: entry.chunk * entry.span.size * entry.dtype.itemsize
            ):
                self._publish(bucket)

    def _publish(self, bucket: Sequence[Entry]) -> None:
        span = bucket[0].span
        device = self.store.groups.device
        local = torch.cat(
            [padded(entry.parameter.detach().to(device, entry.dtype), entry.chunk) for entry in bucket]
        )
        gathered = local.new_empty(span.size, local.numel())
        dist.all_gather_single(gathered.view(-1), local, group=span.group)
        for entry, start in zip(bucket, offsets(bucket), strict=True):
            assert entry.replica is not None
            rows = gathered[:, start : start + entry.chunk].reshape(-1)
            entry.replica.copy_(rows[: entry.replica.numel()].view(entry.shape))


@dataclass(eq=False)
class _Sum:
    """A sum that is under way, of one gradient, or of the `parts` that were put together into `tensor`."""

    work: Any
    tensor: Tensor
    parts: tuple[Tensor, ...] = ()

    def land(self) -> None:
        self.work.wait()
        if self.parts:
            pieces = self.tensor.split([part.numel() for part in self.parts])
            for part, piece in zip(self.parts, pieces, strict=True):
                part.copy_(piece.view_as(part))


def _square(gradient: Tensor) -> Tensor:
    """The sum of squares, [], in fp32. Not by `vector_norm`: torch's CPU kernel has few running sums, which for 28
    million elements (SmolLM2's embedding) costs a relative error of 1e-3."""
    if gradient.device.type != "cpu" or not gradient.is_contiguous():
        return gradient.float().square().sum()
    squares = [part.float().square().sum() for part in gradient.view(-1).split(NORM_ELEMENTS)]
    return torch.stack(squares).sum()


def _add(entry: Entry, own: Tensor) -> None:
    own = own.to(entry.parameter.device, entry.parameter.dtype)
    if entry.parameter.grad is None:
        entry.parameter.grad = own.view(entry.parameter.shape)
    else:
        entry.parameter.grad.add_(own.view(entry.parameter.shape))


_Item = TypeVar("_Item")


def _buckets(items: Iterable[_Item], size: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    """Runs of `items` of about BUCKET_BYTES."""
    bucket: list[_Item] = []
    total = 0
    for item in items:
        bucket.append(item)
        total += size(item)
        if total >= BUCKET_BYTES:
            yield bucket
            bucket, total = [], 0
    if bucket:
        yield bucket
