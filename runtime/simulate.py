"""The simulator: all ranks of a mesh as threads of this process, with torch.distributed between them.

In:  a number of ranks and a function of a rank.
Out: what the function returned on every rank, in rank order.

Inside the function `torch.distributed`, `join_mesh`, the parameter store and the functional collectives work as
they do in processes: every thread has process groups of its own, of a backend that hands tensors from thread to
thread. Sums are taken in rank order, so results are the same bit for bit, run after run.

A run ends; it never hangs. A rank's exception ends all ranks and is raised to the caller. Ranks that call different
collectives, or that all wait for something that none of them will do, are a PeerError at once, and whatever else
takes too long is one after `timeout_s`.

Ranks share what a process shares: torch's default random generator, and modules that are not safe to call from
several threads (torch.export, torch.compile). Capture and lower before, and run inside.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopar import torch_private
from autopar.errors import UsageError
from autopar.runtime.exchange import RankThread, Simulation, timed_out
from autopar.runtime.groups import SIMULATED
from autopar.runtime.simulated_group import SimulatedGroup, SimulatedStore

T = TypeVar("T")

_one_at_a_time = threading.Lock()  # process groups by thread are a switch of the whole process


def simulate(world: int, function: Callable[[int], T], *, timeout_s: float = 120) -> list[T]:
    """Run `function(rank)` on `world` simulated ranks; returns their results in rank order.

    Raises what the first rank to fail raised, and PeerError where ranks do not agree on their collectives, wait for
    each other in a circle, or are not done after `timeout_s`.
    """
    if world < 1:
        raise UsageError(f"{world} ranks cannot be simulated", hint="1 or more")
    if isinstance(threading.current_thread(), RankThread):
        raise UsageError("a simulated rank cannot simulate ranks itself", hint="one simulation at a time")
    with _one_at_a_time, _surroundings(world):
        work = Simulation(world, timeout_s)
        ranks = [_Rank(work, rank, function) for rank in range(world)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(max(0.0, work.deadline + 1.0 - time.monotonic()))
        late = [rank.rank for rank in ranks if rank.is_alive()]
        if late and work.failure is None:
            with work.changed:
                work.fail(timed_out(timeout_s, work, late))
        if work.failure is not None:
            raise work.failure
        return [rank.result for rank in ranks]


@contextmanager
def _surroundings(world: int) -> Iterator[None]:
    """Process groups by thread, this process's cores shared among the ranks; all as before afterwards."""
    threads, hook = torch.get_num_threads(), sys.excepthook
    torch.set_num_threads(max(1, threads // world))
    try:
        with torch_private.process_groups_by_thread():
            yield
    finally:
        torch.set_num_threads(threads)
        sys.excepthook = hook  # init_process_group puts its own there, that names a rank


class _Rank(RankThread):
    """Runs the function as one rank, in the process groups of its thread."""

    def __init__(self, work: Simulation, rank: int, function: Callable[[int], Any]) -> None:
        super().__init__(rank)
        self.work, self.function = work, function
        self.result: Any = None

    def run(self) -> None:
        try:
            with torch.autograd.set_multithreading_enabled(False):  # backward stays in this thread
                dist.init_process_group(
                    SIMULATED,
                    rank=self.rank,
                    world_size=self.work.world,
                    store=SimulatedStore(self.work),
                    timeout=timedelta(seconds=self.work.timeout_s),
                )
                self.result = self.function(self.rank)
        except BaseException as error:  # all of it is the caller's to see
            with self.work.changed:
                self.work.fail(error)
        finally:
            self.work.end(self.rank)
            if dist.is_initialized():
                dist.destroy_process_group()


def _make_group(options: Any, _: Any) -> SimulatedGroup:
    thread = threading.current_thread()
    assert isinstance(thread, _Rank)
    ranks = tuple(options.global_ranks_in_group) or tuple(range(thread.work.world))
    return SimulatedGroup(thread.work, str(options.group_id), ranks, options.group_rank)


dist.Backend.register_backend(SIMULATED, _make_group, extended_api=True, devices=["cpu"])
