"""The models of `bench/train.py` and their batches.

`smollm2` is SmolLM2-135M with its weights (`.cache/smollm2`); `llama4l` is a Llama of 4 layers with seeded weights;
`llamaN` one of N layers, for what compiling takes; `tiny` is for the test of the bench itself.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

SMOLLM2 = Path(__file__).resolve().parents[1] / ".cache" / "smollm2"
WORDS = {"smollm2": 49152, "tiny": 64}
LLAMA_WORDS = 8192


def build(name: str) -> nn.Module:
    """The model in float32, in training mode; the same weights on every rank."""
    torch.manual_seed(0)
    source = source_of(name)
    if isinstance(source, str):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="sdpa")
    else:
        model = LlamaForCausalLM(source)
    return model.train()  # type: ignore[no-any-return]


def source_of(name: str) -> str | LlamaConfig:
    """What autopar is given: so it keeps no module beside its shares. Seed before it draws weights."""
    if name == "smollm2":
        return str(SMOLLM2)
    if name == "tiny":
        return _llama(layers=2, hidden=32, inner=64, heads=4, words=WORDS["tiny"])
    layers = int(name.removeprefix("llama").removesuffix("l"))
    return _llama(layers=layers, hidden=512, inner=1536, heads=8, words=LLAMA_WORDS)


def _llama(*, layers: int, hidden: int, inner: int, heads: int, words: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads // 2, vocab_size=words, tie_word_embeddings=False, attn_implementation="sdpa",
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def batch_of(name: str, rows: int, length: int, step: int) -> dict[str, Tensor]:
    """The whole batch of a step: `input_ids` and `labels`, [rows, length] each, int64."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, WORDS.get(name, LLAMA_WORDS), (rows, length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}
