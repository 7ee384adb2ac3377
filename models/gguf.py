"""A GGUF file (the format of llama.cpp) as a Transformers config, model or tokenizer.

In: the path of one `.gguf` file, whose weights may be quantized. Out: an ordinary float32 model; the blocks
of quantized weights are expanded, exactly as their format defines them. Nothing else is read and nothing is
downloaded. Needs the `gguf` package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from autopar.errors import ModelError


def gguf_config(file: Path) -> Any:
    """The Transformers config written in the file's header."""
    _need_gguf()
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
    except Exception as error:
        raise ModelError(
            f"this GGUF file cannot be read: {type(error).__name__}: {error}",
            where=str(file),
            hint="a whole download, of an architecture that Transformers can read from GGUF",
        ) from error
    config._name_or_path = ""
    vars(config).pop("_model_name_or_path", None)
    config.architectures = None
    return config


def gguf_state(file: Path, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The file's tensors in float32, under the parameter names of `model` (which may be on meta)."""
    _need_gguf()
    from transformers import modeling_gguf_pytorch_utils as reader

    try:
        load: Any = reader.load_gguf_checkpoint  # from_pretrained calls the same, but asks for accelerate
        read = load(str(file), return_tensors=True, model_to_load=model, torch_dtype=torch.float32)
    except Exception as error:
        raise ModelError(
            f"the tensors of this GGUF file cannot be read: {type(error).__name__}: {error}",
            where=str(file),
            hint="a whole download, or the model's safetensors folder",
        ) from error
    return dict(read["tensors"])


def load_gguf_weights(file: Path, model: torch.nn.Module) -> torch.nn.Module:
    """Copies the file's weights into `model` and returns it; each parameter must be in the file or tied."""
    state = gguf_state(file, model)
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - dict(
        model.named_parameters()
    ).keys()
    result = model.load_state_dict(state, strict=False)
    missing = [name for name in result.missing_keys if name not in tied]
    if missing or result.unexpected_keys:
        raise ModelError(
            f"the file's tensors are not those of {type(model).__name__}: "
            f"missing {missing[:3]}, unexpected {result.unexpected_keys[:3]}",
            where=str(file),
            hint="the model's safetensors folder instead of its GGUF file",
        )
    return model


def gguf_tokenizer(file: Path) -> Any:
    """The tokenizer written in the file's header."""
    _need_gguf()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)


def _need_gguf() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ModelError("reading a GGUF file needs the package gguf", hint="pip install gguf") from error
