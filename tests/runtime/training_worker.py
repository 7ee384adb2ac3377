"""On two ranks: steps with clipping and AdamW, a checkpoint, and going on from it under another mesh, in another way."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import autopar.api as api
from autopar.runtime.groups import end_rank, leave, wait_for_all
from tests.runtime.processes import write_result
from tests.tiny import tiny

LR, MAX_NORM, STEPS = 1e-2, 0.5, 6


def plain(kind: str) -> list[tuple[float, float]]:
    """Loss and gradient norm per step of the unsharded model with torch's own optimizer and clipping."""
    model, batch = tiny(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    results = []
    for _ in range(STEPS):
        loss = model(**batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        results.append((float(loss.detach()), float(norm)))
    return results


def start(kind: str, mesh: str, **options: object) -> api.Compiled:
    model, batch = tiny(kind)
    # The planner would rather repeat so small a model than split it over tp.
    fix = ("heads=tp", "ffn=tp", "vocab=tp") if mesh.startswith("tp") else ()
    run = api.compile(model, "cpu:2", batch, mesh=mesh, fix=fix, **options)  # type: ignore[arg-type]
    return run.start(
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LR, weight_decay=0.1),  # also of norms
        max_norm=MAX_NORM,
        timeout_s=60,
    )


def main(kind: str, first: str, second: str, folder: str) -> None:
    _, batch = tiny(kind)
    one = start(kind, first)
    steps = [one.train_step(batch) for _ in range(STEPS // 2)]
    one.save(folder)
    two = start(kind, second)
    two.load(folder)
    steps += [two.train_step(batch) for _ in range(STEPS - STEPS // 2)]
    write_result({"found": [(step.loss, step.gradient_norm) for step in steps], "expected": plain(kind)})


def compiled(kind: str, mesh: str) -> None:
    _, batch = tiny(kind)
    run = start(kind, mesh, compiled=True)
    found = [run.train_step(batch) for _ in range(2)]
    write_result({"found": [(step.loss, step.gradient_norm) for step in found], "expected": plain(kind)[:2]})


def bf16(kind: str, mesh: str) -> None:
    """Blocks in bf16 over fp32 masters: the loss falls about as in fp32."""
    _, batch = tiny(kind)
    run = start(kind, mesh, precision="bf16")
    found = [run.train_step(batch) for _ in range(STEPS)]
    assert all(parameter.dtype == torch.float32 for parameter in run.parameters.values())
    write_result({"found": [step.loss for step in found], "expected": [loss for loss, _ in plain(kind)]})


def own_optimizer(kind: str, mesh: str) -> None:
    """A user's own loop: gradients from the trainer, any torch optimizer over the local parameters."""
    model, batch = tiny(kind)
    run = start(kind, mesh)
    run.optimizer = torch.optim.SGD(run.parameters.values(), lr=LR, momentum=0.9)
    run.max_norm = None
    found = [run.train_step(batch).loss for _ in range(3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    expected = []
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    write_result({"found": found, "expected": expected})


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    what, *arguments = sys.argv[1:]
    if what == "main":
        Path(arguments[-1]).parent.mkdir(parents=True, exist_ok=True)
    {"main": main, "compiled": compiled, "bf16": bf16, "own_optimizer": own_optimizer}[what](*arguments)
    wait_for_all()
    leave()
    end_rank()
