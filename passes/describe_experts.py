"""Experts written out: the ops inside of `autopar.experts`, for the Workload that is read off a Program.

In:  a Program with named axes, its Problem, and a placement if there is one.
Out: the same with each layer of experts as the kernels it runs: a permutation of the rows, one grouped product per
     matrix, what is between them, the weighted sum of each token's slots. The placement of the op is that of its
     products.

Only shapes and names matter here: nothing runs these graphs.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from autopar.expert_functions import experts, steps_of
from autopar.passes.axes import name_axes
from autopar.passes.problem import build_problem, value_name
from autopar.problem import Choice, Problem, Solution
from autopar.program import Block, Program

aten = torch.ops.aten

KIND = "autopar.experts"


def written_out(
    program: Program, problem: Problem, solution: Solution | None
) -> tuple[Program, Problem, Solution | None]:
    """All three with experts written out; as they are where there are none."""
    if all(op.kind != KIND for op in problem.ops):
        return program, problem, solution
    choices: dict[str, Choice] = {}
    blocks = {}
    for name, block in program.blocks.items():
        if any(node.target is experts for node in block.op_nodes):
            writer = _Writer(block, solution)
            blocks[name] = writer.block()
            choices |= writer.choices
        else:
            blocks[name] = block
    longer, axes = name_axes(replace(program, blocks=blocks))
    again = build_problem(longer, axes).with_batch(problem.batch)
    again = replace(again, fixed=problem.fixed)
    if solution is not None:
        solution = replace(solution, choices={**solution.choices, **choices})
    return longer, again, solution


class _Writer:
    def __init__(self, source: Block, solution: Solution | None) -> None:
        self.source, self.solution = source, solution
        self.graph = Graph()
        self.choices: dict[str, Choice] = {}

    def block(self) -> Block:
        copied: dict[Node, Node] = {}
        for node in self.source.graph.graph.nodes:
            if node.target is experts:
                args = map_arg(node.args, copied.__getitem__)
                copied[node] = self.experts(node, *args)
                continue
            copied[node] = self.graph.node_copy(node, copied.__getitem__)
        outputs = tuple(copied[self.source.node(name)].name for name in self.source.outputs)
        return replace(self.source, graph=GraphModule(torch.nn.Module(), self.graph), outputs=outputs)

    def experts(
        self, op: Node, x: Node, index: Node, weights: Node, gate: Node | None, up: Node, down: Node | None,
        gate_bias: Node | None, up_bias: Node | None, down_bias: Node | None, extras: list[Node], inner: str, outer: str,
    ) -> Node:  # fmt: skip
        def insert(target: Any, *args: Any, **kwargs: Any) -> Node:
            node = self.graph.call_function(target, args, kwargs)
            node.meta = {key: op.meta[key] for key in ("stack_trace", "module") if key in op.meta}
            shown = map_arg((args, kwargs), lambda operand: operand.meta["val"])
            with torch.no_grad():
                node.meta["val"] = target(*shown[0], **shown[1])
            return node

        def shape(node: Node) -> tuple[int, ...]:
            return tuple(node.meta["val"].shape)

        def product(rows: Node, matrix: Node, bias: Node | None, factor: str) -> Node:
            if rows.meta["val"].dtype != matrix.meta["val"].dtype:
                rows = insert(aten._to_copy.default, rows, dtype=matrix.meta["val"].dtype)
            made = insert(torch.ops.autopar.grouped_linear.default, rows, matrix, ends)
            self.placed(op, made, factor)
            return (
                made if bias is None else insert(aten.add.Tensor, made, insert(aten.index.Tensor, bias, [at]))
            )

        share, count = shape(index)[-1], shape(up)[0]
        rows = insert(aten.reshape.default, x, [-1, shape(x)[-1]])
        sorted_at = insert(aten.sort.default, insert(aten.reshape.default, index, [-1]))
        at = self.item(sorted_at, 0)
        order = self.item(sorted_at, 1)
        counted = insert(aten._to_copy.default, at, dtype=torch.float32)
        ends = insert(aten.cumsum.default, insert(aten.histc.default, counted, count, 0, count - 1), 0)
        read = insert(aten.index.Tensor, rows, [insert(aten.floor_divide.default, order, share)])
        values: dict[str, Any] = {f"extra{number}": extra for number, extra in enumerate(extras)}
        packed = None if gate is None else _packed(gate, up)
        if gate is not None and packed is not None:
            both = packed if shape(packed)[2] == shape(up)[2] else insert(aten.transpose.int, packed, 1, 2)
            made = product(read, both, None, "f")
            width = shape(up)[1]
            values["gate"] = insert(aten.slice.Tensor, made, 1, 0, width)
            values["up"] = insert(aten.slice.Tensor, made, 1, width, 2 * width)
        else:
            values["up"] = product(read, up, up_bias, "f")
            if gate is not None:
                values["gate"] = product(read, gate, gate_bias, "f")
        result = self.text(inner, values, insert) if inner else values["up"]
        if down is not None:
            result = product(result, down, down_bias, "down")
        if outer:
            result = self.text(outer, {**values, "out": result}, insert)
        scale = insert(aten.index.Tensor, insert(aten.reshape.default, weights, [-1]), [order])
        weighted = insert(aten.mul.Tensor, result, insert(aten.unsqueeze.default, scale, 1))
        back = insert(aten.index.Tensor, weighted, [insert(aten.argsort.default, order)])
        slots = insert(aten.reshape.default, back, [*shape(index), shape(result)[-1]])
        total = insert(aten.sum.dim_IntList, slots, [len(shape(index)) - 1])
        if total.meta["val"].dtype != op.meta["val"].dtype:
            total = insert(aten._to_copy.default, total, dtype=op.meta["val"].dtype)
        return total

    def item(self, source: Node, at: int) -> Node:
        node = self.graph.call_function(operator.getitem, (source, at))
        node.meta = {**source.meta, "val": source.meta["val"][at]}
        return node

    def text(self, text: str, values: Mapping[str, Any], insert: Any) -> Node:
        names = dict(values)
        name = ""
        for name, op, overload, arguments, options in steps_of(text):

            def argument(item: tuple[str, Any]) -> Any:
                kind, value = item
                return names[value] if kind == "name" else getattr(torch, value) if kind == "torch" else value

            target = getattr(getattr(aten, op), overload)
            names[name] = insert(
                target, *map(argument, arguments), **{key: argument(item) for key, item in options}
            )
        found: Node = names[name]
        return found

    def placed(self, op: Node, made: Node, factor: str) -> None:
        """The product's choice is what the op's says of its columns or rows."""
        if self.solution is None:
            return
        choice = self.solution.choices.get(value_name(self.source.name, op.name), {})
        into = {"f": "n"} if factor == "f" else {"f": "k", "o": "n"}
        self.choices[value_name(self.source.name, made.name)] = {
            axis: into.get(str(split)) for axis, split in choice.items()
        }


def _packed(gate: Node, up: Node) -> Node | None:
    """The parameter that both are views of, if it is one."""
    roots = []
    for node in (gate, up):
        while node.op == "call_function" and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
        roots.append(node)
    one, other = roots
    whole = one.meta["val"].numel() == gate.meta["val"].numel() + up.meta["val"].numel()
    return one if one is other and one.op == "placeholder" and whole else None
