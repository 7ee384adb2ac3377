"""Kernels of one block: which pointwise ops run as one, what they read and write, and what the backward keeps.

In:  the facts of a Program and one call of a block.
Out: groups of ops; the values that never reach memory; the values in memory that the backward of an op needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from autopar.cost.block_storage import KEEPS_RESULT, PRODUCTS
from autopar.cost.compute import LINEAR, kind_of
from autopar.passes.describe_facts import Facts
from autopar.problem import Op
from autopar.program import Call

# Pointwise ops by their rule that are kernels of their own even under a fusing compiler.
ALONE = frozenset(
    f"aten.{name}"
    for name in ("topk", "sort", "argsort", "histc", "bincount", "cumsum", "cumprod", "index_put", "scatter",
                 "scatter_add", "scatter_reduce", "index_add", "unique", "nonzero", "repeat_interleave")
)  # fmt: skip
NORMS = ("layer_norm", "rms_norm", "batch_norm", "group_norm", "rsqrt")
ACTIVATIONS = frozenset(
    f"aten.{name}"
    for name in ("silu", "gelu", "relu", "tanh", "sigmoid", "mish", "elu", "leaky_relu", "hardtanh", "hardswish",
                 "softplus", "relu6", "log_sigmoid", "clamp_min", "prelu", "selu")
)  # fmt: skip


class Kernels:
    """The ops of one block but `skipped`."""

    def __init__(self, facts: Facts, call: Call, skipped: frozenset[str]) -> None:
        self.facts, self.call = facts, call
        self.block = facts.program.blocks[call.block]
        self.ops = [op for op in facts.ops[call.block] if op.name not in skipped]
        self.modules = {node.name: str(node.meta.get("module", "")) for node in self.block.op_nodes}
        self.products = {op.name: found for op in self.ops if (found := facts.product(op)) is not None}
        self.topk = max((item.share for item in self.products.values() if item.experts), default=0.0)
        self.inner = self.inner_values()
        self.group_of, self.groups = self.grouped()
        self.inside = self.hidden_inside()
        self.kinds = {key: self.kind(ops) for key, ops in self.groups.items()}

    def grouped(self) -> tuple[dict[str, str], dict[str, list[Op]]]:
        """Op -> group, and group -> its ops. Ops are of one group when one reads what the other makes and no product
        lies between any two of them: all have the same number of unfused ops before them."""
        facts = self.facts
        depth: dict[str, int] = {}
        parent: dict[str, str] = {}

        def find(name: str) -> str:
            while parent[name] != name:
                name = parent[name]
            return name

        at: dict[str, int] = {}
        for op in self.ops:
            before = max((depth.get(name, 0) for name in op.operands), default=0)
            fusible = kind_of(op) == "pointwise" and op.kind not in ALONE
            passes = op.free or facts.biased(op) is not None
            level = before if fusible or passes else before + 1
            for name in op.results:
                depth[name] = level
            if passes or kind_of(op) not in ("pointwise",):
                continue
            parent[op.name], at[op.name] = op.name, level
            if not fusible:
                continue
            for name in op.operands:
                made = facts.maker.get(facts.root(name))
                if made is not None and at.get(made.name) == level and made.kind not in ALONE:
                    parent[find(op.name)] = find(made.name)
        groups: dict[str, list[Op]] = defaultdict(list)
        of = {name: find(name) for name in parent}
        for op in self.ops:
            if op.name in of:
                groups[of[op.name]].append(op)
        return of, dict(groups)

    def hidden_inside(self) -> frozenset[str]:
        """Roots that live only inside one fused group."""
        facts, found = self.facts, set()
        for op in self.ops:
            group = self.group_of.get(op.name)
            if group is None or op.kind in ALONE:
                continue
            for name in op.results:
                if name in facts.problem.values and all(
                    user is not None and self.group_of.get(user.name) == group for user in self.readers(name)
                ):
                    found.add(name)
        return frozenset(found)

    def readers(self, name: str) -> Iterator[Op | None]:
        """The ops that read a value or a view of it; None for a reader outside of the block."""
        facts, stack = self.facts, [name]
        outputs = {f"{self.call.block}/{node}" for node in self.block.outputs}
        while stack:
            at = stack.pop()
            if at in outputs:
                yield None
            for user in facts.users.get(at, ()):
                if user.free or facts.biased(user) == at:
                    stack += user.results
                else:
                    yield user

    def kept_of(self, op: Op) -> list[str]:
        """What the backward of one op needs, as torch's derivatives.yaml has it (see `cost.memory`)."""
        values = self.facts.problem.values
        gradients = [values[name].gradient for name in op.operands]
        results = [name for name in op.results if name in values]
        kind = kind_of(op)
        if op.free or self.facts.biased(op) is not None or not any(values[name].gradient for name in results):
            return []
        if kind == "attention":
            return [*op.operands, *results]
        if kind in ("embedding", "cross_entropy"):
            return list(op.operands[1:]) if kind == "embedding" else []
        if kind == "matmul" or op.kind in PRODUCTS:
            return [
                name
                for index, name in enumerate(op.operands)
                if any(flows for other, flows in enumerate(gradients) if other != index)
            ]
        if op.kind in LINEAR:
            return []
        return results if op.kind in KEEPS_RESULT else list(op.operands)

    def kept_roots(self, op: Op) -> list[str]:
        """The values in memory that `op` needs: what a fused kernel makes it makes again from what it read."""
        facts, found, seen = self.facts, [], set()
        stack = self.kept_of(op)[::-1]
        while stack:
            root = facts.root(stack.pop())
            if root in seen:
                continue
            seen.add(root)
            if root in self.inside:
                stack += facts.maker[root].operands[::-1]
            elif root in facts.problem.values and root not in facts.fixed:
                found.append(root)
        return found

    def kind(self, ops: Sequence[Op]) -> str:
        facts, values = self.facts, self.facts.problem.values
        kinds = {op.kind for op in ops}
        made = {name for op in ops for name in op.results}
        outside = [
            root
            for op in ops
            for name in op.operands
            if (root := facts.root(name)) not in made and root not in facts.fixed and root in values
        ]
        tables = [root for root in outside if values[root].info.is_float and not values[root].gradient]
        wide = [
            name for name in made if name in values and facts.elements(name) > 1 and values[name].gradient
        ]
        heads = any(axis.startswith("heads") for name in made if name in values for axis in values[name].axes)
        if tables and heads and {"aten.cat", "aten.mul"} <= kinds:
            return "rotary"
        if self.topk and (kinds & ALONE or not wide):
            return "router"
        if any(word in kind for kind in kinds for word in NORMS):
            return "norm"
        if kinds & {"aten.index", "aten.index_select", "aten.gather"} and any(
            self.rows(name)[1] for name in (*wide, *outside)
        ):
            return "permute"
        if kinds & {"aten.softmax", "aten._softmax", "aten.log_softmax", "aten._log_softmax"}:
            return "router" if self.topk else "softmax"
        if self.topk and any(values[name].info.shape[-1:] == (self.experts(),) for name in wide):
            return "router"
        if kinds & ACTIVATIONS:
            return "activation"
        grown = [name for name in wide if any(facts.is_stream(axis) for axis in values[name].axes)]
        return "residual" if "aten.add" in kinds and grown else "pointwise"

    def experts(self) -> int:
        return max((item.experts for item in self.products.values()), default=0)

    def inner_values(self) -> set[str]:
        """Values that lie between a column and a row product."""
        facts, found = self.facts, set()
        for op in self.ops:
            item = self.products.get(op.name)
            for name in op.results:
                value = facts.value(name)
                if value is None:
                    continue
                axes = {axis for axis in value.axes if axis}
                if any(facts.is_inner(axis) for axis in axes):
                    found.add(name)
                elif item is not None and item.weight is not None:
                    if any(facts.is_inner(axis) for axis in item.n_axes):
                        found.add(name)
                elif kind_of(op) != "attention" and not any(map(facts.is_stream, axes)):
                    found.update([name] if any(operand in found for operand in op.operands) else [])
        return found

    def rows(self, name: str) -> tuple[float, bool]:
        """(rows per token, whether they are rows that were sent to experts)."""
        value = self.facts.value(name)
        if value is None or self.topk <= 1 or len(value.info.shape) != 2:
            return 1.0, False
        rows = value.info.shape[0] / self.facts.tokens
        return (self.topk, True) if abs(rows - self.topk) < 1e-9 else (1.0, False)

    def bytes(self, name: str) -> float:
        return self.facts.elements(name) * self.facts.item(name) if name in self.facts.problem.values else 0.0

    def name(self, op: Op) -> str:
        node = op.name.split("/", 1)[1]
        return self.modules.get(node) or node
