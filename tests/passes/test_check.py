"""The static checker passes what is lowered, and finds every single change that makes it compute something else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from autopar import api, collectives, prepared
from autopar.errors import ShardingError
from autopar.passes.check import check, flowing
from autopar.passes.check_block import STEPS, reached
from autopar.passes.lower import RankProgram
from autopar.sharding import Sharding
from tests.runtime.equality_worker import fixes
from tests.tiny import tiny

CASES = [
    "llama/dp=2,tp=2/megatron",
    "llama/tp=4/sequence",
    "bert/dp=2,tp=2/sequence",
    "t5/fsdp=2,tp=2/megatron",
    "gpt2/dp=2,tp=2/planned",
    "vit/dp=2,tp=2/megatron",
    "convnet/dp=2/planned",
]


MOST = 100  # mutants of each, evenly taken from all


@cache
def lowered(case: str) -> RankProgram:
    kind, mesh, variant = case.split("/")
    model, batch = tiny(kind)
    devices = 1
    for part in mesh.split(","):
        devices *= int(part.split("=")[1])
    return api.compile(
        model, f"cpu:{devices}", example_inputs=batch, mesh=mesh, fix=fixes(kind, variant)
    ).rank_program


@pytest.mark.parametrize("case", CASES)
def test_what_is_lowered_passes(case: str) -> None:
    check(lowered(case))


Mutation = Callable[[Node], None]


def drop(node: Node) -> None:
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    node.graph.erase_node(node)


def double(node: Node) -> None:
    users = list(node.users)
    with node.graph.inserting_after(node):
        again = node.graph.call_function(node.target, (node, *node.args[1:]))  # type: ignore[arg-type]
    for user in users:
        user.replace_input_with(node, again)


def with_argument(node: Node, index: int, value: object) -> None:
    node.args = (*node.args[:index], value, *node.args[index + 1 :])  # type: ignore[assignment]


def other_axis(node: Node) -> None:
    index = next(index for index, argument in enumerate(node.args) if argument in ("dp", "fsdp", "tp"))
    with_argument(node, index, "tp" if node.args[index] != "tp" else "dp")


def other_dim(node: Node) -> None:
    assert isinstance(node.args[1], int)
    with_argument(node, 1, node.args[1] + 1 if node.args[1] == 0 else 0)


def other_size(node: Node) -> None:
    index = {collectives.all_to_all: 4}.get(node.target, 3)  # type: ignore[call-overload]
    with_argument(node, index, 3)


def other_gradient(node: Node) -> None:
    index = 2 if node.target is collectives.all_reduce else 5
    with_argument(node, index, not node.args[index])


ON_STEPS: list[tuple[str, Mutation, tuple[object, ...]]] = [
    ("dropped", drop, STEPS),
    ("done twice", double, STEPS),
    ("over another axis", other_axis, STEPS),
    (
        "of another dim",
        other_dim,
        (collectives.all_gather, collectives.reduce_scatter, collectives.slice_own, collectives.all_to_all),
    ),
    (
        "of another size",
        other_size,
        (collectives.all_gather, collectives.reduce_scatter, collectives.slice_own, collectives.all_to_all),
    ),
    ("with another backward", other_gradient, (collectives.all_reduce, collectives.all_gather)),
]


def mutants(program: RankProgram) -> Iterator[tuple[str, RankProgram]]:
    """Every program that differs from this one in one place."""
    flows, _ = flowing(program)
    for name, block in program.blocks.items():
        differentiable = reached(block, flows[name])
        for index, node in enumerate(block.graph.graph.nodes):
            if all(str(user.target).startswith("aten.new_") for user in node.users):
                continue  # it gives these a dtype; how it lies does not matter
            for words, mutation, targets in ON_STEPS:
                if mutation is other_gradient and node not in differentiable:
                    continue
                if node.op == "call_function" and node.target in targets:
                    yield f"{name}: {node} {words}", changed(program, name, index, mutation)
            if node.op == "call_function" and node.target is collectives.scaled_sum:
                yield f"{name}: {node} not scaled", changed(program, name, index, drop)
                yield (
                    f"{name}: {node} scaled by 4",
                    changed(program, name, index, lambda node: with_argument(node, 1, 4)),
                )
            if node.op == "call_function" and node.target not in STEPS and "sharding" in node.meta:
                for axis in node.meta["sharding"].axes:
                    yield (
                        f"{name}: {node} reduced needlessly",
                        changed(program, name, index, lambda node, axis=axis: reduce_after(node, axis)),
                    )
    for name, layout in program.state.items():
        if not layout.info.trainable:
            continue
        for axis, size in program.mesh.axes:
            if size == 1 or axis in layout.sharding.axes:
                continue
            sums = set(layout.grad_sums) ^ {axis}
            state = {**program.state, name: replace(layout, grad_sums=tuple(sorted(sums)))}
            if any(name in call.state for call in program.calls):
                yield f"gradient of {name}: {axis} toggled", replace(program, state=state)
    for name, sharding in program.inputs.items():
        if sharding.axes:
            inputs = {**program.inputs, name: Sharding.whole(len(sharding.dims))}
            yield f"input {name} whole", replace(program, inputs=inputs)


def reduce_after(node: Node, axis: str) -> None:
    """An all-reduce of what may be split, or a sum; the others get it as it was."""
    users = list(node.users)
    with node.graph.inserting_after(node):
        reduced = node.graph.call_function(collectives.all_reduce, (node, axis, False))
    for user in users[:1]:
        user.replace_input_with(node, reduced)


def changed(program: RankProgram, block: str, index: int, mutation: Mutation) -> RankProgram:
    graph = copy_graph(program.blocks[block].graph)
    mutation(list(graph.graph.nodes)[index])
    return replace(program, blocks={**program.blocks, block: replace(program.blocks[block], graph=graph)})


def copy_graph(module: GraphModule) -> GraphModule:
    graph = torch.fx.Graph()
    copied: dict[Node, Node] = {}
    for node in module.graph.nodes:
        copied[node] = graph.node_copy(node, copied.__getitem__)
        copied[node].meta = copy.copy(node.meta)
    return GraphModule(torch.nn.Module(), graph)


def is_found(program: RankProgram) -> bool:
    try:
        check(program)
    except ShardingError as error:
        return bool(error.where and error.hint)
    return False


@pytest.mark.parametrize("case", CASES)
def test_every_mutant_is_found(case: str) -> None:
    program = lowered(case)
    every = list(mutants(program))
    chosen = every[:: -(-len(every) // MOST)]
    missed = [words for words, mutant in chosen if not is_found(mutant)]
    assert not missed, f"{len(missed)} of {len(chosen)}: {missed[:20]}"
    assert len(chosen) > 3


def test_compile_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny("convnet")
    lower = prepared.lower

    def without_a_sum(*arguments: Any) -> RankProgram:
        return next(mutant for words, mutant in mutants(lower(*arguments)) if "toggled" in words)

    monkeypatch.setattr(prepared, "lower", without_a_sum)
    with pytest.raises(ShardingError, match="the store sums it over"):
        api.compile(model, "cpu:2", example_inputs=batch, mesh="dp=2")
