"""Logical axes are found from the graph alone."""

from __future__ import annotations

import pytest

from autopar.passes.axes import name_axes
from autopar.passes.capture import capture
from tests.tiny import MODELS, tiny

COMMON = {"batch", "heads", "ffn", "head_dim"}


@pytest.mark.parametrize("kind", MODELS)
def test_every_transformer_has_its_axes(kind: str) -> None:
    model, inputs = tiny(kind)
    _program, axes = name_axes(capture(model, inputs))
    assert set(axes.sizes) >= COMMON
    if kind != "vit":
        assert set(axes.sizes) >= {"sequence", "vocab", "hidden"}


def test_names_of_a_llama_layer() -> None:
    model, inputs = tiny("llama")
    _program, axes = name_axes(capture(model, inputs))
    names = {node: dims for (block, node), dims in axes.dims.items() if block == "model_layers"}
    assert names["self_attn_q_proj_weight"] == ("heads", "hidden")
    assert names["self_attn_k_proj_weight"] == ("heads", "hidden")
    assert names["self_attn_o_proj_weight"] == ("hidden", "heads")
    assert names["mlp_up_proj_weight"] == ("ffn", "hidden")
    assert names["mlp_down_proj_weight"] == ("hidden", "ffn")
    assert names["input0"] == ("batch", "sequence", "hidden")


def test_heads_include_key_value_heads_and_what_they_are_cut_from() -> None:
    model, inputs = tiny("llama")
    _, axes = name_axes(capture(model, inputs))
    assert axes.sizes["heads"] == {64, 32, 4, 2}  # q width, k/v width, query heads, key/value heads


def test_embedding_and_head_share_the_vocabulary_tied_or_not() -> None:
    for kind in ("llama", "gpt2"):
        model, inputs = tiny(kind)
        _program, axes = name_axes(capture(model, inputs))
        widths = {sizes for name, sizes in axes.sizes.items() if name.startswith("vocab")}
        assert frozenset({96}) in widths


def test_names_are_printed() -> None:
    model, inputs = tiny("llama")
    program, _ = name_axes(capture(model, inputs))
    assert "(batch sequence ffn) = aten.linear" in str(program)
