"""fp8: the products of linear layers in the blocks of a rank program, in fp8.

In:  a RankProgram, lowered for bf16 (and checked: the checker reads rules, which these functions have none of).
Out: the same, with linear layers as calls of `autopar/fp8_functions.py`.

    %linear_4: linear.default(%copy_1, %mlp_gate_proj_weight)
    %linear_4: fp8_linear(%copy_1, %mlp_gate_proj_weight, None, 'tensor')

The head and routers stay as they are, by their use (`roles.py`): the loss and the choice of experts are sensitive to
few bits. So do embeddings, attention, norms, products without a parameter, and the experts' grouped products.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch.fx import Graph, GraphModule, Node

from autopar.errors import UsageError
from autopar.fp8_functions import RECIPES, fp8_linear, fp8_mm
from autopar.passes.lower import RankBlock, RankProgram
from autopar.passes.roles import CHOICES, LOSSES, origin, products_before
from autopar.program import Call

aten = torch.ops.aten


def use_fp8(program: RankProgram, *, scaling: str = "tensor", ignore: Sequence[str] = ()) -> RankProgram:
    """The program with its linear layers in fp8. `scaling`: one scale per "tensor", or per "row" (and column).

    `ignore`: patterns of parameter names whose products stay as they are; a layer in which they match is a block of its
    own then. Raises UsageError for a pattern that nothing matches, and for a program without a product to change.
    """
    if scaling not in RECIPES:
        raise UsageError(
            f"there is no scaling {scaling!r} in fp8", where="fp8", hint=f"one of {', '.join(RECIPES)}"
        )
    for pattern in ignore:
        if not any(_matches(name, [pattern]) for name in program.state):
            raise UsageError(f"fp8: no parameter is called {pattern!r}", where="ignore", hint="*.down_proj.*")
    able = {name: _linears(block) for name, block in program.blocks.items()}
    blocks: dict[str, RankBlock] = {}
    calls: list[Call] = []
    names: dict[tuple[str, frozenset[str]], str] = {}
    for call in program.calls:
        chosen = frozenset(
            node
            for node, weight in able[call.block].items()
            if not _matches(_bound(program, call)[weight], ignore)
        )
        key = (call.block, chosen)
        if key not in names:
            variants = sum(block == call.block for block, _ in names)
            names[key] = f"{call.block}_{variants + 1}" if variants else call.block
            blocks[names[key]] = _changed(program.blocks[call.block], names[key], chosen, scaling)
        calls.append(replace(call, block=names[key]))
    if not any(chosen for _, chosen in names):
        raise UsageError(
            "the model has no linear layer that could run in fp8", where="precision", hint="precision='bf16'"
        )
    return replace(program, blocks=blocks, calls=tuple(calls))


def _linears(block: RankBlock) -> dict[str, str]:
    """The products of a block that may be in fp8, by node name -> the state that is their weight."""
    graph = block.graph.graph
    kept = {*products_before(graph, LOSSES), *products_before(graph, CHOICES)}
    found = {}
    for node in graph.nodes:
        if node.target in (aten.linear.default, aten.mm.default) and node not in kept:
            weight = node.args[1]
            assert isinstance(weight, Node)
            source = origin(weight)
            if source.op == "placeholder" and source.name in block.state:
                found[node.name] = source.name
    return found


def _bound(program: RankProgram, call: Call) -> Mapping[str, str]:
    return dict(zip(program.blocks[call.block].state, call.state, strict=True))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Brackets, of a piece of a packed parameter, are themselves."""
    return any(fnmatchcase(name, pattern.replace("[", "[[]")) for pattern in patterns)


def _changed(block: RankBlock, name: str, chosen: frozenset[str], scaling: str) -> RankBlock:
    fresh = Graph()
    mapping: dict[Node, Node] = {}
    for node in block.graph.graph.nodes:
        if node.name in chosen:
            x, weight, *bias = (mapping[each] if isinstance(each, Node) else each for each in node.args)
            if node.target is aten.mm.default:
                copied = fresh.call_function(fp8_mm, (x, weight, scaling))
            else:
                copied = fresh.call_function(fp8_linear, (x, weight, bias[0] if bias else None, scaling))
            copied.meta = dict(node.meta)
        else:
            copied = fresh.node_copy(node, mapping.__getitem__)
        mapping[node] = copied
    fresh.lint()
    return replace(block, name=name, graph=GraphModule(torch.nn.Module(), fresh))
