"""Shrinking keeps what a config is made of, makes it small, and leaves nothing that does not fit together."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.models.shrink import shrink
from autopar.models.shrink_layers import representative


def config(model_type: str, **values: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **values)


def test_grouped_heads_stay_grouped_and_divide() -> None:
    small = shrink(config("llama", num_key_value_heads=8))

    assert (small.num_attention_heads, small.num_key_value_heads, small.head_dim) == (4, 2, 16)
    assert small.hidden_size == 64
    assert small.num_hidden_layers == 4


@pytest.mark.parametrize("ways", [2, 4])
def test_everything_divides_by_ways(ways: int) -> None:
    small = shrink(config("qwen3_moe"), ways=ways)

    sizes = (
        small.num_attention_heads,
        small.num_key_value_heads,
        small.num_experts,
        small.moe_intermediate_size,
    )
    assert [size % ways for size in (*sizes, small.vocab_size, small.hidden_size)] == [0] * 6


def test_layers_alternate_as_before() -> None:
    small = shrink(config("gemma3_text"))

    assert small.layer_types == ["sliding_attention", "full_attention"] * 2


def test_dense_layers_come_before_experts() -> None:
    small = shrink(config("deepseek_v3"))

    assert (small.first_k_dense_replace, small.num_hidden_layers) == (2, 4)
    assert (small.n_routed_experts, small.n_group, small.topk_group, small.num_experts_per_tok) == (
        8,
        2,
        1,
        2,
    )


def test_parts_of_a_head_still_make_it() -> None:
    small = shrink(config("deepseek_v3"))

    assert small.qk_head_dim == small.qk_nope_head_dim + small.qk_rope_head_dim


def test_one_key_head_stays_one() -> None:
    assert shrink(config("gemma", num_key_value_heads=1)).num_key_value_heads == 1


def test_a_small_config_does_not_grow() -> None:
    tiny = config("llama", hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=2,
                  num_hidden_layers=2, vocab_size=40)  # fmt: skip

    small = shrink(tiny)

    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    assert all(getattr(small, name) <= getattr(tiny, name) for name in names)


def test_special_tokens_stay_apart_and_in_the_vocabulary() -> None:
    small = shrink(config("gemma3"))

    tokens = [small.image_token_index, small.boi_token_index, small.eoi_token_index]
    assert len(set(tokens)) == 3
    assert all(0 <= token < small.text_config.vocab_size for token in tokens)


def test_nothing_random_and_no_cache() -> None:
    small = shrink(config("bert"))

    assert (small.hidden_dropout_prob, small.attention_probs_dropout_prob, small.use_cache) == (
        0.0,
        0.0,
        False,
    )


def test_widths_of_towers_that_were_equal_stay_equal() -> None:
    small = shrink(config("qwen2_vl", text_config={"model_type": "qwen2_vl_text", "hidden_size": 3584}))

    assert small.vision_config.hidden_size == small.text_config.hidden_size


def test_the_whole_depth_on_request() -> None:
    large = config("gemma3_text")

    assert shrink(large, depth=1.0).layer_types == large.layer_types
    assert shrink(large, depth=0.5).num_hidden_layers == large.num_hidden_layers // 2


def test_the_original_is_left_alone() -> None:
    large = config("mixtral")
    before = large.to_dict()

    shrink(large)

    assert large.to_dict() == before


@pytest.mark.parametrize(
    ("kinds", "kept"),
    [
        ("ssssfssssf", "sfsf"),
        ("dddmmmmm", "ddmm"),
        ("aaaa", "aaaa"),
        ("ab", "ab"),
        ("abababab", "abab"),
        ("aaaab", "aaab"),
    ],
)
def test_representative_layers(kinds: str, kept: str) -> None:
    assert "".join(kinds[layer] for layer in representative(kinds)) == kept
