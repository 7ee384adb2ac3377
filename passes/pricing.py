"""Pricing: what a full assignment of choices costs, from scratch. The search and its tests share these functions.

In:  a Problem, a Mesh, Prices, the choice of every op and the sharding of every value.
Out: seconds per micro-batch, by block and kind.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache

from autopar.cost.compute import Work, matmul_side, works
from autopar.cost.experts import inside, is_experts
from autopar.cost.prices import Prices
from autopar.cost.ring import Ring, moves, ring_s
from autopar.errors import ShardingError
from autopar.mesh import Mesh
from autopar.passes.candidates import TOKEN_AXES, Candidate, active_axes, of_choice, whole_candidate
from autopar.problem import Choice, Op, Problem, Value
from autopar.rules.attention import RINGS, WINDOW, row_excess, visible_share
from autopar.sharding import Sharding, Step, Use, reshard_steps

FORWARD, BACKWARD = "forward compute", "backward compute"
FORWARD_MOVES, BACKWARD_MOVES = "forward communication", "backward communication"
PARAMETERS = "parameters"
# A parameter gathered inside the graph would stay gathered until its backward and undo what storing it split saves
# (gathering parameters in time is what the fsdp axis does), so state is not.
_GATHERS = ("all_gather", "all_to_all")
# What an element of state that is not trained costs, in elements that are. It takes no time; this only breaks ties.
FROZEN_SHARE = 1e-3
KINDS = (FORWARD, BACKWARD, FORWARD_MOVES, BACKWARD_MOVES, PARAMETERS)


class Pricer:
    """Seconds of ops, reshards and stored state of one Problem on one mesh."""

    def __init__(self, problem: Problem, mesh: Mesh, prices: Prices) -> None:
        self.problem, self.mesh, self.prices = problem, mesh, prices
        self.sizes = mesh.sizes
        self.works: Mapping[str, Work] = works(problem, prices.fused)
        self.times = block_times(problem)
        self.bytes = {
            name: math.prod(value.info.shape) * prices.item_bytes[value.info.dtype]
            for name, value in problem.values.items()
        }
        self._ways: dict[Sharding, int] = {}
        self._step_s: dict[tuple[Step, float], tuple[float, float]] = {}
        self._op_s: dict[tuple[object, ...], tuple[float, float]] = {}

    def ways(self, sharding: Sharding) -> int:
        """Into how many pieces a sharding cuts the tensor."""
        found = self._ways.get(sharding)
        if found is None:
            found = self._ways[sharding] = self.mesh.size(*(axis for axes in sharding.dims for axis in axes))
        return found

    def op_s(self, op: Op, candidate: Candidate) -> tuple[float, float]:
        """(forward, backward) seconds of one run of the op."""
        work = self.works[op.name]
        if work.kind == "free":
            return 0.0, 0.0
        values = self.problem.values
        operands = tuple(
            (0.0 if name not in values else self.bytes[name] / self.ways(use.sharding))
            for name, use in zip(op.operands, candidate.uses, strict=True)
        )
        results = tuple(
            (0.0 if name not in values else self.bytes[name] / self.ways(made))
            for name, made in zip(op.results, candidate.results, strict=True)
        )
        flops, side = 0.0, 1.0
        if op.rule is not None and work.kind in ("matmul", "attention"):
            local = op.rule.local_sizes(candidate.by_factor, self.sizes)
            flops = op.rule.flops_per_point * math.prod(local.values())
            flops *= row_excess(op.rule, candidate.by_factor)
            side = matmul_side(op, local) if work.kind == "matmul" else 1.0
        key = (work, flops, side, operands, results)
        found = self._op_s.get(key)
        if found is None:
            found = self._op_s[key] = self.prices.roofline.op_s(work, flops, side, operands, results)
        if is_experts(op):
            forward, backward = self._experts_s(op, candidate)
            return found[0] + forward, found[1] + (backward if any(work.backward) else 0.0)
        ring = self._ring(op, candidate)
        if ring is not None:
            forward, backward = self._ring_s(ring)
            return found[0] + forward, found[1] + (backward if any(work.backward) else 0.0)
        return found

    def sent_inside(self, op: Op, candidate: Candidate) -> float:
        """Bytes one rank sends inside of an op, forward and backward: slots to their experts, keys around a ring."""
        if is_experts(op):
            within = inside(op, candidate.by_factor, self.sizes)
            item = self.prices.item_bytes[self.problem.values[op.operands[0]].info.dtype]
            each = 2 * item * sum(within.sent_elements)
            return sum(each * (self.sizes[axis] - 1) / self.sizes[axis] for axis in within.pairs)
        ring = self._ring(op, candidate)
        return 0.0 if ring is None else ring.sent_bytes

    def _ring(self, op: Op, candidate: Candidate) -> Ring | None:
        """What attention sends around the ring of its ranks, if it has one."""
        way = next((way for way in RINGS if way in candidate.by_factor), None)
        if way is None:
            return None
        assert op.rule is not None
        (axis,) = candidate.by_factor[way]
        keys = self.problem.values[op.operands[1]]
        exact = max(4, self.prices.item_bytes[keys.info.dtype]) / self.prices.item_bytes[keys.info.dtype]
        query, key, value = (
            self.bytes[name] / self.ways(use.sharding)
            for name, use in zip(op.operands[:3], candidate.uses[:3], strict=True)
        )
        made = self.bytes[op.results[0]] / self.ways(candidate.results[0])
        return Ring(
            axis,
            held_bytes=key + value,
            gradient_bytes=exact * (key + value),
            count=moves(self.sizes[axis], visible_share(op.rule), windowed=op.rule.lowering == WINDOW),
            exchanged_bytes=query + key + value + made if way != RINGS[0] else 0.0,
        )

    def _ring_s(self, ring: Ring) -> tuple[float, float]:
        """(forward, backward) seconds of what attention sends around its ring."""
        size, stride = self.sizes[ring.axis], self.mesh.stride(ring.axis)
        return ring_s(self.prices.cluster, size, stride, ring)

    def _experts_s(self, op: Op, candidate: Candidate) -> tuple[float, float]:
        """(forward, backward) seconds of what experts do beside their products: rows put in order and what is between
        the products, each written and read; and along axes that split tokens too, rows sent there and back, and
        first their numbers, which are too small to count but for their latency."""
        prices, within = self.prices, inside(op, candidate.by_factor, self.sizes)
        item = prices.item_bytes[self.problem.values[op.operands[0]].info.dtype]
        forward = 2 * item * within.kept_elements(prices.fused) / prices.roofline.memory
        sent = 0.0
        for axis in within.pairs:
            sent += sum(
                prices.collective_s("all_to_all", axis, item * count) for count in within.sent_elements
            )
        counts = sum(prices.collective_s("all_to_all", axis, 8.0) for axis in within.pairs)
        return forward + sent + counts, 2 * forward + sent

    def move_s(self, value: Value, made: Sharding, use: Use) -> tuple[float, float]:
        """(forward, backward) seconds of one reshard (of a use that `normal_use` gave); inf where there is no way."""
        if made == use.sharding and not use.grad_sums:
            return 0.0, 0.0
        steps = steps_between(made, use)
        if steps is None or (value.state and any(step.kind in _GATHERS for step in steps)):
            return math.inf, math.inf
        forward = backward = 0.0
        local = self.bytes[value.name] / self.ways(made)
        for step in steps:
            key = (step, local)
            found = self._step_s.get(key)
            if found is None:
                found = self._step_s[key] = self.prices.step_s(step, local)
            if (
                value.state and step.kind == "copy"
            ):  # the parameter store adds these up once per step, in buckets
                found = (0.0, self.prices.state_sum_s(step.axis, local))
            forward, backward = forward + found[0], backward + found[1]
            if step.kind == "all_gather":
                local *= self.sizes[step.axis]
            elif step.kind in ("slice", "reduce_scatter"):
                local /= self.sizes[step.axis]
        return forward, backward if value.gradient else 0.0

    def state_s(self, value: Value, stored: Sharding) -> float:
        """What keeping a trainable parameter in `stored` costs per micro-batch; once however often it is shared. What is
        not trained costs memory only: next to nothing, so that of equally fast placements the smaller is taken."""
        if not value.state:
            return 0.0
        times = 1 if value.interface else self.times[block_of(value.name)]
        kept = times * math.prod(value.info.shape) / self.ways(stored) * self.prices.parameter_s
        return kept if value.gradient else kept * FROZEN_SHARE


@lru_cache(maxsize=65536)
def steps_between(made: Sharding, use: Use) -> tuple[Step, ...] | None:
    """The steps from one to the other; None if there are none that lead there."""
    try:
        return reshard_steps(made, use)
    except ShardingError:
        return None


def block_of(name: str) -> str:
    return name.split("/", 1)[0]


def block_times(problem: Problem) -> dict[str, int]:
    """How often each block runs."""
    times = {block_of(name): 1 for name in problem.values}
    times.update((block_of(op.name), op.times) for op in problem.ops)
    return times


def makers(problem: Problem) -> dict[str, Op]:
    """Value name -> the op that makes it, for values made in their block."""
    return {name: op for op in problem.ops for name in op.results if name in problem.values}


def group_of(value: Value) -> str:
    """What agrees on one sharding: the interface, or the value alone."""
    return value.interface or value.name


def arriving(problem: Problem) -> dict[str, list[Value]]:
    """Group -> its values that are not made in their block: state, inputs of the model and of blocks."""
    made = makers(problem)
    groups: dict[str, list[Value]] = {}
    for name, value in problem.values.items():
        if name not in made:
            groups.setdefault(group_of(value), []).append(value)
    return groups


def evaluate(
    problem: Problem,
    mesh: Mesh,
    prices: Prices,
    choices: Mapping[str, Choice],
    shardings: Mapping[str, Sharding],
    pricer: Pricer | None = None,
) -> dict[str, dict[str, float]]:
    """Block -> kind -> seconds per micro-batch (all calls of the block) of a full assignment.

    `shardings` has every value (as made, or as it arrives). Raises ShardingError where it and the choices disagree.
    """
    pricer = pricer or Pricer(problem, mesh, prices)
    costs: dict[str, dict[str, float]] = {block: dict.fromkeys(KINDS, 0.0) for block in pricer.times}
    uses: dict[str, dict[Use, None]] = defaultdict(dict)
    for op in problem.ops:
        candidate = candidate_of(op, problem, mesh, choices[op.name])
        for name, use in zip(op.operands, candidate.uses, strict=True):
            uses[name][use] = None
        for name, made in zip(op.results, candidate.results, strict=True):
            if name in problem.values and shardings[name] != made:
                raise ShardingError(
                    f"{op.name} makes {name} as {made}, the assignment says {shardings[name]}", where=op.name
                )
        forward, backward = pricer.op_s(op, candidate)
        cost = costs[block_of(op.name)]
        cost[FORWARD] += op.times * forward
        cost[BACKWARD] += op.times * backward
    groups = arriving(problem)
    made_in_block = makers(problem)
    for name, value in problem.values.items():
        if name in made_in_block:
            if value.interface in groups:
                uses[name][Use(shardings[groups[value.interface][0].name])] = None
            if name in problem.outputs:
                uses[name][Use(Sharding.whole(len(value.info.shape)))] = None
    for group, members in groups.items():
        first = shardings[members[0].name]
        if first.sums or any(shardings[member.name] != first for member in members):
            raise ShardingError(f"{group}: its values do not agree on one sharding without sums", where=group)
        costs[block_of(members[0].name)][PARAMETERS] += pricer.state_s(members[0], first)
    for name, wanted in uses.items():
        value = problem.values[name]
        cost = costs[block_of(name)]
        for use in dict.fromkeys(normal_use(value, use) for use in wanted):
            forward, backward = pricer.move_s(value, shardings[name], use)
            cost[FORWARD_MOVES] += pricer.times[block_of(name)] * forward
            cost[BACKWARD_MOVES] += pricer.times[block_of(name)] * backward
    return costs


def normal_use(value: Value, use: Use) -> Use:
    """The use without what costs nothing: how the gradient of a value that has none would come back, and the sums
    over the token axes in the gradient of *state*, which are the parameter store's to reduce."""
    if not use.grad_sums:
        return use
    if not value.gradient:
        return Use(use.sharding)
    if value.state:
        return Use(use.sharding, tuple(axis for axis in use.grad_sums if axis not in TOKEN_AXES))
    return use


def total_s(costs: Mapping[str, Mapping[str, float]]) -> float:
    return sum(seconds for cost in costs.values() for seconds in cost.values())


def by_kind(costs: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {kind: sum(cost[kind] for cost in costs.values()) for kind in KINDS}


def candidate_of(op: Op, problem: Problem, mesh: Mesh, choice: Choice) -> Candidate:
    """The Candidate of one choice, checked by the rule itself."""
    if op.rule is None:
        return whole_candidate(op, problem, mesh)
    full = tuple((axis, choice.get(axis)) for axis in active_axes(mesh))
    op.rule.shard(dict(full), mesh.sizes)
    return of_choice(op.rule, full)
