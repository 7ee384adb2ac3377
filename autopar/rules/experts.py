"""A layer of experts (`autopar.experts`), tokens not flattened:

    experts(x: b s d!, index: b s k!, weights: b s k!, gate: e f d!, up: e f d!, down: e o f) -> b s o

- Tokens split freely.
- `e` split leaves a partial sum: each rank adds up the slots that go to its experts. The rank must know which they
  are, so the lowering "experts" is needed.
- The pairs `b~e` and `s~e` split tokens and experts by one axis: rows are sent to their experts and back inside.
- `f` split leaves a partial sum too; a bias of `down`, which would be added once on each rank, is divided there.

With a function between the matrices that is not pointwise `f` is whole, with one after them also `o`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.program import TensorInfo
from autopar.rules.call import OpCall, RuleFunction, text_of, tokens, words
from autopar.rules.rule import Rule

# ATen ops of which each element of the result needs one element of each operand.
POINTWISE = frozenset(
    words(
        "abs add clamp clamp_max clamp_min clone div elu erf exp gelu hardsigmoid hardswish hardtanh leaky_relu log "
        "log_sigmoid maximum minimum mish mul neg pow reciprocal relu relu6 rsqrt rsub sigmoid silu softplus sqrt "
        "square sub tanh where _to_copy ge gt le lt eq ne"
    )
)


def is_pointwise(text: str) -> bool:
    """Whether the text of an expert treats every column alike, so that a piece of the columns gives that piece."""
    called = re.findall(r"([A-Za-z_]\w*)(?:\.\w+)?\(", text)
    return "extra" not in text and all(name in POINTWISE for name in called)


def experts(call: OpCall) -> Rule | None:
    """experts(x, index, weights, gate, up, down, gate_bias, up_bias, down_bias, extras, inner, outer)."""
    x, index, weights, gate, up, down, gate_bias, up_bias, down_bias, extras, inner, outer = call.args
    lead = _lead(x.shape[:-1])
    one_width = down is None or up.shape[1] == down.shape[2]
    f = "f" if one_width and is_pointwise(inner) and not outer else "f!"
    o = "o!" if outer else "o"
    hidden, result = ["e", f], [*lead, f if down is None else o]
    factors: list[tuple[TensorInfo | None, list[str]]] = [
        (x, [*lead, "d!"]),
        (index, [*lead, "k!"]),
        (weights, [*lead, "k!"]),
        (gate, [*hidden, "d!"]),
        (up, [*hidden, "d!"]),
        (down, ["e", o, f if one_width else "f_2!"]),
        (gate_bias, hidden),
        (up_bias, hidden),
        (down_bias, ["e", o]),
    ]
    factors += [
        (extra, [f"x{number}_{dim}!" for dim in range(len(extra.shape))])
        for number, extra in enumerate(extras)
    ]
    operands = [tokens(info.shape, names) for info, names in factors if info is not None]
    text = text_of(operands, [tokens(call.result_shapes[0], result)])
    special = {"e"} | ({"f"} if down_bias is not None else set())
    rule = call.parse(
        text,
        special=frozenset(special),
        lowering="experts",
        pairs=tuple(
            (name, "e") for name, size in zip(lead, x.shape, strict=False) if size > 1 and up.shape[0] > 1
        ),
        logical={
            "e": "expert",
            "f": "ffn",
            **(dict(zip(lead, ("batch", "sequence"), strict=False)) if len(lead) > 1 else {}),
        },
    )
    return _with_flops(rule, call)


def _lead(shape: Sequence[int]) -> list[str]:
    return (
        [["t"], ["b", "s"]][len(shape) - 1]
        if len(shape) in (1, 2)
        else [f"t{dim}" for dim in range(len(shape))]
    )


def _with_flops(rule: Rule, call: OpCall) -> Rule:
    """Two operations for each entry of each matrix of the k experts of each token."""
    _, index, _, gate, up, down = call.args[:6]
    entries = sum(matrix.shape[1] * matrix.shape[2] for matrix in (gate, up, down) if matrix is not None)
    slots = 1
    for size in index.shape:
        slots *= size
    return replace(rule, flops_per_point=2.0 * entries * slots / max(rule.points, 1.0))


def grouped_linear(call: OpCall) -> Rule | None:
    """grouped_linear(rows[t, k], weight[e, n, k], ends[e]): rows of an expert stand together."""
    count = call.shapes[1][0]
    logical = {"e": "expert"}
    return call.parse(
        "t! k, e! n k, e! -> t! n", sums=((0,), (1,)), flops_per_point=2.0 / max(count, 1), logical=logical
    )


RULES: Mapping[str, RuleFunction] = {"autopar.experts": experts, "autopar.grouped_linear": grouped_linear}
