"""`verify`: a right sharding passes, every kind of wrong one fails and is named, and a plan is carried over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar import api, collectives
from autopar.cli import app
from autopar.errors import PlanError, UsageError
from autopar.runtime.gradients import Gradients
from autopar.verify import verify
from tests.tiny import tiny

MEGATRON = ("heads=tp", "ffn=tp", "vocab=tp")


@pytest.fixture(scope="module")
def large_plan() -> Any:
    """For a model that no test could hold."""
    return api.plan(
        "llama-3.1-8b", "h100:2x8", batch=64, seq=4096, mesh="dp=2,tp=8", fix=MEGATRON, space="runtime"
    )


def test_a_published_model_passes() -> None:
    found = verify("llama-3.1-8b", mesh="dp=2,tp=2", fix=MEGATRON)
    assert found.passed, found
    assert found.mesh == "dp=2,fsdp=1,tp=2"
    assert found.next_loss < 1e-5
    assert len(found.gradients) == 39
    assert "shrunken copy" in found.what
    assert "passed: every error" in found.page()


def test_a_plan_is_carried_over(large_plan: Any) -> None:
    found = verify("llama-3.1-8b", plan=large_plan)
    assert found.passed, found
    assert found.mesh == "dp=2,fsdp=1,tp=2"
    split = {gradient.name: gradient.sharding for gradient in found.gradients}
    assert "@tp" in split["model.layers.0.self_attn.q_proj.weight"]
    assert split["model.layers.0.mlp.down_proj.weight"].endswith("@tp]")
    assert split["lm_head.weight"].startswith("[128@tp")
    assert not any("is whole" in note or "namesake" in note for note in found.notes), found.notes


def test_a_plan_of_another_model(large_plan: Any) -> None:
    model, batch = tiny("convnet")
    with pytest.raises(PlanError, match="for another model"):
        verify(model, plan=large_plan, example_inputs=batch)


def test_buffers_are_compared() -> None:
    model, batch = tiny("convnet")
    found = verify(model, "cpu:2", mesh="dp=2", example_inputs=batch)
    assert found.passed, found
    assert found.gradient < 1e-9  # float64 stays float64


def _not_reduced(ctx: Any, tensor: torch.Tensor, group: str, grad_sums: bool) -> torch.Tensor:
    ctx.group, ctx.grad_sums = group, grad_sums
    return tensor.clone()


BAD = {
    "a gradient that is not summed": (
        collectives._Copy,
        "backward",
        staticmethod(lambda ctx, gradient: (gradient, None)),
    ),
    "a loss summed wrongly": (
        collectives._AllReduce,
        "forward",
        staticmethod(_not_reduced),
    ),
    "gradients of data ranks not summed": (
        Gradients,
        "finish",
        lambda gradients, divide_by=1.0: None,
    ),
    "a norm of the own piece": (
        Gradients,
        "norm",
        lambda gradients: torch.stack(
            [p.grad.norm() for p in gradients.store.parameters.values() if p.grad is not None]
        ).norm(),
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny("llama")
    monkeypatch.setattr(*BAD[fault])
    found = verify(model, mesh="dp=2,tp=2", fix=MEGATRON, example_inputs=batch)
    assert not found.passed
    assert "WRONG" in found.page()
    assert "FAILED" in found.page()
    if "gradient" in fault:
        assert found.loss < 1e-5
        assert found.gradient > 1e-3
        assert found.worst in dict(model.named_parameters())


def test_usage() -> None:
    with pytest.raises(UsageError, match="a plan has its mesh"):
        verify("llama-3.1-8b", plan="plan.json", mesh="tp=2")
    with pytest.raises(UsageError, match="too many to simulate"):
        verify("llama-3.1-8b", "cpu:64")
    with pytest.raises(UsageError, match="parameters; the check holds them"):
        verify("llama-3.1-8b", shrink=False)


MODULE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, labels):
        loss = nn.functional.mse_loss(self.two(torch.relu(self.one(x))), labels)
        return {"loss": loss}

def make():
    return Model(), {"x": torch.randn(8, 16), "labels": torch.randn(8, 16)}
"""


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A function of the user's own file: random weights anew at each call, and yet one model is compared."""
    file = tmp_path / "mine.py"
    file.write_text(MODULE)
    words = ["verify", f"{file}:make", "--mesh", "dp=2,tp=2", "-q", "--json"]
    assert app(words, standalone_mode=False) in (None, 0)
    assert json.loads(capsys.readouterr().out)["passed"] is True
    monkeypatch.setattr(*BAD["gradients of data ranks not summed"])
    assert app(words[:-1], standalone_mode=False) == 9
    assert "each axis alone" in capsys.readouterr().out
