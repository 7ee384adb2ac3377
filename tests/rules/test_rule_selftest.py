"""Every rule, every legal choice: the pieces put together are the whole, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_examples import EXAMPLES, OPS, Example, op_of

from autopar.errors import ShardingError
from autopar.mesh import Mesh
from autopar.rules import RULES, check_rule, register_rule, unregister_rule
from autopar.rules.shapes import factor_reshape

CASES = [
    pytest.param(name, example, id=f"{name}-{index}")
    for name, examples in EXAMPLES.items()
    for index, example in enumerate(examples)
]
MESH_OF_TWO = (Mesh((("x", 2),)),)
QUICK = settings(max_examples=25, deadline=None)


def test_every_rule_has_an_example() -> None:
    assert set(EXAMPLES) == {
        name for name in RULES if name.split(".")[0] in ("aten", "autopar", "transformers")
    }


@pytest.mark.parametrize(("name", "example"), CASES)
def test_the_pieces_put_together_are_the_whole(name: str, example: Example) -> None:
    report = check_rule(
        op_of(name), example.args, name, example.kwargs, gradients=example.gradients, values=example.values
    )

    assert report.name == name


def test_what_is_skipped_is_only_what_needs_its_own_lowering() -> None:
    skipped = set()
    for name, examples in EXAMPLES.items():
        for example in examples:
            report = check_rule(
                op_of(name),
                example.args,
                name,
                example.kwargs,
                gradients=False,
                values=False,
                meshes=MESH_OF_TWO,
            )
            skipped |= {(name, report.rule.lowering) for _ in report.skipped}

    assert {pair for pair in skipped if pair[0] != "autopar.experts"} == {
        ("aten._native_batch_norm_legit_functional", "batch_norm"),
        ("aten._native_batch_norm_legit", "batch_norm"),
        ("aten.masked_scatter", "masked_scatter"),
        ("aten.embedding", "embedding"),
        ("aten.scaled_dot_product_attention", "causal_attention"),
        ("autopar.attention", "causal_attention"),
        ("autopar.attention", "window_attention"),
        ("autopar.cross_entropy", "cross_entropy"),
    }


# ---- random shapes ----------------------------------------------------------------------------------------

FACTORS = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=5)


def grouped(draw: st.DrawFn, factors: list[int]) -> list[int]:
    """The factors multiplied together in runs: a shape with the same number of elements."""
    cuts = [
        0,
        *sorted(draw(st.sets(st.integers(1, len(factors) - 1))) if len(factors) > 1 else []),
        len(factors),
    ]
    return [math.prod(factors[a:b]) for a, b in pairwise(cuts)]


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes of the same elements: regrouped, and half the time with the factors in another order."""
    factors = draw(FACTORS)
    others = draw(st.permutations(factors)) if draw(st.booleans()) else factors
    return grouped(draw, factors), grouped(draw, list(others))


@QUICK
@given(reshapes())
def test_any_reshape_splits_right(shapes: tuple[list[int], list[int]]) -> None:
    source, target = shapes
    x = torch.arange(math.prod(source), dtype=torch.float64).reshape(source)

    check_rule(torch.ops.aten.view, (x, target), "aten.view")


@QUICK
@given(FACTORS, FACTORS)
def test_a_reshape_there_and_back_splits_alike(a: list[int], b: list[int]) -> None:
    source, target = [math.prod(a), *b], [*a, math.prod(b)]

    there, back = factor_reshape(source, target), factor_reshape(target, source)

    assert {there.sizes[name] for name in there.splittable()} == {
        back.sizes[name] for name in back.splittable()
    }


@st.composite
def broadcasts(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    shape = draw(st.lists(st.sampled_from([1, 2, 4, 6]), min_size=0, max_size=3))

    def part() -> list[int]:
        kept = shape[draw(st.integers(0, len(shape))) :]
        return [size if draw(st.booleans()) else 1 for size in kept]

    return part(), part()


@QUICK
@given(broadcasts(), st.sampled_from(["add", "mul", "sub", "div", "maximum"]))
def test_any_broadcast_splits_right(shapes: tuple[list[int], list[int]], op: str) -> None:
    a, b = (torch.rand(shape, dtype=torch.float64) + 0.5 for shape in shapes)

    check_rule(getattr(torch.ops.aten, op), (a, b), f"aten.{op}")


@QUICK
@given(broadcasts(), st.integers(1, 4), st.sampled_from([2, 6]), st.integers(1, 4))
def test_any_matmul_splits_right(batch: tuple[list[int], list[int]], m: int, k: int, n: int) -> None:
    a = torch.randn(*batch[0], m, k, dtype=torch.float64)
    b = torch.randn(*batch[1], k, n, dtype=torch.float64)

    check_rule(torch.ops.aten.matmul, (a, b), "aten.matmul")


# ---- the self-test must be able to fail -------------------------------------------------------------------


@pytest.fixture
def op_name() -> Iterator[str]:
    yield "test_rules.op"
    if "test_rules.op" in RULES:
        unregister_rule("test_rules.op")


def test_a_softmax_split_along_its_dim_is_caught(op_name: str) -> None:
    register_rule(op_name, "b k -> b k")

    with pytest.raises(ShardingError, match="x->k: result 0"):
        check_rule(lambda x: x.softmax(-1), (torch.randn(4, 6),), op_name)


def test_a_wrong_size_of_a_piece_is_caught(op_name: str) -> None:
    register_rule(op_name, "b -> b")

    with pytest.raises(ShardingError, match="has shape"):
        check_rule(lambda x: torch.zeros(4) + x.sum(), (torch.randn(4),), op_name)


def test_partial_sums_through_a_nonlinear_op_are_caught(op_name: str) -> None:
    register_rule(op_name, lambda call: call.parse("a -> a", sums=((0,),)))

    with pytest.raises(ShardingError, match=r"x->\+: result 0"):
        check_rule(torch.relu, (torch.randn(5),), op_name)


def test_a_wrong_gradient_is_caught(op_name: str) -> None:
    """`reduced` claims that no addends arise over `b`: the weight's gradient is then said to be whole."""
    register_rule(op_name, lambda call: call.parse("b d, d -> b d", reduced=frozenset({"b"})))

    with pytest.raises(ShardingError, match="the gradient of operand 1"):
        check_rule(torch.mul, (torch.randn(4, 5), torch.randn(5)), op_name)


def test_an_op_that_fails_on_a_piece_is_named(op_name: str) -> None:
    register_rule(op_name, "a b -> a b")

    with pytest.raises(ShardingError, match="does not run on a piece"):
        check_rule(lambda x: x.view(4, 6) * 1, (torch.randn(4, 6),), op_name)


def test_an_op_without_a_rule_says_how_to_give_it_one() -> None:
    with pytest.raises(ShardingError, match="register_rule"):
        check_rule(torch.relu, (torch.randn(4),), "nowhere.op")


def test_the_forms_of_the_examples_are_those_of_the_ops() -> None:
    """Ops of other libraries stand here as plain functions; compare where the original can be had."""
    from transformers.integrations import moe

    rows, weight, offsets = EXAMPLES["transformers.grouped_mm_fallback"][0].args
    original = moe._grouped_mm_fallback(rows, weight, offsets)

    assert torch.allclose(OPS["transformers.grouped_mm_fallback"](rows, weight, offsets), original)
