"""`find_model`: from what a user writes to a model that can be built.

    find_model("llama-3.1-8b")                published: the name, an alias, the hub id, in any case
    find_model("checkpoints/my-llama")        a folder with config.json, or with one .gguf file
    find_model("model.Q4_1.gguf")             a GGUF file
    find_model("train.py:make_model")         a function that returns the module
    find_model(module), find_model(config)    an nn.Module, a Transformers config

Nothing is ever downloaded, and no code that comes with a checkpoint is run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autopar.errors import ModelError

from .catalogue import canonical_name, published, published_names, unknown_model
from .examples import example_for
from .gguf import gguf_config, load_gguf_weights
from .huggingface import build_from_config, config_for, load_from_folder, task_of
from .model_source import ModelSource
from .python_file import source_from_function, source_from_module

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["ModelSource", "find_model", "published_names"]

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def find_model(spec: str | torch.nn.Module | PretrainedConfig) -> ModelSource:
    """The model that a spec means (see the module's docstring); ModelError where it means none.

    A folder that holds a checkpoint comes before a published model of the same name.
    """
    if isinstance(spec, torch.nn.Module):
        return source_from_module(spec)
    if not isinstance(spec, str):
        if hasattr(spec, "model_type") and hasattr(spec, "to_dict"):
            return _source_from_config(spec)
        raise ModelError(
            f"a {type(spec).__name__} is not a model",
            hint="a name such as llama-3.1-8b, a checkpoint folder, an nn.Module or a Transformers config",
        )
    text = spec.strip()
    if not text:
        raise ModelError("the model's name is empty", hint="one of " + ", ".join(published_names()))
    path = Path(text).expanduser()
    if _exists(path) and path.is_dir() and (_has_config(path) or canonical_name(text) is None):
        return _source_from_folder(path)
    if path.suffix == ".gguf":
        return _source_from_gguf(path, path.stem)
    if path.suffix == ".py" or ".py:" in text:
        return source_from_function(text)
    if canonical_name(text) is not None:
        return _source_from_published(text)
    if _exists(path):
        raise ModelError(
            "this file is not a model",
            where=str(path),
            hint=f"its folder {path.parent}, a .gguf file, or file.py:function",
        )
    if text.startswith((".", "/", "~")) or text.endswith("/"):
        raise ModelError(
            "there is no such folder", where=text, hint="a folder with config.json and safetensors"
        )
    raise unknown_model(text)


def _source_from_published(name: str) -> ModelSource:
    facts = published(name)
    return _from_config(facts.name, facts.task, config_for(facts.model_type, facts.config))


def _source_from_config(config: Any) -> ModelSource:
    name = Path(str(getattr(config, "name_or_path", "") or config.model_type)).name
    return _from_config(name, task_of(config), config)


def _from_config(name: str, task: str, config: Any) -> ModelSource:
    return ModelSource(
        name=name,
        task=task,
        config=config,
        build=lambda: build_from_config(config, task, name),
        load=None,
        example_inputs=lambda batch, seq: example_for(config, task, batch, seq),
        path=None,
    )


def _source_from_folder(folder: Path) -> ModelSource:
    if not (folder / "config.json").is_file():
        files = sorted(folder.glob("*.gguf"))
        if len(files) == 1:
            return _source_from_gguf(files[0], folder.resolve().name)
        found = f"{len(files)} .gguf files" if files else "neither config.json nor a .gguf file"
        raise ModelError(
            f"the folder holds {found}; expected config.json, or one .gguf file",
            where=str(folder),
            hint=f"one of the files, such as {files[0]}" if files else "the folder that config.json is in",
        )
    config = _read_config(folder)
    task = task_of(config, str(folder))
    has_weights = any(any(folder.glob(pattern)) for pattern in WEIGHTS)
    return ModelSource(
        name=folder.resolve().name,
        task=task,
        config=config,
        build=lambda: build_from_config(config, task, str(folder)),
        load=(lambda: load_from_folder(folder, config, task)) if has_weights else None,
        example_inputs=lambda batch, seq: example_for(config, task, batch, seq),
        path=folder,
    )


def _source_from_gguf(file: Path, name: str) -> ModelSource:
    if not file.is_file():
        raise ModelError(
            "there is no such file", where=str(file), hint="the path of a .gguf file that exists"
        )
    config = gguf_config(file)
    task = task_of(config, str(file))
    return ModelSource(
        name=name,
        task=task,
        config=config,
        build=lambda: build_from_config(config, task, str(file)),
        load=lambda: load_gguf_weights(file, build_from_config(config, task, str(file))),
        example_inputs=lambda batch, seq: example_for(config, task, batch, seq),
        path=file,
    )


def _read_config(folder: Path) -> Any:
    """The config of a folder; what would make Transformers fail in an obscure way is looked at first."""
    from transformers import CONFIG_MAPPING, AutoConfig

    file = folder / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"not valid JSON: {error}", where=str(file), hint="downloading the file again"
        ) from error
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str):
        raise ModelError(
            f"model_type is {kind!r}; expected a model type that Transformers knows, such as 'llama'",
            where=str(file),
            hint="the config.json of a Transformers checkpoint",
        )
    if kind not in CONFIG_MAPPING:
        own = " and its own code, which autopar does not run" if "auto_map" in values else ""
        raise ModelError(
            f"the checkpoint has model_type {kind!r}, which this Transformers does not know{own}",
            where=str(file),
            hint="a newer Transformers, or file.py:function, a function that returns the module",
        )
    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(
            f"Transformers cannot read this config: {type(error).__name__}: {error}",
            where=str(file),
            hint="the config.json as its authors publish it",
        ) from error


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long for a path
        return False


def _has_config(folder: Path) -> bool:
    return (folder / "config.json").is_file() or any(folder.glob("*.gguf"))
