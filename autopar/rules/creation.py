"""Ops that make a tensor from nothing but sizes and numbers: `-> a b`.

Every dim of a constant may be split: the local op makes the local shape. What depends on the position (arange)
is whole. `new_ones(x, sizes)` and the like do not read x, so x may lie in any way (`reduced`).
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.rules.call import OpCall, RuleFunction, is_size_list, names, text_of, tokens
from autopar.rules.rule import Rule


def constant(call: OpCall) -> Rule | None:
    """full, zeros, ones, empty: sizes are argument 0."""
    if not call.args or not is_size_list(call.args[0]):
        return None
    return call.parse("-> ...", shape_arg=0) if not call.operands else None


def number(call: OpCall) -> Rule | None:
    return call.parse("-> ...")


def counted(call: OpCall) -> Rule | None:
    """arange, linspace, eye: the values depend on the position."""
    factors = [f"{factor}!" for factor in names(len(call.result_shapes[0]))]
    return call.parse(text_of([], [tokens(call.result_shapes[0], factors)])) if not call.operands else None


def like(call: OpCall) -> Rule | None:
    """full_like, zeros_like, ones_like, empty_like: the shape of the piece is the shape wanted."""
    return call.parse("... -> ...") if len(call.operands) == 1 else None


def new(call: OpCall) -> Rule | None:
    """new_ones(x, sizes): x gives a dtype and a device, no values."""
    if len(call.operands) != 1 or len(call.args) < 2:
        return None
    unread = names(len(call.shapes[0]), "x")
    return call.parse(f"{' '.join(unread)} -> ...", shape_arg=1, reduced=frozenset(unread))


RULES: Mapping[str, RuleFunction] = {
    **{f"aten.{name}": constant for name in ("full", "zeros", "ones", "empty")},
    **{
        f"aten.{name}": counted
        for name in ("arange", "linspace", "logspace", "eye", "tril_indices", "triu_indices")
    },
    **{f"aten.{name}": like for name in ("full_like", "zeros_like", "ones_like", "empty_like")},
    **{f"aten.{name}": new for name in ("new_full", "new_zeros", "new_ones", "new_empty")},
    "aten.scalar_tensor": number,
}
