"""OpCall: one op instance without torch, and the small helpers the rule families share.

In: the name and arguments of an op, with a TensorInfo where each tensor stood. Out: what a rule function reads.

    aten.linear(x: float32[4, 16, 32], w: float32[64, 32])
      -> OpCall("aten.linear", (x, w), {}, operands=(x, w), results=(float32[4, 16, 64],))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.program import TensorInfo
from autopar.rules.rule import Rule


@dataclass(frozen=True)
class OpCall:
    """One op instance.

    `args` and `kwargs` hold a TensorInfo in place of every tensor, also inside lists. `operands` are those
    TensorInfos in order of appearance, args before kwargs, lists flattened, None skipped.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    operands: tuple[TensorInfo, ...] = ()
    results: tuple[TensorInfo, ...] = ()

    @staticmethod
    def of(
        name: str, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[TensorInfo]
    ) -> OpCall:
        """The call with `operands` read off its arguments."""
        operands = tuple(leaf for leaf in leaves([list(args), dict(kwargs)]) if isinstance(leaf, TensorInfo))
        return OpCall(name, tuple(args), dict(kwargs), operands, tuple(results))

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """The argument at `index`, or the one named `name`, or `default`."""
        return self.args[index] if index < len(self.args) else self.kwargs.get(name, default)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(info.shape for info in self.operands)

    @property
    def result_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(info.shape for info in self.results)

    def parse(self, text: str, **fields: Any) -> Rule:
        """`Rule.parse` of `text` for this instance's shapes, with other Rule fields set; `whole` is added to."""
        rule = Rule.parse(text, self.shapes, self.result_shapes)
        whole = rule.whole | frozenset(fields.pop("whole", ()))
        logical = {name: word for name, word in fields.pop("logical", {}).items() if name in rule.sizes}
        return replace(rule, whole=whole, logical=logical, **fields)


RuleFunction = Callable[[OpCall], "Rule | None"]
Sums = tuple[tuple[int, ...], ...]


def leaves(value: Any) -> Iterator[Any]:
    """The leaves of nested lists, tuples and dicts, in order."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from leaves(item)
    else:
        yield value


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """The same nesting of lists, tuples and dicts with `function` applied to every leaf."""
    if isinstance(value, (list, tuple)):
        return type(value)([map_leaves(item, function) for item in value])
    if isinstance(value, Mapping):
        return {key: map_leaves(item, function) for key, item in value.items()}
    return function(value)


def tensor_positions(call: OpCall) -> list[int | None]:
    """For each positional argument the index of its operand, or None if it is not a tensor (or a list of them)."""
    positions: list[int | None] = []
    seen = 0
    for argument in call.args:
        positions.append(seen if isinstance(argument, TensorInfo) else None)
        seen += sum(isinstance(leaf, TensorInfo) for leaf in leaves(argument))
    return positions


# ---- rules built dim by dim -------------------------------------------------------------------------------


def names(count: int, prefix: str = "") -> list[str]:
    """Distinct factor names: `a b c ...`, or `i0 i1 ...` with a prefix."""
    if not prefix and count <= 26:
        return list("abcdefghijklmnopqrstuvwxyz"[:count])
    return [f"{prefix or 'a'}{index}" for index in range(count)]


def tokens(shape: Sequence[int], factors: Sequence[str]) -> list[str]:
    """One rule token per dim: its factor, or `1` for a dim of size 1."""
    return ["1" if size == 1 else factor for size, factor in zip(shape, factors, strict=True)]


def text_of(operands: Sequence[Sequence[str]], results: Sequence[Sequence[str]]) -> str:
    """A rule's text from token lists."""
    return f"{', '.join(map(' '.join, operands))} -> {', '.join(map(' '.join, results))}"


def fresh(token: str) -> str:
    """A whole factor of another name for a dim that the op resizes: `b` -> `b_2!`."""
    stem, _, count = token.rstrip("!").partition("_")
    return f"{stem}_{int(count or 1) + 1}!"


def dim_at(dim: Any, rank: int) -> int:
    """A dim counted from the front."""
    return int(dim) % rank if rank else 0


def dims_at(dims: Any, rank: int) -> tuple[int, ...]:
    """Dims counted from the front; all of them for None or an empty list."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return tuple(range(rank))
    if isinstance(dims, int):
        return (dim_at(dims, rank),)
    return tuple(dim_at(dim, rank) for dim in dims)


def whole_dims(call: OpCall, dims: Sequence[int], **fields: Any) -> Rule | None:
    """A rule for ops that keep the rank of their first operand, where `dims` must be whole (and may change size)."""
    shape = call.shapes[0]
    factors = names(len(shape))
    inside = [factor + ("!" if dim in dims else "") for dim, factor in enumerate(factors)]
    results = []
    for result in call.result_shapes:
        if len(result) != len(shape):
            return None
        outside = [
            fresh(factor) if dim in dims and size != shape[dim] else factor
            for dim, (factor, size) in enumerate(zip(inside, result, strict=True))
        ]
        results.append(tokens(result, outside))
    return call.parse(text_of([tokens(shape, inside)], results), **fields)


def is_size_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not any(
        isinstance(leaf, TensorInfo) for leaf in leaves(value)
    )


def floats_only(function: RuleFunction) -> RuleFunction:
    """The same rule, without partial sums unless all tensors are floating point: sums of flags mean nothing."""

    def rule(call: OpCall) -> Rule | None:
        found = function(call)
        if found is None or all(info.is_float for info in (*call.operands, *call.results)):
            return found
        return replace(found, sums=())

    return rule


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())
