"""The Python interface: plan, estimate, compile, load_plan.

import autopar
plan = autopar.plan("llama-3.1-8b", "h100:8x8", batch=128, seq=8192)     # no GPU, nothing allocated
print(plan)

compiled = autopar.compile(model, "cpu:4", example_inputs)               # under torchrun
for batch in batches:
    print(compiled.train_step(batch).loss)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from autopar.cluster import Cluster, load_cluster
from autopar.compiled import Compiled, generator
from autopar.cost.software import default_software, load_software
from autopar.errors import ShardingError, UsageError
from autopar.forms import form_of, source_of
from autopar.layout import Layout
from autopar.layout_check import filled
from autopar.mesh import Mesh
from autopar.models.model_source import ModelSource
from autopar.passes.combinations import AXES as MESH_AXES
from autopar.passes.combinations import mesh_of
from autopar.passes.decisions import is_decision, parse_decisions
from autopar.passes.describe import describe
from autopar.passes.layout_plan import layout_words, plan_layout
from autopar.passes.propagate import check_fixed, parse_constraint, propagate
from autopar.passes.search import search
from autopar.plans import Plan
from autopar.prepared import DTYPES, Progress, lowered_of, one_micro_batch, prepare, write_dump
from autopar.pricing_page import Pricing, price_layout
from autopar.workload import Workload, check_sizes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = [
    "SPACES",
    "Compiled",
    "compile",
    "describe_model",
    "estimate",
    "generator",
    "load_plan",
    "plan",
]

SPACES = ("runtime", "all")


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
    space          "runtime": data, fsdp, expert and tensor parallel in one stage, by the finer cost model; "all": every layout
                   (pipeline, context and expert parallel, ZeRO 1-2, schedules, ...); default runtime on cpu, else all
    objective      "time", "memory" for the leanest plan, or "robust" for the least regret if the cost model's
                   constants are off (space "all")
    dump           a folder that gets the Program as text after every pass
    progress       called with a line as each pass starts

    Raises an AutoparError that says what is wrong and what to try; nothing is allocated on any device.
    """
    tell = progress or (lambda _: None)
    source = source_of(model)
    where = load_cluster(cluster)
    form = form_of(source, example_inputs, batch, seq)
    chosen = ("fp32" if where.device.name == "cpu" else "bf16") if precision is None else precision
    which = _space(space, where)
    decisions = [text for text in fix if is_decision(text)]
    words = [text for text in fix if not is_decision(text)]
    captured = _captured_precision(chosen, which)
    constraints = [parse_constraint(text) for text in words]
    if which == "runtime":
        _refuse_decisions([*decisions, *forbid, *(["objective"] if objective != "time" else [])])
        fixed_mesh = _mesh(mesh, where.device_count)
    else:
        options = layout_words(mesh, micro_batches, recompute, chosen, form.batch, where.device_count)
        decisions += options
        spoken = options if precision is not None else options[1:]  # else the default, which nobody asked for
        wanted = parse_decisions(decisions, forbid)
    prepared = prepare(source, form, captured, tell, dump=dump)
    tell("propagating constraints")
    problem, notes = propagate(prepared.problem, prepared.program, constraints)
    if dump is not None:
        write_dump(Path(dump), "problem", str(problem))
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
            micro_batches = one_micro_batch(prepared.program, micro_batches)
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
            write_dump(Path(dump), "lowered", str(lowered_of(source, form, found, tell)))
        write_dump(Path(dump), "plan", found.to_json())
    return found


def _space(space: str | None, cluster: Cluster) -> str:
    which = space or ("runtime" if cluster.device.name == "cpu" else "all")
    if which not in SPACES:
        raise UsageError(f"unknown space {which!r}", where="space", hint=f"one of {', '.join(SPACES)}")
    return which


def _captured_precision(precision: str, space: str) -> str:
    """The precision of the captured Program: the plan's own, or for a layout that of its 16-bit or 32-bit values."""
    captured = precision
    if space == "all":
        captured = "fp32" if precision.split("|")[0] == "fp32" else "bf16"
    if captured not in DTYPES:
        raise UsageError(
            f"precision {precision!r} is none that the runtime runs",
            where="precision",
            hint=f"one of {', '.join(DTYPES)}; space='all' plans for others, and chooses among several",
        )
    return captured


def _refuse_decisions(found: Sequence[str]) -> None:
    """The runtime's space takes a mesh and shardings, and none of the decisions of a layout."""
    if found:
        raise UsageError(
            f"{found[0]!r} is a decision of the whole space",
            where="fix",
            hint="space='all', or mesh='tp=..'",
        )


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
        source = source_of(model)
        form = form_of(source, None, batch, seq)
        captured = "fp32" if chosen.precision == "fp32" else "bf16"
        prepared = prepare(source, form, captured, tell)
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
    source = source_of(model)
    captured = "fp32" if precision == "fp32" else "bf16"
    prepared = prepare(source, form_of(source, None, batch, seq), captured, progress or (lambda _: None))
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
    source = source_of(model)
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
    form = form_of(source, example_inputs, chosen.data.batch, chosen.data.seq)
    return Compiled(chosen, source, lowered_of(source, form, chosen, progress or (lambda _: None)), compiled)


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
