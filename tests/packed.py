"""Tiny random models with packed parameters, and a batch for each: fused query/key/value, gate and up, states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.utils import ModelOutput

BATCH, SEQUENCE, VOCABULARY = 4, 16, 96

_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def _causal(name: str, **changes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        sizes = {key: value for key, value in {**_SIZES, **changes}.items() if value is not None}
        config = getattr(transformers, f"{name}Config")(**sizes)
        config.use_cache = False
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return build


def _gpt2() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        n_embd=64, n_layer=3, n_head=4, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def _gpt_bigcode() -> nn.Module:
    import transformers

    config = transformers.GPTBigCodeConfig(
        n_embd=64, n_layer=3, n_head=4, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    return transformers.GPTBigCodeForCausalLM(config)


def _mpt() -> nn.Module:
    import transformers

    config = transformers.MptConfig(d_model=64, n_layers=3, n_heads=4, vocab_size=VOCABULARY, use_cache=False)
    return transformers.MptForCausalLM(config)


def _modernbert() -> nn.Module:
    import transformers

    sizes = {key: value for key, value in _SIZES.items() if key != "num_key_value_heads"}
    return transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(**sizes, cls_token_id=1, sep_token_id=2, reference_compile=False)
    )


def _mamba() -> nn.Module:
    import transformers

    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=64, state_size=8, num_hidden_layers=3, use_cache=False
    )
    return transformers.MambaForCausalLM(config)


def _mamba2() -> nn.Module:
    import transformers

    config = transformers.Mamba2Config(
        vocab_size=VOCABULARY, hidden_size=64, state_size=16, num_hidden_layers=3, num_heads=8, head_dim=16,
        n_groups=2, chunk_size=8, use_cache=False,
    )  # fmt: skip
    return transformers.Mamba2ForCausalLM(config)


class Attention(nn.Module):
    """torch's packed in-projection as its functional form uses it: slices of the parameter itself, with bias."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.randn(192, 64) / 8)
        self.in_proj_bias = nn.Parameter(torch.randn(192) / 8)
        self.out = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        q, k, v = (
            functional.linear(x, weight, bias).unflatten(-1, (4, 16)).transpose(1, 2)
            for weight, bias in zip(weights, biases, strict=True)
        )
        return x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Experts whose stacked weight holds gate and up side by side, every token through every expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 4, bias=False)
        self.gate_up_proj = nn.Parameter(torch.randn(4, 2 * 48, 64) / 8)
        self.down_proj = nn.Parameter(torch.randn(4, 64, 48) / 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.einsum("bsh,efh->ebsf", x, self.gate_up_proj).chunk(2, dim=-1)
        made = torch.einsum("ebsf,ehf->ebsh", functional.silu(gate) * up, self.down_proj)
        weights = self.router(x).softmax(-1)
        return x + torch.einsum("bse,ebsh->bsh", weights, made)


class Own(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 64)
        self.layers = nn.ModuleList(kind() for _ in range(3))
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> ModelOutput:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return ModelOutput(loss=functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


PACKED: dict[str, Callable[[], nn.Module]] = {
    "gpt2": _gpt2,
    "phi3": _causal("Phi3", sliding_window=None),
    "glm": _causal("Glm", head_dim=16, pad_token_id=0),
    "gpt_bigcode": _gpt_bigcode,
    "mpt": _mpt,
    "modernbert": _modernbert,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "in_proj": lambda: Own(Attention),
    "experts": lambda: Own(Experts),
}


def packed(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model (dropout off, seeded weights) and a training batch of 4, labels ignored unevenly."""
    torch.manual_seed(0)
    model = PACKED[kind]().eval()
    with torch.no_grad():  # biases that start at zero would hide an error
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.05)
    ids = torch.randint(3, VOCABULARY, (BATCH, SEQUENCE))
    labels = ids.clone()
    labels[0, :9] = -100
    labels[3, :14] = -100
    return model, {"input_ids": ids, "labels": labels}
