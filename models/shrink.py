"""A tiny copy of any Transformers config, made by rule and not per model.

In:  a config, with the configs inside it, of any size.
Out: `shrink(config)`, a config of the same class in which every mechanism of the original is still there: the
     kinds of layers in their order, grouped heads, experts in groups, latent ranks, windows shorter than a tiny
     sequence. Sizes are even, so that ranks can split heads, features, experts and vocabulary.

    LlamaConfig()        4096 wide, 32 heads of 128, 32 layers  ->  64 wide, 4 heads of 16, 4 layers
    Gemma3TextConfig()   five sliding layers to a full one       ->  sliding, full, sliding, full

A number is read by what it is named for (a count of heads, of layers, a token's id) and by the relations that hold
between the original numbers, which are kept: equal sizes stay equal, also between the configs of a composite; heads
times their size stay the multiple of the width that they were; parts that make up a head still do.
"""

from __future__ import annotations

import copy
import importlib.util
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from autopar.models.shrink_layers import kept_layers
from autopar.models.shrink_sizes import POSITIONS, Plan, Sizes, image_size, new_number
from autopar.models.shrink_words import (
    HEADS,
    SPECIAL_TOKENS,
    Tree,
    depth_of,
    is_index_list,
    is_size,
)

_ZEROED = re.compile(r".*(drop|jitter|mask_time_prob|mask_feature_prob|noise).*")


def shrink(config: Any, *, ways: int = 2, depth: float | None = None) -> Any:
    """A tiny config of the same class. `ways`: heads, features, experts and vocabulary are to divide by it. `depth`: the
    share of the original's layers to keep, from the first on; None: the fewest that show every kind.

    No size grows. Dropout, layer drop, router jitter and masking of inputs are off and there is no cache, so that the
    model computes the same in training and in evaluation.
    """
    tree = _tree(config)
    plan = Plan.of(tree, ways, depth)
    _shrink(tree, plan)
    tree["use_cache"] = False
    small = type(config).from_dict(tree)
    if hasattr(small, "use_cache"):
        small.use_cache = False
    return small


def _tree(config: Any) -> Tree:
    """A config as nested dicts, as it holds its values (which some write to files in another form)."""
    tree: Tree = config.to_dict()
    if isinstance(tree.get("rope_parameters"), dict):
        tree["rope_parameters"] = _with_sections(tree["rope_parameters"], _coded_section(type(config)))
    for name, value in tree.items():
        held = vars(config).get(name, value)  # an attribute that varies by layer refuses to be asked for
        if hasattr(held, "model_type") and hasattr(held, "to_dict"):
            tree[name] = _tree(held)
        elif isinstance(held, int | list | tuple) and type(held) is not bool:
            tree[name] = held
    for name in ("out_features", "out_indices", "_out_features", "_out_indices", "stage_names"):
        tree.pop(name, None)  # names of layers, made anew from the tiny depth
    return tree


def _shrink(tree: Tree, plan: Plan) -> None:
    """Change a config's dict in place, and the configs inside of it."""
    old = copy.deepcopy(tree)
    depth = depth_of(old)
    sizes = Sizes.of(old, plan)
    overrides = {
        int(layer): str(_overrides(values, old, plan, sizes))
        for layer, values in (old.get("per_layer_config") or {}).items()
    }
    layers = kept_layers(old, overrides, plan.depth)
    for name, value in old.items():
        if isinstance(value, dict):
            if "model_type" in value:
                _shrink(tree[name], plan)
            elif name == "per_layer_config" and depth:
                tree[name] = {
                    position: _overrides(value[key], old, plan, sizes)
                    for position, layer in enumerate(layers)
                    for key in value
                    if int(key) == layer
                }
            elif name.startswith("rope") or "rotary" in name:
                tree[name] = _rotary(value, sizes)
        elif isinstance(value, bool) or value is None or isinstance(value, str):
            continue
        elif _ZEROED.fullmatch(name) and isinstance(value, int | float):
            tree[name] = type(value)(0) if value <= 1 else value
        elif isinstance(value, list | tuple):
            tree[name] = _list(name, value, old, plan, sizes, depth, layers)
        elif isinstance(value, int):
            tree[name] = new_number(name, value, old, plan, sizes, depth, layers)
    for name in ("apply_spec_augment",):
        if name in tree:
            tree[name] = False


def _overrides(values: Tree, tree: Tree, plan: Plan, sizes: Sizes) -> Tree:
    """What one layer has otherwise than the rest of the config."""
    whole = {**tree, **values}
    return {
        name: new_number(name, value, whole, plan, sizes, None, ()) if is_size(value) else value
        for name, value in values.items()
    }


def _list(
    name: str,
    value: Sequence[Any],
    tree: Tree,
    plan: Plan,
    sizes: Sizes,
    depth: int | None,
    layers: Sequence[int],
) -> Sequence[Any]:
    kind: Callable[[Iterable[Any]], Sequence[Any]] = type(value)
    if SPECIAL_TOKENS.fullmatch(name) or name in ("begin_suppress_tokens", "suppress_tokens"):
        return kind(
            plan.tokens.get(token, min(token, 1)) if isinstance(token, int) else token for token in value
        )
    if "pinpoints" in name and is_size((tree.get("vision_config") or {}).get("image_size")):
        old, new = (
            tree["vision_config"]["image_size"],
            image_size(tree["vision_config"]["image_size"], tree["vision_config"]),
        )
        return kind([size * new // old for size in pair] for pair in value)
    if name == "depths":
        return kind(min(count, 2) for count in value)
    if name in ("hidden_sizes", "decoder_hidden_sizes"):
        return kind(max(1, round(16 * size / value[0])) // 2 * 2 for size in value)
    if sizes.stages and HEADS.fullmatch(name):
        return kind(max(1, 2 * count // value[0]) for count in value)
    if depth and is_index_list(name, value, depth):
        return kind(position for position, layer in enumerate(layers) if layer in value)
    if depth and len(value) == depth and layers:
        value = kind(value[layer] for layer in layers)
    if all(isinstance(item, int) and not isinstance(item, bool) for item in value) and not sizes.stages:
        if name in ("conv_dim",):
            return kind(min(item, 32) for item in value)
        if HEADS.fullmatch(name) or (re.search(r"(size|dim|ffn|channels)s?$", name) and "kernel" not in name):
            return kind(new_number(name, item, tree, plan, sizes, depth, layers) for item in value)
    return value


def _rotary(value: Tree, sizes: Sizes) -> Tree:
    """Sections of a head's dims and factors per dim, scaled with the head; positions with the tiny maximum."""
    new: Tree = {}
    for name, item in value.items():
        if isinstance(item, dict):
            new[name] = _rotary(item, sizes)
        elif name == "original_max_position_embeddings" and is_size(item):
            new[name] = min(item, POSITIONS // 2)
        elif name in ("long_factor", "short_factor") and isinstance(item, list):
            new[name] = item[: max(1, round(len(item) * sizes.new_head / sizes.head))]
        elif "section" in name and isinstance(item, list):
            new[name] = _parts(item, int(sizes.new_head * value.get("partial_rotary_factor", 1.0)) // 2)
        else:
            new[name] = item
    return new


def _parts(parts: Sequence[int], total: int) -> list[int]:
    """Whole numbers in the proportions of `parts` (at least 1 each where they were) that add up to `total`."""
    whole = sum(parts)
    scaled = [max(1, part * total // whole) if part else 0 for part in parts]
    while sum(scaled) < total:
        gaps = [part * total / whole - new for part, new in zip(parts, scaled, strict=True)]
        scaled[gaps.index(max(gaps))] += 1
    while sum(scaled) > total:
        scaled[scaled.index(max(scaled))] -= 1
    return scaled


def _coded_section(config_class: type) -> list[int] | None:
    """The sections of rotary dims (time, height, width) that a model's code takes where its config names none."""
    name = config_class.__module__.replace(".configuration_", ".modeling_")
    try:
        found = importlib.util.find_spec(name)
        text = Path(found.origin).read_text() if found is not None and found.origin else ""
    except (ImportError, OSError, ValueError):
        return None
    match = re.search(r"""["']mrope_section["'], \[([\d, ]+)\]""", text)
    return [int(part) for part in match[1].split(",")] if match else None


def _with_sections(rotary: Tree, section: list[int] | None) -> Tree:
    if section is None:
        return rotary
    inner = {
        name: _with_sections(value, section) for name, value in rotary.items() if isinstance(value, dict)
    }
    return {**rotary, **inner} if inner else {"mrope_section": section, **rotary}
