from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture
def tiny_config() -> Any:
    return LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )


@pytest.fixture
def tiny_folder(tmp_path: Path, tiny_config: Any) -> Path:
    torch.manual_seed(0)
    folder = tmp_path / "tiny-llama"
    LlamaForCausalLM(tiny_config).save_pretrained(folder)
    return folder
