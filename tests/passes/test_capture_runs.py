"""Runs of left-out layers: the Program is the one that tracing each of them gives, and depth costs next to nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.passes import capture as capture_module
from autopar.passes.capture import capture
from autopar.passes.pending import RUN
from autopar.program import Program
from tests.multimodal import multimodal
from tests.passes.test_capture import (
    Between,
    Collected,
    Hooked,
    Layer,
    LeakingLayer,
    OwnInput,
    Passed,
    Stack,
    X,
    interpret,
    same,
    stack_of,
)

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "num_hidden_layers": 8,
    "use_cache": False,
}
_MIXED = ["full_attention" if index % 3 == 2 else "sliding_attention" for index in range(8)]
_MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 3,
    "num_key_value_heads": 4, "head_dim": 4, "moe_intermediate_size": 16,
}  # fmt: skip
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 6, "num_heads": 4, "vocab_size": 96}

# What is special about it -> class of the model, its config's fields.
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "plain": ("LlamaForCausalLM", _SIZES),
    "packed": ("GPT2LMHeadModel", {"n_embd": 32, "n_head": 4, "n_layer": 8, "vocab_size": 96}),
    "alternating": ("Gemma3ForCausalLM", {**_SIZES, "layer_types": _MIXED, "sliding_window": 4}),
    "dense, then experts": ("DeepseekV3ForCausalLM", {**_SIZES, **_MLA}),
    "router logits": ("MixtralForCausalLM", {**_SIZES, "num_local_experts": 4, "output_router_logits": True}),
    "encoder and decoder": ("T5ForConditionalGeneration", {**_T5, "decoder_start_token_id": 0}),
    "masked": ("BertForMaskedLM", {**_SIZES, "num_hidden_layers": 6}),
}


def one_by_one(model: nn.Module, inputs: dict[str, Any], patch: pytest.MonkeyPatch) -> Program:
    """Captured with every left-out layer traced for itself."""
    real = capture_module._capture

    def traced(*arguments: Any) -> Program:
        return real(*arguments[:8], None, *arguments[9:])

    with patch.context() as changed:
        changed.setattr(capture_module, "_capture", traced)
        return capture(model, inputs)


_COUNTED = re.compile(r"0x[0-9a-f]+|<eval_with_key>\.\d+")  # numbers that go up from one capture to the next


def described(program: Program) -> list[Any]:
    """All of a Program, as values that compare."""
    parts: list[Any] = [str(program), program.calls, list(program.state.items()), program.notes]
    parts += [dict(program.inputs), dict(program.outputs), dict(program.tied), len(program.conditions)]
    parts += [(name, value.dtype, value.tolist()) for name, value in program.constants.items()]
    parts += [(name, value.tolist()) for name, value in program.fixed.items()]
    for block in program.blocks.values():
        parts.append((block.name, block.state, block.inputs, block.outputs))
        for node in block.graph.graph.nodes:
            value = node.meta.get("val")
            looks = (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else None
            said = [node.meta.get(key) for key in ("module", "stack_trace")]
            parts.append((node.op, node.name, looks))
            parts.append(_COUNTED.sub("", f"{node.target} {node.args} {node.kwargs} {said}"))
    return parts


def runs_of(patch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the runs that captures after this put into their graphs."""
    lengths: list[int] = []
    real = capture_module.Runs.expand

    def expand(self: Any, graph: Any) -> None:
        lengths.extend(len(self.all[node.args[1]].layers) for node in graph.nodes if node.target is RUN)
        real(self, graph)

    patch.setattr(capture_module.Runs, "expand", expand)
    return lengths


_LONG = ("alternating", "dense, then experts", "router logits", "encoder and decoder")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in _LONG)) for case in CASES]
)
def test_the_program_is_that_of_layers_traced_one_by_one(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    name, fields = CASES[case]
    kind = getattr(transformers, name)
    with torch.device("meta"):
        model = kind(kind.config_class(**fields)).eval()
        if hasattr(model, "_can_set_experts_implementation") and model._can_set_experts_implementation():
            model.set_experts_implementation("grouped_mm")
        ids = torch.zeros(2, 16, dtype=torch.int64)
    inputs = {"input_ids": ids, "labels": ids}
    lengths = runs_of(monkeypatch)
    quick = capture(model, inputs)
    assert sum(lengths) > 1, "several layers are left out, in runs"
    assert described(quick) == described(one_by_one(model, inputs, monkeypatch))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_towers_and_host_values_too(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = multimodal(kind)
    assert described(capture(model, inputs)) == described(one_by_one(model, inputs, monkeypatch))


class Frozen(Stack):
    """The layers run without gradients; what comes after them has some."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = self.head(x)
        with torch.no_grad():
            made = first
            for layer in self.layers:
                made = layer(made, first)
        return {"loss": (self.head(made) * first).square().mean()}


class AddingLayer(Layer):
    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x)) + shared


class Changed(Stack):
    """What the layers are given is changed afterwards, through a view of it."""

    def __init__(self, depth: int) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(AddingLayer(index) for index in range(depth))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        shared = x.cos()
        for layer in self.layers:
            x = layer(x, shared)
        shared.view(-1).add_(1.0)
        return {"loss": (x * shared).square().mean()}


class ChangedResult(Stack):
    """What the last layer returns is changed in place, under two names."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        made = []
        for layer in self.layers:
            x = layer(x, x)
            made.append(x)
        x += 1.0
        made[-1][:, 0] = 2.0
        return {"loss": sum((one.square().mean() for one in made), x.mean())}


class Restart(Stack):
    """Every fifth layer is followed by something else, which reads only shapes otherwise."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = x
        for index, layer in enumerate(self.layers):
            assert (*x.shape, x.dtype, x.dim()) == (*first.shape, first.dtype, 3)
            x = layer(x, first)
            if index % 5 == 4:
                first = first + x
        return {"loss": x.square().mean()}


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 0.5


class Rounded(Stack):
    """The layers' result goes straight into an autograd.Function."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x, x)
        made = Straight.apply(x)  # type: ignore[no-untyped-call]
        return {"loss": made.square().mean()}


@pytest.mark.parametrize(
    "kind", [Frozen, Changed, ChangedResult, Restart, Rounded, Between, Collected, OwnInput, Passed, Hooked]
)
def test_what_comes_between_and_after_is_in_order(kind: type[Stack], monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = runs_of(monkeypatch)
    model = kind(9)
    program = same(model, {"x": X.clone()})
    assert lengths
    assert described(program) == described(one_by_one(model, {"x": X}, monkeypatch))


def test_a_result_returned_as_it_is() -> None:
    class Returned(Stack):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            for layer in self.layers:
                x = layer(x, x)
            return {"loss": x.mean(), "last": x}

    model = Returned(8)
    program = capture(model, {"x": X}, outputs=("last",))
    torch.testing.assert_close(interpret(program, model, {"x": X})["last"], model(X)["last"])


class Escaping(Stack):
    """Hands the layers' result to torch where torch functions do not see it."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x, x)
        with torch._C.DisableTorchFunction():
            x = torch.tanh(x)
        return {"loss": x.square().mean()}


def test_where_a_result_escapes_layers_are_traced_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="autopar.passes.capture"):
        program = same(Escaping(8), {"x": X})
    assert "one by one" in caplog.text
    assert len({call.block for call in program.calls if call.path}) == 2


def test_layers_that_cannot_be_left_out_are_still_found() -> None:
    same(stack_of(LeakingLayer), {"x": X.clone()})


def test_the_traced_graph_does_not_grow_with_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops that torch traces: a run of layers is one, however long."""
    sizes: list[int] = []
    real = capture_module._export

    def exported(*arguments: Any) -> Any:
        result = real(*arguments)
        sizes.append(len(result.graph.nodes))
        return result

    monkeypatch.setattr(capture_module, "_export", exported)
    same_kind = [stack_of(lambda index: Layer(2 * index)) for _ in range(2)]
    same_kind[1].layers.extend(Layer(2 * index) for index in range(8, 200))
    for model in same_kind:
        capture(model, {"x": X})
    assert sizes[0] == sizes[1]
