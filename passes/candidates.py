"""Candidates: the choices each op has on a mesh, and the shardings they make and ask for.

In:  an Op with its rule, a Mesh, what the user fixed.
Out: Candidates: a choice per mesh axis, with the uses of the operands and the shardings of the results.

The data axes (`dp`, `fsdp`) act together: on an op they split its `batch` loop, where it has one that divides. (An op
that repeats the batch on every data rank would only save the reduction of its gradients; that is what a mesh with
fewer data ranks is for, and nobody who asks for dp=2 expects it.) `ep` is a data axis too, but for ops with experts:
there tokens and experts are split at once, as a pair. `cp` splits the sequence, where an op has one: of attention its
rows, or rows and keys as a pair, or the heads. `tp` takes any loop or pair that divides, hands partial sums on where
the op is linear, or nothing (every rank repeats the op). All axes are chosen at once: what is left to split by one
depends on the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from autopar.errors import ConstraintError
from autopar.mesh import Mesh
from autopar.problem import Choice, Op, Problem
from autopar.rules.attention import RINGS
from autopar.rules.rule import PAIR, SUMS, Dims, Rule, Sharded, factors_of, pair_choice, sums_choice
from autopar.sharding import Sharding, Use

DATA_AXES = ("dp", "fsdp")
EXPERT_AXIS, CONTEXT_AXIS, TENSOR_AXIS = "ep", "cp", "tp"
# Over these the gradients of state are added up by the parameter store, once per step.
TOKEN_AXES = (*DATA_AXES, EXPERT_AXIS, CONTEXT_AXIS)

# Lowerings that exist: a rule's `special` factors are split only with one of these.
SUPPORTED_LOWERINGS = frozenset(
    {
        "embedding",
        "cross_entropy",
        "batch_norm",
        "masked_scatter",
        "attention",
        "causal_attention",
        "window_attention",
        "experts",
    }
)


@dataclass(frozen=True)
class Candidate:
    """`choice`: (axis, factor) in mesh order, for the axes larger than 1. `by_factor`: factor -> axes."""

    choice: tuple[tuple[str, str | None], ...]
    uses: tuple[Use, ...]
    results: tuple[Sharding, ...]
    by_factor: Mapping[str, tuple[str, ...]]

    @property
    def as_choice(self) -> Choice:
        return dict(self.choice)


def active_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes larger than 1, outermost first: the only ones that choices and shardings mention."""
    return tuple(name for name, size in mesh.axes if size > 1)


def candidates(op: Op, problem: Problem, mesh: Mesh) -> list[Candidate]:
    """Every choice of an op, fewest splits first. Raises ConstraintError if what is fixed leaves none."""
    if op.rule is None:
        return [whole_candidate(op, problem, mesh)]
    fixed = problem.fixed.get(op.name, {})
    found = [of_choice(op.rule, choice) for choice in _choices(op, mesh) if _obeys(choice, fixed)]
    if not found:
        wanted = ", ".join(f"{axis} splits {factor}" for axis, factor in fixed.items())
        raise ConstraintError(
            f"{op.name} = {op.kind} has no choice on {mesh} where {wanted}",
            where=op.name,
            hint="another mesh, or dropping the constraint",
        )
    return sorted(found, key=lambda candidate: sum(factor is not None for _, factor in candidate.choice))


def whole_candidate(op: Op, problem: Problem, mesh: Mesh) -> Candidate:
    """Every rank runs the op on whole tensors."""
    uses = tuple(Use(Sharding.whole(len(problem.values[name].info.shape))) for name in op.operands)
    results = tuple(
        Sharding.whole(len(problem.values[name].info.shape)) if name in problem.values else Sharding.whole(0)
        for name in op.results
    )
    return Candidate(tuple((axis, None) for axis in active_axes(mesh)), uses, results, {})


def of_choice(rule: Rule, choice: tuple[tuple[str, str | None], ...]) -> Candidate:
    """The Candidate of one choice; that it divides is the caller's business."""
    sharded = _sharded(rule.operands, rule.results, rule.reduced, rule.sums, rule.pairs, rule.joint, choice)
    return Candidate(choice, sharded.uses, sharded.results, sharded.by_factor)


@lru_cache(maxsize=65536)
def _sharded(
    operands: tuple[Dims, ...],
    results: tuple[Dims, ...],
    reduced: frozenset[str],
    sums: tuple[tuple[int, ...], ...],
    pairs: tuple[tuple[str, ...], ...],
    joint: tuple[str, ...],
    choice: tuple[tuple[str, str | None], ...],
) -> Sharded:
    """`Rule.shard`, which does not depend on sizes but for divisibility: ops of one form share the answer."""
    sizes = {name: 1 for dims in (*operands, *results) for dim in dims for name in dim}
    rule = Rule(operands, results, sizes, reduced=reduced, sums=sums, pairs=pairs, joint=joint)
    return rule.shard(dict(choice), {axis: 1 for axis, _ in choice})


def _choices(op: Op, mesh: Mesh) -> Iterator[tuple[tuple[str, str | None], ...]]:
    rule = op.rule
    assert rule is not None
    axes = active_axes(mesh)
    lowered = rule.lowering in SUPPORTED_LOWERINGS
    allowed = [name for name in rule.splittable() if name not in rule.special or lowered]
    pairs = [pair_choice(pair) for pair in rule.pairs] if lowered else []
    joint = list(rule.joint) if lowered else []
    data = tuple(axis for axis in axes if axis in DATA_AXES)
    batches: list[str | None] = [name for name in allowed if op.logical.get(name) == "batch"]
    experts: list[str | None] = [pair for pair in pairs if op.logical.get(pair.split(PAIR)[0]) == "batch"]
    # What is done to the experts' matrices before they are used (a transpose) may be done to each rank's own.
    weights = [name for name in allowed if op.logical.get(name) == "expert"]
    positions = [name for name in allowed if op.logical.get(name) == "sequence"]
    rows = [pair for pair in pairs if op.logical.get(pair.split(PAIR)[0]) == "sequence"]
    heads = [name for name in allowed if rows and op.logical.get(name) == "heads"]
    # Per group of axes what it may split, in order of preference; the first list with something that divides counts.
    wanted: list[tuple[tuple[str, ...], list[list[str | None]]]] = [
        (data, [batches]),
        ((EXPERT_AXIS,), [experts, batches, [*weights, None]]),
        ((CONTEXT_AXIS,), [[*positions, *rows, *heads]]),
    ]
    chosen: list[dict[str, str | None]] = [{}]
    for group, preferences in wanted:
        here = [axis for axis in group if axis in axes]
        if here:
            chosen = [
                taken | dict.fromkeys(here, factor)
                for taken in chosen
                for factor in _first_that_divides(rule, preferences, mesh, taken, here)
            ]
    tensor: list[str | None] = [None]
    if TENSOR_AXIS in axes:
        tensor += [*allowed, *pairs, *joint, *(sums_choice(group) for group in range(len(rule.sums)))]
    for taken in chosen:
        for factor in tensor:
            if factor in RINGS and set(RINGS) & set(taken.values()):
                continue  # a ring goes around one axis
            choice = taken | {TENSOR_AXIS: factor} if TENSOR_AXIS in axes else taken
            if factor is None or factor.startswith(SUMS) or _divides(rule, choice, mesh):
                yield tuple((axis, choice[axis]) for axis in axes)


def _first_that_divides(
    rule: Rule, preferences: list[list[str | None]], mesh: Mesh, taken: Choice, axes: Sequence[str]
) -> Sequence[str | None]:
    for factors in preferences:
        found = [
            factor for factor in factors if _divides(rule, {**taken, **dict.fromkeys(axes, factor)}, mesh)
        ]
        if found:
            return found
    return (None,)


def _divides(rule: Rule, choice: Choice, mesh: Mesh) -> bool:
    ways: dict[str, int] = {}
    for axis, factor in choice.items():
        if factor is not None and not factor.startswith(SUMS):
            for name, parts in factors_of(factor).items():
                ways[name] = ways.get(name, 1) * mesh.sizes[axis] * parts
    return rule.divides(ways)


def _obeys(choice: tuple[tuple[str, str | None], ...], fixed: Choice) -> bool:
    return all(axis not in fixed or fixed[axis] == factor for axis, factor in choice)
