"""Unflatten: tokens that a model flattens on their way to experts, kept as [batch, sequence].

In:  a normalized graph with layers of experts, in which `view(x [b, s, d], [b * s, d])` opens runs of ops that treat
     each token by itself: routers, experts.
Out: the same graph with these runs on [b, s, ...], so that batch and sequence can be split apart.

    reshape(x, [32, d]); linear; softmax; topk; experts; reshape(y, [4, 8, d])  ->  linear; softmax; topk; experts

Where an op mixes tokens, or its way of naming dims is not known here, it gets its operands flattened again. A sum or
mean over tokens is one over batch and sequence.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autopar.expert_functions import experts
from autopar.program import op_name
from autopar.rules import elementwise

aten = torch.ops.aten

# Ops whose only way of naming dims is this argument (position, name, default).
_DIM: dict[str, tuple[int, str, Any]] = {
    f"aten.{name}": (position, "dim", default)
    for position, default, names in (
        (
            1,
            None,
            "softmax _softmax log_softmax _log_softmax sum mean amax amin logsumexp cumsum cumprod select",
        ),
        (1, None, "squeeze gather scatter scatter_add index_select argmax argmin any all max min"),
        (1, -1, "sort argsort"),
        (1, 0, "slice"),
        (2, -1, "topk"),
        (2, None, "linalg_vector_norm"),
        (2, 0, "split split_with_sizes chunk"),
    )
    for name in names.split()
}
_EACH = frozenset(
    f"aten.{name}"
    for name in ("_to_copy", "clone", "detach", "one_hot", "zeros_like", "ones_like", "full_like")
)
_PRODUCTS = frozenset(("aten.linear", "aten.mm", "aten.matmul", "aten.bmm"))
# Elementwise by their rule, but with operands or dims that do not align from the right.
_ODD = frozenset(
    f"aten.{name}"
    for name in ("searchsorted", "bucketize", "isin", "prelu", "glu", "broadcast_tensors", "feature_dropout")
)
_OVER_TOKENS = frozenset(("aten.sum", "aten.mean", "aten.amax", "aten.amin"))


def unflatten(graph: Graph, outputs: set[Node]) -> None:
    """Rewrite `graph` in place; the nodes in `outputs` stay."""
    if any(node.target is experts for node in graph.nodes):
        _Tokens(graph, outputs).run()


class _UnknownError(Exception):
    """An op that is not rewritten."""


class _Tokens:
    def __init__(self, graph: Graph, outputs: set[Node]) -> None:
        self.graph, self.outputs = graph, outputs
        self.apart: dict[Node, Node] = {}  # flat value -> the same with batch and sequence apart
        self.lead: dict[Node, tuple[int, int]] = {}
        self.done: set[Node] = set()  # nodes that have a twin on unflattened tokens, or stand for one

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op != "call_function":
                continue
            flat = [operand for operand in node.all_input_nodes if operand in self.apart]
            if flat:
                self.rewrite(node, self.lead[flat[0]])
            elif node.target is aten.reshape.default:
                self.open(node)
        for node, twin in self.apart.items():
            self.flatten_again(node, twin)
        for node in reversed(list(self.graph.nodes)):
            if (
                node.op == "call_function"
                and node in self.done
                and not node.users
                and node not in self.outputs
            ):
                self.graph.erase_node(node)

    def open(self, node: Node) -> None:
        source = node.args[0]
        assert isinstance(source, Node)
        before, after = _shape(source), _shape(node)
        if len(before) >= 3 and len(after) >= 2 and after[0] == before[0] * before[1] and min(before[:2]) > 1:
            lead = (before[0], before[1])
            self.keep(node, self.reshaped(node, source, [*lead, *after[1:]]), lead)

    def keep(self, node: Node, twin: Node, lead: tuple[int, int]) -> None:
        self.apart[node], self.lead[node] = twin, lead
        self.done.add(node)

    def reshaped(self, like: Node, source: Node, shape: Sequence[int]) -> Node:
        if list(_shape(source)) == list(shape):
            return source
        return self.insert(like, aten.reshape.default, source, list(shape))

    def insert(self, before: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs)
        node.meta = dict(before.meta)
        fake_args, fake_kwargs = map_arg((args, kwargs), lambda operand: operand.meta["val"])
        with torch.no_grad():
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        return node

    # ---- one op ----------------------------------------------------------------------------------------------------

    def rewrite(self, node: Node, lead: tuple[int, int]) -> None:
        others = [self.lead[operand] for operand in node.all_input_nodes if operand in self.lead]
        if node in self.outputs or any(other != lead for other in others):
            return
        made: list[Node] = []

        def insert(target: Any, *args: Any, **kwargs: Any) -> Node:
            made.append(self.insert(node, target, *args, **kwargs))
            return made[-1]

        try:
            twin = self.twin(node, lead, insert)
            expected = _unflat(node.meta["val"], lead)
            if twin is not None and _shapes(twin.meta["val"]) == expected:
                self.keep(node, twin, lead)
                return
            if twin is not None and _shapes(twin.meta["val"]) == _shapes(node.meta["val"]):
                node.replace_all_uses_with(twin)
                self.done.add(node)
                return
        except (_UnknownError, RuntimeError, IndexError, TypeError, ValueError):
            pass  # the op on these shapes is not what was thought: it keeps its flat operands
        for extra in reversed(made):
            self.graph.erase_node(extra)

    def twin(self, node: Node, lead: tuple[int, int], insert: Callable[..., Node]) -> Node | None:
        """The op on unflattened tokens. Raises _UnknownError for ops that cannot be told to treat tokens one by one."""
        count = lead[0] * lead[1]
        args, kwargs = list(node.args), dict(node.kwargs)
        if node.target is operator.getitem:
            return insert(operator.getitem, self.apart[args[0]], args[1])  # type: ignore[index]
        name, flat = op_name(node), next(operand for operand in node.all_input_nodes if operand in self.apart)
        rank = len(_shape(flat))

        def operand(value: Node) -> Node:
            """An operand with its dims aligned to [b, s, ...] from the right."""
            shape = _shape(value)
            if value in self.apart:
                if len(shape) != rank:
                    raise _UnknownError
                return self.apart[value]
            if len(shape) < rank:
                return value
            if shape[0] == count:
                return insert(aten.reshape.default, value, [*lead, *shape[1:]])
            if len(shape) == rank and shape[0] == 1:
                return insert(aten.unsqueeze.default, value, 0)
            raise _UnknownError

        if node.target is experts:
            x, index, weights = (operand(value) for value in args[:3])  # type: ignore[arg-type]
            return insert(experts, x, index, weights, *args[3:])
        if (name in elementwise.RULES and name not in _ODD) or name in _EACH:
            depth = max(len(_shape(value)) for value in node.all_input_nodes)
            if depth != rank:
                raise _UnknownError
            return insert(node.target, *map_arg(tuple(args), operand), **map_arg(kwargs, operand))
        if name in _PRODUCTS:
            return self.product(node, name, insert)
        if name == "aten.reshape":
            return self.reshape(node, lead, insert)
        if name == "aten.cat":
            dim = args[1] if len(args) > 1 else 0
            pieces = map_arg(args[0], operand)
            return insert(node.target, pieces, _moved(dim, rank))
        if name == "aten.unsqueeze":
            return insert(node.target, self.apart[flat], _moved(args[1], rank + 1))
        if name == "aten.transpose":
            return insert(node.target, self.apart[flat], _moved(args[1], rank), _moved(args[2], rank))
        if name == "aten.expand":
            sizes = list(args[1])  # type: ignore[arg-type]
            if len(sizes) != rank or sizes[0] not in (count, -1):
                raise _UnknownError
            return insert(node.target, self.apart[flat], [*lead, *sizes[1:]])
        if name in _DIM and isinstance(args[0], Node) and len(_shape(args[0])) == rank:
            return self.along(node, name, rank, operand, insert)
        raise _UnknownError

    def product(self, node: Node, name: str, insert: Callable[..., Node]) -> Node:
        left, right = node.args[:2]
        assert isinstance(left, Node)
        assert isinstance(right, Node)
        if left not in self.apart or len(node.args) > 2:
            raise _UnknownError
        if name == "aten.linear" and right not in self.apart:
            return insert(node.target, self.apart[left], right)
        batched = len(_shape(left)) == len(_shape(right)) == 3 and right in self.apart
        if batched or (len(_shape(left)) == len(_shape(right)) == 2 and right not in self.apart):
            return insert(aten.matmul.default, self.apart[left], self.apart.get(right, right))
        raise _UnknownError

    def reshape(self, node: Node, lead: tuple[int, int], insert: Callable[..., Node]) -> Node:
        source = node.args[0]
        assert isinstance(source, Node)
        twin, shape = self.apart[source], _shape(node)
        if shape[:1] == (lead[0] * lead[1],):
            shape = (*lead, *shape[1:])
        elif shape[:2] != lead:
            raise _UnknownError
        return twin if shape == _shape(twin) else insert(aten.reshape.default, twin, list(shape))

    def along(
        self,
        node: Node,
        name: str,
        rank: int,
        operand: Callable[[Node], Node],
        insert: Callable[..., Node],
    ) -> Node:
        position, word, default = _DIM[name]
        args, kwargs = list(node.args), dict(node.kwargs)
        dims = args[position] if position < len(args) else kwargs.get(word, default)
        if dims is None or isinstance(dims, Node):
            raise _UnknownError
        listed: Any = dims if isinstance(dims, (list, tuple)) else [dims]
        over = {int(dim) % rank for dim in listed}
        moved: Any
        if 0 in over:
            keeps = args[position + 1] if len(args) > position + 1 else kwargs.get("keepdim", False)
            if name not in _OVER_TOKENS or keeps:
                raise _UnknownError
            moved = sorted({0, 1, *(dim + 1 for dim in over)})
        else:
            moved = [_moved(dim, rank) for dim in listed]
            moved = moved if isinstance(dims, (list, tuple)) else moved[0]
        if position < len(args):
            args[position] = moved
        elif word in kwargs or default is not None:
            kwargs[word] = moved
        target = (
            aten.sum.dim_IntList
            if name == "aten.sum"
            else aten.mean.dim
            if name == "aten.mean"
            else node.target
        )
        return insert(target, *map_arg(tuple(args), operand), **map_arg(kwargs, operand))

    # ---- users that stay flat ----------------------------------------------------------------------------------------

    def flatten_again(self, node: Node, twin: Node) -> None:
        if node.target is operator.getitem or isinstance(node.meta["val"], torch.Tensor):
            users = [user for user in node.users if user not in self.done]
            opened = node.target is aten.reshape.default and node.args[0] is twin
            if users and not opened:
                back = self.insert(node, aten.reshape.default, twin, list(_shape(node)))
                for user in users:
                    user.replace_input_with(node, back)


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(int(size) for size in node.meta["val"].shape)


def _shapes(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_shapes(item) for item in value]
    return tuple(value.shape)


def _unflat(value: Any, lead: tuple[int, int]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_unflat(item, lead) for item in value]
    shape = tuple(value.shape)
    return (*lead, *shape[1:]) if shape[:1] == (lead[0] * lead[1],) else None


def _moved(dim: Any, rank: int) -> int:
    """A dim of the flat value, as counted after its first was made two."""
    at = int(dim) % rank
    if at == 0:
        raise _UnknownError
    return at + 1
