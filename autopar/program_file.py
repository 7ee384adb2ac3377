"""Program file: everything of a rank program but its code, as JSON.

In:  a RankProgram and its pipeline stages; or the text of `program.json`, and the functions of its blocks.
Out: the text, one line for each state and call; or the RankProgram and the stages again.

What is code (blocks, counts of places) is in Python files beside it. Tensors are in `constants.safetensors`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.fx import Graph, GraphModule

from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.passes.known_values import Decision, Made, Step
from autopar.passes.limits import IdLimit
from autopar.passes.lower import RankBlock, RankProgram, StateLayout
from autopar.passes.place_counts import PlaceCount
from autopar.passes.stages import Crossing, Stage
from autopar.plan_parts import Count, Part, Text, Tuple
from autopar.program import Call, Condition, Piece, StateInfo, TensorInfo
from autopar.sharding import Sharding
from autopar.torch_private import pytree

Texts = Annotated[tuple[Text, ...], Tuple]
Sizes = Annotated[tuple[Count, ...], Tuple]
Function = Callable[..., Any]


class BlockEntry(Part):
    """A block: `function`, under its name in `blocks/`, takes coordinates, state and inputs in this order."""

    function: Text
    coordinates: Texts
    state: Texts
    inputs: Texts
    outputs: Texts


class PieceEntry(Part):
    parameter: Text
    dim: Count
    start: Count
    stop: Count
    shape: Sizes


class StateEntry(Part):
    """A parameter, buffer or constant as the blocks take it. `shape`: whole; `sharding`: over the mesh of a stage."""

    kind: Literal["parameter", "buffer", "constant"]
    dtype: Text
    shape: Sizes
    sharding: Text
    trainable: bool
    grad_sums: Texts = ()
    piece: PieceEntry | None = None


class InputEntry(Part):
    """A tensor of a micro-batch. `ids`: the number of ids that it may have; `ignore`: one that is allowed besides."""

    dtype: Text
    shape: Sizes
    sharding: Text
    ids: Count | None = None
    ignore: int | None = None


class CallEntry(Part):
    block: Text
    path: Text
    state: Texts
    inputs: Texts
    outputs: Texts


class CrossingEntry(Part):
    name: Text
    dtype: Text
    shape: Sizes
    sharding: Text
    gradient: bool


class StageEntry(Part):
    """A pipeline stage: the calls from `first` up to `end` (not included)."""

    first: Count
    end: Count
    outputs: dict[str, Text]
    receives: Annotated[tuple[CrossingEntry, ...], Tuple] = ()
    sends: Annotated[tuple[CrossingEntry, ...], Tuple] = ()


class PlacesEntry(Part):
    """`function` counts the places that a batch marks; there must be `rows` (where not `exact`, at most so many)."""

    function: Text
    inputs: Texts
    where: Text
    rows: Count
    exact: bool


class DecisionEntry(Part):
    """What `function` makes of a batch is `expected`: so many that are true (`counted`), or these values."""

    function: Text
    inputs: Texts
    where: Text
    counted: bool
    expected: Any


class ParameterEntry(Part):
    """One of the model's own parameters: the dtype in which the optimizer works on it, and its other names."""

    dtype: Text
    aliases: Texts = ()


class ProgramFile(Part):
    """`parameters`: by the model's own names; `state`: what blocks take (pieces of packed parameters are several)."""

    format: Literal[1]
    autopar_version: Text
    name: Text
    mesh: Text
    blocks: dict[str, BlockEntry]
    inputs: dict[str, InputEntry]
    fixed: Texts
    outputs: dict[str, Text]
    count: Text | None
    calls: Annotated[tuple[CallEntry, ...], Tuple]
    stages: Annotated[tuple[StageEntry, ...], Tuple]
    conditions: Annotated[tuple[PlacesEntry | DecisionEntry, ...], Tuple]
    parameters: dict[str, ParameterEntry]
    state: dict[str, StateEntry]

    def text(self) -> str:
        """JSON with a line for each state, call and the like."""
        return "{\n" + ",\n".join(self._lines()) + "\n}\n"

    def _lines(self) -> Iterator[str]:
        for key, value in self.model_dump(mode="json", exclude_defaults=True).items():
            if isinstance(value, (dict, list)) and value:
                inner = (
                    [f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in value.items()]
                    if isinstance(value, dict)
                    else [f"  {json.dumps(each)}" for each in value]
                )
                opening, closing = ("{", "}") if isinstance(value, dict) else ("[", "]")
                yield f' "{key}": {opening}\n' + ",\n".join(inner) + f"\n {closing}"
            else:
                yield f' "{key}": {json.dumps(value)}'


# ---- a program as entries ----------------------------------------------------------------------------------------


def program_file(
    program: RankProgram,
    stages: tuple[Stage, ...],
    functions: Mapping[str, str],
    checks: Mapping[int, str],
    parameters: Mapping[str, ParameterEntry],
    version: str,
) -> ProgramFile:
    """`functions`: of the blocks by name; `checks`: of the conditions by number; `parameters`: the model's own."""
    return ProgramFile(
        format=1,
        autopar_version=version,
        name=program.name,
        mesh=str(program.mesh),
        blocks={
            name: BlockEntry(
                function=functions[name], coordinates=block.coordinates, state=block.state, inputs=block.inputs,
                outputs=block.outputs,
            )
            for name, block in program.blocks.items()
        },
        inputs={name: _input(program, name) for name in program.inputs},
        fixed=tuple(program.fixed),
        outputs=dict(program.outputs),
        count=program.count,
        calls=tuple(
            CallEntry(block=call.block, path=call.path, state=call.state, inputs=call.inputs, outputs=call.outputs)
            for call in program.calls
        ),
        stages=tuple(_stages(stages)),
        conditions=tuple(
            _condition_entry(condition, checks[number]) for number, condition in enumerate(program.conditions)
        ),
        parameters=dict(parameters),
        state={name: _state(layout) for name, layout in program.state.items()},
    )  # fmt: skip


def _condition_entry(condition: Condition, function: str) -> PlacesEntry | DecisionEntry:
    if isinstance(condition, PlaceCount):
        return PlacesEntry(
            function=function, inputs=condition.inputs, where=condition.where, rows=condition.rows, exact=condition.exact
        )  # fmt: skip
    assert isinstance(condition, Decision)  # `condition_source` has refused others
    return DecisionEntry(
        function=function, inputs=condition.inputs, where=condition.where, counted=condition.counted,
        expected=condition.expected,
    )  # fmt: skip


def _input(program: RankProgram, name: str) -> InputEntry:
    info, limit = program.input_info[name], program.limits.get(name)
    return InputEntry(
        dtype=info.dtype,
        shape=info.shape,
        sharding=program.inputs[name].format(info.shape),
        ids=limit.size if limit else None,
        ignore=limit.ignore if limit else None,
    )


def _state(layout: StateLayout) -> StateEntry:
    info, piece = layout.info, layout.info.piece
    return StateEntry(
        kind=info.kind,  # type: ignore[arg-type]
        dtype=info.dtype,
        shape=info.shape,
        sharding=layout.sharding.format(info.shape),
        trainable=info.trainable,
        grad_sums=layout.grad_sums,
        piece=None
        if piece is None
        else PieceEntry(
            parameter=piece.parameter, dim=piece.dim, start=piece.start, stop=piece.stop, shape=piece.shape
        ),
    )


def _stages(stages: tuple[Stage, ...]) -> Iterator[StageEntry]:
    first = 0
    for stage in stages:
        end = first + len(stage.program.calls)
        yield StageEntry(
            first=first,
            end=end,
            outputs=dict(stage.program.outputs),
            receives=tuple(map(_crossing, stage.receives)),
            sends=tuple(map(_crossing, stage.sends)),
        )
        first = end


def _crossing(each: Crossing) -> CrossingEntry:
    return CrossingEntry(
        name=each.name,
        dtype=each.dtype,
        shape=each.shape,
        sharding=str(each.sharding),
        gradient=each.gradient,
    )


# ---- entries as a program ----------------------------------------------------------------------------------------


def read_program_file(text: str, where: str) -> ProgramFile:
    """Raises PlanError that says which field is wrong."""
    try:
        return ProgramFile.model_validate(json.loads(text))
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in fault["loc"]) or "top level"
        raise PlanError(
            f"{place}: {fault['msg']}",
            where=where,
            hint="the folder as it was exported, or to export it again",
        ) from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"not readable as JSON: {error}", where=where, hint="to export again") from None


def rank_program(
    file: ProgramFile, functions: Mapping[str, Function], tensors: Mapping[str, Tensor]
) -> tuple[RankProgram, tuple[Stage, ...]]:
    """The program that the file and the functions are, and its stages. `tensors`: constants and fixed inputs by name.

    Raises PlanError where file, functions and tensors do not fit each other.
    """
    mesh = Mesh.parse(file.mesh)
    blocks = {name: _block(name, entry, functions, mesh) for name, entry in file.blocks.items()}
    state = {name: _layout(name, entry) for name, entry in file.state.items()}
    calls = tuple(Call(each.block, each.state, each.inputs, each.outputs, each.path) for each in file.calls)
    _check_calls(calls, blocks, file)
    program = RankProgram(
        name=file.name,
        mesh=mesh,
        blocks=blocks,
        calls=calls,
        state=state,
        inputs={name: Sharding.parse(entry.sharding) for name, entry in file.inputs.items()},
        input_info={name: TensorInfo(entry.shape, entry.dtype) for name, entry in file.inputs.items()},
        outputs=file.outputs,
        constants={name: tensors[name] for name, entry in file.state.items() if entry.kind == "constant"},
        limits={
            name: IdLimit(entry.ids, entry.ignore)
            for name, entry in file.inputs.items()
            if entry.ids is not None
        },
        count=file.count,
        fixed={name: tensors[f"fixed {name}"] for name in file.fixed},
        conditions=tuple(_condition(entry, functions) for entry in file.conditions),
    )
    return program, tuple(_stage(program, file, index) for index in range(len(file.stages)))


def _find(functions: Mapping[str, Function], name: str) -> Function:
    if name not in functions:
        raise PlanError(
            f"blocks/ has no function {name!r}; it has {', '.join(functions) or 'none'}",
            where="program.json",
            hint="the functions that were exported, each in BLOCKS of blocks/__init__.py",
        )
    return functions[name]


def _block(name: str, entry: BlockEntry, functions: Mapping[str, Function], mesh: Mesh) -> RankBlock:
    function = _find(functions, entry.function)
    arguments = [*(f"coordinate_{axis}" for axis in entry.coordinates), *entry.state, *entry.inputs]
    module = wrapped(function, arguments, {axis for axis, size in mesh.axes if size > 1})
    return RankBlock(name, module, entry.coordinates, entry.state, entry.inputs, entry.outputs)


def wrapped(function: Function, arguments: list[str], axes: set[str]) -> GraphModule:
    """A function as a graph of one node. What it takes by keyword are groups of axes and the device, which
    `runtime.model.bind` puts in. Raises PlanError where it takes other arguments."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_argcount != len(arguments) or code.co_flags & 0x0C:
        taken = "other arguments" if code is None else f"{code.co_argcount} arguments"
        raise PlanError(
            f"the function takes {taken}, the program gives it {len(arguments)}: {', '.join(arguments)}",
            where=getattr(function, "__qualname__", str(function)),
            hint="as many arguments as the block has coordinates, state and inputs in program.json",
        )
    options = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    foreign = [option for option in options if option not in axes and option != "device"]
    if foreign:
        raise PlanError(
            f"the function wants {foreign[0]!r} by keyword, which is no axis of the mesh larger than 1",
            where=function.__qualname__,
            hint=f"{', '.join(sorted(axes)) or 'no axis'} or device",
        )
    graph = Graph()
    places = [graph.placeholder(f"argument_{number}") for number in range(len(arguments))]
    keywords: dict[str, Any] = {option: None if option == "device" else option for option in options}
    call = graph.call_function(function, tuple(places), keywords)
    call.meta["groups"] = True
    graph.output(call)
    return GraphModule(torch.nn.Module(), graph)


def _layout(name: str, entry: StateEntry) -> StateLayout:
    given = entry.piece
    piece = None if given is None else Piece(given.parameter, given.dim, given.start, given.stop, given.shape)
    info = StateInfo(entry.shape, entry.dtype, entry.kind, entry.trainable, piece)
    return StateLayout(info, Sharding.parse(entry.sharding), entry.grad_sums)


def _check_calls(calls: tuple[Call, ...], blocks: Mapping[str, RankBlock], file: ProgramFile) -> None:
    """Every call gives its block what it takes, and takes only what there is."""
    made = set(file.inputs)
    for number, call in enumerate(calls):
        where = f"program.json, calls[{number}]"
        block = blocks.get(call.block)
        if block is None:
            raise PlanError(
                f"there is no block {call.block!r}", where=where, hint=f"one of {', '.join(blocks)}"
            )
        for what, given, taken in (
            ("states", call.state, block.state),
            ("inputs", call.inputs, block.inputs),
            ("outputs", call.outputs, block.outputs),
        ):
            if len(given) != len(taken):
                raise PlanError(
                    f"{call.block} has {len(taken)} {what}, the call {len(given)}",
                    where=where,
                    hint="one for each",
                )
        missing = [name for name in call.state if name not in file.state] or [
            name for name in call.inputs if name not in made
        ]
        if missing:
            raise PlanError(
                f"{missing[0]!r} is no state, no input, and made by no call before", where=where,
                hint="the calls in their order",
            )  # fmt: skip
        made |= set(call.outputs)
    lost = [name for name in (*file.outputs.values(), *filter(None, [file.count])) if name not in made]
    if lost:
        raise PlanError(f"no call makes {lost[0]!r}", where="program.json, outputs", hint="what a call makes")


def _condition(entry: PlacesEntry | DecisionEntry, functions: Mapping[str, Function]) -> Condition:
    function = _find(functions, entry.function)
    module = wrapped(function, list(entry.inputs), set())
    if isinstance(entry, PlacesEntry):
        return PlaceCount(entry.inputs, entry.where, _only(module), entry.rows, entry.exact)
    given = [(number, Step(None, (), None, name)) for number, name in enumerate(entry.inputs)]
    made = [Made(number, 0) for number, _ in given]
    tree = pytree.tree_structure((tuple(entry.inputs), {}))
    steps = (*given, (len(given), Step(function, tuple(made), tree)))
    return Decision(entry.inputs, entry.where, steps, Made(len(given), 0), entry.counted, entry.expected)


def _only(module: GraphModule) -> GraphModule:
    """A graph of what the tuple of one result holds."""
    output = next(node for node in module.graph.nodes if node.op == "output")
    with module.graph.inserting_before(output):
        output.args = (module.graph.call_function(_first, (output.args[0],)),)
    module.recompile()
    return module


def _first(results: tuple[Tensor, ...]) -> Tensor:
    return results[0]


def _stage(program: RankProgram, file: ProgramFile, index: int) -> Stage:
    """As `passes/stages.py` makes them."""
    entry = file.stages[index]
    calls = program.calls[entry.first : entry.end]
    states = [
        {name for call in program.calls[each.first : each.end] for name in call.state} for each in file.stages
    ]
    kept = {name: layout for name, layout in program.state.items() if name in states[index]}
    taken = {value for call in calls for value in call.inputs} | set(entry.outputs.values())
    inputs = {name: sharding for name, sharding in program.inputs.items() if name in taken}
    made = {value for call in calls for value in call.outputs}
    piece = replace(
        program,
        name=f"{program.name}, stage {index}" if len(file.stages) > 1 else program.name,
        blocks={call.block: program.blocks[call.block] for call in calls},
        calls=calls,
        state=kept,
        inputs=inputs,
        input_info={name: info for name, info in program.input_info.items() if name in inputs},
        outputs=entry.outputs,
        constants={name: value for name, value in program.constants.items() if name in kept},
        limits={name: limit for name, limit in program.limits.items() if name in inputs},
        count=program.count if program.count in made else None,
    )
    shared = {
        name: tuple(at for at, names in enumerate(states) if name in names)
        for name in sorted(states[index])
        if sum(name in names for names in states) > 1
    }
    crossings = [
        tuple(
            Crossing(each.name, each.shape, each.dtype, Sharding.parse(each.sharding), each.gradient)
            for each in side
        )
        for side in (entry.receives, entry.sends)
    ]
    return Stage(index, len(file.stages), piece, crossings[0], crossings[1], shared)
