"""Tiny trainable models of Transformers' model types, with their inputs: what the zoo runs on.

In:  a model type that Transformers registers ("llama", "gemma3_text", "whisper").
Out: `zoo_model(model_type)`: a seeded random `nn.Module` of the best trainable class (causal, sequence to sequence,
     image and text, ..., else the bare model) and a batch of four inputs whose labels are unevenly ignored;
     `zoo_types()`: the types to run, by why they are in the zoo.

Everything is found, not listed: the class from Transformers' own tables and modules, sizes by `models/shrink.py`, inputs
from the signature of forward, the main input's name and the config. A model that returns no loss is given one.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.models.host_inputs import with_positions
from bench.zoo_inputs import configs, example_inputs, with_embeddings

# Well known, and without a plan by hand in their configs.
WELL_KNOWN = [
    "bert", "roberta", "t5", "bart", "whisper", "clip", "siglip", "vit", "swin", "dinov2", "mamba", "mamba2",
    "falcon_h1", "wav2vec2", "hubert", "wavlm", "sam", "distilbert", "deberta-v2", "electra", "albert", "gpt2", "opt", "bloom", "falcon",
    "mpt", "gpt_neo", "gptj", "convnext", "resnet", "detr", "segformer", "blip", "xlnet",
]  # fmt: skip
# Images or audio together with text: not of the tables either, but what people bring.
MULTIMODAL = [
    "llava", "llava_next", "llava_onevision", "paligemma", "gemma3", "mllama", "idefics2", "idefics3", "smolvlm",
    "internvl", "mistral3", "aya_vision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "qwen2_audio", "voxtral",
    "granite_speech", "pixtral",
]  # fmt: skip

# In this order: what a type is mostly trained as. A table of Transformers, and what labels it takes.
_TABLES = (
    ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "tokens"),
    ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "tokens"),
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "tokens"),
    ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "tokens"),
    ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "tokens"),
    ("MODEL_FOR_CTC_MAPPING_NAMES", "ctc"),
    ("MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES", "pair"),
    ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "class"),
    ("MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES", "map"),
    ("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES", "tags"),
    ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", "class"),
    ("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", "class"),
    ("MODEL_MAPPING_NAMES", ""),
)


@dataclass(frozen=True)
class ZooType:
    """A model type and why it is in the zoo: `plans` are those its config class carries ("tp", "ep", "pp")."""

    model_type: str
    plans: frozenset[str]


def zoo_types() -> tuple[ZooType, ...]:
    """Every registered type whose config class has a plan by hand, then the well-known and the multimodal ones."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found: dict[str, ZooType] = {}
    for model_type in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[model_type]
        plans = frozenset(
            kind for kind in ("tp", "ep", "pp") if getattr(config_class, f"base_model_{kind}_plan", None)
        )
        if plans:
            found[model_type] = ZooType(model_type, plans)
    for model_type in (*WELL_KNOWN, *MULTIMODAL):
        if model_type in CONFIG_MAPPING and model_type not in found:
            found[model_type] = ZooType(model_type, frozenset())
    return tuple(found.values())


def zoo_model(model_type: str, *, seed: int = 0) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny model of the type in evaluation mode (nothing random in it), and its example inputs, labels included.

    A type that exists only inside of another (a decoder's config) is built as a part of that one.
    """
    from autopar.models.shrink import shrink

    config = published_config(model_type)
    try:
        return build(shrink(config), seed=seed)
    except Exception as alone:
        reasons = [f"alone: {type(alone).__name__}: {_line(alone)}"]
        for parent in parent_types(model_type):
            try:
                return build(shrink(published_config(parent)), seed=seed)
            except Exception as error:
                reasons.append(f"in {parent}: {type(error).__name__}: {_line(error)}")
        if len(reasons) == 1:
            raise
        raise LookupError("; ".join(reasons)) from alone


def build(config: Any, *, seed: int = 0) -> tuple[nn.Module, dict[str, Any]]:
    """A model of a (tiny) config and its example inputs."""
    from autopar.models.huggingface import training_config

    config = training_config(config)
    for one in configs(config):
        if hasattr(one, "vocab_size") and getattr(one, "pad_token_id", None) is None:
            one.pad_token_id = 0
    if getattr(config, "is_encoder_decoder", False) and not getattr(config, "decoder_start_token_id", None):
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    torch.manual_seed(seed)
    model_class, labels = trainable_class(config.model_type, type(config))
    model: Any = model_class(config)
    if hasattr(model, "_can_set_experts_implementation") and model._can_set_experts_implementation():
        model.set_experts_implementation("grouped_mm")
    model.tie_weights()
    _nonzero(model)
    model.eval()
    inputs = with_positions(model, example_inputs(model, config, labels))
    if (
        config.model_type == "llama4"
    ):  # of Transformers 5.24 reads `image_outputs` of its decoder's output, which has none
        model.language_model.register_forward_hook(_without_images)
    try:
        has_loss = _has_loss(model, inputs)
    except (
        AttributeError,
        TypeError,
        ValueError,
    ):  # of token ids some decoders inside of others can make nothing
        if "inputs_embeds" not in inspect.signature(model.forward).parameters or "input_ids" not in inputs:
            raise
        inputs = with_embeddings(inputs, config)
        has_loss = _has_loss(model, inputs)
    if not has_loss:
        inputs.pop("labels", None)
        model, inputs = with_loss(model, inputs)
    return model, inputs


def published_config(model_type: str) -> Any:
    """The default config of a type's registered class; what the class leaves open, and its model needs, is filled in."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    config = config_class(**_REPAIRS.get(model_type, {}))
    for one in configs(config):
        _fill(one)
    return config


# Defaults of a config class that do not make a model: values of its published checkpoint, or of the same form.
_QWEN_VL_7B = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4,
}  # fmt: skip
_REPAIRS: Mapping[str, Mapping[str, Any]] = {
    "llama4_vision_model": {"hidden_size": 1408, "vision_output_dim": 4096},
    "llama4": {"vision_config": {"hidden_size": 1408, "vision_output_dim": 4096}},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", *["sparse"] * 31]},
    "step3p5": {"sliding_window": 512},
    "diffusion_gemma_text": {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    "hunyuan_vl_text": {
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [16, 16, 16, 16]}
    },
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 768},
    "gemma3": {"vision_config": {"model_type": "siglip_vision_model", "image_size": 896, "patch_size": 14}},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "qwen2_vl": {"text_config": {"model_type": "qwen2_vl_text", **_QWEN_VL_7B}},
    "qwen2_5_vl": {"text_config": {"model_type": "qwen2_5_vl_text", **_QWEN_VL_7B}},
    "granite_speech": {"projector_config": {"model_type": "blip_2_qformer", "encoder_hidden_size": 1024}},
    "voxtral": {"audio_token_id": 24},
    "detr": {
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
        "backbone_config": {"model_type": "resnet", "out_features": ["stage4"]},
    },
}
# What a field is, of a config that has it and leaves it open.
_OPEN: Mapping[str, Any] = {
    "num_key_value_heads": lambda config: config.num_attention_heads,
    "head_dim": lambda config: config.hidden_size // config.num_attention_heads,
    "num_experts_per_tok": lambda config: 2,
    "n_routed_experts": lambda config: 64,
    "n_shared_experts": lambda config: 2,
    "vocab_size": lambda config: 32,
    "indexer_n_heads": lambda config: 16,
    "indexer_kv_heads": lambda config: 1,
    "indexer_head_dim": lambda config: 256,
    "indexer_budget": lambda config: 2048,
    "indexer_compress_ratio": lambda config: 4,
}


def _fill(config: Any) -> None:
    for name, value in _OPEN.items():
        if name in vars(config) and vars(config)[name] is None:
            with contextlib.suppress(AttributeError):
                setattr(config, name, value(config))
    rotary = getattr(config, "rope_parameters", None)
    if rotary == {} and getattr(config, "layer_types", None):
        config.rope_parameters = {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in sorted(set(config.layer_types))
        }


def parent_types(model_type: str) -> list[str]:
    """The registered types whose configs hold a config of this type, the outermost first: `t5gemma2` for
    `t5gemma2_text`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    own = CONFIG_MAPPING[model_type]
    found: dict[str, int] = {}
    for other in CONFIG_MAPPING:
        if CONFIG_MAPPING[other].__module__ == own.__module__ and other != model_type:
            with contextlib.suppress(Exception):
                parts = configs(CONFIG_MAPPING[other]())
                if any(type(part) is own for part in parts[1:]):
                    found[str(other)] = len(parts)
    return sorted(found, key=lambda name: -found[name])


def _line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:200]


# ---- which class ----


def trainable_class(model_type: str, config_class: type) -> tuple[type[nn.Module], str]:
    """The class to train and what its labels are ("tokens", "class", "map", "tags", "" for none)."""
    import transformers
    from transformers.models.auto import modeling_auto

    tables = list(_TABLES)
    if not getattr(config_class, "is_encoder_decoder", False) and _decodes_alone(model_type):
        tables.sort(key=lambda table: table[0] != "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    for table, labels in tables:
        names = getattr(modeling_auto, table).get(model_type)
        if names is None:
            continue
        for name in (names,) if isinstance(names, str) else names:
            found = getattr(transformers, name, None)
            if found is not None and _config_of(found) is config_class:
                return found, labels
    try:
        module = _modeling_module(config_class)
    except ModuleNotFoundError:
        return _borrowed(model_type)
    candidates = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, transformers.PreTrainedModel)
        and _config_of(value) is config_class
        and "forward"
        in {
            name
            for base in value.__mro__[: value.__mro__.index(transformers.PreTrainedModel)]
            for name in vars(base)
        }
    ]
    if not candidates:
        raise LookupError(f"no model class of Transformers takes a {config_class.__name__}")
    for ending in ("ForConditionalGeneration", "ForCausalLM", "ForMaskedLM"):
        for value in candidates:
            if value.__name__.endswith(ending):
                return value, "tokens"
    return candidates[-1], ""


def _borrowed(model_type: str) -> tuple[type[nn.Module], str]:
    """A type without modeling code of its own, whose config is read by another's causal model."""
    import transformers
    from transformers.models.auto import modeling_auto

    return getattr(transformers, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]), "tokens"


def _decodes_alone(model_type: str) -> bool:
    from transformers.models.auto import modeling_auto

    return model_type not in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _config_of(model_class: Any) -> Any:
    return getattr(model_class, "config_class", None)


def _modeling_module(config_class: type) -> Any:
    return importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_"))


# ---- a loss ----


def with_loss(model: nn.Module, inputs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """A model that returns no loss, with one, and random targets for it among the inputs."""
    with torch.no_grad():
        output = first_output(model(**inputs))
    return WithLoss(model), {**inputs, "targets": torch.randn(output.shape)}


class WithLoss(nn.Module):
    """The mean squared distance of a model's first floating-point output from targets. (Of the output alone it would be
    constant where the model ends in a norm, and all gradients zero but for rounding.)"""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    def forward(self, targets: Tensor, **inputs: Any) -> dict[str, Tensor]:
        return {"loss": (first_output(self.model(**inputs)).float() - targets).pow(2).mean()}


def _without_images(module: nn.Module, args: Any, output: Any) -> None:
    output.image_outputs = None


def first_output(result: Any) -> Tensor:
    values = (
        result.values() if isinstance(result, Mapping) else result if isinstance(result, tuple) else (result,)
    )
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
        if isinstance(value, tuple) and value and isinstance(value[0], Tensor):
            return value[-1]
    raise LookupError("the model returns no floating-point tensor")


def _has_loss(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    with torch.no_grad():
        result = model(**inputs)
    loss = result.get("loss") if isinstance(result, Mapping) else None
    return isinstance(loss, Tensor) and loss.dim() == 0


def _nonzero(model: nn.Module) -> None:
    """Weights that Transformers starts at zero, or leaves unset, would hide mistakes: small random numbers instead."""
    for parameter in model.parameters():
        if not torch.isfinite(parameter).all() or not parameter.any():
            with torch.no_grad():
                parameter.normal_(0.0, 0.02)
