"""Transfer: the placement of a plan, for another size of the same model.

In:  a Plan for a large model, the Problem of a small one (fewer layers, narrower), a mesh with axes of the plan's.
Out: a Solution: every op and every value placed as the plan places the one of the same name, and what could not be.

    model_layers/linear_3 {dp: a, tp: n} of 4096 x 14336 on dp=32,tp=8  ->  the same of 64 x 224 on dp=2,tp=2

Where a size does not divide any more, that split is left out; where a name is not in the plan, the op is whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.errors import PlanError, ShardingError
from autopar.mesh import Mesh
from autopar.plans import Plan
from autopar.problem import Op, Problem, Solution
from autopar.sharding import Sharding

Choice = dict[str, str | None]


def transfer(plan: Plan, problem: Problem, mesh: Mesh) -> tuple[Solution, tuple[str, ...]]:
    """The Solution, and notes on what differs from the plan.

    Raises PlanError if the plan knows less than half of the ops by name: it is of another model.
    """
    notes: list[str] = []
    choices: dict[str, Choice] = {}
    unknown = []
    for op in problem.ops:
        block, _, node = op.name.partition("/")
        said = plan.blocks[block].ops.get(node) if block in plan.blocks else None
        if said is None:
            unknown.append(op.name)
        choices[op.name] = _dividing(op, said or {}, mesh, notes)
    if 2 * len(unknown) > len(problem.ops):
        raise PlanError(
            f"the plan is for another model: of the {len(problem.ops)} ops here, it places "
            f"{len(problem.ops) - len(unknown)} by name",
            where="plan.blocks",
            hint="the model that the plan was made for",
        )
    if unknown:
        notes.append(
            f"{len(unknown)} of {len(problem.ops)} ops have no namesake in the plan and are whole: "
            + ", ".join(unknown[:4])
            + (", ..." if len(unknown) > 4 else "")
        )
    shardings = dict(_arriving(plan, problem, mesh, notes))
    for op in problem.ops:
        if op.rule is not None:
            results = op.rule.shard({axis: choices[op.name].get(axis) for axis in mesh.names}, mesh.sizes)
            shardings.update(zip(op.results, results.results, strict=True))
    return Solution(choices, shardings, {}, 0.0), tuple(notes)


def _dividing(op: Op, said: Mapping[str, str], mesh: Mesh, notes: list[str]) -> Choice:
    """What the plan says of an op, without the axes whose split is not possible at this size."""
    choice: Choice = {}
    if op.rule is None:
        return choice
    for axis in mesh.names:
        if axis not in said:
            continue
        try:
            op.rule.shard({**choice, axis: said[axis]}, mesh.sizes)
        except ShardingError as error:
            notes.append(f"{op.name} is not split over {axis} as in the plan: {error.what}")
        else:
            choice[axis] = said[axis]
    return choice


def _arriving(plan: Plan, problem: Problem, mesh: Mesh, notes: list[str]) -> Iterator[tuple[str, Sharding]]:
    """Shardings of state and of block inputs. What blocks share has one, the first that the plan has."""
    made = {result for op in problem.ops for result in op.results}
    shared: dict[str, Sharding] = {}
    position: dict[str, int] = {}
    for name, value in problem.values.items():
        if name in made:
            continue
        block, _, node = name.partition("/")
        part = plan.blocks.get(block)
        text = None
        if value.state:
            text = part.state.get(node) if part else None
        else:
            index = position[block] = position.get(block, -1) + 1
            text = part.inputs[index] if part and index < len(part.inputs) else None
        key = value.interface or name
        if key not in shared:
            sharding = None if text is None else _fitting(text, value.info.shape, mesh)
            if sharding is None:
                notes.append(f"{name} is whole" + (f", in the plan {text}" if text else ", not in the plan"))
            shared[key] = sharding or Sharding.whole(len(value.info.shape))
        yield name, shared[key]


def _fitting(text: str, shape: tuple[int, ...], mesh: Mesh) -> Sharding | None:
    """The plan's sharding over the axes there are; None if it does not fit the shape."""
    sharding = Sharding.parse(text)
    sharding = sharding.without(axis for axis in sharding.axes if axis not in mesh.names)
    try:
        if len(sharding.dims) != len(shape):
            return None
        sharding.local_shape(shape, mesh)
    except ShardingError:
        return None
    return sharding
