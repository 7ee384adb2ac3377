"""On every rank: the outcome of the cases that `test_simulate` also simulates."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from autopar.runtime.groups import end_rank, leave, wait_for_all
from tests.runtime.processes import write_result
from tests.runtime.test_simulate import compiled, outcome

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    results = {}
    for case in sys.argv[1:]:
        run, batch = compiled(case)
        results[case] = outcome(run, batch)
    write_result(results)
    wait_for_all()
    leave()
    end_rank()
