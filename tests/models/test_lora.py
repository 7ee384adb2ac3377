"""Adapters: where PEFT puts them, what begins frozen and zero, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import UsageError
from autopar.models.lora import Lora, used_config, with_lora
from tests.tiny import MODELS

pytest.importorskip("peft")


@given(
    st.integers(1, 512),
    st.integers(1, 512),
    st.lists(st.sampled_from(("q_proj", "v_proj", "model.layers.0.up_proj")), unique=True),
    st.booleans(),
)
def test_what_prints_parses(rank: int, alpha: int, targets: list[str], rslora: bool) -> None:
    lora = Lora(rank, float(alpha), tuple(targets), rslora)
    assert Lora.parse(str(lora)) == lora


@pytest.mark.parametrize(
    "text",
    ["", "q_proj", "r=0", "r=x", "alpha=-1", "alpha=nan", "rank=4", "r=4,r=8", "r=4,v_proj", "rslora=1"],
)
def test_bad_words_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Lora.parse(text)
    assert caught.value.hint


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "t5"])
def test_the_adapted_model_begins_as_its_base(kind: str) -> None:
    module = MODELS[kind]()
    adapted = with_lora(module, Lora(4)).build()
    for name, parameter in adapted.named_parameters():
        assert parameter.requires_grad == (".lora_" in name)
        assert (
            bool(parameter.any()) == (not parameter.requires_grad or ".lora_A." in name) or "lora" not in name
        )
    before, after = module.state_dict(), adapted.state_dict()
    for name, value in before.items():
        where = (
            name
            if name in after
            else name.replace(".weight", ".base_layer.weight").replace(".bias", ".base_layer.bias")
        )
        assert torch.equal(after[where], value)
    assert not any(".lora_" in name for name, _ in module.named_parameters())


def test_adapters_are_the_same_whatever_was_drawn_before() -> None:
    module = MODELS["llama"]()

    def first_of(seed: int) -> torch.Tensor:
        torch.rand(seed + 1)
        adapted = with_lora(module, Lora(4, seed=seed)).build()
        return next(value for name, value in adapted.named_parameters() if ".lora_A." in name)

    assert torch.equal(first_of(5), first_of(5))
    assert not torch.equal(first_of(5), first_of(6))


def test_all_linear_leaves_the_head() -> None:
    with torch.device("meta"):
        adapted = with_lora(MODELS["llama"](), Lora(targets=("all-linear",))).build()
    names = {name.rpartition(".")[2] for name in used_config(adapted).target_modules}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    "targets",
    [("nope",), ("q_proj", "v_prj"), ("input_layernorm",), ("embed_tokens",), ("q_proj", "embed_tokens")],
)
def test_targets_that_cannot_be_are_told(targets: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="takes no LoRA adapters") as caught:
        with_lora(MODELS["llama"](), Lora(targets=targets)).build()
    assert "up_proj" in str(caught.value.hint)
