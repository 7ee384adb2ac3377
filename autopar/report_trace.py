"""Report trace: the predicted step as a trace that Perfetto and chrome://tracing read.

In:  a Plan with a layout.
Out: JSON text in the Chrome trace event format (Google, "Trace Event Format", 2016): one process per pipeline rank,
     with tracks for what it computes, waits for and updates, and a counter of its memory.

    {"ph": "X", "pid": 0, "tid": 1, "name": "forward chunk 0 micro-batch 3", "ts": 41000.0, "dur": 13000.0}   (microseconds)
"""

from __future__ import annotations

import json
from typing import Any

from autopar.cost.layout_time import DATA, OPTIMIZER, OTHER
from autopar.errors import PlanError
from autopar.plans import Plan
from autopar.report_step import Event, Step, predicted_step

KINDS = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
MOST_ACTIONS = 120_000
_COMPUTE, _COMMUNICATE, _UPDATE, _FORWARD, _BACKWARD = 1, 2, 3, 4, 5
_TRACKS = {
    _COMPUTE: "compute",
    _COMMUNICATE: "communication that nothing hides",
    _UPDATE: "optimizer",
    _FORWARD: "sends to the next stage",
    _BACKWARD: "sends to the stage before",
}


def trace_json(plan: Plan) -> str:
    """The trace. Raises PlanError for a plan without a layout or workload."""
    step = predicted_step(plan, MOST_ACTIONS)
    if step is None:
        missing = "layout" if plan.layout is None else "workload"
        raise PlanError(
            f"the plan holds no {missing}, so no step can be drawn", where=missing, hint="--space all"
        )
    events: list[dict[str, Any]] = []
    width = plan.parsed_mesh.device_count // len(step.ranks)
    for rank in range(len(step.ranks)):
        events += _rank(step, rank, width)
    about = {
        "model": plan.model.name,
        "cluster": str(plan.cluster.get("name", "")),
        "layout": str(step.layout),
        "predicted_step_s": plan.predicted.step_time_s,
        "micro_batches": step.micro_batches,
        "micro_batches_in_this_trace": step.shown,
        "note": "Predicted. Where in an action its communication lies is not modelled: it is drawn at the end.",
    }
    return json.dumps({"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}) + "\n"


def _rank(step: Step, rank: int, width: int) -> list[dict[str, Any]]:
    own = step.ranks[rank]
    name = f"pipeline rank {rank}: ranks {rank * width} to {(rank + 1) * width - 1}"
    events = [
        _meta(rank, "process_name", {"name": name}),
        _meta(rank, "process_sort_index", {"sort_index": rank}),
        *(_meta(rank, "thread_name", {"name": title}, tid) for tid, title in _TRACKS.items()),
        *(_meta(rank, "thread_sort_index", {"sort_index": tid}, tid) for tid in _TRACKS),
    ]
    for event in own.actions:
        events += _action(step, rank, event)
    events += _sends(step, rank)
    now = step.span_s
    for kind, seconds in step.after:
        track = {DATA: _COMMUNICATE, OPTIMIZER: _UPDATE, OTHER: _UPDATE}[kind]
        title = {DATA: "gradients and parameters between data ranks", OPTIMIZER: "optimizer step",
                 OTHER: "the rest of the step: clipping, logging, waiting for the slowest"}[kind]  # fmt: skip
        events.append(_slice(rank, track, title, now, now + seconds, {}))
        now += seconds
    for time, size in own.held:
        gib = {"GiB": round(size / 2**30, 4)}
        events.append({"ph": "C", "pid": rank, "name": "memory", "ts": _us(time), "args": gib})
    return events


def _action(step: Step, rank: int, event: Event) -> list[dict[str, Any]]:
    start, end, (kind, chunk, micro_batch, _) = event
    if end <= start:
        return []
    name = f"{KINDS[kind]} chunk {chunk} micro-batch {micro_batch}"
    about = {"chunk": chunk, "micro_batch": micro_batch, "layers": step.ranks[rank].chunks[chunk]}
    waits = (end - start) * step.exposed[kind]
    found = [_slice(rank, _COMPUTE, name, start, end - waits, about)]
    if waits > 0:
        found.append(_slice(rank, _COMMUNICATE, f"collectives of {name}", end - waits, end, about))
    return found


def _sends(step: Step, rank: int) -> list[dict[str, Any]]:
    """What leaves for other ranks; a send that the next one of its kind overtakes is cut there."""
    if step.send_s <= 0:
        return []
    found = []
    most = max(max(one.chunks) for one in step.ranks)
    for kinds, track, hop, word in (("F", _FORWARD, 1, "activations"), ("BI", _BACKWARD, -1, "gradients")):
        sends = [
            (end, chunk, micro_batch)
            for _, end, (kind, chunk, micro_batch, _) in step.ranks[rank].actions
            if kind in kinds and 0 <= chunk + hop <= most and chunk + hop not in step.ranks[rank].chunks
        ]
        for index, (start, chunk, micro_batch) in enumerate(sends):
            until = sends[index + 1][0] if index + 1 < len(sends) else start + step.send_s
            target = step.rank_of_chunk(chunk + hop)
            about = {"chunk": chunk, "micro_batch": micro_batch, "to_pipeline_rank": target}
            name = f"{word} of chunk {chunk} micro-batch {micro_batch}"
            found.append(_slice(rank, track, name, start, min(until, start + step.send_s), about))
    return found


def _slice(
    rank: int, track: int, name: str, start: float, end: float, about: dict[str, Any]
) -> dict[str, Any]:
    begin = _us(start)
    return {
        "ph": "X", "pid": rank, "tid": track, "name": name, "cat": _TRACKS[track], "ts": begin,
        "dur": round(_us(end) - begin, 3), "args": about,
    }  # fmt: skip


def _meta(rank: int, name: str, about: dict[str, Any], track: int = 0) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": track, "name": name, "args": about}


def _us(seconds: float) -> float:
    """Microseconds to a nanosecond."""
    return round(seconds * 1e6, 3)
