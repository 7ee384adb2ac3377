"""A factor rule: how the loops of an op appear in its operands and results.

    matmul       m k, k n -> m n
    a view       b s (h d) -> b s h d
    softmax      b q k! -> b q k!          `!`: must be whole on every device
    one unit dim b s 1 -> b s h            `1`: a dim of size 1, split by nothing
    any rank     ..., ... -> ...           `...`: the same dims in every tensor, broadcast as torch does

From the rule alone follow the legal shardings, what results are partial sums, which gradients arrive as sums,
and the cost. A *choice* gives each mesh axis one factor (or none); `shard` turns it into the uses of the
operands and the shardings of the results.

Only the leading factor of a dim may be split (`h` of `(h d)`): a split minor factor would leave every device
with strided pieces of the dim, which a Sharding cannot say.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import ShardingError
from autopar.sharding import Sharding, Use

Dims = tuple[tuple[str, ...], ...]  # per dim of a tensor its factors, major to minor; () for a dim of size 1

SUMS = "+"  # the choice "operands are partial sums along this axis, and so is the result"
PAIR = "~"  # the choice `q~k`: q split in the tensors that have it, k in those that have only k
ZIGZAG = "zigzag"  # the choice `q~k~zigzag`: the same, with an early and a late piece on every device
JOINT = "."  # the choice `kv.rep`: the dim (kv rep) split as if it were one factor

ELLIPSIS = "..."


def sums_choice(group: int) -> str:
    """The choice "the operands of `rule.sums[group]` are partial sums along this axis"; SUMS for the first."""
    return SUMS if group == 0 else f"{SUMS}{group}"


def pair_choice(pair: tuple[str, ...]) -> str:
    """The choice of a pair of `Rule.pairs`: `q~k`, or `q~k~zigzag`."""
    return PAIR.join(pair)


def factors_of(choice: str) -> dict[str, int]:
    """The factors that a choice splits, and into how many parts each piece of one must divide: `q~k` splits both."""
    factors = choice.split(PAIR)
    parts = 2 if factors[2:] == [ZIGZAG] else 1
    return dict.fromkeys(factors[:2], parts)


_TOKEN = re.compile(r"\(([^)]*)\)|(\S+)")
_FACTOR = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*!?")


@dataclass(frozen=True)
class Rule:
    """How one op instance splits. Operands are the op's tensor arguments in order of appearance.

    whole       factors that may not be split
    special     factors whose split needs the lowering named in `lowering` instead of the plain op on pieces
    reduced     dropped factors whose split leaves no partial sum: the lowering has already reduced over them
                (cross-entropy over a split vocabulary), or the op does not read them (the tensor of `new_ones`)
    sums        groups of operands that may be partial sums together, the result then being one (`add`: both;
                `mul`: either): the op is linear in each group. SUMS chooses the first group, `sums_choice(i)`
                the i-th
    pairs       (first, second) factors that one axis may split at once, `first` in the tensors that have it and
                `second` in those that have only that one: the rows of attention and its keys (a ring), tokens and
                experts (all-to-all dispatch). The lowering moves what is needed inside of the op; a third word says
                how, where there are several ways (ZIGZAG)
    joint       dims of several factors that may also be split as one, finer than their leading factor divides:
                `kv.rep`, the heads of grouped attention. A tensor that has only `kv` is whole there. Within axes that
                split `kv`; special
    average     the op divides by the size of the factors it drops (mean), so a split result is scaled down
    shape_arg   index of the positional argument that holds the result's shape (view, expand, full, ...)
    count_args  (index of a positional argument, factor) where the argument says how large the factor is (the groups
                of a convolution): the op on a piece gets the piece's number
    flops_per_point  floating point operations per point of the product of all factors; 2 for a matmul
    logical     names for some factors, from what the op means (attention knows its heads)
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    special: frozenset[str] = frozenset()
    lowering: str | None = None
    reduced: frozenset[str] = frozenset()
    sums: tuple[tuple[int, ...], ...] = ()
    pairs: tuple[tuple[str, ...], ...] = ()
    joint: tuple[str, ...] = ()
    average: bool = False
    shape_arg: int | None = None
    count_args: tuple[tuple[int, str], ...] = ()
    flops_per_point: float = 0.0
    logical: Mapping[str, str] = field(default_factory=dict)

    # ---- reading ------------------------------------------------------------------------------------------

    @staticmethod
    def parse(
        text: str, operand_shapes: Sequence[Sequence[int]], result_shapes: Sequence[Sequence[int]]
    ) -> Rule:
        """Read `b s (h d) -> b s h d` and find every factor's size from the shapes; checks that they agree."""
        lefts, rights = split_text(text)
        shapes = [*operand_shapes, *result_shapes]
        if len(operand_shapes) != len(lefts) or len(result_shapes) != len(rights):
            raise ShardingError(
                f"rule {text!r} names {len(lefts)} operands and {len(rights)} results, "
                f"the op has {len(operand_shapes)} and {len(result_shapes)}"
            )
        whole: set[str] = set()
        tensors = _expand_ellipsis(
            [_parse_dims(part, whole, text) for part in (*lefts, *rights)], shapes, text
        )
        sizes = _solve_sizes(text, tensors, shapes)
        return Rule(tuple(tensors[: len(lefts)]), tuple(tensors[len(lefts) :]), sizes, frozenset(whole))

    def __str__(self) -> str:
        def dims_text(dims: Dims) -> str:
            return " ".join(_dim_text(dim, self.whole) for dim in dims)

        return (
            f"{', '.join(map(dims_text, self.operands))} -> {', '.join(map(dims_text, self.results))}".strip()
        )

    # ---- what may be split --------------------------------------------------------------------------------

    def splittable(self) -> tuple[str, ...]:
        """Factors that some axis could split: not whole, larger than 1, and leading wherever they appear."""
        minor = {name for dims in (*self.operands, *self.results) for dim in dims for name in dim[1:]}
        return tuple(
            name
            for name, size in self.sizes.items()
            if size > 1 and name not in self.whole and name not in minor
        )

    @property
    def dropped(self) -> frozenset[str]:
        """Factors of the operands that the first result lacks (contracted: a split leaves partial sums)."""
        kept = {name for dim in self.results[0] for name in dim} if self.results else set()
        return frozenset(name for dims in self.operands for dim in dims for name in dim if name not in kept)

    def shard(self, choice: Mapping[str, str | None], axis_sizes: Mapping[str, int]) -> Sharded:
        """Uses of the operands and shardings of the results under `choice` (axis -> factor, SUMS or None).

        Axes that split the same factor nest in the order of `choice`. Raises ShardingError where a factor may
        not be split or does not divide.
        """
        by_factor: dict[str, tuple[str, ...]] = {}
        summed: dict[str, tuple[int, ...]] = {}
        paired = {pair_choice(pair): pair for pair in self.pairs}
        splits: list[tuple[str, tuple[str, ...]]] = []  # (axis, the factor it splits, or the pair), in order
        for axis, factor in choice.items():
            if factor is None:
                continue
            if factor.startswith(SUMS):
                group = int(factor[len(SUMS) :] or 0)
                if group >= len(self.sums):
                    raise ShardingError(f"rule '{self}' does not pass partial sums (axis {axis!r})")
                summed[axis] = self.sums[group]
                continue
            if factor not in self.sizes and factor not in paired and factor not in self.joint:
                raise ShardingError(
                    f"rule '{self}' has no factor {factor!r}",
                    hint=f"one of {', '.join([*self.sizes, *paired, *self.joint])}",
                )
            by_factor[factor] = (*by_factor.get(factor, ()), axis)
            splits.append((axis, paired.get(factor, (factor,))[:2]))
        self._check(by_factor, splits, axis_sizes)

        def split_by(dims: Dims) -> tuple[dict[str, tuple[str, ...]], list[tuple[str, tuple[str, ...]]]]:
            """Factor -> the axes that split it in a tensor, and the splits that the tensor has no factor of."""
            have = {name for dim in dims for name in (*dim, JOINT.join(dim))}
            mine: dict[str, tuple[str, ...]] = {}
            foreign = []
            for axis, factors in splits:
                found = next((factor for factor in factors if factor in have), None)
                if found is None:
                    foreign.append((axis, factors))
                else:
                    mine[found] = (*mine.get(found, ()), axis)
            return mine, foreign

        def sharding(dims: Dims, sums: tuple[str, ...] = ()) -> Sharding:
            mine, _ = split_by(dims)
            return Sharding(tuple(axes_of(dim, mine) if dim else () for dim in dims), sums)

        def axes_of(dim: tuple[str, ...], mine: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
            joint = mine.get(JOINT.join(dim), ()) if len(dim) > 1 else ()
            return (*mine.get(dim[0], ()), *joint)

        uses = []
        for index, dims in enumerate(self.operands):
            partial = tuple(axis for axis, group in summed.items() if index in group)
            # A factor in `reduced` makes no addends, so neither does it in the gradients.
            lacking = [axis for axis, factors in split_by(dims)[1] if factors[0] not in self.reduced]
            lacking += [axis for axis, group in summed.items() if index not in group]
            uses.append(Use(sharding(dims, partial), tuple(sorted(lacking))))
        adding = self.dropped - self.reduced
        results = []
        for dims in self.results:
            missing = [axis for axis, factors in split_by(dims)[1] if factors[0] in adding]
            results.append(sharding(dims, (*missing, *summed)))
        return Sharded(tuple(uses), tuple(results), by_factor)

    def _check(
        self,
        by_factor: Mapping[str, tuple[str, ...]],
        splits: Sequence[tuple[str, tuple[str, ...]]],
        axis_sizes: Mapping[str, int],
    ) -> None:
        """Raise ShardingError for factors that may not be split, or do not divide."""
        allowed = self.splittable()
        for factor, axes in by_factor.items():
            ways = math.prod(axis_sizes[axis] for axis in axes)
            if factor not in allowed and PAIR not in factor and factor not in self.joint and ways > 1:
                raise ShardingError(
                    f"factor {factor!r} of rule '{self}' must stay whole, asked to split over {axes}"
                )
        for name in (*self.sizes, *self.joint):
            inside, size = name.split(JOINT), self.size_of(name)
            named = [axis for axis, factors in splits if name in factors or inside[0] in factors]
            ways = math.prod(axis_sizes[axis] for axis in named)
            if ways > 1:
                ways *= max(factors_of(factor).get(name, 1) for factor in by_factor)
            if size % ways:
                raise ShardingError(
                    f"factor {name!r} has size {size}, not divisible by {ways} ({tuple(named)})"
                )

    def size_of(self, name: str) -> int:
        """The size of a factor, or of a joint dim."""
        return math.prod(self.sizes[part] for part in name.split(JOINT))

    def divides(self, ways: Mapping[str, int]) -> bool:
        """Whether factors and joint dims can be cut into so many pieces, all at once."""
        for name, count in ways.items():
            within = ways.get(name.split(JOINT)[0], 1) if JOINT in name else 1
            if self.size_of(name) % (count * within):
                return False
        return True

    def local_sizes(
        self, by_factor: Mapping[str, tuple[str, ...]], axis_sizes: Mapping[str, int]
    ) -> dict[str, float]:
        """The factors' sizes as one device runs through them: of a pair the first is split (each device meets all of
        the second), of a joint dim the last carries what its first does not."""
        ways = dict.fromkeys(self.sizes, 1)
        for factor, axes in by_factor.items():
            name = factor.split(PAIR)[0].split(JOINT)[-1]
            ways[name] *= math.prod(axis_sizes[axis] for axis in axes)
        return {
            name: size // ways[name] if size % ways[name] == 0 else size / ways[name]
            for name, size in self.sizes.items()
        }

    def average_ways(self, sharded: Sharded, axis_sizes: Mapping[str, int]) -> int:
        """By how much every piece of the result is divided so that pieces of an `average` add up to it."""
        if not self.average:
            return 1
        return math.prod(
            axis_sizes[axis] for factor in self.dropped for axis in sharded.by_factor.get(factor, ())
        )

    def counts(self, sharded: Sharded, axis_sizes: Mapping[str, int]) -> dict[int, int]:
        """The arguments of `count_args` for one piece: index -> number."""
        return {
            index: self.sizes[factor]
            // math.prod(axis_sizes[axis] for axis in sharded.by_factor.get(factor, ()))
            for index, factor in self.count_args
        }

    def with_sizes(self, sizes: Mapping[str, int]) -> Rule:
        """The rule for other factor sizes (a smaller batch)."""
        return replace(self, sizes={**self.sizes, **sizes})

    @property
    def points(self) -> float:
        return math.prod(self.sizes.values())


@dataclass(frozen=True)
class Sharded:
    """A rule under one choice: one Use per operand, one Sharding per result, and the axes that split each factor."""

    uses: tuple[Use, ...]
    results: tuple[Sharding, ...]
    by_factor: Mapping[str, tuple[str, ...]]


def split_text(text: str) -> tuple[list[str], list[str]]:
    """The operands' and the results' parts of `m k, k n -> m n`."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ShardingError(f"rule {text!r} has no '->'", hint="a form such as 'm k, k n -> m n'")
    return left.split(",") if left.strip() else [], right.split(",")


def check_text(text: str) -> None:
    """Raise ShardingError if no op instance could have this rule: what can be said without shapes."""
    lefts, rights = split_text(text)
    for part in (*lefts, *rights):
        dims = _parse_dims(part, set(), text)
        if dims.count((ELLIPSIS,)) > 1:
            raise ShardingError(
                f"rule {text!r}: '...' twice in {part.strip()!r}", hint="one '...' per tensor"
            )
        names = [name for dim in dims for name in dim]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ShardingError(
                f"rule {text!r}: factor {twice[0]!r} appears twice in {part.strip()!r}",
                hint=f"another name for one of them, whole: '{twice[0]}2!'",
            )


def _dim_text(dim: tuple[str, ...], whole: frozenset[str]) -> str:
    names = [name + ("!" if name in whole else "") for name in dim]
    return "1" if not names else names[0] if len(names) == 1 else f"({' '.join(names)})"


def _parse_dims(text: str, whole: set[str], rule: str) -> Dims:
    dims: list[tuple[str, ...]] = []
    for group, single in _TOKEN.findall(text):
        names = []
        for token in (group or single).split():
            if token == "1":
                continue
            if token == ELLIPSIS and not group:
                names.append(ELLIPSIS)
                continue
            if not _FACTOR.fullmatch(token):
                raise ShardingError(
                    f"rule {rule!r}: cannot read factor {token!r}", hint="words such as 'b', 'heads' or 'k!'"
                )
            names.append(token.rstrip("!"))
            if token.endswith("!"):
                whole.add(token.rstrip("!"))
        dims.append(tuple(names))
    return tuple(dims)


def _expand_ellipsis(tensors: Sequence[Dims], shapes: Sequence[Sequence[int]], rule: str) -> list[Dims]:
    """Put one factor per dim in place of each `...`, aligned at the right; dims of size 1 get none."""
    stands_for: dict[int, Sequence[int]] = {}
    for index, (dims, shape) in enumerate(zip(tensors, shapes, strict=True)):
        if (ELLIPSIS,) in dims:
            at, count = dims.index((ELLIPSIS,)), len(shape) - (len(dims) - 1)
            if count < 0:
                raise ShardingError(
                    f"rule {rule!r} needs at least {len(dims) - 1} dims, a tensor has shape {list(shape)}"
                )
            stands_for[index] = shape[at : at + count]
    if not stands_for:
        return list(tensors)
    taken = {name for dims in tensors for dim in dims for name in dim}
    free = (name for name in _factor_names() if name not in taken)
    deepest = max(len(sizes) for sizes in stands_for.values())
    names = [next(free) for _ in range(deepest)]
    expanded = list(tensors)
    for index, sizes in stands_for.items():
        dims = tensors[index]
        at = dims.index((ELLIPSIS,))
        new = [
            () if size == 1 else (name,)
            for name, size in zip(names[deepest - len(sizes) :], sizes, strict=True)
        ]
        expanded[index] = (*dims[:at], *new, *dims[at + 1 :])
    return expanded


def _factor_names() -> Iterator[str]:
    yield from "abcdefgh"
    yield from (f"a{index}" for index in itertools.count())


def _solve_sizes(text: str, dims_of: Sequence[Dims], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    if len(dims_of) != len(shapes):
        raise ShardingError(f"rule {text!r} names {len(dims_of)} tensors, the op has {len(shapes)}")
    pairs: list[tuple[tuple[str, ...], int]] = []
    for dims, shape in zip(dims_of, shapes, strict=True):
        if len(dims) != len(shape):
            raise ShardingError(
                f"rule {text!r}: '{' '.join(_dim_text(d, frozenset()) for d in dims)}' against shape {list(shape)}"
            )
        pairs += zip(dims, shape, strict=True)
    sizes: dict[str, int] = {}
    progress = True
    while progress:
        progress = False
        for dim, size in pairs:
            unknown = [name for name in dim if name not in sizes]
            if len(unknown) == 1:
                known = math.prod(sizes[name] for name in dim if name in sizes)
                if known and size % known == 0:
                    sizes[unknown[0]] = size // known
                    progress = True
    for dim, size in pairs:
        missing = [name for name in dim if name not in sizes]
        if missing:
            raise ShardingError(f"rule {text!r}: the sizes do not tell how large {missing} are")
        if math.prod(sizes[name] for name in dim) != size:
            raise ShardingError(
                f"rule {text!r}: dim ({' '.join(dim)}) is {[sizes[n] for n in dim]}, the tensor has {size}"
            )
    return sizes
