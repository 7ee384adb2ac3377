"""On every rank of two stages of two: loss, norm and the norm of every gradient of the stage."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from autopar.passes.stages import cut_stages
from autopar.runtime.groups import end_rank, leave, wait_for_all
from tests.passes.test_stages import a_model, lowered, outcome, state_of
from tests.runtime.processes import write_result

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    program = lowered("gpt2", 2, 2)
    model, batch = a_model("gpt2")
    loss, norm, gradients = outcome(cut_stages(program, (2, 1)), program, state_of(model, program), batch, 2)
    write_result([loss, norm, {name: float(gradient.norm()) for name, (_, gradient) in gradients.items()}])
    wait_for_all()
    leave()
    end_rank()
