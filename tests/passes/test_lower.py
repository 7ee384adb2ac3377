"""Lowered blocks: local shapes, the collectives one expects, every partial sum reduced once."""

from __future__ import annotations

import re
from collections import Counter

import pytest

import autopar.api as api
from autopar.passes.lower import RankProgram
from tests.tiny import tiny

MEGATRON = ("heads=tp", "ffn=tp", "vocab=tp", "sequence=tp")


def lowered(kind: str, mesh: str, *fix: str) -> RankProgram:
    model, inputs = tiny(kind)
    devices = 1
    for part in mesh.split(","):
        devices *= int(part.split("=")[1])
    return api.compile(model, f"cpu:{devices}", inputs, mesh=mesh, fix=fix).rank_program


def steps(program: RankProgram, block: str) -> Counter[str]:
    names = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "slice_own", "copy")
    found = re.findall(
        rf" = ({'|'.join(names)})\(", str(program).split(f"block {block}\n")[1].split("\nblock ")[0]
    )
    return Counter(found)


def test_a_megatron_layer_gathers_and_scatters_twice() -> None:
    program = lowered("llama", "dp=2,tp=2", *MEGATRON)
    found = steps(program, "model_layers")
    # Before q, k, v together and before gate and up together; and, without a gradient, the two rotary tables, since
    # `sequence=tp` splits them too.
    assert found["all_gather"] == 4
    assert (
        str(program).split("block model_layers\n")[1].split("\nblock ")[0].count("coordinate_tp, True)") == 2
    )
    assert found["reduce_scatter"] == 2
    assert found["all_reduce"] == found["all_to_all"] == 0


def test_norm_weights_leave_their_sums_to_the_store() -> None:
    program = lowered("llama", "dp=2,tp=2", *MEGATRON)
    norm = program.state["model.layers.1.input_layernorm.weight"]
    assert norm.grad_sums == ("dp", "tp")
    assert program.state["model.layers.1.mlp.up_proj.weight"].grad_sums == ("dp",)


def test_data_parallel_blocks_have_no_steps() -> None:
    program = lowered("llama", "fsdp=2,dp=2")
    assert not steps(program, "model_layers")
    assert program.state["model.layers.0.mlp.up_proj.weight"].grad_sums == ("dp", "fsdp")


def test_shapes_are_local() -> None:
    program = lowered("llama", "dp=2,tp=2", *MEGATRON)
    assert "linear: [4@dp, 16, 128@tp]" in re.sub(r"%linear_default_\d", "linear", str(program))
    assert re.search(r"reshape\S*\(.*\[2, 16, 2, 16\]\)", str(program))  # batch 4/2, heads 4/2


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [("bert", "tp=2"), ("bert", "dp=2,tp=2"), ("vit", "tp=4"), ("gpt2", "tp=4"), ("t5", "dp=2,tp=2")],
)
def test_no_partial_sum_reaches_an_op_that_is_not_linear(kind: str, mesh: str) -> None:
    """Static check: whatever an op of the graph takes is no partial sum, unless its rule passes sums through."""
    program = lowered(kind, mesh)
    for block in program.blocks.values():
        partial = {}
        for node in block.graph.graph.nodes:
            sharding = node.meta.get("sharding")
            if sharding is None:  # a step: it reduces what it takes
                continue
            partial[node] = bool(sharding.sums)
            if partial[node] or node.op == "placeholder":
                continue
            assert not any(partial.get(operand, False) for operand in node.all_input_nodes), (
                block.name,
                node,
            )


def test_a_plan_for_another_model_is_refused() -> None:
    from autopar.errors import PlanError

    model, inputs = tiny("llama")
    plan = api.plan(model, "cpu:2", example_inputs=inputs)
    other, other_inputs = tiny("qwen3")
    with pytest.raises(PlanError, match=r"another model(.|\n)*try"):
        api.compile(other, plan=plan, example_inputs=other_inputs)


def test_a_plan_restored_from_its_text_lowers_to_the_same_program() -> None:
    from autopar import Plan

    model, inputs = tiny("bert")
    plan = api.plan(model, "cpu:4", example_inputs=inputs, mesh="dp=2,tp=2")
    one = api.compile(model, plan=plan, example_inputs=inputs)
    other = api.compile(model, plan=Plan.from_json(plan.to_json()), example_inputs=inputs)
    assert str(one.rank_program) == str(other.rank_program)
