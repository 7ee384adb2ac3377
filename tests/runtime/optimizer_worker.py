"""On every gloo process: Muon's whole parameters after given gradients, and where a value that is not finite came from."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from autopar.runtime.groups import end_rank, leave, wait_for_all
from autopar.runtime.optimizers import OptimizerSettings
from tests.runtime.processes import write_result
from tests.runtime.test_nonfinite import explained
from tests.runtime.test_optimizers import stepped
from tests.runtime.training_case import digest, made

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    run = made("root", sys.argv[1])
    muon = stepped(run, OptimizerSettings("muon", lr=1e-2, weight_decay=0.1))

    def spoil(rank: int, parameters: dict[str, torch.Tensor]) -> None:
        if rank == 1:
            parameters["second.weight"].fill_(3e38)

    write_result({"muon": digest(muon), "cause": explained(run, spoil)})
    wait_for_all()
    leave()
    end_rank()
