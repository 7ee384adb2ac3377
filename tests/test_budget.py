"""Which cluster to rent: the answers follow from the offers, and a plan's budget from its prediction."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.budget import DEVICE_HOURS, budget_lines, checkpoint_bytes, plan_budget, run_budget
from autopar.budget_asked import Limits, asked, offered_clusters, parse_days, parse_prices, with_prices
from autopar.budget_picture import frontier_svg
from autopar.cluster import load_cluster
from autopar.errors import InfeasibleError, UsageError
from autopar.layout import Layout
from autopar.market import Market, Offer, between, market_of
from autopar.plans import Plan
from autopar.transformer_shape import TransformerShape
from tests.test_plans import DATA

SHAPE = TransformerShape(name="small", layers=8, hidden=1024, heads=16, ffn=4096, vocab=32000)
TOKENS, STEP = 1e12, 4e6


def offer(cluster: str, days: float, price: float | None = None, currency: str = "USD") -> Offer:
    """An offer that takes `days` without failures."""
    where = load_cluster(cluster)
    if price is not None:
        where = with_prices(where, {where.device.name: price}, currency)
    where = replace(where, failures_per_device_hour=0.0)
    steps = TOKENS / STEP
    budget = run_budget(
        where, step_s=days * 86400 / steps, tokens_per_step=STEP, tokens=TOKENS, parameters=1e9, frozen=0.0
    )
    return Offer(where, Layout(), 0.5, budget)


def market(*offers: Offer, deadline: float | None = None, cost: float | None = None) -> Market:
    return Market(offers, (), TOKENS, "small", Limits(deadline, cost))


# 8, 16, 32 and 64 devices: 1536, 2304, 2688, 6144 dollars
OFFERS = (
    offer("h100:8", 4, 2.0),
    offer("h100:2x8", 3, 2.0),
    offer("h100:4x8", 1.75, 2.0),
    offer("h100:8x8", 2, 2.0),
)


def answers(found: Market) -> dict[str, str]:
    return {answer.question: answer.offer.name for answer in found.answers}


@pytest.mark.parametrize(
    ("deadline", "cost", "expected"),
    [
        (None, None, {"smallest": "h100:8", "cheapest": "h100:8", "fastest": "h100:4x8"}),
        (3.0, None, {"smallest": "h100:2x8", "cheapest": "h100:2x8", "fastest": "h100:4x8"}),
        (2.0, None, {"smallest": "h100:4x8", "cheapest": "h100:4x8", "fastest": "h100:4x8"}),
        (None, 2500.0, {"smallest": "h100:8", "cheapest": "h100:8", "fastest": "h100:2x8"}),
        (3.0, 2500.0, {"smallest": "h100:2x8", "cheapest": "h100:2x8", "fastest": "h100:2x8"}),
        (1.0, None, {}),
        (2.0, 2000.0, {}),
    ],
)
def test_answers_are_the_best_of_what_meets_the_limits(
    deadline: float | None, cost: float | None, expected: dict[str, str]
) -> None:
    assert answers(market(*OFFERS, deadline=deadline, cost=cost)) == expected


def test_answers_agree_with_a_search_of_all_pairs() -> None:
    """A limit on one thing is met by the best in it, whatever the limit: brute force over the offers' own numbers."""
    for deadline in (1.8, 2.5, 3.5, 5.0):
        found = market(*OFFERS, deadline=deadline)
        fit = [one for one in OFFERS if one.budget.days <= deadline]
        assert answers(found)["cheapest"] == min(fit, key=lambda one: one.budget.cost or 0.0).name
        assert answers(found)["smallest"] == min(fit, key=lambda one: one.cluster.device_count).name


def test_where_nothing_meets_the_limits_the_nearest_is_named() -> None:
    late = "\n".join(market(*OFFERS, deadline=1.0).lines())
    assert "nothing does" in late
    assert "the fastest, h100:4x8 (42.0 h, 2.69 k USD), is 18.0 h late" in late
    dear = market(*OFFERS, cost=1000.0).nearest
    assert dear == ("the cheapest, h100:8 (4.0 days, 1.54 k USD), is 536 USD over",)
    both = market(*OFFERS, deadline=2.0, cost=2000.0).nearest
    assert len(both) == 2
    assert "h100:4x8" in both[0]
    assert "h100:8 " in both[1]


def test_without_prices_costs_are_device_hours_and_prices_are_asked_for() -> None:
    found = market(offer("h100:8", 4), offer("h100:2x8", 3))
    assert found.currency == DEVICE_HOURS
    assert [point.cost for point in found.points] == pytest.approx([4 * 24 * 8, 3 * 24 * 16])
    assert "--price h100=2.5" in "\n".join(found.lines())


def test_an_offer_without_a_price_is_only_timed_among_priced_ones() -> None:
    found = market(offer("h100:8", 4, 2.0), offer("h200:8", 3))
    assert answers(found) == {"smallest": "h100:8", "cheapest": "h100:8", "fastest": "h200:8"}
    assert [point.label for point in found.points] == ["h100:8"]


def test_two_currencies_are_refused() -> None:
    with pytest.raises(UsageError, match="EUR and USD"):
        market(offer("h100:8", 4, 2.0), offer("h200:8", 3, 2.0, "EUR"))


def test_a_run_that_never_ends_is_no_answer() -> None:
    lost = offer("h100:8", 4, 2.0)
    budget = replace(lost.budget, failures_per_device_hour=1e6)
    found = market(replace(lost, budget=budget), OFFERS[1])
    assert answers(found)["smallest"] == "h100:2x8"
    assert "never ends" in "\n".join(found.lines())
    json.dumps(found.data(), allow_nan=False)


def test_sizes_between_the_last_that_misses_and_the_first_that_meets() -> None:
    found = between(market(offer("h100:8x8", 8, 2.0), offer("h100:16x8", 4, 2.0), deadline=5.0))
    assert [cluster.name for cluster in found] == ["h100:10x8", "h100:12x8", "h100:14x8"]
    assert between(market(offer("h100:8x8", 8), deadline=9.0)) == []


def test_clusters_of_a_device_are_full_nodes_up_to_the_most() -> None:
    assert [cluster.name for cluster in offered_clusters(devices=("h100",), max_devices=40)] == [
        "h100:8", "h100:2x8", "h100:4x8"
    ]  # fmt: skip
    with pytest.raises(UsageError, match="node"):
        offered_clusters(devices=("h100",), max_devices=4)
    with pytest.raises(UsageError):
        offered_clusters()


@pytest.mark.parametrize(("text", "days"), [("30d", 30), ("36h", 1.5), ("6w", 42), ("10", 10), ("0.5d", 0.5)])
def test_times(text: str, days: float) -> None:
    assert parse_days(text) == days


@pytest.mark.parametrize("text", ["", "d", "-3d", "0d", "3 years", "nan", "1e999d"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(UsageError):
        parse_days(text)


@pytest.mark.parametrize("text", ["2.5", "h100=", "h100=-1", "h100=inf", "h100=nan"])
def test_what_is_no_price(text: str) -> None:
    with pytest.raises(UsageError):
        parse_prices([text])


def test_prices_reach_every_pool() -> None:
    cluster = with_prices(load_cluster("h100:1x8+a100:1x8"), parse_prices(["h100=3", "a100=1"]), "EUR")
    assert cluster.price_per_hour == pytest.approx(2.0)
    assert cluster.currency == "EUR"


def test_a_cost_limit_without_a_price_is_refused_before_anything_is_searched() -> None:
    clusters = offered_clusters(["h100:8"])
    with pytest.raises(UsageError, match="price"):
        asked(clusters, Limits(max_cost=1e6), (), (), None)


def test_search_offers_more_for_more_devices() -> None:
    clusters = offered_clusters(devices=("h100",), max_devices=32)
    found = market_of(SHAPE.workload(2048), clusters, Limits(), batch=64, tokens=1e10)
    assert [one.name for one in found.offers] == ["h100:8", "h100:2x8", "h100:4x8"]
    assert [one.budget.days for one in found.offers] == sorted(
        (o.budget.days for o in found.offers), reverse=True
    )
    assert all(0 < one.mfu < 1 for one in found.offers)


def test_a_cluster_that_cannot_is_named_and_all_that_cannot_are_an_error() -> None:
    workload = SHAPE.workload(2048)
    found = market_of(workload, offered_clusters(["h100:8", "h100:11x7"]), Limits(), batch=64, tokens=1e10)
    assert [one.name for one in found.refused] == ["h100:11x7"]
    assert "h100:11x7" in "\n".join(found.lines())
    with pytest.raises(InfeasibleError):
        market_of(workload, offered_clusters(["h100:11x7"]), Limits(), batch=64, tokens=1e10)


def test_the_picture_is_xml_with_every_cluster_and_no_markup_from_names() -> None:
    hostile = replace(OFFERS[0], cluster=replace(OFFERS[0].cluster, name="<script>&\"'"))
    found = Market((hostile, *OFFERS[1:]), (), TOKENS, "<b>model</b>", Limits(3.0, 5000.0))
    root = ET.fromstring(frontier_svg(found))
    words = " ".join(element.text or "" for element in root.iter())
    assert "script" not in {element.tag.rpartition("}")[2] for element in root.iter()}
    assert all(one.name in words for one in found.offers)
    assert "<b>model</b>" in words


def test_the_picture_of_one_point_and_of_none() -> None:
    for found in (
        market(OFFERS[0]),
        Market((replace(OFFERS[0], budget=replace(OFFERS[0].budget, failures_per_device_hour=1e6)),)),
    ):
        assert ET.fromstring(frontier_svg(found)).tag.endswith("svg")


def test_budget_of_a_plan_says_where_each_number_comes_from() -> None:
    plan = Plan.model_validate(DATA)
    budget = plan_budget(plan, 1e9)
    assert budget.state_bytes == checkpoint_bytes(plan.model.parameters) == 12 * plan.model.parameters
    assert budget.steps == -(-(10**9) // (16 * 128))
    text = "\n".join(budget_lines(budget, plan.parsed_cluster))
    for word in ("goodput", "device hours", "Llama 3", "price"):
        assert word in text
    assert all(len(line) <= 100 for line in budget_lines(budget, plan.parsed_cluster))


def test_frozen_parameters_are_saved_in_16_bits() -> None:
    assert checkpoint_bytes(100, 0.5) == 50 * 12 + 50 * 2


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command line over a workload that needs no capture."""
    from typer.testing import CliRunner

    from autopar import api
    from autopar.cli import app

    monkeypatch.setattr(api, "describe_model", lambda *args, **options: SHAPE.workload(2048))
    return lambda *words: CliRunner().invoke(app, ["budget", "small", "--tokens", "1e11", "-q", *words])


SIZES = ("--clusters", "h100:8,h100:2x8", "--batch", "64", "--seq", "2048")


def test_the_command_prints_answers_and_draws(runner: Any, tmp_path: Path) -> None:
    result = runner(*SIZES, "--price", "h100=2", "--deadline", "10w", "-o", str(tmp_path / "f.svg"))
    assert result.exit_code == 0, result.output
    for word in ("h100:2x8", "cheapest", "within 70.0 days", "per M tokens"):
        assert word in result.output
    assert ET.parse(tmp_path / "f.svg").getroot().tag.endswith("svg")


def test_the_command_gives_json_and_exits_6_where_nothing_meets_the_limits(runner: Any) -> None:
    result = runner(*SIZES, "--deadline", "1h", "--json")
    data = json.loads(result.stdout)
    assert result.exit_code == 6
    assert data["answers"] == {}
    assert data["nearest"]
    assert {one["cluster"] for one in data["offers"]} == {"h100:8", "h100:2x8"}
