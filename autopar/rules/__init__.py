"""One factor rule per op: how its loops appear in its operands and results. The table is `RULES`."""

from autopar.rules.call import OpCall
from autopar.rules.registry import (
    RULES,
    call_of_node,
    localize,
    operand_nodes,
    register_rule,
    rule_for,
    rule_of_node,
    unregister_rule,
)
from autopar.rules.rule import PAIR, SUMS, Rule, Sharded, pair_choice, sums_choice
from autopar.rules.selftest import RuleReport, check_rule

__all__ = [
    "PAIR",
    "RULES",
    "SUMS",
    "OpCall",
    "Rule",
    "RuleReport",
    "Sharded",
    "call_of_node",
    "check_rule",
    "localize",
    "operand_nodes",
    "pair_choice",
    "register_rule",
    "rule_for",
    "rule_of_node",
    "sums_choice",
    "unregister_rule",
]
