"""Checkpoints of format 1, which earlier versions wrote: whole tensors in a run's folder itself. They are read only.

`model.safetensors` has parameters and buffers under the model's names, `optimizer.safetensors` `NAME|FIELD` (of a packed
parameter `PIECE|FIELD` for tensors of another shape). A save that was killed left files as `NAME.new`; they count once
`training.json.new` is there.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from autopar.runtime.checkpoint_storage import Index, Piece, StoredTensor, unreadable

MODEL, OPTIMIZER, TRAINING = "model.safetensors", "optimizer.safetensors", "training.json"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "C64": torch.complex64,
}  # fmt: skip


def current(folder: Path, name: str) -> Path:
    """Where the last complete save has this file."""
    new = folder / f"{name}.new"
    return new if (folder / f"{TRAINING}.new").is_file() and new.is_file() else folder / name


def is_one(folder: Path) -> bool:
    return current(folder, TRAINING).is_file() and current(folder, OPTIMIZER).is_file()


def index_of(folder: Path) -> Index:
    """Its tensors, named as today. Raises TrainingError for a file that cannot be read."""
    try:
        model = _tensors(current(folder, MODEL))
        moments = _tensors(current(folder, OPTIMIZER))
    except (SafetensorError, OSError, KeyError) as error:
        raise unreadable(folder, f"{error}") from error
    found = {f"model/{name}": stored for name, stored in model.items()}
    for key, stored in moments.items():
        name, bar, field = key.rpartition("|")
        if not bar:
            raise unreadable(folder, f"{OPTIMIZER} has a tensor {key}, which is not the optimizer's")
        shaped = name in model and stored.shape == model[name].shape
        found[f"optimizer{'' if shaped else '.whole'}/{name}/{field}"] = stored
    return found


def _tensors(file: Path) -> dict[str, StoredTensor]:
    found = {}
    with safe_open(file, "pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
            about = tensors.get_slice(key)
            shape = tuple(about.get_shape())
            piece = Piece(file.name, key, (0,) * len(shape), shape)
            found[key] = StoredTensor(_DTYPES[about.get_dtype()], shape, (piece,))
    return found
