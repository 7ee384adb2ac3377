"""Partition: normalized nodes to unique blocks and the calls that make the model of them.

In:  the call nodes of one exported graph, in order, in which stacks of layers may have been shortened.
Out: blocks (one per distinct graph) and calls, with the left-out layers added as further calls of the block of
     their kind. Layers are the same block only if their graphs are equal node for node: op, arguments, shapes.

How a left-out layer gets its inputs is read off two kept layers of its kind: what both take from the same value
is shared (rotary tables, a mask), what each takes from the layer before is carried (the hidden state). Anything
else is a FoldError, and capture then takes all layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from autopar.passes.fold import Stack
from autopar.program import Block, Call, StateInfo, node_info, op_name
from autopar.torch_private import module_path


class FoldError(Exception):
    """Layers that cannot be folded as hoped; capture falls back to all of them."""


Place = tuple[int, int]  # stack, layer


@dataclass
class Segment:
    """A run of nodes: one layer (`place`) or what stands outside of layers (`place` None)."""

    nodes: list[Node]
    place: Place | None
    state: list[Node]
    inputs: list[Node]
    outputs: list[Node]

    @property
    def key(self) -> str:
        """Equal for segments that are the same block."""
        index = {node: f"%{number}" for number, node in enumerate(self.nodes)}
        index |= {node: f"s{number}" for number, node in enumerate(self.state)}
        index |= {node: f"i{number}" for number, node in enumerate(self.inputs)}
        lines = [f"{info_text(node)}" for node in (*self.state, *self.inputs)]
        for node in self.nodes:
            arguments = map_arg((node.args, node.kwargs), lambda operand: index[operand])
            lines.append(f"{op_name(node)} {node.target} {arguments} {info_text(node)}")
        lines.append(" ".join(index[node] for node in self.outputs))
        return "\n".join(lines)


def info_text(node: Node) -> str:
    return str(node_info(node))


def partition(
    nodes: Sequence[Node],
    placeholders: Mapping[Node, str],
    user_inputs: Mapping[Node, str],
    outputs: Mapping[str, Node],
    stacks: Sequence[Stack],
    state: Mapping[str, StateInfo],
) -> tuple[tuple[Call, ...], dict[str, Block], dict[str, str], dict[str, StateInfo]]:
    """Returns calls, blocks, output name -> value, and the state of the whole model (left-out layers included)."""
    segments = _segments(nodes, stacks)
    _find_interfaces(segments, placeholders, set(outputs.values()))
    blocks, names = _blocks(segments, placeholders, stacks)
    values: dict[Node, str] = dict(user_inputs)
    calls: list[Call] = []
    full_state = dict(state)
    seen: dict[str, int] = {}
    final: dict[Node, str] = {}
    for position, segment in enumerate(segments):
        name = names[position]
        label = _label(segment, stacks, name, seen)
        for number, node in enumerate(segment.outputs):
            values[node] = f"{label}.{number}" if len(segment.outputs) > 1 else label
        calls.append(
            Call(
                block=name,
                state=tuple(placeholders[node] for node in segment.state),
                inputs=tuple(final.get(node, values[node]) for node in segment.inputs),
                outputs=tuple(values[node] for node in segment.outputs),
                path=_path(segment, stacks),
            )
        )
        if segment.place and segment.place[1] == stacks[segment.place[0]].kept - 1:
            extra, renamed = _left_out(segment.place[0], segments, calls, values, stacks, names, full_state)
            calls += extra
            final |= renamed
    wanted = {}
    for name, node in outputs.items():
        if node in placeholders:
            raise FoldError(f"output {name} is a parameter")
        wanted[name] = final.get(node, values[node])
    used = {item for call in calls for item in call.state}
    return tuple(calls), blocks, wanted, {key: info for key, info in full_state.items() if key in used}


def _path(segment: Segment, stacks: Sequence[Stack]) -> str:
    return stacks[segment.place[0]].layer_path(segment.place[1]) if segment.place else ""


def _label(segment: Segment, stacks: Sequence[Stack], block: str, seen: dict[str, int]) -> str:
    base = _path(segment, stacks) or block
    seen[base] = seen.get(base, -1) + 1
    return base if not seen[base] else f"{base}#{seen[base]}"


def _segments(nodes: Sequence[Node], stacks: Sequence[Stack]) -> list[Segment]:
    prefixes = {
        stack.layer_path(index): (number, index)
        for number, stack in enumerate(stacks)
        for index in range(stack.kept)
    }
    segments: list[Segment] = []
    for node in nodes:
        place = _place(module_path(node), prefixes)
        if not segments or segments[-1].place != place:
            segments.append(Segment([], place, [], [], []))
        segments[-1].nodes.append(node)
    shortened = {number for number, stack in enumerate(stacks) if stack.kept < len(stack.kinds)}
    for number in shortened:
        places = [segment.place for segment in segments]
        expected = [(number, index) for index in range(stacks[number].kept)]
        if expected[0] not in places:
            raise FoldError(f"stack {stacks[number].path} leaves no nodes in the graph")
        first = places.index(expected[0])
        if places[first : first + len(expected)] != expected or sum(
            place in expected for place in places
        ) != len(expected):
            raise FoldError(f"the layers of {stacks[number].path} do not follow each other directly")
    return segments


def _place(path: str, prefixes: Mapping[str, Place]) -> Place | None:
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        place = prefixes.get(".".join(parts[:length]))
        if place is not None:
            return place
    return None


def _find_interfaces(segments: list[Segment], placeholders: Mapping[Node, str], wanted: set[Node]) -> None:
    where = {node: position for position, segment in enumerate(segments) for node in segment.nodes}
    leaving = set(wanted)
    for position, segment in enumerate(segments):
        for node in segment.nodes:
            for operand in node.all_input_nodes:
                if operand in placeholders:
                    if operand not in segment.state:
                        segment.state.append(operand)
                elif where.get(operand) != position and operand not in segment.inputs:
                    segment.inputs.append(operand)
                    leaving.add(operand)
    for segment in segments:
        segment.outputs = [node for node in segment.nodes if node in leaving]


def _blocks(
    segments: list[Segment], placeholders: Mapping[Node, str], stacks: Sequence[Stack]
) -> tuple[dict[str, Block], list[str]]:
    blocks: dict[str, Block] = {}
    by_key: dict[str, str] = {}
    names: list[str] = []
    for segment in segments:
        key = segment.key
        if key not in by_key:
            name = _block_name(segment, stacks, blocks)
            by_key[key] = name
            blocks[name] = _block(name, segment, placeholders, _path(segment, stacks))
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


def _block(name: str, segment: Segment, placeholders: Mapping[Node, str], path: str) -> Block:
    graph = Graph()
    copied: dict[Node, Node] = {}
    for node in segment.state:
        relative = placeholders[node].removeprefix(f"{path}.") if path else placeholders[node]
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


def _left_out(
    number: int,
    segments: list[Segment],
    calls: list[Call],
    values: Mapping[Node, str],
    stacks: Sequence[Stack],
    names: list[str],
    state: dict[str, StateInfo],
) -> tuple[list[Call], dict[Node, str]]:
    """Calls for the layers of a stack that were left out, and new value names for what the last kept layer made."""
    stack = stacks[number]
    if stack.kept == len(stack.kinds):
        return [], {}
    first = next(index for index, segment in enumerate(segments) if segment.place == (number, 0))
    kept = segments[first : first + stack.kept]
    kept_calls = calls[first_call(calls, stack) :]
    produced = {
        value: (index, slot)
        for index, call in enumerate(kept_calls)
        for slot, value in enumerate(call.outputs)
    }
    for segment in segments[first + stack.kept :]:
        for node in segment.inputs:
            place = produced.get(values.get(node, ""))
            if place and place[0] != stack.kept - 1:
                raise FoldError(f"an inner layer of {stack.path} is used outside of the stack")
    chain = list(kept_calls)
    for index in range(stack.kept, len(stack.kinds)):
        template, twin = [at for at in range(stack.kept) if stack.kinds[at] == stack.kinds[index]][:-3:-1]
        if names[first + template] != names[first + twin]:
            raise FoldError(f"layers {twin} and {template} of {stack.path} look alike but trace differently")
        inputs = []
        for value, twin_value in zip(kept_calls[template].inputs, kept_calls[twin].inputs, strict=True):
            made, twin_made = produced.get(value), produced.get(twin_value)
            if value == twin_value:
                inputs.append(value)
            elif made and (
                (twin_made and template - made[0] == twin - twin_made[0] and made[1] == twin_made[1])
                or (twin == 0 and twin_made is None and template - made[0] == 1)
            ):
                previous = chain[index - (template - made[0])]
                if made[1] >= len(previous.outputs) or len(previous.outputs) != len(
                    kept_calls[made[0]].outputs
                ):
                    raise FoldError(f"layers of {stack.path} hand on different values")
                inputs.append(previous.outputs[made[1]])
            else:
                raise FoldError(
                    f"layers {twin} and {template} of {stack.path} take their inputs from different places"
                )
        path, template_path = stack.layer_path(index), stack.layer_path(template)
        renamed_state = []
        for name in kept_calls[template].state:
            renamed = (
                name.replace(f"{template_path}.", f"{path}.", 1)
                if name.startswith(f"{template_path}.")
                else name
            )
            state.setdefault(renamed, state[name])
            renamed_state.append(renamed)
        outputs = tuple(value.replace(template_path, path, 1) for value in kept_calls[template].outputs)
        chain.append(
            replace(
                kept_calls[template],
                state=tuple(renamed_state),
                inputs=tuple(inputs),
                outputs=outputs,
                path=path,
            )
        )
    last, final = kept[-1], chain[-1]
    if len(last.outputs) != len(final.outputs):
        raise FoldError(f"the last layers of {stack.path} hand on different values")
    return chain[stack.kept :], {node: final.outputs[slot] for slot, node in enumerate(last.outputs)}


def first_call(calls: Sequence[Call], stack: Stack) -> int:
    return next(index for index, call in enumerate(calls) if call.path == stack.layer_path(0))
