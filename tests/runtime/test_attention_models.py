"""Models on simulated ranks with their attention split in every way, against Transformers' eager attention.

What the planner does not choose by itself is asked for: the choice of every attention of the model is fixed, and the
rest is placed around it. Loss and every gradient are compared, in double precision.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from autopar.mesh import Mesh
from autopar.passes.axes import name_axes
from autopar.passes.capture import capture
from autopar.passes.problem import build_problem
from autopar.problem import Problem
from autopar.program import Program
from tests.runtime.attention_models import asked, by_attention, compare, gradients_of

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


def gradients(kind: str, mesh: Mesh, choice: dict[str, str]) -> tuple[float, dict[str, Tensor]]:
    program, problem = captured(kind)
    return gradients_of(program, asked(problem, mesh, by_attention(choice)), mesh, *build(kind))


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
    ("cp=4", {"cp": "q~k~zigzag"}),
    ("cp=2,tp=2", {"cp": "q~k~zigzag", "tp": "kv.rep"}),
]
CASES = [
    pytest.param(kind, mesh, choice, id=f"{kind}: {mesh}: {choice}")
    for kind in MODELS
    for mesh, choice in CHOICES
    if (kind != "cross" or "kv.rep" not in choice.values())
    and (kind == "llama" or "q~k~zigzag" not in choice.values())  # of causal attention alone
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("kind", "mesh", "choice"), CASES)
def test_attention_split_in_a_model(kind: str, mesh: str, choice: dict[str, str]) -> None:
    # Eager attention takes its softmax in float32.
    compare(gradients(kind, Mesh.parse(mesh), choice), expected(kind), 1e-5)
