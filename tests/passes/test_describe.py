"""Describe: the Workload of captured models against the modules, the Problem, and the same model's config numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.utils import ModelOutput

from autopar.cluster import load_cluster
from autopar.cost.compute import model_flops
from autopar.cost.prices import Prices
from autopar.mesh import Mesh
from autopar.passes.axes import name_axes
from autopar.passes.capture import capture
from autopar.passes.describe import describe
from autopar.passes.placement import solve
from autopar.passes.problem import build_problem
from autopar.problem import Problem
from autopar.program import Program
from autopar.transformer_shape import TransformerShape
from autopar.workload import Attention, Layer, Matmul, Stream, Workload
from tests.tiny import MODELS, OTHERS, tiny

BATCH, SEQ, VOCAB, H, FFN, HEADS = 2, 32, 96, 64, 144, 4
TINY: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": H, "intermediate_size": FFN, "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
}  # fmt: skip
CAUSAL = {**TINY, "use_cache": False}
GPT2 = {
    "n_embd": H,
    "n_layer": 2,
    "n_head": HEADS,
    "n_inner": FFN,
    "vocab_size": VOCAB,
    "n_positions": 48,
    "use_cache": False,
}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "num_hidden_layers": 3, "num_key_value_heads": HEADS,
}  # fmt: skip


def shape(**numbers: Any) -> TransformerShape:
    base: dict[str, Any] = {
        "name": "tiny",
        "layers": 2,
        "hidden": H,
        "heads": HEADS,
        "ffn": FFN,
        "vocab": VOCAB,
    }
    return TransformerShape(**(base | numbers))


# The published models at a size that traces in a second: their config class, and the numbers of TransformerShape.
PUBLISHED: dict[str, tuple[Callable[[], nn.Module], TransformerShape]] = {
    "llama-3.1-8b": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**CAUSAL, num_key_value_heads=2)),
        shape(kv_heads=2),
    ),
    "gpt3-175b": (
        lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, bos_token_id=0, eos_token_id=0)),
        shape(norm="layer", gated=False, bias=True, tied=True, rotary=False, positions=48),
    ),
    "bert-large": (
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(**TINY, max_position_embeddings=48)),
        shape(norm="layer", gated=False, bias=True, tied=True, rotary=False, positions=48, causal=False),
    ),
    "mixtral-8x7b": (
        lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**CAUSAL, **EXPERTS, num_key_value_heads=2)
        ),
        shape(kv_heads=2, experts=8, topk=2),
    ),
    "qwen3-235b-a22b": (
        lambda: transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(
                **CAUSAL, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
                moe_intermediate_size=48, norm_topk_prob=True,
            )
        ),
        shape(kv_heads=2, head_dim=32, experts=8, topk=2, expert_ffn=48),
    ),
    "deepseek-v3": (
        lambda: transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**{**CAUSAL, **LATENT})),
        shape(
            layers=3, experts=8, topk=2, expert_ffn=48, shared_ffn=48, dense_layers=1, q_lora=24, kv_lora=20,
            rope_dim=8, head_dim=16, v_dim=16,
        ),
    ),
}  # fmt: skip

# Parameters that the models have and TransformerShape has no number for.
MORE_PARAMETERS = {
    # token types, the norm after the embedding; the head's own dense layer, norm and bias; no norm after the layers
    "bert-large": 2 * H + 2 * H + (H * H + H) + 2 * H + VOCAB - 2 * H,
    "qwen3-235b-a22b": 2 * 2 * 32,  # norms of q and k, per layer
    "deepseek-v3": 3 * (24 + 20),  # norms of the latents, per layer
}

# Bytes per token that Transformers' eager graph keeps and fused kernels do not, by layer in order.
LATENT_MORE = 2 * (
    HEADS * 16  # v is a view of the product that makes the keys' part too, and keeps all of it
    + 8  # the rotary part of the key before its rotation
)
MORE_SAVED = {
    "qwen3-235b-a22b": [2 * (HEADS * 32 + 2 * 32)],  # q and k before their norm
    "deepseek-v3": [LATENT_MORE, LATENT_MORE + 4 * H],  # the router takes its input in fp32
}
# What one of the two keeps in its own way: router scores (a few times the number of experts), and Megatron's second
# form of attention's output (sequence outside), which a batch-first graph has no need of.
ASIDE = ("router", "attention output, transposed")


def prepared(
    model: nn.Module, inputs: dict[str, Tensor], dtype: torch.dtype | None = None
) -> tuple[Program, Problem]:
    program, axes = name_axes(capture(model, inputs, dtype=dtype))
    return program, build_problem(program, axes)


@cache
def published(name: str) -> tuple[Program, Problem, Workload]:
    with torch.device("meta"):
        model = PUBLISHED[name][0]()
        if getattr(model, "_can_set_experts_implementation", bool)():
            model.set_experts_implementation("grouped_mm")  # type: ignore[operator]
        model.eval()
        ids = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    program, problem = prepared(model, {"input_ids": ids, "labels": ids}, torch.bfloat16)
    return program, problem, describe(program, problem)


@cache
def small(kind: str) -> tuple[int, Program, Problem, Workload]:
    model, inputs = tiny(kind)
    program, problem = prepared(model, inputs)
    return sum(item.numel() for item in model.parameters()), program, problem, describe(program, problem)


def saved_bytes(layer: Layer, seq: int) -> float:
    return sum(
        s.elements * s.item * s.share * (seq if s.square else 1) for s in layer.saved if s.name not in ASIDE
    )


def router_bytes(layer: Layer) -> float:
    """What is about as wide as the number of experts: the router's scores and the like."""
    return sum(s.elements * s.item for s in layer.saved if s.name.startswith("mlp.gate") and s.elements < H)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_config_and_capture_are_one_number(name: str) -> None:
    found, numbers = published(name)[-1], PUBLISHED[name][1].workload(SEQ)

    assert found.parameters == numbers.parameters + MORE_PARAMETERS.get(name, 0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_flops_of_config_and_capture_are_one_number(name: str) -> None:
    found, numbers = published(name)[-1], PUBLISHED[name][1].workload(SEQ)
    head_dense = 6 * H * H if name == "bert-large" else 0

    assert found.flops_per_token() == pytest.approx(numbers.flops_per_token() + head_dense, rel=1e-9)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_layer_keeps_what_fused_kernels_keep_and_what_is_listed_above(name: str) -> None:
    found, numbers = published(name)[-1], PUBLISHED[name][1].workload(SEQ)
    more = MORE_SAVED.get(name, [0.0] * len(numbers.layers))

    for (layer, _), (other, _), extra in zip(found.layers, numbers.layers, more, strict=False):
        kept = saved_bytes(layer, SEQ) - router_bytes(layer)
        assert kept == pytest.approx(saved_bytes(other, SEQ) + extra, rel=0.01)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt3-175b", "bert-large"])
def test_dense_layers_keep_exactly_what_fused_kernels_keep(name: str) -> None:
    found, numbers = published(name)[-1], PUBLISHED[name][1].workload(SEQ)

    assert saved_bytes(found.layers[0][0], SEQ) == saved_bytes(numbers.layers[0][0], SEQ)


@pytest.mark.parametrize("name", PUBLISHED)
def test_products_split_as_megatron_splits_them(name: str) -> None:
    """Weights by split, per layer: packed or not, with or without latents."""
    found, numbers = published(name)[-1], PUBLISHED[name][1].workload(SEQ)

    def by_split(layer: Layer) -> dict[str, float]:
        sums = dict.fromkeys(("column", "row", "none"), 0.0)
        for op in layer.ops:
            if isinstance(op, Matmul):
                sums[op.split] += op.k * op.n * max(op.experts, 1)
        return sums

    assert [by_split(layer) for layer, _ in found.layers[: len(numbers.layers)]] == [
        by_split(layer) for layer, _ in numbers.layers
    ]
    assert [layer.regions for layer, _ in found.layers[: len(numbers.layers)]] == [2] * len(numbers.layers)


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_of_the_whole_model(name: str) -> None:
    found, numbers = published(name)[-1], PUBLISHED[name][1].workload(SEQ)

    def sizes(workload: Workload) -> tuple[object, ...]:
        return (
            workload.hidden, workload.vocab, workload.head, workload.tied, workload.heads, workload.kv_heads,
            workload.experts,
        )  # fmt: skip

    assert sizes(found) == sizes(numbers)


@pytest.mark.parametrize("kind", [*MODELS, *OTHERS])
def test_every_parameter_is_counted_once(kind: str) -> None:
    parameters, _, _, workload = small(kind)

    assert workload.parameters == parameters


@pytest.mark.parametrize("kind", [*MODELS, *OTHERS])
def test_every_product_is_counted_once(kind: str) -> None:
    _, _, problem, workload = small(kind)

    total = workload.flops_per_token() * workload.seq * problem.batch
    assert total == pytest.approx(3 * model_flops(problem), rel=1e-6)


@pytest.mark.parametrize("name", PUBLISHED)
def test_flops_are_those_of_the_problem(name: str) -> None:
    _, problem, workload = published(name)

    assert workload.flops_per_token() * SEQ * BATCH == pytest.approx(3 * model_flops(problem), rel=1e-6)


@pytest.mark.parametrize("name", PUBLISHED)
def test_streams_move_about_what_fused_kernels_move(name: str) -> None:
    found, numbers = published(name)[-1], PUBLISHED[name][1].workload(SEQ)

    def moved(layer: Layer) -> float:
        streams = [op for op in layer.ops if isinstance(op, Stream) and op.kind != "router"]
        return sum((op.forward + op.backward) * op.item * op.share for op in streams)

    for (layer, _), (other, _) in zip(found.layers, numbers.layers, strict=False):
        assert 0.6 < moved(layer) / moved(other) < 1.7


def test_kinds_of_streams_in_a_layer() -> None:
    kinds = [op.kind for op in published("llama-3.1-8b")[-1].layers[0][0].ops if isinstance(op, Stream)]

    assert kinds == ["norm", "rotary", "rotary", "norm", "activation", "residual"]


def test_splits_of_a_placement_are_those_of_the_axes() -> None:
    program, problem, workload = published("llama-3.1-8b")
    mesh = Mesh.of({"dp": 1, "fsdp": 1, "tp": 2})
    choices = solve(problem, mesh, Prices.of(load_cluster("h100:2"), mesh, "bf16", problem))
    placed = describe(program, problem, solution=choices)

    for op, other in zip(placed.layers[0][0].ops, workload.layers[0][0].ops, strict=True):
        if isinstance(op, Matmul) and isinstance(other, Matmul):
            factor = choices.choices[
                next(
                    o.name
                    for o in problem.ops
                    if o.operands[-1:] and o.operands[-1].endswith(f"{op.name}_weight")
                )
            ].get("tp")
            assert op.split == {"n": "column", "k": "row", "b": "sequence"}.get(factor or "", "none")


class Shared(nn.Module):
    """One layer run three times (ALBERT), with attention of plain products."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, H), nn.Linear(H, VOCAB, bias=False)
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)

    def forward(self, input_ids: Tensor, labels: Tensor) -> ModelOutput:
        x = self.embed(input_ids)
        for _ in range(3):
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
            scores = (q @ k.transpose(-1, -2)).softmax(-1)
            x = x + self.out((scores @ v).transpose(1, 2).reshape(x.shape))
        logits = self.head(x)
        return ModelOutput(loss=nn.functional.cross_entropy(logits.view(-1, VOCAB), labels.view(-1)))


@cache
def shared() -> tuple[int, Problem, Workload]:
    model = Shared()
    ids = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    program, problem = prepared(model, {"input_ids": ids, "labels": ids})
    return sum(item.numel() for item in model.parameters()), problem, describe(program, problem)


def test_weights_used_again_are_counted_once_and_their_products_each_time() -> None:
    parameters, problem, workload = shared()

    assert workload.parameters == parameters
    assert workload.flops_per_token() * SEQ * BATCH == pytest.approx(3 * model_flops(problem), rel=1e-6)


def test_scores_kept_in_memory_are_square() -> None:
    squares = [item for item in shared()[2].layers[0][0].saved if item.square]

    assert squares
    assert all(item.elements == HEADS and item.selective for item in squares)


def test_frozen_parameters_are_not_trained() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(H, FFN), nn.ReLU(), nn.Linear(FFN, 1), nn.Flatten(0), _Mean())
        model[0].requires_grad_(False)
        workload = describe(*prepared(model, {"input": torch.zeros(BATCH, H)}))

    assert workload.frozen == pytest.approx((H + 1) * FFN / ((H + 1) * FFN + FFN + 1))
    assert [op.trained for layer, _ in workload.layers for op in layer.ops if isinstance(op, Matmul)] == [
        False,
        True,
    ]


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": x.mean()}


def test_heads_that_share_keys_limit_the_ways() -> None:
    ways = {
        op.name: op.ways for op in published("llama-3.1-8b")[-1].layers[0][0].ops if isinstance(op, Matmul)
    }

    assert (ways["self_attn_q_proj"], ways["self_attn_k_proj"], ways["mlp_up_proj"]) == (HEADS, 2, 0)


def test_attention_is_known_by_its_sizes() -> None:
    found = [op for op in published("deepseek-v3")[-1].layers[0][0].ops if isinstance(op, Attention)]

    assert [(op.heads, op.kv_heads, op.qk_dim, op.v_dim, op.causal, op.window) for op in found] == [
        (HEADS, HEADS, 24, 16, True, 0)
    ]
