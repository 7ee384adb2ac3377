"""Packed parameters on simulated ranks: gradients and checkpoints by the model's own names, pieces split by heads and ffn."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar import api
from autopar.errors import PlanError, UsageError
from autopar.plans import Plan
from autopar.runtime.simulate import simulate
from tests.checkpoints import model_tensors, whole_tensors
from tests.packed import PACKED, packed

MESHES = ("tp=2", "fsdp=2", "dp=2,tp=2")
FIXED = {
    "gpt2": ("heads=tp", "ffn=tp"),
    "phi3": ("heads=tp", "ffn=tp"),
    "modernbert": ("heads=tp", "ffn=tp"),
    "in_proj": ("heads=tp",),
    "experts": ("ffn=tp",),
}
CASES = [(kind, mesh, ()) for kind in PACKED for mesh in MESHES] + [
    (kind, mesh, fix) for kind, fix in FIXED.items() for mesh in ("tp=2", "dp=2,tp=2", "fsdp=2,tp=2")
]


pytestmark = pytest.mark.usefixtures("captured_once")


@cache
def unsharded(kind: str) -> tuple[float, dict[str, Tensor]]:
    model, batch = packed(kind)
    loss = model(**batch).loss
    loss.backward()
    return float(loss.detach()), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def compiled(kind: str, mesh: str, fix: tuple[str, ...] = (), **options: Any) -> api.Compiled:
    model, batch = packed(kind)
    devices = 1
    for part in mesh.split(","):
        devices *= int(part.split("=")[1])
    return api.compile(model, f"cpu:{devices}", example_inputs=batch, mesh=mesh, fix=fix, **options)


def ranks(made: api.Compiled) -> int:
    return made.rank_program.mesh.device_count


@pytest.mark.parametrize(("kind", "mesh", "fix"), CASES)
def test_loss_and_every_gradient_by_the_models_names(kind: str, mesh: str, fix: tuple[str, ...]) -> None:
    made, (_, batch) = compiled(kind, mesh, fix), packed(kind)
    loss, gradients = unsharded(kind)

    def step(rank: int) -> tuple[float, float, dict[str, Tensor]]:
        run = made.on_rank()
        found = run.trainer.gradients(batch)
        norm = float(run.trainer.gradient_norm())
        return found, norm, {name: run.whole_gradient(name) for name in run.parameter_names}

    for found, norm, whole in simulate(ranks(made), step, timeout_s=120):
        assert found == pytest.approx(loss, rel=1e-5)
        assert set(gradients) <= set(whole)
        largest = max(float(gradient.norm()) for gradient in gradients.values())
        for name, gradient in gradients.items():
            scale = max(float(gradient.norm()), 1e-4 * largest)
            assert float((whole[name] - gradient).norm()) <= 1e-5 * scale, name
        assert norm == pytest.approx(
            float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm()), rel=1e-5
        )


@pytest.mark.parametrize(
    ("kind", "name", "dim"),
    [
        ("gpt2", "transformer.h.2.attn.c_attn.weight", 1),
        ("gpt2", "transformer.h.2.attn.c_attn.bias", 0),
        ("phi3", "model.layers.2.self_attn.qkv_proj.weight", 0),
        ("phi3", "model.layers.2.mlp.gate_up_proj.weight", 0),
        ("modernbert", "model.layers.1.attn.Wqkv.weight", 0),
        ("experts", "layers.1.gate_up_proj", 1),
    ],
)
def test_pieces_are_split_over_heads_and_ffn(kind: str, name: str, dim: int) -> None:
    made = compiled(kind, "tp=2", FIXED[kind])
    pieces = [layout for layout in made.rank_program.state.values() if layout.info.source("") == name]
    assert len(pieces) > 1
    assert all(layout.sharding.dims[dim] == ("tp",) for layout in pieces)


def plain_adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Every parameter decays, as torch has it; by itself a run spares norms and biases."""
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def trained(kind: str, steps: int) -> dict[str, Tensor]:
    """Parameters after steps of AdamW on the whole batch in one process."""
    model, batch = packed(kind)
    optimizer = plain_adamw(list(model.parameters()))
    for _ in range(steps):
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", ["gpt2", "phi3", "experts"])
def test_a_run_goes_on_under_another_mesh_from_whole_tensors(kind: str, tmp_path: Path) -> None:
    first, second = compiled(kind, "tp=2", FIXED[kind]), compiled(kind, "fsdp=2,tp=2")
    _, batch = packed(kind)

    def start(rank: int) -> None:
        run = first.on_rank().start(optimizer=plain_adamw)
        run.train_step(batch)
        run.save(tmp_path)

    def go_on(rank: int) -> None:
        run = second.on_rank().start(optimizer=plain_adamw)
        run.load(tmp_path)
        run.train_step(batch)
        run.save(tmp_path)

    simulate(ranks(first), start)
    model, _ = packed(kind)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors}
    for name, tensor in whole_tensors(tmp_path / "step-00000001").items():
        of, _, field = name.partition("/")[2].rpartition("/")
        if not name.startswith("model/"):
            assert tuple(tensor.shape) == (() if field == "step" else shapes[of])
        else:
            assert tuple(tensor.shape) == shapes[name.removeprefix("model/")]
    simulate(ranks(second), go_on)
    expected, found = trained(kind, 2), model_tensors(tmp_path / "step-00000002")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-5, msg=name)


def test_an_optimizer_with_other_shapes_than_the_parameters_goes_on(tmp_path: Path) -> None:
    """Adafactor's row and column factors belong to a piece, and are saved under its name."""
    made, (_, batch) = compiled("gpt2", "dp=2"), packed("gpt2")

    def run(rank: int, steps: int, folder: Path | None) -> dict[str, Tensor]:
        run = made.on_rank().start(optimizer=lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2))
        if folder is not None:
            run.load(folder)
        for _ in range(steps):
            run.train_step(batch)
        if folder is None and steps == 1:
            run.save(tmp_path)
        return {name: parameter.detach().clone() for name, parameter in run.parameters.items()}

    unbroken = simulate(2, lambda rank: run(rank, 2, None))[0]
    simulate(2, lambda rank: run(rank, 1, None))
    resumed = simulate(2, lambda rank: run(rank, 1, tmp_path))[0]
    assert any("[:, 0:64]/row_var" in name for name in whole_tensors(tmp_path / "step-00000001"))
    for name, parameter in unbroken.items():
        assert torch.equal(resumed[name], parameter), name


def test_a_constraint_names_the_parameter_or_one_piece() -> None:
    name = "transformer.h.*.attn.c_attn.weight"
    whole = compiled("gpt2", "tp=2", (f"{name}=[_, _@tp]",)).plan
    assert sum(text == "[64, 64@tp]" for key, text in whole.state.items() if "c_attn.weight" in key) == 9
    one = compiled("gpt2", "tp=2", (f"{name}[:, 0:64]=[_@tp, _]",)).plan
    split = [key for key, text in one.state.items() if "c_attn.weight" in key and text == "[64@tp, 64]"]
    assert set(split) >= {f"transformer.h.{layer}.attn.c_attn.weight[:, 0:64]" for layer in range(3)}
    assert Plan.from_json(whole.to_json()) == whole


def test_a_name_that_is_none() -> None:
    made, (_, batch) = compiled("gpt2", "tp=2"), packed("gpt2")

    def ask(rank: int) -> Tensor:
        run = made.on_rank()
        run.trainer.gradients(batch)
        return run.whole_gradient("transformer.h.0.attn.c_attn.wight")

    with pytest.raises(UsageError, match=r"no parameter .*c_attn\.wight"):
        simulate(2, ask)


def test_a_plan_of_another_capture_says_so() -> None:
    plan = compiled("gpt2", "tp=2").plan
    model = plan.model.model_copy(update={"fingerprint": "0" * 64})
    old = plan.model_copy(update={"model": model, "autopar_version": "0.0.1"})
    module, batch = packed("gpt2")
    with pytest.raises(PlanError, match=r"as autopar 0\.0\.1 captured it(.|\n)*a new plan"):
        api.compile(module, plan=old, example_inputs=batch)
