"""From a checkpoint to a folder that Transformers loads: whole tensors under the model's own names.

In:  a checkpoint (in pieces, of any mesh), the model it is of. Out: `config.json`, `model.safetensors` or shards with an
index, and the tokenizer's files. One shard at a time is in memory; several ranks write different shards.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from autopar.errors import AutoparError, ModelError, UsageError
from autopar.models.model_source import ModelSource
from autopar.models.source import find_model
from autopar.runtime.checkpoint import (
    check_files,
    first_only,
    newest,
    read_about,
    read_checkpoint_index,
    several,
    together,
)
from autopar.runtime.checkpoint_storage import Index, StoredTensor, flush

CONFIG = "model_config.json"  # in a checkpoint: the model's config, not to be taken for a model's folder
SHARD_BYTES = 5 * 10**9
# What a tokenizer and a processor consist of, beside the weights of a Transformers folder.
_COMPANIONS = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.tiktoken", "spiece.model",
    "sentencepiece*", "chat_template*", "generation_config.json", "*processor_config.json",
)  # fmt: skip


def tokenizer_files(folder: Path | None) -> list[Path]:
    """The tokenizer's and processor's files of a model folder; nothing where there is none."""
    if folder is None or not folder.is_dir():
        return []
    return sorted({path for pattern in _COMPANIONS for path in folder.glob(pattern) if path.is_file()})


def export_checkpoint(
    checkpoint: Path, target: Path, *, model: str | None = None, verify: bool = True, dtype: str | None = None
) -> Path:
    """Export the newest checkpoint of a run, or the one given. `model`: what it is of, where the checkpoint itself does
    not say (a config.json is in those of Transformers models). Returns which checkpoint it was."""
    chosen = newest(checkpoint)
    about = read_about(chosen)
    if verify:
        check_files(chosen)
    source = find_model(model) if model is not None else _source_of(chosen)
    path = about.get("source")
    files = tokenizer_files(Path(path) if isinstance(path, str) else None) or tokenizer_files(source.path)
    export_model(chosen, target, source, files=files, dtype=dtype, seed=int(about.get("seed", 0)))
    return chosen


def _source_of(checkpoint: Path) -> ModelSource:
    file = checkpoint / CONFIG
    if not file.is_file():
        raise ModelError(
            f"the checkpoint does not hold a Transformers config ({CONFIG})",
            where=str(checkpoint),
            hint="--model with the name or folder of the model it is of",
        )
    from transformers import AutoConfig

    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return find_model(AutoConfig.for_model(values.pop("model_type"), **values))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"the checkpoint's {CONFIG} cannot be read: {error}", where=str(checkpoint), hint="--model"
        ) from error


def export_model(
    checkpoint: Path,
    target: Path,
    source: ModelSource,
    *,
    files: Iterable[Path] = (),
    dtype: str | None = None,
    replace: bool = False,
    shard_bytes: int = SHARD_BYTES,
    seed: int = 0,
) -> None:
    """Write the model folder of a complete checkpoint. All ranks must call it. `dtype`: of the floating-point tensors
    (as trained if None). `replace`: a folder of an earlier export.

    Raises UsageError for a target that is there, ModelError for a model that is not Transformers', TrainingError for a
    checkpoint that cannot be read.
    """
    if source.config is None or not hasattr(source.config, "to_dict"):
        raise ModelError(
            f"{source.name} is not a Transformers model: there is no folder format for it",
            where=str(checkpoint),
            hint="the checkpoint itself: its parts are safetensors, its index.json says where a tensor lies",
        )
    partial = target.with_name(target.name + ".partial")
    first_only(lambda: _make(target, partial, replace))
    place, index = together(lambda: read_checkpoint_index(checkpoint), checkpoint)
    # one rank builds the model: what Transformers switches meanwhile belongs to the process
    names = first_only(lambda: _names(source, index))
    wanted = getattr(torch, dtype) if dtype is not None else None
    lacking = [name for name, alias in names.items() if alias is None]
    rest = _initial(source, lacking, seed) if lacking else {}
    sizes = {name: _bytes(index, alias, rest.get(name), wanted) for name, alias in names.items()}
    split = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda size: size,
        get_storage_id=lambda size: None,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if several() else (0, 1)

    def write() -> None:
        for file in sorted(split.filename_to_tensors)[rank::ranks]:
            _write_shard(partial / file, split.filename_to_tensors[file], place, index, names, rest, wanted)

    together(lambda: _on_disk(write, target))
    weight_map = (
        {"metadata": split.metadata, "weight_map": split.tensor_to_filename} if split.is_sharded else None
    )
    first_only(lambda: _on_disk(lambda: _complete(partial, target, source, files, weight_map, dtype), target))


def _make(target: Path, partial: Path, replace: bool) -> None:
    if target.exists() and not (replace and (target / "config.json").is_file()):
        raise UsageError(
            "there is something already", where=str(target), hint="a folder that does not exist yet"
        )

    def make() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    _on_disk(make, target)


def _names(source: ModelSource, index: Index) -> dict[str, str | None]:
    """The tensors of a model's folder -> their names in the checkpoint; None where the forward does not read them, and
    they are as the run began. Of tied ones the first name, as Transformers writes it."""
    with torch.device("meta"):
        module = source.build()
    aliases: dict[int, list[str]] = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        aliases.setdefault(id(tensor), []).append(name)
    saved = module.state_dict(keep_vars=True)
    found: dict[str, str | None] = {}
    for names in aliases.values():
        own = next((name for name in names if name in saved), None)
        if own is None:
            continue  # a buffer that is computed, not stored
        stored = next((f"model/{name}" for name in names if f"model/{name}" in index), None)
        if stored is not None and index[stored].shape != tuple(saved[own].shape):
            raise ModelError(
                f"{own} has shape {list(index[stored].shape)} in the checkpoint, {list(saved[own].shape)} in the model",
                hint="--model with the model that the checkpoint is of",
            )
        found[own] = stored
    known = {f"model/{name}" for names in aliases.values() for name in names}
    foreign = [name for name in index if name.startswith("model/") and name not in known]
    if foreign:
        raise ModelError(
            f"{source.name} has no {foreign[0].removeprefix('model/')}, which the checkpoint has",
            hint="--model with the model that the checkpoint is of",
        )
    return found


def _initial(source: ModelSource, names: Iterable[str], seed: int) -> Mapping[str, Tensor]:
    """What training never reads: as it was when the run began."""
    torch.manual_seed(seed)
    module: nn.Module = source.load() if source.load is not None else source.build()
    state = module.state_dict()
    return {name: state[name] for name in names}


def _bytes(index: Index, alias: str | None, value: Tensor | None, wanted: torch.dtype | None) -> int:
    dtype = index[alias].dtype if alias is not None else value.dtype  # type: ignore[union-attr]
    shape = index[alias].shape if alias is not None else value.shape  # type: ignore[union-attr]
    if wanted is not None and dtype.is_floating_point:
        dtype = wanted
    return torch.Size(shape).numel() * dtype.itemsize


def _write_shard(
    file: Path,
    names: Iterable[str],
    place: Path,
    index: Index,
    aliases: Mapping[str, str | None],
    rest: Mapping[str, Tensor],
    wanted: torch.dtype | None,
) -> None:
    tensors = {}
    with ExitStack() as stack:
        opened: dict[str, Any] = {}
        for name in names:
            alias = aliases[name]
            tensor = rest[name] if alias is None else whole_tensor(place, index[alias], opened, stack)
            if wanted is not None and tensor.is_floating_point():
                tensor = tensor.to(wanted)
            tensors[name] = tensor.contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    flush(file)


def whole_tensor(place: Path, stored: StoredTensor, opened: dict[str, Any], stack: ExitStack) -> Tensor:
    """A tensor of a checkpoint, put together of its pieces; `opened`: files that `stack` will close."""
    whole = torch.empty(stored.shape, dtype=stored.dtype)
    for piece in stored.pieces:
        if piece.file not in opened:
            opened[piece.file] = stack.enter_context(safe_open(place / piece.file, "pt"))
        part = whole
        for dim, (start, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
            part = part.narrow(dim, start, size)
        part.copy_(opened[piece.file].get_tensor(piece.key))
    return whole


def _complete(
    partial: Path,
    target: Path,
    source: ModelSource,
    files: Iterable[Path],
    weight_map: Mapping[str, Any] | None,
    dtype: str | None,
) -> None:
    config: Any = source.config
    values = config.to_dict()
    if dtype is not None:
        values["dtype"] = dtype
    (partial / "config.json").write_text(json.dumps(values, indent=2, default=str), encoding="utf-8")
    if weight_map is not None:
        (partial / "model.safetensors.index.json").write_text(json.dumps(weight_map, indent=2))
    for file in files:
        shutil.copyfile(file, partial / file.name)
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)
    flush(target.parent)


def _on_disk(work: Any, target: Path) -> None:
    try:
        work()
    except AutoparError:
        raise
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"the model cannot be written: {error}", where=str(target), hint="a folder with space"
        ) from error
