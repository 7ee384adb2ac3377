"""The Python interface: plan, compile, load_plan; Compiled.

import autopar
plan = autopar.plan("llama-3.1-8b", "h100:8x8", batch=128, seq=8192)     # no GPU, nothing allocated
print(plan)

compiled = autopar.compile(model, "cpu:4", example_inputs)               # under torchrun
for batch in batches:
    print(compiled.train_step(batch).loss)
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autopar.cluster import Cluster, load_cluster
from autopar.cost.software import default_software, load_software
from autopar.errors import ModelError, PlanError, ShardingError, UsageError
from autopar.layout import Layout
from autopar.layout_check import filled
from autopar.mesh import Mesh
from autopar.models.model_source import ModelSource
from autopar.models.source import find_model
from autopar.nested import flat_inputs, map_inputs, map_named
from autopar.passes.axes import name_axes
from autopar.passes.capture import capture
from autopar.passes.check import check
from autopar.passes.combinations import AXES as MESH_AXES
from autopar.passes.combinations import mesh_of
from autopar.passes.decisions import is_decision, parse_decisions
from autopar.passes.describe import describe
from autopar.passes.layout_plan import layout_words, plan_layout
from autopar.passes.lower import RankProgram, lower
from autopar.passes.placement import solve
from autopar.passes.problem import build_problem
from autopar.passes.propagate import check_fixed, parse_constraint, propagate
from autopar.passes.restore import solution_of
from autopar.passes.search import search
from autopar.plans import Plan, fingerprint
from autopar.pricing_page import Pricing, price_layout
from autopar.problem import Problem
from autopar.program import Program, batch_dim, batch_of, tensor_info
from autopar.runtime.checkpoint import load_checkpoint, read_about, save_checkpoint
from autopar.runtime.generate import NextToken
from autopar.runtime.groups import join_mesh
from autopar.runtime.model import RankModel
from autopar.runtime.store import Entry, ParameterStore
from autopar.runtime.trainer import StepResult, Trainer
from autopar.workload import Workload, check_sizes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Progress = Callable[[str], None]

SPACES = ("runtime", "all")
DTYPES: Mapping[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}


def plan(
    model: str | nn.Module | PretrainedConfig | ModelSource,
    cluster: str | Path | Cluster,
    *,
    batch: int | None = None,
    seq: int | None = None,
    example_inputs: Mapping[str, Tensor] | Sequence[Tensor] | None = None,
    fix: Sequence[str] = (),
    mesh: str | Mesh | None = None,
    micro_batches: int | None = None,
    recompute: str | None = None,
    precision: str | None = None,
    forbid: Sequence[str] = (),
    space: str | None = None,
    objective: str = "time",
    dump: str | Path | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The fastest plan found for training `model` on `cluster` that fits in memory.

    model          a published name, checkpoint folder, `file.py:function`, module or Transformers config
    cluster        `h100:64x8`, `cpu:4`, `local`, a YAML file or a Cluster
    batch, seq     sequences per step over the whole cluster, and tokens per sequence (default: the example's,
                   else 8 and 128)
    fix, forbid    constraints: `tp=8`, `pp<=4`, `schedule=1f1b` (any field of a Layout); in `fix` also
                   `heads=tp`, `model.layers.*.mlp.up_proj.weight=[_@tp, _]`
    mesh           sizes to use instead of searching: `dp=2,fsdp=1,tp=2`
    micro_batches, recompute, precision (default fp32 on cpu, else bf16; `bf16|fp8` lets the planner choose)
    space          "runtime": what this version's runtime runs (data, fsdp and tensor parallel); "all": every layout
                   (pipeline, context and expert parallel, ZeRO 1-2, schedules, ...); default runtime on cpu, else all
    objective      "time", "memory" for the leanest plan, or "robust" for the least regret if the cost model's
                   constants are off (space "all")
    dump           a folder that gets the Program as text after every pass
    progress       called with a line as each pass starts

    Raises an AutoparError that says what is wrong and what to try; nothing is allocated on any device.
    """
    tell = progress or (lambda _: None)
    source = _source(model)
    where = load_cluster(cluster)
    form = _form(source, example_inputs, batch, seq)
    chosen = ("fp32" if where.device.name == "cpu" else "bf16") if precision is None else precision
    which = space or ("runtime" if where.device.name == "cpu" else "all")
    if which not in SPACES:
        raise UsageError(f"unknown space {which!r}", where="space", hint=f"one of {', '.join(SPACES)}")
    decisions = [text for text in fix if is_decision(text)]
    words = [text for text in fix if not is_decision(text)]
    captured = chosen
    if which == "all":
        captured = "fp32" if chosen.split("|")[0] == "fp32" else "bf16"
    if captured not in DTYPES:
        raise UsageError(
            f"precision {chosen!r} is none that the runtime runs",
            where="precision",
            hint=f"one of {', '.join(DTYPES)}; space='all' plans for others, and chooses among several",
        )
    constraints = [parse_constraint(text) for text in words]
    if which == "runtime":
        refused = [*decisions, *forbid, *(["objective"] if objective != "time" else [])]
        if refused:
            raise UsageError(
                f"{refused[0]!r} is a decision of the whole space",
                where="fix",
                hint="space='all', or mesh='tp=..'",
            )
        fixed_mesh = _mesh(mesh, where.device_count)
    else:
        options = layout_words(mesh, micro_batches, recompute, chosen, form.batch, where.device_count)
        decisions += options
        spoken = options if precision is not None else options[1:]  # else the default, which nobody asked for
        wanted = parse_decisions(decisions, forbid)
    prepared = _prepare(source, form, captured, tell, dump=dump)
    tell("propagating constraints")
    problem, notes = propagate(prepared.problem, prepared.program, constraints)
    if dump is not None:
        _dump(Path(dump), "problem", str(problem))
    if which == "all":
        tell("searching layouts")
        found = plan_layout(
            prepared.program, problem, where, batch=form.batch, decisions=wanted, objective=objective,
            task=source.task, shardings=words, progress=tell,
            constraints=(*fix, *spoken, *(f"not {text}" for text in forbid)),
        )  # fmt: skip
    else:
        if fixed_mesh is not None:
            check_fixed(problem, fixed_mesh, words)
        if prepared.program.fixed:
            micro_batches = _one_micro_batch(prepared.program, micro_batches)
        tell("searching")
        found = search(
            prepared.program,
            problem,
            where,
            batch=form.batch,
            seq=form.seq,
            precision=captured,
            mesh=fixed_mesh,
            micro_batches=micro_batches,
            recompute=recompute,
            constraints=tuple(fix),
            task=source.task,
            progress=progress,
        )
    found = found.model_copy(update={"notes": (*found.notes, *prepared.program.notes, *notes[:20])})
    if dump is not None:
        if found.why_not_run() is None:
            rank_program = _lower(source, form, found, tell)
            _dump(Path(dump), "lowered", str(rank_program))
        _dump(Path(dump), "plan", found.to_json())
    return found


def estimate(
    model: str | nn.Module | PretrainedConfig | ModelSource | Plan | Workload,
    cluster: str | Path | Cluster | None = None,
    *,
    layout: str | Layout | None = None,
    batch: int | None = None,
    seq: int | None = None,
    software: str | None = None,
    measured_s: float | None = None,
    progress: Progress | None = None,
) -> Pricing:
    """What one step of `model` takes in one layout, itemised: time, memory, pipeline, traffic; nothing is searched.

    model      as for `plan`; or a Plan (or the path of one, *.json), whose cluster, batch, layout and software are
               taken where they are not given; or a Workload
    layout     `tp=8,pp=16,vpp=8,zero=1,mbs=1,recompute=none,precision=bf16`; dp left out is filled in
    software   a stack of autopar/cost/software.toml (default: the newest one for the device)
    measured_s a step time to print beside the predicted one

    Raises UsageError for a layout that cannot run, and says what would. Prints as a page: `print(found.page())`.
    """
    tell = progress or (lambda _: None)
    if isinstance(model, str) and model.endswith(".json"):
        model = Plan.load(model)
    if isinstance(model, Plan):
        cluster = model.parsed_cluster if cluster is None else cluster
        batch, layout = batch or model.data.batch, layout or str(model.parsed_layout)
        software = software or model.software
        model = model.parsed_workload
    if cluster is None or layout is None:
        raise UsageError(
            f"estimate needs a {'cluster' if cluster is None else 'layout'}",
            hint="layout='tp=8,pp=4,zero=1,mbs=1' (dp is what the cluster leaves)"
            if layout is None
            else "cluster='h100:8x8'",
        )
    where = load_cluster(cluster)
    stack = load_software(software) if software is not None else default_software(where.device.name)
    chosen = filled(layout, where)
    if isinstance(model, Workload):
        check_sizes(batch or 1, seq or model.seq)
        workload = model if seq is None else model.at(seq)
    else:
        source = _source(model)
        form = _form(source, None, batch, seq)
        captured = "fp32" if chosen.precision == "fp32" else "bf16"
        prepared = _prepare(source, form, captured, tell)
        workload = describe(prepared.program, prepared.problem)
    return price_layout(workload, where, chosen, batch or 8, software=stack, measured_s=measured_s)


def describe_model(
    model: str | nn.Module | PretrainedConfig | ModelSource,
    *,
    batch: int | None = None,
    seq: int | None = None,
    precision: str = "bf16",
    progress: Progress | None = None,
) -> Workload:
    """The model as the cost model sees it, captured once; what follows from it needs no model and no torch."""
    source = _source(model)
    captured = "fp32" if precision == "fp32" else "bf16"
    prepared = _prepare(source, _form(source, None, batch, seq), captured, progress or (lambda _: None))
    return describe(prepared.program, prepared.problem)


def load_plan(path: str | Path) -> Plan:
    """Read a plan; checks all of it and runs no code. Raises PlanError."""
    return Plan.load(path)


def compile(
    model: str | nn.Module | PretrainedConfig | ModelSource,
    cluster: str | Path | Cluster | None = None,
    example_inputs: Mapping[str, Tensor] | Sequence[Tensor] | None = None,
    *,
    plan: Plan | str | Path | None = None,
    compiled: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Compiled:
    """Plan (or take a plan for) a model, and make the program that runs it.

    Takes the options of `autopar.plan`. `compiled=True` runs the blocks through torch.compile. The processes of the
    mesh must be running (torchrun) by the first `train_step`; `.plan` and `.rank_program` need none.
    """
    source = _source(model)
    if plan is None:
        if cluster is None:
            raise UsageError(
                "compile needs a cluster or a plan", hint="compile(model, 'cpu:4', example_inputs)"
            )
        from autopar.api import plan as make_plan

        runs = {"space": "runtime", **options}
        chosen = make_plan(source, cluster, example_inputs=example_inputs, progress=progress, **runs)
    else:
        chosen = plan if isinstance(plan, Plan) else Plan.load(plan)
    form = _form(source, example_inputs, chosen.data.batch, chosen.data.seq)
    return Compiled(chosen, source, _lower(source, form, chosen, progress or (lambda _: None)), compiled)


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
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
        timeout_s: float = 300.0,
    ) -> Compiled:
        """Join the mesh and take this rank's share of the weights (called by the first step if not before)."""
        if self._trainer is not None:
            return self
        groups = join_mesh(self.rank_program.mesh, timeout_s=timeout_s)
        module = self._source.load() if self._source.load is not None else self._source.build()
        store = ParameterStore(self.rank_program, groups, _state_of(module, self.rank_program.constants))
        model = RankModel(
            self.rank_program,
            groups,
            store,
            compiled=self._use_compile,
            recompute=self.plan.recompute == "full",
        )
        trainable = [parameter for parameter in store.parameters.values() if parameter.requires_grad]
        make = optimizer or (
            lambda parameters: torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay)
        )
        if not trainable:
            raise ModelError(
                "the model has no trainable parameter",
                where=self._source.name,
                hint="parameter.requires_grad_(True) for those to train",
            )
        try:
            chosen = make(trainable)
        except ValueError as error:  # torch's check of the learning rate and the like
            raise UsageError(f"the optimizer refuses its settings: {error}", hint="lr=3e-4") from error
        self._trainer = Trainer(model, chosen, micro_batches=self.plan.data.micro_batches, max_norm=max_norm)
        return self

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
        """Save parameters, optimizer and step as whole tensors. All ranks must call it."""
        about = {"model": self.plan.model.name, "fingerprint": self.plan.model.fingerprint}
        save_checkpoint(Path(folder), self.trainer, about=about)

    def load(self, folder: str | Path) -> None:
        """Go on from a saved run, of this plan or another one for the same model. All ranks must call it."""
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
    source = _source(model)
    module = source.load() if source.load is not None else source.build()
    module.requires_grad_(False)
    wrapped = NextToken(module)
    inputs = {
        "input_ids": torch.zeros(rows, length, dtype=torch.int64),
        "last": torch.zeros(rows, dtype=torch.int64),
    }
    program = capture(wrapped, inputs, outputs=("logits",), name=source.name)
    prepared = _passes(program, lambda _: None, None)
    mesh = Mesh.of({"dp": 1, "fsdp": 1, "tp": processes})
    from autopar.cost.prices import Prices

    cluster = load_cluster(f"cpu:{processes}")
    solution = solve(prepared.problem, mesh, Prices.of(cluster, mesh, "fp32", prepared.problem))
    rank_program = lower(prepared.program, prepared.problem, solution, mesh)
    groups = join_mesh(mesh)
    return RankModel(
        rank_program, groups, ParameterStore(rank_program, groups, _state_of(wrapped, program.constants))
    )


# ---- parts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Form:
    """The shapes a model is captured with: the whole batch's inputs, as tensors without storage."""

    inputs: Mapping[str, Any]
    batch: int
    seq: int

    def of_batch(self, batch: int) -> dict[str, Any]:
        """The same inputs for another number of sequences."""
        return map_named(self.inputs, lambda name, value: self._resized(name, value, batch))

    def _resized(self, name: str, value: Any, batch: int) -> Any:
        if not isinstance(value, Tensor) or not value.dim() or batch == self.batch:
            return value
        dim = batch_dim(name, tuple(value.shape))
        size, rest = divmod(value.shape[dim] * batch, self.batch)
        if rest:
            raise UsageError(
                f"{name} has {value.shape[dim]} rows for {self.batch} sequences, which cannot be cut to {batch} of them",
                hint="the same number of images (or patches) for every sequence",
            )
        copies = -(-size // value.shape[dim])
        return torch.cat([value] * copies, dim).narrow(dim, 0, size)


@dataclass(frozen=True)
class _Prepared:
    program: Program
    problem: Problem


def _source(model: str | nn.Module | PretrainedConfig | ModelSource) -> ModelSource:
    return model if isinstance(model, ModelSource) else find_model(model)


def _by_name(
    source: ModelSource, example_inputs: Mapping[str, Tensor] | Sequence[Tensor]
) -> Mapping[str, Any]:
    """Example inputs by the names of forward's parameters; positional ones are bound to them."""
    if isinstance(example_inputs, Mapping):
        return example_inputs
    with torch.device("meta"):
        signature = inspect.signature(source.build().forward)
    try:
        return dict(signature.bind(*example_inputs).arguments)
    except TypeError as error:
        raise UsageError(
            f"the example inputs do not fit forward{signature}: {error}",
            where=source.name,
            hint="a dict of keyword inputs",
        ) from None


def _form(
    source: ModelSource,
    example_inputs: Mapping[str, Tensor] | Sequence[Tensor] | None,
    batch: int | None,
    seq: int | None,
) -> _Form:
    check_sizes(batch or 1, seq or 1)
    if example_inputs is None:
        with torch.device("meta"):
            inputs: Mapping[str, Any] = source.example_inputs(batch or 8, seq or 128)
    else:
        inputs = map_inputs(
            _by_name(source, example_inputs),
            # integers keep their values: those of grids decide shapes
            lambda value: (
                value.to("meta") if isinstance(value, Tensor) and value.is_floating_point() else value
            ),
        )
    flat = flat_inputs(inputs)
    tensors = [value for value in flat.values() if isinstance(value, Tensor) and value.dim()]
    if not tensors:
        raise UsageError(
            "the example inputs hold no tensor with a batch dim", hint="{'input_ids': ..., 'labels': ...}"
        )
    infos = {
        name: info for name, value in flat.items() if (info := tensor_info(value)) is not None and info.shape
    }
    found = batch_of(infos)
    assert found is not None
    odd = [
        name
        for name, info in infos.items()
        if info.shape[batch_dim(name, info.shape)] % found
        or (name in ("input_ids", "labels", "attention_mask") and info.shape[0] != found)
    ]  # there may be several images for a sequence
    if odd:
        raise UsageError(
            f"the example inputs have different batch sizes: {odd[0]} has {flat[odd[0]].shape[0]}, another {found}"
        )
    ids = [value for value in tensors if value.dim() == 2 and not value.is_floating_point()]
    form = _Form(inputs, found, int(ids[0].shape[1]) if ids else 1)  # without token ids, a row counts as one
    if batch is not None and batch != found:
        form = _Form(form.of_batch(batch), batch, form.seq)
    return form


def _mesh(mesh: str | Mesh | None, devices: int) -> Mesh | None:
    """`tp=2` or `dp=2,tp=2` with the axes left out at size 1 (dp takes what is left when it is left out)."""
    if mesh is None:
        return None
    try:
        given = (Mesh.parse(mesh) if isinstance(mesh, str) else mesh).sizes
    except ShardingError as error:
        raise UsageError(error.what, where=error.where, hint=error.hint) from None
    if not given:
        raise UsageError(f"mesh {mesh!r} names no axis", hint="a form such as 'dp=2,tp=4'")
    unknown = set(given) - set(MESH_AXES)
    if unknown:
        raise UsageError(
            f"mesh {mesh}: unknown axis {sorted(unknown)[0]!r}", hint=f"axes among {', '.join(MESH_AXES)}"
        )
    rest = math.prod(size for axis, size in given.items() if axis != "dp")
    if "dp" not in given and devices % rest:
        raise UsageError(
            f"mesh {mesh}: {rest} does not divide the {devices} devices of the cluster",
            hint="sizes whose product does",
        )
    full = mesh_of(**{"dp": devices // rest, **given})
    if full.device_count != devices:
        raise UsageError(
            f"mesh {full} has {full.device_count} devices, the cluster {devices}",
            hint="sizes whose product is that",
        )
    return full


def _prepare(
    source: ModelSource, form: _Form, precision: str, tell: Progress, *, dump: str | Path | None = None
) -> _Prepared:
    tell(f"building {source.name}")
    with torch.device("meta"):
        module = source.build()
    tell("capturing")
    program = capture(module, form.inputs, name=source.name, dtype=DTYPES[precision])
    return _passes(program, tell, None if dump is None else Path(dump))


def _passes(program: Program, tell: Progress, dump: Path | None) -> _Prepared:
    if dump is not None:
        _dump(dump, "capture", str(program))
    tell("naming axes")
    program, axes = name_axes(program)
    if dump is not None:
        _dump(dump, "axes", str(program))
    return _Prepared(program, build_problem(program, axes))


def _lower(source: ModelSource, form: _Form, plan: Plan, tell: Progress) -> RankProgram:
    """The rank program of a plan; checks that the plan is for this model."""
    unable = plan.why_not_run()
    if unable is not None:
        raise PlanError(
            f"this plan has {unable}, which the runtime of this version does not run",
            where="plan.layout",
            hint="space='runtime' (--space runtime) plans with what it runs",
        )
    mesh = plan.parsed_mesh
    micro = _Form(
        form.of_batch(form.batch // plan.data.micro_batches), form.batch // plan.data.micro_batches, form.seq
    )
    prepared = _prepare(source, micro, plan.precision, tell)
    if prepared.program.fixed:
        _one_micro_batch(prepared.program, plan.data.micro_batches)
    found = fingerprint(prepared.program)
    if found != plan.model.fingerprint:
        if plan.data.micro_batches > 1 and fingerprint(
            _prepare(source, form, plan.precision, tell).program
        ) == (plan.model.fingerprint):
            raise PlanError(
                f"{source.name} has other ops for a micro-batch of {micro.batch} than for the batch of {form.batch}: it goes "
                "through its images one by one",
                where="plan.data.micro_batches",
                hint="micro_batches=1, and smaller batches",
            )
        if (plan.model.name, plan.model.parameters) == (source.name, prepared.program.parameter_count):
            raise PlanError(
                f"the plan is for {source.name} as autopar {plan.autopar_version} captured it; it has other ops now, or "
                "its parameters are cut into other pieces",
                where="plan.model.fingerprint",
                hint="a new plan",
            )
        raise PlanError(
            f"the plan is for another model: {plan.model.name} with {plan.model.parameters:,} parameters, "
            f"this is {source.name} with {prepared.program.parameter_count:,}",
            where="plan.model.fingerprint",
            hint="the model the plan was made for, or a new plan",
        )
    tell("lowering")
    solution = solution_of(plan, prepared.problem)
    try:
        lowered = lower(prepared.program, prepared.problem, solution, mesh)
    except ShardingError as error:  # the search makes no such plan: it was edited, or is of another version
        raise PlanError(
            f"the plan cannot be run: {error.what}", where=f"plan.blocks, {error.where}", hint="a new plan"
        ) from error
    check(lowered)
    return lowered


def _gradient_of(entry: Entry) -> Tensor:
    gradient = entry.parameter.grad
    return torch.zeros_like(entry.parameter) if gradient is None else gradient


def _one_micro_batch(program: Program, micro_batches: int | None) -> int:
    """A program with an input's values in it is of one size of batch: with fewer images it would have other ops."""
    if micro_batches is not None and micro_batches > 1:
        raise UsageError(
            f"{', '.join(program.fixed)} of the whole batch decides what is computed; {micro_batches} micro-batches would "
            "each compute something else",
            where="micro_batches",
            hint="micro_batches=1, and smaller batches",
        )
    return 1


def _state_of(module: nn.Module, constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = dict(constants)
    state.update(module.named_buffers(remove_duplicate=False))
    state.update(module.named_parameters(remove_duplicate=False))
    return state


_ORDER = ("capture", "axes", "problem", "lowered", "plan")


def _dump(folder: Path, name: str, text: str) -> None:
    suffix = "json" if name == "plan" else "txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{_ORDER.index(name) + 1}-{name}.{suffix}").write_text(text + "\n")
    except OSError as error:
        raise UsageError(
            f"the dump cannot be written: {error.strerror}",
            where=str(folder),
            hint="a folder you can write to",
        ) from None
