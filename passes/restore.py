"""Restore: the Solution that a saved Plan holds, for the Problem of the same model captured again.

A plan names the choice of every op and the sharding of what arrives in each block; the shardings of all other values
follow from the rules. Raises PlanError where plan and model do not fit each other.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.errors import PlanError, ShardingError
from autopar.mesh import Mesh
from autopar.plans import Plan
from autopar.problem import Op, Problem, Solution, Value
from autopar.rules.rule import PAIR
from autopar.sharding import Sharding


def solution_of(plan: Plan, problem: Problem, planned: Problem | None = None) -> Solution:
    """Choices and shardings of `plan`, over the values and ops of `problem`.

    `planned`: the same model's Problem at a batch of several sequences, where `problem` is of a single one: rules then
    have no loop over the batch, and other names for the loops that are left.
    """
    if planned is not None:
        plan = _renamed(plan, planned, problem)
    mesh = plan.run_mesh
    known = {op.name for op in problem.ops}
    choices: dict[str, dict[str, str | None]] = {op.name: {} for op in problem.ops}
    blocks = {name.partition("/")[0] for name in problem.values}
    for block, part in plan.blocks.items():
        if block not in blocks:
            raise PlanError(
                f"the plan has a block {block}, the model has {', '.join(sorted(blocks))}",
                where=f"plan.blocks.{block}",
                hint="a new plan",
            )
        for node, choice in part.ops.items():
            name = f"{block}/{node}"
            if name not in known:
                raise PlanError(
                    f"the plan places {name}, which the model does not have",
                    where=f"plan.blocks.{block}.ops",
                    hint="a new plan",
                )
            choices[name] = dict(choice)
    shardings = _arriving(plan, problem)
    for op in problem.ops:
        shardings.update(_results(op, choices[op.name], mesh))
    return Solution(choices, shardings, {}, 0.0)


def _arriving(plan: Plan, problem: Problem) -> dict[str, Sharding]:
    """Shardings of state and of block inputs, from the plan's text."""
    made = {result for op in problem.ops for result in op.results}
    found: dict[str, Sharding] = {}
    for name, value in problem.values.items():
        if name in made:
            continue
        block, _, node = name.partition("/")
        part = plan.blocks.get(block)
        text = (
            None
            if part is None
            else part.state.get(node)
            if value.state
            else _input(part.inputs, problem, block, node)
        )
        if text is None:
            raise PlanError(
                f"the plan says nothing of {name}", where=f"plan.blocks.{block}", hint="a new plan"
            )
        found[name] = _checked(text, value, plan)
    return found


def _checked(text: str, value: Value, plan: Plan) -> Sharding:
    """The sharding of what arrives in a block, if it fits the model's tensor."""
    sharding, shape = Sharding.parse(text), value.info.shape
    same_rank = len(sharding.dims) == len(shape)
    if not same_rank or sharding.format(shape).replace(" ", "") != text.replace(" ", ""):
        raise PlanError(
            f"the plan has {value.name} as {text}, the model's has the shape {list(shape)}",
            where=f"plan.blocks, {value.name}",
            hint="a new plan",
        )
    if sharding.sums and (value.state or value.source):
        raise PlanError(
            f"the plan has {value.name} as {text}, but what is read from outside is no partial sum",
            where=f"plan.blocks, {value.name}",
            hint="a new plan",
        )
    try:
        sharding.local_shape(shape, plan.run_mesh)
    except ShardingError as error:
        raise PlanError(error.what, where=f"plan.blocks, {value.name}", hint="a new plan") from None
    return sharding


def _input(texts: tuple[str, ...], problem: Problem, block: str, node: str) -> str | None:
    made = {result for op in problem.ops for result in op.results}
    inputs = [
        name
        for name, value in problem.values.items()
        if name.startswith(f"{block}/") and name not in made and not value.state
    ]
    index = inputs.index(f"{block}/{node}")
    return texts[index] if index < len(texts) else None


def _results(op: Op, choice: Mapping[str, str | None], mesh: Mesh) -> dict[str, Sharding]:
    if op.rule is None:
        return {}
    try:
        sharded = op.rule.shard({axis: choice.get(axis) for axis in mesh.names}, mesh.sizes)
    except ShardingError as error:
        raise PlanError(
            f"the plan cannot be run: {error.what}", where=f"plan.blocks, {op.name}", hint="a new plan"
        ) from error
    return dict(zip(op.results, sharded.results, strict=True))


def _renamed(plan: Plan, planned: Problem, problem: Problem) -> Plan:
    """The plan with the loops of ops as they are called in `problem`."""
    before, after = ({op.name: op for op in each.ops} for each in (planned, problem))
    blocks = {}
    for block, part in plan.blocks.items():
        ops = {}
        for node, choice in part.ops.items():
            names = _new_names(before.get(f"{block}/{node}"), after.get(f"{block}/{node}"))
            ops[node] = {
                axis: PAIR.join(names.get(one, one) for one in factor.split(PAIR))
                for axis, factor in choice.items()
            }
        blocks[block] = part.model_copy(update={"ops": ops})
    return plan.model_copy(update={"blocks": blocks})


def _new_names(old: Op | None, new: Op | None) -> dict[str, str]:
    """Loop of the rule at a batch of several -> the loop at the same place of the rule at a batch of one."""
    if old is None or new is None or old.rule is None or new.rule is None:
        return {}
    found: dict[str, str] = {}
    pairs = zip(
        (*old.rule.operands, *old.rule.results), (*new.rule.operands, *new.rule.results), strict=False
    )
    for was, now in pairs:
        for mine, theirs in zip(was, now, strict=False):
            left = [factor for factor in mine if old.logical.get(factor) != "batch"]
            if len(left) == len(theirs):
                found.update(zip(left, theirs, strict=True))
    return found
