"""From a model to what the planner sees, and from a plan to what the ranks run.

    Model -> Program -> Problem        `prepare`: capture, name axes, build the Problem
    Plan  -> RankProgram               `lowered_of`: the same at the size of a micro-batch, then lower and check

`write_dump` writes each of these as text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from autopar.errors import PlanError, ShardingError, UsageError
from autopar.forms import Form
from autopar.models.model_source import ModelSource
from autopar.passes.axes import name_axes
from autopar.passes.capture import capture
from autopar.passes.check import check
from autopar.passes.fp8 import use_fp8
from autopar.passes.lower import RankProgram, lower
from autopar.passes.problem import build_problem
from autopar.passes.restore import solution_of
from autopar.plans import Plan, fingerprint
from autopar.problem import Problem
from autopar.program import Program

Progress = Callable[[str], None]

DTYPES: Mapping[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Prepared:
    """A captured model whose axes have names, and its Problem."""

    program: Program
    problem: Problem


def prepare(
    source: ModelSource, form: Form, precision: str, tell: Progress, *, dump: str | Path | None = None
) -> Prepared:
    """Capture a model at the shapes of `form`, without storage, and build its Problem.

    precision  one of DTYPES
    dump       a folder that gets the Program as text after every pass

    Raises ModelError for a model that cannot be captured, UsageError for a folder that cannot be written.
    """
    tell(f"building {source.name}")
    with torch.device("meta"):
        module = source.build()
    tell("capturing")
    program = capture(module, form.inputs, name=source.name, dtype=DTYPES[precision])
    return prepare_program(program, tell, None if dump is None else Path(dump))


def prepare_program(program: Program, tell: Progress, dump: Path | None) -> Prepared:
    """The same for a Program that is captured already."""
    if dump is not None:
        write_dump(dump, "capture", str(program))
    tell("naming axes")
    program, axes = name_axes(program)
    if dump is not None:
        write_dump(dump, "axes", str(program))
    return Prepared(program, build_problem(program, axes))


def lowered_of(source: ModelSource, form: Form, plan: Plan, tell: Progress) -> RankProgram:
    """The rank program of a plan at the size of its micro-batch, checked; `form` is of the whole batch.

    Raises PlanError for a plan that the runtime does not run, or that is for another model.
    """
    unable = plan.why_not_run()
    if unable is not None:
        raise PlanError(
            f"this plan has {unable}, which the runtime of this version does not run",
            where="plan.layout",
            hint="to plan again without it: fix='etp=1', precision='bf16'",
        )
    mesh = plan.run_mesh
    captured = "fp32" if plan.precision == "fp32" else "bf16"
    micro = Form(
        form.of_batch(form.batch // plan.data.micro_batches), form.batch // plan.data.micro_batches, form.seq
    )
    prepared = prepare(source, micro, captured, tell)
    if prepared.program.fixed:
        one_micro_batch(prepared.program, plan.data.micro_batches)
    found = fingerprint(prepared.program)
    if found != plan.model.fingerprint:
        if plan.data.micro_batches > 1 and fingerprint(prepare(source, form, captured, tell).program) == (
            plan.model.fingerprint
        ):
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
    # At a batch of one its loops have other names than the plan's.
    several = Form(form.of_batch(2), 2, form.seq) if micro.batch == 1 and form.batch > 1 else None
    planned = None if several is None else prepare(source, several, captured, lambda _: None).problem
    solution = solution_of(plan, prepared.problem, planned)
    try:
        lowered = lower(prepared.program, prepared.problem, solution, mesh)
    except ShardingError as error:  # the search makes no such plan: it was edited, or is of another version
        raise PlanError(
            f"the plan cannot be run: {error.what}", where=f"plan.blocks, {error.where}", hint="a new plan"
        ) from error
    check(lowered)
    return use_fp8(lowered) if plan.precision == "fp8" else lowered


def one_micro_batch(program: Program, micro_batches: int | None) -> int:
    """A program with an input's values in it is of one size of batch: with fewer images it would have other ops."""
    if micro_batches is not None and micro_batches > 1:
        raise UsageError(
            f"{', '.join(program.fixed)} of the whole batch decides what is computed; {micro_batches} micro-batches would "
            "each compute something else",
            where="micro_batches",
            hint="micro_batches=1, and smaller batches",
        )
    return 1


_ORDER = ("capture", "axes", "problem", "lowered", "plan")


def write_dump(folder: Path, name: str, text: str) -> None:
    """Write one value as text: `2-axes.txt`, numbered in the order they come. Raises UsageError."""
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
