"""Linear layers in fp8: products against float32, which ones are changed, training against bf16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import UsageError
from autopar.fp8_functions import RECIPES, fp8_linear, fp8_mm, quantized
from autopar.passes.fp8 import use_fp8
from tests.runtime.training_case import CASES, Made, made, on_ranks

STEPS = 50


class Routed(nn.Module):
    """A gate that chooses, two linear layers, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(32, 4, bias=False), nn.Linear(32, 64)
        self.down, self.head = nn.Linear(64, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        weights, _ = self.gate(x).softmax(-1).topk(2)
        hidden = self.down(self.up(x).relu()) * weights.sum(-1, keepdim=True)
        return {"loss": nn.functional.cross_entropy(self.head(hidden), labels)}


CASES["routed"] = lambda: (
    Routed(),
    {"x": torch.linspace(-1, 1, 16 * 32).view(16, 32), "labels": torch.arange(16)},
)


def operands(scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(4, 16, 64, generator=random, dtype=torch.bfloat16) * scale
    weight = torch.randn(48, 64, generator=random, dtype=torch.bfloat16) / 8
    return x.requires_grad_(), weight.requires_grad_(), torch.randn(4, 16, 48, generator=random).bfloat16()


def three(linear: Any, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """The result and both gradients."""
    x, weight, gradient = (each.detach().to(dtype) for each in operands())
    result = linear(x.requires_grad_(), weight.requires_grad_())
    result.backward(gradient)
    assert x.grad is not None
    assert weight.grad is not None
    return [result.detach(), x.grad, weight.grad]


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("scaling", "error", "of_gradients"), [("tensor", 0.05, 0.08), ("row", 0.05, 0.05)])
def test_result_and_gradients_are_near_those_in_float64(
    scaling: str, error: float, of_gradients: float
) -> None:
    """e4m3 has 3 bits of mantissa: a relative error of up to 1/16 per value; e5m2, of gradients, 2 bits."""
    expected = three(nn.functional.linear, torch.float64)
    found = three(lambda x, weight: fp8_linear(x, weight, None, scaling))
    assert distance(found[0], expected[0]) < error
    assert distance(found[1], expected[1]) < of_gradients
    assert distance(found[2], expected[2]) < of_gradients


@pytest.mark.parametrize("scaling", RECIPES)
def test_products_are_those_of_the_rounded_factors(scaling: str) -> None:
    """Torch's kernel against float64 products of what was rounded: only bf16's rounding of the result is left."""
    recipe = RECIPES[scaling]
    x, weight, gradient = (each.detach() for each in operands())
    found = three(lambda x, weight: fp8_linear(x, weight, None, scaling))

    def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
        q, scale = quantized(value, dtype, recipe)
        return q.double() * scale.double()

    x, gradient = x.view(-1, 64), gradient.view(-1, 48)
    forward, backward = recipe.forward, recipe.gradient
    expected = [
        rounded(x, forward) @ rounded(weight, forward).t(),
        rounded(gradient, backward) @ rounded(weight.t(), forward).t(),
        rounded(gradient.t(), backward) @ rounded(x.t(), forward).t(),
    ]
    for one, other in zip(found, expected, strict=True):
        assert distance(one.view(other.shape), other) < 2**-8


def test_rows_have_scales_of_their_own() -> None:
    """One row a million times the others: with one scale for all, the others vanish."""
    x, weight, _ = (each.detach().clone() for each in operands())
    x[0, 0] *= 1e6
    small = nn.functional.linear(x.double(), weight.double())[1:]
    assert distance(fp8_linear(x, weight, None, "row")[1:], small) < 0.05
    assert distance(fp8_linear(x, weight, None, "tensor")[1:], small) > 0.5


@pytest.mark.parametrize("scaling", RECIPES)
def test_values_that_are_zero_nan_or_huge(scaling: str) -> None:
    x, weight, _ = (each.detach().clone() for each in operands())
    assert not fp8_linear(torch.zeros_like(x), weight, None, scaling).any()
    assert torch.isfinite(fp8_linear(x * 1e30, weight, None, scaling)).all()
    x[0, 0, 0] = float("nan")
    assert torch.isnan(fp8_linear(x, weight, None, scaling)[0, 0]).all()
    x[0, 0, 0] = float("inf")
    assert not torch.isfinite(fp8_linear(x, weight, None, scaling)[0, 0]).any()


def test_what_the_kernels_do_not_take_is_the_plain_product() -> None:
    x, weight, _ = (each.detach() for each in operands())
    for rows, columns in ((x[:, :3], weight), (x[..., :60], weight[:, :60]), (x, weight[:40])):
        assert torch.equal(fp8_linear(rows, columns), nn.functional.linear(rows, columns))
    assert fp8_linear(x[:0], weight).shape == (0, 16, 48)


def test_mm_and_bias() -> None:
    x, weight, _ = (each.detach() for each in operands())
    bias = torch.arange(48, dtype=torch.bfloat16)
    plain = fp8_linear(x, weight)
    assert torch.equal(fp8_linear(x, weight, bias), plain + bias)
    assert torch.equal(fp8_mm(x.view(-1, 64), weight.t()), plain.view(-1, 48))


def names(program: Any, block: str) -> list[str]:
    return [node.target.__name__ for node in program.blocks[block].graph.graph.nodes if callable(node.target)]


def test_layers_change_and_the_head_does_not() -> None:
    before = made("llama", "tp=2", "bf16").rank_program
    after = use_fp8(before)
    assert names(before, "model_layers").count("linear.default") == 7
    assert names(after, "model_layers").count("fp8_linear") == 7
    assert names(after, "part2").count("linear.default") == 1
    assert "fp8_linear" not in names(after, "part2")
    assert names(before, "model_layers").count("fp8_linear") == 0


def test_a_router_stays_by_its_use() -> None:
    (block,) = use_fp8(made("routed", "dp=1", "bf16").rank_program).blocks.values()
    changed = [str(node.args[1]) for node in block.graph.graph.nodes if node.target is fp8_linear]
    assert changed == ["up_weight", "down_weight"]


def test_a_product_with_a_transposed_weight() -> None:
    after = use_fp8(made("gpt2", "tp=2", "bf16").rank_program)
    assert names(after, "transformer_h").count("fp8_mm") == 6  # query, key and value are three


def test_a_layer_that_is_left_out_is_a_block_of_its_own() -> None:
    after = use_fp8(
        made("llama", "tp=2", "bf16").rank_program, ignore=["model.layers.0.*", "*.2.mlp.down_proj.*"]
    )
    blocks = {call.path: call.block for call in after.calls if call.path}
    counts = [names(after, blocks[f"model.layers.{layer}"]).count("fp8_linear") for layer in range(3)]
    assert counts == [0, 7, 6]
    assert all(call.block in after.blocks for call in after.calls)


@pytest.mark.parametrize(
    "options", [{"scaling": "block"}, {"ignore": ["*.down.*"]}, {"ignore": ["model.layers.*"]}]
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        use_fp8(made("llama", "tp=2", "bf16").rank_program, **options)


def losses(run: Made, steps: int = STEPS) -> list[float]:
    trainer = run.start(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    batch = run.batch
    return [trainer.step(batch).loss for _ in range(steps)]


def farthest(found: list[float], expected: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(found, expected, strict=True))


@pytest.fixture(scope="module")
def in_bf16() -> list[float]:
    (curve,) = on_ranks(made("llama", "dp=1", "bf16"), losses)
    return curve


def test_bf16_trains_as_fp32_does(in_bf16: list[float]) -> None:
    """fp32 masters and reductions: over 50 steps, in which the loss falls from 4.6 to 0.86, never 0.01 apart (0.004 measured)."""
    (expected,) = on_ranks(made("llama", "dp=1"), losses)
    assert farthest(in_bf16, expected) < 0.01


def test_bf16_masters_take_in_what_bf16_would_lose() -> None:
    """Steps of a ten-thousandth of a weight: weights in bf16 would not move at all."""

    def moved(run: Made) -> float:
        trainer = run.start(lambda parameters: torch.optim.SGD(parameters, lr=1e-4))
        parameter = trainer.store.parameters["model.layers.0.mlp.up_proj.weight"]
        before = parameter.detach().clone()
        trainer.step(run.batch)
        assert parameter.dtype == torch.float32
        return float((parameter.detach() != before).float().mean())

    assert min(on_ranks(made("llama", "dp=2", "bf16"), moved)) > 0.5


@pytest.mark.parametrize(
    ("scaling", "mesh"), [("tensor", "dp=1"), ("tensor", "tp=2"), ("row", "tp=2"), ("row", "fsdp=2")]
)
def test_fp8_trains_as_bf16_does(scaling: str, mesh: str, in_bf16: list[float]) -> None:
    """Over 50 steps never 0.05 apart (0.014 to 0.022 measured), and every rank alike."""
    plain = made("llama", mesh, "bf16")
    run = replace(plain, rank_program=use_fp8(plain.rank_program, scaling=scaling))
    first, *others = on_ranks(run, losses)
    assert all(other == first for other in others)
    assert first != in_bf16
    assert farthest(first, in_bf16) < 0.05
