"""The plans by hand of Transformers' configs: read as Transformers reads them, right as placements, priced beside ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.mesh import Mesh
from autopar.passes import hand_plan
from autopar.passes.axes import name_axes
from autopar.passes.candidates import candidates
from autopar.passes.capture import capture
from autopar.passes.combinations import mesh_of
from autopar.passes.hand_plan import HandPlacement, hand_placement, plans_of, split_dim, style_of
from autopar.passes.lower import RankProgram, lower
from autopar.passes.problem import build_problem
from autopar.problem import Problem, Solution
from autopar.program import Program
from autopar.runtime.groups import join_mesh
from autopar.runtime.model import RankModel
from autopar.runtime.simulate import simulate
from autopar.runtime.store import Entry, ParameterStore
from autopar.runtime.trainer import Trainer
from bench.zoo_hand import HandRow, compare, line, summary
from bench.zoo_models import zoo_model

# Column and row pairs; gathered outputs; fused weights; experts; norms over split heads; one for each family of styles.
STORED = (
    "llama",
    "olmo2",
    "phi3",
    "gpt_neox",
    "qwen3_moe",
    "deepseek_v2",
    "aria_text",
    "codegen",
    "granite_swa",
)


@pytest.fixture
def one_rank() -> Iterator[Any]:
    """A mesh of one rank: DTensor's placements do not depend on how many there are."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def test_every_style_of_transformers_is_read() -> None:
    from transformers.distributed import expert_parallel  # noqa: F401  (registers its styles)
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    known = {
        *hand_plan.ROWS,
        *hand_plan.COLUMNS,
        *hand_plan.EMBEDDINGS,
        *hand_plan.WHOLE,
        hand_plan.DISPATCHED,
    }

    assert set(ALL_PARALLEL_STYLES) <= known


@pytest.mark.parametrize("model_type", STORED)
def test_parameters_are_split_in_the_dim_that_transformers_splits(model_type: str, one_rank: Any) -> None:
    from torch.distributed.tensor import DTensor
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model: Any = zoo_model(model_type)[0]
    ours = {
        name: split_dim(style_of(name, model.tp_plan) or "", name, parameter.dim())
        for name, parameter in model.named_parameters()
    }

    names = {name for name, _ in (*model.named_parameters(), *model.named_modules())}  # a tied weight once
    plan = {
        name: style for name, style in model._expand_parallel_plan(model.tp_plan).items() if name in names
    }
    apply_tensor_parallelism(model, one_rank, plan)

    theirs = {}
    for name, parameter in model.named_parameters():
        placement = parameter.placements[0] if isinstance(parameter, DTensor) else None
        dim = None if placement is None or not hasattr(placement, "dim") else placement.dim
        theirs[name] = dim if dim is None else dim % parameter.dim()
    assert ours == {name: theirs[name] for name in ours}  # tied weights are two by now
    assert any(dim is not None for dim in theirs.values())


# ---- the placement is right --------------------------------------------------------------------------------------


def captured(model: nn.Module, inputs: dict[str, Any]) -> tuple[Program, Problem]:
    program, axes = name_axes(capture(model, inputs))
    return program, build_problem(program, axes)


def run(model: nn.Module, inputs: dict[str, Any], program: RankProgram) -> tuple[float, dict[str, Tensor]]:
    """Loss and whole gradients on simulated ranks."""
    state: dict[str, Tensor] = {
        **program.constants,
        **dict(model.named_buffers(remove_duplicate=False)),
        **{name: value.detach() for name, value in model.named_parameters(remove_duplicate=False)},
    }

    def rank(_: int) -> tuple[float, dict[str, Tensor]]:
        groups = join_mesh(program.mesh)
        store = ParameterStore(program, groups, state)
        trainer = Trainer(RankModel(program, groups, store), torch.optim.SGD(store.parameters.values()))
        loss = trainer.gradients(inputs)

        def local(entry: Entry) -> Tensor:
            found = entry.parameter.grad
            return torch.zeros_like(entry.parameter) if found is None else found

        return loss, {name: store.whole_parameter(name, local) for name in store.parts}

    return simulate(program.mesh.device_count, rank)[0]


def placed(model: Any, program: Program, problem: Problem, plan: str, mesh: Mesh) -> HandPlacement:
    return hand_placement(program, problem, plans_of(model)[plan], mesh)


@pytest.mark.parametrize(
    ("model_type", "plan", "ranks"),
    [
        ("llama", "tp", 2),
        ("qwen2", "tp", 4),
        ("olmo2", "tp", 2),
        ("phi3", "tp", 2),
        ("qwen3_moe", "tp", 2),
        ("qwen3_moe", "tp+ep", 2),
    ],
)
def test_the_placement_by_hand_gives_the_gradients_of_the_model(
    model_type: str, plan: str, ranks: int
) -> None:
    """What is priced is a step that can be run, and computes what the model computes."""
    model, inputs = zoo_model(model_type)
    if hasattr(model, "set_experts_implementation") and "moe" in model_type:
        model.set_experts_implementation("eager")  # of Transformers' the one that takes float64
    model, mesh = model.double(), mesh_of(tp=ranks)
    program, problem = captured(model, inputs)
    hand = placed(model, program, problem, plan, mesh)
    solution = Solution(hand.choices, hand.shardings, {}, 0.0)

    loss, gradients = run(model, inputs, lower(program, problem, solution, mesh))

    expected = model(**inputs).loss
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)  # Transformers takes logits to float32
    wanted = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    largest = max(float(gradient.norm()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        error = float((gradients[name] - gradient).norm())
        assert error <= 1e-5 * max(float(gradient.norm()), 1e-3 * largest), name
    assert any(sharding.dim_of("tp") is not None for sharding in hand.shardings.values())


@pytest.mark.parametrize("model_type", ["llama", "olmo2", "qwen3_moe"])
def test_every_choice_by_hand_is_one_that_the_search_has(model_type: str) -> None:
    """Why ours can never be the slower one."""
    model, inputs = zoo_model(model_type)
    mesh = mesh_of(tp=2)
    program, problem = captured(model, inputs)

    for plan in plans_of(model):
        hand = placed(model, program, problem, plan, mesh)
        for op in problem.ops:
            able = [candidate.as_choice for candidate in candidates(op, problem, mesh)]
            assert hand.choices[op.name] in able


def test_a_dim_that_does_not_divide_is_whole_and_noted() -> None:
    model, inputs = zoo_model("llama")
    program, problem = captured(model, inputs)

    hand = placed(model, program, problem, "tp", mesh_of(tp=3))

    assert any("do not divide by 3" in note for note in hand.notes)


def test_of_a_tied_table_the_head_goes_by_its_own_style() -> None:
    """Look-ups are summed; the head's product over the vocabulary is gathered, so the loss is whole."""
    model, inputs = zoo_model("gemma2")
    program, problem = captured(model, inputs)
    hand = placed(model, program, problem, "tp", mesh_of(tp=2))

    kinds = {op.kind: hand.choices[op.name]["tp"] for op in problem.ops if op.name.startswith("part")}

    assert program.tied
    assert kinds["aten.embedding"] == "v"
    assert kinds["aten.linear"] == "n"
    assert kinds["autopar.cross_entropy"] is None


# ---- the comparison ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> HandRow:
    return compare("llama")


def test_bytes_by_hand_are_those_of_megatron(llama: HandRow) -> None:
    """Llama-7B: two all-reduces a layer forward and two backward, one of the embedding, one of the head's input, and the
    logits gathered; a ring moves 7/8 of the bytes, twice for an all-reduce (Shoeybi et al. 2019, section 3)."""
    sequence, hidden, layers, vocabulary = 2048, 4096, 32, 32000
    activation = sequence * hidden * 2

    expected = 7 / 8 * (2 * (4 * layers + 2) * activation + sequence * vocabulary * 2)

    assert llama.error == ""
    assert llama.hand is not None
    assert llama.hand.sent_bytes == pytest.approx(expected)


def test_ours_is_not_slower_and_says_what_it_found(llama: HandRow) -> None:
    assert llama.hand is not None
    assert llama.ours is not None
    assert not llama.worse
    assert llama.ours.step_s < llama.hand.step_s
    assert any("sequence instead of whole" in words for words in llama.found)
    assert any(words.startswith("loss: vocab instead of whole") for words in llama.found)


def test_a_slower_placement_of_ours_would_be_seen(llama: HandRow) -> None:
    assert llama.hand is not None
    assert llama.ours is not None
    swapped = replace(llama, hand=llama.ours, ours=llama.hand)

    assert swapped.worse
    assert "WORSE" in line(swapped)
    assert "ours worse: 1" in summary([swapped])


@pytest.mark.parametrize("model_type", ["phi3", "qwen3_moe"])
def test_ours_is_not_slower_with_fused_weights_and_experts(model_type: str) -> None:
    row = compare(model_type)

    assert row.error == ""
    assert not row.worse


def test_a_model_without_an_answer_says_why() -> None:
    row = compare("no_such_model")

    assert row.hand is None
    assert "no_such_model" in row.error
    assert "no_such_model" in line(row)
