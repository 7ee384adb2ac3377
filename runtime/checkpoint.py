"""Checkpoints of a run: whole tensors, so that a run goes on under any plan and mesh.

A folder holds `model.safetensors` (parameters under the model's own names), `optimizer.safetensors` and
`training.json`; other files in it are left alone. safetensors holds no code.

A crash at any moment of a save leaves the last checkpoint or the new one, whole. The new files are written beside the
old ones as `NAME.new`, `training.json.new` last: its rename into being is what makes the save count. Only then are the
old ones replaced, one by one, `training.json` last. Who finds a `training.json.new` therefore reads every file that
still has a `.new` from there, and the next save first finishes the replacing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from autopar.errors import TrainingError
from autopar.runtime.groups import peer_errors
from autopar.runtime.store import Entry
from autopar.runtime.trainer import Trainer

FORMAT = 1
MODEL, OPTIMIZER, TRAINING = "model.safetensors", "optimizer.safetensors", "training.json"


def has_checkpoint(folder: Path) -> bool:
    """Whether a save into this folder was ever completed."""
    return _current(folder, TRAINING).is_file()


def check_target(folder: Path) -> None:
    """Raise TrainingError if a run cannot save into this folder: before the run, not after its first hours."""
    if (folder / MODEL).exists() and not has_checkpoint(folder):
        raise TrainingError(
            f"the folder holds a {MODEL} that is not a training checkpoint, and a save would replace it",
            where=str(folder),
            hint="another folder",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError as error:
        raise _unwritable(folder, error.strerror) from error
    if not writable:
        raise _unwritable(folder, "no permission")


def save_checkpoint(folder: Path, trainer: Trainer, *, about: Mapping[str, Any]) -> None:
    """Write the state of a run. Every rank must call it; rank 0 writes. `about` goes into training.json."""
    store = trainer.model.store
    first = store.groups.rank == 0
    parameters: dict[str, Tensor] = {}
    optimizer: dict[str, Tensor] = {}
    if first:
        check_target(folder)
    with peer_errors(f"saving step {trainer.step_count}"):
        for name in store.parts:
            whole = store.whole_parameter(name, lambda entry: entry.parameter.detach())
            if first:
                parameters[name] = whole.cpu().contiguous().clone()
            for key, full in _moments(trainer, name):
                if first:
                    optimizer[key] = full.cpu().contiguous().clone()
        for name in store.buffers:
            whole = store.whole_buffer(name)
            if first:
                parameters[name] = whole.cpu().contiguous().clone()
        if first:
            _write(folder, parameters, optimizer, {"format": FORMAT, "step": trainer.step_count, **about})
        if dist.is_initialized():
            dist.barrier()


def _moments(trainer: Trainer, name: str) -> Iterator[tuple[str, Tensor]]:
    """The optimizer's tensors for a parameter, whole, as `NAME|FIELD`. Of a packed parameter a tensor of another shape
    than its pieces' is saved for each piece (`NAME[0:64]|FIELD`), but for a number that is the same for all."""
    store = trainer.model.store
    entries = {part: store.entries[part] for part in store.parts[name]}
    states = {part: trainer.optimizer.state.get(entry.parameter, {}) for part, entry in entries.items()}
    for key in dict.fromkeys(key for state in states.values() for key in state):
        values = {part: state[key] for part, state in states.items() if isinstance(state.get(key), Tensor)}
        if not values:
            continue
        first = next(iter(values.values()))
        if all(
            value.dim() and value.shape == entries[part].parameter.shape for part, value in values.items()
        ):
            yield f"{name}|{key}", store.whole_parameter(name, partial(_share_of, values))
        elif len(entries) == 1 or (
            len(values) == len(entries)
            and all(not value.dim() and bool(value == first) for value in values.values())
        ):
            yield f"{name}|{key}", first
        else:
            yield from ((f"{part}|{key}", value) for part, value in values.items())


def _share_of(values: Mapping[str, Tensor], entry: Entry) -> Tensor:
    return values[entry.name] if entry.name in values else torch.zeros_like(entry.parameter)


def _write(
    folder: Path, parameters: dict[str, Tensor], optimizer: dict[str, Tensor], about: dict[str, Any]
) -> None:
    try:
        _finish(folder)
        save_file(parameters, _new(folder, MODEL), metadata={"format": "pt"})
        save_file(optimizer, _new(folder, OPTIMIZER))
        part = folder / f"{TRAINING}.part"
        part.write_text(json.dumps(about, indent=1))
        for file in (_new(folder, MODEL), _new(folder, OPTIMIZER), part):
            with file.open("rb+") as written:
                os.fsync(written.fileno())
        part.replace(_new(folder, TRAINING))  # from here on the new checkpoint is the one that is read
        _finish(folder)
    except (SafetensorError, OSError) as error:  # a full disk
        raise TrainingError(
            f"the checkpoint cannot be written: {error}",
            where=str(folder),
            hint="a folder with space; the last checkpoint is as it was",
        ) from error


def _new(folder: Path, name: str) -> Path:
    return folder / f"{name}.new"


def _current(folder: Path, name: str) -> Path:
    """Where the last complete save has this file."""
    complete = _new(folder, TRAINING).is_file()
    return _new(folder, name) if complete and _new(folder, name).is_file() else folder / name


def _finish(folder: Path) -> None:
    """Replace the old files by those of a save that is complete; remove what one that is not left."""
    complete = _new(folder, TRAINING).is_file()
    for name in (MODEL, OPTIMIZER, TRAINING):
        if not complete:
            _new(folder, name).unlink(missing_ok=True)
        elif _new(folder, name).is_file():
            _new(folder, name).replace(folder / name)


def _unwritable(folder: Path, reason: str | None) -> TrainingError:
    return TrainingError(
        f"checkpoints cannot be written there: {reason}", where=str(folder), hint="a folder you can write to"
    )


def load_checkpoint(folder: Path, trainer: Trainer) -> dict[str, Any]:
    """Put a saved run into `trainer`, whatever plan it was saved under. Returns training.json's content.

    Every rank must call it. All of the checkpoint is checked before anything of `trainer` changes.
    """
    about = read_about(folder)
    store = trainer.model.store
    expected = {name: store.entries[parts[0]].layout.info.source_shape for name, parts in store.parts.items()}
    expected.update((name, store.layouts[name].info.shape) for name in store.buffers)
    try:
        with (
            safe_open(_current(folder, MODEL), "pt") as weights,
            safe_open(_current(folder, OPTIMIZER), "pt") as moments,
        ):
            _check_shapes(weights, expected, folder)
            # safe_open is no mapping
            fields = {key: key.rpartition("|")[0] for key in moments.keys()}  # noqa: SIM118
            unknown = next(
                (
                    key
                    for key, name in fields.items()
                    if name not in store.parts and name not in store.entries
                ),
                None,
            )
            if unknown is not None:
                raise TrainingError(
                    f"the checkpoint has {unknown.replace('|', ' of the optimizer, field ')}, a parameter the model "
                    "does not have",
                    where=str(folder / OPTIMIZER),
                    hint="a checkpoint of this model",
                )
            with torch.no_grad():
                for name, parts in store.parts.items():
                    whole = weights.get_tensor(name)
                    for part in parts:
                        entry = store.entries[part]
                        entry.parameter.copy_(store.share(part, entry.layout.info.take(whole)))
                for name in store.buffers:
                    store.set_buffer(name, weights.get_tensor(name))
            for key, name in fields.items():
                value = moments.get_tensor(key)
                for part in store.parts.get(name, (name,)):
                    entry = store.entries[part]
                    info = entry.layout.info
                    local = value.clone()
                    if value.dim() and value.shape == torch.Size(info.source_shape):
                        local = store.share(part, info.take(value)).contiguous().clone()
                    trainer.optimizer.state[entry.parameter][key.rpartition("|")[2]] = local
    except (SafetensorError, OSError) as error:
        raise TrainingError(
            f"the checkpoint cannot be read: {error}", where=str(folder), hint="an earlier checkpoint"
        ) from error
    trainer.step_count = int(about["step"])
    if dist.is_initialized():  # no rank may replace the files while another one still reads them
        with peer_errors(f"loading {folder}"):
            dist.barrier()
    return about


def _check_shapes(weights: Any, expected: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    held = set(weights.keys())
    missing = [name for name in expected if name not in held]
    if missing:
        raise TrainingError(
            f"the checkpoint has no tensor {missing[0]} ({len(missing)} are missing)",
            where=str(folder / MODEL),
            hint="a checkpoint of this model",
        )
    for name, shape in expected.items():
        found = weights.get_slice(name).get_shape()
        if tuple(found) != tuple(shape):
            raise TrainingError(
                f"{name} has shape {list(found)} in the checkpoint, {list(shape)} in the model",
                where=str(folder / MODEL),
                hint="a checkpoint of this model",
            )


def read_about(folder: Path) -> dict[str, Any]:
    """training.json of a checkpoint, checked."""
    try:
        about: Any = json.loads(_current(folder, TRAINING).read_text())
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"there is no complete checkpoint: {error}",
            where=str(folder),
            hint="a folder that `autopar train --out` wrote",
        ) from error
    numbers = [about.get(key) for key in ("step", "format")] if isinstance(about, dict) else [None]
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise TrainingError(
            "training.json does not say its format and which step it is of",
            where=str(folder),
            hint="a folder that `autopar train --out` wrote",
        )
    if about["format"] > FORMAT:
        raise TrainingError(
            f"the checkpoint has format {about['format']}, this autopar reads up to {FORMAT}",
            where=str(folder),
            hint="a newer autopar",
        )
    return dict(about)
