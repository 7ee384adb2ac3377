"""Under torchrun: train SmolLM2 with a plan file for some steps; rank 0 writes the losses, and how far the first
step's gradients are from those in each of the reference files.

    torchrun --nproc-per-node 4 train_worker.py MODEL PLAN STEPS RESULT.json SINGLE.safetensors EXACT.safetensors
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

import autopar
from autopar.models.text import batch_at, pydoc_tokens
from autopar.runtime.groups import end_rank, leave, wait_for_all
from tests.acceptance.reference import LEARNING_RATE, SEED, distance, gradient_in


def main(model: str, plan_file: str, steps: int, result: str, references: list[str]) -> None:
    plan = autopar.load_plan(plan_file)
    run = autopar.compile(model, plan=plan).start(lr=LEARNING_RATE)
    tokens = pydoc_tokens(Path(model))
    first = run.trainer.model.groups.rank == 0

    def batch(step: int) -> dict[str, object]:
        return batch_at(tokens, plan.data.batch, plan.data.seq, seed=SEED, step=step)

    run.trainer.gradients(batch(0))
    errors = {}
    for name in run.parameters:
        found = run.whole_gradient(name)
        errors[name] = [distance(found, gradient_in(file, name)) for file in references]
    everybody: list[dict[str, list[float]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everybody, errors)  # a pipeline's ranks have different parameters
    errors = {name: found for each in everybody for name, found in each.items()}
    run.optimizer.zero_grad(set_to_none=True)
    losses = [run.train_step(batch(step)).loss for step in range(steps)]
    if first:
        Path(result).write_text(json.dumps({"losses": losses, "errors": errors}))
    wait_for_all()
    leave()
    end_rank()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5:])
