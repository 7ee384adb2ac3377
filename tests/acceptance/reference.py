"""The single-process run that the sharded ones are compared with: Transformers' model and loss, torch's optimizer."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from autopar.models.text import batch_at, pydoc_tokens

BATCH, SEQUENCE, STEPS = 4, 48, 30
LEARNING_RATE, SEED = 1e-4, 0


def reference_run(model_folder: Path, gradients: Path) -> list[float]:
    """Losses of 30 steps; the first step's gradients go to a safetensors file."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    tokens = pydoc_tokens(model_folder)
    losses = []
    for step in range(STEPS):
        loss = model(**batch_at(tokens, BATCH, SEQUENCE, seed=SEED, step=step)).loss
        loss.backward()
        if step == 0:
            save_file({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, gradients)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
