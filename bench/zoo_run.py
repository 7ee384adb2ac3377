"""One model of the zoo through every step: capture, plan, lower, check, and run sharded against unsharded.

In:  a model type and the names of steps.
Out: a `Cell` per step as it is done: passed, or the first line of the error and its place.

    capture  the training forward with its loss, folded
    plan     placements found, lowered and checked on tp=2, dp=2 x tp=2 (and ep=2)
    tp2      two ranks in the simulator: loss and every gradient equal the unsharded model's; as planned, and with its heads,
             features and vocabulary split by constraint (a tiny model's cheapest placement may split nothing)
    dp2tp2   four ranks, likewise;  ep2  experts over two ranks;  pp2  two pipeline stages
    fold     the traced graph is no larger at the published depth than at a quarter of it
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.cluster import load_cluster
from autopar.cost.prices import Prices
from autopar.errors import AutoparError, ConstraintError
from autopar.mesh import Mesh
from autopar.passes.axes import name_axes
from autopar.passes.capture import capture
from autopar.passes.check import check
from autopar.passes.combinations import mesh_of
from autopar.passes.lower import RankProgram, lower
from autopar.passes.placement import solve
from autopar.passes.problem import build_problem
from autopar.passes.propagate import check_fixed, parse_constraint, propagate
from autopar.passes.stages import Stage, cut_stages
from autopar.problem import Problem, Solution
from autopar.program import Program
from autopar.runtime.groups import join_mesh
from autopar.runtime.model import RankModel
from autopar.runtime.pipeline import Pipeline, pipeline_mesh
from autopar.runtime.simulate import simulate
from autopar.runtime.store import ParameterStore
from autopar.runtime.trainer import Trainer
from bench.zoo_models import published_config, zoo_model

STEPS = ("capture", "plan", "tp2", "dp2tp2", "ep2", "pp2", "fold")
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
FORCED = ("heads", "ffn", "vocab", "expert")


@dataclass(frozen=True)
class Cell:
    """One step of one model. `status`: "pass", "fail", or "none" where the step does not apply; `reason`: why."""

    model: str
    step: str
    status: str
    reason: str = ""
    where: str = ""
    seconds: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Built:
    """A tiny model with what the unsharded one computes."""

    module: nn.Module
    inputs: dict[str, Any]
    loss: float
    gradients: dict[str, Tensor | None]


@dataclass
class _Captured:
    program: Program
    problem: Problem


def run_model(model_type: str, steps: Sequence[str]) -> Iterator[Cell]:
    """The cells of one model, each as soon as it is known; a step that another needs and that failed fails it too."""
    built = captured = None
    built, cell = _timed(model_type, "build", lambda: _build(model_type))
    yield cell
    if built is not None:
        captured, cell = _timed(model_type, "capture", lambda: _capture(built))
        yield cell
    if captured is not None:
        for step in steps:
            if step in _STEPS:
                for name, work in _STEPS[step](built, captured):
                    yield _timed(model_type, name, work)[1]
    if "fold" in steps and captured is not None:
        yield _timed(model_type, "fold", lambda: _fold(model_type))[1]
    built = captured = None
    gc.collect()


class NotApplicableError(Exception):
    """The step has nothing to do for this model: experts over ranks where there are none."""


def _timed(model: str, step: str, work: Callable[[], Any]) -> tuple[Any, Cell]:
    began = time.process_time()
    try:
        value = work()
    except NotApplicableError as error:
        return None, Cell(model, step, "none", str(error))
    except Exception as error:
        reason, where = describe(error)
        return None, Cell(model, step, "fail", reason, where, time.process_time() - began)
    facts = value.facts if isinstance(value, _Result) else {}
    return value, Cell(model, step, "pass", "", "", time.process_time() - began, facts)


def describe(error: Exception) -> tuple[str, str]:
    """First line, and the place: what the error says itself, else the innermost frame that is not torch's."""
    if isinstance(error, AutoparError):
        return f"{type(error).__name__}: {error.what.splitlines()[0][:300]}", str(error.where or "")
    line = next((part.strip() for part in str(error).splitlines() if part.strip()), "")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
    inner = frames[-1] if frames else None
    place = f"{'/'.join(Path(inner.filename).parts[-3:])}:{inner.lineno}" if inner else ""
    return f"{type(error).__name__}: {line[:300]}", place


# ---- steps ----


@dataclass(frozen=True)
class _Result:
    facts: Mapping[str, Any]


def _build(model_type: str) -> Built:
    module, inputs = zoo_model(model_type)
    return reference(module, inputs)


def reference(module: nn.Module, inputs: dict[str, Any]) -> Built:
    """The loss and the gradients of the model itself, as Transformers runs it."""
    module.zero_grad(set_to_none=True)
    loss = module(**inputs)["loss"]
    loss.backward()
    gradients = {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in module.named_parameters()
    }
    module.zero_grad(set_to_none=True)
    value = float(loss.detach())
    if not torch.isfinite(loss.detach()):
        raise ValueError(f"the unsharded model's loss is {value}")
    return Built(module, inputs, value, gradients)


def _capture(built: Built) -> _Captured:
    program = capture(built.module, built.inputs, outputs=("loss",), name=type(built.module).__name__)
    program, axes = name_axes(program)
    return _Captured(program, build_problem(program, axes))


def _fold(model_type: str) -> _Result:
    """Traced nodes at the published depth and at a quarter of it, with tiny sizes."""
    from autopar.models.shrink import shrink
    from bench.zoo_models import build

    config = published_config(model_type)
    nodes, seconds, layers = [], [], []
    for depth in (0.25, 1.0):
        module, inputs = build(shrink(config, depth=depth))
        began = time.process_time()
        program = capture(module, inputs, outputs=("loss",))
        seconds.append(time.process_time() - began)
        nodes.append(sum(len(block.graph.graph.nodes) for block in program.blocks.values()))
        layers.append(len(program.calls))
    facts = {"nodes": nodes, "seconds": [round(one, 2) for one in seconds], "calls": layers}
    if nodes[1] > nodes[0] * 1.05 and seconds[1] > 1.2 * seconds[0]:
        raise NotFoldedError(
            f"{nodes[0]} nodes and {seconds[0]:.1f} s at a quarter of the depth, {nodes[1]} and {seconds[1]:.1f} s at all of it"
        )
    return _Result(facts)


class NotFoldedError(Exception):
    """Capture of a deeper model takes longer."""


def _plan_step(built: Built, captured: _Captured) -> Iterator[tuple[str, Callable[[], Any]]]:
    def work() -> _Result:
        for mesh in (mesh_of(tp=2), mesh_of(dp=2, tp=2)):
            checked(place(captured, mesh, ())[0])
        return _Result({"ops without a rule": without_rule(captured.problem)})

    yield "plan", work


def without_rule(problem: Problem) -> dict[str, int]:
    """How often each kind of op without a rule stands in the blocks."""
    counts: dict[str, int] = {}
    for op in problem.ops:
        if op.rule is None:
            counts[op.kind] = counts.get(op.kind, 0) + 1
    return counts


def _sharded_step(
    name: str, mesh: Mesh
) -> Callable[[Built, _Captured], Iterator[tuple[str, Callable[[], Any]]]]:
    def step(built: Built, captured: _Captured) -> Iterator[tuple[str, Callable[[], Any]]]:
        yield name, lambda: _compare(built, captured, mesh, ())
        yield f"{name} forced", lambda: _compare(built, captured, mesh, forced(captured, mesh))

    return step


def _experts_step(built: Built, captured: _Captured) -> Iterator[tuple[str, Callable[[], Any]]]:
    def work() -> _Result:
        if not any("expert" in op.logical.values() for op in captured.problem.ops):
            raise NotApplicableError("no experts")
        result = _compare(built, captured, mesh_of(ep=2), ())
        if not result.facts["split state"].get("ep"):
            raise NotSplitError("no expert's weights are split over ep")
        return result

    yield "ep2", work


def _pipeline_step(built: Built, captured: _Captured) -> Iterator[tuple[str, Callable[[], Any]]]:
    def work() -> _Result:
        rank_program, _ = place(captured, mesh_of(), ())
        stages = cut_stages(rank_program, 2)
        facts = {"sends": [len(stage.sends) for stage in stages], "shared": len(stages[0].shared)}
        errors = pipeline_differences(rank_program, stages, built)
        if not _equal(errors):
            errors = _in_double(facts, built, by_stages) or errors
        return _Result({**facts, **judge(errors)})

    def by_stages(double: Built) -> dict[str, Any]:
        rank_program, _ = place(_capture(double), mesh_of(), ())
        return pipeline_differences(rank_program, cut_stages(rank_program, 2), double)

    yield "pp2", work


_STEPS = {
    "plan": _plan_step,
    "tp2": _sharded_step("tp2", mesh_of(tp=2)),
    "dp2tp2": _sharded_step("dp2tp2", mesh_of(dp=2, tp=2)),
    "ep2": _experts_step,
    "pp2": _pipeline_step,
}


# ---- placing and comparing ----


def forced(captured: _Captured, mesh: Mesh) -> tuple[str, ...]:
    """Constraints that split over tp each loop of the model that has a name, divides and may be split."""
    names = {axis for op in captured.problem.ops for axis in op.logical.values()}
    chosen: list[str] = []
    for name in FORCED:
        if name not in names:
            continue
        try:
            place(captured, mesh, (*chosen, f"{name}=tp"), only_propagate=True)
        except ConstraintError:
            continue
        chosen.append(f"{name}=tp")
    if not chosen:
        raise NotApplicableError(f"none of {', '.join(FORCED)} can be split")
    return tuple(chosen)


def place(
    captured: _Captured, mesh: Mesh, constraints: Sequence[str], *, only_propagate: bool = False
) -> tuple[RankProgram, Solution]:
    problem, _ = propagate(
        captured.problem, captured.program, [parse_constraint(text) for text in constraints]
    )
    check_fixed(problem, mesh, constraints)
    if only_propagate:
        return None, None  # type: ignore[return-value]
    cluster = load_cluster(f"cpu:{mesh.device_count}")
    solution = solve(problem, mesh, Prices.of(cluster, mesh, "fp32", problem))
    rank_program = lower(captured.program, problem, solution, mesh)
    return rank_program, solution


def checked(rank_program: RankProgram, equal: bool = False) -> None:
    """The static checker's word, after the numbers: where it refuses a program whose numbers are right, that is said."""
    try:
        check(rank_program)
    except AutoparError as error:
        if equal:
            raise CheckerError(
                f"the numbers are equal, the static checker says: {describe(error)[0]}"
            ) from error
        raise


class CheckerError(Exception):
    """The static checker refuses a program that gives the right numbers."""


def _compare(built: Built, captured: _Captured, mesh: Mesh, constraints: Sequence[str]) -> _Result:
    rank_program, solution = place(captured, mesh, constraints)
    errors = differences(rank_program, built)
    facts: dict[str, Any] = {"split ops": split_ops(solution), "ops": len(captured.problem.ops)}
    facts["split state"] = split_state(rank_program)
    if constraints:
        facts["constraints"] = list(constraints)
    if not _equal(errors):  # in float32: by rounding, or wrong? float64 knows
        errors = (
            _in_double(
                facts,
                built,
                lambda double: differences(place(_capture(double), mesh, constraints)[0], double),
            )
            or errors
        )
    result = _Result({**facts, **judge(errors)})
    checked(rank_program, equal=True)
    return result


def _in_double(
    facts: dict[str, Any], built: Built, compare: Callable[[Built], dict[str, Any]]
) -> dict[str, Any]:
    """The same comparison with weights and inputs in float64; nothing where the model does not run in it."""
    experts = getattr(built.module, "_can_set_experts_implementation", lambda: False)()
    try:
        if experts:  # grouped matmuls have no float64; the captured op is the same one
            built.module.set_experts_implementation("eager")
        double = reference(
            built.module.double(), {key: _double(value) for key, value in built.inputs.items()}
        )
        errors = compare(double)
        facts["precision"] = "float64"
        return errors
    except RuntimeError as error:
        facts["no float64"] = describe(error)[0]
        return {}
    finally:
        built.module.float()
        if experts:
            built.module.set_experts_implementation("grouped_mm")


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def split_ops(solution: Solution) -> int:
    return sum(any(factor is not None for factor in choice.values()) for choice in solution.choices.values())


def split_state(rank_program: RankProgram) -> dict[str, int]:
    """How many tensors of the state each mesh axis splits."""
    counts: dict[str, int] = {}
    for layout in rank_program.state.values():
        for axis in layout.sharding.axes:
            counts[axis] = counts.get(axis, 0) + 1
    return counts


class NotSplitError(Exception):
    """A run whose numbers are right, but which split nothing."""


def _equal(errors: Mapping[str, Any]) -> bool:
    return bool(errors["loss"] <= LOSS_TOLERANCE and errors["gradient"] <= GRADIENT_TOLERANCE)


def judge(errors: Mapping[str, Any]) -> dict[str, Any]:
    if not _equal(errors):
        raise WrongNumbersError(
            f"loss off by {errors['loss']:.1e}, gradient of {errors['which']} by {errors['gradient']:.1e}"
        )
    return dict(errors)


class WrongNumbersError(Exception):
    """A sharded step that differs from the unsharded one by more than rounding."""


def differences(rank_program: RankProgram, built: Built) -> dict[str, Any]:
    """Relative errors of the loss and of the worst gradient, over all ranks."""
    state = _state(rank_program, built)
    batch = _batch(built)

    def rank(_: int) -> tuple[float, dict[str, Tensor]]:
        groups = join_mesh(rank_program.mesh, timeout_s=60)
        store = ParameterStore(rank_program, groups, state)
        model = RankModel(rank_program, groups, store)
        trainable = [parameter for parameter in store.parameters.values() if parameter.requires_grad]
        trainer = Trainer(model, torch.optim.SGD(trainable, lr=0.0))
        loss = trainer.gradients(batch)
        return loss, {name: store.whole_parameter(name, _gradient) for name in store.parts}

    found = simulate(rank_program.mesh.device_count, rank, timeout_s=120)
    return compare_gradients(built, [loss for loss, _ in found], [gradients for _, gradients in found])


def pipeline_differences(program: RankProgram, stages: Sequence[Stage], built: Built) -> dict[str, Any]:
    """The same of pipeline stages, one rank each; a parameter of several stages is compared on each of them."""
    batch = _batch(built)

    def rank(number: int) -> tuple[float, dict[str, Tensor]]:
        groups = join_mesh(pipeline_mesh(program.mesh, len(stages)), timeout_s=60)
        model = Pipeline(program, stages, groups, _state(program, built))
        trainable = [parameter for parameter in model.store.parameters.values() if parameter.requires_grad]
        store = model.store
        loss = Trainer(model, torch.optim.SGD(trainable, lr=0.0)).gradients(batch)
        return loss, {name: store.whole_parameter(name, _gradient) for name in store.parts}

    found = simulate(len(stages) * program.mesh.device_count, rank, timeout_s=120)
    known = {name for _, gradients in found for name in gradients}
    filled = [
        {
            **{
                name: built.gradients[name]
                for name in known - set(own)
                if built.gradients.get(name) is not None
            },
            **own,
        }
        for _, own in found
    ]  # what a stage does not have is another's to compare
    return compare_gradients(built, [loss for loss, _ in found], filled)


def _state(rank_program: RankProgram, built: Built) -> dict[str, Tensor]:
    state: dict[str, Tensor] = dict(rank_program.constants)
    state.update(built.module.named_buffers(remove_duplicate=False))
    state.update(built.module.named_parameters(remove_duplicate=False))
    return state


def _batch(built: Built) -> dict[str, Any]:
    return {name: value for name, value in built.inputs.items() if isinstance(value, Tensor)}


def compare_gradients(
    built: Built, losses: Sequence[float], gradients: Sequence[Mapping[str, Tensor]]
) -> dict[str, Any]:
    """The worst over all ranks. A gradient that is zero but for rounding (of a key's bias: softmax does not see it)
    has no relative error of its own; it is measured against the largest."""
    expected = built.gradients
    largest = max((float(value.norm()) for value in expected.values() if value is not None), default=0.0)
    worst, which = 0.0, ""
    for of_rank in gradients:
        for name, value in expected.items():
            if name not in of_rank:
                if value is not None and bool(value.any()):
                    raise WrongNumbersError(f"{name} has a gradient and is not in the program")
                continue
            scale = max(0.0 if value is None else float(value.norm()), 1e-4 * largest)
            error = float((of_rank[name] - (0.0 if value is None else value)).norm()) / max(scale, 1e-30)
            if not error <= worst:
                worst, which = error, name
    loss = max(abs(one - built.loss) / max(abs(built.loss), 1e-12) for one in losses)
    return {"loss": loss, "gradient": worst, "which": which}


def _gradient(entry: Any) -> Tensor:
    gradient = entry.parameter.grad
    return torch.zeros_like(entry.parameter) if gradient is None else gradient
