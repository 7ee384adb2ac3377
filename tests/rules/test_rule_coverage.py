"""The exported graphs of tiny models: which ops have no rule, and whether the rules hold on the very instances."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import DENSE, EXPERTS, exported
from torch.fx import Interpreter, Node

from autopar.mesh import Mesh
from autopar.program import op_name
from autopar.rules import call_of_node, check_rule, operand_nodes, rule_of_node

# Removed by capture (no result), or no op on a tensor (takes one result of several).
NOT_OPS = {"aten._assert_tensor_metadata", "_operator.getitem"}


def op_nodes(name: str) -> list[Node]:
    program, _ = exported(name)
    return [
        node for node in program.graph.nodes if node.op == "call_function" and op_name(node) not in NOT_OPS
    ]


@pytest.mark.parametrize("name", [*DENSE, *EXPERTS])
def test_every_op_of_the_model_has_a_rule(name: str) -> None:
    without = {op_name(node) for node in op_nodes(name) if rule_of_node(node) is None}

    assert without == set()


@pytest.mark.parametrize("name", [*DENSE, *EXPERTS])
def test_operands_and_results_are_those_of_the_node(name: str) -> None:
    for node in op_nodes(name):
        call, rule = call_of_node(node), rule_of_node(node)
        assert rule is not None
        shapes = [tuple(operand.meta["val"].shape) for operand in operand_nodes(node)]
        assert shapes == [info.shape for info in call.operands]
        assert [len(shape) for shape in shapes] == [len(dims) for dims in rule.operands]
        assert len(call.results) == len(rule.results)


class _Checker(Interpreter):
    """Runs a graph and checks the rule of every op on the arguments it really gets."""

    checked = 0

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = target._schema.name.replace("::", ".") if hasattr(target, "_schema") else ""
        if target is torch.ops.aten.view.default:
            target = (
                torch.ops.aten.reshape.default
            )  # strides of a kernel's result differ from those at capture
        result = super().call_function(target, args, kwargs)
        if name and name not in NOT_OPS:
            operands = [
                leaf
                for leaf in torch.utils._pytree.tree_leaves((args, kwargs))
                if isinstance(leaf, torch.Tensor)
            ]
            gradients = any(operand.is_floating_point() for operand in operands) and name not in NO_GRADIENT
            report = check_rule(
                target,
                args,
                name,
                kwargs,
                gradients=gradients,
                values=name not in ("aten.empty_like", "aten.new_empty"),
                meshes=(Mesh((("x", 2),)),),
            )
            self.checked += len(report.checked)
        return result


NO_GRADIENT = {"aten.copy", "aten.slice_scatter", "aten.histc", "transformers.grouped_mm_fallback"}


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit", "t5", "deepseek-v3"])
def test_the_rules_hold_on_the_instances_of_the_model(name: str) -> None:
    program, inputs = exported(name)
    checker = _Checker(program.module(check_guards=False))

    checker.run(*torch.utils._pytree.tree_leaves(inputs))

    assert checker.checked > 50
