"""Limits: how large the integers in a program's inputs may be.

In:  a Program and its Problem.
Out: per input that indexes an embedding or names a class: the number of rows or classes, and the label to ignore.

A whole embedding refuses an id out of range; over a split one no rank holds it, every rank adds nothing, and the
result is silently zero. So ids are checked where a batch comes in.

    input_ids -> embedding of 49152 rows            {"input_ids": IdLimit(49152)}
    labels -> pad -> slice -> cross_entropy         {"labels": IdLimit(49152, ignore=-100)}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.problem import Op, Problem
from autopar.program import Program


@dataclass(frozen=True)
class IdLimit:
    """Ids are in [0, size), or equal to `ignore`."""

    size: int
    ignore: int | None = None


def id_limits(program: Program, problem: Problem) -> dict[str, IdLimit]:
    """Limits by input name, for inputs that reach an embedding or a loss through ops on integers alone."""
    makers = {result: op for op in problem.ops for result in op.results}
    bound = {
        f"{call.block}/{node}": value
        for call in program.calls
        for node, value in zip(program.blocks[call.block].inputs, call.inputs, strict=True)
    }
    found: dict[str, IdLimit] = {}
    for op in problem.ops:
        if op.rule is None or op.kind not in ("aten.embedding", "autopar.cross_entropy"):
            continue
        source = _source(op.operands[1], problem, makers, bound)
        if source not in program.inputs:
            continue
        if op.kind == "aten.embedding":
            size, ignore = problem.values[op.operands[0]].info.shape[0], None
        else:
            size = problem.values[op.operands[0]].info.shape[-1]
            block, _, node = op.name.partition("/")
            value = program.blocks[block].node(node).args[2]
            ignore = value if isinstance(value, int) else None
        known = found.get(source)
        # Labels that also feed a decoder's embedding keep the label to ignore: the model replaces it on the way.
        merged = ignore if known is None or known.ignore is None else known.ignore
        found[source] = IdLimit(min(size, known.size) if known else size, merged)
    return found


def _source(value: str, problem: Problem, makers: Mapping[str, Op], bound: Mapping[str, str]) -> str:
    """The name of the input that an integer value is cut, padded or reshaped from; '' if it is made in other ways."""
    while value in makers:
        integers = [name for name in makers[value].operands if problem.values[name].info.dtype == "int64"]
        if len(integers) != 1:
            return ""
        value = integers[0]
    return bound.get(value, "")
