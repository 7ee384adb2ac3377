"""Profile trace: what a traced step spent by block, collective and kind, and the plan's prediction beside it.

In:  the events of torch's profiler (Google, "Trace Event Format", 2016; microseconds), whose ranges an Observer named;
     a Plan.
Out: Measured; events for two more processes of the same trace; rows of a table.

    {"ph": "X", "name": "backward model.layers.4", "ts": 41000.0, "dur": 1300.0, "pid": 1000000, "tid": 1, ...}
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from autopar.cost import layout_time, step
from autopar.errors import PlanError
from autopar.plans import Plan
from autopar.report_trace import trace_json
from autopar.runtime.observe import CHECKPOINT, COMPUTE, DATA, OPTIMIZER, OTHER, Collective, Place

FORWARD, BACKWARD, AGAIN = "forward ", "backward ", "forward again "
_KINDS = (DATA, COMPUTE, OPTIMIZER, CHECKPOINT, OTHER)
_MEASURED, _PREDICTED = 1_000_000, 2_000_000  # process numbers that no operating system gives out
_TRACKS = {1: "blocks", 2: "collectives waited for", 3: "kinds of time"}
_PIPELINE = "pipeline bubble and communication"
_ENGINE = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class Span:
    """A named range, in microseconds of the trace."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e6


@dataclass(frozen=True)
class Measured:
    """`blocks`: calls (`forward PATH`, `backward PATH`, `forward again PATH`); `waits`: collectives; `kinds`."""

    blocks: tuple[Span, ...]
    waits: tuple[Span, ...]
    kinds: tuple[Span, ...]
    named: Mapping[str, tuple[Collective, Place]]

    @property
    def start_us(self) -> float:
        return min((span.start for span in (*self.kinds, *self.blocks, *self.waits)), default=0.0)


@dataclass(frozen=True)
class Row:
    """Seconds of one step. `predicted_s`: None where the plan has no such number."""

    name: str
    predicted_s: float | None
    measured_s: float

    @property
    def ratio(self) -> float | None:
        """Measured by predicted."""
        return self.measured_s / self.predicted_s if self.predicted_s else None


def measured_of(
    events: Iterable[Mapping[str, Any]], named: Mapping[str, tuple[Collective, Place]]
) -> Measured:
    """The ranges that an Observer opened. A backward ends where the next range begins, at the latest with autograd's
    last step before that."""
    own: list[Span] = []
    engine: list[float] = []
    for event in events:
        if event.get("ph") != "X":
            continue
        start = float(event["ts"])
        end = start + float(event.get("dur", 0.0))
        if event.get("cat") == "user_annotation":
            own.append(Span(str(event["name"]), start, end))
        elif str(event["name"]).startswith(_ENGINE):
            engine.append(end)
    own.sort(key=lambda span: span.start)
    engine.sort()
    waits = [span for span in own if span.name in named]
    kinds = [span for span in own if span.name in _KINDS]
    forwards = [span for span in own if span.name.startswith(FORWARD) and span.name not in named]
    markers = [span for span in own if span.name.startswith(BACKWARD)]
    starts = sorted(
        span.start
        for span in (*markers, *kinds, *(one for one in forwards if not one.name.startswith(AGAIN)))
    )
    backwards = []
    for marker in markers:
        after = bisect_right(starts, marker.start)
        limit = starts[after] if after < len(starts) else float("inf")
        last = bisect_right(engine, limit) - 1
        end = max(marker.end, engine[last]) if last >= 0 else marker.end
        backwards.append(Span(marker.name, marker.start, min(end, limit)))
    blocks = sorted([*forwards, *backwards], key=lambda span: span.start)
    return Measured(tuple(blocks), tuple(waits), tuple(kinds), dict(named))


# ---- more processes for the trace ------------------------------------------------------------------------------


def measured_events(measured: Measured, rank: int) -> list[dict[str, Any]]:
    """The process `measured`: one track each for blocks, collectives and kinds."""
    events = _process(_MEASURED, f"rank {rank}, measured, by the plan's names", _TRACKS)
    for track, spans in ((1, measured.blocks), (2, measured.waits), (3, measured.kinds)):
        for span in spans:
            about: dict[str, Any] = {}
            if span.name in measured.named:
                collective, place = measured.named[span.name]
                about = {"of": str(collective), "path": place.path, "node": place.node, "part": place.part}
            events.append(_event(_MEASURED, track, span, about))
    return events


def predicted_events(plan: Plan, start_us: float) -> list[dict[str, Any]]:
    """The process `predicted` (one for each pipeline rank), from `start_us` on: the plan's timeline, or its kinds of
    time one after the other where the plan has no layout."""
    try:
        events = json.loads(trace_json(plan))["traceEvents"]
    except PlanError:
        return _kinds_in_a_row(plan, start_us)
    moved = []
    for event in events:
        event["pid"] = _PREDICTED + int(event["pid"])
        if "ts" in event:
            event["ts"] = float(event["ts"]) + start_us
        if event.get("name") == "process_name":
            event["args"]["name"] = f"predicted, {event['args']['name']}"
        moved.append(event)
    return moved


def _kinds_in_a_row(plan: Plan, start_us: float) -> list[dict[str, Any]]:
    events = _process(_PREDICTED, "predicted (kinds of time in a row)", {1: "kinds of time"})
    now = start_us
    for kind, seconds in plan.predicted.time_s.items():
        if seconds > 0:
            events.append(_event(_PREDICTED, 1, Span(kind, now, now + seconds * 1e6), {}))
            now += seconds * 1e6
    return events


def _process(pid: int, name: str, tracks: Mapping[int, str]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
    ]
    for track, title in tracks.items():
        events.append({"ph": "M", "pid": pid, "tid": track, "name": "thread_name", "args": {"name": title}})
    return events


def _event(pid: int, track: int, span: Span, about: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X", "pid": pid, "tid": track, "name": span.name, "cat": "autopar", "ts": span.start,
        "dur": span.end - span.start, "args": dict(about),
    }  # fmt: skip


# ---- the table -------------------------------------------------------------------------------------------------


def rows(plan: Plan, measured: Measured, steps: int) -> list[Row]:
    """Kinds of time, the whole step, then blocks (forward and backward of all their calls, waiting left out)."""
    predicted = _predicted(plan)
    seconds = _by_kind(plan, measured)
    found = [
        Row(kind, predicted.get(kind), seconds.get(kind, 0.0) / steps)
        for kind in dict.fromkeys((*predicted, *seconds))
        if predicted.get(kind) or seconds.get(kind)
    ]
    whole = sum(span.seconds for span in measured.kinds if span.name == COMPUTE)
    found.append(Row("step", plan.predicted.step_time_s, whole / steps))
    blocks: dict[str, float] = defaultdict(float)
    for span, alone in zip(measured.blocks, _alone(measured), strict=True):
        blocks[_path(span.name)] += alone
    found += [Row(f"block {path}", None, spent / steps) for path, spent in blocks.items()]
    return found


def _predicted(plan: Plan) -> dict[str, float]:
    """The plan's kinds of time; those that a measurement cannot tell apart together."""
    found = dict(plan.predicted.time_s)
    if layout_time.BUBBLE in found or layout_time.PIPELINE in found:
        found[_PIPELINE] = found.pop(layout_time.BUBBLE, 0.0) + found.pop(layout_time.PIPELINE, 0.0)
    return found


def _by_kind(plan: Plan, measured: Measured) -> dict[str, float]:
    names = (
        (layout_time.FORWARD, layout_time.BACKWARD, layout_time.AGAIN)
        if layout_time.FORWARD in plan.predicted.time_s
        else (step.FORWARD, step.BACKWARD, step.RECOMPUTE)
    )
    found: dict[str, float] = defaultdict(float)
    for span, alone in zip(measured.blocks, _alone(measured), strict=True):
        part = 2 if span.name.startswith(AGAIN) else 1 if span.name.startswith(BACKWARD) else 0
        found[names[part]] += alone
    for span in measured.waits:
        found[_kind_of(plan, *measured.named[span.name])] += span.seconds
    updates = [span for span in measured.kinds if span.name == OPTIMIZER]
    waits = _Inside(measured.waits)
    found[OPTIMIZER] += sum(span.seconds - waits.seconds(span) for span in updates)
    whole = sum(span.seconds for span in measured.kinds if span.name == COMPUTE)
    rest = layout_time.OTHER if layout_time.OTHER in plan.predicted.time_s else "the rest of the step"
    found[rest] += max(0.0, whole - sum(found.values()))
    return found


def _kind_of(plan: Plan, collective: Collective, place: Place) -> str:
    """The plan's word for the time of a collective: by its axis, and whether a block's graph or the store asks for it."""
    axes = collective.axis.split("+")
    if layout_time.FORWARD in plan.predicted.time_s:
        if "pp" in axes:
            return _PIPELINE
        if not place.node and "tp" not in axes:
            return layout_time.DATA
        special = {"cp": layout_time.CONTEXT, "ep": layout_time.EXPERT}
        return next((special[axis] for axis in axes if axis in special), layout_time.TENSOR)
    if place.node or axes == ["tp"]:
        return step.TENSOR
    return step.FSDP if "fsdp" in axes else step.DP


def _alone(measured: Measured) -> list[float]:
    """Seconds of each block, without the collectives waited for and the recomputed forwards in it."""
    again = [span for span in measured.blocks if span.name.startswith(AGAIN)]
    waits, all_inner = _Inside(measured.waits), _Inside(_outermost([*measured.waits, *again]))
    return [
        span.seconds - (waits if span.name.startswith(AGAIN) else all_inner).seconds(span)
        for span in measured.blocks
    ]


class _Inside:
    """Sums over spans, none of which overlaps another, by where they begin."""

    def __init__(self, spans: Sequence[Span]) -> None:
        spans = sorted(spans, key=lambda span: span.start)
        self.starts = [span.start for span in spans]
        self.sums = [0.0, *accumulate(span.seconds for span in spans)]

    def seconds(self, outer: Span) -> float:
        return (
            self.sums[bisect_left(self.starts, outer.end)] - self.sums[bisect_left(self.starts, outer.start)]
        )


def _outermost(spans: Sequence[Span]) -> list[Span]:
    """Spans that lie in no other one."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda one: (one.start, -one.end)):
        if not found or span.end > found[-1].end:
            found.append(span)
    return found


def _path(name: str) -> str:
    return next(name.removeprefix(part) for part in (AGAIN, FORWARD, BACKWARD) if name.startswith(part))
