"""Workload: what one training step of a model computes, per token and layer, whatever its layout; torch-free.

In:  the numbers of a config (`transformer_shape.py`), or a captured Program (`passes/describe.py`).
Out: layers of ops with their sizes, from which the cost model prices any layout in closed form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from autopar.errors import UsageError
from autopar.workload_files import MOST_LAYERS, check_fields

# How tensor parallelism splits an op. "column"/"row": a matmul's outer or inner dim; "inner": everything inside a
# tensor-parallel region (heads, ffn); "sequence": the sequence where `sp` is on, else nothing; "none": repeated.
SPLITS = ("column", "row", "inner", "sequence", "none")


MOST_TOKENS = 10**12  # of one step: far above any, and far below where 64 bits end


def check_sizes(batch: int, seq: int) -> None:
    """Raise UsageError for a step of more tokens than MOST_TOKENS."""
    if not 0 < batch * seq <= MOST_TOKENS:
        raise UsageError(
            f"a batch of {batch} sequences of {seq} tokens, expected 1 to {MOST_TOKENS:,} tokens per step",
            where="batch and seq",
            hint="batch=1024, seq=8192",
        )


@dataclass(frozen=True)
class Matmul:
    """[tokens, k] x [k, n]. `ways`: the most ranks tp can split it over evenly enough (0: any divisor of its dim).
    `share`: matmul rows per token (topk for experts). `experts`: how many weights there are, 0 for a dense one.
    `trained`: whether a weight gradient is made. `weight`: False for an activation-activation product."""

    name: str
    k: int
    n: int
    split: str
    ways: int = 0
    share: float = 1.0
    experts: int = 0
    bias: bool = False
    trained: bool = True
    weight: bool = True


@dataclass(frozen=True)
class Attention:
    """Softmax attention. `window`: keys a query sees at most (0: all before it, or all if not causal)."""

    name: str
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    causal: bool = True
    window: int = 0


@dataclass(frozen=True)
class Stream:
    """A memory-bound op or group of ops that runs as one kernel: elements read and written per token, forward and
    backward, and how tp splits it. `kind`: norm, rotary, activation, residual, dropout, softmax, router, scan, ...
    `share` as for Matmul: rows per token. `kernels`: launches each way. `item`: bytes per element."""

    name: str
    kind: str
    forward: float
    backward: float
    split: str
    share: float = 1.0
    kernels: int = 1
    item: int = 2


@dataclass(frozen=True)
class Saved:
    """Elements per token that a layer keeps for the backward. `split`: as tp splits the value. `item`: bytes per
    element. `selective`: not kept under selective recompute. `square`: elements per token and key instead (the
    scores that attention without a fused kernel keeps), times the sequence length. `expert`: of the rows that experts
    work on; `matmul`: the result of a product; `operand`: kept for a product's weight gradient alone."""

    name: str
    elements: float
    split: str
    item: float = 2.0
    selective: bool = False
    square: bool = False
    share: float = 1.0
    expert: bool = False
    matmul: bool = False
    operand: bool = False


@dataclass(frozen=True)
class Layer:
    """One kind of layer. `parameters`: (name, elements, split) of what is no matmul weight (norms, biases).
    `hidden`: width of the residual stream, which is what tp and pp send; `dispatch`: width of what goes to experts, if
    another (latent experts). `regions`: tensor-parallel regions, each
    with one gather before and one reduction after it (Megatron: attention and mlp)."""

    name: str
    hidden: int
    ops: tuple[Matmul | Attention | Stream, ...]
    saved: tuple[Saved, ...]
    parameters: tuple[tuple[str, int, str], ...] = ()
    regions: int = 2
    dispatch: int = 0

    @property
    def expert_matmuls(self) -> tuple[Matmul, ...]:
        return tuple(op for op in self.ops if isinstance(op, Matmul) and op.experts)

    @property
    def experts(self) -> int:
        return max((op.experts for op in self.expert_matmuls), default=0)

    @property
    def topk(self) -> float:
        return max((op.share for op in self.expert_matmuls), default=0.0)

    @property
    def expert_parameters(self) -> int:
        return sum(op.experts * (op.k * op.n + (op.n if op.bias else 0)) for op in self.expert_matmuls)

    @property
    def dense_parameters(self) -> int:
        weights = sum(
            op.k * op.n + (op.n if op.bias else 0)
            for op in self.ops
            if isinstance(op, Matmul) and not op.experts and op.weight
        )
        return weights + sum(elements for _, elements, _ in self.parameters)


@dataclass(frozen=True)
class Workload:
    """A model as runs of equal layers, with its embedding in front and its head and loss behind.

    `layers`: (Layer, how many) in model order. `seq`: tokens per sequence. `embedding`: elements of the input tables
    (word and position); `head`: elements of the output projection (0 if there is none or, with `tied`, it is the
    embedding's). `vocab`: columns of the logits (0: no language-model loss). `head_hidden`: width into the head.
    `frozen`: parameters that are not trained (LoRA), as a share of all. `losses`: predictions per token, each with its
    own logits. `largest_dims` for checks: heads, kv_heads.
    """

    name: str
    layers: tuple[tuple[Layer, int], ...]
    hidden: int
    seq: int
    vocab: int
    embedding: int
    head: int
    tied: bool = False
    heads: int = 0
    kv_heads: int = 0
    final_parameters: int = 0
    frozen: float = 0.0
    losses: int = 1
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def depth(self) -> int:
        return sum(count for _, count in self.layers)

    @cached_property
    def kinds(self) -> tuple[Layer, ...]:
        """The distinct layers."""
        return tuple(dict.fromkeys(layer for layer, _ in self.layers))

    @property
    def experts(self) -> int:
        return max((layer.experts for layer, _ in self.layers), default=0)

    @property
    def parameters(self) -> int:
        inside = sum(
            count * (layer.dense_parameters + layer.expert_parameters) for layer, count in self.layers
        )
        return inside + self.embedding + self.head + self.final_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets."""
        inside = 0.0
        for layer, count in self.layers:
            active = layer.expert_parameters * layer.topk / layer.experts if layer.experts else 0.0
            inside += count * (layer.dense_parameters + active)
        return int(inside) + self.embedding + self.head + self.final_parameters

    def flops_per_token(self) -> float:
        """Matmul and attention operations of forward and backward for one token, nothing recomputed."""
        total = 2.0 * 3 * self.hidden * self.vocab
        for layer, count in self.layers:
            for op in layer.ops:
                if isinstance(op, Matmul):
                    total += count * 2.0 * op.k * op.n * op.share * (3 if op.trained else 2)
                elif isinstance(op, Attention):
                    total += count * 3 * attention_flops(op, self.seq)
        return total

    def to_dict(self) -> dict[str, Any]:
        """JSON-friendly; `from_dict` gives back an equal Workload. Equal layers are written once."""
        kinds = list(dict.fromkeys(layer for layer, _ in self.layers))
        data = asdict(replace(self, layers=()))
        data["kinds"] = [
            asdict(layer) | {"ops": [{"op": type(op).__name__.lower(), **asdict(op)} for op in layer.ops]}
            for layer in kinds
        ]
        data["layers"] = [[kinds.index(layer), count] for layer, count in self.layers]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Workload:
        """Read what `to_dict` wrote; runs no code. Raises UsageError for what it is not."""
        try:
            rest = dict(data)
            kinds = [_layer_of(kind) for kind in rest.pop("kinds")]
            runs = [(index, count) for index, count in rest.pop("layers")]
            if not all(type(index) is int and 0 <= index < len(kinds) for index, _ in runs):
                raise ValueError(f"layers name kinds from 0 to {len(kinds) - 1}")
            rest["notes"] = tuple(rest.get("notes", ()))
            found = cls(layers=tuple((kinds[index], count) for index, count in runs), **rest)
            check_fields(found, SPLITS)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"not a workload: {error}", where="workload", hint="to plan again") from None
        if found.depth > MOST_LAYERS:
            raise UsageError(
                f"not a workload: {found.depth} layers", where="workload", hint=f"at most {MOST_LAYERS}"
            )
        return found

    def at(self, seq: int) -> Workload:
        """The same model at another sequence length."""
        return replace(self, seq=seq)


_OPS = {kind.__name__.lower(): kind for kind in (Matmul, Attention, Stream)}


def _layer_of(data: Mapping[str, Any]) -> Layer:
    ops = tuple(
        _OPS[op["op"]](**{key: value for key, value in op.items() if key != "op"}) for op in data["ops"]
    )
    return Layer(
        name=data["name"],
        hidden=data["hidden"],
        ops=ops,
        saved=tuple(Saved(**item) for item in data["saved"]),
        parameters=tuple((name, elements, split) for name, elements, split in data["parameters"]),
        regions=data["regions"],
    )


def attention_flops(op: Attention, seq: int) -> float:
    """Forward operations per token: two products over the keys that a query sees."""
    seen: Any = seq
    if op.window:  # an array or a symbol in the place of `seq` has a minimum of its own
        seen = min(op.window, seq) if isinstance(seq, int | float) else np.minimum(op.window, seq)
    keys = seen * (1 - seen / (2 * seq)) if op.causal else seen
    return 2.0 * op.heads * (op.qk_dim + op.v_dim) * keys  # type: ignore[no-any-return]
