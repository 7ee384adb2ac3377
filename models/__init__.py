"""Where models come from: published configs, checkpoint folders, the user's Python; and text to train on."""

from __future__ import annotations

from .source import ModelSource, find_model, published_names

__all__ = ["ModelSource", "find_model", "published_names"]
