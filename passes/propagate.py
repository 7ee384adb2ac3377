"""Propagate: what a user fixes, carried forward and backward through the rules to a fixed point.

In:  a Problem and constraints such as `heads=tp`, `batch=dp` or `model.layers.*.mlp.up_proj.weight=[_@tp, _]`.
Out: the Problem with the choices of every op that the constraints decide, and notes on where two of them meet and
     a reshard will stand between them. Two constraints that ask one tensor for different things are an error that
     names both.

An op along one of whose loops an operand or result is split is split along that loop, and so is every other
operand and result that has it.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from autopar.errors import ConstraintError, ShardingError, UsageError
from autopar.mesh import Mesh
from autopar.passes.candidates import TENSOR_AXIS
from autopar.problem import Op, Problem
from autopar.program import Program
from autopar.rules.rule import JOINT
from autopar.sharding import Sharding

MESH_AXES = ("dp", "fsdp", "ep", "cp", "tp")

_LOGICAL = re.compile(r"[a-z_]+\d*")
_PIECE = re.compile(r"\[(:, )*\d+:\d+\]$")


@dataclass(frozen=True)
class Constraint:
    """`text` as the user wrote it; a logical axis or a state name pattern, and where it goes."""

    text: str
    logical: str | None = None
    axes: tuple[str, ...] = ()
    pattern: str | None = None
    sharding: Sharding | None = None


def parse_constraint(text: str) -> Constraint:
    """`heads=tp`, or `name.pattern.*=[_@tp, _]` for parameters."""
    left, equals, right = (part.strip() for part in text.partition("="))
    if not equals or not left or not right:
        raise UsageError(
            f"cannot read constraint {text!r}",
            hint="'heads=tp', 'batch=dp' or 'model.layers.*.weight=[_@tp, _]'",
        )
    if right.startswith("["):
        try:
            sharding = Sharding.parse(right)
        except ShardingError as error:
            raise UsageError(
                f"constraint {text!r}: {error.what}", hint="a split such as [_@tp, _], one entry per dim"
            ) from None
        if sharding.sums:
            raise UsageError(
                f"constraint {text!r}: a parameter cannot be a partial sum", hint="a split such as [_@tp, _]"
            )
        _known_axes(sharding.axes, text)
        if set(sharding.axes) - {"tp"}:
            raise UsageError(
                f"constraint {text!r}: a parameter is split over tp; dp keeps it whole and fsdp splits its rows by itself",
                hint="a split such as [_@tp, _], and --mesh fsdp=N for ZeRO-3",
            )
        return Constraint(text, pattern=left, sharding=sharding)
    if not _LOGICAL.fullmatch(left):
        raise UsageError(
            f"constraint {text!r}: {left!r} is not the name of a logical axis", hint="'heads=tp' or 'ffn=tp'"
        )
    axes = tuple(axis.strip() for axis in right.split("."))
    _known_axes(axes, text)
    if len(set(axes)) < len(axes):
        raise UsageError(f"constraint {text!r} names a mesh axis twice", hint="each axis once")
    return Constraint(text, logical=left, axes=axes)


def _known_axes(axes: Sequence[str], text: str) -> None:
    for axis in axes:
        if axis not in MESH_AXES:
            raise UsageError(
                f"constraint {text!r}: there is no mesh axis {axis!r}", hint=f"one of {', '.join(MESH_AXES)}"
            )


class _Propagation:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.values: dict[str, dict[str, tuple[int, str]]] = {}  # value -> axis -> (dim, source)
        self.ops: dict[str, dict[str, tuple[str, str]]] = {}  # op -> axis -> (factor, source)
        self.asked: set[str] = set()  # values that the user named
        self.notes: list[str] = []
        self.queue: deque[tuple[str, int, str, str]] = deque()
        self.touching: dict[str, list[Op]] = {}
        self.same: dict[str, list[str]] = {}
        for op in problem.ops:
            for name in dict.fromkeys((*op.operands, *op.results)):
                self.touching.setdefault(name, []).append(op)
        for name, value in problem.values.items():
            if value.interface:
                self.same.setdefault(value.interface, []).append(name)

    def split_value(self, name: str, dim: int, axis: str, source: str, *, asked: bool) -> None:
        """Value `name` is split in `dim` over `axis`, because of `source`; `asked` if the user said so himself."""
        value = self.problem.values.get(name)
        if value is None:
            return
        known = self.values.setdefault(name, {}).get(axis)
        if known is not None:
            if known[0] != dim:
                self._conflict(name, axis, known, (dim, source), asked)
            return
        self.values[name][axis] = (dim, source)
        self.queue.append((name, dim, axis, source))
        if value.interface:
            for other in self.same[value.interface]:
                if other != name:
                    self.split_value(other, dim, axis, source, asked=asked)

    def _conflict(
        self, name: str, axis: str, known: tuple[int, str], new: tuple[int, str], asked: bool
    ) -> None:
        text = (
            f"{name}: `{known[1]}` splits dim {known[0]} over {axis}, `{new[1]}` splits dim {new[0]} over {axis}"
            if known[1] != new[1]
            else f"{name}: `{new[1]}` splits both dim {known[0]} and dim {new[0]} over {axis}"
        )
        if asked:
            raise ConstraintError(
                f"two constraints cannot hold together: {text}", where=name, hint="to drop one of them"
            )
        self.notes.append(f"{text}: resharded in between")

    def split_op(self, op: Op, factor: str, axis: str, source: str) -> None:
        if op.rule is None or factor not in op.rule.splittable():
            return
        known = self.ops.setdefault(op.name, {}).get(axis)
        if known is not None:
            if known[0] != factor:
                self.notes.append(
                    f"{op.name}: `{known[1]}` splits its loop {known[0]} over {axis}, `{source}` its loop {factor}: "
                    f"the first holds, and an operand is resharded"
                )
            return
        self.ops[op.name][axis] = (factor, source)
        for names, all_dims in ((op.operands, op.rule.operands), (op.results, op.rule.results)):
            for name, dims in zip(names, all_dims, strict=True):
                for index, dim in enumerate(dims):
                    if dim and dim[0] == factor:
                        self.split_value(name, index, axis, source, asked=False)

    def run(self) -> None:
        while self.queue:
            name, dim, axis, source = self.queue.popleft()
            for op in self.touching.get(name, ()):
                if op.rule is None:
                    continue
                for names, all_dims in ((op.operands, op.rule.operands), (op.results, op.rule.results)):
                    for other, dims in zip(names, all_dims, strict=True):
                        if other == name and dims[dim]:
                            self.split_op(op, dims[dim][0], axis, source)


def propagate(
    problem: Problem, program: Program, constraints: Sequence[Constraint]
) -> tuple[Problem, tuple[str, ...]]:
    """The Problem with `fixed` filled in, and notes. Raises ConstraintError where constraints clash or name nothing."""
    work = _Propagation(problem)
    # What is asked of one tensor is compared with all else, so it comes last, in whichever order the user wrote them.
    for constraint in sorted(constraints, key=lambda constraint: constraint.pattern is not None):
        if constraint.pattern is not None:
            _seed_state(work, program, constraint)
        else:
            _seed_logical(work, constraint)
    work.run()
    order = {axis: index for index, axis in enumerate(MESH_AXES)}
    fixed = {
        op: {axis: factors[axis][0] for axis in sorted(factors, key=order.__getitem__)}
        for op, factors in work.ops.items()
    }
    asked = frozenset(op.name for op in problem.ops if work.asked & set(op.operands))
    return replace(problem, fixed=fixed, asked=asked), tuple(dict.fromkeys(work.notes))


def _seed_state(work: _Propagation, program: Program, constraint: Constraint) -> None:
    assert constraint.pattern is not None
    assert constraint.sharding is not None
    matched = False
    for call in program.calls:
        block = program.blocks[call.block]
        for node, state in zip(block.state, call.state, strict=True):
            source = program.state[state].source(state)  # of a packed parameter, its pieces are all meant
            names = (state, source, *(alias for alias, name in program.tied.items() if name == source))
            if not any(fnmatchcase(name, _literal_piece(constraint.pattern)) for name in names):
                continue
            matched = True
            value = f"{call.block}/{node}"
            dims = len(work.problem.values[value].info.shape)
            if dims != len(constraint.sharding.dims):
                raise ConstraintError(
                    f"constraint {constraint.text!r} has {len(constraint.sharding.dims)} dims, {state} has {dims}",
                    where=state,
                    hint="one entry per dim, `_` for a whole one",
                )
            for dim, axes in enumerate(constraint.sharding.dims):
                for axis in axes:
                    work.asked.add(value)
                    work.split_value(value, dim, axis, constraint.text, asked=True)
    if not matched:
        examples = list(program.state)[1:4]
        raise ConstraintError(
            f"constraint {constraint.text!r} matches no parameter",
            hint=f"names such as {', '.join(examples)}; `*` matches any text",
        )


def _literal_piece(pattern: str) -> str:
    """The range that ends the name of a piece, `weight[:, 0:64]`, is no set of characters."""
    found = _PIECE.search(pattern)
    return pattern if found is None else f"{pattern[: found.start()]}[[]{pattern[found.start() + 1 :]}"


def _seed_logical(work: _Propagation, constraint: Constraint) -> None:
    logical = constraint.logical
    known = sorted({name for op in work.problem.ops for name in op.logical.values()})
    if logical not in known:
        raise ConstraintError(
            f"constraint {constraint.text!r}: the model has no logical axis {logical!r}",
            hint=f"one of {', '.join(known)}",
        )
    for axis in constraint.axes:
        splits = {"tp": logical, "cp": "sequence"}.get(axis, "batch")
        if logical != splits:
            raise ConstraintError(
                f"constraint {constraint.text!r}: {axis} splits the {splits}, not {logical}",
                hint=f"{logical}=tp, or batch={axis}",
            )
        for op in work.problem.ops:
            for factor, name in op.logical.items():
                if name == logical:
                    work.split_op(op, factor, axis, constraint.text)
        for value in work.problem.values.values():
            for dim, name in enumerate(value.axes):
                if name == logical:
                    work.split_value(value.name, dim, axis, constraint.text, asked=False)


def with_replicated_keys(problem: Problem, mesh: Mesh) -> Problem:
    """The Problem with what is fixed as this mesh can have it where `heads=tp` splits finer than the heads of keys.

    Attention splits its dim (kv rep) as one: each rank has the keys and values of the heads that live there
    (`kv.rep`). What makes the keys' heads, up to their projections, is then for the planner to place, but where the
    user said of a tensor how it is to be split.
    """
    fixed = {name: dict(choice) for name, choice in problem.fixed.items()}
    freed: list[tuple[Op, str, str]] = []
    for op in problem.ops:
        if op.rule is None:
            continue
        for joint in op.rule.joint:
            first = joint.split(JOINT)[0]
            axes = [axis for axis, factor in fixed.get(op.name, {}).items() if factor == first]
            ways = math.prod(mesh.sizes.get(axis, 1) for axis in axes)
            if axes != [TENSOR_AXIS] or not op.rule.sizes[first] % ways or op.rule.size_of(joint) % ways:
                continue
            fixed[op.name][TENSOR_AXIS] = joint
            freed.append((op, first, joint))
    _free_makers(problem, fixed, freed)
    return replace(problem, fixed=fixed) if freed else problem


def _free_makers(
    problem: Problem, fixed: dict[str, dict[str, str | None]], freed: Sequence[tuple[Op, str, str]]
) -> None:
    """Let go of tp on the ops that keys and values come from: backward from attention, along the dim of their heads."""
    makers = {name: op for op in problem.ops for name in op.results}
    waiting = [
        (name, index)
        for op, first, _ in freed
        if op.rule is not None
        for name, dims in zip(op.operands, op.rule.operands, strict=True)
        for index, dim in enumerate(dims)
        if dim == (first,)
    ]
    while waiting:
        name, index = waiting.pop()
        maker = makers.get(name)
        if maker is None or maker.rule is None:
            continue
        dim = maker.rule.results[maker.results.index(name)][index]
        if not dim or fixed.get(maker.name, {}).get(TENSOR_AXIS) != dim[0] or maker.name in problem.asked:
            continue
        del fixed[maker.name][TENSOR_AXIS]
        waiting += [
            (operand, at)
            for operand, dims in zip(maker.operands, maker.rule.operands, strict=True)
            for at, other in enumerate(dims)
            if other and other[0] == dim[0]
        ]


def check_fixed(problem: Problem, mesh: Mesh, constraints: Sequence[str]) -> None:
    """Raise ConstraintError where a fixed choice does not divide on this mesh, saying which sizes would do. Heads that
    split finer than those of the keys do (`with_replicated_keys`)."""
    problem, sizes = with_replicated_keys(problem, mesh), mesh.sizes
    worst: dict[str, set[int]] = {}
    for op in problem.ops:
        ways: dict[str, int] = {}
        for axis, factor in problem.fixed.get(op.name, {}).items():
            if factor is not None:
                ways[factor] = ways.get(factor, 1) * sizes.get(axis, 1)
        for factor, count in ways.items():
            assert op.rule is not None
            if op.rule.size_of(factor) % count:
                name = op.logical.get(factor.split(JOINT)[0], factor)
                worst.setdefault(name, set()).add(op.rule.size_of(factor))
    if not worst:
        return
    name, found = next(iter(worst.items()))
    every = _sizes_of(problem, name) or found
    fits = [str(way) for way in range(2, min(every) + 1) if all(size % way == 0 for size in every)]
    raise ConstraintError(
        f"{name} cannot be split over this mesh: {' and '.join(map(str, sorted(found)))} {name} "
        f"over {mesh} does not divide evenly (asked for by {', '.join(f'`{text}`' for text in constraints)})",
        hint=(f"an axis of size {' or '.join(fits)}, or " if fits else "")
        + "to leave the constraint out: the planner then splits what does divide",
    )


def _sizes_of(problem: Problem, logical: str) -> set[int]:
    return {
        op.rule.sizes[factor]
        for op in problem.ops
        if op.rule is not None
        for factor, name in op.logical.items()
        if name == logical and factor in op.rule.splittable()
    }
