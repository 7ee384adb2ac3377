"""Checkpoints of a run, in pieces that the ranks hold, so that a run goes on under any plan and mesh.

In:  a trainer, and the folder of the run. Out: `FOLDER/step-00000100/`, complete or not there at all
(`checkpoint_storage.py` has the files); and back: every rank reads what its share needs, whoever wrote it.

`torch.distributed.checkpoint` plans and coordinates; `checkpoint_state.py` says what is saved. All ranks must call
`save_checkpoint` and `load_checkpoint`; an error of one is raised on all of them.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as write

from autopar.errors import AutoparError, TrainingError
from autopar.runtime import checkpoint_old
from autopar.runtime.checkpoint_state import (
    Extra,
    SavePlanner,
    Share,
    SharesLoadPlanner,
    Wanted,
    held,
    wanted,
)
from autopar.runtime.checkpoint_storage import (
    MANIFEST,
    REPLACED,
    Index,
    Reader,
    Writer,
    damage,
    read_index,
    read_manifest,
    unreadable,
)
from autopar.runtime.groups import peer_errors
from autopar.runtime.trainer import Trainer

FORMAT = 2
TRAINING = "training.json"
TRAINED_ONLY = "trained_only"  # in training.json: frozen parameters are not in the checkpoint
_STEP = re.compile(r"step-(\d{8,})(\.replaced)?")
_T = TypeVar("_T")


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


# ---- which there are ---------------------------------------------------------------------------------------------


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run's folder, newest first; the folder itself if it is one."""
    own = [folder] if (folder / MANIFEST).is_file() or checkpoint_old.is_one(folder) else []
    found: dict[int, Path] = {}
    for path in sorted(folder.glob("step-*")) if folder.is_dir() else ():
        match = _STEP.fullmatch(path.name)  # FOLDER sorts before FOLDER.replaced, and comes first
        if match and (path / MANIFEST).is_file():
            found.setdefault(int(match[1]), path)
    return [found[step] for step in sorted(found, reverse=True)] + own


def has_checkpoint(folder: Path) -> bool:
    """Whether a save into this folder was ever completed."""
    return bool(checkpoints(folder))


def newest(folder: Path) -> Path:
    """The newest complete checkpoint of a run, or `folder` itself if it is one. Raises TrainingError for none."""
    found = checkpoints(folder)
    if not found:
        raise TrainingError(
            "there is no complete checkpoint",
            where=str(folder),
            hint="a folder that `autopar train --out` wrote, or one of its step-... folders",
        )
    return found[0]


def check_target(folder: Path) -> None:
    """Raise TrainingError if a run cannot save into this folder: before the run, not after its first hours."""
    if (folder / "model.safetensors").exists() and not has_checkpoint(folder):
        raise TrainingError(
            "the folder holds a model.safetensors that is not a training checkpoint",
            where=str(folder),
            hint="another folder: a run's checkpoints would lie between a model's files",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.R_OK | os.W_OK | os.X_OK)
    except OSError as error:
        raise _unwritable(folder, error.strerror) from error
    if not writable:
        raise _unwritable(folder, "no permission")


def _unwritable(folder: Path, reason: str | None) -> TrainingError:
    return TrainingError(
        f"checkpoints cannot be written there: {reason}", where=str(folder), hint="a folder you can write to"
    )


def read_about(folder: Path) -> dict[str, Any]:
    """training.json of a checkpoint, or of the newest of a run's folder, checked. Raises TrainingError."""
    chosen = newest(folder)
    try:
        about: Any = json.loads(checkpoint_old.current(chosen, TRAINING).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise unreadable(chosen, f"{TRAINING}: {error}") from error
    numbers = [about.get(key) for key in ("step", "format")] if isinstance(about, dict) else [None]
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise TrainingError(
            "training.json does not say its format and which step it is of",
            where=str(chosen),
            hint="a folder that `autopar train --out` wrote",
        )
    if about["format"] > FORMAT:
        raise TrainingError(
            f"the checkpoint has format {about['format']}, this autopar reads up to {FORMAT}",
            where=str(chosen),
            hint="a newer autopar",
        )
    return dict(about)


def read_checkpoint_index(folder: Path) -> tuple[Path, Index]:
    """Where the tensors of a checkpoint lie: the folder that `Reader` takes, and the index."""
    if checkpoint_old.is_one(folder):
        return folder, checkpoint_old.index_of(folder)
    return folder, read_index(folder)


# ---- saving ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Save:
    """A save that is about to be written: what `torch.distributed.checkpoint` takes."""

    folder: Path
    shares: Mapping[str, Share]
    planner: SavePlanner
    writer: Writer

    @property
    def state(self) -> dict[str, Any]:
        return {key: share.tensor for key, share in self.shares.items()}

    @property
    def bytes(self) -> int:
        """Of this rank's shares, before replicas are left to one of those that have them."""
        return sum(share.tensor.nbytes for share in self.shares.values())


def prepare_save(
    folder: Path,
    trainer: Trainer,
    *,
    about: Mapping[str, Any],
    files: Mapping[str, str] | None = None,
    extra: Extra | None = None,
    trained_only: bool = False,
) -> Save:
    """What `save_checkpoint` writes. All ranks must call it."""
    marks: dict[str, Any] = {"format": FORMAT, "step": trainer.step_count}
    if trained_only:
        marks[TRAINED_ONLY] = True
    text = json.dumps({**marks, **about}, indent=1)

    def make() -> Save:
        target = step_folder(folder, trainer.step_count)
        shares = held(trainer, extra, trained_only=trained_only)
        return Save(target, shares, SavePlanner(shares), Writer(target, {TRAINING: text, **(files or {})}))

    return together(make)


def save_checkpoint(
    folder: Path,
    trainer: Trainer,
    *,
    about: Mapping[str, Any],
    files: Mapping[str, str] | None = None,
    extra: Extra | None = None,
    trained_only: bool = False,
    group: ProcessGroup | None = None,
) -> Path:
    """Write `folder/step-N` and wait for it. `about` goes into training.json, `files` (name -> text) beside it.
    `trained_only`: without frozen parameters, which whoever loads it must have from elsewhere.

    Raises TrainingError on every rank where it cannot be written; what was there before is as it was.
    """
    with peer_errors(f"saving step {trainer.step_count}"):
        first_only(lambda: check_target(folder))
        save = prepare_save(folder, trainer, about=about, files=files, extra=extra, trained_only=trained_only)
        with _quiet_alone(), translated(save.folder):
            write(
                save.state,
                storage_writer=save.writer,
                planner=save.planner,
                process_group=group,
                no_dist=not several(),
            )
    return save.folder


# ---- loading -----------------------------------------------------------------------------------------------------


def load_checkpoint(
    folder: Path, trainer: Trainer, *, verify: bool = True, extra: Extra | None = None
) -> dict[str, Any]:
    """Put a saved run into `trainer`, whatever plan it was saved under. Returns training.json's content.

    `folder`: a checkpoint, or a run's folder, whose newest it takes. `verify`: read all files once to compare their
    checksums (each rank its part of them). All of the checkpoint is checked before anything of `trainer` changes.
    """
    with peer_errors(f"loading {folder}"):
        chosen = first_only(lambda: newest(folder))
        about = together(lambda: read_about(chosen), chosen)
        if verify:
            check_files(chosen)
        place, index = together(lambda: read_checkpoint_index(chosen), chosen)
        part = bool(about.get(TRAINED_ONLY, False))
        plan = together(lambda: wanted(trainer, index, extra, trained_only=part), chosen)
        _read(place, index, plan)
        for item in plan:
            item.put()
        trainer.reduction.publish()
        trainer.step_count = int(about["step"])
    return about


def _read(folder: Path, index: Index, plan: list[Wanted]) -> None:
    asked = [item.share for item in plan if item.share is not None]
    shares = {share.key: share for share in asked}
    with _quiet_alone(), translated(folder):
        load(
            {},
            storage_reader=Reader(folder, index),
            planner=SharesLoadPlanner(shares),
            no_dist=not several(),
        )
    for share in asked:  # two may want the same: pieces of a packed parameter their one step counter
        share.tensor.copy_(shares[share.key].tensor)


def check_files(folder: Path) -> None:
    """Raise TrainingError, on all ranks, if a file of the checkpoint is not as it was written."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if several() else (0, 1)

    def check() -> None:
        if not checkpoint_old.is_one(folder):
            found = damage(folder, read_manifest(folder), part=rank, parts=ranks)
            if found is not None:
                raise unreadable(folder, found)

    together(check, folder)


def newest_whole(folder: Path, say: Callable[[str], None], *, verify: bool = True) -> Path | None:
    """The newest checkpoint of a run whose files are as they were written; None if there is none at all. `verify`: by
    their checksums, else only what the JSON files say.

    One that is damaged is said and set aside as `step-N.damaged`. Raises TrainingError if all are.
    """
    found = first_only(lambda: checkpoints(folder))
    for path in found:
        try:
            together(lambda path=path: read_about(path), path)  # type: ignore[misc]
            if verify:
                check_files(path)
            together(lambda path=path: read_checkpoint_index(path), path)  # type: ignore[misc]
            return path
        except TrainingError as error:
            if path == found[-1]:
                raise
            say(f"passing over {path}: {error.what}")
            first_only(lambda path=path: _set_aside(path, folder))  # type: ignore[misc]
    return None


def _set_aside(path: Path, run: Path) -> None:
    if path != run:
        aside = path.with_name(path.name.removesuffix(REPLACED) + ".damaged")
        if not aside.exists():
            path.rename(aside)


# ---- all ranks alike ---------------------------------------------------------------------------------------------


def several() -> bool:
    """Whether there are other ranks to agree with."""
    return dist.is_initialized() and dist.get_world_size() > 1


def together(work: Callable[[], _T], folder: Path | None = None) -> _T:
    """What `work` gives on this rank. If it raises an AutoparError on any rank, all of them raise the first one."""
    result: _T | None = None
    error: AutoparError | None = None
    try:
        result = work()
    except AutoparError as raised:
        error = _placed(raised, folder)
    errors: list[AutoparError | None] = [error]
    if several():
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
    first = next((found for found in errors if found is not None), None)
    if first is not None:
        raise first
    return result  # type: ignore[return-value]


def first_only(work: Callable[[], _T]) -> _T:
    """What `work` gives on rank 0, on all ranks: they may see a shared folder at different times."""
    if not several():
        return work()
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = work()
        except AutoparError as error:
            found[1] = error
    dist.broadcast_object_list(found, src=0)
    if found[1] is not None:
        raise found[1]
    result: _T = found[0]
    return result


def _placed(error: AutoparError, folder: Path | None) -> AutoparError:
    """The error with a place."""
    if error.where is not None or folder is None:
        return error
    return type(error)(error.what, where=str(folder), hint=error.hint)


@contextmanager
def _quiet_alone() -> Iterator[None]:
    """torch warns where there is one process only; a filter is the whole process's, so not in simulated ranks."""
    if several():
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def translated(folder: Path) -> Iterator[None]:
    """Turns the CheckpointException of torch.distributed.checkpoint, which all ranks get, into the error of the first
    rank that failed."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        if isinstance(cause, AutoparError):
            raise _placed(cause, folder) from error
        if isinstance(cause, RuntimeError):  # of a collective: `peer_errors` tells it
            raise cause from error
        raise TrainingError(
            f"the checkpoint failed: {type(cause).__name__}: {cause}",
            where=f"{folder}, rank {rank}",
            hint="to report this, with the command and the model",
        ) from error
