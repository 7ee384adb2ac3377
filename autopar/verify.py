"""Verify: a sharded step of a model against the unsharded one, before a cluster is paid for.

In:  a model, and a mesh, constraints or a plan.
Out: a Verification: how far loss, every gradient, the norm, buffers and the loss after an optimizer step are from
     those of the model itself, run as PyTorch or Transformers run it.

A Transformers model is checked on a copy shrunk by rule: every mechanism is there, the sizes are not. All ranks run
in this process, as threads. Numbers are float32: with bf16's rounding an error could not be told from it.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autopar import api
from autopar.cluster import Cluster, load_cluster
from autopar.errors import ModelError, UsageError
from autopar.mesh import Mesh
from autopar.models.huggingface import AUTO_CLASS, build_from_config
from autopar.models.model_source import ModelSource
from autopar.models.source import find_model
from autopar.passes.axes import name_axes
from autopar.passes.capture import capture
from autopar.passes.combinations import data_ways
from autopar.passes.lower import lower
from autopar.passes.problem import build_problem
from autopar.passes.transfer import transfer
from autopar.plans import Plan, fingerprint
from autopar.runtime.simulate import simulate

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BATCH, SEQ = 8, 16
TOLERANCE = 1e-4
MOST_PARAMETERS = 300_000_000  # the check holds the model once more for every rank
MOST_RANKS = 32
IGNORED = -100  # the label that torch's cross-entropy ignores

Progress = Callable[[str], None]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Gradient:
    """How far the gradient of one parameter is off: the norm of the difference, relative to the gradient's own."""

    name: str
    error: float
    sharding: str


@dataclass(frozen=True)
class Verification:
    """Relative errors of the sharded model: `loss`, `gradient` (of `worst`, the parameter it is worst for), `norm`,
    `buffers`, and `next_loss`, the loss after an optimizer step. The largest of all ranks.

    `gradients`: of every parameter, worst first. `what`: what was compared. `notes`: where it differs from what was
    asked for. `passed`: every error is at most `tolerance`.
    """

    model: str
    what: str
    mesh: str
    loss: float
    gradient: float
    worst: str
    norm: float
    buffers: float
    next_loss: float
    tolerance: float
    gradients: tuple[Gradient, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def errors(self) -> dict[str, float]:
        return {
            "loss": self.loss,
            "worst gradient": self.gradient,
            "gradient norm": self.norm,
            "buffers": self.buffers,
            "loss after a step": self.next_loss,
        }

    @property
    def passed(self) -> bool:
        return all(error <= self.tolerance for error in self.errors.values())

    def __str__(self) -> str:
        return self.page()

    def page(self) -> str:
        """What a person reads."""
        lines = [
            f"{self.model} on {self.mesh}, {Mesh.parse(self.mesh).device_count} simulated ranks, "
            "against the unsharded model",
            self.what,
            "",
            f"  {'':20s} relative error",
        ]
        for name, error in self.errors.items():
            verdict = "ok" if error <= self.tolerance else "WRONG"
            of = f"  {self.worst}" if name == "worst gradient" else ""
            lines.append(f"  {name:20s} {error:14.1e}  {verdict}{of}")
        wrong = [found for found in self.gradients if not found.error <= self.tolerance]
        if wrong:
            lines += ["", f"  {len(wrong)} of {len(self.gradients)} gradients are wrong, most of all"]
            lines += [f"    {found.name} {found.sharding}: {found.error:.1e}" for found in wrong[:5]]
        lines += ["", *(f"note: {note}" for note in self.notes)]
        verdict = f"passed: every error is at most {self.tolerance:g}"
        if not self.passed:
            verdict = f"FAILED: an error is above {self.tolerance:g}\n  try {self._hint(bool(wrong))}"
        return "\n".join([*lines, f"{verdict} ({self.seconds:.1f} s)"])

    def _hint(self, gradients: bool) -> str:
        axes = [axis for axis, size in Mesh.parse(self.mesh).axes if size > 1]
        if len(axes) > 1:
            return f"each axis alone ({', '.join(f'--mesh {axis}=2 --cluster cpu:2' for axis in axes)}): "
            "one that fails splits what it must not"
        if gradients:
            return (
                "--fix with that parameter whole ('NAME=[_, _]'): if it then passes, the rule of the op that "
                "reads it is wrong"
            )
        return "autopar plan ... --dump FOLDER, and to read 4-lowered.txt around the ops of your own rules"


def verify(
    model: str | nn.Module | PretrainedConfig | ModelSource,
    cluster: str | Path | Cluster = "cpu:4",
    *,
    plan: Plan | str | Path | None = None,
    mesh: str | Mesh | None = None,
    fix: Sequence[str] = (),
    batch: int | None = None,
    seq: int | None = None,
    example_inputs: Mapping[str, Tensor] | None = None,
    shrink: bool = True,
    tolerance: float = TOLERANCE,
    seed: int = 0,
    progress: Progress | None = None,
) -> Verification:
    """Compare a sharded step with the unsharded one.

    model           as for `autopar.plan`
    cluster         how many ranks; with a plan the plan's mesh, each axis at 2, is taken instead
    plan            check this plan's placement; one for the large model is carried over to the small copy by name
    mesh, fix       as for `autopar.plan`
    batch, seq      of the comparison (default 8 and 16)
    example_inputs  inputs of your own; the model is then not shrunk
    shrink          False: the model as it is
    tolerance       the largest relative error that passes

    Raises an AutoparError where the model cannot be run sharded at all.
    """
    tell = progress or (lambda _: None)
    began = time.perf_counter()
    if plan is not None and (mesh is not None or fix):
        raise UsageError(
            "a plan has its mesh and its placement", hint="to leave mesh and fix out, or the plan"
        )
    chosen = None if plan is None else plan if isinstance(plan, Plan) else Plan.load(plan)
    source = model if isinstance(model, ModelSource) else find_model(model)
    ranks = _small_mesh(chosen.parsed_mesh) if chosen else None
    devices = ranks.device_count if ranks else load_cluster(cluster).device_count
    if devices > MOST_RANKS:
        raise UsageError(
            f"{devices} ranks are too many to simulate here", hint=f"--cluster cpu:4 (at most {MOST_RANKS})"
        )
    tell(f"building {source.name}")
    subject = _subject(source, example_inputs, batch, seq, shrink, devices, seed)
    notes = list(subject.notes)
    if chosen is None:
        made = api.compile(
            subject.source,
            f"cpu:{devices}",
            subject.inputs,
            mesh=mesh,
            fix=fix,
            micro_batches=1,
            precision="fp32",
            progress=progress,
        )
    else:
        assert ranks is not None
        made, more = _carried_over(chosen, ranks, subject, tell)
        notes += more
    tell(f"running {devices} ranks")
    errors = _compare(subject, made, devices)
    gradients = sorted(errors["gradients"].items(), key=lambda item: -_rank_of(item[1]))
    layouts = made.rank_program.state
    worst, largest = gradients[0] if gradients else ("", 0.0)
    return Verification(
        model=source.name,
        what=subject.what,
        mesh=str(made.rank_program.mesh),
        loss=errors["loss"],
        gradient=largest,
        worst=worst,
        norm=errors["norm"],
        buffers=errors["buffers"],
        next_loss=errors["next_loss"],
        tolerance=tolerance,
        gradients=tuple(
            Gradient(
                name,
                error,
                layouts[name].sharding.format(layouts[name].info.shape) if name in layouts else "",
            )
            for name, error in gradients
        ),
        notes=tuple(notes),
        seconds=time.perf_counter() - began,
    )


# ---- what is compared --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Subject:
    """The model as it is compared: one module with its weights, and a whole batch."""

    source: ModelSource
    module: nn.Module
    inputs: dict[str, Any]
    what: str
    notes: tuple[str, ...]


def _subject(
    source: ModelSource,
    example_inputs: Mapping[str, Tensor] | None,
    batch: int | None,
    seq: int | None,
    shrink: bool,
    ways: int,
    seed: int,
) -> _Subject:
    small = shrink and example_inputs is None and source.config is not None and source.task in AUTO_CLASS
    notes: list[str] = []
    torch.manual_seed(seed)
    if small:
        from autopar.models.shrink import shrink as shrunk

        config = shrunk(source.config, ways=_ways(ways))
        module = build_from_config(config, source.task, source.name)
        inputs = dict(find_model(config).example_inputs(batch or BATCH, seq or SEQ))
    else:
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in source.build().parameters())
        if count > MOST_PARAMETERS:
            raise UsageError(
                f"{source.name} has {count:,} parameters; the check holds them once per rank and once more",
                hint="a function that makes a small one of the same kind"
                + ("" if shrink or source.config is None else ", or shrink=True"),
            )
        module = copy.deepcopy(source.load() if source.load is not None else source.build())
        inputs = dict(
            source.example_inputs(batch or BATCH, seq or SEQ) if example_inputs is None else example_inputs
        )
    module = module.float() if not _has_double(module) else module
    ignored = _ignore_unevenly(inputs, source.task) if example_inputs is None else False
    count = sum(parameter.numel() for parameter in module.parameters())
    shapes = ", ".join(
        f"{name} {list(value.shape)}" for name, value in inputs.items() if isinstance(value, Tensor)
    )
    what = f"{'a shrunken copy' if small else 'the model itself'}: {count:,} parameters; {shapes}"
    if ignored:
        what += "; labels ignored unevenly"
    return _Subject(
        replace(find_model(module), name=source.name, task=source.task), module, inputs, what, tuple(notes)
    )


def _ways(devices: int) -> int:
    """What sizes are to divide by: one axis may have all devices."""
    return min(max(2, devices), 8)


def _has_double(module: nn.Module) -> bool:
    return any(parameter.dtype == torch.float64 for parameter in module.parameters())


def _ignore_unevenly(inputs: dict[str, Any], task: str) -> bool:
    """Rows, and so ranks, get unequal numbers of labels that count: a mean of means then is not the mean."""
    labels = inputs.get("labels")
    if (
        task not in ("causal-lm", "masked-lm", "seq2seq")
        or not isinstance(labels, Tensor)
        or labels.dim() != 2
    ):
        return False
    labels = labels.clone()
    for row in range(labels.shape[0]):
        labels[row, : row * (labels.shape[1] - 2) // max(1, labels.shape[0] - 1)] = IGNORED
    inputs["labels"] = labels
    return True


# ---- how it is placed ---------------------------------------------------------------------------------------------


def _small_mesh(mesh: Mesh) -> Mesh:
    """Every axis that the plan splits by, at 2: a split in two shows what a split in many does."""
    return Mesh.of({axis: min(size, 2) for axis, size in mesh.axes if axis != "pp"})


def _carried_over(
    plan: Plan, mesh: Mesh, subject: _Subject, tell: Progress
) -> tuple[api.Compiled, tuple[str, ...]]:
    """The plan itself where it is for this very model and batch; else its placement, carried over by name."""
    rows = next(
        value.shape[0] for value in subject.inputs.values() if isinstance(value, Tensor) and value.dim()
    )
    tell("capturing")
    program = capture(_on_meta(subject.module), _on_meta_inputs(subject.inputs), name=subject.source.name)
    if (
        fingerprint(program) == plan.model.fingerprint
        and rows == plan.data.batch
        and plan.why_not_run() is None
        and plan.precision == "fp32"
        and plan.parsed_mesh.device_count <= MOST_RANKS
    ):
        return api.compile(subject.source, example_inputs=subject.inputs, plan=plan, progress=tell), ()
    program, axes = name_axes(program)
    problem = build_problem(program, axes)
    ways = data_ways(mesh)
    if rows % ways:
        raise UsageError(
            f"batch {rows} does not divide over the {ways} data ranks of the plan", hint=f"--batch {ways}"
        )
    solution, notes = transfer(plan, problem, mesh)
    tell("lowering")
    program_of_rank = lower(program, problem, solution, mesh)
    data = plan.data.model_copy(update={"micro_batches": 1, "batch": rows})
    small = plan.model_copy(update={"data": data, "mesh": str(mesh)})
    said = [f"the plan is for {plan.mesh}, the check ran its placement on {mesh}, in one micro-batch"]
    if plan.parsed_mesh.sizes.get("pp", 1) > 1:
        said.append(
            f"pp={plan.parsed_mesh.sizes['pp']} is not part of this check: all layers are on every rank"
        )
    if plan.precision != "fp32":
        said.append(f"in float32 and not in {plan.precision}, whose rounding would hide an error")
    return api.Compiled(small, subject.source, program_of_rank, False), (*said, *notes)


def _on_meta(module: nn.Module) -> nn.Module:
    with torch.device("meta"):
        return find_model(module).build()


def _on_meta_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in inputs.items()}


# ---- the comparison -----------------------------------------------------------------------------------------------


def _rank_of(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _relative(found: float, expected: float) -> float:
    if found == expected:
        return 0.0
    return abs(found - expected) / max(abs(expected), 1e-12)


@dataclass
class _Expected:
    """What the unsharded model gives. `names`: of each parameter all that it goes by (tied ones have several)."""

    loss: float
    gradients: dict[str, Tensor | None]
    names: list[tuple[str, ...]]
    norm: float
    rate: float
    next_loss: float
    buffers: dict[str, Tensor]


def _compare(subject: _Subject, made: api.Compiled, devices: int) -> dict[str, Any]:
    """The largest error of any rank, by what it is of."""
    expected = _unsharded(subject)
    found = simulate(devices, lambda rank: _errors(made.on_rank(), subject.inputs, expected), timeout_s=600)
    result: dict[str, Any] = {
        name: max((each[name] for each in found), key=_rank_of)
        for name in ("loss", "norm", "buffers", "next_loss")
    }
    result["gradients"] = {
        name: max((each["gradients"][name] for each in found), key=_rank_of) for name in found[0]["gradients"]
    }
    return result


def _unsharded(subject: _Subject) -> _Expected:
    """Two steps of the model itself, with plain PyTorch."""
    module = copy.deepcopy(subject.module)
    training = [part for part in module.modules() if isinstance(part, _BATCH_NORMS) and part.training]
    module.eval()  # no dropout; batch norms keep their mode, as in capture
    for part in training:
        part.train()
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    loss = _loss(module, subject.inputs)
    if not bool(torch.isfinite(loss.detach())):
        raise ModelError(
            f"the loss of the unsharded model is {float(loss.detach())}",
            where=subject.source.name,
            hint="inputs of your own (example_inputs=...), or weights that give a finite loss",
        )
    loss.backward()
    names: dict[int, list[str]] = {}
    gradients: dict[str, Tensor | None] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        gradients[name] = None if parameter.grad is None else parameter.grad.clone()
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    norm = float(nn.utils.clip_grad_norm_(parameters, 1.0))
    size = float(torch.stack([parameter.detach().norm() for parameter in parameters]).norm())
    rate = 0.01 * size / max(min(norm, 1.0), 1e-12)  # weights move by a hundredth of their size
    torch.optim.SGD(parameters, lr=rate).step()
    with torch.no_grad():
        next_loss = float(_loss(module, subject.inputs))
    every = [tuple(group) for group in names.values()]
    return _Expected(float(loss.detach()), gradients, every, norm, rate, next_loss, buffers)


def _loss(module: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    output = module(**inputs)
    found = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    if found is None and isinstance(output, (tuple, list)):
        found = output[0]
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise ModelError(
            f"the model's forward returns no loss but {type(output).__name__}",
            hint="labels among the inputs, and an output whose `loss` is one number",
        )
    return found


def _errors(run: api.Compiled, inputs: Mapping[str, Any], expected: _Expected) -> dict[str, Any]:
    """What one rank sees; it takes part in every collective, whatever it finds."""
    run.start(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=expected.rate), max_norm=1.0)
    trainer, store = run.trainer, run.trainer.model.store
    batch = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    loss = trainer.gradients(batch)
    norm = float(trainer.gradient_norm())
    present = [gradient for gradient in expected.gradients.values() if gradient is not None]
    largest = max((float(gradient.norm()) for gradient in present), default=0.0)
    gradients: dict[str, float] = {}
    seen: set[str] = set()
    for name, entry in store.entries.items():
        found = run.whole_gradient(name)
        source = entry.layout.info.source(name)
        seen.add(source)
        whole = expected.gradients.get(source)
        wanted = torch.zeros_like(found) if whole is None else entry.layout.info.take(whole)
        # A gradient that is zero but for rounding (of a key's bias: softmax does not see it) is measured against
        # the largest of the model.
        scale = max(float(wanted.norm()), 1e-4 * largest, 1e-30)
        gradients[name] = float((found - wanted).norm()) / scale
    for names in expected.names:  # a parameter that the sharded model does not know must not have a gradient
        gradient = expected.gradients[names[0]]
        if seen.isdisjoint(names) and gradient is not None and bool(gradient.any()):
            gradients[names[0]] = 1.0
    buffers = 0.0
    for name, buffer in expected.buffers.items():
        if name in store.buffers and buffer.is_floating_point():
            off = float((store.whole_buffer(name) - buffer).norm()) / max(float(buffer.norm()), 1e-30)
            buffers = max(buffers, off, key=_rank_of)
    trainer.optimizer.zero_grad(set_to_none=True)
    trainer.step(batch)
    next_loss = trainer.gradients(batch)
    return {
        "loss": _relative(loss, expected.loss),
        "norm": _relative(norm, expected.norm),
        "buffers": buffers,
        "next_loss": _relative(next_loss, expected.next_loss),
        "gradients": gradients,
    }
