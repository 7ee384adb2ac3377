"""Stages: a RankProgram cut into the pieces that pipeline stages run.

In:  a RankProgram and how many layers each stage has.
Out: one Stage per piece: a RankProgram of its calls, the values it receives from the stage before and sends to the
     next, and the state that it shares with other stages.

    prologue, layers 0..3, epilogue, cut as (2, 2)
      stage 0  prologue, layers 0 and 1     sends the hidden states and the rotary tables
      stage 1  layers 2 and 3, epilogue     receives them, returns the loss

Calls stay in their order, so a stage is a range of calls; a cut lies just before a layer. What stands between layers
(the end of an encoder, the start of a decoder) goes with the layer before it, what stands before all layers with the
first. A value that several later stages take travels from stage to stage, and its gradients the same way back. Inputs
of the model do not travel: every stage reads the batch. State that two stages read (tied embeddings) lives on each of
them, and its gradients are to be summed over them (`shared`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from autopar.errors import UsageError
from autopar.passes.check import flowing
from autopar.passes.lower import RankProgram
from autopar.program import Call
from autopar.sharding import Sharding


@dataclass(frozen=True)
class Crossing:
    """A value that goes from stage to stage, as every rank holds it. `gradient`: one comes back for it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding
    gradient: bool


@dataclass(frozen=True)
class Stage:
    """One piece. `program`: what its ranks run; its inputs are those of the model that the stage reads itself.
    `shared`: state that other stages have too, with the numbers of all stages that have it."""

    index: int
    count: int
    program: RankProgram
    receives: tuple[Crossing, ...]
    sends: tuple[Crossing, ...]
    shared: Mapping[str, tuple[int, ...]]

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def __str__(self) -> str:
        layers = [call.path for call in self.program.calls if call.path]
        received = ", ".join(each.name for each in self.receives) or "nothing"
        sent = ", ".join(each.name for each in self.sends) or "nothing"
        return (
            f"stage {self.index} of {self.count}: {len(self.program.calls)} calls, layers "
            f"{', '.join(layers) or 'none'}; receives {received}; sends {sent}"
        )


def cut_stages(program: RankProgram, layers: int | Sequence[int]) -> tuple[Stage, ...]:
    """Cut into stages. `layers`: the number of layers of each stage, or how many stages to make as even as can be.

    Raises UsageError where the counts are not those of the program's layers.
    """
    starts = [index for index, call in enumerate(program.calls) if call.path]
    counts = _even(layers, len(starts)) if isinstance(layers, int) else tuple(layers)
    bare = any(count < 1 for count in counts[1:-1]) or (bool(counts) and min(counts) < 0)
    if bare or sum(counts) != len(starts) or not counts:
        raise UsageError(
            f"{len(starts)} layers cannot be cut into stages of {', '.join(map(str, counts)) or 'none'}",
            where=program.name,
            hint=f"at least one for each stage but the first and the last, {len(starts)} in all",
        )
    # A last stage without layers has what comes after them.
    firsts = [*starts, starts[-1] + 1 if starts else 0]
    bounds = [0, *(firsts[sum(counts[:done])] for done in range(1, len(counts))), len(program.calls)]
    if any(first >= end for first, end in itertools.pairwise(bounds)):
        raise UsageError(
            f"with stages of {', '.join(map(str, counts))} layers one has nothing to do",
            where=program.name,
            hint="at least one layer for each stage",
        )
    pieces = [program.calls[first:end] for first, end in itertools.pairwise(bounds)]
    _, gradients = flowing(program)
    made = [{value for call in piece for value in call.outputs} for piece in pieces]
    state = [{name for call in piece for name in call.state} for piece in pieces]
    finals = {*program.outputs.values(), program.count}
    places = _places(program)
    crossings = []
    for index in range(1, len(pieces)):
        before = set().union(*made[:index])
        needed = [
            value for piece in pieces[index:] for call in piece for value in call.inputs if value in before
        ]
        crossings.append(tuple(_crossing(value, places[value], gradients) for value in dict.fromkeys(needed)))
    stages = []
    for index, piece in enumerate(pieces):
        own = {name: value for name, value in program.outputs.items() if value in made[index]}
        # A model that hands on what it was given, or a constant, has it on its first stage.
        loose = set(program.outputs.values()).difference(*made) if index == 0 else set()
        own |= {name: value for name, value in program.outputs.items() if value in loose}
        sends = crossings[index] if index < len(pieces) - 1 else ()
        taken = {value for call in piece for value in call.inputs} | loose
        inputs = {name: sharding for name, sharding in program.inputs.items() if name in taken}
        shared = {
            name: tuple(at for at, names in enumerate(state) if name in names)
            for name in sorted(state[index])
            if sum(name in names for names in state) > 1
        }
        kept = {name: layout for name, layout in program.state.items() if name in state[index]}
        stage_program = replace(
            program,
            name=f"{program.name}, stage {index}",
            blocks={call.block: program.blocks[call.block] for call in piece},
            calls=piece,
            state=kept,
            inputs=inputs,
            input_info={name: info for name, info in program.input_info.items() if name in inputs},
            outputs={**own, **{_sent(each.name): each.name for each in sends}},
            constants={name: value for name, value in program.constants.items() if name in kept},
            limits={name: limit for name, limit in program.limits.items() if name in inputs},
            count=program.count if program.count in made[index] else None,
        )
        receives = crossings[index - 1] if index else ()
        stages.append(Stage(index, len(pieces), stage_program, receives, sends, shared))
    lost = finals - set().union(*made) - set(program.inputs) - {None}
    assert not lost, f"outputs of no stage: {lost}"
    return tuple(stages)


def _sent(value: str) -> str:
    """The name under which a stage's program returns a value that it sends."""
    return f"send {value}"


def _even(stages: int, layers: int) -> tuple[int, ...]:
    """The first stages get one more where it does not divide."""
    if stages < 1:
        return ()
    return tuple(layers // stages + (index < layers % stages) for index in range(stages))


def _places(program: RankProgram) -> dict[str, Node]:
    """Value -> a placeholder that takes it."""
    found: dict[str, Node] = {}
    for call in program.calls:
        for value, node in zip(call.inputs, _input_nodes(program, call), strict=True):
            found.setdefault(value, node)
    return found


def _input_nodes(program: RankProgram, call: Call) -> list[Node]:
    block = program.blocks[call.block]
    named = {node.name: node for node in block.graph.graph.nodes if node.op == "placeholder"}
    return [named[name] for name in block.inputs]


def _crossing(value: str, node: Node, gradients: set[str]) -> Crossing:
    info = node.meta["global"]
    return Crossing(
        value,
        tuple(node.meta["local_shape"]),
        info.dtype,
        node.meta["sharding"],
        info.is_float and value in gradients,
    )
