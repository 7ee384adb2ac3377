"""Latent attention (DeepSeek's MLA) with the key and value projections absorbed, as its authors' inference code and a
user's module have it: scores against the compressed keys themselves, values projected up after the sum.

Three ways to write it compute the same: absorbed with torch's kernel, absorbed by hand, and not absorbed. Each is
captured, split on simulated ranks by heads and by sequence, and compared with the module that is not absorbed, in double
precision.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention, softmax

from autopar.mesh import Mesh
from autopar.passes.axes import name_axes
from autopar.passes.capture import capture
from autopar.passes.problem import build_problem
from autopar.problem import Op, Problem
from autopar.program import Program
from tests.runtime.attention_models import Choice, asked, by_attention, compare, gradients_of

# All different, so that tests know a loop by its size.
BATCH, SEQUENCE, VOCABULARY = 2, 16, 32
HIDDEN, HEADS, RANK, NOPE, ROPE, VALUE = 24, 4, 12, 6, 8, 10
SCALE = (NOPE + ROPE) ** -0.5


def rotated(x: Tensor) -> Tensor:
    """x [b, s, ..., r], turned by its position in the sequence."""
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / 10 ** torch.arange(x.shape[-1] // 2)
    shape = (1, x.shape[1], *[1] * (x.dim() - 3), x.shape[-1] // 2)
    sine, cosine = angles.sin().reshape(shape), angles.cos().reshape(shape)
    left, right = x.chunk(2, -1)
    return torch.cat([left * cosine - right * sine, left * sine + right * cosine], -1)


class Latent(nn.Module):
    """One layer of latent attention; `way`: "plain" (not absorbed), "kernel" or "by hand" (absorbed)."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.norm = nn.RMSNorm(HIDDEN)
        self.query = nn.Linear(HIDDEN, HEADS * (NOPE + ROPE), bias=False)
        self.down = nn.Linear(HIDDEN, RANK + ROPE, bias=False)
        self.latent_norm = nn.RMSNorm(RANK)
        self.up = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=False)
        self.out = nn.Linear(HEADS * VALUE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        x = self.norm(x)
        query = self.query(x).view(batch, seq, HEADS, NOPE + ROPE)
        plain, turned = query.split([NOPE, ROPE], -1)
        turned = rotated(turned)
        latent, key = self.down(x).split([RANK, ROPE], -1)
        latent, key = self.latent_norm(latent), rotated(key)
        if self.way == "plain":
            mixed = self._plain(plain, turned, latent, key)
        else:
            mixed = self._absorbed(plain, turned, latent, key)
        return self.out(mixed.flatten(2))

    def _plain(self, plain: Tensor, turned: Tensor, latent: Tensor, key: Tensor) -> Tensor:
        batch, seq = latent.shape[:2]
        keys, values = linear(latent, self.up.weight).view(batch, seq, HEADS, -1).split([NOPE, VALUE], -1)
        keys = torch.cat([keys, key.unsqueeze(2).expand(-1, -1, HEADS, -1)], -1)
        scores = torch.einsum("bqhd,bkhd->bhqk", torch.cat([plain, turned], -1), keys) * SCALE
        above = torch.ones(seq, seq, dtype=torch.bool).triu(1)
        weights = torch.softmax(scores.masked_fill(above, -torch.inf), -1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, values)

    def _absorbed(self, plain: Tensor, turned: Tensor, latent: Tensor, key: Tensor) -> Tensor:
        up = self.up.weight.view(HEADS, NOPE + VALUE, RANK)
        inward = torch.einsum("bshd,hdc->bshc", plain, up[:, :NOPE])
        if self.way == "kernel":
            mixed = scaled_dot_product_attention(
                torch.cat([inward, turned], -1).transpose(1, 2),
                torch.cat([latent, key], -1).unsqueeze(1),
                latent.unsqueeze(1),
                is_causal=True,
                scale=SCALE,
                enable_gqa=True,
            ).transpose(1, 2)
        else:
            scores = torch.einsum("bshc,btc->bsht", inward, latent)
            scores = (scores + torch.einsum("bshr,btr->bsht", turned, key)) * SCALE
            seq = latent.shape[1]
            mask = torch.full((seq, seq), float("-inf"), dtype=scores.dtype).triu(1)
            weights = softmax(scores + mask.unsqueeze(1), dim=-1)
            mixed = torch.einsum("bsht,btc->bshc", weights, latent)
        return torch.einsum("bshc,hdc->bshd", mixed, up[:, NOPE:])


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Latent(way) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.table(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten())}


def build(way: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Model(way).double()
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=draw)
    return model, {"input_ids": ids, "labels": ids.roll(-1, 1)}


@cache
def captured(way: str) -> tuple[Program, Problem]:
    program, axes = name_axes(capture(*build(way)))
    return program, build_problem(program, axes)


@cache
def expected() -> tuple[float, dict[str, Tensor]]:
    model, inputs = build("plain")
    loss = model(**inputs)["loss"]
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def by_einsum(choice: dict[str, str]) -> Callable[[Op], Choice | None]:
    """Every product that has heads split by them, or by the rows of the queries."""

    def of(op: Op) -> Choice | None:
        if op.kind != "aten.einsum":
            return None
        assert op.rule is not None
        sizes = op.rule.sizes
        heads = next(factor for factor, size in sizes.items() if size == HEADS)
        rows = next(factor for dim in op.rule.operands[0] for factor in dim if sizes[factor] == SEQUENCE)
        return {axis: heads if loop == "heads" else rows for axis, loop in choice.items()}

    return of


@pytest.mark.parametrize("way", ["kernel", "by hand"])
def test_absorbed_is_not_absorbed(way: str) -> None:
    """Before anything is split, so that the comparisons below are with another program."""
    model, inputs = build(way)
    loss = model(**inputs)["loss"]
    loss.backward()

    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    compare((float(loss.detach()), found), expected(), 1e-12)


CASES: list[tuple[str, str, dict[str, str]]] = [
    ("kernel", "tp=2", {"tp": "heads"}),
    ("kernel", "tp=4", {"tp": "heads"}),
    ("kernel", "cp=2", {"cp": "q"}),
    ("kernel", "cp=2", {"cp": "q~k"}),
    ("kernel", "cp=2", {"cp": "q~k~zigzag"}),
    ("kernel", "cp=2,tp=2", {"cp": "q~k", "tp": "heads"}),
    ("by hand", "tp=2", {"tp": "heads"}),
    ("by hand", "tp=4", {"tp": "heads"}),
    ("by hand", "cp=2", {"cp": "rows"}),
    ("by hand", "cp=2,tp=2", {"cp": "rows", "tp": "heads"}),
]


@pytest.mark.parametrize(("way", "mesh", "choice"), CASES)
def test_latent_attention_split(way: str, mesh: str, choice: dict[str, str]) -> None:
    on = Mesh.parse(mesh)
    program, problem = captured(way)
    rule = by_attention(choice) if way == "kernel" else by_einsum(choice)
    found = gradients_of(program, asked(problem, on, rule), on, *build(way))

    compare(found, expected(), 1e-10)


def test_the_latent_is_one_head_of_keys_for_all() -> None:
    """Captured as attention with one head of keys, which every rank has whole where heads are split."""
    (op,) = (op for op in captured("kernel")[1].ops if op.kind == "autopar.attention")
    assert op.rule is not None
    assert str(op.rule) == "b h q d!, b 1 k! d!, b 1 k! e! -> b h q e!"
    assert (op.rule.sizes["d"], op.rule.sizes["e"]) == (RANK + ROPE, RANK)
