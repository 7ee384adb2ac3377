"""Exported: a program that `autopar export --format python` wrote, running.

In:  its folder, and the functions in its `blocks/`. Out: an ExportedRun, which trains as `autopar.compile(...)` does.

    from blocks import BLOCKS
    run = load_exported(folder, BLOCKS).start(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4))
    run.train_step(run.random_batch(seed=0))

Nothing is captured, searched or lowered, and the model's own code is not needed. Reading the folder runs no code: JSON
and safetensors are data, and the functions are those that the caller has imported.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from autopar.compiled import Compiled
from autopar.errors import PlanError, TrainingError, UsageError
from autopar.models.model_source import ModelSource
from autopar.passes.lower import RankProgram
from autopar.passes.stages import Stage
from autopar.plan_files import read_text
from autopar.plans import Plan
from autopar.program_file import ProgramFile, rank_program, read_program_file
from autopar.runtime.optimizers import OptimizerSettings
from autopar.runtime.store import ParameterStore

PLAN, PROGRAM, CONSTANTS, WEIGHTS = "plan.json", "program.json", "constants.safetensors", "weights"
_STD = 0.02  # of random weights, where none are given


def load_exported(
    folder: str | Path,
    functions: Mapping[str, Callable[..., Any]],
    *,
    weights: str | Path | None = None,
    seed: int = 0,
    compiled: bool = False,
) -> ExportedRun:
    """Read an exported program.

    functions  BLOCKS of its `blocks/`
    weights    a .safetensors file, or a folder of them, by the model's own names (default: `weights/` in the folder, or
               where that was left out, random ones)
    seed       of random weights; every rank must give the same
    compiled   run the blocks through torch.compile

    Raises PlanError where the parts of the folder do not fit each other, UsageError where weights cannot be read.
    """
    place = Path(folder)
    plan = Plan.load(place / PLAN)
    file = read_program_file(read_text(place / PROGRAM), str(place / PROGRAM))
    if file.mesh != str(plan.run_mesh):
        raise PlanError(
            f"the program is for the mesh {file.mesh}, the plan for {plan.run_mesh}",
            where=str(place),
            hint="to export the other plan: its blocks are other ones",
        )
    tensors = Tensors.of(place / CONSTANTS)
    program, stages = rank_program(file, functions, tensors)
    given = Path(weights) if weights is not None else place / WEIGHTS
    found = Tensors.of(given) if weights is not None or given.exists() else None
    return ExportedRun(plan, file, program, stages, State(file, tensors, found, seed), compiled)


class ExportedRun(Compiled):
    """A planned model whose program was read from a folder. All of Compiled."""

    def __init__(
        self,
        plan: Plan,
        file: ProgramFile,
        program: RankProgram,
        stages: tuple[Stage, ...],
        state: State,
        use_compile: bool,
    ) -> None:
        super().__init__(plan, _source(plan), program, use_compile)
        self.file, self._stages, self._state = file, stages, state

    def on_rank(self) -> ExportedRun:
        return ExportedRun(
            self.plan, self.file, self.rank_program, self._stages, self._state, self._use_compile
        )

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self._stages

    def whole_state(self) -> Mapping[str, Tensor]:
        return self._state

    def _optimizer(
        self,
        store: ParameterStore,
        wanted: OptimizerSettings | Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ) -> torch.optim.Optimizer:
        if isinstance(wanted, OptimizerSettings):
            names = [wanted.name, *(str(group.settings.get("optimizer", "")) for group in wanted.groups)]
            if any(name.lower() == "muon" for name in names):
                raise UsageError(
                    "Muon goes by what the parameters are for in the model's graph, which an exported program does not say",
                    where="optimizer",
                    hint="autopar train --optimizer muon with the plan, or another optimizer",
                )
        return super()._optimizer(store, wanted)

    def random_batch(self, seed: int) -> dict[str, Tensor]:
        """A whole batch of random ids and numbers, in the shapes and ranges that the program takes: to try it out.

        An input whose values are constants of the program has those. Integers of which no range is known are ones.
        """
        generator = torch.Generator().manual_seed(seed)
        micro_batches, batch = self.plan.data.micro_batches, {}
        for name, entry in self.file.inputs.items():
            if name in self.file.fixed:
                piece = [self.rank_program.fixed[name]] * micro_batches
            else:
                piece = [_random(entry, generator) for _ in range(micro_batches)]
            batch[name] = piece[0] if not entry.shape else torch.cat(piece, _batch_dim(name, entry.shape))
        return batch


def _batch_dim(name: str, shape: tuple[int, ...]) -> int:
    from autopar.program import batch_dim

    return batch_dim(name, shape)


def _random(entry: Any, generator: torch.Generator) -> Tensor:
    dtype = getattr(torch, entry.dtype)
    if dtype.is_floating_point:
        return torch.randn(entry.shape, generator=generator).to(dtype)
    if entry.ids is not None:
        return torch.randint(0, entry.ids, entry.shape, generator=generator).to(dtype)
    return torch.ones(entry.shape, dtype=dtype)


class Tensors(Mapping[str, Tensor]):
    """The tensors of some safetensors files, each read when it is asked for."""

    def __init__(self, files: Mapping[str, Path], where: Path) -> None:
        self.files, self.where = files, where

    @staticmethod
    def of(place: Path) -> Tensors:
        """Of a file, or of all files of a folder. Raises UsageError."""
        paths = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
        found: dict[str, Path] = {}
        if not paths:
            raise UsageError("the folder has no .safetensors files", where=str(place), hint="another folder")
        for path in paths:
            try:
                with safe_open(path, "pt") as opened:
                    found.update(dict.fromkeys(opened.keys(), path))
            except (OSError, SafetensorError) as error:
                raise UsageError(
                    f"the tensors cannot be read: {error}", where=str(path), hint="a whole .safetensors file"
                ) from None
        return Tensors(found, place)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.files:
            raise PlanError(
                f"there is no tensor {name!r}", where=str(self.where), hint="the folder as it was exported"
            )
        with safe_open(self.files[name], "pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self.files

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


class State(Mapping[str, Tensor]):
    """The model's whole tensors as training begins: one at a time, so that no rank has all of them at once.

    `constants`: buffers and constants. `weights`: parameters, and buffers that a checkpoint has; None for random ones.
    """

    def __init__(self, file: ProgramFile, constants: Tensors, weights: Tensors | None, seed: int) -> None:
        self.file, self.constants, self.weights, self.seed = file, constants, weights, seed
        self.shapes = {
            entry.piece.parameter if entry.piece else name: entry.piece.shape if entry.piece else entry.shape
            for name, entry in file.state.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.file.parameters:
            stored = self.weights is not None and name in self.weights
            return self.weights[name] if stored and self.weights is not None else self.constants[name]
        entry = self.file.parameters[name]
        dtype: torch.dtype = getattr(torch, entry.dtype)
        if self.weights is None:
            return self._drawn(name).to(dtype)
        found = next((alias for alias in (name, *entry.aliases) if alias in self.weights), None)
        if found is None:
            raise TrainingError(
                f"the weights have no {name}",
                where=str(self.weights.where),
                hint="weights by the model's own names, as `autopar export` writes them",
            )
        return self.weights[found].to(dtype)

    def _drawn(self, name: str) -> Tensor:
        """Vectors as norms and biases begin, all else normal: for trying a program out, not for training a model."""
        shape = self.shapes[name]
        if len(shape) < 2:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        generator = torch.Generator().manual_seed(self.seed ^ zlib.crc32(name.encode()))
        return torch.randn(shape, generator=generator) * _STD

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def _source(plan: Plan) -> ModelSource:
    """The model is not needed, and not there."""

    def build() -> NoReturn:
        raise UsageError(
            f"{plan.model.name} runs from an exported program, without the model itself",
            hint="autopar.compile(model, plan=plan)",
        )

    return ModelSource(plan.model.name, plan.model.task, None, build, None, lambda batch, seq: build(), None)
