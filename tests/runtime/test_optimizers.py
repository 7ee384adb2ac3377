"""Optimizers by name on shares, against torch's own on whole parameters of the unsharded model."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.compiled import Compiled
from autopar.errors import UsageError
from autopar.runtime.nonfinite import explain
from autopar.runtime.optimizers import (
    ELEMENTWISE,
    GroupSettings,
    OptimizerSettings,
    make_optimizer,
    parse_group,
    parse_options,
)
from autopar.runtime.pipeline import Pipeline
from autopar.runtime.simulate import simulate
from tests.runtime import test_nonfinite  # noqa: F401 (the case `root`)
from tests.runtime.composition import compile_layout, model_and_batch
from tests.runtime.processes import run_on
from tests.runtime.training_case import Made, case, digest, made, on_ranks, whole

STEPS = 3
MESHES = ("tp=2", "fsdp=2", "dp=2", "fsdp=2,tp=2")


def gradients(parameters: Iterable[tuple[str, Tensor]], step: int) -> dict[str, Tensor]:
    """Whole gradients, the same wherever they are made."""
    return {
        name: torch.randn(
            value.shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
        )
        for name, value in parameters
    }


def stepped(run: Made, settings: OptimizerSettings) -> dict[str, Tensor]:
    """Whole parameters after STEPS steps on shares of given gradients."""
    trainer, program = run.start(), run.rank_program
    store = trainer.store
    optimizer = make_optimizer(settings, store, program)
    for step in range(STEPS):
        given = gradients(run.state.items(), step)
        for name, entry in store.entries.items():
            info = entry.layout.info
            entry.parameter.grad = store.share(name, info.take(given[info.source(name)])).clone()
        optimizer.step()
    return whole(trainer)


def expected(kind: str, optimizers: Any) -> dict[str, Tensor]:
    """The same by torch's optimizers over the unsharded model's named parameters."""
    model, _ = case(kind)
    made = optimizers(dict(model.named_parameters()))
    for step in range(STEPS):
        given = gradients(model.named_parameters(), step)
        for name, parameter in model.named_parameters():
            parameter.grad = given[name]
        for optimizer in made:
            optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def hidden(name: str, parameter: Tensor) -> bool:
    return parameter.dim() == 2 and "embed" not in name and "lm_head" not in name


def muon_and_adamw(parameters: dict[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
    inner = [value for name, value in parameters.items() if hidden(name, value)]
    tables = [value for name, value in parameters.items() if value.dim() == 2 and not hidden(name, value)]
    vectors = [value for value in parameters.values() if value.dim() == 1]
    return [
        torch.optim.Muon(inner, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(tables, lr=1e-2, weight_decay=0.1, fused=True),
        torch.optim.AdamW(vectors, lr=1e-2, weight_decay=0.0, fused=True),
    ]


@pytest.mark.parametrize("mesh", MESHES)
def test_muon_is_torchs_bit_for_bit(mesh: str) -> None:
    settings = OptimizerSettings("muon", lr=1e-2, weight_decay=0.1)
    want = expected("llama", muon_and_adamw)
    for found in on_ranks(made("llama", mesh), lambda run: stepped(run, settings)):
        for name, value in want.items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("mesh", ["tp=2", "fsdp=2"])
def test_muon_of_a_packed_parameter_is_that_of_separate_weights(mesh: str) -> None:
    name, sizes = "model.layers.1.self_attn.qkv_proj.weight", (64, 32, 32)

    def separate(parameters: dict[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
        pieces = [nn.Parameter(piece.clone()) for piece in parameters[name].detach().split(sizes)]
        inner = torch.optim.Muon(pieces, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")

        class Split(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                gradient = parameters[name].grad
                assert gradient is not None
                for piece, part in zip(pieces, gradient.split(sizes), strict=True):
                    piece.grad = part.contiguous()
                inner.step()
                parameters[name].data = torch.cat([piece.detach() for piece in pieces])

        return [Split([parameters[name]], lr=0.0)]

    settings = OptimizerSettings("muon", lr=1e-2, weight_decay=0.1)
    want = expected("phi3", separate)
    for found in on_ranks(made("phi3", mesh), lambda run: stepped(run, settings)):
        assert torch.equal(found[name], want[name])


@pytest.mark.parametrize("mesh", MESHES)
def test_adafactor_is_torchs(mesh: str) -> None:
    settings = OptimizerSettings("adafactor", lr=1e-2, weight_decay=0.1, decay="all")
    want = expected("llama", lambda named: [torch.optim.Adafactor(named.values(), lr=1e-2, weight_decay=0.1)])
    for found in on_ranks(made("llama", mesh), lambda run: stepped(run, settings)):
        for name, value in want.items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_elementwise_optimizers_are_torchs(kind: str) -> None:
    settings = OptimizerSettings(kind, lr=1e-3)
    maker = ELEMENTWISE[kind]
    # AdamW and NAdam differ from this in their default weight decay, and some have none.
    given = set(inspect.signature(maker).parameters)
    options = {key: value for key, value in {"weight_decay": 0.0, "fused": True}.items() if key in given}
    want = expected("llama", lambda named: [maker(named.values(), lr=1e-3, **options)])
    for found in on_ranks(made("llama", "fsdp=2,tp=2"), lambda run: stepped(run, settings)):
        for name, value in want.items():
            assert torch.equal(found[name], value), name


def test_states_have_the_shapes_that_checkpoints_tell_apart() -> None:
    """A state of the share's shape is a share; others are the same on all ranks."""

    def states(run: Made) -> dict[str, dict[str, Tensor]]:
        store = run.start().store
        optimizer = make_optimizer(OptimizerSettings("adafactor"), store, run.rank_program)
        for entry in store.entries.values():
            entry.parameter.grad = torch.ones_like(entry.parameter)
        optimizer.step()
        found: dict[str, dict[str, Tensor]] = {}
        for name, entry in store.entries.items():
            for key, value in optimizer.state[entry.parameter].items():
                if value.shape != entry.parameter.shape:
                    found.setdefault(name, {})[key] = value
        return found

    first, *others = on_ranks(made("llama", "fsdp=2,tp=2"), states)
    assert first["model.layers.0.mlp.up_proj.weight"].keys() == {"step", "row_var", "col_var"}
    for other in others:
        assert first.keys() == other.keys()
        for name, values in first.items():
            assert all(torch.equal(value, other[name][key]) for key, value in values.items()), name


def one_rank(settings: OptimizerSettings, *, known: Iterable[str] = ()) -> Mapping[str, dict[str, Any]]:
    """The group of every parameter."""
    run = made("llama", "dp=1")
    store = run.start().store
    optimizer = make_optimizer(settings, store, run.rank_program, known=known)
    names = {parameter: name for name, parameter in store.parameters.items()}
    return {names[parameter]: group for group in optimizer.param_groups for parameter in group["params"]}


def test_weight_decay_is_not_of_norms_unless_asked() -> None:
    norm, matrix = "model.layers.0.input_layernorm.weight", "model.layers.0.mlp.up_proj.weight"
    groups = one_rank(OptimizerSettings(weight_decay=0.1))
    assert (groups[norm]["weight_decay"], groups[matrix]["weight_decay"]) == (0.0, 0.1)
    everything = one_rank(OptimizerSettings(weight_decay=0.1, decay="all"))
    assert everything[norm]["weight_decay"] == 0.1


def test_settings_by_pattern_and_the_later_wins() -> None:
    groups = one_rank(
        OptimizerSettings(
            "muon",
            lr=1e-3,
            options={"momentum": 0.9},
            groups=(
                parse_group("*.mlp.* lr=1e-4"),
                parse_group("*.down_proj.weight lr=1e-5,weight_decay=0.3"),
                parse_group("model.layers.0.self_attn.* optimizer=adamw,betas=(0.9,0.95)"),
            ),
        )
    )
    assert groups["model.layers.1.mlp.up_proj.weight"]["lr"] == 1e-4
    assert groups["model.layers.1.mlp.up_proj.weight"]["momentum"] == 0.9
    assert groups["model.layers.1.mlp.down_proj.weight"]["lr"] == 1e-5
    assert groups["model.layers.1.mlp.down_proj.weight"]["weight_decay"] == 0.3
    assert groups["model.layers.0.self_attn.q_proj.weight"]["betas"] == (0.9, 0.95)
    assert "momentum" in groups["model.layers.1.self_attn.q_proj.weight"]
    assert "betas" in groups["lm_head.weight"]  # the head takes AdamW under muon


def test_brackets_of_a_piece_are_themselves() -> None:
    piece = "model.layers.0.self_attn.qkv_proj.weight[0:64]"
    run = made("phi3", "tp=2")

    def rates(one: Made) -> tuple[float, float]:
        store = one.start().store
        settings = OptimizerSettings(groups=(GroupSettings(piece, {"lr": 1e-5}),))
        groups = make_optimizer(settings, store, one.rank_program).param_groups
        of = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
        other = piece.replace("[0:64]", "[64:96]")
        return of[id(store.parameters[piece])], of[id(store.parameters[other])]

    assert on_ranks(run, rates) == [(1e-5, 3e-4)] * 2


def test_a_pattern_may_be_meant_for_another_stage() -> None:
    settings = OptimizerSettings(groups=(parse_group("model.layers.9.* lr=1e-4"),))
    with pytest.raises(UsageError, match="no trainable parameter"):
        one_rank(settings)
    one_rank(settings, known=["model.layers.9.mlp.up_proj.weight"])


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (OptimizerSettings("sgd", options={"betas": (0.9, 0.9)}), "sgd has no setting 'betas'"),
        (OptimizerSettings("rprop", weight_decay=0.1), "rprop has no setting 'weight_decay'"),
        (OptimizerSettings("adamw", lr=-1.0), "refuses its settings"),
        (OptimizerSettings("muon", groups=(parse_group("*.mlp.* momentum=-1.0"),)), "muon refuses"),
        (OptimizerSettings("adamw", options={"betas": "many"}), "refuses its settings"),
    ],
)
def test_bad_settings(settings: OptimizerSettings, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        one_rank(settings)


@pytest.mark.parametrize(
    ("name", "what"), [("adam-w", "no optimizer 'adam-w'"), ("LBFGS", "'LBFGS' on shares")]
)
def test_unknown_optimizers(name: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        OptimizerSettings(name)


def test_a_stage_with_nothing_to_train() -> None:
    run = made("llama", "dp=1")
    store = run.start().store
    for parameter in store.parameters.values():
        parameter.requires_grad_(False)
    make_optimizer(OptimizerSettings("muon"), store, run.rank_program).step()


@pytest.mark.parametrize("text", ["lr=1e-4", "*.bias lr", "*.bias =1"])
def test_bad_group_texts(text: str) -> None:
    with pytest.raises(UsageError):
        parse_group(text)


def test_options_are_values_of_python_or_words() -> None:
    assert parse_options(["lr=1e-4", "betas=(0.9, 0.95)", "adjust_lr_fn=original", "nesterov=False"]) == {
        "lr": 1e-4,
        "betas": (0.9, 0.95),
        "adjust_lr_fn": "original",
        "nesterov": False,
    }


def test_a_saved_state_of_several_optimizers_is_one() -> None:
    run = made("llama", "dp=1")
    store = run.start().store
    first = make_optimizer(OptimizerSettings("muon"), store, run.rank_program)
    for entry in store.entries.values():
        entry.parameter.grad = torch.ones_like(entry.parameter)
    first.step()
    second = make_optimizer(OptimizerSettings("muon"), store, run.rank_program)
    second.load_state_dict(first.state_dict())
    before = {name: parameter.detach().clone() for name, parameter in store.parameters.items()}
    first.step()
    after = {name: parameter.detach().clone() for name, parameter in store.parameters.items()}
    with torch.no_grad():
        for name, parameter in store.parameters.items():
            parameter.copy_(before[name])
    second.step()
    assert all(torch.equal(parameter, after[name]) for name, parameter in store.parameters.items())


@pytest.mark.slow
def test_processes_do_what_simulated_ranks_do() -> None:
    """Muon hands matrices around in bfloat16, and findings as bytes: gloo takes both."""
    first, second = run_on(2, "optimizer_worker.py", "dp=2")
    assert first == second
    settings = OptimizerSettings("muon", lr=1e-2, weight_decay=0.1)
    simulated, _ = on_ranks(made("root", "dp=2"), lambda run: digest(stepped(run, settings)))
    assert first["muon"] == simulated
    assert "aten.linear" in first["cause"]
    assert "rank 1" in first["cause"]


def over_stages(kind: str, compiled: Compiled) -> Compiled:
    """On a rank of a pipeline: its run, with an optimizer over the state of its stages."""
    run = compiled.on_rank().start()
    assert isinstance(run.trainer.model, Pipeline)
    programs = [stage.stage.program for stage in run.trainer.model.models]
    settings = OptimizerSettings(kind, lr=1e-2, weight_decay=0.1)
    run.optimizer = make_optimizer(settings, run.trainer.store, *programs)
    return run


def test_muon_over_pipeline_stages_and_zero() -> None:
    """Losses of three steps as torch's Muon gives on the whole model; and the fault of one stage is named on all."""
    model, batch = model_and_batch("llama")
    optimizers = muon_and_adamw(dict(model.named_parameters()))
    expected = []
    for _ in range(3):
        loss = model(**batch).loss
        expected.append(float(loss.detach()))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    run, _ = compile_layout("llama", "dp=2,pp=2,schedule=1f1b,zero=1,mbs=2")

    def work(rank: int) -> tuple[list[float], str]:
        trainer = over_stages("muon", run).trainer
        losses = [trainer.step(batch).loss for _ in range(3)]
        spoiled = trainer.store.parameters.get("model.layers.2.mlp.up_proj.weight")
        if spoiled is not None:
            spoiled.data.fill_(3e38)
        trainer.reduction.publish()
        size = next(iter(batch.values())).shape[0] // trainer.micro_batches
        parts = [
            {name: value[number * size : (number + 1) * size] for name, value in batch.items()}
            for number in range(trainer.micro_batches)
        ]
        return losses, explain(trainer.model, parts)

    results = simulate(4, work, timeout_s=120)
    for losses, text in results:
        assert losses == pytest.approx(
            expected, rel=1e-3
        )  # bfloat16 inside; the gradients differ by rounding
        assert text == results[0][1]
        assert "layer model.layers.2, rank 2" in text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["muon", "adafactor"])
def test_a_run_goes_on_under_another_mesh(kind: str, tmp_path: Path) -> None:
    first, batch = compile_layout("llama", "dp=2,pp=2,schedule=1f1b,zero=1,mbs=2")
    second, _ = compile_layout("llama", "dp=2,tp=2,pp=2,schedule=1f1b,zero=1,mbs=1")

    def start(rank: int) -> list[float]:
        run = over_stages(kind, first)
        for _ in range(2):
            run.train_step(batch)
        run.save(tmp_path)
        return [run.train_step(batch).loss for _ in range(2)]

    def go_on(rank: int) -> list[float]:
        run = over_stages(kind, second)
        run.load(tmp_path)
        return [run.train_step(batch).loss for _ in range(2)]

    unbroken, resumed = simulate(4, start)[0], simulate(8, go_on)[0]
    assert resumed == pytest.approx(unbroken, rel=1e-4)
