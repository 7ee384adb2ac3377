"""Captured attention carries a flag where a mask would say nothing more, and computes what Transformers computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    ViTConfig,
)

from autopar.models import find_model

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
GQA: dict[str, Any] = SMALL | {"num_key_value_heads": 2}
IMAGE: dict[str, Any] = {k: v for k, v in SMALL.items() if k != "vocab_size"}
CAUSAL = {
    "llama": LlamaConfig(**GQA),
    "mistral, window longer than the sequence": MistralConfig(**GQA, sliding_window=32),
    "mistral, window shorter": MistralConfig(**GQA, sliding_window=4),
    "gpt2": GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=64, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0
    ),
}
SEQ = 16


def attentions(config: Any, **inputs: Any) -> list[torch.fx.Node]:
    source = find_model(config)
    with torch.device("meta"):
        model, example = source.build(), source.example_inputs(2, SEQ)
    program = torch.export.export(model, (), example | inputs, strict=False)
    op = torch.ops.aten.scaled_dot_product_attention.default
    return [node for node in program.graph.nodes if node.target is op]


def has_mask(node: torch.fx.Node) -> bool:
    return (node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")) is not None


def is_causal(node: torch.fx.Node) -> bool:
    return bool(node.args[5] if len(node.args) > 5 else node.kwargs.get("is_causal", False))


@pytest.mark.parametrize("kind", ["llama", "mistral, window longer than the sequence", "gpt2"])
def test_causal_attention_is_captured_without_a_mask(kind: str) -> None:
    found = attentions(CAUSAL[kind])
    assert len(found) == 2
    assert all(is_causal(node) and not has_mask(node) for node in found)


@pytest.mark.parametrize(
    "config", [BertConfig(**SMALL), ViTConfig(**IMAGE, image_size=16, patch_size=8)], ids=["bert", "vit"]
)
def test_full_attention_is_captured_without_a_mask(config: Any) -> None:
    found = attentions(config)
    assert len(found) == 2
    assert not any(is_causal(node) or has_mask(node) for node in found)


def test_a_window_shorter_than_the_sequence_stays_a_mask() -> None:
    assert all(has_mask(node) for node in attentions(CAUSAL["mistral, window shorter"]))


def test_padding_stays_a_mask() -> None:
    mask = torch.ones(2, SEQ, dtype=torch.int64, device="meta")
    assert all(has_mask(node) for node in attentions(CAUSAL["llama"], attention_mask=mask))


@pytest.mark.parametrize("kind", CAUSAL)
@pytest.mark.parametrize("padded", [False, True])
def test_the_loss_is_that_of_plain_transformers(kind: str, padded: bool) -> None:
    source = find_model(CAUSAL[kind])
    torch.manual_seed(0)
    ours = source.build()
    theirs: Any = AutoModelForCausalLM.from_config(CAUSAL[kind], attn_implementation="sdpa")
    theirs.load_state_dict(ours.state_dict())
    inputs: dict[str, torch.Tensor] = source.example_inputs(2, SEQ)
    if padded:
        inputs["attention_mask"] = (torch.arange(SEQ) < torch.tensor([[SEQ], [5]])).long()
    assert torch.equal(ours(**inputs).loss, theirs(**inputs).loss)


def test_packed_rows_stay_apart_when_run() -> None:
    source = find_model(CAUSAL["llama"])
    model = source.build()
    inputs = source.example_inputs(1, SEQ)
    inputs["position_ids"] = torch.cat([torch.arange(9), torch.arange(7)])[None]
    together = model(**inputs).logits
    apart = model(input_ids=inputs["input_ids"][:, 9:]).logits
    torch.testing.assert_close(together[:, 9:], apart)


@pytest.mark.parametrize("kind", CAUSAL)
def test_the_captured_program_computes_the_same(kind: str) -> None:
    source = find_model(CAUSAL[kind])
    torch.manual_seed(0)
    model, inputs = source.build(), source.example_inputs(2, SEQ)
    captured = torch.export.export(model, (), inputs, strict=False).module()
    torch.testing.assert_close(captured(**inputs).loss, model(**inputs).loss)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_batch_and_sequence_can_stay_symbols(kind: str) -> None:
    source = find_model(CAUSAL[kind])
    torch.manual_seed(0)
    model, inputs = source.build(), source.example_inputs(2, SEQ)
    dims = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("seq", min=2, max=512)}
    program = torch.export.export(model, (), inputs, strict=False, dynamic_shapes=dict.fromkeys(inputs, dims))
    longer = source.example_inputs(3, 24)
    torch.testing.assert_close(program.module()(**longer).loss, model(**longer).loss)


def test_latent_attention_is_causal_and_a_model_that_caps_its_scores_builds() -> None:
    latent = DeepseekV3Config(
        **SMALL,
        num_key_value_heads=4,
        moe_intermediate_size=16,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
    )
    assert all(is_causal(node) for node in attentions(latent))
    assert find_model(Gemma2Config(**GQA, head_dim=8)).build() is not None
