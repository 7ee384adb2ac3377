"""What a number of a config becomes in a tiny copy.

In:  a name and its value, the config around it (a Tree), what all configs of a composite share (a Plan).
Out: the tiny value. Relations between the original values are kept: see `shrink.py`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.models.shrink_layers import LAYERS
from autopar.models.shrink_words import (
    BOUNDARIES,
    HEAD_SIZES,
    HEADS,
    LAYER_NUMBERS,
    SECTIONS,
    SPECIAL_TOKENS,
    WIDTHS,
    Tree,
    boundaries,
    has_stages,
    heads_of,
    inner_configs,
    is_depth,
    is_index_list,
    is_period,
    is_size,
    special_tokens,
    width_of,
)

WINDOW, POSITIONS, VOCABULARY = 8, 256, 128
_POSITIONS = re.compile(
    r".*(position_embeddings|positions|n_ctx|max_seq_len|max_length|sequence_length|max_len|"
    r"position_embedding_size|image_size_limit)"
)
_WINDOWS = re.compile(
    r".*(sliding_window|window_size|window_sizes|chunk_size|_chunk|sliding_window_size|block_size|rel_extent)"
)
_EXPERTS = re.compile(r".*(experts|expert_num)")
_PICKS = re.compile(r".*(per_tok|per_token|topk|top_k|moe_k|topk_blocks)")
_STATES = re.compile(r".*(d_state|state_size|state_dim)")
_SIZES = re.compile(
    r".*(size|dim|rank|channels?|width|inner|ffn|features|bins|d_[a-z]+|dims|_in|_out|extent|num_pos_feats)"
)
_KERNELS = re.compile(r".*(kernel|stride|conv|padding|dilation|merge|pool|factor|downsample|levels?).*")


@dataclass(frozen=True)
class Plan:
    """What all configs of a tree share: widths and special tokens, old to new."""

    ways: int
    widths: Mapping[int, int]
    vocabulary: int  # the largest, in the original
    tokens: Mapping[int, int]
    depth: float | None

    @staticmethod
    def of(tree: Tree, ways: int, depth: float | None) -> Plan:
        trees = list(inner_configs(tree))
        widths = {width for one in trees if not has_stages(one) and (width := width_of(one))}
        full = 32 * ways
        new = {width: min(width, full if width > max(widths) / 2 else full // 2) for width in widths}
        sizes = [one["vocab_size"] for one in trees if isinstance(one.get("vocab_size"), int)]
        vocabulary = max(sizes, default=0)
        least = min([_vocabulary(size, vocabulary) for size in sizes if size], default=0)
        ids = sorted({token for one in trees for token in special_tokens(one)})
        free = itertools.chain(range(least - 1, 0, -1))
        low = {token for token in ids if 0 <= token < least // 2}
        tokens = {token: token for token in low}
        for token in ids:
            if token not in low and token >= 0 and least:
                tokens[token] = next(number for number in free if number not in low)
        return Plan(ways, new, vocabulary, tokens, depth)


@dataclass(frozen=True)
class Sizes:
    """The width and heads of one config, old and new."""

    width: int | None
    new_width: int
    heads: int | None
    new_heads: int
    head: int
    new_head: int
    stages: bool

    @staticmethod
    def of(tree: Tree, plan: Plan) -> Sizes:
        width, heads, stages = width_of(tree), heads_of(tree), has_stages(tree)
        new_width = plan.widths.get(width, 32 * plan.ways) if width else 32 * plan.ways
        if stages:
            new_width = 16
        new_heads = min(heads, 2 * plan.ways) if heads else 2 * plan.ways
        if heads == 3:
            new_heads = 2
        head = next(
            (
                tree[name]
                for name in ("head_dim", "d_head", "d_kv", "attention_head_dim")
                if is_size(tree.get(name))
            ),
            (width or new_width) // (heads or new_heads) or 1,
        )
        equal = max(1, new_width // new_heads)
        named = any(is_size(tree.get(name)) for name in ("head_dim", "d_head", "d_kv", "attention_head_dim"))
        if width is None or heads is None or not named or head * heads == width:
            new_head = equal
        elif (expanded := head * heads / width) in (2, 3, 4):
            new_head = int(equal * expanded)
        else:
            new_head = equal * 2 if head * heads > width else max(4, equal // 2)
        return Sizes(width, new_width, heads, new_heads, head, min(new_head, head), stages)


def _vocabulary(size: int, largest: int) -> int:
    if size >= largest:
        return min(size, VOCABULARY)
    return min(size, VOCABULARY - 2 if size > 0.9 * largest else VOCABULARY // 2)


def new_number(
    name: str, value: int, tree: Tree, plan: Plan, sizes: Sizes, depth: int | None, layers: Sequence[int]
) -> int:
    if value <= 1 and not LAYER_NUMBERS.fullmatch(name):
        return value
    if SPECIAL_TOKENS.fullmatch(name):
        return plan.tokens.get(value, value)
    if "vocab_size" in name or name.endswith("vocabulary_size"):
        return _vocabulary(value, plan.vocabulary)
    if (
        depth and layers and sizes.width and value % sizes.width == 0
    ):  # the outputs of some layers, side by side
        for indices in (numbers for other, numbers in tree.items() if is_index_list(other, numbers, depth)):
            if len(indices) > 3 and value == sizes.width * (1 + len(indices)):
                return sizes.new_width * (1 + len(set(indices) & set(layers)))
    if is_depth(name, value):
        return (
            len(layers)
            if value == depth and layers
            else min(value, round(value * plan.depth) if plan.depth else LAYERS)
        )
    if name in SECTIONS and depth and layers:
        end = boundaries(tree)[name]
        return sum(end - value <= layer < end for layer in layers)
    if name == "num_kv_shared_layers" and depth:
        return sum(layer >= depth - value for layer in layers)
    if (LAYER_NUMBERS.fullmatch(name) or BOUNDARIES.fullmatch(name)) and depth and layers:
        return sum(layer < value for layer in layers)
    if name == "max_window_layers":
        return min(value, len(layers))
    if is_period(name, value):
        several = sum(is_period(other, number) for other, number in tree.items()) > 1
        return min(value, 4 if several else 2)
    if re.fullmatch(r".*_layer_offset", name):
        return min(value, 2)
    if HEAD_SIZES.fullmatch(name):
        return _head_size(name, value, tree, plan, sizes)
    if HEADS.fullmatch(name):
        return _heads(value, plan, sizes)
    if name == "n_group" or name.endswith("expert_group") or name == "topk_group":
        groups = tree.get("n_group") or tree.get("num_expert_group") or value
        return min(value, 2) if name != "topk_group" or value == groups else 1
    if name == "index_kpool":
        return min(value, 2)
    if _PICKS.fullmatch(name):
        return min(value, 4 if name.startswith("index") else 2)
    if _EXPERTS.fullmatch(name):
        return _experts(value, name, plan)
    if "image_size" in name or name == "crop_size":
        return image_size(value, tree)
    if name in ("patch_size", "patch_size_h", "patch_size_w"):
        return _patch(value, tree)
    if "image_embedding" in name and value == _side(tree):
        return min(value, 8)
    if name in ("pos_emb_height", "pos_emb_width"):
        return min(value, 8)
    if name == "indexer_budget":  # a number of tokens, in groups of the compress ratio
        return min(value, 8)
    if re.search("token|seq|image", name) and _tokens_of_image(value, tree):
        return _new_tokens_of_image(value, tree)
    if re.fullmatch(r".*_(iters|iterations)", name):  # each is written out in the graph
        return min(value, 3)
    if name in ("n_groups", "mamba_n_groups"):
        return min(value, plan.ways)
    if name == "window_size" and sizes.stages:
        return 2
    if _WINDOWS.fullmatch(name):
        return WINDOW if value > 16 else value
    if _POSITIONS.fullmatch(name):
        return _positions(name, value, tree)
    if _STATES.fullmatch(name):
        return min(value, 16)
    if re.fullmatch(r"(num_)?code(book|vector).*|.*codevector.*size", name) and value > 32:
        return 32
    if name == "query_pre_attn_scalar":
        return sizes.new_head
    if "mel_bins" in name or name in ("input_size", "num_pos_feats", "feature_size"):
        return min(value, 16)
    if name in ("num_queries", "num_negatives", "num_latents"):
        return min(value, 8)
    if name in ("num_conv_pos_embeddings", "num_conv_pos_embedding_groups", "encoder_stride", "num_groups"):
        return min(value, 8)
    named = _SIZES.fullmatch(name) and not _KERNELS.fullmatch(name.removeprefix("conv_"))
    if named or name in WIDTHS:
        return _size(name, value, tree, plan, sizes)
    return value


def _heads(value: int, plan: Plan, sizes: Sizes) -> int:
    main = sizes.heads or value
    if value == main:
        return sizes.new_heads
    if value > main:
        return min(value, 2 * sizes.new_heads if value % main == 0 else sizes.new_heads)
    return min(value, plan.ways)


def _head_size(name: str, value: int, tree: Tree, plan: Plan, sizes: Sizes) -> int:
    partner = _heads_beside(name, tree)
    if partner is not None and sizes.width:
        count = tree[partner]
        new_count = _heads(count, plan, sizes)
        inner = tree.get("mamba_d_ssm")
        whole = (
            inner if is_size(inner) else sizes.width * (tree.get("mamba_expand") or tree.get("expand") or 1)
        )
        if "mamba" in name or "expand" in tree:
            if count * value == whole:
                new_whole = (
                    _size("mamba_d_ssm", inner, tree, plan, sizes)
                    if is_size(inner)
                    else whole * sizes.new_width // sizes.width
                )
                return max(1, int(new_whole) // new_count)
            return min(value, 16)
    parts = [
        (first, second)
        for first, second in itertools.combinations(
            [
                other
                for other in tree
                if other != name and HEAD_SIZES.fullmatch(other) and is_size(tree[other])
            ],
            2,
        )
        if tree[first] + tree[second] == value and "nope" in first + second
    ]
    if parts:
        return sum(_head_size(part, tree[part], tree, plan, sizes) for part in parts[0])
    scaled = value * sizes.new_head / sizes.head
    return min(value, max(4, 4 * round(scaled / 4)))


def _heads_beside(name: str, tree: Tree) -> str | None:
    """The count of the heads that a size is of: `mamba_d_head` and `mamba_n_heads`."""
    stem = re.sub(r"(d_head|head_dim|head_size)$", "", name)
    names = (f"{stem}n_heads", f"{stem}num_heads", f"{stem}num_attention_heads")
    return next((other for other in names if is_size(tree.get(other))), None)


def _experts(value: int, name: str, plan: Plan) -> int:
    if "shared" in name:
        return min(value, 2)
    if value > 4096:  # of product keys: a square number
        return 16
    return 4 * plan.ways if value >= 4 * plan.ways else max(2, value // 2 * 2)


def _patch(value: int, tree: Tree) -> int:
    return value if value <= 4 or has_stages(tree) else 4


def image_size(value: int, tree: Tree) -> int:
    patch = tree.get("patch_size")
    if has_stages(tree) or not is_size(patch):
        return min(value, 64)
    return min(value, 8 * _patch(int(patch), tree))


def _side(tree: Tree) -> int | None:
    """Patches along the side of an image, of the config itself or of the vision config inside it."""
    for one in (tree, tree.get("vision_config")):
        if isinstance(one, dict) and is_size(one.get("image_size")) and is_size(one.get("patch_size")):
            return int(one["image_size"] // one["patch_size"])
    return None


def _tokens_of_image(value: int, tree: Tree) -> bool:
    """Whether a number counts the tokens of an image: a square of the side, or of a half, third or fourth of it."""
    side, root = _side(tree), math.isqrt(value)
    return side is not None and value > 3 and root * root == value and side % root == 0 and side // root <= 4


def _new_tokens_of_image(value: int, tree: Tree) -> int:
    return int((8 * math.isqrt(value) // (_side(tree) or 8)) ** 2)


def _positions(name: str, value: int, tree: Tree) -> int:
    if "source" in name or "target" in name:
        return min(value, 32 if "source" in name else 64)
    if name.startswith("original"):
        return min(value, 32)
    root = math.isqrt(value)
    if "max" not in name and root * root == value:
        return min(value, 64)
    return min(value, POSITIONS)


def _size(name: str, value: int, tree: Tree, plan: Plan, sizes: Sizes) -> int:
    """A number of features: of the widths of this or another config, or a multiple; else about its share of it."""
    own, new = sizes.width, sizes.new_width
    if name in WIDTHS and value == own and sizes.stages:
        return (
            new * (2 ** (len(tree["depths"]) - 1)) if name == "hidden_size" and "embed_dim" in tree else new
        )
    if name == "embed_dim" and sizes.stages:
        return new
    if value in plan.widths and not sizes.stages:
        return plan.widths[value]
    if own and value == own // 2:
        return max(1, new // 2)
    if own and value % own == 0 and value // own <= 4:
        return min(value, new * (value // own))
    for width, changed in plan.widths.items():
        if value % width == 0 and value // width <= 4:
            return min(value, changed * (value // width))
    if value <= 16:
        return value
    return min(value, 2 * new if own and value > own else max(8, new // 2))
