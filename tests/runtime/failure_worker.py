"""Two ranks, one of which dies or hangs after the first step: what the other one is told."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from torch import nn

import autopar
from autopar.errors import PeerError
from tests.runtime.processes import write_result


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.down(self.up(x).relu()).square().mean()}


def mlp() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Mlp(), {"x": torch.ones(4, 8)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, mesh = sys.argv[1:]
    model, batch = mlp()
    # So small a model is fastest whole on both ranks, without a collective that could wait for anyone.
    fix = ["batch=dp"] if mesh == "dp=2" else ["up.weight=[_@tp, _]"]
    run = autopar.compile(model, "cpu:2", batch, mesh=mesh, fix=fix).start(timeout_s=4)
    run.train_step(batch)
    began = time.monotonic()
    if os.environ["RANK"] == "1":
        if what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(8)
        os._exit(0)
    try:
        run.train_step(batch)
    except PeerError as error:
        write_result({"text": str(error), "hint": error.hint, "seconds": time.monotonic() - began})
    os._exit(0)  # the group cannot be left in good order any more
