"""How the numbers of a Transformers config are read: by what they are named for.

In:  a config as nested dicts (a Tree).
Out: its width, heads, depth, special tokens; whether a name is of a count of heads, a layer's number, a period.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any, TypeGuard

Tree = dict[str, Any]

WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", "width")
MAIN_HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "encoder_attention_heads",
    "attention_heads",
)
DEPTHS = re.compile(
    r"num_hidden_layers|n_layers?|num_layers|depth|num_blocks|(num_)?(en|de)coder_layers|num_hidden_blocks|"
    r"num_layers_per_stack"
)
# A layer's number or how many layers come before something: read against the depth.
LAYER_NUMBERS = re.compile(
    r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|n_dense_layers|num_hash_layers"
)
BOUNDARIES = re.compile(r"moe_layer_end_index|loop_layer_index_(start|end)")
SECTIONS = ("n_input_layers", "n_recurrent_layers", "n_output_layers")
PERIODS = re.compile(
    r".*(_interval|_period|_every_n_layers|_sparse_step|_group_size|_layer_step|_pattern)|n_layers_per_.*"
)
HEADS = re.compile(r".*heads?(_per_layer)?|heads_per_ngram")
HEAD_SIZES = re.compile(r".*(head_dim|d_head|d_kv|head_size|rotary_dim)")
SPECIAL_TOKENS = re.compile(r".*(token_id|token_ids|token_index|token_idx|bos_id|eos_id|pad_id)|.*_token")


def inner_configs(tree: Tree) -> Iterator[Tree]:
    yield tree
    for value in tree.values():
        if isinstance(value, dict) and "model_type" in value:
            yield from inner_configs(value)


def width_of(tree: Tree) -> int | None:
    return next((tree[name] for name in WIDTHS if isinstance(tree.get(name), int) and tree[name] > 0), None)


def heads_of(tree: Tree) -> int | None:
    return next((tree[name] for name in MAIN_HEADS if isinstance(tree.get(name), int)), None)


def has_stages(tree: Tree) -> bool:
    """Whether the config is of stages, each narrower or wider than the one before (Swin, ConvNeXt, SegFormer)."""
    return any(isinstance(tree.get(name), list | tuple) for name in ("depths", "hidden_sizes"))


def special_tokens(tree: Tree) -> Iterator[int]:
    for name, value in tree.items():
        if SPECIAL_TOKENS.fullmatch(name):
            for token in value if isinstance(value, list | tuple) else [value]:
                if isinstance(token, int) and not isinstance(token, bool):
                    yield token


def depth_of(tree: Tree) -> int | None:
    return next((value for name, value in tree.items() if is_depth(name, value)), None)


def is_depth(name: str, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and bool(DEPTHS.fullmatch(name))


def is_index_list(name: str, value: object, depth: int) -> bool:
    """A list of layers' numbers: `full_attn_idxs`, `mlp_only_layers`, `moe_layers`."""
    return (
        isinstance(value, list | tuple)
        and bool(re.fullmatch(r".*(_layers|_idxs|_indexes|_indices|layer_ids)", name))
        and name != "no_rope_layers"
        and all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < depth for item in value)
        and list(value) == sorted(set(value))
    )


def is_period(name: str, value: object) -> bool:
    return isinstance(value, int) and bool(PERIODS.fullmatch(name)) and value > 1


def boundaries(tree: Tree) -> dict[str, int]:
    """Where a part of the stack ends, by name: parts need not have two layers of every kind."""
    ends = {name: value for name, value in tree.items() if BOUNDARIES.fullmatch(name) and is_size(value)}
    sections = [name for name in SECTIONS if is_size(tree.get(name))]
    return ends | dict(zip(sections, itertools.accumulate(tree[name] for name in sections), strict=True))


def is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
