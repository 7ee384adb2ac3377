"""Programs that cannot be captured as they are: the error names the line of the program and what to change."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.errors import CaptureError
from autopar.passes.capture import capture


class Bad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Branch(Bad):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.sum() > 0:  # here
            y = y * 2
        return y.mean()


class Loop(Bad):
    def forward(self, x: Tensor) -> Tensor:
        while x.norm() < 10:  # here
            x = self.linear(x) + 1
        return x.mean()


class Number(Bad):
    def forward(self, x: Tensor) -> Tensor:
        rows = int(x.abs().max().item())  # here
        return self.linear(x)[:rows].mean()


class Places(Bad):
    def forward(self, x: Tensor) -> Tensor:
        found = (x > 0).nonzero()  # here
        return self.linear(x)[found[:, 0]].sum()


class MaskIndex(Bad):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[x > 0].mean()  # here


class Unique(Bad):
    def forward(self, x: Tensor) -> Tensor:
        values = torch.unique(x)  # here
        return self.linear(x).mean() * values.mean()


class Numpy(Bad):
    def forward(self, x: Tensor) -> Tensor:
        array = self.linear(x).detach().numpy()  # here
        return torch.from_numpy(array).mean()


class Printed(Bad):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).mean()
        print(f"{y.item():.3f}")  # here
        return y


class Asserted(Bad):
    def forward(self, x: Tensor) -> Tensor:
        assert (x.abs() < 100).all(), "too large"  # here
        return self.linear(x).mean()


class Noise(Bad):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + torch.randn_like(x)).mean()  # here


class Dropped(Bad):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.linear(x), 0.5, training=True).mean()  # here


class Hooked(Bad):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y.register_hook(lambda gradient: gradient * 2)  # here
        return y.mean()


class WrongShape(Bad):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[:, :3]).mean()  # here


CASES: dict[type[Bad], str] = {
    Branch: "torch.where",
    Loop: "outside of forward",
    Number: "outside of forward",
    Places: "mask",
    MaskIndex: "torch.where",
    Unique: "outside of forward",
    Numpy: "torch ops",
    Printed: "not to print",
    Asserted: "outside of forward",
    Noise: "pass them as an input",
    Dropped: "pass them as an input",
    Hooked: "autograd.Function",
    WrongShape: "without autopar",
}


def line_of(kind: type[Bad]) -> str:
    """file:line of the comment `# here` in a class of this file."""
    lines, first = inspect.getsourcelines(kind)
    (at,) = [number for number, line in enumerate(lines) if "# here" in line]
    return f"{__file__}:{first + at}"


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_the_error_names_the_line_and_what_to_change(kind: type[Bad]) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(kind(), {"x": torch.randn(4, 4)})

    assert line_of(kind) in str(caught.value)
    assert CASES[kind] in (caught.value.hint or "")


def test_a_hook_on_a_parameter_is_refused() -> None:
    made = Branch()
    made.linear.weight.register_hook(lambda gradient: gradient * 2)

    with pytest.raises(CaptureError, match=r"linear\.weight has a gradient hook"):
        capture(made, {"x": torch.randn(4, 4)})


def test_a_parameter_changed_in_forward_is_refused() -> None:
    class Clamped(Bad):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.linear.weight.clamp_(-1, 1)
            return self.linear(x).mean()

    with pytest.raises(CaptureError, match=r"changes the parameter linear\.weight"):
        capture(Clamped(), {"x": torch.randn(4, 4)})


def test_a_plain_tensor_of_a_model_without_storage_is_refused() -> None:
    class Scaled(Bad):
        def __init__(self) -> None:
            super().__init__()
            self.plain = torch.ones(4, device="meta")  # as all that a model makes while it is built on meta

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * self.plain).mean()

    with pytest.raises(CaptureError) as caught:
        capture(Scaled(), {"x": torch.randn(4, 4)})

    assert "register_buffer" in (caught.value.hint or "")


def test_a_function_that_is_given_a_module_is_refused() -> None:
    class Runs(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
            return module(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return gradient, None

    class Applied(Bad):
        def forward(self, x: Tensor) -> Tensor:
            return Runs.apply(x, self.linear).mean()

    with pytest.raises(CaptureError, match=r"Runs is given a Linear"):
        capture(Applied(), {"x": torch.randn(4, 4)})
