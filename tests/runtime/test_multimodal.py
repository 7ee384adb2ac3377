"""Models with images and audio, sharded: towers placed by name, batches cut where pixels are not one row per sequence."""

from __future__ import annotations

import pytest

import autopar.api as api
from autopar.errors import PlanError, UsageError
from autopar.verify import verify
from tests.multimodal import multimodal

CASES = [
    ("qwen2_5_vl", "tp=2", ("model.visual.blocks.*.mlp.gate_proj.weight=[_@tp, _]",)),
    ("qwen2_5_vl", "dp=2", ("batch=dp",)),
    ("qwen3_vl", "dp=2", ()),
    ("llava", "dp=2,tp=2", ("vocab=tp",)),
    ("whisper", "tp=2", ("heads=tp",)),
]


@pytest.mark.slow  # half a minute each; the zoo runs these families too
@pytest.mark.parametrize(("kind", "mesh", "fix"), CASES)
def test_sharded_equals_unsharded(kind: str, mesh: str, fix: tuple[str, ...]) -> None:
    model, inputs = multimodal(kind)
    ranks = 4 if "," in mesh else 2
    result = verify(model, f"cpu:{ranks}", mesh=mesh, fix=fix, example_inputs=inputs)
    assert result.passed, str(result)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_data_ranks_split_images_and_sequences(kind: str) -> None:
    """Each of two ranks has one of two images, all through the tower, and one of two sequences."""
    model, inputs = multimodal(kind)
    plan = api.plan(model, "cpu:2", example_inputs=inputs, mesh="dp=2")
    program = api.compile(model, plan=plan, example_inputs=inputs).rank_program
    split = {name: sharding.axes for name, sharding in program.inputs.items()}
    assert split["pixel_values"] == split["input_ids"] == ("dp",)
    layers = {call.block for call in program.calls if ".blocks." in call.path}
    for block in layers:
        graph = program.blocks[block].graph.graph
        nodes = [node for node in graph.nodes if node.op == "call_function" and "sharding" in node.meta]
        assert all(node.meta["sharding"].axes == ("dp",) for node in nodes if "linear" in node.name)
        assert any("attention" in node.name and node.meta["local_shape"][0] == 1 for node in nodes)


@pytest.mark.slow
def test_micro_batches_of_a_model_that_takes_images_one_by_one_are_refused() -> None:
    model, inputs = multimodal("llava")
    plan = api.plan(model, "cpu:1", example_inputs=inputs, mesh="dp=1", micro_batches=2)
    with pytest.raises(PlanError, match=r"other ops for a micro-batch of 1(.|\n)*micro_batches=1"):
        api.compile(model, plan=plan, example_inputs=inputs)


def test_micro_batches_with_grids_are_refused() -> None:
    model, inputs = multimodal("qwen2_5_vl")
    with pytest.raises(UsageError, match=r"image_grid_thw of the whole batch decides(.|\n)*micro_batches=1"):
        api.plan(model, "cpu:1", example_inputs=inputs, mesh="dp=1", micro_batches=2)


def test_images_that_cannot_be_cut_with_their_sequences_are_refused() -> None:
    model, inputs = multimodal("qwen2_5_vl")
    odd = {**inputs, "pixel_values": inputs["pixel_values"][:31]}
    with pytest.raises(UsageError, match="different batch sizes: pixel_values has 31"):
        api.plan(model, "cpu:2", example_inputs=odd)
