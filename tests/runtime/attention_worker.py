"""On every rank of a real process group: ring attention forward and backward against whole attention, plain and
compiled."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from autopar import Mesh
from autopar.attention_steps import split_attention
from autopar.functional import attention
from autopar.runtime.groups import end_rank, join_mesh, leave, wait_for_all
from tests.runtime.processes import write_result

FLAGS = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window": 3},
    "softcap": {"causal": True, "softcap": 2.0},
}


def pieces(tensor: Tensor, rank: int, size: int) -> Tensor:
    return tensor.chunk(size, 2)[rank].clone().requires_grad_()


def worst(name: str, compiled: bool, zigzag: bool = False) -> float:
    """The largest error of this rank's piece of the result and of the gradients."""
    groups = join_mesh(Mesh.parse(f"cp={dist.get_world_size()}"))
    rank, size, group = groups.rank, dist.get_world_size(), groups.name("cp")
    draw = torch.Generator().manual_seed(1)
    whole = [
        torch.randn(2, heads, 8, 4, generator=draw, dtype=torch.float64).requires_grad_()
        for heads in (4, 2, 2)
    ]
    given = torch.randn(2, 4, 8, 4, generator=draw, dtype=torch.float64)
    expected = attention(*whole, **FLAGS[name])  # type: ignore[arg-type]
    expected.backward(given)
    place = groups.coordinate_tensor("cp")

    def own(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return split_attention(
            query,
            key,
            value,
            row_groups=[group],
            row_place=place,
            ring_group=group,
            zigzag=zigzag,
            **FLAGS[name],  # type: ignore[arg-type]
        )

    local = [pieces(tensor.detach(), rank, size) for tensor in whole]
    function = torch.compile(own, fullgraph=True) if compiled else own
    result = function(*local)
    result.backward(given.chunk(size, 2)[rank])
    errors = [float((result - expected.chunk(size, 2)[rank]).abs().max())]
    for mine, tensor in zip(local, whole, strict=True):
        assert mine.grad is not None
        assert tensor.grad is not None
        errors.append(float((mine.grad - tensor.grad.chunk(size, 2)[rank]).abs().max()))
    return max(errors)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = {name: worst(name, compiled=False) for name in FLAGS}
    found["compiled"] = worst("causal", compiled=True)
    found["even"] = worst("causal", compiled=False, zigzag=True)
    found["even, compiled"] = worst("causal", compiled=True, zigzag=True)
    write_result(found)
    wait_for_all()
    leave()
    end_rank()
