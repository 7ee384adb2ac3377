"""Tiny random models whose exported graphs the rules must cover, with inputs and labels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers as hf

Model = tuple[torch.nn.Module, dict[str, Any]]

DECODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
DEEPSEEK = {
    **DECODER,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


def _text(model: torch.nn.Module, **inputs: Any) -> Model:
    ids = torch.randint(0, 64, (2, 8))
    return model, {"input_ids": ids, "labels": ids, **inputs}


def _decoder(model: torch.nn.Module) -> Model:
    return _text(model, use_cache=False)


def _experts(model: Any) -> Model:
    model.set_experts_implementation("grouped_mm")
    return _decoder(model)


def _bert() -> Model:
    small = {key: DECODER[key] for key in DECODER if key != "num_key_value_heads"}
    return _text(
        hf.BertForMaskedLM(hf.BertConfig(**small)), attention_mask=torch.ones(2, 8, dtype=torch.int64)
    )


def _gpt2() -> Model:
    config = hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=32, **TOKENS)
    return _decoder(hf.GPT2LMHeadModel(config))


def _t5() -> Model:
    config = hf.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    return _decoder(hf.T5ForConditionalGeneration(config))


def _vit() -> Model:
    config = hf.ViTConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        image_size=16,
        patch_size=8,
        num_labels=4,
    )
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([1, 2])}
    return hf.ViTForImageClassification(config), inputs


DENSE: dict[str, Callable[[], Model]] = {
    "llama": lambda: _decoder(hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER))),
    "qwen3": lambda: _decoder(hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER, head_dim=8))),
    "gpt2": _gpt2,
    "bert": _bert,
    "vit": _vit,
    "t5": _t5,
    "falcon": lambda: _decoder(
        hf.FalconForCausalLM(
            hf.FalconConfig(
                vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, **TOKENS
            )
        )
    ),
    "nemotron": lambda: _decoder(hf.NemotronForCausalLM(hf.NemotronConfig(**DECODER))),
}
EXPERTS: dict[str, Callable[[], Model]] = {
    "mixtral": lambda: _experts(hf.MixtralForCausalLM(hf.MixtralConfig(**DECODER, num_local_experts=4))),
    "qwen3-moe": lambda: _experts(
        hf.Qwen3MoeForCausalLM(
            hf.Qwen3MoeConfig(
                **DECODER, head_dim=8, num_experts=4, moe_intermediate_size=16, num_experts_per_tok=2
            )
        )
    ),
    "deepseek-v3": lambda: _experts(hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**DEEPSEEK))),
}


@cache
def exported(name: str) -> tuple[torch.export.ExportedProgram, dict[str, Any]]:
    """The functional exported graph of the model with its loss, and the inputs; in evaluation mode (no dropout)."""
    torch.manual_seed(0)
    model, inputs = {**DENSE, **EXPERTS}[name]()
    program = torch.export.export(model.eval(), (), inputs, strict=False)
    return program.run_decompositions({}), inputs
