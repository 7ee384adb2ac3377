"""Segments: the nodes of an exported graph, cut at the boundaries of layers.

In:  a normalized graph, its placeholders, the wanted outputs, and the calls of layers that were marked in it
     (`passes/boundary.py`).
Out: segments in order, of live nodes only: a traced layer, a stand-in for a layer left out, or what stands between.
     What happens between the layers of a stack and needs none of them (the slice of an input for each layer) moves
     in front of the stack.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autopar.passes.boundary import LAYER_INPUTS, LAYER_OUTPUTS, MARKERS, LayerCall
from autopar.passes.fold import FoldError, Stack
from autopar.passes.pending import LEFT_OUT
from autopar.program import node_info, op_name
from autopar.torch_private import module_path

Place = tuple[int, int]  # stack, layer


@dataclass
class Marked:
    """A call of a layer as it stands in the graph. `entry` takes the tensors the layer is given, `exit` makes those it
    returns (of a stand-in they are one node)."""

    call: LayerCall
    entry: Node | None = None
    exit: Node | None = None
    live: bool = False

    def operand(self, position: int) -> Node:
        assert self.entry is not None
        return self.entry.args[0][position]  # type: ignore[index, return-value]

    def result(self, slot: int) -> Node:
        """The node inside of a traced layer that is returned in a slot."""
        assert self.exit is not None
        return self.exit.args[0][slot]  # type: ignore[index, return-value]

    def results_taken(self) -> Iterator[tuple[int, Node]]:
        """(slot, the node outside that stands for it)."""
        for user in self.exit.users if self.exit is not None else ():
            if user.target is operator.getitem:
                yield user.args[1], user  # type: ignore[misc]


@dataclass
class Group:
    """Calls of one kind of layer, called alike. `slots`: the results used of any of them, `positions`: the arguments
    they use."""

    members: list[Marked] = field(default_factory=list)
    slots: set[int] = field(default_factory=set)
    positions: set[int] = field(default_factory=set)

    @property
    def live(self) -> list[Marked]:
        return [member for member in self.members if member.live]

    @property
    def traced(self) -> list[Marked]:
        return [member for member in self.live if member.call.traced]

    @cached_property
    def twins(self) -> list[Marked]:
        """The last two traced calls."""
        return [member for member in self.members if member.call.traced][-2:]

    def same(self, position: int) -> int:
        """The first position at which every call has the same tensor as at this one."""
        return next(
            other
            for other in sorted(self.positions)
            if all(member.operand(other) is member.operand(position) for member in self.live)
        )


class Marks:
    """The marked calls of a graph, by group and by their nodes."""

    def __init__(self, graph: Graph, calls: Sequence[LayerCall]) -> None:
        known = {(call.path, call.call): Marked(call) for call in calls}
        self.by_node: dict[Node, Marked] = {}
        self.groups: dict[int, Group] = {}
        for node in graph.nodes:
            if node.target in MARKERS:
                marked = known[node.args[1], node.args[2]]
                self.by_node[node] = marked
                if node.target is not LAYER_OUTPUTS:
                    marked.entry = node
                if node.target is not LAYER_INPUTS:
                    marked.exit = node
        for marked in known.values():
            if marked.exit is not None:
                self.groups.setdefault(marked.call.group, Group()).members.append(marked)

    def group(self, marked: Marked) -> Group:
        return self.groups[marked.call.group]

    def item(self, node: Node) -> tuple[Marked, int] | None:
        """The call and number of what a node takes from a marker."""
        if node.target is operator.getitem and node.args[0] in self.by_node:
            return self.by_node[node.args[0]], node.args[1]  # type: ignore[index, return-value]
        return None

    def is_argument(self, node: Node) -> bool:
        """Whether a node is what a traced layer sees of an argument."""
        return (
            node.target is operator.getitem
            and isinstance(node.args[0], Node)
            and node.args[0].target is LAYER_INPUTS
        )


@dataclass
class Segment:
    """A run of nodes: one layer (`place`), a stand-in (`mark`, no nodes) or what stands outside of layers."""

    nodes: list[Node]
    place: Place | None
    mark: Marked | None = None
    state: list[Node] = field(default_factory=list)
    inputs: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)

    @property
    def stand_in(self) -> bool:
        return self.mark is not None and not self.mark.call.traced

    @property
    def key(self) -> str:
        """Equal for segments that are the same block."""
        index = {node: f"%{number}" for number, node in enumerate(self.nodes)}
        index |= {node: f"s{number}" for number, node in enumerate(self.state)}
        index |= {node: f"i{number}" for number, node in enumerate(self.inputs)}
        lines = [f"{node_info(node)}" for node in (*self.state, *self.inputs)]
        for node in self.nodes:
            arguments = map_arg((node.args, node.kwargs), lambda operand: index[operand])
            lines.append(f"{op_name(node)} {node.target} {arguments} {node_info(node)}")
        lines.append(" ".join(index[node] for node in self.outputs))
        return "\n".join(lines)


def live_nodes(marks: Marks, wanted: Sequence[Node]) -> set[Node]:
    """The nodes that the wanted ones need. All live calls of a group use the same arguments and results."""
    work = _Liveness(marks)
    for node in wanted:
        work.need(node)
    while work.todo:
        work.follow(work.todo.pop())
    return work.needed


class _Liveness:
    """The nodes found to be needed, and those of them whose operands were not looked at yet."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self.needed: set[Node] = set()
        self.todo: list[Node] = []

    def need(self, node: Node) -> None:
        if node not in self.needed:
            self.needed.add(node)
            self.todo.append(node)

    def follow(self, node: Node) -> None:
        item = self.marks.item(node)
        if item is None:
            for operand in node.all_input_nodes:
                self.need(operand)
            return
        member, number = item
        group = self.marks.group(member)
        if self.marks.is_argument(node):
            if number not in group.positions:
                group.positions.add(number)
                for other in group.live:
                    self.need(other.operand(number))
            return
        if number not in group.slots:
            group.slots.add(number)
            for other in group.traced:
                self.need(other.result(number))
        self.enliven(member)

    def enliven(self, member: Marked) -> None:
        """`member` is needed, and where it was left out, the traced ones that it is like."""
        if member.live:
            return
        member.live = True
        group = self.marks.group(member)
        for position in group.positions:
            self.need(member.operand(position))
        if member.call.traced:
            for slot in group.slots:
                self.need(member.result(slot))
            return
        for other in group.twins:
            self.enliven(other)


def cut(
    graph: Graph,
    marks: Marks,
    needed: set[Node],
    stacks: Sequence[Stack],
    folded: Sequence[int],
) -> list[Segment]:
    """Segments of the live nodes. Layers of stacks that are not `folded` are told by their module's path."""
    prefixes = {
        stack.layer_path(index): (number, index)
        for number, stack in enumerate(stacks)
        if number not in folded
        for index in range(len(stack.kinds))
    }
    builder = _Cutter(marks, _last_places(graph, marks, needed, prefixes))
    inside: Marked | None = None
    for node in graph.nodes:
        if node in marks.by_node:
            inside = marks.by_node[node] if node.target is LAYER_INPUTS else None
            if node.target is LEFT_OUT and marks.by_node[node].live:
                builder.stand_in(marks.by_node[node])
        elif node.op == "call_function" and node in needed and marks.item(node) is None:
            if inside is not None:
                builder.add(node, (inside.call.stack, inside.call.index), inside)
            else:
                builder.add(node, _place(module_path(node), prefixes), None)
    return builder.segments


def _last_places(
    graph: Graph, marks: Marks, needed: set[Node], prefixes: Mapping[str, Place]
) -> dict[int, Node]:
    """Stack -> the last node that belongs to one of its layers."""
    last: dict[int, Node] = {}
    for node in graph.nodes:
        if node in marks.by_node:
            last[marks.by_node[node].call.stack] = node
        elif node in needed and node.op == "call_function":
            place = _place(module_path(node), prefixes)
            if place is not None:
                last[place[0]] = node
    return last


class _Cutter:
    def __init__(self, marks: Marks, last: Mapping[int, Node]) -> None:
        self.marks = marks
        self.segments: list[Segment] = []
        self.where: dict[Node, int] = {}  # node -> number of its segment
        self.last = {node: stack for stack, node in last.items()}
        self.open: dict[int, int] = {}  # stack whose layers are being met -> number of its first segment

    def stand_in(self, mark: Marked) -> None:
        self.open.setdefault(mark.call.stack, len(self.segments))
        self.segments.append(Segment([], (mark.call.stack, mark.call.index), mark))
        assert mark.exit is not None
        self.where[mark.exit] = len(self.segments) - 1
        self._close(mark.exit)

    def add(self, node: Node, place: Place | None, mark: Marked | None) -> None:
        if place is None:
            number = self._part(node)
        else:
            self.open.setdefault(place[0], len(self.segments))
            current = self.segments[-1] if self.segments else None
            if current is None or current.place != place or current.mark is not mark:
                self.segments.append(Segment([], place, mark))
            number = len(self.segments) - 1
        self.segments[number].nodes.append(node)
        self.where[node] = number
        self._close(node)

    def _close(self, node: Node) -> None:
        if node in self.last:
            self.open.pop(self.last[node], None)

    def _part(self, node: Node) -> int:
        """The segment outside of layers that takes a node: the last one; between the layers of a stack, the one in
        front of them where the node needs no layer."""
        if self.open:
            first = min(self.open.values())
            after = max((self._made(operand) for operand in node.all_input_nodes), default=-1)
            if after < first:
                for number in range(first - 1, after - 1, -1):
                    if number >= 0 and self.segments[number].place is None:
                        return number
                if first == 0 or after < first - 1 or self.segments[first - 1].place is not None:
                    return self._insert(first)
        if not self.segments or self.segments[-1].place is not None:
            self.segments.append(Segment([], None))
        return len(self.segments) - 1

    def _made(self, node: Node) -> int:
        item = self.marks.item(node)
        if item is not None:
            marker = item[0].exit
            assert marker is not None
            return self.where.get(marker, self._of_call(item[0]))
        return self.where.get(node, -1)

    def _of_call(self, mark: Marked) -> int:
        return next(
            (n for n, segment in enumerate(self.segments) if segment.mark is mark), len(self.segments)
        )

    def _insert(self, number: int) -> int:
        self.segments.insert(number, Segment([], None))
        for node, place in self.where.items():
            if place >= number:
                self.where[node] = place + 1
        self.open = {stack: place + (place >= number) for stack, place in self.open.items()}
        return number


def _place(path: str, prefixes: Mapping[str, Place]) -> Place | None:
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        place = prefixes.get(".".join(parts[:length]))
        if place is not None:
            return place
    return None


def find_interfaces(
    segments: Sequence[Segment],
    marks: Marks,
    placeholders: Mapping[Node, str],
    outputs: Mapping[str, Node],
    stacks: Sequence[Stack],
) -> None:
    """Fill in the state, inputs and outputs of every segment but the stand-ins."""
    where = {node: segment for segment in segments for node in segment.nodes}
    leaving: set[Node] = set(outputs.values())
    for segment in segments:
        taken: dict[int, Node] = {}  # position -> the node that stands for the argument inside
        replaced: dict[Node, Node] = {}
        for node in segment.nodes:
            for operand in node.all_input_nodes:
                if operand in replaced or where.get(operand) is segment:
                    continue
                if marks.is_argument(operand):
                    mark, position = marks.item(operand) or (None, 0)
                    assert mark is not None
                    if mark is not segment.mark:
                        raise FoldError(
                            f"an argument of {mark.call.path} leaves the layer", stacks[mark.call.stack].path
                        )
                    first = marks.group(mark).same(position)
                    if first in taken:
                        replaced[operand] = taken[first]
                        continue
                    replaced[operand] = taken[first] = operand
                    bound = {member.operand(first) in placeholders for member in marks.group(mark).live}
                    if len(bound) > 1:
                        raise FoldError(
                            f"{mark.call.path} is given a parameter where another layer is given a value",
                            stacks[mark.call.stack].path,
                        )
                    (segment.state if bound.pop() else segment.inputs).append(operand)
                elif operand in placeholders:
                    if operand not in segment.state:
                        segment.state.append(operand)
                else:
                    source = where.get(operand)
                    if source is not None and source.mark is not None:
                        raise FoldError(
                            f"a value inside of {source.mark.call.path} is used outside of it",
                            stacks[source.mark.call.stack].path,
                        )
                    if operand not in segment.inputs:
                        segment.inputs.append(operand)
                    leaving.add(operand)
        for node in segment.nodes:
            for operand, canonical in replaced.items():
                if operand is not canonical:
                    node.replace_input_with(operand, canonical)
    for segment in segments:
        if segment.mark is None:
            segment.outputs = [node for node in segment.nodes if node in leaving]
        elif segment.mark.call.traced:
            _outputs_of_layer(segment, marks, outputs, stacks)
    for mark in (segment.mark for segment in segments if segment.mark is not None):
        for position in marks.group(mark).positions:
            source = where.get(mark.operand(position))
            if source is not None and source.mark is None and mark.operand(position) not in source.outputs:
                source.outputs = [
                    n for n in source.nodes if n in source.outputs or n is mark.operand(position)
                ]


def _outputs_of_layer(
    segment: Segment, marks: Marks, outputs: Mapping[str, Node], stacks: Sequence[Stack]
) -> None:
    mark = segment.mark
    assert mark is not None
    stack = stacks[mark.call.stack]
    members = set(segment.nodes)
    for slot in sorted(marks.group(mark).slots):
        node = mark.result(slot)
        if node not in members:
            raise FoldError(f"{mark.call.path} returns what it does not make", stack.path)
        if node not in segment.outputs:
            segment.outputs.append(node)
    for name, node in sorted(outputs.items()):
        if node in members:
            if not name.startswith(f"update {mark.call.path}."):
                raise FoldError(f"{mark.call.path} changes {name.removeprefix('update ')}", stack.path)
            if node not in segment.outputs:
                segment.outputs.append(node)
