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
import sysconfig
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from autopar.errors import CaptureError
from autopar.passes.fold import Stack, find_stacks, storage_free_copy
from autopar.passes.normalize import normalize
from autopar.passes.partition import FoldError, partition
from autopar.program import Program, StateInfo, TensorInfo, tensor_info
from autopar.torch_private import fake_mode

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
    Dropout is switched off (the capture is of evaluation mode, batch norms aside), with a note in the Program.
    Raises CaptureError when the model does not export, naming the place in the model.
    """
    title = name or type(model).__name__
    stacks = find_stacks(model)
    shortened = tuple(stack for stack in stacks if stack.kept < len(stack.kinds))
    try:
        return _capture(model, example_inputs, outputs, title, stacks, shortened, dtype)
    except (FoldError, IndexError, KeyError, CaptureError) as error:
        if not shortened:
            raise (
                error if isinstance(error, CaptureError) else CaptureError(str(error), where=title)
            ) from error
        _log.info("%s: layers cannot be folded before capture (%s); capturing all of them", title, error)
        return _capture(model, example_inputs, outputs, title, stacks, (), dtype)


def _capture(
    model: nn.Module,
    example_inputs: Mapping[str, Any],
    outputs: Sequence[str],
    title: str,
    stacks: tuple[Stack, ...],
    shortened: tuple[Stack, ...],
    dtype: torch.dtype | None,
) -> Program:
    with fake_mode():

        def fake(tensor: Tensor) -> Tensor:
            cast = dtype is not None and isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
            return torch.empty(tensor.shape, dtype=dtype if cast else tensor.dtype)

        copy = storage_free_copy(model, shortened, fake)
        inputs = {
            key: fake(value) if isinstance(value, Tensor) else value for key, value in example_inputs.items()
        }
        notes = _evaluation_mode(copy)
        exported = _export(copy, inputs, outputs, title)
    state, placeholders, tied, constants = _state(exported, model)
    user_inputs = _user_inputs(exported, example_inputs)
    wanted = _outputs(exported)
    nodes = normalize(exported.graph, set(wanted.values()))
    kept = {stack.path: stack.kept for stack in shortened}
    layout = tuple(Stack(stack.path, stack.kinds, kept.get(stack.path, len(stack.kinds))) for stack in stacks)
    calls, blocks, values, all_state = partition(nodes, placeholders, user_inputs, wanted, layout, state)
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
    )


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
    with warnings.catch_warnings(), _quiet(), transformers_attention(model, "position_ids" in inputs):
        warnings.simplefilter("ignore")
        try:
            exported = torch.export.export(model, (), dict(inputs), strict=False)
            functional: ExportedProgram = exported.run_decompositions({})
            return functional
        except CaptureError:
            raise
        except Exception as error:  # torch.export raises errors of many unrelated classes
            data_dependent = "data-dependent" in str(error)
            raise CaptureError(
                f"torch.export cannot trace the model: {type(error).__name__}: {_first_line(error)}",
                where=f"{title}, {_model_frame(error)}",
                hint="to remove control flow that depends on tensor values there, or to compute it outside of forward "
                "and pass the result as an input"
                if data_dependent
                else "to run the model's forward on the same inputs without autopar",
            ) from error


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
        return {name: named[name] for name in wanted}

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
            constants[name] = constant
    return state, placeholders, tied, constants


def _complete_state(
    model: nn.Module, captured: Mapping[str, StateInfo], tied: Mapping[str, str]
) -> dict[str, StateInfo]:
    """Captured state in the model's own order, with parameters of the layers that were left out, and without
    what the program does not read."""
    ordered: dict[str, StateInfo] = {}
    for name, _ in (*model.named_parameters(), *model.named_buffers()):
        if name in captured:
            ordered[name] = captured[name]
    return {**ordered, **captured}


def _user_inputs(exported: ExportedProgram, example_inputs: Mapping[str, Any]) -> dict[Node, str]:
    """Placeholder -> input name, for the tensors among the inputs."""
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    found: dict[Node, str] = {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT and spec.arg.name in nodes:
            node = nodes[spec.arg.name]
            if tensor_info(node.meta.get("val")) is not None:
                found[node] = node.name
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


@contextlib.contextmanager
def transformers_attention(model: nn.Module, packed: bool) -> Iterator[None]:
    """While capturing a Transformers model: keep plain causal (or full) attention a flag instead of a mask tensor,
    and grouped key/value heads grouped.

    Tracing makes Transformers build masks it would skip in eager mode, because it cannot look at values: one for
    padding that may not be there and one for sequences packed into a row. Without an attention mask there is no
    padding, and without position ids (`packed`) there are no packed sequences.
    """
    config = getattr(model, "config", None)
    if config is None or not type(model).__module__.startswith(("transformers.", "transformers_modules")):
        yield
        return
    from autopar.passes.transformers_capture import attention_for_capture

    with attention_for_capture(model, packed):
        yield
