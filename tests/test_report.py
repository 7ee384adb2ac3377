"""The page of a plan is safe and whole; its timeline, memory and trace are those of the cost model."""

from __future__ import annotations

import json
from collections import defaultdict
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from autopar.cluster import load_cluster
from autopar.cost.pipeline import price
from autopar.cost.software import default_software
from autopar.errors import PlanError
from autopar.layout import Layout
from autopar.plans import Plan
from autopar.report import report_html
from autopar.report_step import predicted_step
from autopar.report_trace import trace_json
from autopar.transformer_shape import TransformerShape
from tests.tiny import tiny

SHAPE = TransformerShape(name="small", layers=16, hidden=1024, heads=16, ffn=4096, vocab=32000)
VOID = {"meta", "br", "img", "link", "input", "hr"}
HOSTILE = "</title><script>alert(1)</script><img src=x onerror='alert(2)'>\"'&{{ 7*7 }}"


def made(layout: str, cluster: str, batch: int, shape: TransformerShape = SHAPE, seq: int = 2048) -> Plan:
    """A plan of a layout as the planner would write it, without a model."""
    chosen, where = Layout.parse(layout), load_cluster(cluster)
    workload, software = shape.workload(seq), default_software("h100")
    priced = price(workload, chosen, where, software, batch)
    fsdp = (chosen.shard or chosen.dp) if chosen.zero == 3 else 1
    data: dict[str, Any] = {
        "autopar_version": "0",
        "model": {
            "name": shape.name,
            "fingerprint": "0" * 64,
            "parameters": workload.parameters,
            "task": "lm",
        },
        "cluster": where.to_dict(),
        "mesh": f"pp={chosen.pp},dp={chosen.dp // fsdp},fsdp={fsdp},cp={chosen.cp},tp={chosen.tp}",
        "data": {"batch": batch, "seq": seq, "micro_batches": batch // (chosen.dp * chosen.mbs)},
        "precision": chosen.precision,
        "recompute": chosen.recompute,
        "zero": chosen.zero,
        "axes": {},
        "blocks": {},
        "state": {},
        "predicted": {
            "step_time_s": priced.step_s,
            "tokens_per_s": batch * seq / priced.step_s,
            "mfu": 0.4,
            "time_s": priced.time_s,
            "memory_bytes": {kind: int(size) for kind, size in priced.memory_bytes.items()},
            "memory_total_bytes": int(priced.memory_total),
            "memory_limit_bytes": int(where.device.memory_bytes),
        },
        "layout": str(priced.layout),
        "software": software.name,
        "workload": workload.to_dict(),
    }
    return Plan.model_validate(data)


class Page(HTMLParser):
    """Every tag closed, and what is in the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


@pytest.fixture(scope="module")
def planned() -> Plan:
    from autopar import api

    model, inputs = tiny("llama")
    return api.plan(model, "h100:2x8", example_inputs=inputs, batch=64, space="all")


@pytest.fixture(scope="module")
def run_time() -> Plan:
    """A plan without a layout."""
    from tests.test_plans import DATA

    return Plan.model_validate(DATA)


def _assert_loads_nothing(page: Page) -> None:
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "object", "embed", "img", "base", "foreignobject")
        assert not {"src", "href", "xlink:href", "action", "srcset", "data"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")]
        assert "url(" not in (attributes.get("style") or "")


def test_a_planned_model_has_every_part(planned: Plan) -> None:
    page = Page(report_html(planned))
    _assert_loads_nothing(page)
    for part in (
        "Timeline",
        "Memory",
        "Time of a step",
        "Mesh on the network",
        "Sharded graph",
        "Alternatives",
    ):
        assert part in page.text
    for block, parts in planned.blocks.items():
        assert block in page.text
        assert all(op in page.text for op in parts.ops)
    assert all(other.mesh in page.text for other in planned.alternatives)


def test_nothing_is_loaded_from_elsewhere(planned: Plan) -> None:
    text = report_html(planned, budget=["goodput 99 %"])
    assert "http://" not in text
    assert "https://" not in text
    assert "@import" not in text


def test_a_plan_without_a_layout_has_a_page_without_a_timeline(run_time: Plan) -> None:
    page = Page(report_html(run_time))
    _assert_loads_nothing(page)
    assert "Timeline" not in page.text
    assert "fsdp" in page.text
    with pytest.raises(PlanError, match="no layout"):
        trace_json(run_time)


def test_hostile_names_stay_text(planned: Plan) -> None:
    data = planned.model_dump(mode="json")
    data["model"]["name"] = data["model"]["task"] = data["autopar_version"] = HOSTILE
    data["cluster"]["name"] = data["cluster"]["device"]["title"] = HOSTILE
    data["cluster"]["links"][0]["name"] = data["cluster"]["device"]["name"] = HOSTILE
    data["workload"]["name"] = HOSTILE
    data["notes"] = data["constraints"] = [HOSTILE]
    data["axes"] = {HOSTILE: ["dp"]}
    block = next(iter(data["blocks"].values()))
    block["ops"] = {HOSTILE: {"dp": HOSTILE}}
    block["state"] = {HOSTILE: "[4]"}
    data["blocks"] = {HOSTILE: block}
    data["alternatives"] = [{**data["alternatives"][0], "mesh": HOSTILE, "reason": HOSTILE}]
    data["unruled"] = [{"op": HOSTILE, "block": HOSTILE, "times": 1, "bytes": 1, "seconds": 0.0}]
    data["predicted"]["time_s"] = {HOSTILE: 1.0}
    data["predicted"]["memory_bytes"] = {HOSTILE: 1}
    data["predicted"]["searched"] = {HOSTILE: 1}
    page = Page(report_html(Plan.model_validate(data), budget=[HOSTILE]))
    _assert_loads_nothing(page)
    assert page.text.count(HOSTILE) >= 15
    assert "49" not in page.text.split("Notes")[1].split("As text")[0]  # no template in a name runs


@pytest.mark.parametrize(
    ("layout", "cluster", "batch"),
    [
        ("dp=1,tp=1,pp=1", "h100:1", 4),
        ("dp=8,tp=1,pp=1,zero=3", "h100:8", 16),
        ("dp=2,tp=2,pp=4,zero=1,cuts=4/4/4/4", "h100:2x8", 32),
        ("dp=2,tp=1,pp=4,vpp=2,schedule=interleaved,cuts=2/2/2/2/2/2/2/2", "h100:8", 64),
        ("dp=1,tp=1,pp=8,schedule=zb-h1,recompute=full,cuts=2/2/2/2/2/2/2/2", "h100:8", 32),
        ("dp=1,tp=2,pp=4,vpp=2,schedule=zbv,recompute=selective,cuts=2/2/2/2/2/2/2/2", "h100:8", 16),
        ("dp=1,tp=2,pp=4,vpp=2,schedule=dualpipev,cuts=2/2/2/2/2/2/2/2", "h100:8", 16),
        ("dp=1,tp=1,pp=8,offload=all,cuts=2/2/2/2/2/2/2/2", "h100:8", 16),
    ],
)
def test_memory_over_time_peaks_where_it_is_predicted(layout: str, cluster: str, batch: int) -> None:
    """The cuts are even, as the prediction takes them to be."""
    plan = made(layout, cluster, batch)
    step = predicted_step(plan, 100_000)
    assert step is not None
    peak = step.ranks[step.fullest].peak_bytes
    assert peak >= plan.predicted.memory_bytes["activations"]
    assert peak == pytest.approx(plan.predicted.memory_total_bytes, rel=0.02)
    for rank in step.ranks:
        assert min(size for _, size in rank.held) == pytest.approx(rank.stored_bytes)
        times = [time for time, _ in rank.held]
        assert times == sorted(times)


def test_the_timeline_is_as_long_as_the_step() -> None:
    plan = made("dp=2,tp=2,pp=4,zero=1", "h100:2x8", 32)
    step = predicted_step(plan, 100_000)
    assert step is not None
    assert step.shown == step.micro_batches == 16
    assert step.end_s == pytest.approx(plan.predicted.step_time_s, rel=1e-6)


def test_a_long_step_is_cut_and_the_page_says_so() -> None:
    plan = made("dp=1,tp=1,pp=8", "h100:8", 512)
    page = Page(report_html(plan))
    step = predicted_step(plan, 1600)
    assert step is not None
    assert step.shown % 8 == 0
    assert sum(len(rank.actions) for rank in step.ranks) <= 1600
    assert "of 512 micro-batches" in page.text


@pytest.mark.parametrize(
    ("layout", "cluster", "batch", "layers"),
    [
        ("dp=1,tp=1,pp=1", "h100:1", 1, 1),
        ("dp=1,tp=8,pp=64", "h100:64x8", 160, 1000),
        ("dp=1,tp=8,pp=64,vpp=8,schedule=interleaved", "h100:64x8", 64, 1000),
        ("dp=1,tp=1,pp=64,vpp=2,schedule=dualpipev", "gb200:64", 128, 128),
    ],
)
def test_odd_plans_have_pages_of_a_bearable_size(layout: str, cluster: str, batch: int, layers: int) -> None:
    shape = TransformerShape(name="odd", layers=layers, hidden=512, heads=8, ffn=1024, vocab=1000)
    text = report_html(made(layout, cluster, batch, shape, 512))
    _assert_loads_nothing(Page(text))
    assert len(text) < 5_000_000


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,tp=4,pp=2",
        "dp=2,tp=2,pp=4,vpp=2,schedule=zbv",
        "dp=2,tp=2,cp=2,pp=2,vpp=2,schedule=interleaved",
        "dp=16,tp=1,pp=1",
    ],
)
def test_the_trace_is_one_that_perfetto_reads(layout: str) -> None:
    plan = made(layout, "h100:2x8", 32)
    trace = json.loads(trace_json(plan))
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    counters: dict[int, list[float]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M", "C")
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "C":
            counters[event["pid"]].append(event["args"]["GiB"])
    parsed = Layout.parse(layout)
    assert {pid for pid, _ in tracks} == set(range(parsed.pp)) == set(counters)
    for slices in tracks.values():
        for (_, end), (start, _) in pairwise(slices):
            assert start >= end - 2e-3  # microseconds, each rounded to a nanosecond
    last = max(end for slices in tracks.values() for _, end in slices)
    assert last == pytest.approx(plan.predicted.step_time_s * 1e6, rel=1e-3)
    micro_batches = {e["args"]["micro_batch"] for e in trace["traceEvents"] if e["ph"] == "X" and e["args"]}
    assert micro_batches == set(range(plan.data.micro_batches))


def test_the_command_writes_a_page_and_a_trace(planned: Plan, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from autopar.cli import app

    planned.save(tmp_path / "plan.json")
    files = [str(tmp_path / name) for name in ("plan.json", "plan.html", "trace.json")]
    result = CliRunner().invoke(
        app, ["report", files[0], "-o", files[1], "--trace", files[2], "--tokens", "1e9"]
    )
    assert result.exit_code == 0, result.output
    assert "goodput" in Page((tmp_path / "plan.html").read_text()).text
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
