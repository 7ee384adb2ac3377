"""Reads a checkpoint with safetensors and JSON alone, for tests to compare with."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def whole_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, put together from its pieces; fails where an element is missing or twice."""
    index = json.loads((checkpoint / "index.json").read_text())["tensors"]
    files = {file.name: load_file(file) for file in checkpoint.glob("part-*.safetensors")}
    found = {}
    for name, about in index.items():
        whole = torch.zeros(about["shape"], dtype=getattr(torch, about["dtype"]))
        times = torch.zeros(about["shape"], dtype=torch.int8)
        for file, key, offsets, sizes in about["pieces"]:
            place = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
            whole[place] = files[file][key]
            times[place] += 1
        assert bool((times == 1).all()), name
        found[name] = whole
    return found


def model_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Parameters and buffers, by the model's own names."""
    return {
        name.removeprefix("model/"): tensor
        for name, tensor in whole_tensors(checkpoint).items()
        if name.startswith("model/")
    }
