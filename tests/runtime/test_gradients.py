"""Sums of gradients while backward still runs: right where gradients lie in one storage, and over micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.runtime.simulate import simulate
from tests.runtime.composition import optimizer

ROWS, WIDTH = 8, 16
INNER = 16_501  # weights take more than the 1 MiB from which tensors are sent as they lie; rows that do not divide


class SharedStorage(nn.Module):
    """Adds parameters by views, so that autograd gives one storage as the gradient of two parameters and of what is
    further back."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, INNER)
        self.one, self.other = (nn.Parameter(torch.randn(ROWS // 2 * WIDTH)) for _ in range(2))
        self.after = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        found = self.after(self.before(x).tanh())
        table = (self.one.view(ROWS // 2, WIDTH) + self.other.view(ROWS // 2, WIDTH)) * 2
        return {"loss": ((found + table.mean(0) - y) ** 2).mean() + (table**2).mean()}


@pytest.mark.parametrize(
    ("mesh", "micro_batches"), [("dp=2", 1), ("dp=2", 2), ("fsdp=2", 1), ("dp=2,fsdp=2", 2)]
)
def test_as_the_model_alone(mesh: str, micro_batches: int) -> None:
    torch.manual_seed(0)
    model = SharedStorage()
    batch = {"x": torch.randn(ROWS, WIDTH), "y": torch.randn(ROWS, WIDTH)}
    model(**batch)["loss"].backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    ranks = 4 if "," in mesh else 2
    compiled = autopar.compile(model, f"cpu:{ranks}", batch, mesh=mesh, micro_batches=micro_batches)

    def work(_: int) -> float:
        run = compiled.on_rank().start(optimizer=optimizer)
        run.trainer.gradients(batch)
        return max(
            float((run.whole_gradient(name) - expected[name]).norm() / expected[name].norm())
            for name in run.parameter_names
        )

    assert max(simulate(ranks, work, timeout_s=100)) < 1e-5
