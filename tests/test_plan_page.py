"""The page of a plan that has a layout: its decisions, its proof, its alternatives, its memory over a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.errors import PlanError
from autopar.layout import Layout
from autopar.plans import Plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return autopar.plan(
        "smollm2-135m",
        "h100:1x8",
        batch=64,
        seq=2048,
        space="all",
        fix=["pp=4", "schedule=interleaved", "vpp=3"],
    )


@pytest.fixture(scope="module")
def path(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(file)
    return file


def _line(page: str, title: str) -> str:
    return next(line for line in page.splitlines() if line.startswith(title))


def test_the_pipeline_is_told_in_words(plan: Plan) -> None:
    assert "4 stages x 3 chunks, interleaved 1F1B" in _line(plan.page(), "pipeline")


def test_layers_are_told_per_virtual_stage(plan: Plan) -> None:
    assert sum(plan.parsed_layout.cuts) == 30
    assert "per virtual stage" in _line(plan.page(), "layers")


def test_micro_batches_are_told_in_size_and_count(plan: Plan) -> None:
    layout = plan.parsed_layout
    count = 64 // layout.dp // layout.mbs

    assert f"{count} micro-batch" in _line(plan.page(), "batch")
    assert f"of {layout.mbs} sequence" in _line(plan.page(), "batch")


def test_the_layout_of_the_page_parses(plan: Plan) -> None:
    text = _line(plan.page(), "layout").removeprefix("layout").strip()

    assert Layout.parse(text) == plan.parsed_layout.with_(cuts=())


def test_the_page_says_what_the_search_proves(plan: Plan) -> None:
    searched = plan.predicted.searched
    above = 100 * max(0.0, plan.predicted.step_time_s / (plan.predicted.bound_s or 1) - 1)

    assert _line(plan.page(), "proof") == (
        f"proof     within {above:.1f} % of the best of {searched['layouts']:,} layouts priced,"
        f" {searched['simulated']:,} simulated"
    )


def test_alternatives_are_told_as_differences(plan: Plan) -> None:
    page = plan.page()

    assert plan.alternatives
    assert "differs from the chosen layout in" in page
    assert "->" in page[page.index("differs from the chosen layout in") :]


def test_the_page_shows_memory_over_a_step(plan: Plan) -> None:
    assert list(plan.predicted.moments) == ["stored", "first forward", "loss", "backward", "optimizer step"]
    assert all(moment in plan.page() for moment in plan.predicted.moments)


def test_the_page_is_narrow_and_nothing_is_cut_off(plan: Plan) -> None:
    assert max(map(len, plan.page().splitlines())) <= 100
    assert "..." not in plan.page()


def test_a_plan_whose_layout_cannot_run_is_refused(plan: Plan) -> None:
    data = json.loads(plan.to_json())
    data["workload"]["layers"] = [[0, 3]]  # fewer layers than stages
    data["layout"] = str(plan.parsed_layout.with_(cuts=()))

    with pytest.raises(PlanError, match="3 layers"):
        Plan.from_json(json.dumps(data))


def test_a_plan_file_is_priced_as_the_planner_did(plan: Plan, path: Path) -> None:
    result = CliRunner().invoke(app, ["estimate", str(path), "--json", "--quiet"])

    assert json.loads(result.stdout)["step_time_s"] == pytest.approx(plan.predicted.step_time_s)


def test_another_layout_of_a_plan_file_is_priced(path: Path) -> None:
    found = autopar.api.estimate(str(path), layout="tp=1,mbs=1,zero=1")

    assert found.layout == Layout(dp=8, zero=1)
    assert found.batch == 64
    assert found.workload.seq == 2048


def test_a_model_is_priced_as_the_planner_does(plan: Plan) -> None:
    found = autopar.api.estimate(
        "smollm2-135m", "h100:1x8", layout=str(plan.parsed_layout), batch=64, seq=2048, measured_s=1.0
    )

    assert found.step_s == pytest.approx(plan.predicted.step_time_s)
    assert "measured  1.00 s" in found.page()


def test_a_vocabulary_that_tp_does_not_divide_is_told() -> None:
    found = autopar.plan("gpt2", "h100:1x8", batch=32, seq=128, fix=["tp=4"])
    assert "50,257 does not divide by tp=4: priced as padded to 50,260" in found.page()
