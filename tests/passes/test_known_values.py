"""What integer inputs decide is decided as for the example: right for other batches that decide the same, others refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import CaptureError, TrainingError
from autopar.passes.capture import capture
from autopar.program import Program
from tests.passes.test_capture import interpret
from tests.passes.test_capture_multimodal import step_once


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)


class Rows(Marked):
    """Rows of the marked places, put back in order."""

    def forward(self, x: Tensor, mark_ids: Tensor) -> Tensor:
        mask = mark_ids == 1
        return x.masked_scatter(mask.unsqueeze(-1), self.inner(x[mask])).square().mean()


class Places(Marked):
    """Their coordinates; a column taken by a mask in the middle."""

    def forward(self, x: Tensor, mark_ids: Tensor) -> Tensor:
        row, column = torch.where(mark_ids == 1)
        every = mark_ids[:, 0] < 9
        return (
            (self.inner(x)[row, column] * column[:, None]).mean()
            + x[:, mark_ids[0] < 9].mean()
            + x[every].mean()
        )


class Changed(Marked):
    """A mask changed in place after something was decided by it; rows written by a mask."""

    def forward(self, x: Tensor, mark_ids: Tensor) -> Tensor:
        mask = mark_ids == 1
        first = self.inner(x[mask]).mean()
        mask[0] |= ~torch.any(mark_ids == 7)
        made = self.inner(x)
        made[mask] = made[mask].tanh()
        return first + made.square().mean()


class Numbers(Marked):
    """Python numbers and branches."""

    def forward(self, x: Tensor, mark_ids: Tensor) -> Tensor:
        count = int((mark_ids == 1).sum())
        if mark_ids.max() > 50:
            raise ValueError("unknown mark")
        lengths = (mark_ids == 1).sum(-1).tolist()
        return self.inner(x)[:, :count].mean() + sum(
            piece.tanh().sum() for piece in x.flatten(0, 1)[:count].split(lengths)
        )


class Packed(Marked):
    """A mask that travels in the last column of a tensor."""

    def forward(self, x: Tensor, mark_ids: Tensor) -> Tensor:
        packed = torch.cat([self.inner(x), (mark_ids == 1).to(x.dtype)[..., None]], dim=-1)
        rows, valid = torch.split(packed, [8, 1], dim=-1)
        return rows[valid.bool().squeeze(-1)].square().mean() + rows[packed[..., -1].bool()].mean()


KINDS = [Rows, Places, Changed, Numbers, Packed]
MARKS = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 0]])
ALIKE = torch.tensor([[1, 1, 0, 2], [0, 1, 0, 1]])  # as many mark_ids in every row, elsewhere
FEWER = torch.tensor([[1, 1, 0, 2], [0, 0, 0, 1]])


def captured(kind: type[Marked]) -> tuple[Marked, Program]:
    torch.manual_seed(0)
    model = kind()
    return model, capture(model, {"x": torch.randn(2, 4, 8), "mark_ids": MARKS})


def assert_same(program: Program, model: nn.Module, batch: dict[str, Any]) -> None:
    expected, found = model(**batch), interpret(program, model, batch)["loss"]
    torch.testing.assert_close(found, expected)
    parameters = list(model.parameters())
    for one, other in zip(
        torch.autograd.grad(expected, parameters), torch.autograd.grad(found, parameters), strict=True
    ):
        torch.testing.assert_close(other, one)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mark_ids", [MARKS, ALIKE])
def test_batches_that_decide_the_same_are_computed_as_by_the_model(
    kind: type[Marked], mark_ids: Tensor
) -> None:
    model, program = captured(kind)
    batch = {"x": torch.randn(2, 4, 8), "mark_ids": mark_ids}
    assert [condition.violated(batch) for condition in program.conditions] == [None] * len(program.conditions)
    assert program.conditions
    assert_same(program, model, batch)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_that_decide_otherwise_are_refused_with_the_line(kind: type[Marked]) -> None:
    with pytest.raises(TrainingError, match=r"mark_ids(.|\n)*plan is for(.|\n)*test_known_values\.py:\d+"):
        step_once(
            kind(),
            {"x": torch.randn(2, 4, 8), "mark_ids": MARKS},
            {"x": torch.randn(2, 4, 8), "mark_ids": FEWER},
        )


def test_checking_a_batch_does_not_change_it() -> None:
    class Clipped(Marked):
        def forward(self, x: Tensor, mark_ids: Tensor) -> Tensor:
            kept = mark_ids.clone()
            kept[0] |= 1
            return self.inner(x)[kept == 1].mean()

    torch.manual_seed(0)
    program = capture(Clipped(), {"x": torch.randn(2, 4, 8), "mark_ids": MARKS})
    mark_ids = MARKS.clone()
    assert all(condition.violated({"mark_ids": mark_ids}) is None for condition in program.conditions)
    assert torch.equal(mark_ids, MARKS)


def test_data_decides_nothing() -> None:
    class Positive(Marked):
        def forward(self, x: Tensor, mark_ids: Tensor) -> Tensor:
            return self.inner(x[x[..., 0] > -1e9]).mean()

    with pytest.raises(CaptureError, match="data-dependent"):
        captured(Positive)


@pytest.mark.slow  # a whole idefics3
def test_padding_images_are_dropped_as_in_the_example() -> None:
    from bench.zoo_models import zoo_model

    model, batch = zoo_model("idefics3")
    program = capture(model, batch)
    pixels = torch.randn(batch["pixel_values"].shape)
    other = {**batch, "pixel_values": pixels, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][:, -2:] = other["input_ids"][:, -4:-2]
    torch.testing.assert_close(interpret(program, model, other)["loss"], model(**other)["loss"])
    assert all(condition.violated(other) is None for condition in program.conditions)
    pixels[0] = 0
    assert any(condition.violated(other) for condition in program.conditions)
