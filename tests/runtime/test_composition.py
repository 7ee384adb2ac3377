"""Layouts of several kinds of parallelism at once give the loss, gradients and step of the model on its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar import api
from autopar.errors import PlanError, UsageError
from autopar.runtime.pipeline import SCHEDULES, Timetable
from autopar.runtime.simulate import simulate
from tests.runtime.composition import compile_layout, errors, expected, model_and_batch
from tests.runtime.processes import run_on

LAYOUTS = [
    ("llama", "dp=2,tp=2,pp=2,schedule=1f1b,zero=1,mbs=1"),
    ("llama", "dp=2,tp=2,cp=2,zero=3,mbs=2,recompute=selective"),
    ("llama", "dp=2,cp=2,pp=2,vpp=2,schedule=interleaved,zero=2,mbs=1"),
    ("llama", "dp=2,pp=2,tp=2,vpp=2,schedule=zbv,zero=1,mbs=2"),
    ("llama", "tp=2,pp=2,vpp=2,schedule=dualpipev,mbs=1"),
    ("llama", "dp=2,pp=2,schedule=zb-h1,zero=2,mbs=1"),
    ("llama", "dp=2,pp=3,schedule=gpipe,zero=3,mbs=2,cuts=2/1/1,recompute=full"),
    ("llama", "dp=4,zero=3,shard=2,mbs=2"),
    ("llama", "dp=2,pp=2,schedule=1f1b,zero=1,mbs=4,order=dp-outer"),
    ("llama", "dp=4,zero=2,mbs=1,recompute=full,recompute_layers=2"),
    ("llama", "dp=2,tp=2,zero=1,mbs=2,offload=all,recompute=selective"),
    ("llama", "dp=2,pp=2,schedule=1f1b,zero=3,mbs=2,offload=all"),
    ("llama", "dp=2,mbs=2,offload=optimizer"),
    ("mixtral", "dp=2,tp=2,pp=2,ep=2,etp=2,schedule=1f1b,zero=1,mbs=1"),
    ("mixtral", "dp=2,cp=2,ep=2,zero=3,mbs=4"),
    ("deepseek", "dp=2,tp=2,pp=2,ep=2,etp=2,schedule=zbv,vpp=2,zero=1,mbs=2"),
    ("deepseek", "dp=4,ep=2,zero=2,mbs=1"),
    ("mixtral", "dp=2,tp=2,cp=2,pp=2,ep=2,etp=2,schedule=1f1b,zero=1,mbs=2"),  # five axes, 16 ranks
]


def good(found: list[dict[str, float]]) -> bool:
    return all(
        each["loss"] < 1e-5 and each["norm"] < 1e-4 and each["gradient"] < 1e-4 and each["parameter"] < 1e-4
        for each in found
    )


# What another of them shows too.
_SLOW = (3, 4, 6, 7, 8, 9, 11, 12, 14, 16)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [pytest.param(*each, marks=pytest.mark.slow) if at in _SLOW else each for at, each in enumerate(LAYOUTS)],
)
def test_simulated(kind: str, layout: str) -> None:
    run, batch = compile_layout(kind, layout)
    wanted = expected(kind, "cp=" in layout)
    ranks = run.plan.whole_mesh.device_count
    found = simulate(ranks, lambda _: errors(run.on_rank(), batch, wanted), timeout_s=200)
    assert good(found), found


def _on_gloo(cases: list[tuple[str, str]], ranks: int, tmp_path: Path, timeout: float) -> None:
    arguments = []
    for number, (kind, layout) in enumerate(cases):
        file = tmp_path / f"{number}.json"
        compile_layout(kind, layout)[0].plan.save(file)
        arguments += [kind, layout, str(file)]
    for rank in run_on(ranks, "composition_worker.py", *arguments, timeout=timeout):
        assert good(rank), rank


def test_gloo(tmp_path: Path) -> None:
    cases = [
        ("llama", "dp=2,pp=2,schedule=1f1b,zero=1,mbs=2"),
        ("mixtral", "dp=2,pp=2,ep=2,vpp=2,schedule=zbv,mbs=2"),
    ]
    _on_gloo(cases, 4, tmp_path, 240)


@pytest.mark.slow
def test_gloo_of_eight(tmp_path: Path) -> None:
    _on_gloo(LAYOUTS[:4] + LAYOUTS[13:14] + LAYOUTS[15:16], 8, tmp_path, 1200)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_has_its_rank(schedule: str) -> None:
    stages = {"1f1b": 3, "interleaved": 6}.get(schedule, 3 if schedule in ("gpipe", "zb-h1") else 6)
    table = Timetable(schedule, stages)
    table.check(3, 6)
    assert sorted(stage for rank in range(3) for stage in table.of_rank(rank, 3)) == list(range(stages))


def test_what_a_schedule_cannot_do() -> None:
    with pytest.raises(UsageError, match="unknown schedule 'fifo'"):
        Timetable("fifo", 2).check(2, 2)
    with pytest.raises(UsageError, match="4 stages on 2 ranks"):
        Timetable("1f1b", 4).check(2, 4)
    with pytest.raises(UsageError, match="2 micro-batches for 4 stages"):
        Timetable("dualpipev", 4).check(2, 2)
    with pytest.raises(UsageError, match="zero-bubble"):
        Timetable("zb-h1", 2).check(2, 2, compiled=True)


def test_cuts_that_are_not_the_models() -> None:
    run, _ = compile_layout("llama", "pp=2,schedule=1f1b,mbs=4")
    layout = run.plan.parsed_layout.with_(cuts=(1, 1))
    model, batch = model_and_batch("llama")
    plan = run.plan.model_copy(update={"layout": str(layout)})
    with pytest.raises(PlanError, match="4 layers cannot be cut into stages of 1, 1"):
        _ = api.compile(model, None, batch, plan=plan).stages
