"""One rank of the torch.compile test: the errors of a step with compiled blocks, and how many were compiled."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from autopar import api
from autopar.runtime.groups import end_rank, leave, wait_for_all
from tests.runtime.composition import errors, expected, model_and_batch
from tests.runtime.processes import write_result

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    model, batch = model_and_batch("llama")
    run = api.compile(model, None, batch, plan=sys.argv[1], compiled=True)
    found = errors(run, batch, expected("llama", False))
    functions = run.trainer.model.functions.values()  # type: ignore[union-attr]
    found["compiled"] = float(sum(not isinstance(function, GraphModule) for function in functions))
    write_result(found)
    wait_for_all()
    leave()
    end_rank()
