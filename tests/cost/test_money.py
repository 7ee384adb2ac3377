"""Money: Daly's interval against a numerical minimum and his figures, failures against a simulation, the frontier."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from autopar.cluster import load_cluster
from autopar.cost.money import (
    Budget,
    Point,
    daly_interval_s,
    draw,
    expected_wall_s,
    frontier,
    young_interval_s,
)
from autopar.errors import UsageError

LLAMA = Budget(  # The Llama 3 Herd of Models: 405B parameters, 15.6T tokens, 16,384 H100
    step_time_s=5.2,
    tokens_per_step=16.8e6,
    total_tokens=15.6e12,
    devices=16384,
    state_bytes=405e9 * 14,
    failures_per_device_hour=419 / (54 * 24 * 16384),
    storage_bytes_per_s=2e12,
    restart_s=600.0,
    price_per_device_hour=2.5,
)
BUDGETS = st.builds(
    Budget,
    step_time_s=st.floats(0.1, 100),
    tokens_per_step=st.floats(1e5, 1e8),
    total_tokens=st.floats(1e9, 1e13),
    devices=st.integers(1, 30000),
    state_bytes=st.floats(0, 1e13),
    failures_per_device_hour=st.floats(0, 1e-4),
    storage_bytes_per_s=st.floats(1e10, 1e13),
    restart_s=st.floats(0, 1800),
    detection_s=st.floats(0, 600),
    price_per_device_hour=st.floats(0, 10),
    asynchronous=st.booleans(),
    copy_s=st.floats(0, 5),
)
MINUTE, HOUR = 60.0, 3600.0


# ---------------------------------------------------------------- the interval


@pytest.mark.parametrize(("mtbf_s", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_the_interval_of_dalys_figures(mtbf_s: float, minutes: float) -> None:
    """Daly, 2006, figures 3, 4 and 5: saves of 5 minutes."""
    assert daly_interval_s(5 * MINUTE, mtbf_s) / MINUTE == pytest.approx(
        minutes, rel=0.006
    )  # as the figures round


@given(st.floats(1e-6, 10), st.floats(1, 1e7))
def test_the_interval_minimises_the_expected_time(saves_per_mtbf: float, mtbf_s: float) -> None:
    stall_s = saves_per_mtbf * mtbf_s

    def wall_s(interval_s: float) -> float:
        return expected_wall_s(1.0, interval_s * mtbf_s, stall_s, 0.0, mtbf_s)

    least = minimize_scalar(wall_s, bounds=(1e-6, 2), method="bounded", options={"xatol": 1e-9}).fun

    assert wall_s(daly_interval_s(stall_s, mtbf_s) / mtbf_s) <= least * 1.002


@given(st.floats(1e-4, 0.5), st.floats(1, 1e6))
def test_daly_is_no_worse_than_young(saves_per_mtbf: float, mtbf_s: float) -> None:
    stall_s = saves_per_mtbf * mtbf_s
    daly, young = (
        expected_wall_s(1.0, rule(stall_s, mtbf_s), stall_s, 0.0, mtbf_s)
        for rule in (daly_interval_s, young_interval_s)
    )

    assert daly <= young * (1 + 1e-12)


def test_short_saves_make_daly_young() -> None:
    assert daly_interval_s(1e-6, 1e6) == pytest.approx(young_interval_s(1e-6, 1e6), rel=1e-5)


def test_saves_as_long_as_the_time_between_failures() -> None:
    assert daly_interval_s(200.0, 100.0) == 100.0


@given(BUDGETS)
def test_no_other_interval_is_better(budget: Budget) -> None:
    for factor in (0.5, 2.0):
        other = replace(budget, interval_given_s=budget.interval_s * factor)
        assert budget.wall_s <= other.wall_s * 1.002


# ---------------------------------------------------------------- failures


def _simulated_s(budget: Budget, seed: int) -> float:
    """One run, segment by segment, with exponential times between failures."""
    chance = random.Random(seed)
    segment_s = budget.interval_s + budget.stall_s
    now = left = 0.0
    next_failure = chance.expovariate(1 / budget.mtbf_s)
    for _ in range(round(budget.saves)):
        left = segment_s
        while now + left > next_failure:
            now, left = next_failure, budget.wait_s + segment_s
            next_failure = now + chance.expovariate(1 / budget.mtbf_s)
        now += left
    return now


def test_expected_time_is_that_of_a_simulation() -> None:
    budget = replace(LLAMA, total_tokens=1e12, storage_bytes_per_s=5e10, failures_per_device_hour=1e-4)
    runs = [_simulated_s(budget, seed) for seed in range(60)]

    assert sum(runs) / len(runs) == pytest.approx(budget.wall_s, rel=0.02)


def test_llama_3_trains_more_than_nine_tenths_of_the_time() -> None:
    """The Llama 3 Herd of Models, section 3.3.4: effective training time above 90 %."""
    assert 0.90 < LLAMA.goodput < 0.97
    assert LLAMA.failures / LLAMA.days == pytest.approx(419 / 54, rel=0.01)


@given(BUDGETS)
def test_lost_time_adds_up(budget: Budget) -> None:
    assert budget.compute_s + sum(budget.lost_s.values()) == pytest.approx(budget.wall_s, rel=1e-6)
    assert all(seconds >= 0 for seconds in budget.lost_s.values())


@given(BUDGETS)
def test_no_failures_no_loss(budget: Budget) -> None:
    calm = replace(budget, failures_per_device_hour=0.0)

    assert (calm.goodput, calm.failures, calm.saves, calm.days) == (1.0, 0.0, 0.0, calm.ideal_days)


def test_saves_cost_time_even_without_failures() -> None:
    calm = replace(
        LLAMA,
        failures_per_device_hour=0.0,
        interval_given_s=100.0,
        storage_bytes_per_s=LLAMA.state_bytes / 10,
    )

    assert calm.goodput == pytest.approx(100 / 110)


@given(BUDGETS, st.floats(1, 4))
def test_more_failures_never_help(budget: Budget, factor: float) -> None:
    worse = replace(budget, failures_per_device_hour=budget.failures_per_device_hour * factor)

    assert worse.goodput <= budget.goodput * 1.002


@given(BUDGETS, st.floats(1, 4))
def test_faster_storage_never_hurts(budget: Budget, factor: float) -> None:
    faster = replace(budget, storage_bytes_per_s=budget.storage_bytes_per_s * factor)

    assert faster.goodput >= budget.goodput * 0.998


def test_a_run_that_never_ends() -> None:
    hopeless = replace(LLAMA, failures_per_device_hour=10.0)

    assert (hopeless.goodput, hopeless.days, hopeless.cost) == (0.0, math.inf, math.inf)
    assert "never ends" in hopeless.lines()[-1]


# ---------------------------------------------------------------- asynchronous saves


def test_asynchronous_saves_stop_training_for_the_copy_only() -> None:
    both = replace(LLAMA, storage_bytes_per_s=1e11)
    behind = replace(both, asynchronous=True, copy_s=0.5)

    assert (both.stall_s, behind.stall_s) == (both.save_s, 0.5)
    assert behind.goodput > both.goodput


def test_an_asynchronous_save_ends_before_the_next_begins() -> None:
    slow = replace(LLAMA, storage_bytes_per_s=1e10, asynchronous=True)

    assert slow.interval_s == slow.save_s


def test_a_failure_falls_back_behind_the_save_under_way() -> None:
    slow = replace(LLAMA, storage_bytes_per_s=1e10, asynchronous=True)

    assert slow.lost_s["rework"] / slow.failures == pytest.approx(1.5 * slow.save_s, rel=0.1)


# ---------------------------------------------------------------- units, cluster, page


def test_days_hours_and_cost() -> None:
    budget = replace(
        LLAMA, step_time_s=86.4, tokens_per_step=1e6, total_tokens=2e9, devices=100, price_per_device_hour=3.0
    )

    assert budget.steps == 2000
    assert (budget.ideal_days, budget.ideal_device_hours, budget.ideal_cost) == pytest.approx(
        (2.0, 4800.0, 14400.0)
    )


@given(BUDGETS)
def test_cost_is_hours_times_price(budget: Budget) -> None:
    assert budget.cost == pytest.approx(
        budget.days * 24 * budget.devices * (budget.price_per_device_hour or 0)
    )
    assert budget.device_hours == pytest.approx(budget.ideal_device_hours / budget.goodput)


def test_a_last_part_of_a_step_is_a_step() -> None:
    assert replace(LLAMA, tokens_per_step=10.0, total_tokens=25.0).steps == 3


def test_a_budget_on_a_cluster(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("device: h100\nnodes: 4\ndead: [0]\nprice_per_hour: 2\ncurrency: EUR\nstorage_gbps: 5\n")
    budget = Budget.on(
        load_cluster(file), step_time_s=1.0, tokens_per_step=1e6, total_tokens=1e9, state_bytes=1e10
    )

    assert (budget.devices, budget.price_per_device_hour, budget.currency) == (24, 2.0, "EUR")
    assert budget.save_s == 2.0


def test_the_page() -> None:
    page = "\n".join(LLAMA.lines())
    for part in (
        "15.6 T in 928,572 steps",
        "55.9 days",
        "one every 3.1 h",
        "Daly 2006",
        "goodput",
        "USD",
        "rework 1.",
    ):
        assert part in page
    assert "USD" not in "\n".join(replace(LLAMA, price_per_device_hour=None).lines())


@given(BUDGETS)
def test_a_page_fits_a_terminal(budget: Budget) -> None:
    assert all(len(line) <= 110 for line in budget.lines())


@pytest.mark.parametrize(
    "change",
    [
        {"step_time_s": 0},
        {"tokens_per_step": -1},
        {"total_tokens": math.nan},
        {"devices": 0},
        {"devices": 2.5},
        {"devices": True},
        {"state_bytes": -1},
        {"failures_per_device_hour": math.inf},
        {"storage_bytes_per_s": 0},
        {"restart_s": "600"},
        {"price_per_device_hour": -2},
        {"interval_given_s": 0},
    ],
)
def test_nonsense_is_refused_with_advice(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as raised:
        replace(LLAMA, **change)
    assert next(iter(change)) in str(raised.value)
    assert "\n  try " in str(raised.value)


# ---------------------------------------------------------------- the frontier

POINTS = st.lists(st.builds(Point, st.integers(0, 20), st.integers(0, 20)), max_size=40)


@given(POINTS)
def test_the_frontier_is_what_nothing_beats(points: list[Point]) -> None:
    def beaten(point: Point) -> bool:
        return any(o.days <= point.days and o.cost <= point.cost and o[:2] != point[:2] for o in points)

    assert {point[:2] for point in frontier(points)} == {point[:2] for point in points if not beaten(point)}


@given(POINTS)
def test_the_frontier_goes_from_fast_to_cheap(points: list[Point]) -> None:
    found = frontier(points)

    assert found == sorted(found, key=lambda point: point.days)
    assert [point.cost for point in found] == sorted({point.cost for point in found}, reverse=True)


def test_of_equal_points_the_first_stays() -> None:
    assert frontier([Point(1, 1, "a"), Point(1, 1, "b")]) == [Point(1, 1, "a")]


@given(POINTS, st.integers(40, 100), st.integers(4, 30))
def test_a_drawing_fits(points: list[Point], width: int, height: int) -> None:
    lines = draw(points, width=width, height=height)

    assert all(len(line) <= width for line in lines)
    assert not points or len(lines) == height + 3 + len(frontier(points))


def test_a_drawing_has_the_fast_at_the_left_and_the_cheap_below() -> None:
    lines = draw([Point(1, 30, "fast"), Point(2, 10, "cheap"), Point(2, 30, "neither")], width=40, height=4)

    assert [line.find("|") >= 0 and line.split("|")[1].strip() for line in lines[1:5]] == [
        "1" + " " * 27 + "·",
        "",
        "",
        "2",
    ]
    assert lines[-2].endswith("fast")
    assert lines[-1].endswith("cheap")


@pytest.mark.parametrize("point", [Point(math.inf, 1), Point(1, math.nan), Point(-1, 1)])
def test_a_point_that_is_no_number_is_refused(point: Point) -> None:
    with pytest.raises(UsageError, match="try leaving out"):
        frontier([point])


@pytest.mark.parametrize("size", [{"width": 39}, {"width": 101}, {"height": 3}])
def test_a_drawing_of_no_size_is_refused(size: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="try width"):
        draw([Point(1, 1)], **size)
