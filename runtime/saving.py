"""When a run saves, and how: every so many steps or by Daly's interval, in the background where that pays, the newest few.

In:  a trainer, the run's folder, a SavePolicy. After every step `after_step` agrees with the other ranks on what to do
(one small all-reduce): save, end because a scheduler asked, or raise what a save in the background came to.

An asynchronous save copies this rank's shares to host memory (that is all the run waits for) and writes them on another
thread, whose collectives go over a process group of its own: those of the training step may be under way. A save that
is due while one is being written waits for it.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save

from autopar.cost.money import HOUR_S, daly_interval_s
from autopar.errors import TrainingError
from autopar.runtime.checkpoint import (
    Save,
    check_target,
    checkpoints,
    first_only,
    prepare_save,
    save_checkpoint,
    several,
    step_folder,
    translated,
)
from autopar.runtime.checkpoint_state import Extra
from autopar.runtime.checkpoint_storage import MANIFEST, PARTIAL, REPLACED
from autopar.runtime.groups import SIMULATED, peer_errors
from autopar.runtime.trainer import Trainer

# A rank may take much longer than another to write: the wait for it is not that of a collective in a step.
WRITING_TIMEOUT_S = 3600.0
_ASYNC_FROM_BYTES = 16 << 20  # less is written in about the time that starting a thread's collectives takes
_MOST_OF_MEMORY = 0.5  # of the free host memory that the copy of an asynchronous save may take


@dataclass(frozen=True)
class SavePolicy:
    """`every`: steps between saves, 0 for only the last, None for Daly's interval. `keep`: how many are kept, 0 for all.
    `asynchronous` None: where it pays. `mtbf_s`: mean seconds between failures of the whole run, and `mtbf_source` why.
    `write_gbps`: GB/s of the whole run's storage, for the time of the first save only; then it is measured."""

    every: int | None = None
    keep: int = 3
    asynchronous: bool | None = None
    mtbf_s: float = math.inf
    mtbf_source: str = ""
    write_gbps: float = 1.0


@dataclass
class SaveTimes:
    """What saving took on this rank. `stall_s`: the run stood still; `write_s`: until the checkpoint was there."""

    stall_s: list[float] = field(default_factory=list)
    write_s: list[float] = field(default_factory=list)


class HostCopy(AsyncStager):
    """Copies shares into host memory that is kept from save to save."""

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        for name in self.kept.keys() - state_dict.keys():
            del self.kept[name]
        on_gpu = False
        for name, tensor in state_dict.items():
            kept = self.kept.get(name)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self.kept[name] = kept
            on_gpu |= tensor.is_cuda
            kept.copy_(tensor, non_blocking=tensor.is_cuda)
        if on_gpu:
            torch.cuda.synchronize()
        return dict(self.kept)

    def synchronize_staging(self) -> None:
        return

    def close(self) -> None:
        self.kept.clear()


class Saver:
    """Saves a run into `folder`. All ranks make one and call the same methods.

    `about`: what goes into training.json. `files`: name -> text beside it. `extra`: more tensors of the run.
    `trained_only`: without frozen parameters.
    """

    def __init__(
        self,
        trainer: Trainer,
        folder: Path,
        policy: SavePolicy,
        *,
        about: Callable[[], Mapping[str, Any]],
        files: Mapping[str, str] | None = None,
        extra: Callable[[], Extra] = dict,
        trained_only: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.trainer, self.folder, self.policy = trainer, folder, policy
        self.about, self.files, self.extra, self.say = about, files or {}, extra, say
        self.trained_only = trained_only
        self.times = SaveTimes()
        self.first = trainer.groups.rank == 0
        self.last_saved = -1
        self._stager = HostCopy()
        self._pending: Future[Any] | None = None
        self._began = 0.0
        self._since = time.monotonic()
        self._told: float | None = None
        self._asynchronous = policy.asynchronous
        self._agreement: ProcessGroup | None = None
        self._writing: ProcessGroup | None = None
        first_only(lambda: check_target(folder))
        if several():
            backend = None if self._simulated else "gloo"
            self._agreement = dist.new_group(backend=backend)
            self._writing = dist.new_group(backend=backend, timeout=timedelta(seconds=WRITING_TIMEOUT_S))
        self._tell_interval()

    @property
    def _simulated(self) -> bool:
        return dist.is_initialized() and dist.get_backend() == SIMULATED

    # ---- after every step ----------------------------------------------------------------------------------------

    def after_step(self, *, stop: bool = False) -> bool:
        """Save if it is time. Returns whether any rank was asked to stop. Raises the error of an earlier save."""
        failed = self._pending is not None and self._pending.done() and self._pending.exception() is not None
        stop, failed, due = self._agreed(stop, failed, self._due())
        if failed:
            self.wait()
        elif self._pending is not None and self._pending.done():
            self._completed()
        if due and not stop:
            self.save()
        return stop

    def _agreed(self, *flags: bool) -> list[bool]:
        if self._agreement is None:
            return list(flags)
        tensor = torch.tensor(flags, dtype=torch.int32)
        with peer_errors(f"after step {self.trainer.step_count}"):
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._agreement)
        return [bool(value) for value in tensor.tolist()]

    def _due(self) -> bool:
        """Every so many steps on every rank; by time, rank 0 says it for all."""
        if self.policy.every is not None:
            return self.policy.every > 0 and self.trainer.step_count % self.policy.every == 0
        return self.first and self._pending is None and time.monotonic() - self._since >= self.interval_s

    @property
    def interval_s(self) -> float:
        """Seconds of training between two saves by Daly's formula, from the last save's stall. Not less than a save in
        the background takes."""
        stall_s = self.times.stall_s[-1] if self.times.stall_s else self._guessed_s
        slowest_s = self.times.write_s[-1] if self.times.write_s else 0.0
        return max(daly_interval_s(max(stall_s, 1e-3), self.policy.mtbf_s), slowest_s)

    @property
    def _guessed_s(self) -> float:
        return self._bytes() * self.trainer.groups.mesh.device_count / (self.policy.write_gbps * 1e9)

    def _bytes(self) -> int:
        """About what this rank's shares take: parameters and two moments, as AdamW has, before the first step."""
        parameters = [entry.parameter for entry in self.trainer.store.entries.values()]
        trained = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
        frozen = sum(parameter.nbytes for parameter in parameters) - trained
        return 3 * trained + (0 if self.trained_only else frozen)

    def _tell_interval(self) -> None:
        if self.policy.every is not None:
            return
        interval_s = self.interval_s
        if self._told is not None and 0.5 < interval_s / self._told < 2:
            return
        self._told = interval_s
        if math.isinf(interval_s):
            self.say("checkpoints: only the last one, for no failures are expected")
            return
        how = "was measured" if self.times.stall_s else "is assumed until one is measured"
        stall_s = self.times.stall_s[-1] if self.times.stall_s else self._guessed_s
        self.say(
            f"checkpoints: about every {_spoken(interval_s)} (Daly 2006): a save stops training for {_spoken(stall_s)}, "
            f"as {how}; a failure is expected every {_spoken(self.policy.mtbf_s)} {self.policy.mtbf_source}".rstrip()
        )

    # ---- saving --------------------------------------------------------------------------------------------------

    def save(self, *, wait: bool = False) -> None:
        """Save now, in the background unless `wait` or it does not pay. All ranks must call it."""
        began = time.monotonic()
        self.wait()
        self._began = time.monotonic()
        step = self.trainer.step_count
        if wait or not self._in_background():
            save_checkpoint(
                self.folder,
                self.trainer,
                about=self.about(),
                files=self.files,
                extra=self.extra(),
                trained_only=self.trained_only,
                group=self._writing,
            )
            self.last_saved = step
            self._completed()
        else:
            first_only(lambda: check_target(self.folder))
            save = prepare_save(
                self.folder,
                self.trainer,
                about=self.about(),
                files=self.files,
                extra=self.extra(),
                trained_only=self.trained_only,
            )
            self._start(save)
            self.last_saved = step
        self.times.stall_s.append(time.monotonic() - began)
        self._since = time.monotonic()
        if not wait:
            self._tell_interval()

    def _start(self, save: Save) -> None:
        response = async_save(
            save.state,
            storage_writer=save.writer,
            planner=save.planner,
            process_group=self._writing,
            async_stager=self._stager,
            no_dist=not several(),
        )
        assert isinstance(response, Future)
        self._pending = response
        self._pending.add_done_callback(lambda _: self._written())

    def _written(self) -> None:
        self.times.write_s.append(time.monotonic() - self._began)

    def wait(self) -> None:
        """Until the save in the background is there. Raises its error, on all ranks."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        folder = step_folder(self.folder, self.last_saved)
        with peer_errors(f"saving step {self.last_saved}"), translated(folder):
            pending.result()
        self._completed()

    def _completed(self) -> None:
        """A checkpoint is there: older ones may go."""
        self._pending = None
        if self.first:
            prune(self.folder, self.policy.keep, self.last_saved)

    def finish(self) -> None:
        """The last save of a run, complete when this returns (unless this step's is there already)."""
        self.wait()
        if self.last_saved != self.trainer.step_count:
            self.save(wait=True)

    def abandon(self) -> None:
        """The run ends with an error: give a save in the background a moment to become complete."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            try:
                pending.result(timeout=10.0)
            except Exception:
                return  # the run's own error is the one to tell; this checkpoint is not there, the one before is

    def _in_background(self) -> bool:
        """Whether this save is asynchronous: as asked, else for enough bytes that fit into memory a second time."""
        if self._simulated:  # a rank is a thread, and another thread is no rank
            return False
        if self._asynchronous is None:
            size = sum(
                tensor.nbytes
                for state in self.trainer.optimizer.state.values()
                for tensor in state.values()
                if isinstance(tensor, Tensor)
            ) + sum(entry.parameter.nbytes for entry in self.trainer.store.entries.values())
            local = self.trainer.groups.mesh.device_count if self.trainer.groups.device.type == "cpu" else 8
            fits = (
                size * min(local, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
                < _MOST_OF_MEMORY * _free_memory()
            )
            *_, unfit = self._agreed(not fits)
            *_, large = self._agreed(size >= _ASYNC_FROM_BYTES)
            self._asynchronous = large and not unfit
            if large:
                self.say(
                    f"checkpoints are written in the {'background' if self._asynchronous else 'foreground'}: "
                    f"{size / 1e6:.0f} MB on rank 0"
                    + ("" if self._asynchronous else ", for which there is no room in memory a second time")
                )
        return self._asynchronous


def prune(folder: Path, keep: int, newest_step: int) -> None:
    """Remove all but the newest `keep` complete checkpoints (0: none), and what killed saves left."""
    for left in folder.glob(f"step-*{PARTIAL}"):
        shutil.rmtree(left, ignore_errors=True)
    for left in folder.glob(f"step-*{REPLACED}"):
        if (left.with_name(left.name.removesuffix(REPLACED)) / MANIFEST).is_file():
            shutil.rmtree(left, ignore_errors=True)
    kept = [path for path in checkpoints(folder) if path.parent == folder]
    safe = step_folder(folder, newest_step)
    for path in kept[keep:] if keep else []:
        if path == safe:
            continue
        try:
            (path / MANIFEST).unlink()  # from here on it is not complete, whatever of it is left
            shutil.rmtree(path)
        except OSError as error:
            raise TrainingError(
                f"an old checkpoint cannot be removed: {error.strerror}",
                where=str(path),
                hint="--keep 0 to keep all, or a folder where files can be removed",
            ) from error


def mean_time_between_failures(
    devices: int, failures_per_device_hour: float, given_hours: float | None
) -> tuple[float, str]:
    """Seconds, and where they are from: `given_hours` of the whole run, else from the rate of one device."""
    if given_hours is not None:
        return given_hours * HOUR_S, "(--mtbf-hours)"
    rate = devices * failures_per_device_hour
    many = f"{devices} devices, {failures_per_device_hour:.1e} failures per hour each"
    source = f"({many if devices > 1 else many.replace('devices', 'device').removesuffix(' each')})"
    return (HOUR_S / rate if rate else math.inf), source


def _free_memory() -> float:
    """Bytes of host memory that are not in use; infinite where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable")]
    return int(found[0]) * 1024 if found else math.inf


def _spoken(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s"
