"""A Transformers config as a model to plan for: which task, how to build it, how to load its weights.

In: a config, published or from a checkpoint folder. Out: an ordinary `nn.Module` whose forward takes labels
and gives a loss. What is changed about the model as its authors give it, and why:

- dropout is 0: a plan, a split model and the whole model then compute the same numbers;
- experts are the `grouped_mm` kind, where the model has them: shapes that do not depend on data, which is what
  capture needs;
- no key/value cache in training (`use_cache=False`);
- parameters are in the default dtype (float32): precision is the plan's decision, not the checkpoint's.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from autopar.errors import ModelError

AUTO_CLASS = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
MAPPING = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}


def config_for(model_type: str, values: dict[str, Any]) -> Any:
    """A Transformers config of a model type from keyword values."""
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **values)


def task_of(config: Any, where: str | None = None) -> str:
    """The task a config is for: what its `architectures` name, else the usual one of its model type."""
    for architecture in config.architectures or ():
        for task, classes in _classes().items():
            if any(architecture in names for names in classes.values()):
                return task
    kinds = [task for task, classes in _classes().items() if config.model_type in classes]
    if getattr(config, "is_encoder_decoder", False):
        order = ["seq2seq"]
    elif getattr(config, "is_decoder", False):
        order = ["causal-lm"]
    else:
        order = ["image-classification", "masked-lm", "causal-lm", "classification"]
    for task in order:
        if task in kinds:
            return task
    raise ModelError(
        f"model type {config.model_type!r} ({', '.join(config.architectures or ()) or 'no architectures'}) "
        f"has no class for any of the tasks {', '.join(AUTO_CLASS)}",
        where=where,
        hint="file.py:function, a function that returns (module, example keyword inputs)",
    )


def _classes() -> dict[str, dict[str, tuple[str, ...]]]:
    """Task -> model type -> names of the classes for it."""
    from transformers.models.auto import modeling_auto

    tables = {task: dict(getattr(modeling_auto, table)) for task, table in MAPPING.items()}
    return {
        task: {kind: (names,) if isinstance(names, str) else tuple(names) for kind, names in table.items()}
        for task, table in tables.items()
    }


def with_dropout_off(config: Any) -> Any:
    """A copy of a config, and of the configs inside it, with every dropout probability at 0.

    A probability is a number from 0 to 1 under a name with "drop" in it: `attn_pdrop`, `hidden_dropout_prob`,
    `dropout_rate`, `encoder_layerdrop`, `drop_path_rate`, ...
    """
    config = copy.deepcopy(config)
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            setattr(config, name, with_dropout_off(value))
        elif "drop" in name and isinstance(value, int | float) and not isinstance(value, bool) and value <= 1:
            setattr(config, name, type(value)(0))
    return config


def training_config(config: Any) -> Any:
    """The copy of a config that models are built with (see the module's docstring)."""
    config = with_dropout_off(config)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    config.return_dict = True
    config._attn_implementation = None  # Transformers then takes sdpa where the model has it
    return config


def build_from_config(config: Any, task: str, where: str | None = None) -> torch.nn.Module:
    """A model with random weights on the default device; under `torch.device("meta")` it takes no memory."""
    import transformers
    from transformers.initialization import no_init_weights

    # without storage there is nothing to initialise, and going through the motions takes longest of all
    empty = torch.get_default_device().type == "meta"
    try:
        auto: Any = getattr(transformers, AUTO_CLASS[task])
        with no_init_weights() if empty else nullcontext():
            model: Any = auto.from_config(training_config(config), dtype=torch.get_default_dtype())
        _make_ready(model, task)
    except Exception as error:
        raise ModelError(
            f"Transformers cannot build {config.model_type!r} from this config: "
            f"{type(error).__name__}: {error}",
            where=where,
            hint="values that agree with each other; `num_hidden_layers=1` to find out which do not",
        ) from error
    module: torch.nn.Module = model
    return module


def load_from_folder(folder: Path, config: Any, task: str) -> torch.nn.Module:
    """The model of a checkpoint folder with its weights; a parameter that the files lack is an error."""
    import transformers

    try:
        auto: Any = getattr(transformers, AUTO_CLASS[task])
        model, report = auto.from_pretrained(
            str(folder),
            config=training_config(config),
            dtype=torch.get_default_dtype(),
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        _make_ready(model, task)
    except Exception as error:
        raise ModelError(
            f"the weights cannot be loaded: {type(error).__name__}: {error}",
            where=str(folder),
            hint="the whole folder anew (`hf download NAME --local-dir FOLDER`)",
        ) from error
    lacking = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if lacking:
        raise ModelError(
            f"{len(lacking)} parameters of {type(model).__name__} are not in the checkpoint, "
            f"the first is {lacking[0]}",
            where=str(folder),
            hint="a config.json whose `architectures` and sizes are those of the weights",
        )
    module: torch.nn.Module = model.train()
    return module


def _make_ready(model: Any, task: str) -> None:
    """What capture and a training forward need and a config may leave open."""
    model.tie_weights()
    config = model.config
    if model._can_set_experts_implementation():
        model.set_experts_implementation("grouped_mm")
    if task == "classification" and config.pad_token_id is None:
        config.pad_token_id = 0  # else a decoder refuses a batch of more than one
    if task == "seq2seq" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id or 0  # the labels are shifted by this token
