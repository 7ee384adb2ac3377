"""What every kind of model comes down to: how to build it, how to load it, what a training example is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class ModelSource:
    """One model, not built yet.

    `name`            readable and canonical, such as "llama-3.1-8b".
    `task`            causal-lm, masked-lm, classification, image-classification, seq2seq, or module.
    `config`          the Transformers config, if there is one.
    `build()`         the module on the current default device, in the default dtype, with random weights
                      (seed before the call); under `torch.device("meta")` it takes no memory.
    `load()`          the module with its real weights; None where the source has none.
    `example_inputs(batch, seq)`  keyword inputs of a training forward, labels included, on the current
                      default device; the same at each call. Images ignore `seq`.
    `path`            the checkpoint folder or file, if there is one.
    """

    name: str
    task: str
    config: object | None
    build: Callable[[], torch.nn.Module]
    load: Callable[[], torch.nn.Module] | None
    example_inputs: Callable[[int, int], dict[str, torch.Tensor]]
    path: Path | None
