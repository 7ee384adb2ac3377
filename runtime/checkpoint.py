"""Checkpoints of a run: whole tensors, so that a run goes on under any plan and mesh.

A folder holds `model.safetensors` (parameters under the model's own names), `optimizer.safetensors` and
`training.json`. It is written under another name and renamed when it is complete: a crash while saving leaves the
last one as it was. safetensors holds no code.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from autopar.errors import TrainingError
from autopar.runtime.trainer import Trainer

FORMAT = 1


def save_checkpoint(folder: Path, trainer: Trainer, *, about: Mapping[str, Any]) -> None:
    """Write the state of a run. Every rank must call it; rank 0 writes. `about` goes into training.json."""
    store = trainer.model.store
    first = store.groups.rank == 0
    parameters: dict[str, Tensor] = {}
    optimizer: dict[str, Tensor] = {}
    for name, entry in store.entries.items():
        whole = store.whole(name, entry.parameter.detach())
        if first:
            parameters[name] = whole.cpu().contiguous().clone()
        for key, value in trainer.optimizer.state.get(entry.parameter, {}).items():
            if not isinstance(value, Tensor):
                continue
            full = store.whole(name, value) if value.shape == entry.parameter.shape and value.dim() else value
            if first:
                optimizer[f"{name}|{key}"] = full.cpu().contiguous().clone()
    for name, buffer in store.buffers.items():
        if first:
            parameters[name] = buffer.cpu().contiguous().clone()
    if first:
        _write(folder, parameters, optimizer, {"format": FORMAT, "step": trainer.step_count, **about})
    if dist.is_initialized():
        dist.barrier()


def _write(
    folder: Path, parameters: dict[str, Tensor], optimizer: dict[str, Tensor], about: dict[str, Any]
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir()
    save_file(parameters, fresh / "model.safetensors", metadata={"format": "pt"})
    save_file(optimizer, fresh / "optimizer.safetensors")
    (fresh / "training.json").write_text(json.dumps(about, indent=1))
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(folder: Path, trainer: Trainer) -> dict[str, Any]:
    """Put a saved run into `trainer`, whatever plan it was saved under. Returns training.json's content."""
    about = read_about(folder)
    store = trainer.model.store
    try:
        with (
            safe_open(folder / "model.safetensors", "pt") as weights,
            safe_open(folder / "optimizer.safetensors", "pt") as moments,
        ):
            held = set(weights.keys())
            missing = [name for name in (*store.entries, *store.buffers) if name not in held]
            if missing:
                raise TrainingError(
                    f"the checkpoint has no tensor {missing[0]} ({len(missing)} are missing)",
                    where=str(folder),
                    hint="a checkpoint of this model",
                )
            with torch.no_grad():
                for name, entry in store.entries.items():
                    entry.parameter.copy_(_share(store, name, weights.get_tensor(name), folder))
                for name, buffer in store.buffers.items():
                    buffer.copy_(weights.get_tensor(name))
            for key in moments.keys():  # noqa: SIM118 - safe_open is no mapping
                name, _, field = key.rpartition("|")
                entry = store.entries[name]
                value = moments.get_tensor(key)
                local = value
                if value.shape == torch.Size(entry.layout.info.shape) and value.dim():
                    local = store.share(name, value).contiguous().clone()
                trainer.optimizer.state[entry.parameter][field] = local
    except (SafetensorError, OSError) as error:
        raise TrainingError(
            f"the checkpoint cannot be read: {error}", where=str(folder), hint="an earlier checkpoint"
        ) from error
    trainer.step_count = int(about["step"])
    return about


def _share(store: Any, name: str, whole: Tensor, folder: Path) -> Tensor:
    expected = store.entries[name].layout.info.shape
    if tuple(whole.shape) != expected:
        raise TrainingError(
            f"{name} has shape {list(whole.shape)}, the model's is {list(expected)}", where=str(folder)
        )
    share: Tensor = store.share(name, whole)
    return share


def read_about(folder: Path) -> dict[str, Any]:
    """training.json of a checkpoint, checked."""
    try:
        about = json.loads((folder / "training.json").read_text())
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"there is no complete checkpoint: {error}",
            where=str(folder),
            hint="a folder that `autopar train --out` wrote",
        ) from error
    if not isinstance(about, dict) or not isinstance(about.get("step"), int):
        raise TrainingError("training.json does not say which step it is of", where=str(folder))
    if about.get("format", 0) > FORMAT:
        raise TrainingError(
            f"the checkpoint has format {about['format']}, this autopar reads up to {FORMAT}",
            where=str(folder),
        )
    return about
