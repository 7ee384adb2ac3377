"""Reading and writing rules, and what follows from them."""

from __future__ import annotations

import pytest
from rule_examples import EXAMPLES, op_of

from autopar.errors import ShardingError
from autopar.rules import Rule, rule_for, sums_choice
from autopar.rules.rule import check_text
from autopar.rules.selftest import example_call
from autopar.sharding import Sharding

AXES = {"dp": 2, "tp": 4}


def matmul() -> Rule:
    return Rule.parse("m k, k n -> m n", [(8, 16), (16, 4)], [(8, 4)])


def test_a_contracted_factor_leaves_a_partial_sum() -> None:
    assert matmul().shard({"tp": "k"}, AXES).results[0] == Sharding.parse("[_, _] + sum(tp)")


def test_an_operand_that_lacks_the_factor_gets_its_gradient_as_sums() -> None:
    x, weight = matmul().shard({"dp": "m"}, AXES).uses

    assert (x.grad_sums, weight.grad_sums) == ((), ("dp",))


def test_axes_that_split_one_factor_nest_in_the_order_of_the_choice() -> None:
    assert matmul().shard({"tp": "m", "dp": "m"}, AXES).results[0] == Sharding.parse("[@tp.dp, _]")


def test_a_reduced_factor_leaves_no_partial_sum() -> None:
    from dataclasses import replace

    rule = replace(Rule.parse("b v, b ->", [(4, 8), (4,)], [()]), reduced=frozenset({"v"}))

    assert rule.shard({"dp": "b", "tp": "v"}, AXES).results[0] == Sharding.parse("[] + sum(dp)")


def test_each_group_of_sums_is_a_choice() -> None:
    from dataclasses import replace

    rule = replace(matmul(), sums=((0,), (1,)))

    x, weight = rule.shard({"tp": sums_choice(1)}, AXES).uses

    assert (x.sharding.sums, weight.sharding.sums) == ((), ("tp",))
    assert (x.grad_sums, weight.grad_sums) == (("tp",), ())


def test_the_dots_stand_for_the_same_dims_everywhere() -> None:
    rule = Rule.parse("... k, n k -> ... n", [(2, 3, 8), (4, 8)], [(2, 3, 4)])

    assert str(rule) == "a b k, n k -> a b n"


def test_the_dots_broadcast_dims_of_size_one() -> None:
    rule = Rule.parse("..., ... -> ...", [(2, 1, 8), (3, 1)], [(2, 3, 8)])

    assert str(rule) == "a 1 c, b 1 -> a b c"


def test_names_taken_by_the_text_are_not_given_to_the_dots() -> None:
    assert str(Rule.parse("... a -> a ...", [(2, 3)], [(3, 2)])) == "b a -> a b"


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_a_rule_prints_parses_to_the_same_rule(name: str) -> None:
    for example in EXAMPLES[name]:
        call = example_call(op_of(name), example.args, name, example.kwargs)
        rule = rule_for(call)
        assert rule is not None
        try:
            again = Rule.parse(str(rule), call.shapes, call.result_shapes)
        except ShardingError as error:
            assert "sizes do not tell" in str(error)  # noqa: PT017 a reshape such as (6, 4) to (4, 6)
            continue
        assert (again.operands, again.results, again.whole) == (rule.operands, rule.results, rule.whole)
        assert dict(again.sizes) == dict(rule.sizes)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("m k, k n", "no '->'"),
        ("m-k -> m", "cannot read factor 'm-k'"),
        ("b b -> b", "appears twice"),
        ("... b ... -> b", "'...' twice"),
        ("(... b) -> b", "cannot read factor"),
    ],
)
def test_a_malformed_text_says_what_is_wrong(text: str, complaint: str) -> None:
    with pytest.raises(ShardingError, match=complaint.replace("(", r"\(")):
        check_text(text)


@pytest.mark.parametrize(
    ("text", "shapes", "complaint"),
    [
        ("m k, k n -> m n", [(2, 3), (4, 5), (2, 5)], "dim .k. is"),
        ("m k -> m k", [(2, 3), (2, 3), (2, 3)], "names 1 operands and 1 results, the op has 2 and 1"),
        ("m k, k -> m", [(2, 3), (3, 1), (2,)], "against shape"),
        ("... m k, k -> ... m", [(3,), (3,), (2,)], "needs at least 2 dims"),
        ("(a b) -> a b", [(6,), (4, 2)], "the tensor has 6"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(text: str, shapes: list[tuple[int, ...]], complaint: str) -> None:
    with pytest.raises(ShardingError, match=complaint):
        Rule.parse(text, shapes[:-1], shapes[-1:])


@pytest.mark.parametrize(
    ("choice", "complaint"),
    [
        ({"dp": "d"}, "must stay whole"),
        ({"dp": "h!"}, "no factor 'h!'"),
        ({"tp": "b"}, "not divisible by 4"),
        ({"dp": "+"}, "does not pass partial sums"),
    ],
)
def test_an_illegal_choice_says_why(choice: dict[str, str], complaint: str) -> None:
    rule = Rule.parse("b (h d) -> b h d", [(2, 24)], [(2, 4, 6)])

    with pytest.raises(ShardingError, match=complaint):
        rule.shard(choice, AXES)


def test_only_the_leading_factor_of_a_dim_splits() -> None:
    assert Rule.parse("b (h d) -> b h d", [(2, 24)], [(2, 4, 6)]).splittable() == ("b", "h")
