"""The page of a Plan: what a person reads. In: a Plan. Out: text, at most 100 columns wide."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from autopar.errors import UsageError
from autopar.layout import Layout
from autopar.layout_page import differences, layout_lines, wrapped

if TYPE_CHECKING:
    from autopar.plan_parts import BlockPart
    from autopar.plans import Plan

WIDTH = 100
_SHOWN = 8  # alternatives, ops, notes


def page(plan: Plan) -> str:
    return "\n".join(line if len(line) <= WIDTH else line[: WIDTH - 3] + "..." for line in _lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    data, predicted = plan.data, plan.predicted
    local = plan.parsed_layout.mbs
    yield f"model     {plan.model.name}, {plan.model.parameters:,} parameters, {plan.model.task}"
    yield f"cluster   {_cluster_line(plan)}"
    if plan.layout is not None:
        yield f"mesh      {plan.mesh}   (outermost first)"
        yield from _layout_lines(plan)
    else:
        yield f"mesh      {plan.mesh}   (outermost first; neighbours along tp are neighbours in rank)"
        yield f"stages    1: pipeline not used; ZeRO {plan.zero}; recompute {plan.recompute}; {plan.precision}"
        micro = f"{data.micro_batches} micro-batch{'es' * (data.micro_batches > 1)}"
        yield f"batch     {data.batch} sequences of {data.seq} per step, {micro}, {local} at a time on each data rank"
    yield "axes      " + (
        ", ".join(f"{name} -> {'.'.join(axes)}" for name, axes in plan.axes.items()) or "nothing is split"
    )
    yield ""
    rate = f"{predicted.tokens_per_s:,.0f} tokens/s, MFU {100 * predicted.mfu:.1f} %"
    yield f"step      {_seconds(predicted.step_time_s)}, {rate}"
    if predicted.searched:
        yield from _certificate(plan)
    elif predicted.bound_s is not None and predicted.bound_s > 0:
        above = 100 * (predicted.step_time_s / predicted.bound_s - 1)
        yield f"bound     no plan searched can take less than {_seconds(predicted.bound_s)}: within {above:.1f} %"
    yield from _table(
        [(kind, _seconds(seconds)) for kind, seconds in predicted.time_s.items() if seconds > 0]
    )
    share = 100 * predicted.memory_total_bytes / max(predicted.memory_limit_bytes, 1)
    yield ""
    yield (
        f"memory    {_gib(predicted.memory_total_bytes)} per rank at the peak, {share:.0f} % of "
        f"{_gib(predicted.memory_limit_bytes)}"
    )
    yield from _table([(kind, _gib(size)) for kind, size in predicted.memory_bytes.items() if size > 0])
    if predicted.moments:
        yield from wrapped(
            "moments", ", ".join(f"{name} {_gib(size)}" for name, size in predicted.moments.items())
        )
    yield ""
    yield "blocks"
    for name, block in plan.blocks.items():
        yield from _block_lines(name, block)
    yield from _alternatives(plan)
    if plan.unruled:
        yield ""
        yield "ops without a rule, whole on every rank"
        for op in sorted(plan.unruled, key=lambda op: -op.seconds)[:_SHOWN]:
            yield f"  {op.op} in {op.block} x{op.times}: {_gib(op.bytes)} and {_seconds(op.seconds)} per step"
    for title, lines in (("constraints", plan.constraints), ("notes", plan.notes)):
        if lines:
            yield ""
            yield title
            for line in lines[:_SHOWN]:
                yield from textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent="    ")
            if len(lines) > _SHOWN:
                yield f"  and {len(lines) - _SHOWN} more"


def _layout_lines(plan: Plan) -> Iterator[str]:
    layout = plan.parsed_layout
    experts = plan.parsed_workload.experts if plan.workload is not None else 0
    yield from wrapped("layout", str(layout.with_(cuts=())))
    for title, text in layout_lines(layout, batch=plan.data.batch, seq=plan.data.seq, experts=experts):
        yield from wrapped(title, text)


def _certificate(plan: Plan) -> Iterator[str]:
    """What the search proves: how near the best of all layouts of the space."""
    predicted = plan.predicted
    searched = predicted.searched
    priced, simulated = searched.get("layouts", 0), searched.get("simulated", 0)
    of = f"the best of {priced:,} layouts priced, {simulated:,} simulated"
    if not predicted.bound_s:
        yield f"proof     none; {of}"
        return
    above = 100 * max(0.0, predicted.step_time_s / predicted.bound_s - 1)
    yield f"proof     within {above:.1f} % of {of}"
    yield f"          no layout of the space that fits takes less than {_seconds(predicted.bound_s)}"


def _cluster_line(plan: Plan) -> str:
    cluster = plan.parsed_cluster
    links = ", ".join(f"{link.name} {link.gbps:g} GB/s" for link in cluster.links)
    return f"{cluster.name}: {cluster.nodes} x {cluster.devices_per_node} {cluster.device.title}; {links}"


def _block_lines(name: str, block: BlockPart) -> Iterator[str]:
    yield f"  {name} x{block.times}"
    if block.inputs:
        yield f"    takes  {'  '.join(block.inputs)}"
    split = Counter(axis for choice in block.ops.values() for axis in choice)
    sums = Counter(
        axis for choice in block.ops.values() for axis, factor in choice.items() if factor.startswith("+")
    )
    for axis, count in split.items():
        passed = f" ({sums[axis]} of them pass partial sums on)" if sums[axis] else ""
        yield f"    {axis:<5}  splits {count} of {len(block.ops)} ops{passed}"
    whole = sum(not choice for choice in block.ops.values())
    if whole:
        yield f"    whole  {whole} ops are repeated on every rank"
    stored = {key: text for key, text in block.state.items() if "@" in text}
    for key, text in list(stored.items())[:_SHOWN]:
        yield f"    state  {key} {text}"
    if len(block.state) > len(stored):
        yield f"    state  {len(block.state) - len(stored)} of {len(block.state)} not split by the graph"


def _alternatives(plan: Plan) -> Iterator[str]:
    slower = [other for other in plan.alternatives if other.fits]
    misses = [other for other in plan.alternatives if not other.fits]
    for title, rows in (("rejected: slower", slower), ("rejected: does not fit", misses)):
        if not rows:
            continue
        yield ""
        yield title
        if plan.layout is not None:
            chosen = plan.parsed_layout
            facts = [(_seconds(o.step_time_s), _gib(o.memory_total_bytes), o.reason) for o in rows[:_SHOWN]]
            texts = [_other(chosen, o.mesh) for o in rows[:_SHOWN]]
            heads = list(_table([("step", "memory", "why"), *facts]))
            column = max(map(len, heads)) + 2
            for head, text in zip(heads, ["differs from the chosen layout in", *texts], strict=True):
                yield from wrapped(head, text, column=column)
            continue
        yield ""
        yield title
        if plan.layout is not None:
            chosen = plan.parsed_layout
            yield from _table([("step", "memory", "why", "other than the chosen layout"), *(
                (_seconds(o.step_time_s), _gib(o.memory_total_bytes), o.reason, _other(chosen, o.mesh))
                for o in rows[:_SHOWN]
            )])  # fmt: skip
            continue
        header = ("mesh", "micro", "recompute", "step", "memory", "why")
        body = [
            (
                o.mesh,
                str(o.micro_batches),
                o.recompute,
                _seconds(o.step_time_s),
                _gib(o.memory_total_bytes),
                o.reason,
            )
            for o in rows[:_SHOWN]
        ]
        yield from _table([header, *body])


def _other(chosen: Layout, text: str) -> str:
    """An alternative as its differences from the chosen layout."""
    try:
        return differences(chosen, Layout.parse(text)) or "its details"
    except UsageError:
        return text


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if not rows:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} us"


def _gib(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**27 else f"{value / 2**20:.2f} MiB"
