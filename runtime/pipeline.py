"""The pipeline: a program cut into stages, each on its ranks, run by one of torch's schedules.

In:  a RankProgram of one stage's mesh, its Stages, Groups of the whole mesh (with an axis `pp`), a schedule.
Out: `Pipeline`: forward and backward of all micro-batches over all stages, as a RankModel does them on its own.

    loop (gpipe, 1f1b, interleaved, zb-h1)     V (zbv, dualpipev)
      rank 0: stages 0, 2                        rank 0: stages 0, 3
      rank 1: stages 1, 3                        rank 1: stages 1, 2

State that several stages read (tied embeddings) lies once on each rank that has one of them; ranks sum its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from autopar.errors import PlanError, TrainingError, UsageError
from autopar.mesh import Mesh
from autopar.passes.lower import RankProgram
from autopar.passes.stages import Crossing, Stage
from autopar.runtime.gradients import Gradients
from autopar.runtime.groups import Groups
from autopar.runtime.model import check_loss, functions_of
from autopar.runtime.recompute import Recompute
from autopar.runtime.stage import StageModel
from autopar.runtime.store import ParameterStore, Zero

PP = "pp"
V_SHAPED = ("zbv", "dualpipev")
ZERO_BUBBLE = ("zb-h1", *V_SHAPED)
_MULTI: Mapping[str, type[PipelineScheduleMulti]] = {
    "gpipe": ScheduleLoopedBFS,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
SCHEDULES = ("gpipe", "1f1b", *(name for name in _MULTI if name != "gpipe"))


@dataclass(frozen=True)
class Timetable:
    """A schedule by name, over `stages` (virtual ones, all ranks together)."""

    schedule: str = "gpipe"
    stages: int = 2

    def of_rank(self, index: int, ranks: int) -> tuple[int, ...]:
        """The stages of the pipeline's rank `index`, of `ranks`."""
        if self.schedule in V_SHAPED:
            return (index, 2 * ranks - 1 - index)
        return tuple(range(index, self.stages, ranks))

    def check(self, ranks: int, micro_batches: int, *, compiled: bool = False) -> None:
        """Raise UsageError for what the schedule cannot do."""
        where, rounds = f"schedule {self.schedule}", max(1, micro_batches // ranks)
        wanted = 2 * ranks if self.schedule in V_SHAPED else self.stages
        if self.schedule not in SCHEDULES:
            raise UsageError(f"unknown schedule {self.schedule!r}", hint=f"one of {', '.join(SCHEDULES)}")
        if self.stages % ranks or self.stages != wanted or (self.schedule == "1f1b" and self.stages != ranks):
            raise UsageError(
                f"{self.stages} stages on {ranks} ranks of a pipeline",
                where=where,
                hint=_chunks(self.schedule),
            )
        if self.schedule in ("interleaved", "zb-h1") and micro_batches % rounds:
            raise UsageError(
                f"{micro_batches} micro-batches on {ranks} pipeline ranks",
                where=where,
                hint=f"a multiple of {ranks}",
            )
        if self.schedule == "dualpipev" and micro_batches < self.stages:
            raise UsageError(
                f"{micro_batches} micro-batches for {self.stages} stages",
                where=where,
                hint=f"{self.stages} or more",
            )
        if compiled and self.schedule in ZERO_BUBBLE:
            raise UsageError(
                "torch.compile makes one step of backward of a block, which a zero-bubble schedule takes apart",
                where=where,
                hint="1f1b or interleaved, or without --compile",
            )


def _chunks(schedule: str) -> str:
    if schedule in V_SHAPED:
        return "vpp=2"
    return "vpp=1" if schedule == "1f1b" else "a whole number of stages for each rank"


def pipeline_mesh(mesh: Mesh, ranks: int) -> Mesh:
    """The mesh of a pipeline of `ranks` times the ranks of one stage, pp outermost."""
    return Mesh.of({PP: ranks, **mesh.sizes})


class Pipeline:
    """This rank's stages under a schedule, and its share of their state.

    `program`: the whole one, of which `stages` are the pieces. `store`: the state of this rank's stages.
    """

    def __init__(
        self,
        program: RankProgram,
        stages: Sequence[Stage],
        groups: Groups,
        state: Mapping[str, Tensor],
        *,
        schedule: str = "gpipe",
        micro_batches: int = 1,
        recompute: Recompute | bool = False,
        compiled: bool = False,
        zero: Zero | None = None,
    ) -> None:
        self.program, self.groups = program, groups
        self.ranks, self.index = groups.mesh.sizes[PP], groups.coordinate[PP]
        self.micro_batches = micro_batches
        table = Timetable(schedule, len(stages))
        table.check(self.ranks, micro_batches, compiled=compiled)
        own = [stages[number] for number in table.of_rank(self.index, self.ranks)]
        held = {name: layout for stage in own for name, layout in stage.program.state.items()}
        self.store = ParameterStore(replace(program, state=held), groups, state, zero=zero)
        functions = functions_of(program, groups, compiled=compiled)
        self.models = [
            StageModel(stage, groups, self.store, functions=functions, recompute=recompute) for stage in own
        ]
        self.shared = _shared(stages, table, self.ranks)
        self.last = next(
            rank for rank in range(self.ranks) if len(stages) - 1 in table.of_rank(rank, self.ranks)
        )
        self.schedule = self._schedule(
            table, [self._torch_stage(model, len(stages)) for model in self.models]
        )

    def _torch_stage(self, model: StageModel, count: int) -> PipelineStage:
        stage, device = model.stage, self.groups.device
        loss = (torch.empty((), device=device, requires_grad=True),)
        return PipelineStage(
            model,
            stage.index,
            count,
            device,
            input_args=tuple(_like(each, device) for each in stage.receives),
            output_args=loss if stage.is_last else tuple(_like(each, device) for each in stage.sends),
            group=self.groups.group[PP],
        )

    def _schedule(self, table: Timetable, stages: list[PipelineStage]) -> Any:
        options: dict[str, Any] = {
            "n_microbatches": self.micro_batches,
            "loss_fn": _loss,
            "scale_grads": False,
        }
        multi = _MULTI.get(table.schedule)
        if len(stages) > 1 or (multi is not None and table.schedule != "gpipe"):
            assert multi is not None
            return multi(stages, **options)  # type: ignore[arg-type]
        # With fewer micro-batches than stages, 1F1B never has one forward and one backward to alternate.
        alternate = table.schedule == "1f1b" and self.micro_batches >= table.stages
        single: type[PipelineScheduleSingle] = Schedule1F1B if alternate else ScheduleGPipe
        return single(stages[0], **options)

    def gradients(self) -> Gradients:
        """For the gradients of this rank's state; those of shared state are summed over the ranks that have it."""
        ours = {name: members for name, members in self.shared.items() if self.index in members}
        groups: dict[tuple[int, ...], Any] = {}
        for members in sorted(set(ours.values())):
            ranks = [self._peer(member) for member in members]
            groups[members] = dist.new_group(ranks, use_local_synchronization=True)
        return Gradients(
            self.store,
            shared={name: groups[members] for name, members in ours.items() if name in self.store.entries},
            counted_elsewhere={name for name, members in ours.items() if members[0] != self.index},
            whole=self.groups.span([PP]),
        )

    def _peer(self, index: int) -> int:
        """The rank at this one's place in the pipeline's rank `index`."""
        return self.groups.mesh.group_ranks(PP, self.groups.rank)[index]

    def accumulate(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> tuple[float, float]:
        """Forward and backward of whole micro-batches over all stages; returns the sum of their weighted losses, and
        of the weights, on every rank. Raises NonFiniteError for a loss that is not finite."""
        for model in self.models:
            model.load(micro_batches)
        numbers = torch.arange(self.micro_batches)
        try:
            self.schedule.step(number=numbers, target=numbers, return_outputs=False)
        except RuntimeError as error:
            cause = error.__cause__
            if isinstance(cause, (TrainingError, PlanError)):
                raise cause from None
            raise
        found = torch.zeros(self.micro_batches, 2, dtype=torch.float64, device=self.groups.device)
        if self.index == self.last:
            losses = self.models[-1].losses
            found.copy_(
                torch.tensor([losses[number] for number in range(self.micro_batches)], dtype=found.dtype)
            )
        dist.broadcast(found, self._peer(self.last), group=self.groups.group[PP])
        total, weights = 0.0, 0.0
        for number, (value, weight) in enumerate(found.tolist()):
            if weight:
                check_loss(value, number, self.micro_batches)
                total += value * weight
                weights += weight
        return total, weights


def _loss(output: Any, target: Tensor) -> Tensor:
    """The last stage has weighted it."""
    loss: Tensor = output[0] if isinstance(output, (tuple, list)) else output
    return loss


def _like(each: Crossing, device: torch.device) -> Tensor:
    return torch.empty(
        each.shape, dtype=getattr(torch, each.dtype), device=device, requires_grad=each.gradient
    )


def _shared(stages: Sequence[Stage], table: Timetable, ranks: int) -> dict[str, tuple[int, ...]]:
    """State of several pipeline ranks -> which. (Of several stages of one rank there is one.)"""
    rank_of = {number: rank for rank in range(ranks) for number in table.of_rank(rank, ranks)}
    found: dict[str, set[int]] = {}
    for stage in stages:
        for name in stage.shared:
            found.setdefault(name, set()).add(rank_of[stage.index])
    return {name: tuple(sorted(members)) for name, members in found.items() if len(members) > 1}
