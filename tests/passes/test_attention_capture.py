"""Capture of attention: one op whatever way a model writes it, with the numbers of Transformers' eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional

from autopar.passes.capture import capture
from autopar.passes.mask_flags import Flags
from autopar.passes.transformers_capture import flags_of
from autopar.program import Program, op_name
from tests.passes.test_capture import interpret, same

BATCH, SEQUENCE, VOCABULARY = 2, 12, 32
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "use_cache": False,
    "pad_token_id": 0,
}
TWO_KINDS = ["sliding_attention", "full_attention"]


def _causal(name: str, config: str = "", **sizes: Any) -> nn.Module:
    config_class = getattr(transformers, f"{config or name}Config")
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config_class(**{**SIZES, **sizes}))
    return model


def _t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=VOCABULARY,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _bart() -> nn.Module:
    config = transformers.BartConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=VOCABULARY, max_position_embeddings=32, use_cache=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


def _deepseek() -> nn.Module:
    return _causal(
        "DeepseekV3", num_key_value_heads=4, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4,
        v_head_dim=6, first_k_dense_replace=2,
    )  # fmt: skip


# name -> (model, flags of its attentions, has masks, has sinks)
MODELS: dict[str, tuple[Any, list[dict[str, Any]], bool, bool]] = {
    "llama": (lambda: _causal("Llama"), [{"causal": True}], False, False),
    "mistral": (
        lambda: _causal("Mistral", sliding_window=5), [{"causal": True, "window": 5}], False, False
    ),
    "qwen2": (
        lambda: _causal("Qwen2", use_sliding_window=True, sliding_window=5, layer_types=TWO_KINDS),
        [{"causal": True, "window": 5}, {"causal": True}], False, False,
    ),
    "gemma2": (
        lambda: _causal("Gemma2", head_dim=8, sliding_window=5, attn_logit_softcapping=2.0),
        [{"causal": True, "window": 5, "softcap": 2.0}, {"causal": True, "softcap": 2.0}], False, False,
    ),
    "gemma3": (
        lambda: _causal("Gemma3", "Gemma3Text", head_dim=8, sliding_window=5, layer_types=TWO_KINDS),
        [{"causal": True, "window": 5}, {"causal": True}], False, False,
    ),
    "cohere2": (
        lambda: _causal("Cohere2", sliding_window=5, layer_types=TWO_KINDS),
        [{"causal": True, "window": 5}, {"causal": True}], False, False,
    ),
    "gpt_oss": (
        lambda: _causal("GptOss", head_dim=8, sliding_window=5, num_local_experts=4, layer_types=TWO_KINDS),
        [{"causal": True, "window": 5}, {"causal": True}], False, True,
    ),
    "granite_swa": (
        lambda: _causal("GraniteSWA", sliding_window=5, layer_types=TWO_KINDS),
        [{"causal": True, "window": 5}, {"causal": True}], False, True,
    ),
    "deepseek_v3": (_deepseek, [{"causal": True}], False, False),
    "phi3": (lambda: _causal("Phi3", sliding_window=5), [{"causal": True, "window": 5}], False, False),
    "glm4": (lambda: _causal("Glm4", head_dim=8), [{"causal": True}], False, False),
    "t5": (_t5, [{}, {"causal": True}], True, False),
    "bart": (_bart, [{}, {"causal": True}], False, False),
}  # fmt: skip


def example(kind: str, implementation: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = MODELS[kind][0]().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):  # made without values
            nn.init.normal_(parameter)
    if implementation:
        model.set_attn_implementation(implementation)
    ids = torch.randint(1, VOCABULARY, (BATCH, SEQUENCE))
    return model, {"input_ids": ids, "labels": ids.clone()}


def attentions(program: Program) -> list[Node]:
    nodes = [node for block in program.blocks.values() for node in block.op_nodes]
    assert not any("softmax" in op_name(node) and len(node.meta["val"].shape) == 4 for node in nodes)
    return [node for node in nodes if op_name(node) == "autopar.attention"]


def check_against_eager(
    program: Program, model: nn.Module, inputs: dict[str, Tensor], tolerance: float
) -> None:
    """Loss and every gradient of the Program against the model with eager attention, untraced."""
    found = interpret(program, model, inputs)["loss"]
    model.set_attn_implementation("eager")  # type: ignore[operator]
    wanted = model(**inputs).loss
    assert abs(float((found / wanted).detach()) - 1) < tolerance
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ours = torch.autograd.grad(found, parameters, allow_unused=True)
    theirs = torch.autograd.grad(wanted, parameters, allow_unused=True)
    largest = max(float(gradient.norm()) for gradient in theirs if gradient is not None)
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            scale = max(float(other.norm()), 1e-3 * largest)
            assert float((one - other).norm()) / scale < tolerance


@pytest.mark.parametrize("implementation", ["", "eager"])
@pytest.mark.parametrize("kind", MODELS)
def test_attention_is_one_op_with_the_numbers_of_eager(kind: str, implementation: str) -> None:
    model, inputs = example(kind, implementation)
    _, flags, masks, sinks = MODELS[kind]

    program = capture(model, inputs)

    ops = attentions(program)
    seen = [{key: value for key, value in node.kwargs.items() if key != "scale"} for node in ops]
    if not masks:  # a position bias of T5 holds the mask under eager
        assert {str(sorted(each.items())) for each in seen} == {str(sorted(each.items())) for each in flags}
    assert all((len(node.args) > 3 and node.args[3] is not None) == masks for node in ops)
    assert all((len(node.args) > 4) == sinks for node in ops)
    check_against_eager(program, model, inputs, 2e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mistral", "bart", "t5"])
def test_the_same_in_double_precision(kind: str) -> None:
    model, inputs = example(kind, "")
    model = model.double()

    # Eager takes its softmax in float32.
    check_against_eager(capture(model, inputs), model, inputs, 2e-6)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("implementation", ["", "eager"])
def test_padding_is_a_mask(kind: str, implementation: str) -> None:
    model, inputs = example(kind, implementation)
    inputs["attention_mask"] = torch.ones(BATCH, SEQUENCE, dtype=torch.int64)
    inputs["attention_mask"][0, 8:] = 0

    program = capture(model, inputs)

    assert all(len(node.args) > 3 and "causal" not in node.kwargs for node in attentions(program))
    check_against_eager(program, model, inputs, 2e-5)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_packed_sequences_are_a_mask(kind: str) -> None:
    model, inputs = example(kind, "")
    inputs["position_ids"] = torch.cat([torch.arange(7), torch.arange(5)]).expand(BATCH, SEQUENCE)

    program = capture(model, inputs)

    assert all(len(node.args) > 3 and "causal" not in node.kwargs for node in attentions(program))
    check_against_eager(program, model, inputs, 2e-5)


def test_flex_attention_is_the_same_op() -> None:
    model, inputs = example("mistral", "flex_attention")

    program = capture(model, inputs)

    assert [dict(node.kwargs)["window"] for node in attentions(program)] == [5]
    check_against_eager(program, model, inputs, 2e-5)


def test_transformers_is_left_as_it_was() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    before = (
        dict(AttentionInterface._global_mapping),
        dict(AttentionMaskInterface._global_mapping),
        AttentionInterface.get_interface,
        masking_utils.find_packed_sequence_indices,
    )
    capture(*example("llama", "eager"))

    assert before == (
        dict(AttentionInterface._global_mapping),
        dict(AttentionMaskInterface._global_mapping),
        AttentionInterface.get_interface,
        masking_utils.find_packed_sequence_indices,
    )


class Composite(nn.Module):
    """A model of one's own around one of Transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _causal("Mistral", sliding_window=5)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.inner(input_ids=input_ids, labels=labels).loss * 2}


def test_a_transformers_model_inside_of_another_module() -> None:
    program = same(Composite().eval(), example("mistral", "")[1])

    assert [dict(node.kwargs)["window"] for node in attentions(program)] == [5]


class Plain(nn.Module):
    """Torch's own kernel, as a user calls it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.query, self.key, self.options = nn.Linear(16, 16), nn.Linear(16, 8), options

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (4, 4)).transpose(1, 2)
        key = self.key(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return functional.scaled_dot_product_attention(query, key, key, enable_gqa=True, **self.options)


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": torch.ones(6, 6).tril().bool()}],
    ids=str,
)
def test_torchs_kernel_is_the_same_op(options: dict[str, Any]) -> None:
    program = same(Plain(**options), {"x": torch.randn(2, 6, 16)}, output="output0")

    (node,) = attentions(program)
    assert node.kwargs.get("causal", False) == options.get("is_causal", False)


# ---- what a mask says ------------------------------------------------------------------------------------------------


def described(function: Any, **arguments: Any) -> Flags | None:
    return flags_of({"q_length": 8, "kv_length": 8, "mask_function": function, **arguments})


def test_masks_that_flags_can_say() -> None:
    from transformers import masking_utils as masks

    assert described(masks.causal_mask_function) == Flags(True)
    assert described(masks.bidirectional_mask_function) == Flags(False)
    assert described(masks.sliding_window_causal_mask_function(3)) == Flags(True, 3)
    assert described(masks.sliding_window_causal_mask_function(8)) == Flags(True)
    assert described(masks.sliding_window_bidirectional_mask_function(3)) == Flags(False, 4)
    assert described(masks.chunked_causal_mask_function(8, torch.zeros(1))) == Flags(True)


def test_masks_that_flags_cannot_say() -> None:
    from transformers import masking_utils as masks

    causal, sliding = masks.causal_mask_function, masks.sliding_window_causal_mask_function(3)
    other = masks.packed_sequence_mask_function(torch.zeros(1, 8))
    assert described(masks.chunked_causal_mask_function(4, torch.zeros(1))) is None
    assert described(masks.sliding_window_overlay(3)) is None
    assert described(masks.and_masks(causal, other)) is None
    assert described(masks.and_masks(sliding, other)) is None
    assert described(masks.or_masks(causal, other)) is None
    assert described(masks.and_masks(causal, causal, other)) is None
    assert described(causal, attention_mask=torch.ones(2, 8)) is None
    assert described(causal, q_offset=2) is None
    assert described(causal, kv_offset=torch.tensor(0)) is None


@pytest.mark.parametrize("window", [1, 3, 7, 20])
@pytest.mark.parametrize("causal", [True, False])
def test_flags_mean_what_the_mask_says(causal: bool, window: int) -> None:
    from transformers import masking_utils as masks

    from autopar.functional import attention

    made = (
        masks.sliding_window_causal_mask_function(window)
        if causal
        else masks.sliding_window_bidirectional_mask_function(window)
    )
    arguments = {"batch_size": 1, "q_length": 8, "kv_length": 8, "mask_function": made}
    mask = masks.sdpa_mask(**arguments, allow_is_causal_skip=False)
    flags = flags_of(arguments)
    assert flags is not None
    query, key, value = torch.randn(3, 1, 2, 8, 4).unbind(0)

    torch.testing.assert_close(
        attention(query, key, value, causal=flags.causal, window=flags.window),
        attention(query, key, value, mask),
    )
