"""A small model whose ranks kill themselves at the moments that FAULTS names, each once.

FAULTS="1:backward:2,0:publish:2" with FAULTS_DONE a folder: rank 1 dies in the backward of step 2, and, when the run is
there again, rank 0 before the checkpoint of step 2 gets its name.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.runtime import checkpoint_storage
from autopar.runtime.checkpoint_storage import Writer
from autopar.runtime.trainer import Trainer
from tests.runtime.failure_worker import mlp as plain_mlp

PHASES = ("data", "forward", "backward", "reduced", "optimizer", "updated", "write", "publish", "published")
_step = 0


def mlp() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    if os.environ.get("FAULTS"):
        _arm()
    model, _ = plain_mlp()
    return model, {"x": torch.arange(32.0).view(4, 8) / 32}


def die_if(phase: str, checkpoint: Path | None = None) -> None:
    """`checkpoint`: of a save, whose step is its own: it may be written while the next step runs."""
    step = _step if checkpoint is None else int(checkpoint.name.removesuffix(".partial").partition("-")[2])
    rank = os.environ.get("RANK", "0")
    for fault in os.environ["FAULTS"].split(","):
        done = Path(os.environ["FAULTS_DONE"]) / fault.replace(":", "-")
        if fault == f"{rank}:{phase}:{step}" and not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def _before(place: Any, name: str, phase: str) -> None:
    call: Callable[..., Any] = getattr(place, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        die_if(phase)
        return call(*arguments, **options)

    setattr(place, name, wrapped)


def _arm() -> None:
    step, reduced, save_file = Trainer.step, Trainer._reduced, checkpoint_storage.save_file
    publish = Writer._publish

    def faulty_step(self: Trainer, batch: Any) -> Any:
        global _step
        _step = self.step_count + 1
        die_if("data")
        if not hasattr(self, "armed"):
            self.armed = True  # type: ignore[attr-defined]
            _before(self.model, "local_inputs", "forward")
            for entry in self.store.entries.values():
                entry.parameter.register_hook(lambda gradient: die_if("backward"))
            self.optimizer.register_step_pre_hook(lambda *_: die_if("optimizer"))
            self.optimizer.register_step_post_hook(lambda *_: die_if("updated"))
        return step(self, batch)

    def faulty_gradients(self: Trainer, pieces: Any) -> Any:
        loss = reduced(self, pieces)
        die_if("reduced")
        return loss

    def faulty_save(tensors: Any, file: Path, *rest: Any) -> None:
        save_file(tensors, file, *rest)
        with Path(file).open("rb+") as half:
            half.truncate(Path(file).stat().st_size // 2)
        die_if("write", Path(file).parent)
        save_file(tensors, file, *rest)

    def faulty_publish(self: Writer) -> None:
        die_if("publish", self.folder)
        publish(self)
        die_if("published", self.folder)

    Trainer.step, Trainer._reduced = faulty_step, faulty_gradients  # type: ignore[method-assign]
    checkpoint_storage.save_file = faulty_save
    Writer._publish = faulty_publish  # type: ignore[method-assign]
