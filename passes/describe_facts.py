"""What a Workload is read off: the facts of a captured Program that do not depend on the block.

In:  a Program and its Problem.
Out: sizes per token, the axes that tensor parallelism splits, and the `k`, `n` and rows of every product.

    einsum of x[b s k] and w[n k]  ->  Product(k=4096, n=14336, share=1.0, k_axes={hidden}, n_axes={ffn})
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.cost.compute import kind_of
from autopar.problem import Op, Problem, Solution, Value
from autopar.program import ITEM_BYTES, Program

MEANINGFUL = 2.0**-10  # elements per token below which a value is no note's business


@dataclass(frozen=True)
class Facts:
    """What of a Program and its Problem does not depend on the block."""

    program: Program
    problem: Problem
    solution: Solution | None
    tokens: int
    seq: int
    dtype: str  # of the parameters: what a bf16 run holds in 2 bytes
    ops: Mapping[str, tuple[Op, ...]]
    maker: Mapping[str, Op]
    users: Mapping[str, tuple[Op, ...]]
    fixed: frozenset[str]  # values made of state alone
    shared: frozenset[str]  # block inputs that several layers are given
    stream_axes: frozenset[str]
    inner_axes: frozenset[str]
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def of(program: Program, problem: Problem, solution: Solution | None) -> Facts:
        ops: dict[str, list[Op]] = {name: [] for name in program.blocks}
        maker: dict[str, Op] = {}
        users: dict[str, list[Op]] = defaultdict(list)
        fixed = {f"{block.name}/{node}" for block in program.blocks.values() for node in block.state}
        for op in problem.ops:
            ops[_block_of(op.name)].append(op)
            for name in op.results:
                maker[name] = op
            for name in dict.fromkeys(op.operands):
                users[name].append(op)
            if op.operands and all(name in fixed for name in op.operands):
                fixed.update(op.results)
        seq = _sequence(program, problem)
        counts: Counter[str] = Counter()
        for info in program.state.values():
            if info.kind == "parameter" and info.is_float:
                counts[info.dtype] += math.prod(info.shape)
        readers: Counter[str] = Counter(
            value for call in program.calls if call.path for value in dict.fromkeys(call.inputs)
        )
        shared = {
            f"{call.block}/{node}"
            for call in program.calls
            for node, value in zip(program.blocks[call.block].inputs, call.inputs, strict=True)
            if readers[value] > 1
        }
        stream = {
            axis
            for value in problem.values.values()
            if value.interface and value.gradient and not value.state
            for axis in value.axes[-1:]
        }
        stream = {axis for axis in stream if not axis.startswith(("batch", "sequence", "heads", "ffn"))}
        facts = Facts(
            program=program,
            problem=problem,
            solution=solution,
            tokens=max(problem.batch, 1) * seq,
            seq=seq,
            dtype=counts.most_common(1)[0][0] if counts else "float32",
            ops={name: tuple(found) for name, found in ops.items()},
            maker=maker,
            users={name: tuple(found) for name, found in users.items()},
            fixed=frozenset(fixed),
            shared=frozenset(shared),
            stream_axes=frozenset(stream),
            inner_axes=frozenset(),
        )
        return replace(facts, inner_axes=frozenset(facts._inner_axes()))

    # ---- sizes ------------------------------------------------------------------------------------------------

    def value(self, name: str) -> Value | None:
        return self.problem.values.get(name)

    def elements(self, name: str) -> float:
        """Elements per token."""
        value = self.value(name)
        return math.prod(value.info.shape) / self.tokens if value is not None else 0.0

    def item(self, name: str) -> int:
        value = self.problem.values[name]
        return 2 if value.info.dtype == self.dtype else ITEM_BYTES[value.info.dtype]

    def root(self, name: str) -> str:
        """The value whose memory a value is in: through views, and from a sum with a bias to its product."""
        while name in self.maker:
            op = self.maker[name]
            if op.free and op.operands:
                name = op.operands[0]
            elif (product := self.biased(op)) is not None:
                name = product
            else:
                return name
        return name

    def biased(self, op: Op) -> str | None:
        """The product that a bias is added to, where that is all the op does."""
        if op.kind != "aten.add" or len(op.operands) != 2:
            return None
        for product, bias in (op.operands, op.operands[::-1]):
            made = self.maker.get(product)
            found, added = self.value(product), self.value(bias)
            if made is None or found is None or added is None or kind_of(made) != "matmul":
                continue
            if added.state and len(added.info.shape) == 1 and found.info.shape[-1:] == added.info.shape:
                return product
        return None

    # ---- axes -------------------------------------------------------------------------------------------------

    def is_stream(self, axis: str) -> bool:
        return axis in self.stream_axes or axis.startswith(("hidden", "channels"))

    def is_inner(self, axis: str) -> bool:
        return axis in self.inner_axes

    def _inner_axes(self) -> Iterator[str]:
        """Axes that tensor parallelism splits: heads; and widths that products make of the residual stream and other
        products contract back to it."""
        made: set[str] = set()
        back: dict[str, list[bool]] = defaultdict(list)
        for op in self.problem.ops:
            product = self.product(op)
            if product is None or product.weight is None:
                continue
            made.update(product.n_axes)
            for axis in product.k_axes:
                back[axis].append(any(self.is_stream(out) for out in product.n_axes))
        for axis in sorted(made | set(back)):
            if axis.startswith("heads") or (
                axis in made and back[axis] and all(back[axis]) and not self.is_stream(axis)
            ):
                yield axis

    def axes_after(self, name: str) -> set[str]:
        """Logical axes of a value and of its views (a packed q, k, v has none before it is cut)."""
        found: set[str] = set()
        stack = [name]
        while stack:
            value = self.value(stack.pop())
            if value is None:
                continue
            found.update(axis for axis in value.axes if axis)
            for user in self.users.get(value.name, ()):
                if user.free or self.biased(user) == value.name:
                    stack += user.results
        return found

    # ---- products ---------------------------------------------------------------------------------------------

    def product(self, op: Op) -> Product | None:
        """The sizes of a product, or None for another op."""
        if kind_of(op) != "matmul" or op.rule is None:
            return None
        rule = op.rule
        sets = [{name for dim in dims for name in dim} for dims in rule.operands]
        result = {name for dim in rule.results[0] for name in dim}
        contracting = [index for index, have in enumerate(sets) if have & rule.dropped]
        weights = [index for index in contracting if op.operands[index] in self.fixed]
        at = weights[-1] if weights and len(weights) < len(contracting) else None
        right = at if at is not None else contracting[-1]
        left = next((index for index in contracting if index != right), right)
        own = sets[right]

        def logical(factor: str) -> str:
            return op.logical.get(factor, "")

        grouped = {f for f in own if logical(f).startswith("expert")}
        batched = {f for f in own if f in result and f in sets[left] and not logical(f).startswith("heads")}
        experts = grouped | (batched if at is not None else set())
        if at is None:
            own = own - batched - {f for f in own if f in result and f in sets[left]}
        k = {f for f in own if f not in result} - experts
        n = own - k - experts
        size = rule.sizes
        k_size, n_size = (math.prod(size[f] for f in names) for names in (k, n))
        flops = rule.flops_per_point * rule.points
        n_axes = {logical(f) for f in n} - {""} or (
            self.axes_after(op.results[0])
            - self._axes_of(op.operands[left])
            - {"batch", "sequence", "head_dim"}
        )
        weight = self._parameter(op.operands[at]) if at is not None else None
        count = math.prod(size[f] for f in experts)
        if weight is not None and k_size * n_size * count != math.prod(
            self.problem.values[weight].info.shape
        ):
            weight = None
        return Product(
            op=op,
            left=op.operands[left],
            weight=weight,
            k=k_size,
            n=n_size,
            experts=count if experts else 0,
            share=rounded(flops / (2.0 * max(1, k_size * n_size) * self.tokens)),
            k_axes=frozenset({logical(f) for f in k} - {""}),
            n_axes=frozenset(n_axes),
            k_factors=frozenset(k),
            n_factors=frozenset(n),
            others=tuple(op.operands[index] for index in range(len(sets)) if index not in (left, right)),
        )

    def _axes_of(self, name: str) -> set[str]:
        value = self.value(name)
        return set(value.axes) if value is not None else set()

    def _parameter(self, name: str) -> str | None:
        """The one parameter that a value made of state alone is a view or a cast of."""
        while name in self.maker:
            op = self.maker[name]
            if len(op.operands) != 1:
                return None
            name = op.operands[0]
        value = self.value(name)
        return name if value is not None and value.state else None

    def has_products(self, block: str, head: str | None) -> bool:
        return any(kind_of(op) in ("matmul", "attention") and op.name != head for op in self.ops[block])

    def note_outside(self, block: str) -> None:
        moved = sum(
            self.elements(name)
            for op in self.ops[block]
            if kind_of(op) in ("pointwise", "opaque")
            for name in op.results
            if name in self.problem.values and self.problem.values[name].gradient
        )
        if moved > MEANINGFUL:
            self.notes.append(f"{block}: {moved:.0f} elements per token of pointwise ops outside of layers")

    # ---- what a placement says --------------------------------------------------------------------------------

    def chosen(self, op: Op) -> str | None:
        """The factor that tp splits; "" for none; None without a placement."""
        if self.solution is None:
            return None
        return self.solution.choices.get(op.name, {}).get("tp") or ""


@dataclass(frozen=True)
class Product:
    op: Op
    left: str
    weight: str | None  # the value of the parameter it reads
    k: int
    n: int
    experts: int
    share: float
    k_axes: frozenset[str]
    n_axes: frozenset[str]
    k_factors: frozenset[str]
    n_factors: frozenset[str]
    others: tuple[str, ...]


def _sequence(program: Program, problem: Problem) -> int:
    """Tokens per sequence: of the token ids; else the largest size of an axis of positions; else 1."""
    for info in program.inputs.values():
        if len(info.shape) == 2 and not info.is_float:
            return max(info.shape[1], 1)
    return max(
        (
            size
            for value in problem.values.values()
            if value.gradient and not value.state
            for size, axis in zip(value.info.shape, value.axes, strict=True)
            if axis == "sequence"
        ),
        default=1,
    )


def _block_of(name: str) -> str:
    return name.split("/", 1)[0]


def rounded(number: float) -> float:
    """Without the dust of division."""
    return float(round(number)) if abs(number - round(number)) < 1e-9 * max(1.0, abs(number)) else number
