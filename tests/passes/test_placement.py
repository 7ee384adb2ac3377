"""Placement against brute force, against a MILP, and by what is known of transformer layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hand_problems import layer_problem, parse_problem, random_problem

from autopar.cluster import load_cluster
from autopar.cost.prices import Prices
from autopar.errors import ConstraintError
from autopar.mesh import Mesh
from autopar.passes import elimination
from autopar.passes.candidates import candidates
from autopar.passes.elimination import Factor, minimise
from autopar.passes.placement import _candidates, _Search, solve
from autopar.passes.pricing import Pricer, arriving, evaluate, total_s
from autopar.problem import Problem
from autopar.sharding import Sharding

H100 = load_cluster("h100:2x8")


def prices_for(problem: Problem, mesh: Mesh, parameter_s: float = 1e-12) -> Prices:
    return Prices.of(H100, mesh, "bf16", problem, parameter_s=parameter_s)


def every_sharding(shape: tuple[int, ...], mesh: Mesh, axes: list[str]) -> Iterator[Sharding]:
    """All shardings without sums, whatever ops would ask for."""
    for dims in itertools.product([None, *range(len(shape))], repeat=len(axes)):
        split = tuple(
            tuple(axis for axis, dim in zip(axes, dims, strict=True) if dim == at) for at in range(len(shape))
        )
        if all(size % mesh.size(*names) == 0 for size, names in zip(shape, split, strict=True)):
            yield Sharding(split)


def brute_force(problem: Problem, mesh: Mesh, prices: Prices) -> float:
    """The least cost over every choice of every op and every sharding of what arrives; the latter one group after the
    other, which is exact because the cost of one does not depend on another."""
    pricer = Pricer(problem, mesh, prices)
    axes = [name for name, size in mesh.axes if size > 1]
    groups = arriving(problem)
    domains = {
        group: list(every_sharding(members[0].info.shape, mesh, ["tp"] if members[0].state else axes))
        for group, members in groups.items()
    }
    best = math.inf
    for chosen in itertools.product(*(candidates(op, problem, mesh) for op in problem.ops)):
        choices = {op.name: one.as_choice for op, one in zip(problem.ops, chosen, strict=True)}
        shardings = {
            name: one.results[i]
            for op, one in zip(problem.ops, chosen, strict=True)
            for i, name in enumerate(op.results)
        }
        for group, members in groups.items():
            shardings.update((member.name, domains[group][0]) for member in members)
        for group, members in groups.items():
            tried = []
            for sharding in domains[group]:
                trial = shardings | {member.name: sharding for member in members}
                tried.append(
                    (_finite(problem, mesh, prices, choices, trial, pricer, group), len(tried), trial)
                )
            shardings = min(tried)[2]
        cost = total_s(evaluate(problem, mesh, prices, choices, shardings, pricer))
        best = min(best, cost)
    return best


def _finite(problem, mesh, prices, choices, shardings, pricer, group) -> tuple[int, float]:  # type: ignore[no-untyped-def]
    """(infinite terms, finite sum): lets one group be compared while another still stands badly."""
    costs = [
        seconds
        for cost in evaluate(problem, mesh, prices, choices, shardings, pricer).values()
        for seconds in cost.values()
    ]
    return sum(math.isinf(seconds) for seconds in costs), sum(
        seconds for seconds in costs if not math.isinf(seconds)
    )


def tiny_problem(seed: int) -> Problem:
    """Three ops of which two share a value, small enough to go through everything."""
    rows, width, inner = (64, 2048, 512) if seed % 2 else (4096, 64, 1024)
    kinds = [("add", "sums=((0, 1),)"), ("mul", "sums=((0,), (1,))"), ("sub", "sums=((0, 1),)")]
    kind, sums = kinds[seed % 3]
    gradient = "gradient" if seed % 4 else ""
    return parse_problem(
        f"""
        value a/x: bfloat16[{rows}, {width}] {gradient}
        value a/w: bfloat16[{inner}, {width}] state gradient
        value a/u: bfloat16[{inner}, {width}] state gradient
        value a/p: bfloat16[{rows}, {inner}] gradient
        value a/q: bfloat16[{rows}, {inner}] gradient
        value a/y: bfloat16[{rows}, {inner}] gradient
        op a/p = aten.linear(a/x, a/w) -> a/p x{1 + seed % 3}: b k, n k -> b n {{b: batch}} options sums=((0,), (1,)), flops_per_point=2.0
        op a/q = aten.linear(a/x, a/u) -> a/q x{1 + seed % 3}: b k, n k -> b n {{b: batch}} options sums=((0,), (1,)), flops_per_point=2.0
        op a/y = aten.{kind}(a/p, a/q) -> a/y x{1 + seed % 3}: b n, b n -> b n {{b: batch}} options {sums}
        """,
        outputs=["a/y"],
        batch=rows,
    )


@pytest.mark.parametrize("seed", range(6))
def test_equals_brute_force_on_shared_values(seed: int) -> None:
    problem, mesh = tiny_problem(seed), Mesh.parse("tp=4")
    prices = prices_for(problem, mesh, parameter_s=(seed % 3) * 1e-11)

    assert solve(problem, mesh, prices).objective_s == pytest.approx(
        brute_force(problem, mesh, prices), rel=1e-9
    )


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 6, 8, 9, 10, 11])
def test_equals_brute_force_on_random_blocks(seed: int) -> None:
    problem, mesh = random_problem(seed), Mesh.parse("tp=2")
    prices = prices_for(problem, mesh)

    assert solve(problem, mesh, prices).objective_s == pytest.approx(
        brute_force(problem, mesh, prices), rel=1e-9
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_equals_brute_force_with_data_and_tensor_axes(seed: int) -> None:
    problem, mesh = tiny_problem(seed), Mesh.parse("dp=2,tp=2")
    prices = prices_for(problem, mesh)

    assert solve(problem, mesh, prices).objective_s == pytest.approx(
        brute_force(problem, mesh, prices), rel=1e-9
    )


def test_equals_milp_on_a_transformer_layer() -> None:
    """The same tables, minimised by HiGHS with one binary per choice and per pair of choices."""
    problem, mesh = layer_problem(batch=2, seq=256), Mesh.parse("tp=2")
    prices = prices_for(problem, mesh)
    search = _Search(
        problem, mesh, prices, Pricer(problem, mesh, prices), _candidates(problem, mesh), len(problem.ops) + 1
    )

    _, exact = minimise(search.sizes, search.factors)

    assert exact == pytest.approx(_milp(search.sizes, search.factors), rel=1e-6)
    assert search.solution().objective_s == pytest.approx(exact, rel=1e-6)


def _milp(sizes: list[int], factors: list[Factor]) -> float:
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    starts = np.concatenate([[0], np.cumsum(sizes)])
    costs, rows, columns, entries, right = [0.0] * int(starts[-1]), [], [], [], []
    upper = [1.0] * int(starts[-1])
    scale = 1e6  # microseconds: HiGHS works to absolute tolerances
    for variable in range(len(sizes)):
        rows += [len(right)] * sizes[variable]
        columns += range(starts[variable], starts[variable + 1])
        entries += [1.0] * sizes[variable]
        right.append(1.0)
    for factor in factors:
        if len(factor.variables) == 1:
            for choice, cost in enumerate(factor.table):
                at = starts[factor.variables[0]] + choice
                costs[at] += float(cost) * scale if np.isfinite(cost) else 0.0
                upper[at] = upper[at] if np.isfinite(cost) else 0.0
            continue
        one, other = factor.variables
        first = len(costs)
        for cost in factor.table.flat:
            costs.append(float(cost) * scale if np.isfinite(cost) else 0.0)
            upper.append(1.0 if np.isfinite(cost) else 0.0)
        pairs = first + np.arange(factor.table.size).reshape(factor.table.shape)
        for variable, along in ((one, pairs), (other, pairs.T)):
            for choice in range(sizes[variable]):
                rows += [len(right)] * (along.shape[1] + 1)
                columns += [*along[choice].tolist(), int(starts[variable]) + choice]
                entries += [1.0] * along.shape[1] + [-1.0]
                right.append(0.0)
    matrix = coo_array((entries, (rows, columns)), shape=(len(right), len(costs))).tocsr()
    binary = np.zeros(len(costs))
    binary[: starts[-1]] = 1
    result = milp(
        costs,
        constraints=LinearConstraint(matrix, right, right),
        integrality=binary,
        bounds=Bounds(0, upper),
        options={"mip_rel_gap": 1e-9},
    )
    assert result.success
    return float(result.fun) / scale


@pytest.mark.parametrize("seed", range(8))
def test_elimination_equals_enumeration(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = [int(size) for size in random.integers(1, 4, 6)]
    scopes = [
        tuple(int(v) for v in random.choice(6, int(random.integers(1, 4)), replace=False)) for _ in range(8)
    ]
    factors = [Factor(scope, random.random([sizes[v] for v in scope])) for scope in scopes]

    chosen, value = minimise(sizes, factors)

    def cost(choice: tuple[int, ...] | list[int]) -> float:
        return sum(float(f.table[tuple(choice[v] for v in f.variables)]) for f in factors)

    assert value == pytest.approx(min(map(cost, itertools.product(*map(range, sizes)))))
    assert cost(chosen) == pytest.approx(value)


def test_finds_megatron_on_a_layer_in_one_node() -> None:
    """Column and row pairs, and norms on a split sequence between them, when parameters are dear."""
    problem, mesh = (
        layer_problem(batch=1, seq=4096, hidden=4096, ffn=16384, heads=32, times=32),
        Mesh.parse("dp=1,fsdp=1,tp=2"),
    )

    solution = solve(problem, mesh, prices_for(problem, mesh, parameter_s=1e-9))

    split = {
        name.split("/")[1]: choice["tp"]
        for name, choice in solution.choices.items()
        if name.startswith("layer/")
    }
    assert [split[name] for name in ("q", "k", "v", "g", "u")] == ["n"] * 5
    assert [split[name] for name in ("o", "d")] == ["k"] * 2
    assert [split[name] for name in ("norm1", "norm2", "x1", "out")] == ["s"] * 4
    assert split["attention"] == "g"


def test_shares_one_gather_among_q_k_and_v() -> None:
    """The normed value moves once however many projections take it."""
    problem, mesh = layer_problem(batch=1, seq=4096, hidden=4096, ffn=16384, heads=32), Mesh.parse("tp=2")
    prices = prices_for(problem, mesh, parameter_s=1e-9)
    solution = solve(problem, mesh, prices)
    alone = _Search(problem, mesh, prices, Pricer(problem, mesh, prices), _candidates(problem, mesh), 1)

    _, unshared = minimise(alone.sizes, alone.factors)

    assert solution.objective_s < unshared


def test_splits_the_batch_over_both_data_axes() -> None:
    problem, mesh = layer_problem(), Mesh.parse("dp=2,fsdp=2,tp=1")

    solution = solve(problem, mesh, prices_for(problem, mesh))

    assert str(solution.shardings["layer/x"]) == "[_@dp.fsdp, _, _]"
    assert solution.choices["layer/q"] == {"dp": "b", "fsdp": "b"}


def test_honours_what_is_fixed() -> None:
    problem, mesh = layer_problem(), Mesh.parse("tp=2")
    fixed = {"layer/g": {"tp": "k"}}

    solution = solve(_fixed(problem, fixed), mesh, prices_for(problem, mesh))

    assert solution.choices["layer/g"]["tp"] == "k"


def test_fixed_choice_that_does_not_divide_is_a_constraint_error() -> None:
    problem, mesh = layer_problem(), Mesh.parse("tp=3")

    with pytest.raises(ConstraintError, match="layer/g"):
        solve(_fixed(problem, {"layer/g": {"tp": "n"}}), mesh, prices_for(problem, mesh))


def _fixed(problem: Problem, fixed: dict[str, dict[str, str | None]]) -> Problem:
    from dataclasses import replace

    return replace(problem, fixed=fixed)


def test_an_op_without_a_rule_is_whole() -> None:
    problem = parse_problem(
        """
        value a/x: bfloat16[64, 64] source
        value a/y: bfloat16[64, 64]
        op a/y = mylib.opaque(a/x) -> a/y x1: no rule
        """,
        outputs=["a/y"],
        batch=64,
    )
    mesh = Mesh.parse("dp=2,tp=2")

    assert solve(problem, mesh, prices_for(problem, mesh)).choices["a/y"] == {"dp": None, "tp": None}


def test_is_deterministic() -> None:
    problem, mesh = layer_problem(), Mesh.parse("dp=2,tp=2")

    one, two = (solve(problem, mesh, prices_for(problem, mesh)) for _ in range(2))

    assert one == two


@pytest.mark.parametrize("seed", range(6))
def test_what_is_too_wide_is_improved_step_by_step(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten variables, each pair with a table: tables of at most 100 entries leave two or three of them free at a time."""
    random = np.random.default_rng(seed)
    sizes = [3] * 10
    pairs = itertools.combinations(range(10), 2)
    factors = [elimination.Factor(pair, random.random((3, 3))) for pair in pairs]
    factors += [elimination.Factor((variable,), random.random(3)) for variable in range(10)]
    least, value = elimination.minimise(sizes, factors)
    monkeypatch.setattr(elimination, "_HELD_ENTRIES", 100)
    found, total = elimination.improve(sizes, factors)

    def of(chosen: list[int]) -> float:
        return sum(float(factor.table[tuple(chosen[v] for v in factor.variables)]) for factor in factors)

    assert of(least) == pytest.approx(value)
    assert of(found) == pytest.approx(total)
    assert value <= total + 1e-9
    assert total <= 1.05 * value < of([0] * 10)
