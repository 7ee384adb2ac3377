"""Pipeline stages: what crosses a cut, and that gradients through cuts equal those of one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar import api
from autopar.errors import TrainingError, UsageError
from autopar.passes.check import check
from autopar.passes.lower import RankProgram
from autopar.passes.stages import Stage, cut_stages
from autopar.program import StateInfo
from autopar.runtime.groups import join_mesh
from autopar.runtime.pipeline import Pipeline, pipeline_mesh
from autopar.runtime.simulate import simulate
from autopar.runtime.trainer import Trainer
from tests.multimodal import multimodal
from tests.runtime.processes import run_on
from tests.tiny import tiny

MEGATRON = ("heads=tp", "ffn=tp", "vocab=tp")

# A tower and a language model (Llava), placed by the names of their parameters: one of them split, the other whole.
_TOWER, _TEXT = "model.vision_tower.encoder.layers.*", "model.language_model.layers.*"
_SPLIT = ("[_@tp, _]", "[_, _@tp]")


def _placed(tower: tuple[str, str], text: tuple[str, str]) -> tuple[str, ...]:
    return (
        *(f"{_TOWER}.self_attn.{name}_proj.weight={tower[0]}" for name in "qkv"),
        f"{_TOWER}.mlp.fc1.weight={tower[0]}",
        f"{_TOWER}.mlp.fc2.weight={tower[1]}",
        *(f"{_TEXT}.self_attn.{name}_proj.weight={text[0]}" for name in "qkv"),
        *(f"{_TEXT}.mlp.{name}_proj.weight={text[0]}" for name in ("gate", "up")),
        f"{_TEXT}.mlp.down_proj.weight={text[1]}",
    )


PLACEMENTS = {
    "llava, tower whole": _placed(("[_, _]", "[_, _]"), _SPLIT),
    "llava, tower split": _placed(_SPLIT, ("[_, _]", "[_, _]")),
}


class Towers(nn.Module):
    """Two stacks of layers, the second of which also takes what comes out of the first; inner layers add to the loss,
    and the first weight is used again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.one = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.two = nn.ModuleList(nn.Bilinear(16, 16, 16) for _ in range(4))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.table(input_ids)
        extra = x.new_zeros(())
        for layer in self.one:
            x = torch.tanh(layer(x)) + x
        y = self.table(input_ids)
        for other in self.two:
            y = y + torch.tanh(other(y, x))
            extra = extra + y.square().mean()
        logits = y @ self.table.weight.t()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.1 * extra
        return {"loss": loss}


def towers() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(0, 32, (4, 8))
    return Towers(), {"input_ids": ids, "labels": torch.randint(0, 32, (4, 8))}


def a_model(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    if kind in PLACEMENTS:
        torch.manual_seed(0)
        return multimodal("llava")
    return towers() if kind == "towers" else tiny(kind)


@cache
def lowered(kind: str, tp: int, micro_batches: int, fsdp: int = 1) -> RankProgram:
    model, batch = a_model(kind)
    fix = PLACEMENTS.get(kind, MEGATRON) if tp > 1 and kind != "towers" else ()
    return api.compile(
        model,
        f"cpu:{tp * fsdp}",
        example_inputs=batch,
        mesh=f"dp=1,fsdp={fsdp},tp={tp}",
        fix=fix,
        micro_batches=micro_batches,
    ).rank_program


def layers_of(program: RankProgram) -> int:
    return sum(bool(call.path) for call in program.calls)


# ---- the cut -------------------------------------------------------------------------------------------------------


def test_a_decoder_is_cut_between_layers() -> None:
    first, second = cut_stages(lowered("llama", 1, 1), (1, 2))
    assert [len([call for call in stage.program.calls if call.path]) for stage in (first, second)] == [1, 2]
    assert not first.program.calls[0].path  # what comes before the layers
    assert second.is_last
    assert "loss" in second.program.outputs
    assert first.receives == ()
    assert second.receives == first.sends
    assert first.sends[0].shape == (4, 16, 64)
    assert [each.gradient for each in first.sends].count(True) == 1  # not for the rotary tables
    assert "labels" in second.program.inputs
    assert "labels" not in first.program.inputs


def test_stages_are_as_even_as_can_be() -> None:
    stages = cut_stages(lowered("llama", 1, 1), 2)
    assert [sum(bool(call.path) for call in stage.program.calls) for stage in stages] == [2, 1]


def test_a_value_of_the_encoder_travels_through_the_decoder() -> None:
    program = lowered("t5", 1, 1)
    stages = cut_stages(program, (3, 2, 1))
    (made,) = (
        {each.name for each in stages[0].sends}
        & {each.name for each in stages[1].sends}
        & {value for call in stages[2].program.calls for value in call.inputs}
        & {each.name for each in stages[0].sends if each.gradient and each.shape == (4, 16, 64)}
    )
    assert made in {value for call in stages[1].program.calls for value in call.inputs}


def test_tied_weights_are_shared() -> None:
    stages = cut_stages(lowered("gpt2", 1, 1), 3)
    assert dict(stages[0].shared) == {"transformer.wte.weight": (0, 2)}
    assert dict(stages[1].shared) == {}


def test_every_stage_passes_the_checker() -> None:
    for stage in cut_stages(lowered("llama", 2, 1), (2, 1)):
        program = stage.program
        for each in stage.receives:  # the checker knows what is read, not what arrives from other ranks
            program.inputs[each.name] = each.sharding  # type: ignore[index]
        check(program)


@pytest.mark.parametrize("layers", [(2, 2), (1, 0, 2), (-1, 4), (), 0, 5])
def test_counts_that_do_not_fit(layers: Any) -> None:
    with pytest.raises(UsageError, match="3 layers cannot be cut"):
        cut_stages(lowered("llama", 1, 1), layers)


def test_a_last_stage_may_have_the_head_alone() -> None:
    *_, last = cut_stages(lowered("llama", 1, 1), (3, 0))
    assert [call.path for call in last.program.calls] == [""]


# ---- gradients -----------------------------------------------------------------------------------------------------


def outcome(
    stages: tuple[Stage, ...], program: RankProgram, state: Any, batch: Any, micro_batches: int
) -> tuple[float, float, dict[str, tuple[StateInfo, Tensor]]]:
    """On one rank: loss, norm, and the whole gradients of its stage's parameters."""
    groups = join_mesh(pipeline_mesh(program.mesh, len(stages)))
    model = Pipeline(program, stages, groups, state, micro_batches=micro_batches)
    trainer = Trainer(model, torch.optim.SGD(model.store.parameters.values()), micro_batches=micro_batches)
    loss = trainer.gradients(batch)
    norm = float(trainer.gradient_norm())
    whole = {}
    for name, entry in model.store.entries.items():
        gradient = entry.parameter.grad
        gradient = torch.zeros_like(entry.parameter) if gradient is None else gradient
        whole[name] = (entry.layout.info, model.store.whole(name, gradient))
    return loss, norm, whole


def on_ranks(
    stages: tuple[Stage, ...], program: RankProgram, state: Any, batch: Any, micro_batches: int
) -> Any:
    ranks = len(stages) * program.mesh.device_count
    return simulate(ranks, lambda rank: outcome(stages, program, state, batch, micro_batches))


def state_of(model: nn.Module, program: RankProgram) -> dict[str, Tensor]:
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return {**program.constants, **buffers, **dict(model.named_parameters(remove_duplicate=False))}


CASES = [
    ("llama", 1, 1, (2, 1)),
    ("llama", 2, 1, (1, 2)),
    ("llama", 1, 2, (1, 1, 1)),
    ("gpt2", 1, 2, (2, 1)),  # tied embeddings
    ("gpt2", 2, 1, (1, 1, 1)),
    pytest.param("t5", 1, 1, (3, 3), marks=pytest.mark.slow),
    ("t5", 1, 2, (2, 2, 2)),  # cuts inside the encoder and the decoder
    pytest.param("t5", 2, 2, (4, 2), marks=pytest.mark.slow),
    ("vit", 2, 2, (1, 2)),
    ("bert", 1, 2, (2, 1)),
    ("towers", 1, 1, (3, 3, 2)),
]


@pytest.mark.parametrize(("kind", "tp", "micro_batches", "layers"), CASES)
def test_gradients_equal_one_process(kind: str, tp: int, micro_batches: int, layers: tuple[int, ...]) -> None:
    compare(kind, tp, micro_batches, layers)


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("llava, tower whole", (2, 1, 2)),
        pytest.param("llava, tower split", (2, 3), marks=pytest.mark.slow),  # as long again, to capture
    ],
)
def test_a_tower_and_a_language_model_on_ranks_of_their_own(kind: str, layers: tuple[int, ...]) -> None:
    """Stage 0 has all of the vision tower, the others the language model, each with its own placement over tp."""
    stages = cut_stages(lowered(kind, 2, 1), layers)

    def split_layers(stage: Stage) -> set[str]:
        layouts = {name: each.sharding for name, each in stage.program.state.items() if ".layers." in name}
        return {name.split(".")[1] for name, sharding in layouts.items() if sharding.axes}

    of_layers = [{call.path.split(".")[1] for call in stage.program.calls if call.path} for stage in stages]
    assert of_layers == [{"vision_tower"}, *[{"language_model"}] * (len(layers) - 1)]
    if kind == "llava, tower whole":
        wanted = [set(), *[{"language_model"}] * (len(layers) - 1)]
    else:
        wanted = [{"vision_tower"}, *[set()] * (len(layers) - 1)]
    assert [split_layers(stage) for stage in stages] == wanted
    assert "pixel_values" in stages[0].program.inputs
    assert all("pixel_values" not in stage.program.inputs for stage in stages[1:])
    compare(kind, 2, 1, layers)


def test_with_fsdp_in_each_stage() -> None:
    compare("llama", 1, 2, (2, 1), fsdp=2)


def compare(kind: str, tp: int, micro_batches: int, layers: tuple[int, ...], fsdp: int = 1) -> None:
    model, batch = a_model(kind)
    program = lowered(kind, tp, micro_batches, fsdp)
    stages = cut_stages(program, layers)
    assert layers_of(program) == sum(layers)
    output = model(**batch)
    loss = output["loss"]
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    once = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    largest = max(float(norm) for norm in once)
    seen = set()
    for found, norm, gradients in on_ranks(stages, program, state_of(model, program), batch, micro_batches):
        assert found == pytest.approx(float(loss.detach()), rel=1e-5)
        assert norm == pytest.approx(float(torch.stack(once).norm()), rel=1e-5)
        for name, (info, gradient) in gradients.items():
            seen.add(info.source(name))
            whole = expected[info.source(name)]
            wanted = torch.zeros_like(gradient) if whole is None else info.take(whole)
            scale = max(float(wanted.norm()), 1e-4 * largest)
            assert float((gradient - wanted).norm()) / scale < 1e-5, name
    assert {name for name, _ in model.named_parameters()} <= seen | {
        name for name, gradient in expected.items() if gradient is None
    }


@pytest.mark.slow  # captures on four processes
def test_processes_agree_with_simulated_ranks() -> None:
    program = lowered("gpt2", 2, 2)
    model, batch = a_model("gpt2")
    simulated = on_ranks(cut_stages(program, (2, 1)), program, state_of(model, program), batch, 2)
    for found, (loss, norm, gradients) in zip(simulated, run_on(4, "stage_worker.py"), strict=True):
        assert found[0] == pytest.approx(loss, rel=1e-6)
        assert found[1] == pytest.approx(norm, rel=1e-6)
        assert {name: float(value.norm()) for name, (_, value) in found[2].items()} == pytest.approx(
            gradients, rel=1e-5, abs=1e-6
        )


def test_no_label_counts() -> None:
    model, batch = tiny("llama")
    program = lowered("llama", 1, 2)
    stages = cut_stages(program, (2, 1))
    ignored = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    with pytest.raises(TrainingError, match="all are ignored"):
        on_ranks(stages, program, state_of(model, program), ignored, 2)


def test_a_micro_batch_without_labels() -> None:
    """It counts for nothing, and no stage waits for it."""
    model, batch = tiny("llama")
    labels = batch["labels"].clone()
    labels[:2] = -100
    model(input_ids=batch["input_ids"], labels=labels).loss.backward()
    program = lowered("llama", 1, 2)
    stages = cut_stages(program, (2, 1))
    ranks = on_ranks(stages, program, state_of(model, program), {**batch, "labels": labels}, 2)
    expected = dict(model.named_parameters())
    for _, _, gradients in ranks:
        for name, (_, gradient) in gradients.items():
            wanted = expected[name].grad
            assert wanted is not None
            assert torch.allclose(gradient, wanted, rtol=1e-4, atol=1e-6 * float(wanted.norm())), name
