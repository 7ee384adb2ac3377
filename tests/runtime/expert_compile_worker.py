"""On every rank: experts sent to their ranks under `torch.compile(fullgraph=True)`, for one routing after another,
against the same in eager mode; the largest difference of results and gradients."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.expert_steps import split_experts
from autopar.runtime.groups import end_rank, leave, wait_for_all
from tests.runtime.processes import write_result

EXPERTS, WIDTH, INNER, SHARE = 4, 8, 6, 2

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    here = EXPERTS // size
    x, weights = torch.randn(2, 5, WIDTH).double(), torch.rand(2, 5, SHARE).double()
    gate, up = torch.randn(here, INNER, WIDTH).double(), torch.randn(here, INNER, WIDTH).double()
    down = torch.randn(here, WIDTH, INNER).double()
    tensors = [tensor.requires_grad_() for tensor in (x, weights, gate, up, down)]
    levels = [(dist.group.WORLD.group_name, size, torch.tensor(rank), True)]

    def step(index: Tensor, x: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        text = "mul.Tensor(silu(gate), up)"
        return split_experts(x, index, weights, gate, up, down, None, None, None, [], text, "", levels, 1)

    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")
    routings = [
        torch.stack([torch.randperm(EXPERTS)[:SHARE] for _ in range(10)]).view(2, 5, SHARE) for _ in range(2)
    ]
    routings += [torch.zeros_like(routings[0]), torch.full_like(routings[0], EXPERTS - 1)]
    worst = 0.0
    for index in routings:
        both = []
        for function in (step, compiled):
            made = function(index, *tensors)
            both.append([made, *torch.autograd.grad(made.square().sum(), tensors)])
        worst = max(worst, *(float((one - other).abs().max()) for one, other in zip(*both, strict=True)))
    write_result(worst)
    wait_for_all()
    leave()
    end_rank()
