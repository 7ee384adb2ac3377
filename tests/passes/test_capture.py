"""Capture and fold: the Program computes what the module computes, and depth costs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import CaptureError
from autopar.passes.capture import capture
from autopar.program import Program
from tests.tiny import MODELS, tiny


def interpret(program: Program, module: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Run a Program's calls one after the other, whole: the meaning of a Program."""
    tensors: dict[str, Tensor] = {**program.constants, **dict(module.named_buffers(remove_duplicate=False))}
    tensors.update(module.named_parameters(remove_duplicate=False))
    state = {name: info.take(tensors[info.source(name)]) for name, info in program.state.items()}
    values: dict[str, Tensor] = {name: inputs[name] for name in program.inputs}
    for call in program.calls:
        graph = program.blocks[call.block].graph
        results = graph(*(state[name] for name in call.state), *(values[name] for name in call.inputs))
        values.update(zip(call.outputs, results, strict=True))
    return {name: values[value] for name, value in program.outputs.items()}


def same(module: nn.Module, inputs: dict[str, Any], output: str = "loss") -> Program:
    """Capture `module` and check outputs and gradients against the module itself."""
    program = capture(module, inputs, outputs=(output,))
    result = module(**inputs)
    expected = result[output] if isinstance(result, Mapping) else result
    found = interpret(program, module, inputs)[output]
    torch.testing.assert_close(found, expected)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    one = torch.autograd.grad((expected * weight).sum(), parameters, retain_graph=True, allow_unused=True)
    other = torch.autograd.grad((found * weight).sum(), parameters, allow_unused=True)
    for left, right in zip(one, other, strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            torch.testing.assert_close(left, right)
    return program


@pytest.mark.parametrize("kind", MODELS)
def test_transformers_models(kind: str) -> None:
    program = same(*tiny(kind))
    layers = [times for times in program.multiplicity.values() if times > 1]
    assert layers, "identical layers are one block"


def test_parameters_and_ties_of_left_out_layers_are_there() -> None:
    model, inputs = tiny("gpt2")
    program = capture(model, inputs)
    assert program.parameter_count == sum(parameter.numel() for parameter in model.parameters())
    assert program.tied == {"lm_head.weight": "transformer.wte.weight"}


class Layer(nn.Module):
    def __init__(self, index: int, scale_by_index: bool = False) -> None:
        super().__init__()
        self.layer_idx = index
        self.inner = nn.Linear(8, 8, bias=index % 2 == 1 and not scale_by_index)
        self.factor = 1.0 / (index + 1) if scale_by_index else 1.0

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x) * self.factor) * shared


class Stack(nn.Module):
    """Layers between a prologue and a loss; alternating kinds, or each with its own scalar."""

    def __init__(self, depth: int, scale_by_index: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(index, scale_by_index) for index in range(depth))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        shared = x.mean(-1, keepdim=True).cos()
        for layer in self.layers:
            x = layer(x, shared)
        return {"loss": x.square().mean()}


X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("depth", [2, 5, 12])
def test_alternating_layers_fold_into_two_blocks(depth: int) -> None:
    program = same(Stack(depth), {"x": X})
    kinds = {call.block for call in program.calls if call.path}
    assert len(kinds) == 2
    assert sum(bool(call.path) for call in program.calls) == depth


def test_a_layer_that_differs_by_a_number_is_a_block_of_its_own() -> None:
    program = same(Stack(4, scale_by_index=True), {"x": X})
    assert len({call.block for call in program.calls if call.path}) == 4


def test_depth_costs_nothing() -> None:
    short, deep = (capture(Stack(depth), {"x": X}) for depth in (4, 400))
    assert len(short.blocks) == len(deep.blocks)
    assert len(deep.calls) == len(short.calls) + 396


class Between(Stack):
    """Something happens between the layers, outside of them."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = x
        for layer in self.layers:
            x = layer(x, x) + 0.5 * first
        return {"loss": x.square().mean()}


class Collected(Stack):
    """What every layer made is used after the last one."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        made = []
        for layer in self.layers:
            x = layer(x, x)
            made.append(x)
        return {"loss": torch.stack(made).square().mean()}


class OwnInput(Stack):
    """Every layer has an input and a scale of its own, and the number of layers is in the result."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        pieces = x.tanh().chunk(2)[0].expand(4, -1, -1, -1).mean(0)
        for number, layer in enumerate(self.layers):
            x = layer(x, pieces.narrow(0, number % 2, 1)) * (1.0 + number)
        return {"loss": x.square().mean() / len(self.layers)}


class Passed(Stack):
    """A tensor is handed through every layer untouched, in a dict, and one layer's output skips the next layer."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        state, before = {"x": x, "first": x}, x
        for layer in self.layers:
            made = layer(state["x"], state["first"]) + before
            before, state = state["x"], {"x": made, "first": state["first"]}
        return {"loss": (state["x"] * state["first"]).square().mean()}


@pytest.mark.parametrize("kind", [Between, Collected, OwnInput, Passed])
def test_what_stands_between_layers_does_not_keep_them_from_folding(kind: type[Stack]) -> None:
    short, deep = (same(kind(depth), {"x": X}) for depth in (5, 9))
    assert len(layer_blocks(short)) == len(layer_blocks(deep)) == 2
    assert sum(bool(call.path) for call in deep.calls) == 9


def layer_blocks(program: Program) -> set[str]:
    return {call.block for call in program.calls if call.path}


class Hooked(Stack):
    """A hook inside of every layer collects what it sees, as Transformers does with the logits of routers."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        seen: list[Tensor] = []
        handles = [
            layer.inner.register_forward_hook(lambda module, args, output: seen.append(output))
            for layer in self.layers
        ]
        for layer in self.layers:
            x = layer(x, x)
        for handle in handles:
            handle.remove()
        return {"loss": x.square().mean() + torch.stack(seen).softmax(0)[::2].square().sum() / len(seen)}


def test_what_hooks_collect_from_left_out_layers_is_there() -> None:
    assert len(layer_blocks(same(Hooked(7), {"x": X}))) == 2


class Leaking(Stack):
    """What is inside of a layer is used outside, behind the back of its results."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        leaked: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, x)
            leaked.append(layer.made)
        return {"loss": x.square().mean() + torch.stack(leaked).square().mean()}


class LeakingLayer(Layer):
    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        self.made = torch.tanh(self.inner(x))
        return x + self.made * shared


class InPlaceLayer(Layer):
    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x)) + shared.add_(0.5)


class WritingLayer(Layer):
    """Hands on a tensor in a dict of the caller's."""

    def forward(self, x: Tensor, shared: dict[str, Tensor]) -> Tensor:
        made = torch.tanh(self.inner(x)) * shared["last"]
        shared["last"] = made
        return x + made


class IndexLayer(Layer):
    """Does otherwise from the fifth layer on."""

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        made = torch.tanh(self.inner(x))
        return x + (made * shared if self.layer_idx < 4 else made)


class ListedLayer(Layer):
    """Looks up in a list what it is to do."""

    def __init__(self, index: int, kinds: list[str]) -> None:
        super().__init__(index, scale_by_index=False)
        self.kinds = kinds

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        made = torch.tanh(self.inner(x))
        return x + (made * shared if self.kinds[self.layer_idx] == "short" else made)


def stack_of(make: Any, kind: type[Stack] = Stack) -> Stack:
    stack = kind(0)
    stack.layers = nn.ModuleList(make(index) for index in range(8))
    return stack


class Writing(Stack):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        shared = {"last": x}
        for layer in self.layers:
            x = layer(x, shared)
        return {"loss": x.square().mean() + shared["last"].square().mean()}


@pytest.mark.parametrize(
    "stack",
    [
        lambda: stack_of(LeakingLayer, Leaking),
        lambda: stack_of(InPlaceLayer),
        lambda: stack_of(WritingLayer, Writing),
        lambda: stack_of(IndexLayer),
        lambda: stack_of(lambda index: ListedLayer(index, ["long"] * 6 + ["short"] * 2)),
    ],
    ids=["leaks", "in place", "writes into a container", "index", "listed"],
)
def test_layers_that_do_more_than_return_are_right_all_the_same(stack: Any) -> None:
    same(stack(), {"x": X.clone()})


class Normed(nn.Module):
    """Batch norms inside of folded layers: the statistics of every one are updated."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(6)) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def test_updates_of_left_out_layers_are_there() -> None:
    program = capture(Normed(), {"x": X}, outputs=("loss",))
    assert len(layer_blocks(program)) == 1
    assert sum(name.startswith("update layers.") for name in program.outputs) == 15


class Mixed(nn.Module):
    """Convolutions, a constant made in forward, a buffer, a Sequential of equal parts, an in-place op."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(3))
        )
        self.head = nn.Linear(8, 4)
        self.register_buffer("shift", torch.tensor([0.1, 0.2, 0.3, 0.4]))

    def forward(self, image: Tensor) -> Tensor:
        x = self.body(self.stem(image)).mean((2, 3))
        x = self.head(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        x.add_(self.shift)
        return x


def test_a_module_of_ones_own() -> None:
    # In float32 the gradients of a convolution may differ by its rounding, by more than assert_close allows.
    program = same(
        Mixed().double(), {"image": torch.randn(4, 3, 8, 8, dtype=torch.float64)}, output="output0"
    )
    assert program.constants


def test_meta_parameters_take_no_memory_and_give_the_same_program() -> None:
    model, inputs = tiny("llama")
    with torch.device("meta"):
        hollow = MODELS["llama"]().eval()
    on_meta = {name: value.to("meta") for name, value in inputs.items()}
    assert str(capture(hollow, on_meta)) == str(capture(model, inputs))


def test_the_model_is_not_changed() -> None:
    model, inputs = tiny("llama")
    model.train()
    before = model(**inputs).loss
    capture(model, inputs)
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(**inputs).loss, before)
    assert len(model.model.layers) == 3


def test_dropout_is_switched_off_with_a_note() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    program = capture(model, {"input": X}, outputs=("output0",))
    assert "dropout is switched off" in program.notes[0]


def test_causal_attention_is_a_flag_and_padding_is_a_mask() -> None:
    model, inputs = tiny("llama")
    attention = "autopar.attention"
    plain = next(line for line in str(capture(model, inputs)).splitlines() if attention in line)
    assert "causal=True" in plain
    mask = torch.ones(4, 16, dtype=torch.int64)
    mask[0, 10:] = 0
    padded = same(model, {**inputs, "attention_mask": mask})
    assert "causal=True" not in next(line for line in str(padded).splitlines() if attention in line)


def test_packed_sequences_keep_their_mask() -> None:
    model, inputs = tiny("llama")
    positions = torch.cat([torch.arange(10), torch.arange(6)]).expand(4, 16)
    same(model, {**inputs, "position_ids": positions})


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x * 2
        return x


def test_a_model_that_does_not_export_names_the_place() -> None:
    with pytest.raises(CaptureError, match=r"test_capture\.py:\d+(.|\n)*try"):
        capture(Branch(), {"x": X}, outputs=("output0",))


def test_an_output_that_is_not_there() -> None:
    with pytest.raises(CaptureError, match="no output logits; it returns output0"):
        capture(nn.Linear(8, 8), {"input": X}, outputs=("logits",))


def test_batch_norm_in_training_updates_its_statistics() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(6))
    program = capture(model, {"input": X}, outputs=("output0",))
    assert {name for name in program.outputs if name.startswith("update ")} == {
        "update 1.running_mean",
        "update 1.running_var",
        "update 1.num_batches_tracked",
    }
