"""Constraints in words, carried through the rules to a fixed point; clashes name both sources."""

from __future__ import annotations

from functools import cache

import pytest

from autopar import Mesh
from autopar.cluster import load_cluster
from autopar.cost.prices import Prices
from autopar.errors import ConstraintError, UsageError
from autopar.passes.axes import name_axes
from autopar.passes.capture import capture
from autopar.passes.check import check
from autopar.passes.combinations import mesh_of
from autopar.passes.lower import lower
from autopar.passes.placement import solve
from autopar.passes.problem import build_problem
from autopar.passes.propagate import check_fixed, parse_constraint, propagate
from autopar.problem import Problem, Solution
from autopar.program import Program
from bench.zoo_run import differences, reference
from tests.tiny import tiny


@cache
def prepared(kind: str = "llama") -> tuple[Program, Problem]:
    model, inputs = tiny(kind)
    program, axes = name_axes(capture(model, inputs))
    return program, build_problem(program, axes)


def fixed(*texts: str) -> tuple[Problem, tuple[str, ...]]:
    program, problem = prepared()
    return propagate(problem, program, [parse_constraint(text) for text in texts])


def kinds(problem: Problem) -> dict[str, set[str | None]]:
    """Op kind -> the logical axes that tp splits there."""
    found: dict[str, set[str | None]] = {}
    for op in problem.ops:
        factor = problem.fixed.get(op.name, {}).get("tp")
        if factor is not None:
            found.setdefault(op.kind, set()).add(op.logical.get(factor))
    return found


def test_heads_reach_projections_attention_and_output() -> None:
    problem, notes = fixed("heads=tp")
    found = kinds(problem)
    assert found["aten.linear"] == {"heads"}
    assert found["autopar.attention"] == {"heads"}
    assert sum(op.kind == "aten.linear" for op in problem.ops if op.name in problem.fixed) == 4
    assert notes == ()


def test_a_parameter_pattern_propagates_forward_and_backward() -> None:
    by_weight, _ = fixed("model.layers.*.mlp.up_proj.weight=[_@tp, _]")
    by_name, _ = fixed("ffn=tp")
    assert dict(by_weight.fixed) == dict(by_name.fixed)


def test_batch_goes_everywhere() -> None:
    problem, _ = fixed("batch=dp.fsdp")
    layer = [op for op in problem.ops if op.name.startswith("model_layers/") and "unsqueeze" not in op.name]
    assert all(set(problem.fixed[op.name]) == {"dp", "fsdp"} for op in layer)


def test_two_axes_that_meet_leave_a_note() -> None:
    _, notes = fixed("heads=tp", "sequence=tp")
    assert any("`heads=tp`" in note and "`sequence=tp`" in note for note in notes)


def test_a_tensor_asked_for_two_splits_names_both_sources() -> None:
    one, other = "model.layers.*.mlp.up_proj.weight=[_@tp, _]", "model.layers.1.mlp.up_proj.weight=[_, _@tp]"
    with pytest.raises(ConstraintError) as error:
        fixed(one, other)
    assert one in str(error.value)
    assert other in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("heads", "cannot read"),
        ("=tp", "cannot read"),
        ("heads=xp", "no mesh axis 'xp'"),
        ("w=[_@tp", "cannot read"),
        ("w=[_@tp] + sum(dp)", "partial sum"),
        ("w=[_@fsdp, _]", "split over tp"),
        ("he ads=tp", "not the name"),
    ],
)
def test_malformed_constraints(text: str, says: str) -> None:
    with pytest.raises(Exception, match=says) as error:
        parse_constraint(text)
    assert isinstance(error.value, UsageError) or "sharding" in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("wheels=tp", "no logical axis 'wheels'(.|\n)*heads"),
        ("heads=dp", "dp splits the batch"),
        ("no.such.weight=[_@tp, _]", "matches no parameter"),
        ("model.layers.*.mlp.up_proj.weight=[_@tp]", "has 1 dims(.|\n)*has 2"),
    ],
)
def test_constraints_that_name_nothing(text: str, says: str) -> None:
    with pytest.raises(ConstraintError, match=says):
        fixed(text)


def test_heads_that_do_not_divide_say_which_sizes_would() -> None:
    problem, _ = fixed("heads=tp")
    check_fixed(problem, Mesh.parse("dp=1,fsdp=1,tp=2"), ["heads=tp"])
    with pytest.raises(ConstraintError, match=r"does not divide(.|\n)*`heads=tp`(.|\n)*axis of size 2"):
        check_fixed(problem, Mesh.parse("dp=1,fsdp=1,tp=8"), ["heads=tp"])


def placed(mesh: Mesh, *texts: str) -> tuple[Problem, Solution]:
    problem, _ = fixed(*texts)
    check_fixed(problem, mesh, texts)
    cluster = load_cluster(f"cpu:{mesh.device_count}")
    return problem, solve(problem, mesh, Prices.of(cluster, mesh, "fp32", problem))


def test_heads_split_finer_than_those_of_keys_have_the_keys_that_they_need() -> None:
    """Four heads, two of keys, four ranks."""
    problem, solution = placed(mesh_of(tp=4), "heads=tp")

    chosen = {
        op.kind: solution.choices[op.name]["tp"] for op in problem.ops if op.kind == "autopar.attention"
    }
    assert chosen == {"autopar.attention": "kv.rep"}
    queries = [op for op in problem.ops if op.kind == "aten.linear" and op.rule and op.rule.sizes["n"] == 64]
    assert any(solution.choices[op.name]["tp"] == "n" for op in queries)


def test_keys_may_be_asked_for_in_pieces_of_a_head() -> None:
    problem, solution = placed(mesh_of(tp=4), "heads=tp", "model.layers.*.k_proj.weight=[_@tp, _]")

    keys, values = (
        solution.shardings[name]
        for name, value in problem.values.items()
        if value.state and value.info.shape == (32, 64)
    )
    assert keys.dim_of("tp") == 0
    assert values.dim_of("tp") is None


def test_as_many_ranks_as_heads_give_the_loss_and_gradients_of_one() -> None:
    model, inputs = tiny("llama")
    program, _ = prepared()
    _, solution = placed(mesh_of(tp=4), "heads=tp")
    problem, _ = fixed("heads=tp")
    rank_program = lower(program, problem, solution, mesh_of(tp=4))
    check(rank_program)
    built = reference(model, inputs)

    errors = differences(rank_program, built)

    assert errors["loss"] < 1e-5
    assert errors["gradient"] < 1e-4
