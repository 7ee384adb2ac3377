"""Adapters: a LoRA run's checkpoint as a PEFT folder, and a PEFT folder merged into its base.

In:  a checkpoint that holds only what was trained, or a folder of PEFT.
Out: `adapter_model.safetensors` and `adapter_config.json`, which PEFT loads; or a model folder that Transformers loads,
     its weights W + alpha / r * B A.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from autopar.errors import AutoparError, ModelError, UsageError
from autopar.export import SHARD_BYTES, export_checkpoint, tokenizer_files, whole_tensor
from autopar.models.lora import ADAPTER, Lora, inject, peft_module, used_config, with_lora
from autopar.models.model_source import ModelSource
from autopar.models.source import find_model
from autopar.runtime.checkpoint import check_files, first_only, has_checkpoint, newest, read_about
from autopar.runtime.checkpoint import read_checkpoint_index as read_index

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # PEFT's name of the model inside its own
_TASKS = {"causal-lm": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM", "classification": "SEQ_CLS"}
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 20


# ---- the base ----------------------------------------------------------------------------------------------------


def note_of(source: ModelSource, lora: Lora) -> dict[str, Any]:
    """What training.json of a LoRA run says about adapters and base: a checkpoint is of no use with another base."""
    return {"lora": str(lora), "lora_seed": lora.seed, "base": base_digest(source, lora.seed)}


def base_digest(source: ModelSource, seed: int) -> str:
    """The same for bases with the same weights: of each file its name, its size and 16 MiB spread over it; for a model
    that begins with random weights, its name and the seed."""
    path = source.path
    files = [] if path is None or source.load is None else [path] if path.is_file() else weight_files(path)
    digest = hashlib.sha256()
    if not files:
        digest.update(f"{source.name} {seed}".encode())
    for file in files:
        try:
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            with file.open("rb") as opened:
                for number in range(_SAMPLES):
                    opened.seek(max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
                    digest.update(opened.read(_SAMPLE_BYTES))
        except OSError as error:
            raise ModelError(
                f"the weights cannot be read: {error.strerror}", where=str(file), hint="the whole folder anew"
            ) from error
    return digest.hexdigest()[:16]


def weight_files(folder: Path) -> list[Path]:
    """The files of a model folder that hold weights."""
    return sorted(path for kind in ("*.safetensors", "*.gguf", "*.bin") for path in folder.glob(kind))


def check_base(about: Mapping[str, Any], now: Mapping[str, Any], where: Path) -> None:
    """Raise ModelError if a checkpoint's adapters, or the base they were trained on, are not those of now."""
    for key, what in (("base", "base model's weights are"), ("lora", "adapters are")):
        if about.get(key) != now.get(key):
            raise ModelError(
                f"the checkpoint's {what} other ones than this run's: {about.get(key)}, {now.get(key)}",
                where=str(where),
                hint="the same MODEL and --lora as when the run began, or another --out",
            )


# ---- checkpoint to PEFT's folder ---------------------------------------------------------------------------------


def export_adapter(
    checkpoint: Path, target: Path, base: ModelSource, lora: Lora, *, replace: bool = False
) -> None:
    """Write a checkpoint's adapters as a folder of PEFT. One rank does it. `replace`: an adapter that is there.

    Raises UsageError for a target that is there or cannot be written, ModelError for adapters of another model.
    """
    if target.exists() and not (replace and (target / CONFIG).is_file()):
        raise UsageError(
            "there is something already", where=str(target), hint="a folder that does not exist yet"
        )
    with torch.device("meta"):
        module = with_lora(base, lora).build()
    tensors = _adapters(checkpoint, module)
    config = used_config(module)
    config.base_model_name_or_path = base.name if base.path is None else str(base.path.absolute())
    config.task_type = _TASKS.get(base.task)
    config.inference_mode = True
    partial = target.with_name(target.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        config.save_pretrained(str(partial))
        for file in tokenizer_files(base.path):
            shutil.copyfile(file, partial / file.name)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"the adapter cannot be written: {error}", where=str(target), hint="a folder with space"
        ) from error


def _adapters(checkpoint: Path, module: nn.Module) -> dict[str, Tensor]:
    """PEFT's names -> whole tensors."""
    place, index = read_index(checkpoint)
    found: dict[str, Tensor] = {}
    with ExitStack() as stack:
        opened: dict[str, Any] = {}
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            stored = index.get(f"model/{name}")
            if stored is None or stored.shape != tuple(parameter.shape):
                raise ModelError(
                    f"the checkpoint has {'no' if stored is None else 'another shape of'} {name}",
                    where=str(checkpoint),
                    hint="--model with the base that the adapters were trained on",
                )
            found[_PREFIX + name.replace(f".{ADAPTER}", "")] = whole_tensor(place, stored, opened, stack)
    return found


# ---- merging -----------------------------------------------------------------------------------------------------


def merge(
    base: str | ModelSource,
    adapter: Path,
    target: Path,
    *,
    dtype: str | None = None,
    files: Iterable[Path] = (),
    seed: int = 0,
) -> None:
    """Write base and adapter as one model folder. `adapter`: a folder of PEFT; `dtype`: of the weights (float32 if
    None); `files`: to be copied, such as the tokenizer's; `seed`: of a base without weights.

    Raises UsageError for folders that cannot be read or written, ModelError where adapter and base do not fit.
    """
    source = base if isinstance(base, ModelSource) else find_model(base)
    if not hasattr(source.config, "to_dict"):
        raise ModelError(
            f"{source.name} is not a Transformers model: there is no folder format for it",
            hint="the adapter's folder as it is, with peft.PeftModel.from_pretrained",
        )
    if target.exists():
        raise UsageError(
            "there is something already", where=str(target), hint="a folder that does not exist yet"
        )
    torch.manual_seed(seed)
    module = source.load() if source.load is not None else source.build()
    merged = _merged(module, adapter)
    partial = target.with_name(target.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        merged.to(getattr(torch, dtype or "float32")).save_pretrained(
            str(partial), max_shard_size=SHARD_BYTES
        )
        values: Any = source.config.to_dict()
        values["dtype"] = dtype or "float32"
        (partial / "config.json").write_text(json.dumps(values, indent=2, default=str), encoding="utf-8")
        for file in (*tokenizer_files(source.path), *files):
            shutil.copyfile(file, partial / file.name)
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"the model cannot be written: {error}", where=str(target), hint="a folder with space"
        ) from error


def _merged(module: nn.Module, adapter: Path) -> Any:
    peft = peft_module()
    try:
        kind = json.loads((adapter / CONFIG).read_text(encoding="utf-8")).get("peft_type")
        tensors = load_file(adapter / WEIGHTS)
    except (OSError, ValueError, AttributeError, SafetensorError) as error:
        raise UsageError(
            f"the adapter cannot be read: {error}",
            where=str(adapter),
            hint=f"a folder of PEFT, with {CONFIG} and {WEIGHTS}",
        ) from error
    if kind != "LORA":
        raise ModelError(f"the adapter is {kind}, not LoRA", where=str(adapter), hint="an adapter of LoRA")
    try:
        model = peft.PeftModel.from_pretrained(module, str(adapter), is_trainable=False)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise _foreign(adapter, " ".join(str(error).split())[:300]) from error
    has = set(peft.get_peft_model_state_dict(model))
    differing = sorted(has ^ set(tensors))
    if differing:
        lacking = "adapter lacks" if differing[0] in has else "model has no place for"
        raise _foreign(adapter, f"the {lacking} {differing[0]}")
    return model.merge_and_unload()


def _foreign(adapter: Path, why: str) -> ModelError:
    return ModelError(
        f"the adapter does not fit the base: {why}",
        where=str(adapter),
        hint="--model with the base that it was trained on",
    )


# ---- autopar export ----------------------------------------------------------------------------------------------


def export(
    folder: Path,
    target: Path,
    *,
    form: str = "hf",
    model: str | None = None,
    verify: bool = True,
    dtype: str | None = None,
) -> Path:
    """What `autopar export` writes of a checkpoint, a run's folder, or an adapter's. `form`: "hf", a model folder (with
    adapters merged), or "peft", the adapter's folder. Returns what was exported."""
    if (folder / CONFIG).is_file() and not has_checkpoint(folder):
        if form == "peft":
            raise UsageError("the folder is one of PEFT already", where=str(folder), hint="--format hf")
        merge(_base_of(model, json.loads((folder / CONFIG).read_text()), folder), folder, target, dtype=dtype)
        return folder
    chosen = newest(folder)
    about = read_about(chosen)
    if "lora" not in about:
        if form == "peft":
            raise UsageError("the checkpoint is not of a LoRA run", where=str(chosen), hint="--format hf")
        return export_checkpoint(folder, target, model=model, verify=verify, dtype=dtype)
    if verify:
        check_files(chosen)
    lora = Lora.parse(str(about["lora"]), seed=int(about.get("lora_seed", 0)))
    base = _base_of(model, {"base_model_name_or_path": about.get("base_source")}, chosen)
    check_base(about, note_of(base, lora), chosen)
    if form == "peft":
        export_adapter(chosen, target, base, lora)
        return chosen
    with tempfile.TemporaryDirectory(prefix="autopar-") as place:
        export_adapter(chosen, Path(place) / "adapter", base, lora)
        path = about.get("source")
        merge(
            base,
            Path(place) / "adapter",
            target,
            dtype=dtype,
            files=tokenizer_files(Path(path)) if isinstance(path, str) else (),
            seed=lora.seed,
        )
    return chosen


def _base_of(model: str | None, config: Mapping[str, Any], where: Path) -> ModelSource:
    named = model or config.get("base_model_name_or_path")
    try:
        return find_model(str(named or ""))
    except AutoparError as error:
        raise ModelError(
            f"the base model is not found: {error.what}", where=str(where), hint="--model with the base"
        ) from error


def export_at_end(
    checkpoint: Path, target: Path, base: ModelSource, lora: Lora, *, replace: bool = True
) -> bool:
    """What a run writes at its end, on all ranks alike; whether it did. Not `replace`: only if it is not there."""
    if first_only(target.exists) and not replace:
        return False
    first_only(lambda: export_adapter(checkpoint, target, base, lora, replace=True))
    return True


__all__ = [
    "base_digest",
    "check_base",
    "export",
    "export_adapter",
    "export_at_end",
    "inject",
    "merge",
    "note_of",
    "weight_files",
]
