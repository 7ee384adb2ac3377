"""Zoo, published sizes: the model of any Transformers model type as its config class describes it, without storage.

In:  a model type (`llama`, `qwen3_moe`, ...).
Out: a `Published`: the module on the meta device, keyword inputs of one training forward, its output's name.

The size is that of the config class's defaults, which is mostly that of a published checkpoint; batch 1 and 4096
tokens, or what the model allows.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.zoo_inputs import example_inputs
from bench.zoo_models import parent_types, published_config, trainable_class

SEQUENCE = 4096


@dataclass(frozen=True)
class Published:
    """`inputs` are tensors on the meta device; `output`: what the forward's program computes (`loss` where the class
    has one)."""

    model: nn.Module
    inputs: dict[str, Any]
    output: str
    sequence: int


def hand_planned() -> list[str]:
    """Every registered model type whose config class carries a tensor-parallel plan."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return sorted(
        name for name in CONFIG_MAPPING if getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None)
    )


def published_model(model_type: str, sequence: int = SEQUENCE) -> Published:
    """The model of a type at its config class's size; a type that exists only inside of another is built as part of
    that one. Raises LookupError where no class or no input can be told."""
    from autopar.models.huggingface import training_config

    config = training_config(published_config(model_type))
    try:
        return _built(config, sequence)
    except Exception:
        for parent in parent_types(model_type):
            with contextlib.suppress(Exception):  # what the type itself lacks is the better error
                return _built(training_config(published_config(parent)), sequence)
        raise


def _built(config: Any, sequence: int) -> Published:
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model_class: Any = trainable_class(config.model_type, type(config))[0]
        model = model_class._from_config(config, dtype=torch.bfloat16)
    return example(model, config, sequence)


def example(model: nn.Module, config: Any, sequence: int) -> Published:
    """Inputs of one training forward, without storage: token ids where the model takes them (of a composite only the
    text), else what the zoo gives its tiny models, at this size."""
    takes = inspect.signature(model.forward).parameters
    text = config.get_text_config(decoder=True)
    sequence = min(sequence, next(_limits(text), sequence))
    if "input_ids" in takes and getattr(text, "vocab_size", None):
        ids = torch.empty(1, sequence, dtype=torch.int64, device="meta")
        inputs: dict[str, Any] = {"input_ids": ids}
        if "labels" in takes or (
            "kwargs" in takes and type(model).__name__.endswith("ConditionalGeneration")
        ):
            inputs["labels"] = ids
    else:
        sequence = 1
        inputs = {
            name: value.to("meta", torch.bfloat16 if value.is_floating_point() else value.dtype)
            if isinstance(value, Tensor)
            else value
            for name, value in example_inputs(model, config, "").items()
        }
    return Published(model, inputs, "loss" if "labels" in inputs else "last_hidden_state", sequence)


def _limits(config: Any) -> Iterator[int]:
    """How many positions the config allows."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        limit = getattr(config, name, None)
        if isinstance(limit, int) and limit > 0:
            yield limit
