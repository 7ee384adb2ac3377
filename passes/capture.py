"""Capture: an `nn.Module` and example inputs to a Program.

In:  any module that torch.export can trace, on any device (also meta: nothing is allocated), and its example
     keyword inputs (only shapes, dtypes and plain values are looked at).
Out: a Program of functional ATen blocks (`linear`, `scaled_dot_product_attention`, `layer_norm` kept whole),
     identical layers folded into one block with many calls.

    capture(llama_405b, {"input_ids": ..., "labels": ...}, outputs=("loss",))
      -> 3 blocks: prologue, layer (called 126 times), epilogue
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from autopar.errors import CaptureError
from autopar.nested import flat_inputs, map_inputs
from autopar.passes.boundary import Boundaries
from autopar.passes.capture_checks import (
    advice,
    check_constant,
    check_exported,
    check_parameters,
    place_of,
    traceable_tensors,
)
from autopar.passes.fold import FoldError, Stack, find_stacks, storage_free_copy
from autopar.passes.follow_values import follow_values
from autopar.passes.functions import Functions
from autopar.passes.host_values import (
    HostFactories,
    describe_values,
    give_values,
    other_values,
    values_for_shapes,
)
from autopar.passes.known_values import Knowledge
from autopar.passes.no_grad import stop_gradients
from autopar.passes.normalize import normalize
from autopar.passes.partition import partition
from autopar.passes.pending import Runs, settled
from autopar.passes.place_counts import place_counts
from autopar.passes.rewrites import rewrite
from autopar.passes.transformers_capture import losses_and_attention
from autopar.passes.transformers_experts import use_one_op
from autopar.passes.unflatten import unflatten
from autopar.passes.unpack import unpack, with_unread_pieces
from autopar.program import Program, StateInfo, TensorInfo, op_name, tensor_info
from autopar.torch_private import fake_mode, pytree

_log = logging.getLogger(__name__)


def capture(
    model: nn.Module,
    example_inputs: Mapping[str, Any],
    *,
    outputs: Sequence[str] = ("loss",),
    name: str | None = None,
    dtype: torch.dtype | None = None,
) -> Program:
    """Turn a module into a Program that computes the named outputs.

    A module that returns a mapping (a Transformers model) has its keys as output names; the items of a tuple are
    `output0`, `output1`, ...; a lone tensor is `output0`; `loss` also names the first scalar float output.
    With `dtype`, floating-point parameters are taken to be of it (buffers, such as rotary frequencies, are not).
    Integer inputs whose values decide shapes (grids of images) are constants of the Program (`fixed`): it is right
    for these values only. Dropout is switched off (the capture is of evaluation mode, batch norms aside), with a note in the Program.
    Raises CaptureError when the model does not export, naming the place in the model.
    """
    title = name or type(model).__name__
    check_parameters(model, title)
    fixed = values_for_shapes(example_inputs)
    first: CaptureError | None = None
    for values, knowledge, whole in _attempts(example_inputs, fixed):
        try:
            return _folded(model, example_inputs, outputs, title, dtype, values, knowledge, whole)
        except CaptureError as error:
            first = first or error
            if not _needs_values(first):
                raise
            _log.info("%s: %s; taking values of the example", title, error)
            if knowledge is not None and not _needs_values(error):
                raise  # it came further
    assert first is not None
    raise first


def _attempts(
    example_inputs: Mapping[str, Any], fixed: Mapping[str, Tensor]
) -> Iterator[tuple[Mapping[str, Tensor], Knowledge | None, bool]]:
    """Inputs whose values are constants, what is known by the example, and whether all layers are traced: where tracing
    needs values, more and more of them."""
    yield fixed, None, False
    for others in other_values(example_inputs, fixed):
        yield {**fixed, **others}, None, False
    for whole in (False, True):
        yield fixed, Knowledge(example_inputs), whole


def _folded(
    model: nn.Module,
    example_inputs: Mapping[str, Any],
    outputs: Sequence[str],
    title: str,
    dtype: torch.dtype | None,
    fixed: Mapping[str, Tensor],
    knowledge: Knowledge | None,
    whole: bool,
) -> Program:
    """Capture with as few layers traced as will do, or with all."""
    stacks = tuple(stack.whole() if whole else stack for stack in find_stacks(model))
    runs: Runs | None = Runs()
    for _ in range(3 * len(stacks) + 2):
        try:
            return _capture(model, example_inputs, outputs, title, stacks, dtype, fixed, knowledge, runs)
        except FoldError as error:
            if not any(stack.folded for stack in stacks):
                raise CaptureError(str(error), where=title) from error
            _log.info("%s: %s; tracing more layers", title, error)
            stacks = _with_more_layers(stacks, error)
        except CaptureError as error:
            if not any(stack.folded for stack in stacks) or _needs_values(error):
                raise
            if runs is not None and runs.all:
                _log.info("%s: %s; tracing left-out layers one by one", title, error)
                runs = None
                continue
            _log.info("%s: %s; tracing all layers", title, error)
            stacks = tuple(stack.whole() for stack in stacks)
    raise AssertionError("every turn traces more layers")


def _with_more_layers(stacks: tuple[Stack, ...], error: FoldError) -> tuple[Stack, ...]:
    """All layers of the stack, or those of the kinds that the error tells apart."""
    known = any(stack.path == error.path and stack.folded for stack in stacks)
    return tuple(
        stack
        if known and stack.path != error.path
        else replace(stack, kinds=error.kinds)
        if known and error.kinds is not None and error.kinds != stack.kinds
        else stack.whole()
        for stack in stacks
    )


def _capture(
    model: nn.Module,
    example_inputs: Mapping[str, Any],
    outputs: Sequence[str],
    title: str,
    stacks: tuple[Stack, ...],
    dtype: torch.dtype | None,
    fixed: Mapping[str, Tensor],
    knowledge: Knowledge | None,
    runs: Runs | None,
    unpacked: frozenset[str] = frozenset(),
) -> Program:
    """Capture with the layers traced that `stacks` keep; left-out ones in `runs`, or one by one."""
    folded = [number for number, stack in enumerate(stacks) if stack.folded]
    boundaries = Boundaries(stacks, runs)
    with fake_mode():

        def fake(tensor: Tensor) -> Tensor:
            cast = dtype is not None and isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
            return torch.empty(tensor.shape, dtype=dtype if cast else tensor.dtype)

        copy = storage_free_copy(model, stacks, fake)
        inputs = map_inputs(
            {name: value for name, value in example_inputs.items() if name not in fixed},
            lambda value: fake(value) if isinstance(value, Tensor) else value,
        )
        notes = _evaluation_mode(copy)
        notes += [f"{name} is a constant: {describe_values(value)}" for name, value in fixed.items()]
        give_values(copy, fixed)
        use_one_op(copy)
        rewrite(copy)
        boundaries.install(copy, folded)
        if knowledge is not None:
            follow_values(copy, knowledge)
        functions = Functions()
        with (
            functions.applied(),
            traceable_tensors(),
            HostFactories() if fixed else contextlib.nullcontext(),
        ):
            exported = _export(copy, inputs, outputs, title)
    boundaries.check()
    if runs is not None:
        runs.expand(exported.graph)
    notes += knowledge.notes if knowledge else []
    state, placeholders, tied, constants = _state(exported, model)
    user_inputs = _user_inputs(exported, inputs)
    wanted = _outputs(exported)
    check_exported(exported, wanted.values(), title)
    _check_sizes(list(wanted.values()), title)
    places = place_counts(exported.graph, user_inputs)
    functions.restore(exported.graph)
    normalize(exported.graph, set(wanted.values()))
    unflatten(exported.graph, set(wanted.values()))
    placeholders, state = unpack(exported.graph, placeholders, state, set(wanted.values()), unpacked)
    calls, blocks, values, all_state = partition(
        exported.graph,
        placeholders,
        user_inputs,
        wanted,
        stacks,
        state,
        folded=folded,
        layer_calls=boundaries.calls,
        tied=tied,
        constants=constants,
    )
    unread = with_unread_pieces(all_state)
    if unread:  # by blocks of which a result is not used: the parameter is then better whole than in part
        return _capture(
            model, example_inputs, outputs, title, stacks, dtype, fixed, knowledge, runs, unpacked | unread
        )
    return Program(
        name=title,
        blocks=blocks,
        calls=calls,
        state=_complete_state(model, all_state, tied),
        inputs={name: _info(node) for node, name in user_inputs.items()},
        outputs=values,
        tied=tied,
        constants=constants,
        notes=tuple(notes),
        fixed=dict(fixed),
        conditions=(*places, *(knowledge.decisions.values() if knowledge else ())),
    )


def _check_sizes(wanted: list[Node], title: str) -> None:
    """Sizes that depend on values are no sizes to plan with. The first op that has such a size is named."""
    if not wanted:
        return
    reached = set(wanted)
    while wanted:
        fresh = set(wanted.pop().all_input_nodes) - reached
        reached |= fresh
        wanted += fresh
    for node in next(iter(reached)).graph.nodes:
        if node in reached and any(map(_unknown_size, pytree.tree_leaves(node.meta.get("val")))):
            raise CaptureError(
                f"the size of {op_name(node)}'s result is data-dependent: it follows from the values of its inputs",
                where=f"{title}, {place_of(node)}",
                hint="to choose by torch.where or a mask there, or to compute the choice outside of forward and pass "
                "the result as an input",
            )


def _unknown_size(value: object) -> bool:
    if isinstance(value, Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, torch.SymInt)


def _info(node: Node) -> TensorInfo:
    info = tensor_info(node.meta["val"])
    assert info is not None
    return info


def _evaluation_mode(model: nn.Module) -> list[str]:
    """Switch dropout off; batch norms keep their mode. Returns notes on what was changed."""
    active = [
        name
        for name, module in model.named_modules()
        if module.training and isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    ]
    norms = [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
    ]
    model.eval()
    for module in norms:
        module.train()
    if not active:
        return []
    return [f"dropout is switched off in {len(active)} modules (first: {active[0]})"]


def _export(
    model: nn.Module, inputs: Mapping[str, Any], outputs: Sequence[str], title: str
) -> ExportedProgram:
    _select_outputs(model, outputs, title)
    with warnings.catch_warnings(), _quiet(), losses_and_attention(model, inputs):
        warnings.simplefilter("ignore")
        try:
            exported = torch.export.export(model, (), dict(inputs), strict=False)
            stop_gradients(exported, title)
            functional: ExportedProgram = exported.run_decompositions({})
            return functional
        except (CaptureError, FoldError):
            raise
        except Exception as error:  # torch.export raises errors of many unrelated classes
            raise CaptureError(
                f"torch.export cannot trace the model: {type(error).__name__}: {_first_line(error)}",
                where=f"{title}, {_model_frame(error)}",
                hint=advice(error),
            ) from error


_DATA_DEPENDENT = re.compile(r"data.dependent|DataDependent|DynamicOutputShape|unbacked|\bu\d+\b")


def _needs_values(error: CaptureError) -> bool:
    return _DATA_DEPENDENT.search(error.what) is not None


def _select_outputs(model: nn.Module, wanted: Sequence[str], title: str) -> None:
    """Make the (copied) model return just the wanted outputs, by name: what else it returns (caches, hidden
    states) need not be of a kind that export knows, and costs nothing."""
    forward = model.forward

    @functools.wraps(forward)
    def selected(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
        named = dict(_named_outputs(forward(*args, **kwargs)))
        if "loss" not in named:
            scalar = next(
                (value for value in named.values() if value.dim() == 0 and value.is_floating_point()), None
            )
            if scalar is not None:
                named["loss"] = scalar
        missing = [name for name in wanted if name not in named]
        if missing:
            raise CaptureError(
                f"the model has no output {', '.join(missing)}; it returns {', '.join(named) or 'no tensors'}",
                where=title,
                hint="to pass labels so that the model returns a loss, or to name another output",
            )
        return {name: settled(named[name]) for name in wanted}

    model.forward = selected


def _named_outputs(result: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(result, Tensor):
        yield "output0", result
    elif isinstance(result, Mapping):
        yield from ((str(key), value) for key, value in result.items() if isinstance(value, Tensor))
    elif isinstance(result, (list, tuple)):
        yield from (
            (f"output{index}", value) for index, value in enumerate(result) if isinstance(value, Tensor)
        )


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")[:300]


# Frames in these are not the model's own code.
_LIBRARIES = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent),
    str(Path(__file__).resolve().parent),
)
_STANDARD = sysconfig.get_path("stdlib") + os.sep


def _model_frame(error: Exception) -> str:
    """file:line of the deepest frame of neither torch, nor Python's library, nor autopar: the model's own code."""
    trace = error.__traceback__
    place = "its forward"
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        own_library = file.startswith(_STANDARD) and "site-packages" not in file
        if not own_library and not file.startswith(("<", *_LIBRARIES)):
            place = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What torch logs and prints while it traces is not for the user: an error of its own says it."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def _state(
    exported: ExportedProgram, model: nn.Module
) -> tuple[dict[str, StateInfo], dict[Node, str], dict[str, str], dict[str, Tensor]]:
    """State infos by canonical name, placeholder node -> canonical name, aliases, and constants' values."""
    first_name: dict[int, str] = {}
    tied: dict[str, str] = {}
    trainable: dict[str, bool] = {}
    for source in (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in source:
            canonical = first_name.setdefault(id(tensor), name)
            trainable[canonical] = tensor.requires_grad
            if canonical != name:
                tied[name] = canonical
    kinds = {
        InputKind.PARAMETER: "parameter",
        InputKind.BUFFER: "buffer",
        InputKind.CONSTANT_TENSOR: "constant",
    }
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    state: dict[str, StateInfo] = {}
    placeholders: dict[Node, str] = {}
    constants: dict[str, Tensor] = {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind not in kinds or spec.target is None:
            continue
        name = tied.get(spec.target, spec.target)
        node = nodes[spec.arg.name]
        info = _info(node)
        kind = kinds[spec.kind]
        state[name] = StateInfo(
            info.shape, info.dtype, kind, kind == "parameter" and trainable.get(name, False)
        )
        placeholders[node] = name
        if kind == "constant":
            constant = exported.constants[spec.target]
            assert isinstance(constant, Tensor)
            check_constant(constant, spec.target, [*node.users])
            constants[name] = constant
    return state, placeholders, tied, constants


def _complete_state(
    model: nn.Module, captured: Mapping[str, StateInfo], tied: Mapping[str, str]
) -> dict[str, StateInfo]:
    """Captured state in the model's own order, with parameters of the layers that were left out, and without
    what the program does not read."""
    by_source: dict[str, list[str]] = {}
    for name, info in captured.items():
        by_source.setdefault(info.source(name), []).append(name)
    ordered: dict[str, StateInfo] = {}
    for source, _ in (*model.named_parameters(), *model.named_buffers()):
        ordered.update((name, captured[name]) for name in by_source.get(source, ()))
    return {**ordered, **captured}


def _user_inputs(exported: ExportedProgram, example_inputs: Mapping[str, Any]) -> dict[Node, str]:
    """Placeholder -> input name, for the tensors among the inputs. Those in a dict or tuple are named by their path."""
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    given = [spec for spec in exported.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT]
    names: list[str | None] = list(flat_inputs(example_inputs))
    if len(names) != len(given):  # something of another nesting: torch's own names
        names = [None] * len(given)
    found: dict[Node, str] = {}
    for spec, name in zip(given, names, strict=True):
        node = nodes.get(spec.arg.name)
        if node is not None and tensor_info(node.meta.get("val")) is not None:
            found[node] = name if name is not None and "." in name else node.name
    return found


def _outputs(exported: ExportedProgram) -> dict[str, Node]:
    """Output name -> node; buffers that forward changes are outputs named `update <buffer>`."""
    nodes = {node.name: node for node in exported.graph.nodes}
    user: list[Node] = []
    updates: dict[str, Node] = {}
    for spec in exported.graph_signature.output_specs:
        if spec.kind == OutputKind.USER_OUTPUT:
            user.append(nodes[spec.arg.name])
        elif spec.kind == OutputKind.BUFFER_MUTATION:
            updates[f"update {spec.target}"] = nodes[spec.arg.name]
    structure = exported.call_spec.out_spec
    assert structure is not None
    return {**structure.unflatten(user), **updates}
