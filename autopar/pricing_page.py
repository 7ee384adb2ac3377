"""Pricing: one layout's price, itemised, and the page that a person reads of it.

In:  a Workload, a Cluster, a Layout, sequences per step, a Software; a measured step time if there is one.
Out: a Pricing: prints as a page of at most 100 columns, or as JSON-friendly data.

    print(price_layout(workload, cluster, Layout.parse("tp=8,pp=16,dp=128"), batch=2048).page())
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from autopar.cluster import Cluster
from autopar.cost.communication import group_levels
from autopar.cost.layout_memory import timeline
from autopar.cost.pipeline import Priced, price
from autopar.cost.schedule_order import placement
from autopar.cost.software import Software, default_software
from autopar.cost.validation import Band, band
from autopar.errors import UsageError
from autopar.layout import Layout
from autopar.layout_check import check
from autopar.layout_page import layout_lines, runs, wrapped
from autopar.workload import Workload

WIDTH = 100
_MEANINGS = {
    "tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline", "ep": "experts", "etp": "inside an expert",
    "zero": "ZeRO shards",
}  # fmt: skip

_RANKS = {"fullest": "fullest rank", "first": "first stage", "last": "last stage"}

Moments = list[tuple[str, dict[str, float]]]


@dataclass(frozen=True)
class Crossing:
    """The groups of one axis: `size` ranks, `stride` apart; the outermost `link` that they cross, `gbps` per device and
    direction as built, `reached_gbps` in collectives."""

    axis: str
    size: int
    stride: int
    link: str
    gbps: float
    reached_gbps: float


@dataclass(frozen=True)
class Pricing:
    """A layout with its price. `moments`: rank -> what it holds at each moment of a step."""

    workload: Workload
    cluster: Cluster
    layout: Layout
    batch: int
    software: Software
    priced: Priced
    moments: dict[str, Moments]
    measured_s: float | None = None

    @property
    def step_s(self) -> float:
        return self.priced.step_s

    @property
    def tokens_per_s(self) -> float:
        return self.batch * self.workload.seq / self.step_s

    @property
    def peak_flops(self) -> float:
        """Of one device, in the units that MFU is given in: bf16, whatever the precision; fp32 for fp32."""
        return self.cluster.device.peak("fp32" if self.layout.precision == "fp32" else "bf16")

    @property
    def mfu(self) -> float:
        """Matmuls and attention (its causal half) of forward and backward, nothing recomputed, over the peak."""
        flops = self.workload.flops_per_token() * self.batch * self.workload.seq
        return flops / (self.step_s * self.cluster.device_count * self.peak_flops)

    @property
    def limit_bytes(self) -> float:
        return float(self.cluster.device.memory_bytes)

    @property
    def fits(self) -> bool:
        return self.priced.memory_total <= self.limit_bytes

    @property
    def error(self) -> float | None:
        """Predicted over measured, less one."""
        return self.step_s / self.measured_s - 1 if self.measured_s else None

    @property
    def bubble(self) -> float:
        """Share of the step in which a rank waits for others of its pipeline."""
        return self.priced.time_s.get("pipeline bubble", 0.0) / self.step_s

    @property
    def band(self) -> Band | None:
        return band(self.workload, self.cluster.device.name)

    @property
    def stage_layers(self) -> list[int]:
        """Layers on each pipeline rank."""
        where = placement(self.layout.schedule, self.layout.pp, self.layout.vpp)
        layers = self.priced.stages.layers
        return [int(np.sum(np.array(layers)[where == rank])) for rank in range(self.layout.pp)]

    def crossings(self) -> list[Crossing]:
        return crossings(self.layout, self.cluster)

    def page(self) -> str:
        """What a person reads."""
        return "\n".join(line if len(line) <= WIDTH else line[: WIDTH - 3] + "..." for line in _page(self))

    def to_dict(self) -> dict[str, Any]:
        """The page as JSON-friendly data."""
        found = self.band
        return {
            "model": self.workload.name,
            "parameters": self.workload.parameters,
            "cluster": self.cluster.name,
            "devices": self.cluster.device_count,
            "layout": str(self.layout),
            "batch": self.batch,
            "seq": self.workload.seq,
            "software": self.software.name,
            "step_time_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "time_s": dict(self.priced.time_s),
            "fits": self.fits,
            "memory_bytes": dict(self.priced.memory_bytes),
            "memory_total_bytes": self.priced.memory_total,
            "memory_limit_bytes": self.limit_bytes,
            "moments_bytes": {
                rank: [[label, sum(held.values())] for label, held in line]
                for rank, line in self.moments.items()
            },
            "micro_batches": self.priced.micro_batches,
            "chunk_layers": list(self.priced.stages.layers),
            "stage_layers": self.stage_layers,
            "bubble": self.bubble,
            "axes": [asdict(one) for one in self.crossings()],
            "published_error": asdict(found) if found is not None else None,
            "measured_s": self.measured_s,
            "error": self.error,
        }


def price_layout(
    workload: Workload,
    cluster: Cluster,
    layout: Layout,
    batch: int,
    *,
    software: Software | None = None,
    measured_s: float | None = None,
) -> Pricing:
    """Price one layout. Raises UsageError for a layout that cannot run (see layout_check); whether it fits in memory
    is in what comes back."""
    check(layout, workload, cluster, batch)
    stack = software or default_software(cluster.device.name)
    priced = price(workload, layout, cluster, stack, batch)
    moments = {rank: timeline(workload, layout, cluster, stack, batch, rank=rank) for rank in _RANKS}
    return Pricing(workload, cluster, layout, batch, stack, priced, moments, measured_s)


def crossings(layout: Layout, cluster: Cluster) -> list[Crossing]:
    """Per axis of more than one rank its groups and the outermost link that they cross. Ranks are laid out tp, cp, dp,
    pp, innermost first; etp and ep are cut out of the first three."""
    inner = layout.tp * layout.cp
    shard = layout.shard if layout.zero and layout.shard else layout.data_ranks
    axes = [
        ("tp", layout.tp, 1),
        ("cp", layout.cp, layout.tp),
        ("dp", layout.dp, inner),
        ("pp", layout.pp, inner * layout.dp),
        ("etp", layout.etp, 1),
        ("ep", layout.ep, layout.etp),
        ("zero", shard if layout.zero else 1, layout.tp),
    ]
    found = []
    for axis, size, stride in axes:
        reach = 2 if axis == "pp" else size  # a stage talks to the next one only
        if size > 1:
            link = group_levels(cluster.links, reach, stride)[-1].link
            found.append(Crossing(axis, size, stride, link.name, link.gbps, link.bytes_per_s / 1e9))
    return found


def _page(p: Pricing) -> Iterator[str]:
    w, cluster, layout = p.workload, p.cluster, p.priced.layout
    active = f", {w.active_parameters:,} of them at work on a token" if w.experts else ""
    yield f"model     {w.name}, {w.parameters:,} parameters{active}"
    links = ", ".join(f"{link.name} {link.gbps:g} GB/s" for link in cluster.links)
    yield f"cluster   {cluster.name}: {cluster.nodes} x {cluster.devices_per_node} {cluster.device.title}; {links}"
    yield from wrapped("layout", str(layout.with_(cuts=())))
    for title, text in layout_lines(layout, batch=p.batch, seq=w.seq, experts=w.experts):
        yield from wrapped(title, text)
    yield ""
    each = p.tokens_per_s / cluster.device_count
    yield f"step      {seconds(p.step_s)}, {p.tokens_per_s:,.0f} tokens/s, {each:,.0f} per device"
    yield (
        f"MFU       {100 * p.mfu:.1f} % of {p.peak_flops / 1e12:,.0f} TFLOP/s: matmuls and causal attention, forward and"
        " backward,"
    )
    yield "          recomputed ones not counted"
    if p.measured_s is not None and p.error is not None:
        side = "above" if p.error > 0 else "below"
        yield f"measured  {seconds(p.measured_s)}: the prediction is {100 * abs(p.error):.1f} % {side}"
    if p.band is not None:
        yield f"error     {p.band}"
        yield "          of published step times whose source the constants were not fitted to"
    else:
        yield "error     python bench/published.py prints it beside published runs"
    yield ""
    yield "time of the slowest rank"
    rows = [(k, seconds(s), f"{100 * s / p.step_s:.1f} %") for k, s in p.priced.time_s.items() if s > 0]
    yield from table(rows)
    if layout.pp > 1:
        yield ""
        yield (
            f"pipeline  {layout.pp} stages, {runs(p.stage_layers)} layers on their ranks; bubble {100 * p.bubble:.1f} % of"
            " the step"
        )
    yield ""
    yield from _memory(p)
    crossed = p.crossings()
    if crossed:
        yield ""
        yield "traffic"
        yield from table(
            [
                (
                    one.axis, _MEANINGS[one.axis], f"{one.size} ranks {one.stride} apart", one.link,
                    f"{one.gbps:g} GB/s, {one.reached_gbps:.0f} reached in collectives",
                )
                for one in crossed
            ]
        )  # fmt: skip


def _memory(p: Pricing) -> Iterator[str]:
    total, limit = p.priced.memory_total, p.limit_bytes
    verdict = f"fits, {gib(limit - total)} free" if p.fits else f"does not fit: {gib(total - limit)} over"
    yield f"memory    {gib(total)} on the fullest rank at its peak, of {gib(limit)}: {verdict}"
    yield from table([(kind, gib(size)) for kind, size in p.priced.memory_bytes.items() if size > 0])
    ranks = tuple(_RANKS) if p.layout.pp > 1 else ("fullest",)
    labels = [label for label, _ in p.moments["fullest"]]
    lines = [tuple([gib(sum(held.values())) for _, held in p.moments[rank]]) for rank in ranks]
    yield from table(
        [("moment", *labels), *((_RANKS[r], *line) for r, line in zip(ranks, lines, strict=True))]
    )


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows as columns, indented."""
    if not rows:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} us"


def gib(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**27 else f"{value / 2**20:.2f} MiB"


def seconds_of(text: str) -> float:
    """Seconds in `7.1s`, `350ms` or `7.1`. Raises UsageError."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e-?[0-9]+)?)\s*(s|ms|us)?\s*", text)
    try:
        value = float(match[1]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[match[2] or "s"] if match else 0.0
    except ValueError:
        value = 0.0
    if value <= 0:
        raise UsageError(f"{text!r} is no time", where="measured", hint="7.1s or 350ms")
    return value
