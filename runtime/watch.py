"""The watch: a rank that hangs is named within a set time, with what the others wait for; slow ranks are named too.

In:  this rank's Observer, and the store of the process group, through which ranks tell each other where they are.
Out: a hang ends every rank within seconds, with one HangError; `stragglers`.

    rank 3 is still in forward of model.layers.4 (block layer) since 41 s (loader.py:88 in read); ranks 0 to 2 wait in
    all_reduce over tp (ranks 2, 3) of float32[4, 16, 64], in forward of model.layers.4 (block layer), node all_reduce_1

Two threads: one writes this rank's state to the store and reads the others'; the other decides, so that a store that
does not answer (its process is stopped) is noticed as well. A hang is one of: this rank has waited in one collective,
or for data, for longer than the limit. The first to see it leaves the verdict in the store, and every rank ends with it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from autopar.errors import HangError
from autopar.runtime.groups import SIMULATED
from autopar.runtime.launch import report_error
from autopar.runtime.observe import DATA, Observer, ranks_text
from autopar.torch_private import default_store

_BEATS_AHEAD = 5  # before --timeout: a hang is told before torch's own time-outs end the ranks one by one
_VERDICT = "autopar/hang"
_SILENT_BEATS = 5  # beats that a rank may miss before it counts as not answering
_MOST_STATES = 6  # different places that a report lists


@dataclass(frozen=True)
class State:
    """What a rank last told. `beat` counts up; `unchanged_s`: since when it is where it is, when it told so; `at`: the
    line of Python it was in; `means`: seconds by kind, waiting left out, over its last steps."""

    rank: int
    beat: int
    step: int
    place: str
    waiting: str
    unchanged_s: float
    at: str
    host: str
    pid: int
    started: str
    means: dict[str, float]


class Watch:
    """Watches one rank of a run. `limit_s`: how long it may wait; `say`: where warnings go."""

    def __init__(
        self,
        observer: Observer,
        *,
        timeout_s: float,
        say: Callable[[str], None],
        means: Callable[[], dict[str, float]] = dict,
        end: Callable[[HangError, int], None] | None = None,
    ) -> None:
        self.observer, self.say, self.means = observer, say, means
        self.beat_s = min(1.0, timeout_s / 20)
        self.limit_s = timeout_s - _BEATS_AHEAD * self.beat_s
        self.rank = observer.groups.rank
        self.end = end or end_process
        self.peers: dict[int, State] = {}
        self._told = time.monotonic()  # when the store last answered
        self._heard: dict[int, tuple[int, float]] = {}  # rank -> its last beat, and when it was new here
        self._verdict: str | None = None
        self._warned = 0
        self._stop = threading.Event()
        self._training = threading.get_ident()
        self._threads: list[threading.Thread] = []
        self._about = (socket.gethostname() + _boot(), os.getpid(), _started(os.getpid()))

    def start(self) -> None:
        """Begin, on the thread that trains."""
        self._training = threading.get_ident()
        several = dist.is_initialized() and dist.get_backend() != SIMULATED and dist.get_world_size() > 1
        jobs: list[Callable[[], None]] = [self._decide_for_ever]
        if several:
            store = default_store()
            store.set(_key(self.rank), json.dumps(vars(self.state(0))))
            jobs.append(lambda: self._beat_for_ever(store))
        for job in jobs:
            thread = threading.Thread(target=job, name="autopar watch", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=2 * self.beat_s + 1)

    # ---- telling each other --------------------------------------------------------------------------------

    def state(self, beat: int) -> State:
        place, waiting = self.observer.place, self.observer.waits_for()
        return State(
            self.rank,
            beat,
            place.step,
            str(place),
            str(waiting or ""),
            time.monotonic() - self.observer.changed,
            _line(self._training),
            *self._about,
            self.means(),
        )

    def _beat_for_ever(self, store: Any) -> None:
        world, beat, listened = dist.get_world_size(), 0, False
        keys = [_key(rank) for rank in range(world)]
        while not self._stop.wait(self.beat_s):
            beat += 1
            # Rank 0 follows all, for slow ones; the others look when they have waited for long.
            listens = self.rank == 0 or time.monotonic() - self.observer.changed > self.limit_s / 2
            try:
                store.set(keys[self.rank], json.dumps(vars(self.state(beat))))
                if listens:
                    if not listened:
                        self._heard.clear()
                    for text in _known(store, keys):
                        self._hear(State(**json.loads(text)))
                if self._verdict is not None:
                    store.set(_VERDICT, self._verdict)
                elif store.check([_VERDICT]):
                    self._verdict = store.get(_VERDICT).decode()
            except Exception:  # the run is over, or its store is gone: the other thread goes by `_told`
                continue
            listened, self._told = listens, time.monotonic()

    def _hear(self, state: State) -> None:
        if state.rank == self.rank:
            return
        if self._heard.get(state.rank, (-1, 0.0))[0] != state.beat:
            self._heard[state.rank] = (state.beat, time.monotonic())
        self.peers[state.rank] = state

    def silent_s(self, rank: int) -> float:
        """For how long a rank has told nothing; 0 if it tells as it should."""
        if rank not in self._heard:
            return 0.0
        silent = time.monotonic() - self._heard[rank][1]
        return silent if silent > _SILENT_BEATS * self.beat_s else 0.0

    # ---- deciding ------------------------------------------------------------------------------------------

    def _decide_for_ever(self) -> None:
        while not self._stop.wait(self.beat_s):
            if self._verdict is not None:
                self._finish(self._verdict)
                return
            stuck = time.monotonic() - self.observer.changed
            if stuck < self.limit_s:
                self._warned = 0
                continue
            place, waiting = self.observer.place, self.observer.waits_for()
            if waiting is not None or place.kind == DATA:
                time.sleep(min(1.0, self.beat_s))  # what the others tell now
                if self._verdict is None:
                    self._verdict = self.judge()
                time.sleep(2 * self.beat_s)  # for the other thread to pass it on
                self._finish(self._verdict)
                return
            if stuck > (self._warned + 1) * self.limit_s:
                self._warned += 1
                self.say(
                    f"rank {self.rank}: no progress since {stuck:.0f} s, in {place} of step {place.step} "
                    f"({_line(self._training)})"
                )

    def judge(self) -> str:
        """What is known of all ranks, in one sentence for those that are elsewhere and one for those that wait."""
        own = self.state(0)
        states = {**self.peers, self.rank: own}
        absent: list[str] = []
        waiting: dict[tuple[str, str, int], list[int]] = {}
        for rank, state in sorted(states.items()):
            silent = self.silent_s(rank) if rank != self.rank else 0.0
            if not state.waiting or silent:
                absent.append(_absent(state, silent))
            else:
                waiting.setdefault((state.waiting, state.place, state.step), []).append(rank)
        world = self.observer.groups.mesh.device_count
        if world > 1 and time.monotonic() - self._told > max(5.0, _SILENT_BEATS * self.beat_s):
            return (
                f"the store of the process group does not answer: its process is stopped or gone; rank {self.rank} "
                f"waits in {own.waiting or own.place}, in {own.place}"
            )
        missing = [rank for rank in range(world) if rank not in states]
        if missing:
            absent.append(f"{ranks_text(tuple(missing))} told nothing yet")
        waits = [
            f"{ranks_text(tuple(ranks))} {'waits' if len(ranks) == 1 else 'wait'} in {what}, in {place} of step {step}"
            for (what, place, step), ranks in list(waiting.items())[:_MOST_STATES]
        ]
        if not absent:
            return "every rank waits, and not for the same: " + "; ".join(waits)
        return "; ".join([*absent[:_MOST_STATES], *waits])

    def _finish(self, verdict: str) -> None:
        error = HangError(
            verdict,
            where=f"step {self.observer.place.step}",
            hint="the first rank named: its log, `py-spy dump`, its machine; a longer --timeout if it is only slow",
        )
        self._end_silent()
        self.end(error, self.rank)

    def _end_silent(self) -> None:
        """A stopped process of this machine ends only by SIGKILL, and who launched it waits for its end."""
        for rank, state in self.peers.items():
            same = state.host == self._about[0] and state.started and _started(state.pid) == state.started
            if self.silent_s(rank) and same:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(state.pid, signal.SIGKILL)

    def beats(self) -> int:
        """How often every other rank has told its state."""
        return min((state.beat for state in list(self.peers.values())), default=0)

    # ---- slow ranks ----------------------------------------------------------------------------------------

    def ranks_seconds(self) -> dict[int, dict[str, float]]:
        """Seconds by kind that each rank told, itself included: means over its last steps, waiting left out."""
        found = {rank: state.means for rank, state in list(self.peers.items()) if state.means}
        found[self.rank] = self.means()
        return found


def _absent(state: State, silent: float) -> str:
    rank = f"rank {state.rank} (process {state.pid} on {state.host.split()[0]})"
    where = f"{state.waiting}, in {state.place}" if state.waiting else state.place
    if silent:
        return (
            f"{rank} does not answer since {silent:.0f} s: it is stopped, or its machine is gone; "
            f"it was last in {where} of step {state.step}"
        )
    at = f" ({state.at})" if state.at else ""
    return f"{rank} is still in {where} of step {state.step} since {state.unchanged_s:.0f} s{at}"


def _key(rank: int) -> str:
    return f"autopar/state/{rank}"


def _known(store: Any, keys: list[str]) -> list[bytes]:
    """What the store has of these keys; all in one question, once all are there."""
    if store.check(keys):
        found: list[bytes] = store.multi_get(keys)
        return found
    return [store.get(key) for key in keys if store.check([key])]


def end_process(error: HangError, rank: int) -> None:
    """Leave the error for the launcher, or print it where there is none, and end this process at once: the thread that
    trains is stuck, and cannot be told."""
    if not report_error(error, rank):
        sys.stderr.write(f"rank {rank}: {error}\n")
    sys.stderr.flush()
    os._exit(error.exit_code)


def _line(thread: int) -> str:
    """The innermost line of a thread that is neither torch's nor the interpreter's own: `loader.py:88 in read`."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    for found in reversed(traceback.extract_stack(frame)):
        if "/torch/" not in found.filename and not found.filename.startswith("<") and found.line:
            return f"{Path(found.filename).name}:{found.lineno} in {found.name}"
    return ""


def _boot() -> str:
    """Two machines may have one name, and two containers the numbers of each other's processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f" {boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 (the link's text is wanted)
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process was started, in the kernel's ticks: the number of an ended process is given out again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
