"""Ranks that train a small model under a Monitor; one may hang, or be slow."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import autopar
from autopar.profiling import StepProfiler
from autopar.runtime.groups import leave, wait_for_all
from autopar.runtime.monitor import Monitor, MonitorOptions
from tests.runtime.processes import write_result


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Stack(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


def stack() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Stack(), {"x": torch.ones(4, 8)}


# Split the layers, so that each has a collective.
TP = ["layers.*.up.weight=[_@tp, _]"]


def hang(what: str) -> None:
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(300)


def main(out: str, mesh: str, what: str, steps: int, timeout_s: float) -> None:
    model, batch = stack()
    fix = TP if mesh.startswith("tp") else ["batch=dp"]
    run = autopar.compile(model, "cpu:2", batch, mesh=mesh, fix=fix, compiled=what == "compiled")
    run.start(timeout_s=timeout_s)
    rank = int(os.environ["RANK"])
    lines: list[str] = []
    options = MonitorOptions(out=Path(out), timeout_s=timeout_s, over=5)
    profiler = StepProfiler(run, f"{steps}:{out}/trace.json" if what == "slow" else None, say=lines.append)
    with Monitor(run.plan, run.trainer, options, say=lines.append) as monitor:
        for step in range(steps):
            with monitor.step(), profiler.step(step + 1):
                with monitor.doing("data"):
                    if what == "data" and rank == 1 and step == 2:
                        hang("sleep")
                    if what == "slow" and rank == 1:
                        time.sleep(0.1)
                if what in ("sleep", "stop") and rank == 1 and step == 2:
                    _hang_in_layer(run, what)
                with monitor.doing("compute"):
                    result = run.train_step(batch)
                monitor.result(result)
        wait_for_all()
    write_result({"lines": lines, "loss": result.loss})
    leave()


def _hang_in_layer(run: autopar.Compiled, what: str) -> None:
    """The next forward of layer 1 does not return."""
    model = run.trainer.model
    taken = model.store.take

    def take(key: object, names: object) -> object:
        call = model.program.calls[key[1] if isinstance(key, tuple) else key]
        if call.path == "layers.1":
            hang(what)
        return taken(key, names)

    model.store.take = take


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, mesh, what, steps, timeout_s = sys.argv[1:]
    main(folder, mesh, what, int(steps), float(timeout_s))
    os._exit(0)
