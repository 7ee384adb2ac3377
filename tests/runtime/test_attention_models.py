"""Models on simulated ranks with their attention split in every way, against Transformers' eager attention.

What the planner does not choose by itself is asked for: the choice of every attention of the model is fixed, and the
rest is placed around it. Loss and every gradient are compared, in double precision.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from autopar.cluster import load_cluster
from autopar.cost.prices import Prices
from autopar.mesh import Mesh
from autopar.passes.axes import name_axes
from autopar.passes.candidates import candidates
from autopar.passes.capture import capture
from autopar.passes.lower import lower
from autopar.passes.placement import solve
from autopar.passes.problem import build_problem
from autopar.problem import Op, Problem
from autopar.program import Program
from autopar.runtime.groups import join_mesh
from autopar.runtime.model import RankModel
from autopar.runtime.simulate import simulate
from autopar.runtime.store import Entry, ParameterStore
from autopar.runtime.trainer import Trainer

BATCH, SEQUENCE, VOCABULARY = 4, 16, 32
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "use_cache": False,
}


def _causal(name: str, **sizes: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **sizes})
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return model


def _t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=VOCABULARY,
            decoder_start_token_id=0, use_cache=False,
        )
    )  # fmt: skip


MODELS = {
    "llama": lambda: _causal("Llama"),
    "window": lambda: _causal("Mistral", sliding_window=5),
    "softcap": lambda: _causal("Gemma2", head_dim=8, sliding_window=5, attn_logit_softcapping=2.0),
    "sinks": lambda: _causal("GraniteSWA", sliding_window=5),
    "cross": _t5,
}


def build(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = MODELS[kind]().eval().double()
    for parameter in model.parameters():  # sinks are made without values
        if not torch.isfinite(parameter).all() or float(parameter.detach().abs().max()) > 10:
            nn.init.normal_(parameter)
    model.set_attn_implementation("eager")
    ids = torch.randint(1, VOCABULARY, (BATCH, SEQUENCE))
    labels = ids.clone()
    labels[0, :9] = -100
    return model, {"input_ids": ids, "labels": labels}


@cache
def captured(kind: str) -> tuple[Program, Problem]:
    program, axes = name_axes(capture(*build(kind)))
    return program, build_problem(program, axes)


@cache
def expected(kind: str) -> tuple[float, dict[str, Tensor]]:
    model, inputs = build(kind)
    loss = model(**inputs).loss
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def fixed(problem: Problem, mesh: Mesh, choice: dict[str, str]) -> Problem:
    """Every attention split by `choice`, `heads` standing for its heads with their keys."""

    def of(op: Op) -> dict[str, str | None]:
        assert op.rule is not None
        heads = "kv" if "kv" in op.rule.sizes else "h"
        return {axis: heads if factor == "heads" else factor for axis, factor in choice.items()}

    attentions = [op for op in problem.ops if op.kind == "autopar.attention"]
    assert attentions
    asked = replace(problem, fixed={**problem.fixed, **{op.name: of(op) for op in attentions}})
    assert all(candidates(op, asked, mesh) for op in attentions)
    return asked


def gradients(kind: str, mesh: Mesh, choice: dict[str, str]) -> tuple[float, dict[str, Tensor]]:
    program, problem = captured(kind)
    problem = fixed(problem, mesh, choice)
    cluster = load_cluster(f"cpu:{mesh.device_count}")
    solution = solve(problem, mesh, Prices.of(cluster, mesh, "fp32", problem))
    ranks = lower(program, problem, solution, mesh)
    model, inputs = build(kind)
    state = {**ranks.constants, **dict(model.named_buffers(remove_duplicate=False))}
    state.update(model.named_parameters(remove_duplicate=False))

    def on_rank(_: int) -> tuple[float, dict[str, Tensor]]:
        groups = join_mesh(mesh)
        store = ParameterStore(ranks, groups, {key: value.detach() for key, value in state.items()})
        trainer = Trainer(RankModel(ranks, groups, store), torch.optim.SGD(store.parameters.values()))
        loss = trainer.gradients(inputs)

        def local(entry: Entry) -> Tensor:
            found = entry.parameter.grad
            return torch.zeros_like(entry.parameter) if found is None else found

        return loss, {key: store.whole_parameter(key, local) for key in store.parts}

    return simulate(mesh.device_count, on_rank)[0]


CHOICES: list[tuple[str, dict[str, str]]] = [
    ("cp=2", {"cp": "q~k"}),
    ("cp=2", {"cp": "q"}),
    ("cp=2", {"cp": "heads"}),
    ("tp=4", {"tp": "q~k"}),
    ("tp=2", {"tp": "kv.rep"}),
    ("tp=4", {"tp": "kv.rep"}),
    ("cp=2,tp=2", {"cp": "q~k", "tp": "heads"}),
    ("cp=2,tp=2", {"cp": "q~k", "tp": "kv.rep"}),
    ("dp=2,cp=2", {"dp": "b", "cp": "q~k"}),
]
CASES = [
    pytest.param(kind, mesh, choice, id=f"{kind}: {mesh}: {choice}")
    for kind in MODELS
    for mesh, choice in CHOICES
    if kind != "cross" or "kv.rep" not in choice.values()
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("kind", "mesh", "choice"), CASES)
def test_attention_split_in_a_model(kind: str, mesh: str, choice: dict[str, str]) -> None:
    loss, found = gradients(kind, Mesh.parse(mesh), choice)

    wanted_loss, wanted = expected(kind)
    # Eager attention takes its softmax in float32.
    assert abs(loss / wanted_loss - 1) < 1e-6
    largest = max(float(gradient.norm()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        error = float((found[name] - gradient).norm()) / max(float(gradient.norm()), 1e-3 * largest)
        assert error < 1e-5, name
