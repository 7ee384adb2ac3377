"""One block as a Layer of a Workload.

In:  the facts of a Program, one call of the block, and which of its parameters no call before has read.
Out: the Layer: products, attention and streams in order, what is kept, and the parameters of no product.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from autopar.cost.compute import LINEAR, kind_of
from autopar.passes.describe_facts import MEANINGFUL, Facts, Product, rounded
from autopar.passes.describe_kernels import NORMS, Kernels
from autopar.problem import Op, Value
from autopar.program import Call
from autopar.rules.attention import CAUSAL
from autopar.workload import Attention, Layer, Matmul, Saved, Stream


class BlockView(Kernels):
    """`fresh`: placeholders of the parameters that this call is the first to read. `head`: the op that makes the
    logits, if it is in this block; it is the Workload's own."""

    def __init__(self, facts: Facts, call: Call, fresh: frozenset[str], head: str | None) -> None:
        super().__init__(facts, call, frozenset({head} if head else ()))
        self.fresh = fresh
        self.has_head = head is not None
        self.claimed: set[str] = set()  # parameters counted with an op

    def layer(self) -> Layer:
        ops: list[Matmul | Attention | Stream] = []
        done: set[str] = set()
        for op in self.ops:
            kind = kind_of(op)
            if op.name in self.products:
                ops.append(self._matmul(self.products[op.name]))
            elif kind == "attention":
                ops += self._attention(op)
            elif kind in ("embedding", "cross_entropy", "opaque"):
                if kind == "opaque" or self.call.path or not self.has_head:
                    ops.append(self._alone(op, kind))
            elif op.name in self.group_of and self.group_of[op.name] not in done:
                done.add(self.group_of[op.name])
                ops += self._stream(self.group_of[op.name])
        saved = tuple(self._saved())
        parameters = self._parameters(ops)
        hidden = self._width()
        return Layer(self.call.block, hidden, tuple(_merged(ops)), saved, parameters, self._regions())

    def _matmul(self, item: Product) -> Matmul:
        facts = self.facts
        split = self._split(item)
        ways = 0
        if split in ("column", "row"):
            axes = item.n_axes if split == "column" else item.k_axes
            value = item.op.results[0] if split == "column" else item.left
            ways = self._ways(value, {axis for axis in axes if axis.startswith("heads")}, split == "column")
        node = item.weight.split("/", 1)[1] if item.weight is not None else None
        base = {"k": item.k, "n": item.n, "split": split, "ways": ways}
        if node is None or node not in self.fresh or node in self.claimed:
            # No weight of its own: an activation-activation product, or one that shares another's weight. Backward is
            # one product per operand that has a gradient; where none has, half of the rows stand for forward alone.
            flows = sum(facts.problem.values[name].gradient for name in item.op.operands)
            share = item.share if flows else item.share / 2
            return Matmul(self.name(item.op), share=share, trained=flows > 1, weight=False, **base)  # type: ignore[arg-type]
        self.claimed.add(node)
        state = dict(zip(self.block.state, self.call.state, strict=True))
        trained = facts.program.state[state[node]].trainable
        bias = self._bias_of(item)
        if bias is not None:
            self.claimed.add(bias)
        name = _module_name(node)
        return Matmul(
            name,
            share=item.share,
            experts=item.experts,
            bias=bias is not None,
            trained=trained,
            **base,  # type: ignore[arg-type]
        )

    def _bias_of(self, item: Product) -> str | None:
        """The placeholder of the bias that is added to a product: [n], or [experts, n] for experts."""
        candidates = list(item.others)
        for user in self.facts.users.get(item.op.results[0], ()):
            if self.facts.biased(user) is not None:
                candidates += user.operands
        for name in candidates:
            node = name.split("/", 1)[-1]
            value = self.facts.value(name)
            if value is None or node not in self.fresh or node in self.claimed or not value.state:
                continue
            if value.info.shape == (item.n,):
                return node
        if item.experts:
            for node in self.block.state:
                value = self.facts.value(f"{self.call.block}/{node}")
                free = node in self.fresh and node not in self.claimed and value is not None
                if free and value is not None and value.info.shape == (item.experts, item.n):
                    return node
        return None

    def _split(self, item: Product) -> str:
        facts = self.facts
        chosen = facts.chosen(item.op)
        if chosen is not None:
            if chosen in item.n_factors:
                return "column"
            if chosen in item.k_factors:
                return "row"
            if chosen and item.op.logical.get(chosen) == "sequence":
                return "sequence"
            return "inner" if chosen and item.op.logical.get(chosen) != "batch" else "none"
        if item.weight is None:
            return "inner" if item.left in self.inner or facts.root(item.left) in self.inner else "none"
        if any(facts.is_inner(axis) for axis in item.k_axes) and not any(
            axis.startswith("heads") for axis in item.n_axes
        ):
            return "row"
        if any(facts.is_inner(axis) for axis in item.n_axes):
            return "column"
        return "none"

    def _ways(self, name: str, axes: set[str], forward: bool) -> int:
        """How many heads a value has, where a view of it shows them."""
        facts, found, stack = self.facts, 0, [name]
        whole = 0
        while stack and axes:
            value = facts.value(stack.pop())
            if value is None:
                continue
            whole = whole or max(value.info.shape, default=0)
            sizes = [size for size, axis in zip(value.info.shape, value.axes, strict=True) if axis in axes]
            if sizes:
                found = min(found or sizes[0], *sizes)
            if forward:
                for user in facts.users.get(value.name, ()):
                    if user.free or facts.biased(user) == value.name or user.kind in LINEAR:
                        stack += [item for item in user.results if user.free or user.kind != "aten.cat"]
            elif value.name in facts.maker and (
                facts.maker[value.name].free or facts.maker[value.name].kind in LINEAR
            ):
                stack += facts.maker[value.name].operands[:1]
        return found if found < whole else 0

    def _attention(self, op: Op) -> Iterator[Attention | Stream]:
        values = [self.facts.value(name) for name in op.operands[:3]]
        if op.rule is None or len(values) < 3 or any(value is None for value in values):
            yield self._alone(op, "opaque")
            return
        query, key, value = (item.info.shape for item in values if item is not None)
        node = self.block.node(op.name.split("/", 1)[1])
        causal = bool(node.kwargs.get("causal", op.rule.lowering == CAUSAL))
        heads, kv_heads = query[-3], key[-3]
        keys = self.facts.value(self.facts.root(op.operands[1]))
        if keys is not None and kv_heads == heads:  # heads of keys that were repeated for the op
            kv_heads = self._heads_before(op.operands[1], heads)
        seq = self.facts.seq
        pairs = (
            math.prod(query[:-3]) * query[-2] * key[-2] / self.facts.tokens
        )  # keys that a token's queries see
        if len(node.args) > 3 and node.args[3] is not None:
            self.facts.notes.append(f"{op.name} has a mask: counted as if every query saw every key")
        window = 0
        if abs(pairs - seq) > 1e-9 * seq:
            window = max(1, round(pairs))
            if causal or pairs > seq:
                self.facts.notes.append(
                    f"{op.name}: {pairs:g} keys per token counted as {min(seq, window)} (sequence {seq})"
                )
        flag = node.kwargs.get("window")
        if isinstance(flag, int):  # to both sides, if not causal
            near = flag if causal else 2 * flag - 1
            window = min(window, near) if window else near
        yield Attention(self.name(op), heads, kv_heads, query[-1], value[-1], causal, window)

    def _heads_before(self, name: str, heads: int) -> int:
        facts = self.facts
        while name in facts.maker and facts.maker[name].operands:
            op = facts.maker[name]
            if op.kind == "aten.expand":
                before, after = (facts.problem.values[item].info.shape for item in (op.operands[0], name))
                grown = math.prod(after) // max(1, math.prod(before))
                return heads // grown if grown and heads % grown == 0 else heads
            if not (op.free or op.kind == "aten.clone"):
                return heads
            name = op.operands[0]
        return heads

    def _stream(self, key: str) -> Iterator[Stream]:
        """The group as one kernel: reads from outside and writes; backward reads the gradients of what it wrote and
        what it keeps, and writes one gradient per value read that has one (as `Roofline.op_s`)."""
        facts, ops = self.facts, self.groups[key]
        made = {name for op in ops for name in op.results}
        reads: dict[str, float] = defaultdict(float)
        for name in dict.fromkeys(name for op in ops for name in op.operands):
            root = facts.root(name)
            if root not in made and root not in facts.fixed and root in facts.problem.values:
                reads[root] = min(reads[root] + self.bytes(name), self.bytes(root))
        writes = {
            name: self.bytes(name)
            for name in made
            if name in facts.problem.values and name not in self.inside
        }
        values = facts.problem.values
        forward = sum(reads.values()) + sum(writes.values())
        flows = any(values[name].gradient for name in made if name in values)
        backward = 0.0
        if flows:
            kept = {root for op in ops for root in self.kept_roots(op)}
            backward += sum(size for name, size in writes.items() if values[name].gradient)
            backward += sum(size for name, size in reads.items() if values[name].gradient)
            backward += sum(size for name, size in reads.items() if name in kept)
            backward += sum(size for name, size in writes.items() if name in kept)
        if forward + backward < MEANINGFUL:
            return
        sizes = {**reads, **writes}
        widest = max(sizes, key=lambda name: sizes[name])
        item = facts.item(widest)
        share, sent = self.rows(widest)
        kind = self.kinds[key]
        yield Stream(
            f"{self.name(ops[-1])} {kind}",
            kind,
            rounded(forward / item / share),
            rounded(backward / item / share),
            "none" if sent and kind == "permute" else self._split_of(ops, (*writes, *reads)),
            share=share,
            item=item,
        )

    def _alone(self, op: Op, kind: str) -> Stream:
        """An op that is not understood, or a lookup: all of its operands and results, each way."""
        facts, values = self.facts, self.facts.problem.values
        size = sum(self.bytes(name) for name in op.results)
        if kind != "embedding":
            size += sum(self.bytes(name) for name in op.operands if name not in facts.fixed)
        if kind == "opaque":
            facts.notes.append(f"{op.name}: {op.kind} has no rule; counted by the bytes it moves")
        flows = any(values[name].gradient for name in op.results if name in values)
        tag = "norm" if any(word in op.kind for word in NORMS) else kind
        first = next((name for name in op.results if name in values), None)
        item = facts.item(first) if first is not None else 2
        back = 1.5 * size if tag == "norm" else size
        return Stream(
            self.name(op), tag, rounded(size / item), rounded(back / item if flows else 0.0),
            self._split_of([op], op.results), item=item,
        )  # fmt: skip

    def _split_of_value(self, name: str) -> str:
        facts = self.facts
        if facts.solution is not None and name in facts.solution.shardings:
            value = facts.problem.values[name]
            for axes, axis in zip(facts.solution.shardings[name].dims, value.axes, strict=True):
                if "tp" in axes:
                    return "sequence" if axis == "sequence" else "none" if axis == "batch" else "inner"
            return "none"
        if name in self.inner:
            return "inner"
        return "none" if self.rows(name)[1] else "sequence"

    def _split_of(self, ops: Sequence[Op], names: Iterable[str]) -> str:
        facts = self.facts
        if facts.solution is not None:
            found: Counter[str] = Counter()
            for op in ops:
                factor = facts.chosen(op)
                axis = op.logical.get(factor, "inner") if factor else ""
                found["sequence" if axis == "sequence" else "none" if axis in ("", "batch") else "inner"] += 1
            return found.most_common(1)[0][0]
        sizes: dict[str, float] = defaultdict(float)
        for name in names:
            if name in facts.problem.values:
                sizes[self._split_of_value(name)] += self.bytes(name)
        return max(sizes, key=lambda split: sizes[split]) if sizes else "sequence"

    def _regions(self) -> int:
        """Tensor-parallel regions end in row products; those that are added up end together."""
        ends = set()
        for item in self.products.values():
            if self._split(item) == "row":
                readers = [user for user in self.readers(item.op.results[0]) if user is not None]
                ends.add(self.group_of.get(readers[-1].name, readers[-1].name) if readers else item.op.name)
        return len(ends)

    def _saved(self) -> Iterator[Saved]:
        facts, values = self.facts, self.facts.problem.values
        kept: dict[str, None] = {}
        for op in self.ops:
            kept.update(dict.fromkeys(self.kept_roots(op)))
        outside = 0.0
        for root in kept:
            value = values[root]
            entering = root not in facts.maker
            if entering and (root in facts.shared or not value.gradient):
                outside += self.bytes(
                    root
                )  # a rotary table, a mask, the encoder's output: once for all layers
                continue
            elements = facts.elements(root)
            if elements < MEANINGFUL:
                continue
            share, expert = self.rows(root)
            square = self._is_square(value)
            yield Saved(
                self._saved_name(root),
                rounded(elements / share / (facts.seq if square else 1)),
                self._split_of_value(root),
                item=float(facts.item(root)),
                selective=square or self._is_cheap(root),
                square=square,
                share=share,
                expert=expert,
                matmul=self._is_product(root),
            )
        for op in self.ops:
            if kind_of(op) == "attention" and op.results[0] in values:
                shape = values[op.results[0]].info.shape
                sums = math.prod(shape[:-1]) / facts.tokens
                yield Saved(f"{self.name(op)} softmax sums", rounded(sums), "inner", item=4.0)
        if outside > MEANINGFUL:
            facts.notes.append(
                f"{self.call.block}: {outside:.0f} bytes per token are kept once for all its calls"
            )

    def _saved_name(self, root: str) -> str:
        maker = self.facts.maker.get(root)
        if maker is None:
            return f"input {root.split('/', 1)[1]}"
        item = self.products.get(maker.name)
        if item is not None and item.weight is not None:
            return _module_name(item.weight.split("/", 1)[1])
        group = self.group_of.get(maker.name)
        return f"{self.name(maker)} {self.kinds[group] if group is not None else 'output'}"

    def _is_product(self, root: str) -> bool:
        """Whether a value is a product's result, or what attention takes (a product's result, rotated in place)."""
        maker = self.facts.maker.get(root)
        if maker is None or kind_of(maker) == "attention":
            return False
        return maker.name in self.products or any(
            user is not None
            and kind_of(user) == "attention"
            and root in map(self.facts.root, user.operands[:3])
            for user in self.readers(root)
        )

    def _is_cheap(self, root: str) -> bool:
        """Results of norms and activations that a product takes are cheap to make again."""
        maker = self.facts.maker.get(root)
        if maker is None or maker.name not in self.group_of:
            return False
        if self.kinds[self.group_of[maker.name]] not in ("norm", "activation"):
            return False
        return any(user is not None and kind_of(user) == "matmul" for user in self.readers(root))

    def _is_square(self, value: Value) -> bool:
        seq = self.facts.seq
        sides = [
            axis
            for size, axis in zip(value.info.shape, value.axes, strict=True)
            if size == seq and (not axis or axis.startswith("sequence"))
        ]
        return seq > 1 and len(sides) > 1

    def _parameters(self, ops: Sequence[Matmul | Attention | Stream]) -> tuple[tuple[str, int, str], ...]:
        found = []
        for node in self.block.state:
            if node not in self.fresh or node in self.claimed:
                continue
            value = self.facts.value(f"{self.call.block}/{node}")
            if value is not None:
                split = "inner" if any(map(self.facts.is_inner, value.axes)) else "none"
                found.append((node, math.prod(value.info.shape), split))
        return tuple(found)

    def _width(self) -> int:
        """Elements per token of what the block hands on, or if that is the loss, of what it takes or makes."""
        facts = self.facts
        results = set(facts.program.outputs.values())
        handed = [
            f"{self.call.block}/{node}"
            for node, value in zip(self.block.outputs, self.call.outputs, strict=True)
            if value not in results
        ]
        taken = [f"{self.call.block}/{node}" for node in self.block.inputs]
        for names in (handed, taken, [item.op.results[0] for item in self.products.values()]):
            flowing = [value for value in map(facts.value, names) if value is not None and value.gradient]
            stream = [value for value in flowing if any(map(facts.is_stream, value.axes))] or flowing
            if stream:
                return max(math.ceil(facts.elements(value.name)) for value in stream)
        return 0


def _merged(ops: Sequence[Matmul | Attention | Stream]) -> Iterator[Matmul | Attention | Stream]:
    """The router's many small kernels as one Stream, where the first of them stands."""
    router = [op for op in ops if isinstance(op, Stream) and op.kind == "router"]
    done = False
    for op in ops:
        if not isinstance(op, Stream) or op.kind != "router":
            yield op
        elif not done:
            done = True
            item = 4
            yield Stream(
                "route",
                "router",
                rounded(sum(each.forward * each.share * each.item for each in router) / item),
                rounded(sum(each.backward * each.share * each.item for each in router) / item),
                "sequence",
                kernels=len(router),
                item=item,
            )


def _module_name(node: str) -> str:
    return node.removesuffix("_weight")
