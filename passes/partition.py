"""Partition: normalized nodes to unique blocks and the calls that make the model of them.

In:  one exported and normalized graph, in which stacks of layers may have been folded (`passes/boundary.py`).
Out: blocks (one per distinct graph) and calls, those of left-out layers being calls of the block of their kind.
     Layers are the same block only if their graphs are equal node for node: op, arguments, shapes.

A left-out layer's call takes what its stand-in takes in the graph, where the traced layer of its kind takes it; its
parameters are those of the same names in its own module. Both are checked on the two traced layers of the kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from autopar.passes.boundary import LayerCall
from autopar.passes.fold import FoldError, Stack
from autopar.passes.segments import Marks, Segment, cut, find_interfaces, live_nodes
from autopar.program import Block, Call, StateInfo
from autopar.torch_private import module_path


def partition(
    graph: Graph,
    placeholders: Mapping[Node, str],
    user_inputs: Mapping[Node, str],
    outputs: Mapping[str, Node],
    stacks: Sequence[Stack],
    state: Mapping[str, StateInfo],
    *,
    folded: Sequence[int] = (),
    layer_calls: Sequence[LayerCall] = (),
    tied: Mapping[str, str] | None = None,
    constants: Mapping[str, Tensor] | None = None,
) -> tuple[tuple[Call, ...], dict[str, Block], dict[str, str], dict[str, StateInfo]]:
    """Returns calls, blocks, output name -> value, and the state of the whole model (left-out layers included).

    `folded`: the numbers of the stacks whose layers are marked in the graph, by `layer_calls`. `tied`: alias ->
    name of state.
    """
    marks = Marks(graph, layer_calls)
    needed = live_nodes(marks, list(outputs.values()))
    segments = cut(graph, marks, needed, stacks, folded)
    find_interfaces(segments, marks, placeholders, outputs, stacks)
    work = _Partition(
        marks, segments, placeholders, user_inputs, outputs, stacks, state, tied or {}, constants or {}
    )
    return work.run()


class _Partition:
    def __init__(
        self,
        marks: Marks,
        segments: list[Segment],
        placeholders: Mapping[Node, str],
        user_inputs: Mapping[Node, str],
        outputs: Mapping[str, Node],
        stacks: Sequence[Stack],
        state: Mapping[str, StateInfo],
        tied: Mapping[str, str],
        constants: Mapping[str, Tensor],
    ) -> None:
        self.marks, self.segments, self.placeholders, self.stacks = marks, segments, placeholders, stacks
        self.outputs, self.tied, self.constants = outputs, tied, constants
        self.state = dict(state)
        self.values: dict[Node, str] = dict(user_inputs)
        self.wanted: dict[str, str] = {}
        self.names_of: dict[str, list[str]] = {}
        for alias, name in tied.items():
            self.names_of.setdefault(name, [name]).append(alias)
        self.seen: dict[str, int] = {}

    def run(self) -> tuple[tuple[Call, ...], dict[str, Block], dict[str, str], dict[str, StateInfo]]:
        whole = [segment for segment in self.segments if not segment.stand_in]
        blocks, names = _blocks(whole, self.placeholders, self.stacks, self.marks)
        block_of = dict(zip(map(id, whole), names, strict=True))
        templates = self._templates(whole, block_of)
        calls: list[Call] = []
        call_of: dict[int, Call] = {}
        for segment in self.segments:
            if segment.stand_in:
                assert segment.mark is not None
                template = templates[segment.mark.call.group]
                call = self._stand_in(segment, template, call_of.get(id(template)), block_of[id(template)])
            else:
                call = self._call(segment, block_of[id(segment)])
                call_of[id(segment)] = call
            calls.append(call)
        for name, node in self.outputs.items():
            if node in self.placeholders:
                raise FoldError(f"output {name} is a parameter", "")
            self.wanted.setdefault(name, self.values[node])
        used = {item for call in calls for item in call.state}
        kept = {key: info for key, info in self.state.items() if key in used}
        return tuple(calls), blocks, self.wanted, kept

    def _templates(self, whole: Sequence[Segment], block_of: Mapping[int, str]) -> dict[int, Segment]:
        """Group -> the traced layer that its stand-ins are like; checked against the one before it."""
        templates: dict[int, Segment] = {}
        by_mark = {id(segment.mark): segment for segment in whole if segment.mark is not None}
        for number, group in self.marks.groups.items():
            if all(member.call.traced for member in group.live):
                continue
            stack = self.stacks[group.live[0].call.stack]
            twin, template = [by_mark.get(id(member)) for member in group.traced][-2:]
            if template is None or twin is None:
                raise FoldError(f"a traced layer of {stack.path} leaves no nodes in the graph", stack.path)
            one, other = self._path(twin), self._path(template)
            if block_of[id(template)] != block_of[id(twin)]:
                raise FoldError(f"{one} and {other} look alike but trace differently", stack.path)
            for node, twin_node in zip(template.inputs, twin.inputs, strict=True):
                if self.marks.is_argument(node) != self.marks.is_argument(twin_node) or (
                    not self.marks.is_argument(node) and node is not twin_node
                ):
                    raise FoldError(f"{one} and {other} take their inputs from different places", stack.path)
            for node, twin_node in zip(template.state, twin.state, strict=True):
                if not self.marks.is_argument(node):
                    self._check_twins(
                        self.placeholders[node], self.placeholders[twin_node], other, one, stack
                    )
            templates[number] = template
        return templates

    def _check_twins(self, name: str, twin: str, path: str, twin_path: str, stack: Stack) -> None:
        if name in self.constants:
            if twin in self.constants and torch.equal(self.constants[name], self.constants[twin]):
                return
            raise FoldError(f"{path} and {twin_path} make different constants", stack.path)
        if self._renamed(name, path, twin_path) != twin:
            raise FoldError(f"{path} uses {name} where {twin_path} uses {twin}", stack.path)

    def _renamed(self, name: str, path: str, other: str) -> str:
        """What is called `name` in the layer at `path`, in another layer. Constants are those of the traced layer: layers
        with other tensors among their attributes are of another kind."""
        if name in self.constants:
            return name
        for known in self.names_of.get(name, (name,)):
            if known.startswith(f"{path}."):
                renamed = f"{other}.{known.removeprefix(f'{path}.')}"
                return self.tied.get(renamed, renamed)
        return name

    def _path(self, segment: Segment) -> str:
        return path_of(segment, self.stacks)

    def _label(self, segment: Segment, block: str) -> str:
        base = self._path(segment) or block
        self.seen[base] = self.seen.get(base, -1) + 1
        return base if not self.seen[base] else f"{base}#{self.seen[base]}"

    def _value(self, node: Node) -> str:
        return self.values[node]

    def _bound(self, node: Node) -> Node:
        """What stands outside for a node that a layer takes."""
        item = self.marks.item(node)
        return item[0].operand(item[1]) if item is not None and self.marks.is_argument(node) else node

    def _call(self, segment: Segment, block: str) -> Call:
        label = self._label(segment, block)
        many = len(segment.outputs) > 1
        outputs = tuple(f"{label}.{n}" if many else label for n in range(len(segment.outputs)))
        call = Call(
            block=block,
            state=tuple(self.placeholders[self._bound(node)] for node in segment.state),
            inputs=tuple(self._value(self._bound(node)) for node in segment.inputs),
            outputs=outputs,
            path=self._path(segment),
        )
        named = dict(zip(segment.outputs, outputs, strict=True))
        self.values.update(named)
        if segment.mark is not None:
            for slot, node in segment.mark.results_taken():
                if slot in self.marks.group(segment.mark).slots:
                    self.values[node] = named[segment.mark.result(slot)]
        return call

    def _stand_in(self, segment: Segment, template: Segment, call: Call | None, block: str) -> Call:
        mark, like = segment.mark, template.mark
        assert mark is not None
        assert like is not None
        stack = self.stacks[mark.call.stack]
        if call is None:
            raise FoldError(f"{mark.call.path} runs before the layer it is like", stack.path)
        state, inputs = [], []
        for node, name in zip(template.state, call.state, strict=True):
            item = self.marks.item(node)
            if item is not None:
                state.append(self.placeholders[mark.operand(item[1])])
                continue
            renamed = self._renamed(name, like.call.path, mark.call.path)
            self.state.setdefault(renamed, self.state[name].named(renamed))
            state.append(renamed)
        for node, name in zip(template.inputs, call.inputs, strict=True):
            item = self.marks.item(node)
            shared = item is None or not self.marks.is_argument(node)
            inputs.append(name if shared else self._value(mark.operand(item[1])))  # type: ignore[index]
        label = self._label(segment, block)
        many = len(template.outputs) > 1
        outputs = tuple(f"{label}.{n}" if many else label for n in range(len(template.outputs)))
        named = dict(zip(template.outputs, outputs, strict=True))
        for slot, node in mark.results_taken():
            if slot in self.marks.group(mark).slots:
                self.values[node] = named[like.result(slot)]
        for name, node in self.outputs.items():
            if node in named and name.startswith(f"update {like.call.path}."):
                own = f"update {mark.call.path}.{name.removeprefix(f'update {like.call.path}.')}"
                if own in self.wanted or mark.call.path == like.call.path:
                    raise FoldError(f"{mark.call.path} changes its buffers more than once", stack.path)
                self.wanted[own] = named[node]
        return replace(call, state=tuple(state), inputs=tuple(inputs), outputs=outputs, path=mark.call.path)


def path_of(segment: Segment, stacks: Sequence[Stack]) -> str:
    return stacks[segment.place[0]].layer_path(segment.place[1]) if segment.place else ""


def _blocks(
    segments: Sequence[Segment], placeholders: Mapping[Node, str], stacks: Sequence[Stack], marks: Marks
) -> tuple[dict[str, Block], list[str]]:
    blocks: dict[str, Block] = {}
    by_key: dict[str, str] = {}
    names: list[str] = []
    for segment in segments:
        key = segment.key
        if key not in by_key:
            name = _block_name(segment, stacks, blocks)
            by_key[key] = name
            blocks[name] = _block(name, segment, placeholders, path_of(segment, stacks), marks)
        names.append(by_key[key])
    return blocks, names


def _block_name(segment: Segment, stacks: Sequence[Stack], taken: Mapping[str, Block]) -> str:
    base = stacks[segment.place[0]].path.replace(".", "_") or "layers" if segment.place else "part"
    name, number = base, 1
    if not segment.place:
        name = f"{base}{number}"
    while name in taken:
        number += 1
        name = f"{base}{number}" if not segment.place else f"{base}_{number}"
    return name


def _block(name: str, segment: Segment, placeholders: Mapping[Node, str], path: str, marks: Marks) -> Block:
    graph = Graph()
    copied: dict[Node, Node] = {}
    for node in segment.state:
        item = marks.item(node)
        known = placeholders[node if item is None else item[0].operand(item[1])]
        relative = known.removeprefix(f"{path}.") if path else known
        copied[node] = graph.placeholder(_identifier(relative))
    for number, node in enumerate(segment.inputs):
        copied[node] = graph.placeholder(f"input{number}" if node.op != "placeholder" else node.name)
    for node, placeholder in copied.items():
        placeholder.meta["val"] = node.meta["val"]
    state = tuple(copied[node].name for node in segment.state)
    inputs = tuple(copied[node].name for node in segment.inputs)
    for node in segment.nodes:
        target = node.target
        assert callable(target)
        fresh = graph.call_function(
            target,
            map_arg(node.args, copied.__getitem__),
            map_arg(node.kwargs, copied.__getitem__),
        )
        fresh.meta = {key: node.meta[key] for key in ("val", "stack_trace") if key in node.meta}
        fresh.meta["module"] = module_path(node).removeprefix(f"{path}.") if path else module_path(node)
        copied[node] = fresh
    graph.output(tuple(copied[node] for node in segment.outputs))
    return Block(
        name,
        GraphModule(torch.nn.Module(), graph),
        state,
        inputs,
        tuple(copied[n].name for n in segment.outputs),
    )


def _identifier(text: str) -> str:
    name = "".join(letter if letter.isalnum() else "_" for letter in text)
    return name if name.isidentifier() else f"_{name}"
