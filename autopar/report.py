"""Report: a plan as one self-contained HTML page.

In:  a Plan, and the lines of a Budget if there are tokens.
Out: HTML text: times, timeline, memory, mesh, sharded graph, alternatives. It loads nothing, and needs no script.

    Path("plan.html").write_text(report_html(Plan.load("plan.json")))

A plan file is not trusted: every text goes through the template's escaping, and the page forbids itself to load or
run anything (its content security policy). Large plans are cut where the page says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from autopar import report_svg
from autopar.plan_parts import BlockPart
from autopar.plans import Plan
from autopar.report_step import Step, predicted_step
from autopar.report_svg import gib_text, seconds_text
from autopar.svg import PALETTE

MOST_ACTIONS, PER_RANK = 50_000, 200
_MOST_BLOCKS, _MOST_OPS, _MOST_STATE, _MOST_ROWS = 24, 160, 60, 60
_LAYOUT_WORDS = {
    "dp": "data-parallel replicas", "tp": "ranks that split every layer (tensor)", "cp": "ranks that split the sequence (context)",
    "pp": "pipeline stages", "vpp": "virtual stages on each pipeline rank", "ep": "ranks that split the experts",
    "etp": "ranks that split one expert", "zero": "what data ranks split: 0 nothing, 1 optimizer, 2 gradients too, 3 parameters too",
    "shard": "data ranks that hold one copy together", "mbs": "sequences of a micro-batch on a data rank",
    "recompute": "what the backward computes again", "recompute_layers": "layers of a stage that are recomputed",
    "precision": "of the products", "schedule": "order of the pipeline", "sp": "norms split over tp",
    "offload": "what host memory holds between its uses", "cuts": "layers of each virtual stage",
}  # fmt: skip


@dataclass(frozen=True)
class Block:
    """A unique block for the template. `ops`: (name, [(mesh axis, loop)]); `hidden_*`: how many were cut."""

    name: str
    times: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ops: list[tuple[str, list[tuple[str, str]]]]
    hidden_ops: int
    state: list[tuple[str, str]]
    hidden_state: int


def report_html(plan: Plan, *, budget: Sequence[str] = ()) -> str:
    """The page of a plan. `budget`: lines on what a run takes. Raises UsageError for a software stack that is unknown."""
    step = predicted_step(plan, MOST_ACTIONS, PER_RANK)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(seconds=seconds_text, gib=gib_text, nice=_nice)
    source = files("autopar").joinpath("report.html").read_text(encoding="utf-8")
    predicted = plan.predicted
    limit = float(predicted.memory_limit_bytes)
    view: dict[str, Any] = {
        "plan": plan,
        "cluster": plan.parsed_cluster,
        "predicted": predicted,
        "step": step,
        "budget": budget,
        "gap": _gap(plan),
        "page": plan.page(),
        "layout": _layout_rows(plan, step),
        "times": _rows(predicted.time_s, predicted.step_time_s),
        "time_bar": report_svg.bar_svg(
            predicted.time_s, predicted.step_time_s, "seconds of a step by kind", seconds_text
        ),
        "memory": _rows(predicted.memory_bytes, predicted.memory_total_bytes),
        "memory_bar": report_svg.bar_svg(
            predicted.memory_bytes,
            limit,
            "bytes of the fullest rank by kind",
            gib_text,
            {f"memory {gib_text(limit)}": limit},
        ),
        "axis_rows": report_svg.axis_rows(plan.parsed_mesh, plan.parsed_cluster, _expert_axes(plan)),
        "mesh_picture": report_svg.mesh_svg(plan.parsed_mesh, plan.parsed_cluster),
        "blocks": [_block(name, block) for name, block in list(plan.blocks.items())[:_MOST_BLOCKS]],
        "hidden_blocks": max(0, len(plan.blocks) - _MOST_BLOCKS),
        "axis_colours": _axis_colours(plan),
        "alternatives": plan.alternatives[:_MOST_ROWS],
        "scatter": _scatter(plan),
        "most_rows": _MOST_ROWS,
        **_step_view(plan, step, limit),
    }
    return environment.from_string(source).render(view)


def _step_view(plan: Plan, step: Step | None, limit: float) -> dict[str, Any]:
    """What of the page there is only with a predicted step."""
    if step is None:
        return {"timeline": None, "curves": None, "key": [], "peak": 0.0, "again": 0.0, "peaks": []}
    return {
        "timeline": report_svg.timeline_svg(step),
        "curves": report_svg.memory_svg(step, limit),
        "curved": report_svg.memory_ranks(step),
        "key": report_svg.timeline_key(step),
        "peak": step.ranks[step.fullest].peak_bytes,
        "again": step.priced.step_s / plan.predicted.step_time_s - 1 if plan.predicted.step_time_s else 0.0,
        "peaks": [
            (rank, one.chunks, one.stored_bytes, one.peak_bytes) for rank, one in enumerate(step.ranks)
        ],
    }


def _gap(plan: Plan) -> float | None:
    bound = plan.predicted.bound_s
    return plan.predicted.step_time_s / bound - 1 if bound else None


def _rows(by_kind: dict[str, Any], whole: float) -> list[tuple[str, str, float, float]]:
    """(kind, colour, amount, share), without what is 0."""
    return [
        (kind, report_svg.colour_of(kind, index), float(size), float(size) / (whole or 1))
        for index, (kind, size) in enumerate(by_kind.items())
        if size
    ]


def _layout_rows(plan: Plan, step: Step | None) -> list[tuple[str, str, str]]:
    layout = plan.parsed_layout if step is None else step.layout
    words = [word.partition("=") for word in str(layout).split(",")]
    return [(name, value.replace("/", " "), _LAYOUT_WORDS.get(name, "")) for name, _, value in words]


def _expert_axes(plan: Plan) -> dict[str, tuple[int, int]]:
    """ep and etp, which are cut out of dp, cp and tp: (size, ranks between neighbours)."""
    layout = plan.parsed_layout
    inside = layout.etp
    far = layout.tp * max(1, layout.etp // layout.tp) if layout.etp > 1 else 1
    return {"etp": (inside, 1), "ep": (layout.ep, max(1, far if inside > 1 else 1))}


def _axis_colours(plan: Plan) -> dict[str, str]:
    names = [*plan.parsed_mesh.names, "ep", "etp"]
    return {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(names)}


def _block(name: str, block: BlockPart) -> Block:
    ops = [(op, list(choice.items())) for op, choice in list(block.ops.items())[:_MOST_OPS]]
    stored = sorted(block.state.items(), key=lambda item: "@" not in item[1])  # what is split comes first
    return Block(
        name, block.times, block.inputs, block.outputs, ops, max(0, len(block.ops) - _MOST_OPS),
        stored[:_MOST_STATE], max(0, len(stored) - _MOST_STATE),
    )  # fmt: skip


def _scatter(plan: Plan) -> Markup | None:
    predicted = plan.predicted
    others = [
        (other.step_time_s, float(other.memory_total_bytes), other.fits,
         f"{other.mesh}: {seconds_text(other.step_time_s)}, {gib_text(other.memory_total_bytes)}, {other.reason}")
        for other in plan.alternatives[:_MOST_ROWS]
    ]  # fmt: skip
    others += [
        (seconds, float(size), True, f"on the frontier: {seconds_text(seconds)}, {gib_text(size)}")
        for seconds, size in _frontier(plan)
    ]
    if not others:
        return None
    chosen = (predicted.step_time_s, float(predicted.memory_total_bytes))
    return report_svg.scatter_svg(chosen, others, float(predicted.memory_limit_bytes))


def _frontier(plan: Plan) -> Iterator[tuple[float, float]]:
    """(seconds, bytes) of layouts that no other beats in both, of plans that have them."""
    for point in list(getattr(plan.predicted, "frontier", ()))[:_MOST_ROWS]:
        yield float(point[0]), float(point[1])


def _nice(value: float) -> str:
    return f"{value:,.0f}"
