"""Ahead: batches made in a background thread before the training loop asks for them.

In:  a function from step and position to a batch. Out: `get`, which waits only where the thread has fallen behind.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from autopar.errors import AutoparError, TrainingError

Batch = dict[str, Tensor]
_LOOK_S = 0.1  # how often a thread that waits looks whether the other one is still there


@dataclass
class Waited:
    """Seconds the training loop waited for the last batch, and for all of them."""

    last_s: float = 0.0
    total_s: float = 0.0


class Ahead:
    """`make(step, position)` for step and position, step + 1 and position + `batch`, and so on, at most `depth` of them
    kept. A context manager; `close` ends the thread. Attributes: `waited`."""

    def __init__(
        self,
        make: Callable[[int, int], Batch],
        *,
        batch: int,
        depth: int = 2,
        waited: Waited | None = None,
    ) -> None:
        self.make, self.batch, self.depth = make, batch, depth
        self.waited = waited if waited is not None else Waited()
        self._next: tuple[int, int] | None = None
        self._work: _Work | None = None

    def get(self, step: int, position: int) -> Batch:
        """The batch of a step, after `position` samples. One that does not follow the last starts the thread anew.

        Raises what `make` raised, if it is an error of autopar's, else TrainingError.
        """
        began = time.perf_counter()
        if (step, position) != self._next or self._work is None:
            self.close()
            self._work = _Work(self.make, step, position, self.batch, self.depth)
        try:
            item = self._work.take()
        except TrainingError:
            self.close()
            raise
        self.waited.last_s = time.perf_counter() - began
        self.waited.total_s += self.waited.last_s
        if isinstance(item, BaseException):
            self.close()
            raise _told(item, step) from item
        self._next = step + 1, position + self.batch
        return item

    def close(self) -> None:
        """End the thread; a later `get` starts another."""
        if self._work is not None:
            self._work.end()
        self._work = self._next = None

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Work:
    """One thread, and the batches it has made."""

    def __init__(
        self, make: Callable[[int, int], Batch], step: int, position: int, batch: int, depth: int
    ) -> None:
        self.ready: queue.Queue[Batch | BaseException] = queue.Queue(max(1, depth))
        self.ended = threading.Event()
        arguments = (make, step, position, batch)
        self.thread = threading.Thread(target=self._run, args=arguments, name="autopar data", daemon=True)
        self.thread.start()

    def _run(self, make: Callable[[int, int], Batch], step: int, position: int, batch: int) -> None:
        while not self.ended.is_set():
            try:
                item: Batch | BaseException = make(step, position)
            except BaseException as error:
                item = error
            self._put(item)
            if isinstance(item, BaseException):
                return
            step, position = step + 1, position + batch

    def _put(self, item: Batch | BaseException) -> None:
        while not self.ended.is_set():
            try:
                self.ready.put(item, timeout=_LOOK_S)
                return
            except queue.Full:
                continue

    def take(self) -> Batch | BaseException:
        while True:
            try:
                return self.ready.get(timeout=_LOOK_S)
            except queue.Empty:
                if not self.thread.is_alive() and self.ready.empty():
                    raise TrainingError(
                        "the thread that makes batches has ended without one",
                        hint="to start the run again with --resume",
                    ) from None

    def end(self) -> None:
        self.ended.set()
        self.thread.join(timeout=5)


def _told(error: BaseException, step: int) -> BaseException:
    if isinstance(error, AutoparError) or not isinstance(error, Exception):
        return error
    return TrainingError(
        f"the batch cannot be made: {type(error).__name__}: {error}",
        where=f"step {step + 1}",
        hint="to look at the data; the parameters are those before this step",
    )
