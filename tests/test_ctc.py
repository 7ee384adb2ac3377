"""The CTC loss with padded labels: torch's own, with gradients; captured from torch's function and from Transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.ctc_functions import ctc_loss
from autopar.errors import CaptureError
from autopar.passes.capture import capture
from autopar.passes.ctc_capture import ctc_for_capture
from autopar.program import Program, op_name

LENGTHS = torch.tensor([8, 6, 8, 5])
# Rows of three, two, no and five labels; the last needs more frames than there are, as its labels repeat.
LABELS = torch.tensor([[3, -100, 1, 2, -1], [2, 2, -1, -1, -1], [-1, -1, -1, -1, -1], [1, 1, 1, 2, 2]])


def log_probs() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(8, 4, 6, dtype=torch.float64).log_softmax(-1).requires_grad_()


@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_padded_labels_give_torchs_loss_and_gradient(reduction: str, zero_infinity: bool) -> None:
    own, theirs = log_probs(), log_probs()

    ours = ctc_loss(own, LABELS, LENGTHS, 0, reduction, zero_infinity)
    expected = functional.ctc_loss(
        theirs, LABELS[LABELS >= 0], LENGTHS, (LABELS >= 0).sum(-1), 0, reduction, zero_infinity
    )  # labels of all sequences in one row

    torch.testing.assert_close(ours, expected)
    weights = torch.arange(1.0, 1.0 + expected.numel(), dtype=torch.float64).reshape(expected.shape)
    (slope,) = torch.autograd.grad((ours * weights).sum(), own)
    (expected_slope,) = torch.autograd.grad((expected * weights).sum(), theirs)
    torch.testing.assert_close(slope, expected_slope, equal_nan=True)


def test_infinite_losses_are_in_these_examples() -> None:
    assert torch.isinf(ctc_loss(log_probs(), LABELS, LENGTHS, 0, "none")).sum() == 1


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.head, self.loss = nn.Linear(8, 6), nn.CTCLoss(**options)

    def forward(self, x: Tensor, targets: Tensor, frames: Tensor, counts: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(self.head(x).log_softmax(-1).transpose(0, 1), targets, frames, counts)}


def inputs() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        "x": torch.randn(4, 8, 8),
        "targets": torch.randint(1, 6, (4, 3)),
        "frames": LENGTHS,
        "counts": torch.tensor([3, 1, 2, 3]),
    }


def kinds(program: Program) -> list[str]:
    return [
        op_name(node)
        for block in program.blocks.values()
        for node in block.graph.graph.nodes
        if node.op == "call_function"
    ]


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"zero_infinity": True, "blank": 5}])
def test_torchs_module_is_captured_as_one_op(options: dict[str, Any]) -> None:
    assert kinds(capture(Model(**options), inputs())).count("autopar.ctc_loss") == 1


def test_labels_in_one_row_are_refused_with_a_reason() -> None:
    given = inputs()
    row = {**given, "targets": given["targets"].reshape(-1)[:9]}

    with pytest.raises(CaptureError) as error:
        capture(Model(), row)

    assert "padded" in str(error.value)


def test_capture_leaves_torchs_function_as_it_was() -> None:
    before = functional.ctc_loss

    with ctc_for_capture():
        assert functional.ctc_loss is not before

    assert functional.ctc_loss is before
