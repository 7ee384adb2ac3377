"""One block of a RankProgram, read forwards for how values lie and backwards for what its gradients are.

In:  a lowered block, the mesh, and the placeholders that a gradient flows back to.
Out: the shardings of what it returns, and the axes over which the gradients of its placeholders are addends;
     ShardingError where an op or a collective gets something else than it is for.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch.fx import Node

from autopar import collectives
from autopar.errors import ShardingError
from autopar.mesh import Mesh
from autopar.passes.lower import RankBlock
from autopar.program import TensorInfo, node_info, tensor_info
from autopar.rules import localize, operand_nodes, rule_of_node
from autopar.rules.call import leaves
from autopar.rules.rule import JOINT, PAIR, Rule, Sharded, pair_choice, sums_choice
from autopar.sharding import Sharding

STEPS = (
    collectives.copy,
    collectives.all_reduce,
    collectives.all_gather,
    collectives.reduce_scatter,
    collectives.slice_own,
    collectives.all_to_all,
)
COUNT = "label count"

Axes = frozenset[str]


def reached(block: RankBlock, start: set[str]) -> set[Node]:
    """Nodes that depend on the placeholders in `start` by way of floating point values."""
    found: set[Node] = set()
    for node in block.graph.graph.nodes:
        if node.op == "placeholder":
            depends = node.name in start
        else:
            depends = node.op == "call_function" and any(source in found for source in node.all_input_nodes)
        info: TensorInfo | None = node.meta.get("global")
        if depends and (info is None or info.is_float):
            found.add(node)
    return found


def returned(block: RankBlock) -> tuple[Node, ...]:
    output = next(node for node in block.graph.graph.nodes if node.op == "output")
    return tuple(output.args[0])


@dataclass
class Picked:
    """Which choice of its rule an op's operands lie by. `rule` None: the op has none and everything is whole."""

    rule: Rule | None
    by_axis: Mapping[str, str | None]
    sharded: Sharded | None


@dataclass
class BlockCheck:
    block: RankBlock
    mesh: Mesh
    live: tuple[str, ...]
    flows: set[str]
    shardings: dict[Node, Sharding] = field(default_factory=dict)
    choices: dict[Node, Picked] = field(default_factory=dict)

    # ---- forward ---------------------------------------------------------------------------------------------

    def forward(self) -> list[Sharding]:
        """The shardings of what the block returns."""
        for node in self.block.graph.graph.nodes:
            if node.op == "placeholder":
                if "sharding" in node.meta:
                    self.shardings[node] = node.meta["sharding"]
            elif node.op == "call_function":
                if node.target in STEPS:
                    self.shardings[node] = self._step(node)
                elif "source" in node.meta:
                    self._op(node)
                self._claims(node)
        results = returned(self.block)
        for node, name in zip(results, self.block.outputs, strict=True):
            if name != COUNT and node not in self.shardings:
                fail(self.block, node, "is returned, and is neither a value of the program nor a step", "")
        return [self.shardings.get(node, Sharding.whole(0)) for node in results]

    def _claims(self, node: Node) -> None:
        """What the lowering wrote beside the node agrees with what was found, and divides."""
        found, info = self.shardings.get(node), node.meta.get("global")
        if found is None or info is None:
            return
        if node.meta["sharding"] != found:
            fail(self.block, node, f"is {found}", f"{node.meta['sharding']} expected")
        local = found.local_shape(info.shape, self.mesh, where=f"{self.block.name}/{node.name}")
        if local != node.meta["local_shape"]:
            fail(self.block, node, f"has the local shape {node.meta['local_shape']}", f"{local} expected")

    def _axis(self, node: Node, axis: Any) -> str:
        if axis not in self.live:
            fail(self.block, node, f"names the axis {axis!r}", f"one of {', '.join(self.live)} expected")
        return str(axis)

    def _step(self, node: Node) -> Sharding:
        source = node.args[0]
        assert isinstance(source, Node)
        have = self.shardings.get(source)
        if have is None:
            fail(self.block, node, f"moves %{source}, which is no value of the program", "")
        kind, arguments = node.target, node.args[1:]
        dims = [*have.dims]
        if kind not in (collectives.copy, collectives.all_reduce):
            for dim in arguments[: 2 if kind is collectives.all_to_all else 1]:
                if dim not in range(len(dims)):
                    fail(self.block, node, f"names dim {dim} of {have}", f"one of {len(dims)} dims expected")
        sums = have.sums

        def gather(dim: Any, axis: str) -> None:
            if dims[dim][-1:] != (axis,):
                fail(self.block, node, f"gathers dim {dim} of {have} over {axis}", "a split by it expected")
            dims[dim] = dims[dim][:-1]

        def split(dim: Any, axis: str) -> None:
            dims[dim] = (*dims[dim], axis)

        def add(axis: str) -> None:
            nonlocal sums
            if axis not in sums:
                fail(self.block, node, f"sums {have} over {axis}", "a partial sum over it expected")
            sums = tuple(each for each in sums if each != axis)

        axis: Any
        size: Any
        if kind is collectives.copy:
            axis = self._axis(node, arguments[0])
            if axis in have.axes:
                fail(self.block, node, f"copies {have} along {axis}", "whole along it expected")
        elif kind is collectives.all_reduce:
            add(self._axis(node, arguments[0]))
        elif kind is collectives.all_gather:
            dim, axis, size, place, _ = arguments
            gather(dim, self._axis(node, axis))
            self._group(node, axis, size, place)
        elif kind is collectives.reduce_scatter:
            dim, axis, size = arguments
            add(self._axis(node, axis))
            split(dim, str(axis))
            self._group(node, axis, size)
        elif kind is collectives.slice_own:
            dim, axis, size, place = arguments
            if self._axis(node, axis) in have.axes:
                fail(self.block, node, f"slices {have} over {axis}", "whole along it expected")
            split(dim, str(axis))
            self._group(node, axis, size, place)
        else:
            dim, to_dim, axis, size = arguments
            gather(dim, self._axis(node, axis))
            split(to_dim, str(axis))
            self._group(node, axis, size)
        return Sharding(tuple(dims), sums)

    def _group(self, node: Node, axis: Any, size: Any, place: Any = None) -> None:
        if size != self.mesh.sizes[axis]:
            fail(self.block, node, f"takes {axis} to have size {size}", f"{self.mesh.sizes[axis]} expected")
        if place is not None and str(place) != _coordinate(axis):
            fail(
                self.block, node, f"takes %{place} for the place on {axis}", f"%{_coordinate(axis)} expected"
            )

    def _op(self, node: Node) -> None:
        source: Node = node.meta["source"]
        if source.target is operator.getitem:
            made, index = node.args
            assert isinstance(made, Node)
            assert isinstance(index, int)
            choice = self.choices[made]
            self.shardings[node] = self._result(choice, index, node)
            return
        operands, inner = self._operands(node)
        expected = len(operand_nodes(source))
        if len(operands) < expected:
            # A lowering may leave an operand out that its own way of working replaces, but only at the end.
            source_operands = operand_nodes(source)[: len(operands)]
        else:
            source_operands = operand_nodes(source)
            operands = operands[:expected]
        rule = rule_of_node(source)
        found = [self.shardings[operand] for operand in operands]
        for operand, sharding, original in zip(operands, found, source_operands, strict=True):
            info = node_info(original)
            if info is not None and len(info.shape) != len(sharding.dims):
                fail(self.block, node, f"takes %{operand} as {sharding}", f"{len(info.shape)} dims expected")
        if rule is None:
            split = next((sharding for sharding in found if sharding.axes), None)
            if split is not None:
                fail(self.block, node, f"takes {split}, and {source.target} has no rule", "whole expected")
            self.choices[node] = Picked(None, {}, None)
        else:
            self.choices[node] = self._choose(node, rule, found)
            self._check_inner(node, source, rule, self.choices[node], inner)
        if tensor_info(source.meta.get("val")) is not None:
            self.shardings[node] = self._result(self.choices[node], 0, node)

    def _result(self, choice: Picked, index: int, node: Node) -> Sharding:
        if choice.sharded is not None:
            return choice.sharded.results[index]
        info: TensorInfo | None = node.meta.get("global")
        return Sharding.whole(len(info.shape) if info else 0)

    def _operands(self, node: Node) -> tuple[list[Node], list[Node]]:
        """The values that a node works on, and the nodes it is made of: what is neither a value of the program nor a
        step between shardings belongs to it."""
        operands: list[Node] = []
        inner: list[Node] = []

        def walk(part: Node) -> None:
            inner.append(part)
            for leaf in leaves([list(part.args), dict(part.kwargs)]):
                if not isinstance(leaf, Node) or _is_coordinate(leaf):
                    continue
                if leaf in self.shardings or leaf in self.choices:
                    operands.append(leaf)
                elif leaf.op == "call_function":
                    walk(leaf)
                else:
                    fail(self.block, node, f"takes %{leaf}, of which nothing is known", "")

        walk(node)
        return operands, inner

    def _choose(self, node: Node, rule: Rule, found: Sequence[Sharding]) -> Picked:
        """The choice of the rule by which all operands lie; of several the one whose results lie as claimed."""
        claimed: Sharding | None = node.meta.get("sharding")
        options = [self._options(rule, axis, found) for axis in self.live]
        for axis, able in zip(self.live, options, strict=True):
            if not able:
                fail(
                    self.block,
                    node,
                    f"takes its operands along {axis} as {', '.join(map(str, found)) or 'nothing'}",
                    f"a choice of the rule {rule} expected"
                    + (
                        " (it is not linear in a partial sum there)"
                        if any(axis in one.sums for one in found)
                        else ""
                    ),
                )
        fitting = []
        for picked in itertools.islice(itertools.product(*options), 4096):
            by_axis = dict(zip(self.live, picked, strict=True))
            try:
                sharded = rule.shard(by_axis, self.mesh.sizes)
            except ShardingError:
                continue
            if all(use.sharding == have for use, have in zip(sharded.uses, found, strict=False)):
                fitting.append(Picked(rule, by_axis, sharded))
                if claimed is None or sharded.results[0] == claimed:
                    return fitting[-1]
        if not fitting:
            fail(
                self.block,
                node,
                f"takes its operands as {', '.join(map(str, found))}",
                f"one choice of the rule {rule} for all axes expected",
            )
        return fitting[0]

    def _options(self, rule: Rule, axis: str, found: Sequence[Sharding]) -> list[str | None]:
        """The choices of one axis by which the operands lie along it."""
        sizes = {axis: self.mesh.sizes[axis]}
        split = {
            dims[at][0]
            for dims, have in zip(rule.operands, found, strict=False)
            for at in (have.dim_of(axis),)
            if at is not None and dims[at]
        }
        options: list[str | None]
        if split:
            options = [*(factor for factor in split if factor in rule.splittable())]
            options += [pair_choice(pair) for pair in rule.pairs if split & set(pair)]
            options += [joint for joint in rule.joint if split & set(joint.split(JOINT))]
        elif any(axis in have.sums for have in found):
            options = [sums_choice(group) for group in range(len(rule.sums))]
        else:
            named = {name for dims in rule.operands for dim in dims for name in dim}
            options = [None, *(factor for factor in rule.splittable() if factor not in named)]
        able = []
        for option in options:
            try:
                uses = rule.shard({axis: option}, sizes).uses
            except ShardingError:
                continue
            if all(
                use.sharding.dim_of(axis) == have.dim_of(axis)
                and (axis in use.sharding.sums) == (axis in have.sums)
                for use, have in zip(uses, found, strict=False)
            ):
                able.append(option)
        return able

    def _check_inner(
        self, node: Node, source: Node, rule: Rule, choice: Picked, inner: Sequence[Node]
    ) -> None:
        """The op on pieces has the arguments of a piece, is scaled if it averages, and is not used where its split
        needs more."""
        assert choice.sharded is not None
        by_factor = choice.sharded.by_factor
        needs_more = {
            axis
            for factor, axes in by_factor.items()
            if factor in rule.special or PAIR in factor or factor in rule.joint
            for axis in axes
        }
        plain = [part for part in inner if part.target is source.target]
        if needs_more and plain and rule.lowering is not None:
            fail(
                self.block,
                node,
                f"is {source.target} on pieces, split over {words(needs_more)}",
                rule.lowering,
            )
        if needs_more:
            named = {leaf for part in inner for leaf in leaves([list(part.args), dict(part.kwargs)])}
            absent = {
                axis
                for axis in needs_more
                if axis not in named and not any(str(leaf) == _coordinate(axis) for leaf in named)
            }
            if absent:
                fail(self.block, node, f"does nothing about its split over {words(absent)}", "")
            return
        ways = rule.average_ways(choice.sharded, self.mesh.sizes)
        found = 1
        for part in inner:
            if part.target is collectives.scaled_sum:
                assert isinstance(part.args[1], int)
                found *= part.args[1]
        if found != ways:
            fail(
                self.block,
                node,
                f"is divided by {found}",
                f"{ways} expected, the parts that it averages over",
            )
        info = node_info(source)
        if len(plain) == 1 and (rule.shape_arg is not None or rule.count_args):
            local = choice.sharded.results[0].local_shape(info.shape, self.mesh) if info is not None else ()
            expected = localize(source.args, rule, local, rule.counts(choice.sharded, self.mesh.sizes))
            said, wanted = _numbers(plain[0].args), _numbers(expected if by_factor else source.args)
            if said != wanted:
                fail(self.block, plain[0], f"has the arguments {said}", f"{wanted} expected on each piece")

    # ---- backward --------------------------------------------------------------------------------------------

    def backward(self) -> dict[Node, Axes]:
        """The axes over which the gradients of the placeholders arrive as addends; only those that one flows to."""
        within = reached(self.block, self.flows)
        gradients: dict[Node, Axes] = {}

        def arrive(node: Node, addends: Axes, user: Node) -> None:
            if node not in within:
                return
            have = self.shardings.get(node)
            split = frozenset(have.axes) - frozenset(have.sums) if have is not None else frozenset()
            addends -= split
            if gradients.setdefault(node, addends) != addends:
                fail(
                    self.block,
                    node,
                    f"its gradient from %{user} is addends over {words(addends)}, from another user over "
                    f"{words(gradients[node])}",
                    "one kind expected",
                )

        for node in returned(self.block):
            arrive(node, frozenset(), node)
        for node in reversed(self.block.graph.graph.nodes):
            if node.op != "call_function" or node not in gradients:
                continue
            if node.target in STEPS:
                source = node.args[0]
                assert isinstance(source, Node)
                arrive(source, self._step_backward(node, gradients[node]), node)
            elif "source" in node.meta:
                for operand, addends in self._op_backward(node, gradients[node]):
                    arrive(operand, addends, node)
        return {node: addends for node, addends in gradients.items() if node.op == "placeholder"}

    def _step_backward(self, node: Node, addends: Axes) -> Axes:
        kind = node.target
        if kind is collectives.copy:
            axis, wants = node.args[1], True
        elif kind is collectives.all_reduce:
            axis, wants = node.args[1], bool(node.args[2])
        elif kind is collectives.all_gather:
            axis, wants = node.args[2], bool(node.args[5])
        else:  # the gradient of a split value has no addends along its axis
            return addends
        assert isinstance(axis, str)
        if (axis in addends) != wants:
            kinds = ("complete", "addends")
            fail(
                self.block,
                node,
                f"gets its gradient along {axis} {kinds[axis in addends]}",
                f"its backward is for {kinds[wants]}",
            )
        return addends - {axis}

    def _op_backward(self, node: Node, addends: Axes) -> Iterator[tuple[Node, Axes]]:
        source: Node = node.meta["source"]
        if source.target is operator.getitem:
            made = node.args[0]
            assert isinstance(made, Node)
            yield made, addends
            return
        choice = self.choices[node]
        operands, _ = self._operands(node)
        if choice.rule is None or choice.sharded is None:
            for operand in operands:
                yield operand, addends
            return
        used = {axis for axis, option in choice.by_axis.items() if option is not None}
        if addends & used:
            fail(
                self.block,
                node,
                f"gets its gradient as addends over {words(addends & used)}, along which it is split itself",
                "complete expected",
            )
        for operand, use in zip(operands, choice.sharded.uses, strict=False):
            yield operand, addends | (frozenset(use.grad_sums) & frozenset(self.live))


# ---- small things --------------------------------------------------------------------------------------------------

HINT = (
    "reporting this: it is a fault of autopar, or of a rule registered with it, and the plan must not be run"
)


def fail(block: RankBlock, node: Node, found: str, expected: str) -> NoReturn:
    raise ShardingError(
        f"%{node.name} {found}" + (f"; {expected}" if expected else ""),
        where=f"block {block.name}, {_shown(node)}",
        hint=HINT,
    )


def _shown(node: Node) -> str:
    name: str | Callable[..., Any] = getattr(node.target, "__name__", str(node.target))
    return f"%{node.name} = {name}({', '.join(map(str, node.args))})"


def _coordinate(axis: Any) -> str:
    return f"coordinate_{axis}"


def _is_coordinate(node: Node) -> bool:
    return node.op == "placeholder" and "sharding" not in node.meta


def words(axes: Axes | set[str]) -> str:
    return ", ".join(sorted(axes)) or "no axis"


def _numbers(arguments: Sequence[Any]) -> list[Any]:
    """Positional arguments, with `%` for every tensor."""
    return [
        "%"
        if isinstance(argument, Node)
        else list(argument)
        if isinstance(argument, (list, tuple))
        else argument
        for argument in arguments
    ]
