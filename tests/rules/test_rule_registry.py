"""Rules of one's own, rules that need a lowering, and the cost that follows from rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rule_examples import EXAMPLES, op_of
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.errors import ShardingError, UsageError
from autopar.program import TensorInfo
from autopar.rules import (
    RULES,
    OpCall,
    check_rule,
    localize,
    register_rule,
    rule_for,
    rule_of_node,
    unregister_rule,
)
from autopar.rules.selftest import example_call
from autopar.sharding import Sharding

AXES = {"dp": 2, "tp": 2}


@pytest.fixture
def clean() -> Iterator[None]:
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


def info(*shape: int, dtype: str = "float32") -> TensorInfo:
    return TensorInfo(shape, dtype)


def call(name: str, *args: object, results: tuple[TensorInfo, ...], **kwargs: object) -> OpCall:
    return OpCall.of(name, args, kwargs, results)


# ---- one's own op -----------------------------------------------------------------------------------------


@torch.library.custom_op("autopar_tests::scaled_rows", mutates_args=())
def scaled_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight)


@scaled_rows.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.usefixtures("clean")
def test_a_custom_op_gets_a_rule_in_one_line() -> None:
    register_rule("autopar_tests::scaled_rows", "... d!, d! -> ... d!")
    x, weight = torch.randn(4, 6, 8), torch.randn(8)

    report = check_rule(
        torch.ops.autopar_tests.scaled_rows, (x, weight), "autopar_tests::scaled_rows", gradients=False
    )

    assert str(report.rule) == "a b d!, d! -> a b d!"


@pytest.mark.usefixtures("clean")
def test_a_graph_finds_the_rule_of_a_custom_op() -> None:
    register_rule("autopar_tests::scaled_rows", "... d!, d! -> ... d!")

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return torch.ops.autopar_tests.scaled_rows(x, weight)  # type: ignore[no-any-return]

    program = torch.export.export(Model(), (torch.randn(4, 8), torch.randn(8)))
    node = next(node for node in program.graph.nodes if node.op == "call_function")

    assert str(rule_of_node(node)) == "a d!, d! -> a d!"


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("name", ["op", "my lib::op", "::op", "mylib::"])
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="namespace::op"):
        register_rule(name, "a -> a")


@pytest.mark.usefixtures("clean")
def test_a_malformed_text_is_refused_at_once() -> None:
    with pytest.raises(ShardingError, match="no '->'"):
        register_rule("mylib::op", "a b")


@pytest.mark.usefixtures("clean")
def test_a_second_rule_for_an_op_is_refused() -> None:
    with pytest.raises(UsageError, match="already has a rule"):
        register_rule("aten::linear", "a -> a")


@pytest.mark.usefixtures("clean")
def test_taking_away_a_rule_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="has no rule"):
        unregister_rule("mylib::op")


@pytest.mark.usefixtures("clean")
def test_an_instance_the_text_does_not_fit_names_the_op() -> None:
    register_rule("mylib::op", "b s d -> b s d")

    with pytest.raises(ShardingError, match=r"mylib\.op"):
        rule_for(call("mylib.op", info(4, 8), results=(info(4, 8),)))


def test_an_instance_our_rule_does_not_fit_is_kept_whole() -> None:
    assert rule_for(call("aten.add", info(4), info(4, 8), results=(info(4),))) is None


@pytest.mark.usefixtures("clean")
def test_the_first_example_of_the_extending_page_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    blocks = re.findall(r"```(?:python)?\n(.*?)```", page, re.S)
    monkeypatch.setattr(autopar, "register_rule", register_rule, raising=False)

    exec(blocks[0] + blocks[1], {})

    assert capsys.readouterr().out == blocks[2]


def test_an_unknown_op_has_no_rule() -> None:
    assert rule_for(call("mylib.unheard_of", info(4), results=(info(4),))) is None


# ---- instances without a rule: kept whole -----------------------------------------------------------------


@pytest.mark.parametrize(
    "instance",
    [
        call("aten.dropout", info(4, 6), 0.1, True, results=(info(4, 6),)),
        call("aten.where", info(4, dtype="bool"), results=(info(4, dtype="int64"),)),
        call("aten.index", info(4, 6), [info(4, dtype="bool")], results=(info(2, 6),)),
        call("aten.index_put", info(4), [info(4, dtype="bool")], info(), results=(info(4),)),
        call("aten.squeeze", info(4, 1), results=(info(4),)),
        call("aten.einsum", "ii->i", [info(4, 4)], results=(info(4),)),
        call("aten.view", info(4, 8), "uint8", results=(info(4, 32, dtype="uint8"),)),
        call("aten.cat", [info(0), info(4, 6)], results=(info(4, 6),)),
        call(
            "aten.scaled_dot_product_attention",
            *[info(2, 4, 8, 6)] * 3,
            None,
            0.1,
            results=(info(2, 4, 8, 6),),
        ),
    ],
    ids=lambda instance: instance.name,
)
def test_what_no_rule_can_say_is_left_whole(instance: OpCall) -> None:
    assert rule_for(instance) is None


# ---- special lowerings ------------------------------------------------------------------------------------


def test_a_split_vocabulary_of_an_embedding_gives_partial_sums() -> None:
    rule = rule_for(call("aten.embedding", info(12, 6), info(4, 2, dtype="int64"), results=(info(4, 2, 6),)))
    assert rule is not None

    sharded = rule.shard({"tp": "v"}, AXES)

    assert rule.lowering == "embedding"
    assert rule.special == {"v"}
    assert sharded.results[0] == Sharding.parse("[_, _, _] + sum(tp)")


def test_cross_entropy_sums_over_tokens_and_is_whole_over_the_vocabulary() -> None:
    instance = call("autopar.cross_entropy", info(4, 8, 12), info(4, 8, dtype="int64"), results=(info(),))
    rule = rule_for(instance)
    assert rule is not None

    sharded = rule.shard({"dp": "b", "tp": "v"}, AXES)

    assert rule.special == {"b", "s", "v"}
    assert sharded.uses[0].sharding == Sharding.parse("[@dp, _, @tp]")
    assert sharded.uses[1].sharding == Sharding.parse("[@dp, _]")
    assert sharded.results[0] == Sharding.parse("[] + sum(dp)")


def test_unreduced_cross_entropy_splits_its_tokens_like_any_op() -> None:
    instance = call(
        "autopar.cross_entropy", info(4, 12), info(4, dtype="int64"), -100, "none", 0.0, results=(info(4),)
    )
    rule = rule_for(instance)
    assert rule is not None

    assert rule.special == {"v"}
    assert rule.shard({"dp": "b", "tp": "v"}, AXES).results[0] == Sharding.parse("[@dp]")


@pytest.mark.parametrize(
    ("mask", "causal", "special"), [(False, False, False), (True, False, False), (False, True, True)]
)
def test_only_causal_attention_needs_a_lowering_for_its_rows(mask: bool, causal: bool, special: bool) -> None:
    q, m = info(2, 4, 8, 6), info(2, 1, 8, 8)
    rule = rule_for(
        call("aten.scaled_dot_product_attention", q, q, q, m if mask else None, 0.0, causal, results=(q,))
    )
    assert rule is not None

    assert ("q" in rule.special, rule.lowering) == (special, "causal_attention" if special else None)
    assert set(rule.splittable()) == {"b", "h", "q"}


def test_grouped_heads_split_with_their_keys() -> None:
    q, k = info(2, 8, 6, 4), info(2, 2, 6, 4)
    rule = rule_for(call("aten.scaled_dot_product_attention", q, k, k, enable_gqa=True, results=(q,)))
    assert rule is not None

    assert str(rule) == "b (kv rep) q d!, b kv k! d!, b kv k! d! -> b (kv rep) q d!"
    assert rule.logical["kv"] == "heads"


def test_heads_split_finer_than_their_keys_have_keys_whole() -> None:
    q, k = info(2, 8, 6, 4), info(2, 2, 6, 4)
    rule = rule_for(call("autopar.attention", q, k, k, causal=True, results=(q,)))
    assert rule is not None

    sharded = rule.shard({"dp": "kv", "tp": "kv.rep"}, {"dp": 2, "tp": 4})

    assert str(sharded.results[0]) == "[_, _@dp.tp, _, _]"
    assert str(sharded.uses[1].sharding) == "[_, _@dp, _, _]"
    assert sharded.uses[1].grad_sums == ("tp",)
    with pytest.raises(ShardingError, match="not divisible by 16"):
        rule.shard({"dp": "kv", "tp": "kv.rep"}, {"dp": 2, "tp": 8})


def test_rows_and_keys_split_as_a_pair() -> None:
    q, k, mask = info(2, 4, 6, 4), info(2, 4, 6, 4), info(2, 1, 6, 6, dtype="bool")
    rule = rule_for(call("autopar.attention", q, k, k, mask, results=(q,)))
    assert rule is not None

    sharded = rule.shard({"cp": "q~k"}, {"cp": 2})

    assert [str(use.sharding) for use in sharded.uses] == ["[_, _, _@cp, _]"] * 4
    assert all(use.grad_sums == () for use in sharded.uses)
    assert "k" not in rule.splittable()


def test_a_biased_linear_keeps_its_contraction_whole() -> None:
    x, weight, bias = info(4, 6), info(8, 6), info(8)
    rule = rule_for(call("aten.linear", x, weight, bias, results=(info(4, 8),)))
    assert rule is not None

    assert "k" in rule.whole


# ---- local arguments --------------------------------------------------------------------------------------


def test_localize_puts_the_local_shape_where_the_sizes_stand() -> None:
    instance = call("aten.view", info(4, 12), [4, 2, 6], results=(info(4, 2, 6),))
    rule = rule_for(instance)
    assert rule is not None

    assert localize(("x", [4, -1, 6]), rule, (2, 2, 6)) == ("x", [2, 2, 6])


def test_localize_leaves_other_ops_alone() -> None:
    rule = rule_for(call("aten.select", info(4, 6), 1, 2, results=(info(4),)))
    assert rule is not None

    assert localize(("x", 1, 2), rule, (2,)) == ("x", 1, 2)


# ---- operations -------------------------------------------------------------------------------------------

COUNTED = ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "conv1d", "conv2d", "conv3d", "convolution")


@pytest.mark.parametrize("name", [*(f"aten.{name}" for name in COUNTED), "aten.scaled_dot_product_attention"])
def test_operations_are_those_torch_counts(name: str) -> None:
    for example in EXAMPLES[name]:
        rule = rule_for(example_call(op_of(name), example.args, name, example.kwargs))
        assert rule is not None
        with FlopCounterMode(display=False) as counter:
            op_of(name)(*example.args, **example.kwargs)
        counted = counter.get_total_flops()
        if rule.lowering == "causal_attention":
            counted /= 2  # torch counts the half above the diagonal too

        if counted:  # torch does not count a product of vectors
            assert rule.points * rule.flops_per_point == pytest.approx(counted)
