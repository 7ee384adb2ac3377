"""Under torchrun: train SmolLM2 with a plan file for some steps; rank 0 writes the losses and the first step's
gradient errors against a file of reference gradients.

    torchrun --nproc-per-node 4 train_worker.py MODEL PLAN STEPS REFERENCE.safetensors RESULT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors import safe_open

import autopar
from autopar.models.text import batch_at, pydoc_tokens
from autopar.runtime.groups import leave
from tests.acceptance.reference import LEARNING_RATE, SEED


def main(model: str, plan_file: str, steps: int, reference: str, result: str) -> None:
    plan = autopar.load_plan(plan_file)
    run = autopar.compile(model, plan=plan).start(lr=LEARNING_RATE)
    tokens = pydoc_tokens(Path(model))
    first = run.trainer.model.groups.rank == 0

    def batch(step: int) -> dict[str, object]:
        return batch_at(tokens, plan.data.batch, plan.data.seq, seed=SEED, step=step)

    run.trainer.gradients(batch(0))
    errors = {}
    with safe_open(reference, "pt") as expected:
        for name in run.parameters:
            found = run.whole_gradient(name)
            if first:
                whole = expected.get_tensor(name)
                errors[name] = float((found - whole).norm() / whole.norm())
    run.optimizer.zero_grad(set_to_none=True)
    losses = [run.train_step(batch(step)).loss for step in range(steps)]
    if first:
        worst = max(errors, key=errors.__getitem__)
        Path(result).write_text(json.dumps({"losses": losses, "worst": errors[worst], "which": worst}))
    leave()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5])
