"""The single-process run that the sharded ones are compared with: Transformers' model, torch's optimizer.

Gradients are compared with two references, because float32 has a limit of its own on this model: a few of its norm
weights have gradients that are small sums of large terms. `single` is Transformers' model in float32, the loss of its
logits taken in float64 (torch's float32 cross-entropy on CPU is off by 1e-5 at a vocabulary of 49,152, which those
gradients magnify to 1e-3). `exact` is all of it in float64.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from autopar.models.text import batch_at, pydoc_tokens

BATCH, SEQUENCE, STEPS = 4, 48, 30
LEARNING_RATE, SEED = 1e-4, 0


def reference_gradients(model_folder: Path, file: Path, dtype: torch.dtype) -> None:
    """Gradients of the first step's batch, computed in `dtype` with the loss in float64, to a safetensors file."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(model_folder, dtype=dtype)
    batch = batch_at(pydoc_tokens(model_folder), BATCH, SEQUENCE, seed=SEED, step=0)
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].double()
    labels = batch["labels"][:, 1:]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    save_file({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, file)


def gradient_in(file: str | Path, name: str) -> Tensor:
    with safe_open(file, "pt") as held:
        gradient: Tensor = held.get_tensor(name)
    return gradient


def distance(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def reference_losses(model_folder: Path) -> list[float]:
    """Losses of 30 steps, all in float32, with Transformers' own loss."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    tokens = pydoc_tokens(model_folder)
    losses = []
    for step in range(STEPS):
        loss = model(**batch_at(tokens, BATCH, SEQUENCE, seed=SEED, step=step)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
