"""docs/plans.md and what writes it: found layouts beside those of experts, under one cost model."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.cluster import load_cluster
from autopar.cost.pipeline import price
from autopar.cost.software import default_software
from autopar.layout import Layout
from autopar.layout_check import check
from autopar.transformer_shape import TransformerShape

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "bench"))
plans: Any = importlib.import_module("plans")
PAGE = (ROOT / "docs" / "plans.md").read_text()


def _case(name: str, shape: TransformerShape, cluster: str, batch: int, seq: int, expert: str) -> Any:
    machines = load_cluster(cluster)
    software = default_software(machines.device.name)
    layout = Layout.parse(expert)
    return plans.Case(name, shape.name, "a test", shape.workload(seq), machines, software, batch, layout, 1.0)


CASES = [
    _case(
        "dense",
        TransformerShape("llama-70b", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256),
        "h100:8x8", 128, 8192, "dp=2,tp=4,cp=2,pp=4,vpp=5,zero=1",
    ),
    _case(
        "moe",
        TransformerShape("mixtral-8x7b", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000,
                         experts=8, topk=2, expert_ffn=14336),
        "h100:8x8", 256, 4096, "dp=16,tp=1,pp=4,vpp=8,ep=8,zero=1",
    ),
]  # fmt: skip


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.id)
def outcome(request: pytest.FixtureRequest) -> Any:
    return plans.compare(request.param)


def test_the_found_layout_is_at_least_as_fast_as_the_experts(outcome: Any) -> None:
    assert outcome.found.best.step_s <= outcome.expert.step_s
    assert plans.failures([outcome]) == []


def test_the_found_layout_can_run_and_fits(outcome: Any) -> None:
    case, best = outcome.case, outcome.found.best

    check(best.layout, case.workload, case.cluster, case.batch)

    assert best.memory_total <= case.cluster.device.memory_bytes


def test_the_found_layout_keeps_what_was_asked(outcome: Any) -> None:
    assert outcome.found.best.layout.precision == outcome.case.expert.precision
    assert outcome.found.best.layout.offload == outcome.case.expert.offload


def test_the_walk_goes_from_the_experts_step_to_the_found_one(outcome: Any) -> None:
    steps = outcome.steps

    assert steps[0].before_s == pytest.approx(outcome.expert.step_s)
    assert [one.after_s for one in steps[:-1]] == [one.before_s for one in steps[1:]]
    assert steps[-1].after_s == pytest.approx(outcome.found.best.step_s, rel=1e-6)


def test_what_moved_in_a_step_sums_to_its_change(outcome: Any) -> None:
    for step in outcome.steps:
        assert sum(step.moved.values()) == pytest.approx(step.after_s - step.before_s, abs=1e-9)


def test_a_slower_layout_than_the_experts_is_a_failure(outcome: Any) -> None:
    """The check can fail: with the two layouts exchanged it does."""
    case, found = outcome.case, outcome.found
    slow = price(case.workload, case.expert, case.cluster, case.software, case.batch)
    exchanged = plans.Outcome(case, found.best, replace(found, best=slow), 0.0, ())

    assert len(plans.failures([exchanged])) == (outcome.gain > 0)


def test_the_page_shows_every_run_with_a_section_of_its_own() -> None:
    rows = re.findall(r"^\| \[([\w-]+)\]\(#\1\) \|", PAGE, re.MULTILINE)

    assert rows == list(plans.RUNS)
    assert re.findall(r"^## ([\w-]+)$", PAGE, re.MULTILINE) == rows


def test_on_the_page_no_found_layout_is_slower_than_an_experts_that_fits() -> None:
    table = re.findall(
        r"^\| \[[\w-]+\].*\| [\d.]+ s \| ([\d.]+) s \([+-]\d+ %\)( \[1\])? \| ([\d.]+) s \|", PAGE, re.M
    )

    assert len(table) == len(plans.RUNS)
    assert [row for row in table if not row[1] and float(row[2]) > float(row[0])] == []


def test_the_page_says_how_it_was_written_and_names_no_machine() -> None:
    assert "`python bench/plans.py --rows training.csv --check`" in PAGE
    assert not re.search(r"/work/|/home/|/tmp/", PAGE)
