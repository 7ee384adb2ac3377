"""Tiny models with images or audio, and batches of two whose sequences have the placeholders of their features.

Between them: a tower of fixed size (Llava), images by grids with windows (Qwen2.5-VL), features added to several layers
(Qwen3-VL), cross attention to the tower (Mllama), image sizes (Mistral 3), audio (Whisper, Voxtral).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "use_cache": False,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
GRIDS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "out_hidden_size": 32,
    "in_channels": 3,
}
DIRECTIONS = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
IMAGE = 3  # the token that an image's features take the place of
Inputs = dict[str, Any]


def _ids(features: int, length: int = 16) -> Tensor:
    ids = torch.randint(10, 96, (2, length))
    ids[:, 2 : 2 + features] = IMAGE
    return ids


def _grids(ids: Tensor) -> Inputs:
    grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(int(grid.prod(-1).sum()), 48),
        "image_grid_thw": grid,
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


def _llava() -> tuple[nn.Module, Inputs]:
    import transformers as t

    config = t.LlavaConfig(
        text_config=t.LlamaConfig(**TEXT),
        vision_config=t.CLIPVisionConfig(**TOWER),
        image_token_index=IMAGE,
        image_seq_length=16,
    )
    return t.LlavaForConditionalGeneration(config), {
        "input_ids": _ids(16, 24),
        "pixel_values": torch.randn(2, 3, 16, 16),
    }


def _qwen2_5_vl() -> tuple[nn.Module, Inputs]:
    import transformers as t

    vision = {**GRIDS, "depth": 4, "window_size": 16, "fullatt_block_indexes": [1, 3]}
    config = t.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": DIRECTIONS}, vision_config=vision, image_token_id=IMAGE
    )
    return t.Qwen2_5_VLForConditionalGeneration(config), _grids(_ids(4))


def _qwen3_vl() -> tuple[nn.Module, Inputs]:
    import transformers as t

    vision = {**GRIDS, "depth": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [1, 2]}
    config = t.Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 8, "rope_parameters": DIRECTIONS},
        vision_config=vision,
        image_token_id=IMAGE,
    )
    return t.Qwen3VLForConditionalGeneration(config), _grids(_ids(4))


def _mllama() -> tuple[nn.Module, Inputs]:
    import transformers as t

    vision = {
        **TOWER,
        "num_global_layers": 2,
        "attention_heads": 4,
        "max_num_tiles": 2,
        "intermediate_layers_indices": [1],
        "supported_aspect_ratios": [[1, 1], [1, 2]],
        "vision_output_dim": 64,
    }
    text = {**TEXT, "num_hidden_layers": 5, "cross_attention_layers": [1, 3], "pad_token_id": 0}
    config = t.MllamaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE)
    return t.MllamaForConditionalGeneration(config), {
        "input_ids": _ids(1),
        "pixel_values": torch.randn(2, 1, 2, 3, 16, 16),
        "aspect_ratio_ids": torch.tensor([[1], [2]]),
        "aspect_ratio_mask": torch.tensor([[[1, 0]], [[1, 1]]]),
        "cross_attention_mask": torch.ones(2, 16, 1, 2, dtype=torch.long),
    }


def _mistral3() -> tuple[nn.Module, Inputs]:
    import transformers as t

    config = t.Mistral3Config(
        text_config=t.MistralConfig(**TEXT, head_dim=8),
        vision_config=t.PixtralVisionConfig(**TOWER, head_dim=8),
        image_token_index=IMAGE,
        spatial_merge_size=2,
    )
    return t.Mistral3ForConditionalGeneration(config), {
        "input_ids": _ids(4),
        "pixel_values": torch.randn(2, 3, 16, 16),
        "image_sizes": torch.tensor([[16, 16], [16, 16]]),
    }


def _whisper() -> tuple[nn.Module, Inputs]:
    import transformers as t

    config = t.WhisperConfig(
        d_model=32, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=96, num_mel_bins=8, max_source_positions=16,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, use_cache=False,
    )  # fmt: skip
    return t.WhisperForConditionalGeneration(config), {"input_features": torch.randn(2, 8, 32)}


def _voxtral() -> tuple[nn.Module, Inputs]:
    import transformers as t

    audio = {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
        "intermediate_size": 128, "num_mel_bins": 8, "max_source_positions": 16,
    }  # fmt: skip
    config = t.VoxtralConfig(
        text_config=t.LlamaConfig(**TEXT, head_dim=8), audio_config=audio, audio_token_id=IMAGE
    )
    return t.VoxtralForConditionalGeneration(config), {
        "input_ids": _ids(4),
        "input_features": torch.randn(2, 8, 32),
    }


MULTIMODAL: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "llava": _llava,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "mllama": _mllama,
    "mistral3": _mistral3,
    "whisper": _whisper,
    "voxtral": _voxtral,
}


def multimodal(kind: str) -> tuple[nn.Module, Inputs]:
    """A model (seeded, in evaluation mode, no weight zero) and a training batch as `with_positions` makes it."""
    from autopar.models.host_inputs import with_positions

    torch.manual_seed(0)
    model, inputs = MULTIMODAL[kind]()
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(0.0, 0.02)
    labels = inputs["input_ids"].clone() if "input_ids" in inputs else torch.randint(10, 96, (2, 16))
    labels[labels == IMAGE] = -100
    labels[0, -3:] = -100
    return model, with_positions(model, {**inputs, "labels": labels})
