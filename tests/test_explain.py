"""Explaining plans: why, why not, what if, errors of constants, formulas, and requests that nothing satisfies."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.cli import main
from autopar.cluster import load_cluster
from autopar.cost.estimate import estimate
from autopar.cost.formula import formula
from autopar.cost.grid import Grid
from autopar.cost.pipeline import price
from autopar.cost.software import default_software
from autopar.cost.symbols import symbolic
from autopar.errors import InfeasibleError, PlanError, UsageError
from autopar.explain import Study, what_if, why, why_not
from autopar.explain_cost import steady, symbols, uncertain
from autopar.explain_text import as_json, text
from autopar.layout import Layout
from autopar.passes.decisions import parse_decisions
from autopar.passes.layout_relax import feasible, search_or_relax
from autopar.passes.layout_search import search_layouts
from autopar.passes.layout_sensitivity import constants, robust
from autopar.passes.layout_space import Space
from autopar.plans import Plan
from autopar.transformer_shape import TransformerShape
from autopar.workload import Workload

CLUSTER = load_cluster("h100:2x8")
SOFTWARE = default_software("h100")
SHAPE = TransformerShape(
    name="small", layers=8, hidden=2048, heads=30, kv_heads=10, ffn=5632, vocab=32000, head_dim=64
)
MOE = replace(SHAPE, name="moe", heads=32, kv_heads=8, experts=16, topk=2, expert_ffn=1024)


def space_of(workload: Workload, fix: tuple[str, ...] = (), forbid: tuple[str, ...] = ()) -> Space:
    return Space(workload, CLUSTER, 64, parse_decisions(fix, forbid))


def study_of(workload: Workload, fix: tuple[str, ...] = ()) -> Study:
    space = space_of(workload, fix)
    best = search_layouts(space, SOFTWARE).best
    return Study(replace(space, decisions=parse_decisions()), SOFTWARE, best, best.step_s)


@pytest.fixture(scope="module")
def study() -> Study:
    return study_of(SHAPE.workload(2048))


@pytest.fixture(scope="module")
def explained(study: Study) -> dict[str, Any]:
    return {
        "why": why(study),
        "why_not": [why_not(study, "tp=2"), why_not(study, "tp=7")],
        "what_if": [what_if(study, "gpus=8")],
        "sensitivity": uncertain(study),
        "robust": steady(study),
        "formula": symbols(study),
    }


@pytest.fixture(scope="module")
def piped() -> Study:
    return study_of(SHAPE.workload(2048), ("pp=4", "schedule=1f1b"))


@pytest.fixture(scope="module")
def plan_file(study: Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan as `autopar plan` writes it; explaining reads its workload, layout, cluster and prediction only."""
    layout, priced = study.chosen.layout, study.chosen
    fsdp = layout.dp if layout.zero == 3 else 1
    plan = Plan.model_validate(
        {
            "autopar_version": "0",
            "model": {"name": "small", "fingerprint": "0" * 64, "parameters": 1, "task": "causal-lm"},
            "cluster": CLUSTER.to_dict(),
            "mesh": f"pp={layout.pp},dp={layout.dp // fsdp},fsdp={fsdp},cp={layout.cp},tp={layout.tp}",
            "data": {"batch": 64, "seq": 2048, "micro_batches": 64 // (layout.dp * layout.mbs)},
            "precision": layout.precision,
            "recompute": layout.recompute,
            "zero": layout.zero,
            "axes": {},
            "blocks": {},
            "state": {},
            "predicted": {
                "step_time_s": priced.step_s,
                "tokens_per_s": 64 * 2048 / priced.step_s,
                "mfu": 0.4,
                "time_s": dict(priced.time_s),
                "memory_bytes": {kind: int(size) for kind, size in priced.memory_bytes.items()},
                "memory_total_bytes": int(priced.memory_total),
                "memory_limit_bytes": int(study.limit),
            },
            "layout": str(layout),
            "software": SOFTWARE.name,
            "workload": study.workload.to_dict(),
        }
    )
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(path)
    return path


@pytest.fixture
def autopar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["autopar", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return run


# ---------------------------------------------------------------- why, why not, what if


def test_the_alternative_of_every_decision_is_what_a_search_without_the_value_finds(
    explained: dict[str, Any],
) -> None:
    for decision in explained["why"]["decisions"]:
        if decision["alternative"] is not None and decision["name"] in ("tp", "zero", "recompute"):
            forbidden = space_of(SHAPE.workload(2048), (), (f"{decision['name']}={decision['value']}",))
            assert decision["alternative"]["step_s"] == search_layouts(forbidden, SOFTWARE).best.step_s


def test_every_decision_has_a_reason_or_an_alternative(explained: dict[str, Any], piped: Study) -> None:
    for one in (explained["why"], why(piped)):
        assert all(decision["why"] or decision["alternative"] for decision in one["decisions"])


def test_the_difference_by_kind_adds_up_to_the_difference(study: Study) -> None:
    other = why_not(study, "tp=2")
    assert sum(other["time_difference_s"].values()) == pytest.approx(other["step_s"] - study.chosen.step_s)
    assert other["slower"] > 0
    assert "tensor communication" in other["why"] or "slower" in other["why"] or "as fast" in other["why"]


def test_why_not_a_whole_layout_prices_that_layout(study: Study) -> None:
    words = "dp=2,tp=2,cp=1,pp=4,vpp=1,zero=1,mbs=1,recompute=full,precision=bf16,schedule=1f1b,cuts=3/2/2/1"
    expected = price(study.workload, Layout.parse(words), CLUSTER, SOFTWARE, 64)
    assert why_not(study, words)["step_s"] == pytest.approx(expected.step_s)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("tp=4", "30 heads"),
        ("pp=3", "16 devices"),
        ("cp=8,tp=2,pp=2", "= 32 does not divide the 16 devices"),
        ("ep=2", "no experts"),
        ("schedule=zbv,pp=1", "pp > 1"),
        ("pp=2,schedule=dualpipev,dp=8,mbs=4", "micro-batches"),
        ("cp=16,dp=2", "16 devices"),
        ("pp=4,vpp=1,schedule=1f1b,cuts=4/4/4/4", "the model has 8"),
    ],
)
def test_what_cannot_be_says_why(study: Study, words: str, says: str) -> None:
    other = why_not(study, words)
    assert not other["possible"]
    assert says in other["why"]


def test_more_bandwidth_never_makes_the_best_plan_slower(study: Study) -> None:
    faster = what_if(study, "inter_bw=4x,latency=0.5x")
    assert faster["step_s"] <= study.chosen.step_s * 1.005
    assert faster["kept"]["step_s"] >= faster["step_s"] / 1.005


def test_half_the_devices_take_longer_and_the_words_may_be_numbers_of_three_kinds(study: Study) -> None:
    assert what_if(study, "gpus=8")["step_s"] > study.chosen.step_s
    assert what_if(study, "batch=128,seq=1024")["seq"] == 1024
    assert not what_if(study, "memory=0.04")["possible"]


@pytest.mark.parametrize(
    "words", ["", "gpus", "gpus=x", "gpus=1.5", "gpus=2x", "inter_bandwidth=2x", "flops=1e"]
)
def test_what_if_refuses_other_words(study: Study, words: str) -> None:
    with pytest.raises(UsageError):
        what_if(study, words)


# ---------------------------------------------------------------- constants that are off


def test_a_constant_that_makes_all_kernels_faster_has_an_elasticity_between_minus_one_and_nought(
    explained: dict[str, Any],
) -> None:
    effects = {line["constant"]: line for line in explained["sensitivity"]["constants"]}
    assert -1 <= effects["sustained clock of matmuls"]["elasticity"] < 0
    assert all(line["regret"] > 0.004 or line["stays_best"] for line in effects.values())
    assert all(
        "assumed" in line["source"] or "fitted" in line["source"] or "runs" in line["source"]
        for line in effects.values()
    )


def test_the_nominal_prices_are_those_of_the_search(piped: Study) -> None:
    seconds, fits = piped.nearby.price(piped.nearby.nominal)
    assert seconds[0] == pytest.approx(piped.chosen.step_s)
    assert fits[0]


def test_no_layout_has_a_smaller_largest_regret_than_the_robust_one(explained: dict[str, Any]) -> None:
    """Brute force over the constants one at a time: the robust layout's largest regret is not above the choice's."""
    found = explained["robust"]
    assert found["worst_regret"] <= found["chosen_worst_regret"]


def test_robust_leaves_a_choice_that_a_likely_error_makes_bad(study: Study) -> None:
    """A choice that all but fills the memory does not fit if the model counts 5 % too little."""
    nearby = copy(study.nearby)
    nearby.limit = study.chosen.memory_total * 1.01
    found = robust(nearby)
    assert found.chosen_worst == np.inf
    assert found.layout != study.chosen.layout.with_(cuts=())
    assert found.worst < np.inf


def test_every_constant_moves_only_itself() -> None:
    nearby = study_of(MOE.workload(2048)).nearby
    for constant in constants(nearby):
        same, _ = nearby.price(constant.apply(nearby.nominal, 1.0))
        assert np.allclose(same, nearby.price(nearby.nominal)[0], rtol=1e-12)
        assert constant.apply(nearby.nominal, 1.1) != nearby.nominal
        assert 0 < constant.low <= 1 <= constant.high


# ---------------------------------------------------------------- formulas


@pytest.mark.parametrize(
    "layout",
    [
        "dp=16,zero=1,mbs=1",
        "dp=8,cp=2,zero=3,mbs=2,recompute=full",
        "dp=2,tp=2,pp=4,zero=1,mbs=1,recompute=selective",
        "dp=2,tp=2,pp=4,vpp=2,zero=2,mbs=1,schedule=zbv",
        "dp=2,tp=2,pp=4,vpp=2,zero=0,mbs=1,schedule=interleaved",
        "dp=4,pp=4,vpp=2,mbs=1,schedule=dualpipev",
        "dp=4,pp=4,mbs=1,schedule=zb-h1",
    ],
)
def test_a_formula_gives_what_the_estimate_gives(layout: str) -> None:
    _agree(SHAPE.workload(2048), Layout.parse(layout))


@pytest.mark.parametrize("layout", ["dp=16,ep=8,zero=1", "dp=4,tp=4,ep=4,etp=1,zero=1,precision=fp8"])
def test_a_formula_of_experts_gives_what_the_estimate_gives(layout: str) -> None:
    _agree(MOE.workload(2048), Layout.parse(layout))


def test_a_formula_of_windows_gives_what_the_estimate_gives() -> None:
    _agree(replace(SHAPE, window=4096, window_every=2).workload(2048), Layout.parse("dp=16,zero=1"))


def _agree(workload: Workload, layout: Layout) -> None:
    """Within 1 %, of every kind, for sequences and batches in one vectorised call."""
    tokens, batches = np.array([1024, 4096, 32768]), np.array([[64], [256]])
    times, memory = formula(workload, layout, CLUSTER, SOFTWARE).evaluate(tokens, batches)
    for row, batch in enumerate(batches[:, 0]):
        for column, length in enumerate(tokens):
            exact = estimate(workload.at(int(length)), Grid.of([layout]), CLUSTER, SOFTWARE, int(batch))
            for kind, seconds in times.items():
                assert abs(seconds[row, column] - exact.time_s[kind][0]) <= 0.01 * exact.step_s[0], kind
            for kind, size in memory.items():
                assert abs(size[row, column] - exact.memory_bytes[kind][0]) <= 0.01 * exact.memory_total[0], (
                    kind
                )
            assert sum(seconds[row, column] for seconds in times.values()) == pytest.approx(
                exact.step_s[0], rel=0.01
            )


def test_symbols_go_through_numpy() -> None:
    import sympy

    one = symbolic(sympy.Symbol("x", positive=True))
    made = np.where(np.array([True]), np.maximum(2.0 * one, 3.0) + np.ceil(one / 2), 0.0)
    call = sympy.lambdify(sympy.Symbol("x", positive=True), made[0])
    assert [call(value) for value in (1, 5)] == [4, 13]


def test_formula_lines_hold_s_and_m(explained: dict[str, Any]) -> None:
    found = explained["formula"]
    assert found["worst_error"] < 0.01
    assert any("S**2" in line for line in found["lines"])
    assert any("M*" in line for line in found["lines"])


# ---------------------------------------------------------------- requests that nothing satisfies


@pytest.mark.parametrize(
    ("fix", "clash"),
    [
        (("pp=4", "tp=4", "mbs=1"), "tp=4 cannot hold"),
        (("pp=8", "cp=4", "zero=1"), "pp=8 and cp=4 cannot hold together"),
        (("zero=1", "pp=1", "schedule=zbv"), "pp=1 and schedule=zbv cannot hold together"),
        (("pp=2", "tp=2", "dp=8"), "pp=2 and tp=2 and dp=8 cannot hold together"),
    ],
)
def test_the_clash_is_the_smallest_set_and_the_relaxation_runs(fix: tuple[str, ...], clash: str) -> None:
    with pytest.raises(InfeasibleError) as caught:
        search_or_relax(space_of(SHAPE.workload(2048), fix), SOFTWARE)
    assert clash in caught.value.what
    dropped = re.match(r"without (.*?): ", caught.value.hint or "")
    assert dropped is not None
    kept = tuple(word for word in fix if word not in dropped[1].split(" and "))
    assert len(kept) == len(fix) - 1
    assert feasible(space_of(SHAPE.workload(2048), kept), SOFTWARE, float(CLUSTER.device.memory_bytes))


def test_memory_can_clash_with_words() -> None:
    big = replace(SHAPE, name="big", layers=40, hidden=8192, heads=64, kv_heads=8, ffn=22016, head_dim=128)
    with pytest.raises(InfeasibleError, match=r"zero=0.* cannot hold together: big does not fit"):
        search_or_relax(space_of(big.workload(4096), ("zero=0", "recompute=none", "dp=16")), SOFTWARE)


def test_a_model_that_fits_nowhere_blames_no_word() -> None:
    huge = replace(
        SHAPE, name="huge", layers=200, hidden=16384, heads=128, kv_heads=8, ffn=53248, head_dim=128
    )
    with pytest.raises(InfeasibleError, match="GiB"):
        search_or_relax(space_of(huge.workload(2048), ("mbs=1",)), SOFTWARE)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("tp=three", "whole number"),
        ("tpp=4", "tp"),
        ("zero=7", "0 to 3"),
        ("tp=0", "from 1"),
        ("schedule=zbw", "zbv"),
        ("recompute<full", "word"),
        ("tp=4|x", "whole number"),
        ("cuts=1/2", "--layout with cuts"),
        ("tp", "tp"),
        ("", "NAME=VALUE"),
    ],
)
def test_wrong_words_say_what_is_right(words: str, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        parse_decisions([words])


# ---------------------------------------------------------------- the command


def test_the_command_explains_without_torch(plan_file: Path) -> None:
    code = (
        "import sys; sys.argv = ['autopar', 'explain', sys.argv[1], '--why-not', 'tp=2', '--formula'];"
        "from autopar.explain import Study; from autopar.plans import Plan; Study.of(Plan.load(sys.argv[2]));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(plan_file)], check=True)


def test_pages_are_at_most_100_columns_and_json_says_the_same(explained: dict[str, Any]) -> None:
    assert max(map(len, text(explained).splitlines())) <= 100
    assert set(json.loads(as_json(explained))) == set(explained)


def test_the_command_prints_what_was_asked(autopar: Any, plan_file: Path) -> None:
    code, page, _ = autopar("explain", str(plan_file), "--why-not", "tp=2")
    assert (code, "why not tp=2" in page) == (0, True)
    code, found, _ = autopar("explain", str(plan_file), "--why-not", "tp=2", "--json")
    assert (code, list(json.loads(found))) == (0, ["why_not"])


@pytest.mark.parametrize(
    "words", [("--why-not", "tp=three"), ("--why-not", "tpp=4"), ("--why-not", ""), ("--what-if", "gpus=x")]
)
def test_wrong_words_end_with_code_2(autopar: Any, plan_file: Path, words: tuple[str, ...]) -> None:
    code, out, err = autopar("explain", str(plan_file), *words)
    assert (code, out) == (2, "")
    assert "try" in err


def test_a_plan_without_a_layout_cannot_be_explained(plan_file: Path) -> None:
    plan = Plan.load(plan_file).model_copy(update={"layout": None})
    with pytest.raises(PlanError, match="no layout"):
        Study.of(plan)
