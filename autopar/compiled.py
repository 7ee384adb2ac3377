"""What runs a planned model: `Compiled`, which trains, and `generator`, which gives the next token.

In: a plan, its model and its RankProgram. Out: losses, gradients, checkpoints. Until `start` no process is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from autopar.cluster import load_cluster
from autopar.cost.prices import Prices
from autopar.errors import ModelError, PlanError, UsageError
from autopar.forms import source_of
from autopar.mesh import Mesh
from autopar.models.model_source import ModelSource
from autopar.passes.capture import capture
from autopar.passes.layout_plan import zero_axes
from autopar.passes.lower import RankProgram, lower
from autopar.passes.placement import solve
from autopar.passes.stages import Stage, cut_stages
from autopar.plans import Plan
from autopar.prepared import prepare_program
from autopar.runtime.checkpoint import load_checkpoint, read_about, save_checkpoint
from autopar.runtime.ema import Ema
from autopar.runtime.generate import NextToken
from autopar.runtime.groups import Groups, join_mesh
from autopar.runtime.model import RankModel
from autopar.runtime.nonfinite import Skips
from autopar.runtime.optimizers import OptimizerSettings, make_optimizer
from autopar.runtime.pipeline import Pipeline
from autopar.runtime.recompute import Recompute
from autopar.runtime.schedules import Schedule
from autopar.runtime.store import Entry, ParameterStore, Zero
from autopar.runtime.trainer import StepResult, Trainer

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Compiled:
    """A planned model: its plan, the program each rank runs, and, once processes run, the training step.

    Attributes: `plan`; `rank_program`; `optimizer` (AdamW by default; set any torch optimizer over
    `parameters.values()`); `max_norm` (gradients are clipped to this global norm, None for never).
    """

    def __init__(self, plan: Plan, source: ModelSource, rank_program: RankProgram, use_compile: bool) -> None:
        self.plan, self.rank_program, self._source, self._use_compile = (
            plan,
            rank_program,
            source,
            use_compile,
        )
        self._trainer: Trainer | None = None

    def on_rank(self) -> Compiled:
        """The same, not yet started: for each of several ranks in one process (`autopar.runtime.simulate`)."""
        return Compiled(self.plan, self._source, self.rank_program, self._use_compile)

    def start(
        self,
        *,
        lr: float = 3e-4,
        weight_decay: float = 0.0,
        max_norm: float | None = 1.0,
        optimizer: OptimizerSettings | Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
        schedule: Schedule | None = None,
        ema: float | None = None,
        skips: int = 3,
        timeout_s: float = 300.0,
    ) -> Compiled:
        """Join the mesh and take this rank's share of the weights (called by the first step if not before).

        lr, weight_decay  of AdamW, which leaves norms and biases undecayed, where no `optimizer` is given
        optimizer         OptimizerSettings (by name), or what makes a torch optimizer of a list of local parameters
        schedule          what learning rates are multiplied by; without one they are yours to change
        ema               keep an average of the weights that keeps this much of itself per step (0.999)
        skips             how many steps in a row may be skipped for values that are not finite, before it is an error
        """
        if self._trainer is not None:
            return self
        stages = self.stages
        groups = join_mesh(self.plan.whole_mesh, timeout_s=timeout_s)
        model = self._on_ranks(groups, stages, self.whole_state())
        if not any(layout.info.trainable for layout in self.rank_program.state.values()):
            raise ModelError(
                "the model has no trainable parameter",
                where=self._source.name,
                hint="parameter.requires_grad_(True) for those to train",
            )
        settings = OptimizerSettings(lr=lr, weight_decay=weight_decay) if optimizer is None else optimizer
        try:
            chosen = self._optimizer(model.store, settings)
        except ValueError as error:  # torch's check of the learning rate and the like
            raise UsageError(f"the optimizer refuses its settings: {error}", hint="lr=3e-4") from error
        self._trainer = Trainer(
            model,
            chosen,
            micro_batches=self.plan.data.micro_batches,
            max_norm=max_norm,
            schedule=schedule,
            ema=None if ema is None else Ema(model.store, ema),
            skips=Skips(skips),
        )
        return self

    def whole_state(self) -> Mapping[str, Tensor]:
        """The model's whole tensors by its own names, as training begins; without weights of its own, drawn now."""
        module = self._source.load() if self._source.load is not None else self._source.build()
        return state_of(module, self.rank_program.constants)

    def _optimizer(
        self,
        store: ParameterStore,
        wanted: OptimizerSettings | Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ) -> torch.optim.Optimizer:
        if isinstance(wanted, OptimizerSettings):
            return make_optimizer(wanted, store, self.rank_program, known=self.rank_program.state)
        trainable = [parameter for parameter in store.parameters.values() if parameter.requires_grad]
        return wanted(trainable or [nn.Parameter(torch.zeros(0))])  # a stage may have none

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The pipeline's stages, all ranks' together; one where there is no pipeline. Raises PlanError where the plan's
        cuts are not those of the model."""
        layout = self.plan.parsed_layout
        try:
            return cut_stages(self.rank_program, layout.cuts or layout.pp * layout.vpp)
        except UsageError as error:
            raise PlanError(error.what, where="plan.layout", hint=error.hint) from None

    def _on_ranks(
        self, groups: Groups, stages: tuple[Stage, ...], state: Mapping[str, Tensor]
    ) -> RankModel | Pipeline:
        """What this rank runs, with its share of `state`."""
        layout = self.plan.parsed_layout
        kept = Recompute(layout.recompute, layout.recompute_layers, layout.offload in ("activations", "all"))
        zero = None
        if self.plan.layout is not None:
            axes = zero_axes(layout, self.plan.run_mesh)
            zero = Zero(layout.zero, axes, layout.offload in ("optimizer", "all"))
        if layout.pp == 1:
            store = ParameterStore(self.rank_program, groups, state, zero=zero)
            return RankModel(self.rank_program, groups, store, compiled=self._use_compile, recompute=kept)
        return Pipeline(
            self.rank_program,
            stages,
            groups,
            state,
            schedule=layout.schedule,
            micro_batches=self.plan.data.micro_batches,
            recompute=kept,
            compiled=self._use_compile,
            zero=zero,
        )

    @property
    def trainer(self) -> Trainer:
        self.start()
        assert self._trainer is not None
        return self._trainer

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's share of every parameter, by name of the program's state: of a packed parameter (fused query,
        key and value) one per piece, `h.0.attn.c_attn.weight[:, 0:64]`."""
        return self.trainer.model.store.parameters

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The model's own names of the parameters it trains or reads here: those `whole_gradient` takes."""
        return tuple(self.trainer.model.store.parts)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.trainer.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.trainer.optimizer = optimizer

    @property
    def max_norm(self) -> float | None:
        return self.trainer.max_norm

    @max_norm.setter
    def max_norm(self, max_norm: float | None) -> None:
        self.trainer.max_norm = max_norm

    def train_step(self, batch: Mapping[str, Tensor]) -> StepResult:
        """One optimizer step on a whole batch (every rank is given the same one and takes its piece)."""
        return self.trainer.step(batch)

    def whole_gradient(self, name: str) -> Tensor:
        """The unsharded gradient of a parameter, after `trainer.gradients(batch)`. All ranks must call it."""
        store = self.trainer.model.store
        if name in store.entries and name not in store.parts:  # a piece of a packed parameter
            return store.whole(name, _gradient_of(store.entries[name]))
        if name not in store.parts:
            raise UsageError(
                f"the program has no parameter {name!r}", hint=f"a name such as {next(iter(store.parts))}"
            )
        return store.whole_parameter(name, _gradient_of)

    def save(self, folder: str | Path) -> None:
        """Save parameters, buffers, optimizer and step as `folder/step-N`, in pieces. All ranks must call it."""
        about = {"model": self.plan.model.name, "fingerprint": self.plan.model.fingerprint}
        save_checkpoint(Path(folder), self.trainer, about=about)

    def load(self, folder: str | Path) -> None:
        """Go on from a checkpoint, or the newest of a run's folder, of this plan or another one for the same model. All
        ranks must call it."""
        about = read_about(Path(folder))
        if about.get("fingerprint", self.plan.model.fingerprint) != self.plan.model.fingerprint:
            raise PlanError(
                f"the checkpoint is of another model: {about.get('model')}, the plan is for {self.plan.model.name}",
                where=str(folder),
                hint="the checkpoint of a run of this model",
            )
        load_checkpoint(Path(folder), self.trainer)


def generator(
    model: str | nn.Module | PretrainedConfig | ModelSource, processes: int, *, rows: int, length: int
) -> RankModel:
    """A model's forward, placed over `processes` ranks by tensor parallelism, for `runtime.generate.generate`.

    `rows` prompts of at most `length` tokens, new ones included. Every rank must call it.
    """
    source = source_of(model)
    module = source.load() if source.load is not None else source.build()
    module.requires_grad_(False)
    wrapped = NextToken(module)
    inputs = {
        "input_ids": torch.zeros(rows, length, dtype=torch.int64),
        "last": torch.zeros(rows, dtype=torch.int64),
    }
    program = capture(wrapped, inputs, outputs=("logits",), name=source.name)
    prepared = prepare_program(program, lambda _: None, None)
    mesh = Mesh.of({"dp": 1, "fsdp": 1, "tp": processes})
    cluster = load_cluster(f"cpu:{processes}")
    solution = solve(prepared.problem, mesh, Prices.of(cluster, mesh, "fp32", prepared.problem))
    rank_program = lower(prepared.program, prepared.problem, solution, mesh)
    groups = join_mesh(mesh)
    return RankModel(
        rank_program, groups, ParameterStore(rank_program, groups, state_of(wrapped, program.constants))
    )


def _gradient_of(entry: Entry) -> Tensor:
    gradient = entry.parameter.grad
    return torch.zeros_like(entry.parameter) if gradient is None else gradient


def state_of(module: nn.Module, constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = dict(constants)
    state.update(module.named_buffers(remove_duplicate=False))
    state.update(module.named_parameters(remove_duplicate=False))
    return state
