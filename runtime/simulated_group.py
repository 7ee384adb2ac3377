"""torch.distributed between threads: the process group and the store of simulated ranks.

In:  what torch.distributed and the in-graph collectives ask of a group, on tensors of one rank.
Out: the same through an Simulation of `runtime/exchange.py`, sums taken in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar import torch_private
from autopar.errors import PeerError, UsageError
from autopar.runtime.exchange import Combine, Ended, Simulation
from autopar.runtime.groups import SIMULATED


class SimulatedStore(dist.Store):  # type: ignore[name-defined, misc]
    """The key-value store that torch makes groups through, as far as it needs one.

    Not torch's HashStore: a rank that waits in it for one that failed would wait out its time.
    """

    def __init__(self, work: Simulation) -> None:
        super().__init__()
        self.work = work

    def set(self, key: str, value: Any) -> None:
        with self.work.changed:
            self.work.stored[key] = _bytes(value)
            self.work.changed.notify_all()

    def get(self, key: str) -> bytes:
        with self.work.changed:
            self.work.wait(lambda: key in self.work.stored, f"the store's {key}")
            return self.work.stored[key]

    def add(self, key: str, amount: int) -> int:
        with self.work.changed:
            value = int(self.work.stored.get(key, b"0")) + amount
            self.work.stored[key] = str(value).encode()
            self.work.changed.notify_all()
            return value

    def check(self, keys: list[str]) -> bool:
        with self.work.changed:
            return all(key in self.work.stored for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        with self.work.changed:
            self.work.wait(lambda: all(key in self.work.stored for key in keys), f"the store's {keys}")

    def delete_key(self, key: str) -> bool:
        with self.work.changed:
            return self.work.stored.pop(key, None) is not None


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


_SUMS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.Tensor.add_,
    "AVG": torch.Tensor.add_,
    "PRODUCT": torch.Tensor.mul_,
    "MAX": lambda total, other: total.copy_(torch.maximum(total, other)),
    "MIN": lambda total, other: total.copy_(torch.minimum(total, other)),
}


def _operation(options: Any) -> str:
    for name in _SUMS:
        if options.reduceOp == getattr(dist.ReduceOp, name):
            return name
    raise UsageError(f"the simulator has no reduction {options.reduceOp}", hint=", ".join(_SUMS))


def _reduced(tensors: Sequence[Tensor], operation: str) -> Tensor:
    """In rank order."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        _SUMS[operation](total, tensor)
    if operation == "AVG":
        total.div_(len(tensors))
    return total


def _shaped(*tensors: Tensor) -> str:
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)


def _kept(tensor: Tensor) -> Tensor:
    """A copy: the rank may change its tensor before another has read it."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


class SimulatedGroup(torch_private.PythonProcessGroup):  # type: ignore[misc]
    """A process group whose members are threads. The methods are those that torch's own groups have."""

    def __init__(self, work: Simulation, name: str, ranks: tuple[int, ...], member: int) -> None:
        super().__init__(member, len(ranks))
        self.work, self.name, self.ranks, self.member = work, name, ranks, member
        self.key = f"{name} {ranks}"

    @property
    def group_name(self) -> str:
        return self.name

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return SIMULATED

    def _meet(self, kind: str, brought: Any, combine: Combine) -> Any:
        return self.work.meet(self.key, self.ranks, self.member, kind, brought, combine)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        operation = "SUM" if opts is None else _operation(opts)

        def combine(brought: list[list[Tensor]]) -> Sequence[list[Tensor]]:
            sums = [_reduced(each, operation) for each in zip(*brought, strict=True)]
            return [sums] * len(brought)

        kind = f"all_reduce {operation.lower()} of {_shaped(*tensors)}"
        sums = self._meet(kind, [_kept(tensor) for tensor in tensors], combine)
        for tensor, result in zip(tensors, sums, strict=True):
            tensor.detach().copy_(result)
        return torch_private.done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def barrier(self, opts: Any = None) -> Any:
        self._meet("barrier", None, lambda brought: brought)
        return torch_private.done([])

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        root = opts.rootRank
        kind = f"broadcast from {self.ranks[root]} of {_shaped(*tensors)}"
        brought = [_kept(tensor) for tensor in tensors] if self.member == root else None
        sent = self._meet(kind, brought, lambda all_: [all_[root]] * len(all_))
        for tensor, result in zip(tensors, sent, strict=True):
            tensor.detach().copy_(result)
        return torch_private.done(tensors)

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        kind = f"all_gather of {_shaped(tensor)}"
        gathered: list[Tensor] = self._meet(kind, _kept(tensor), lambda brought: [brought] * len(brought))
        return gathered

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> Any:
        for pieces, tensor in zip(outputs, tensors, strict=True):
            for piece, found in zip(pieces, self._gathered(tensor), strict=True):
                piece.detach().copy_(found)
        return torch_private.done(outputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        found = torch.cat([piece.reshape(-1) for piece in self._gathered(tensor)])
        output.detach().copy_(found.view(output.shape))
        return torch_private.done(output)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None
    ) -> Any:
        for output, tensor in zip(outputs, tensors, strict=True):
            self.all_gather_single(output, tensor)
        return torch_private.done(outputs)

    def gather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Any:
        """`outputs` is empty but on the root."""
        kind = f"gather to {self.ranks[opts.rootRank]} of {_shaped(*tensors)}"
        (tensor,) = tensors
        found = self._meet(kind, _kept(tensor), lambda brought: [brought] * len(brought))
        for pieces in outputs:
            for piece, value in zip(pieces, found, strict=True):
                piece.detach().copy_(value)
        return torch_private.done(outputs)

    def scatter(self, outputs: list[Tensor], tensors: list[list[Tensor]], opts: Any) -> Any:
        """`tensors` is empty but on the root."""
        root = opts.rootRank
        (output,) = outputs
        kind = f"scatter from {self.ranks[root]} of {_shaped(output)}"
        brought = [_kept(piece) for piece in tensors[0]] if self.member == root else None
        own = self._meet(kind, brought, lambda all_: all_[root])
        output.detach().copy_(own)
        return torch_private.done(outputs)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        operation = "SUM" if opts is None else _operation(opts)

        def combine(brought: list[Tensor]) -> Sequence[Tensor]:
            return _reduced(brought, operation).reshape(len(brought), -1).unbind(0)

        kind = f"reduce_scatter {operation.lower()} of {_shaped(tensor)}"
        own = self._meet(kind, _kept(tensor), combine)
        output.detach().copy_(own.view(output.shape))
        return torch_private.done(output)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None
    ) -> Any:
        for output, tensor in zip(outputs, tensors, strict=True):
            self.reduce_scatter_single(output, tensor, opts)
        return torch_private.done(outputs)

    def reduce_scatter(self, outputs: list[Tensor], tensors: list[list[Tensor]], opts: Any = None) -> Any:
        for output, pieces in zip(outputs, tensors, strict=True):
            self.reduce_scatter_single(output, torch.stack(pieces), opts)
        return torch_private.done(outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: list[int] | None,
        sizes: list[int] | None,
        opts: Any = None,
    ) -> Any:
        """`sizes[j]` rows go to member j, `output_sizes[j]` are expected from it; without them all are equal."""
        even = len(self.ranks)
        sizes = list(sizes or [tensor.shape[0] // even] * even)
        output_sizes = list(output_sizes or [output.shape[0] // even] * even)
        kind = f"all_to_all of rows {_shaped(tensor[:0])}"
        if sum(sizes) != tensor.shape[0] or sum(output_sizes) != output.shape[0]:
            raise UsageError(
                f"all_to_all: {sizes} rows of {tensor.shape[0]} sent, {output_sizes} of {output.shape[0]} received",
                where=f"rank {self.ranks[self.member]}",
                hint="sizes that add up to the rows there are",
            )
        received = self._meet(kind, (_kept(tensor), sizes, output_sizes), self._exchange)
        output.detach().copy_(torch.cat(received).view(output.shape))
        return torch_private.done(output)

    def _exchange(self, brought: list[Any]) -> Sequence[list[Tensor]]:
        pieces = [tensor.split(sizes) for tensor, sizes, _ in brought]
        for to, (_, _, expected) in enumerate(brought):
            found = [len(pieces[source][to]) for source in range(len(brought))]
            if found != expected:
                raise PeerError(
                    f"all_to_all: rank {self.ranks[to]} expects {expected} rows, is sent {found}",
                    where=f"ranks {list(self.ranks)}",
                    hint="sizes that agree between sender and receiver",
                )
        return [[pieces[source][to] for source in range(len(brought))] for to in range(len(brought))]

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        """Does not wait for the receiver."""
        with self.work.changed:
            self.work.messages[self.key, self.member, to, tag].extend(_kept(tensor) for tensor in tensors)
            self.work.changed.notify_all()
        return torch_private.done(tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        return torch_private.later(lambda: self._receive(tensors, source, tag))

    def _receive(self, tensors: list[Tensor], source: int, tag: int) -> None:
        what = f"a message of {_shaped(*tensors)} from rank {self.ranks[source]}"
        for tensor in tensors:
            with self.work.changed:
                inbox = self.work.messages[self.key, source, self.member, tag]
                self.work.wait(lambda inbox=inbox: bool(inbox), what)  # type: ignore[misc]
                message = inbox.popleft()
                if message.shape != tensor.shape or message.dtype != tensor.dtype:
                    self.work.fail(
                        PeerError(
                            f"rank {self.ranks[self.member]} receives {_shaped(tensor)}, "
                            f"rank {self.ranks[source]} has sent {_shaped(message)}",
                            hint="the same shapes on both sides",
                        )
                    )
                    raise Ended
            tensor.detach().copy_(message)
