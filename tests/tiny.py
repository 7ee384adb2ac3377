"""Tiny random models of the six families that tests compare on, with inputs whose labels are ignored unevenly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

BATCH, SEQUENCE, VOCABULARY = 4, 16, 96

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
}


def _llama() -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**_SIZES, num_key_value_heads=2, use_cache=False)
    )


def _qwen3() -> nn.Module:
    import transformers

    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**_SIZES, num_key_value_heads=2, head_dim=16, use_cache=False)
    )


def _gpt2() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        n_embd=64, n_layer=3, n_head=4, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def _bert() -> nn.Module:
    import transformers

    return transformers.BertForMaskedLM(transformers.BertConfig(**_SIZES))


def _vit() -> nn.Module:
    import transformers

    sizes = {key: value for key, value in _SIZES.items() if key != "vocab_size"}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=8)
    )


def _t5() -> nn.Module:
    import transformers

    config = transformers.T5Config(
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=3,
        num_heads=4,
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "bert": _bert,
    "vit": _vit,
    "t5": _t5,
}


class ConvNet(nn.Module):
    """Convolutions with batch norm in training mode: ops without a rule, which every rank runs whole."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)
        )
        self.head = nn.Linear(8, 8)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> ModelOutput:
        logits = self.head(self.body(pixel_values).mean((2, 3)))
        return ModelOutput(loss=nn.functional.cross_entropy(logits, labels))


def _convnet() -> nn.Module:
    return ConvNet()


def _classifier() -> nn.Module:
    import transformers

    return transformers.BertForSequenceClassification(transformers.BertConfig(**_SIZES, num_labels=8))


# Beside the six families: a module of no library, and a sequence classifier.
OTHERS: dict[str, Callable[[], nn.Module]] = {"convnet": _convnet, "classifier": _classifier}


def tiny(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model (dropout off, seeded weights) and a training batch of 4."""
    torch.manual_seed(0)
    model = (MODELS | OTHERS)[kind]().train(kind == "convnet")
    if kind in ("vit", "convnet"):
        images, classes = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 8, (BATCH,))
        if (
            kind == "convnet"
        ):  # its bias gradients are small sums of large terms: float64, not float32's rounding
            model, images = model.double(), images.double()
        return model, {"pixel_values": images, "labels": classes}
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))
    if kind == "classifier":
        return model, {"input_ids": ids, "labels": torch.randint(0, 8, (BATCH,))}
    labels = ids.clone()
    labels[0, :9] = -100  # unequal numbers of ignored labels per sequence, hence per rank
    labels[3, :14] = -100
    return model, {"input_ids": ids, "labels": labels}
