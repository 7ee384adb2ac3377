"""Example inputs for a model of the zoo, found from its forward's signature, its main input's name and its config.

In:  a model, its config, and what its labels are ("tokens", "class", "map", "ctc", "pair", "boxes" or "" for none).
Out: a batch of four as keyword inputs. Of token labels an unequal share is ignored in every sequence, so that the count of
     labels differs from rank to rank. Images and audio come with as many placeholder tokens as the model makes features.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

BATCH, SEQUENCE = 4, 16


def example_inputs(model: nn.Module, config: Any, labels: str) -> dict[str, Any]:
    """Raises LookupError naming the argument of forward of which nothing is known."""
    return _Inputs(model, config).build(labels)


def configs(config: Any) -> list[Any]:
    """A config and those inside it."""
    inner = [
        value for value in vars(config).values() if hasattr(value, "model_type") and hasattr(value, "to_dict")
    ]
    return [config, *(one for value in inner for one in configs(value))]


def with_embeddings(inputs: dict[str, Any], config: Any) -> dict[str, Any]:
    """The same with the embeddings of tokens in the place of their ids."""
    rows, columns = inputs["input_ids"].shape
    hidden = torch.randn(rows, columns, int(config.get_text_config().hidden_size))
    return {name if name != "input_ids" else "inputs_embeds": value for name, value in inputs.items()} | {
        "inputs_embeds": hidden
    }


class _Inputs:
    def __init__(self, model: Any, config: Any) -> None:
        self.model, self.config = model, config
        self.text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.vision = getattr(config, "vision_config", None) or config
        self.names = inspect.signature(model.forward).parameters

    def build(self, labels: str) -> dict[str, Any]:
        inputs: dict[str, Any] = {}
        main = getattr(self.model, "main_input_name", "input_ids")
        for name, parameter in self.names.items():
            if parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
                continue
            needed = parameter.default is inspect.Parameter.empty
            make = _MAKERS.get(name)
            if needed and make is None:
                raise LookupError(
                    f"forward of {type(self.model).__name__} needs {name!r}, of which nothing is known"
                )
            if make is not None and (
                needed or name in (main, "return_loss") or name in _TOGETHER.get(main, ())
            ):
                inputs[name] = make(self)
        if "aspect_ratio_ids" in self.names:  # tiles of an image, seen by cross attention from every token
            tiles = int(self.vision.max_num_tiles)
            inputs["pixel_values"] = torch.randn(BATCH, 1, tiles, *self.images().shape[1:])
            inputs["aspect_ratio_ids"] = torch.full((BATCH, 1), 6)
            inputs["aspect_ratio_mask"] = torch.ones(BATCH, 1, tiles, dtype=torch.long)
            inputs["cross_attention_mask"] = torch.ones(BATCH, SEQUENCE, 1, tiles, dtype=torch.long)
        if self.config.model_type == "voxtral_realtime_text":  # handed through to its layers
            inputs["t_cond"] = self.hidden()[:, :1]
        if "encoder_hidden_states" in self.names and type(self.model).__name__.endswith("Decoder"):
            inputs["encoder_hidden_states"] = self.hidden()
        if labels == "pair":
            inputs["input_ids"] = self.ids()
            inputs["pixel_values"] = self.images()
        if labels == "tokens" and "pixel_values" in inputs and "input_ids" in self.names:
            inputs["input_ids"] = self.ids()
        elif labels == "tokens" and "input_ids" in inputs:
            self._place_features(inputs)
        return self._labelled(inputs, labels)

    # ---- images and audio among text ----

    def _place_features(self, inputs: dict[str, Any]) -> None:
        """Put images (or audio) in, with a placeholder token for every feature that the model makes of them."""
        kinds = (
            ("image", ("pixel_values",), ("image_token_id", "image_token_index"), "get_image_features"),
            (
                "audio",
                ("input_features", "input_values"),
                ("audio_token_id", "audio_token_index"),
                "get_audio_features",
            ),
        )
        for kind, names, tokens, method in kinds:
            token = next(
                (found for name in tokens if (found := getattr(self.config, name, None)) is not None), None
            )
            name = next((name for name in names if name in self.names), None)
            compute = getattr(self.model, method, None)
            if token is None or name is None:
                continue
            if compute is None and "feature_attention_mask" in self.names:
                compute = self._counted_by_length
            if compute is None:
                continue
            accepted = inspect.signature(compute).parameters
            forms = [self._pixels()] if kind == "image" else self._audio(name)
            for extra in forms:
                every = {"kwargs", "inputs"} & set(accepted)
                given = {key: value for key, value in extra.items() if key in accepted or every}
                try:
                    with torch.no_grad():
                        count = _feature_count(compute(**given))
                    break
                except RuntimeError:  # of another shape
                    if extra is forms[-1]:
                        raise
            if count % BATCH:
                raise LookupError(f"{count} features of {BATCH} {kind}s are no whole number for each")
            ids = inputs["input_ids"]
            places = torch.full((BATCH, count // BATCH), int(token))
            inputs["input_ids"] = torch.cat([ids[:, :1], places, ids[:, 1:]], 1)
            inputs.update(
                {key: value for key, value in extra.items() if key in self.names or "kwargs" in self.names}
            )
            if "mm_token_type_ids" in self.names:
                inputs["mm_token_type_ids"] = (inputs["input_ids"] == token).long()
            if "token_type_ids" in self.names:
                inputs["token_type_ids"] = (inputs["input_ids"] == token).long()

    def _counted_by_length(self, **inputs: Tensor) -> Tensor:
        """As many features as a Whisper encoder with a pooling of two makes: two frames to one, twice."""
        frames = (int(inputs["feature_attention_mask"].shape[1]) - 1) // 2 + 1
        return torch.zeros(BATCH, (frames - 2) // 2 + 1, 1)

    def _pixels(self) -> dict[str, Any]:
        """Pixels in the form that this model takes: images, or patches of all images in a row with their grids."""
        if "image_grid_thw" in self.names:
            grid = torch.tensor([[1, 4, 4]] * BATCH)
            if hasattr(self.vision, "posemb_grid_size"):  # a square of patches for every token, channels last
                side = int(self.vision.patch_size) * int(self.vision.spatial_merge_size)
                pixels = torch.rand(int(grid.prod(1).sum()), side, side, int(self.vision.num_channels))
                return {"pixel_values": pixels, "image_grid_thw": grid}
            return {"pixel_values": self._patches(grid), "image_grid_thw": grid}
        if "image_position_ids" in self.names or "pixel_position_ids" in self.names:
            name = "image_position_ids" if "image_position_ids" in self.names else "pixel_position_ids"
            side = 6
            grid = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy"), -1)
            patch = int(self.vision.patch_size)
            return {
                "pixel_values": torch.rand(BATCH, side * side, 3 * patch * patch),
                name: grid.reshape(1, -1, 2).repeat(BATCH, 1, 1),
            }
        images = self.images()
        size = list(images.shape[-2:])
        extra: dict[str, Any] = {"pixel_values": images}
        if hasattr(self.config, "image_grid_pinpoints"):  # an image of two tiles, and the whole of it
            extra["pixel_values"] = torch.randn(BATCH, 3, *images.shape[1:])
            extra["image_sizes"] = torch.tensor([[size[0], 2 * size[1]]] * BATCH)
        elif "image_sizes" in self.names and self.vision.model_type == "pixtral":
            extra["image_sizes"] = torch.tensor([size] * BATCH)
        if self.config.model_type in ("idefics2", "idefics3", "smolvlm"):
            extra["pixel_values"] = images[:, None]
        return extra

    def _audio(self, name: str) -> list[dict[str, Any]]:
        """Spectra with the bins before or after the time."""
        features = self.features()
        mask = {"feature_attention_mask": torch.ones(BATCH, features.shape[-1], dtype=torch.long)}
        return [{name: features, **mask}, {name: features.transpose(1, 2).contiguous()}]

    def _patches(self, grid: Tensor) -> Tensor:
        patch = int(self.vision.patch_size)
        frames = int(
            getattr(self.vision, "temporal_patch_size", None)
            or getattr(self.vision, "patch_temporal", None)
            or 1
        )
        channels = int(
            getattr(self.vision, "in_channels", None) or getattr(self.vision, "num_channels", None) or 3
        )
        return torch.randn(int(grid.prod(1).sum()), channels * frames * patch * patch)

    # ---- plain inputs ----

    def ids(self) -> Tensor:
        return self._ids((BATCH, SEQUENCE))

    def _ids(self, shape: tuple[int, ...]) -> Tensor:
        """Token ids that are not special ones: those are the first or the last."""
        size = int(getattr(self.text, "vocab_size", None) or 64)
        allowed = [
            token for token in range(8 if size > 32 else 0, max(9, size // 2)) if token not in self._special()
        ]
        return torch.tensor(allowed)[torch.randint(0, len(allowed), shape)]

    def _special(self) -> set[int]:
        names = [name for name in vars(self.config) if name.endswith(("_token_id", "_token_index"))]
        return {token for name in names if isinstance(token := getattr(self.config, name), int)}

    def images(self) -> Tensor:
        size = getattr(self.vision, "image_size", None) or 64
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = (
            getattr(self.vision, "num_channels", None) or getattr(self.vision, "in_channels", None) or 3
        )
        return torch.randn(BATCH, channels, height, width)

    def grid(self) -> Tensor:
        return torch.tensor([[1, 4, 4]] * BATCH)

    def patches(self) -> Tensor:
        return self._patches(self.grid())

    def positions_of_patches(self) -> Tensor:
        return self._pixels()["pixel_position_ids"]

    def pixel_values(self) -> Tensor:
        if "grid_thw" in self.names:
            return self.patches()
        if "pixel_position_ids" in self.names:
            return self._pixels()["pixel_values"]
        return self.images()

    def features(self) -> Tensor:
        audio = (
            getattr(self.config, "audio_config", None)
            or getattr(self.config, "encoder_config", None)
            or self.config
        )
        bins = next(
            (found for name in ("num_mel_bins", "input_dim", "input_size", "feature_size")
             if (found := getattr(audio, name, None))), 16,
        )  # fmt: skip
        return torch.randn(BATCH, int(bins), 2 * int(getattr(audio, "max_source_positions", None) or 32))

    def waves(self) -> Tensor:
        return torch.randn(BATCH, 6400)

    def hidden(self) -> Tensor:
        width = next(
            found
            for name in ("hidden_size", "d_model", "dim", "embed_dim")
            if (found := getattr(self.config, name, None))
        )
        return torch.randn(BATCH, SEQUENCE, int(width))

    # ---- labels ----

    def _labelled(self, inputs: dict[str, Any], labels: str) -> dict[str, Any]:
        if "labels" not in self.names and "kwargs" not in self.names:
            return inputs
        if labels == "tokens":
            ids = inputs.get("decoder_input_ids", inputs.get("input_ids"))
            target = ids.clone() if ids is not None else self.ids()
            inputs.pop("decoder_input_ids", None)  # the model shifts the labels
            for token in self._placeholders():
                target[target == token] = -100
            inputs["labels"] = _uneven(target)
        elif labels == "ctc":
            inputs["labels"] = _uneven(self._ids((BATCH, 6)), keep=2)
        elif labels == "class":
            inputs["labels"] = torch.arange(BATCH) % int(getattr(self.config, "num_labels", 2))
        elif labels == "map":
            height, width = inputs["pixel_values"].shape[-2:]
            inputs["labels"] = torch.randint(0, int(self.config.num_labels), (BATCH, height, width))
        return inputs

    def _placeholders(self) -> list[int]:
        names = (
            "image_token_id",
            "image_token_index",
            "audio_token_id",
            "video_token_id",
            "audio_token_index",
        )
        return [token for name in names if isinstance(token := getattr(self.config, name, None), int)]


_TOGETHER: Mapping[str, tuple[str, ...]] = {
    "input_features": ("decoder_input_ids",),
    "noise_embeds": ("attention_mask",),  # without one the model's masks do not reach over the context
}
_MAKERS: Mapping[str, Callable[[_Inputs], Any]] = {
    "input_ids": _Inputs.ids,
    "decoder_input_ids": _Inputs.ids,
    "pixel_values": _Inputs.pixel_values,
    "pixel_position_ids": _Inputs.positions_of_patches,
    "grid_thw": _Inputs.grid,
    "image_grid_thw": _Inputs.grid,
    "hidden_states": _Inputs.patches,
    "input_features": _Inputs.features,
    "input_values": _Inputs.waves,
    "inputs_embeds": _Inputs.hidden,
    "noise_embeds": _Inputs.hidden,
    "context_hidden_states": lambda self: self.hidden().repeat(1, 1, len(self.config.target_layer_ids)),
    "attention_mask": lambda self: torch.ones(
        BATCH, SEQUENCE * (2 if "context_hidden_states" in self.names else 1), dtype=torch.long
    ),
    "num_patches": lambda _: SEQUENCE // 2,
    "return_loss": lambda _: True,
}


def _feature_count(features: Any) -> int:
    """How many rows of features of width d: of a tensor, a list of tensors, or an output that holds either."""
    if hasattr(features, "last_hidden_state"):
        pooled = getattr(features, "pooler_output", None)
        features = features.last_hidden_state if pooled is None else pooled
    if isinstance(features, list | tuple):
        return sum(_feature_count(one) for one in features)
    return int(features.numel() // features.shape[-1])


def _uneven(labels: Tensor, keep: int = 2) -> Tensor:
    """Unequal numbers of ignored labels per sequence, hence per rank."""
    labels[0, labels.shape[1] // 2 :] = -100
    labels[-1, keep:] = -100
    return labels
