"""Small PyTorch programs as a user would write them, of many kinds: each a module whose forward returns a loss, and a
batch of 4 in double precision. What is sharded is compared with the module itself, so nothing here knows of autopar.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH, LENGTH, WIDTH, CLASSES = 4, 8, 16, 8

Program = tuple[nn.Module, dict[str, Any]]
PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(make: Callable[[], Program]) -> Callable[[], Program]:
    PROGRAMS[make.__name__] = make
    return make


def build(name: str) -> Program:
    """The program with seeded weights in double precision and training mode."""
    torch.manual_seed(0)
    model, inputs = PROGRAMS[name]()
    return model.double().train(), inputs


def rows(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape, dtype=torch.float64)


def classes() -> Tensor:
    return torch.randint(0, CLASSES, (BATCH,))


def tokens(high: int = 32) -> Tensor:
    return torch.randint(0, high, (BATCH, LENGTH))


class Classifier(nn.Module):
    """What a body makes, averaged over all but batch and channels (dim 1), to classes."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        features = self.body(x)
        pooled = features.flatten(2).mean(2) if features.dim() > 2 else features
        return functional.cross_entropy(self.head(pooled), labels)
