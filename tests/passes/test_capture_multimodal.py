"""Capture of models with images and audio: their numbers, what becomes a constant, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import CaptureError, TrainingError
from autopar.passes.capture import capture
from tests.multimodal import IMAGE, MULTIMODAL, multimodal
from tests.passes.test_capture import interpret


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_loss_and_gradients_are_those_of_the_model(kind: str) -> None:
    model, inputs = multimodal(kind)
    program = capture(model, inputs)
    expected, found = model(**inputs).loss, interpret(program, model, inputs)["loss"]
    torch.testing.assert_close(found, expected)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for one, other in zip(
        torch.autograd.grad(expected, parameters, allow_unused=True),
        torch.autograd.grad(found, parameters, allow_unused=True),
        strict=True,
    ):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(other, one)


def test_grids_are_constants_of_the_program_with_a_note() -> None:
    model, inputs = multimodal("qwen2_5_vl")
    program = capture(model, inputs)
    assert "image_grid_thw" not in program.inputs
    assert program.fixed["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 4]]
    assert program.notes == ("image_grid_thw is a constant: [[1, 4, 4], [1, 4, 4]]",)


def test_another_grid_is_refused() -> None:
    from autopar.api import compile as compile_model
    from autopar.runtime.simulate import simulate

    model, inputs = multimodal("qwen2_5_vl")
    compiled = compile_model(model, "cpu:1", example_inputs=inputs)
    other = {**inputs, "image_grid_thw": torch.tensor([[1, 2, 8], [1, 4, 4]])}

    def step(rank: int) -> None:
        run = compiled.on_rank().start()
        run.train_step(other)

    with pytest.raises(TrainingError, match=r"image_grid_thw is \[\[1, 2, 8\](.|\n)*images of one size"):
        simulate(1, step)


class Chosen(nn.Module):
    """Rows chosen by their values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.inner(x[x[:, 0] > 0]).square().sum()}


def test_sizes_that_depend_on_values_name_the_line() -> None:
    with pytest.raises(CaptureError, match=r"data-dependent(.|\n)*test_capture_multimodal\.py:\d+(.|\n)*try"):
        capture(Chosen(), {"x": torch.randn(4, 8)})


class Lengths(nn.Module):
    """Pieces of the given lengths, each reduced for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        index = torch.arange(int(ends[-1])).repeat_interleave(2)
        pieces = [piece.max(0).values for piece in self.inner(x[index]).split((2 * lengths).tolist())]
        return {"loss": torch.stack(pieces).square().mean()}


def test_lengths_compute_for_real_and_meet_the_graph_as_constants() -> None:
    torch.manual_seed(0)
    model, inputs = Lengths(), {"x": torch.randn(6, 8), "lengths": torch.tensor([1, 3, 2])}
    program = capture(model, inputs)
    torch.testing.assert_close(interpret(program, model, inputs)["loss"], model(**inputs)["loss"])
    assert list(program.fixed) == ["lengths"]


@pytest.mark.parametrize(
    "kind",
    ["llava", "qwen3_vl", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("voxtral", "mistral3"))],
)
def test_a_batch_with_another_number_of_image_tokens_is_refused(kind: str) -> None:
    model, inputs = multimodal(kind)
    marked = int((inputs["input_ids"] == IMAGE).sum())
    step = stepper(model, inputs)
    for change in (-1, 1):
        ids = inputs["input_ids"].clone()
        ids[1, 2 if change < 0 else 1] = 20 if change < 0 else IMAGE
        with pytest.raises(
            TrainingError, match=rf"{marked + change} tokens of input_ids (.|\n)*makes {marked} feat"
        ):
            step({**inputs, "input_ids": ids})


class Filled(nn.Module):
    """Rows put where a mask is, with nothing asserted."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, marks: Tensor, rows: Tensor) -> dict[str, Tensor]:
        filled = x.masked_scatter((marks == 1).unsqueeze(-1), rows)
        return {"loss": self.inner(filled).square().mean()}


def test_rows_may_be_left_over_where_nothing_is_asserted() -> None:
    inputs = {"x": torch.randn(2, 4, 8), "marks": torch.tensor([[0, 1, 1, 0]] * 2), "rows": torch.randn(4, 8)}
    fewer = {**inputs, "marks": torch.tensor([[0, 1, 0, 0]] * 2)}
    model = Filled()
    assert step_once(model, inputs, fewer) == pytest.approx(float(model(**fewer)["loss"]), rel=1e-5)
    with pytest.raises(TrainingError, match=r"6 tokens of marks (.|\n)*makes 4 features"):
        step_once(model, inputs, {**inputs, "marks": torch.tensor([[0, 1, 1, 1]] * 2)})


def step_once(model: nn.Module, planned: dict[str, Any], batch: dict[str, Any]) -> float:
    return stepper(model, planned)(batch)


def stepper(model: nn.Module, planned: dict[str, Any]) -> Callable[[dict[str, Any]], float]:
    """What makes a first step on a batch, of the model compiled for another one."""
    from autopar.api import compile as compile_model
    from autopar.runtime.simulate import simulate

    compiled = compile_model(model, "cpu:1", example_inputs=planned)
    return lambda batch: simulate(1, lambda _: compiled.on_rank().start().train_step(batch).loss)[0]
