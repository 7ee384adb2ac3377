"""A training example for a Transformers model: the keyword inputs of its forward, labels included.

Values are drawn once from a generator with a fixed seed on the CPU and then moved to the current default
device, so that the same call gives the same example everywhere; on meta only shapes and dtypes are left. What
is left out is deliberate: no attention mask (nothing is padded) and no positions (they count from 0), so that
a captured graph holds the model and no more.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.errors import ModelError

SEED = 0
IGNORED = -100  # the label that cross-entropy skips
MASKED_SHARE = 0.15  # of the tokens of a masked language model, Devlin et al. 2018, section 3.1


def example_for(config: Any, task: str, batch: int, seq: int) -> dict[str, torch.Tensor]:
    """Inputs and labels: `input_ids` int64 `[batch, seq]`, or `pixel_values` `[batch, channels, h, w]`."""
    if batch < 1 or (seq < 1 and task != "image-classification"):
        raise ModelError(
            f"batch {batch}, sequence {seq}: expected both at least 1", hint="batch 1, sequence 128"
        )
    device = torch.get_default_device()
    draw_on = torch.device("meta" if device.type == "meta" else "cpu")
    generator = None if draw_on.type == "meta" else torch.Generator(device="cpu").manual_seed(SEED)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator, device=draw_on)

    if task == "image-classification":
        height, width = _pair(config.image_size)
        pixels = torch.randn(
            batch,
            config.num_channels,
            height,
            width,
            generator=generator,
            device=draw_on,
            dtype=torch.get_default_dtype(),
        )
        example = {"pixel_values": pixels, "labels": integers(config.num_labels, batch)}
    else:
        _check_positions(config, seq)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        tokens = integers(text.vocab_size, batch, seq)
        example = {"input_ids": tokens, "labels": tokens.clone()}
        if task == "classification":
            example["labels"] = integers(config.num_labels, batch)
        elif task == "masked-lm":
            chosen = torch.rand(batch, seq, generator=generator, device=draw_on) < MASKED_SHARE
            chosen[:, 0] = True  # at least one label in each row
            example["labels"] = torch.where(chosen, tokens, torch.full_like(tokens, IGNORED))
        elif task == "seq2seq":
            example["labels"] = integers(text.vocab_size, batch, seq)
    return {name: value.to(device) for name, value in example.items()}


def _pair(size: Any) -> tuple[int, int]:
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _check_positions(config: Any, seq: int) -> None:
    """Models without rotary positions look each position up in a table, which ends."""
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int) and seq > limit and getattr(config, "rope_parameters", None) is None:
        raise ModelError(
            f"sequence {seq} is longer than the {limit} positions that {config.model_type!r} has",
            hint=f"a sequence of at most {limit}",
        )
