"""The table of all rules, and how one finds the rule of an op instance or of a graph node.

rule_of_node(%linear) -> Rule('a b k, n k -> a b n')
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autopar.errors import ShardingError, UsageError
from autopar.program import op_name, tensor_info
from autopar.rules import (
    attention,
    creation,
    cuts,
    elementwise,
    experts,
    indexing,
    loss,
    matmul,
    normalisation,
    recurrent,
    reductions,
    shapes,
    spectral,
)
from autopar.rules.call import OpCall, RuleFunction, leaves, map_leaves
from autopar.rules.rule import Rule, check_text

if TYPE_CHECKING:
    from torch.fx import Node

RULES: dict[str, RuleFunction] = {
    **elementwise.RULES,
    **shapes.RULES,
    **cuts.RULES,
    **creation.RULES,
    **matmul.RULES,
    **reductions.RULES,
    **normalisation.RULES,
    **attention.RULES,
    **indexing.RULES,
    **loss.RULES,
    **recurrent.RULES,
    **spectral.RULES,
    **experts.RULES,
}
_OURS = dict(RULES)


def rule_for(call: OpCall) -> Rule | None:
    """The rule of an op instance; None if there is none, and the op is kept whole.

    An instance that a rule of ours does not fit is kept whole as well (an overload nobody thought of); one that a
    registered rule does not fit raises its ShardingError, since its author wants to know.
    """
    function = RULES.get(call.name)
    if function is None:
        return None
    try:
        return function(call)
    except ShardingError:
        if function is _OURS.get(call.name):
            return None
        raise


# ---- graph nodes ------------------------------------------------------------------------------------------


def operand_nodes(node: Node) -> list[Node]:
    """The nodes that give the op its tensors, one per operand of its rule, duplicates kept."""
    return [leaf for leaf in leaves([list(node.args), dict(node.kwargs)]) if _is_tensor_node(leaf)]


def call_of_node(node: Node) -> OpCall:
    """The op instance a call_function node stands for; reads shapes from `meta["val"]`."""

    def seen(leaf: Any) -> Any:
        return tensor_info(leaf.meta["val"]) if _is_tensor_node(leaf) else leaf

    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else (value,)
    results = [info for info in map(tensor_info, values) if info is not None]
    return OpCall.of(
        op_name(node), map_leaves(tuple(node.args), seen), map_leaves(dict(node.kwargs), seen), results
    )


def rule_of_node(node: Node) -> Rule | None:
    return rule_for(call_of_node(node))


def _is_tensor_node(value: Any) -> bool:
    from torch.fx import Node

    return isinstance(value, Node) and tensor_info(value.meta.get("val")) is not None


# ---- rules from outside -----------------------------------------------------------------------------------


def register_rule(name: str, rule: str | RuleFunction, *, flops_per_point: float = 0.0) -> None:
    """Give the op `mylib::op` (or `mylib.op`) a rule: a text such as `b s d! -> b s d!`, or a function that
    takes an OpCall and returns a Rule, or None for an instance it does not cover.

    Raises UsageError for a bad name or a name that has a rule, ShardingError for a text that cannot be read.
    """
    key = op_key(name)
    if key in RULES:
        raise UsageError(f"op {key!r} already has a rule", hint=f"unregister_rule({key!r}) first")
    if callable(rule):
        RULES[key] = rule
        return
    check_text(rule)
    RULES[key] = _text_rule(rule, flops_per_point)


def unregister_rule(name: str) -> None:
    """Take a rule out of the table. Raises UsageError if there is none."""
    if RULES.pop(op_key(name), None) is None:
        raise UsageError(f"op {op_key(name)!r} has no rule", hint="a name as in RULES, such as 'aten.linear'")


def op_key(name: str) -> str:
    """`mylib::op`, `mylib.op` or `mylib::op.overload` as RULES names it: `mylib.op`."""
    space, separator, op = name.replace("::", ".").partition(".")
    if not separator or not space.isidentifier() or not op.split(".")[0].isidentifier():
        raise UsageError(f"op name {name!r} is not 'namespace::op'", hint="a name such as 'mylib::op'")
    return f"{space}.{op.split('.')[0]}"


def _text_rule(text: str, flops_per_point: float) -> RuleFunction:
    def rule(call: OpCall) -> Rule | None:
        try:
            return call.parse(text, flops_per_point=flops_per_point)
        except ShardingError as error:
            shown = ", ".join(map(str, call.operands))
            raise ShardingError(
                error.what,
                where=f"{call.name}({shown})",
                hint="a rule that fits every use, or a function that returns None for uses it does not cover",
            ) from error

    return rule


# ---- local arguments --------------------------------------------------------------------------------------


def localize(
    args: tuple[Any, ...],
    rule: Rule,
    local_result_shape: Sequence[int],
    counts: Mapping[int, int] | None = None,
) -> tuple[Any, ...]:
    """The op's arguments for one piece: the argument that holds the result's shape gets the local one, those that
    count a factor (`Rule.counts`) the local number."""
    local: dict[int, Any] = dict(counts or {})
    if rule.shape_arg is not None:
        local[rule.shape_arg] = [int(size) for size in local_result_shape]
    return tuple(local.get(index, argument) for index, argument in enumerate(args))


__all__ = [
    "RULES",
    "OpCall",
    "RuleFunction",
    "call_of_node",
    "localize",
    "operand_nodes",
    "register_rule",
    "rule_for",
    "rule_of_node",
    "unregister_rule",
]
