"""Report pictures: the timeline, the memory, the bars and the mesh of a plan, as SVG inside a page.

In:  a Step, a Plan, numbers by kind.
Out: Markup; every text in it is escaped (see svg.py). Without scripts; hovering shows <title>s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup

from autopar.cost.communication import group_levels
from autopar.hardware import Cluster
from autopar.mesh import Mesh
from autopar.report_step import Event, RankStep, Step
from autopar.svg import PALETTE, line, picture, rect, tag, text, ticks

WIDTH = 1080.0
_LEFT = 74.0
_RIGHT = 12.0
_MOST_TITLED = 5000  # actions; of more, each rank's are drawn as one path per kind
_MOST_CURVES = 16
_COLOURS = {"F": PALETTE[0], "B": PALETTE[1], "I": "#f4cf76", "W": PALETTE[2]}
_WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward: gradients of inputs",
    "W": "backward: gradients of weights",
}
_AFTER = {"data communication": PALETTE[3], "optimizer": PALETTE[9], "other": PALETTE[7]}
_KIND_COLOURS = {
    "forward": PALETTE[0], "backward": PALETTE[1], "recompute": PALETTE[5], "compute": PALETTE[0],
    "tensor communication": PALETTE[8], "context communication": PALETTE[6], "expert communication": PALETTE[10],
    "pipeline communication": PALETTE[11], "pipeline bubble": "#dfe3e8", "data communication": PALETTE[3],
    "optimizer": PALETTE[9], "other": PALETTE[7],
    "weights": PALETTE[0], "gradients": PALETTE[2], "activations": PALETTE[1], "logits and loss": PALETTE[4],
    "buffers": PALETTE[8], "workspace": PALETTE[10], "reserved": PALETTE[7],
}  # fmt: skip


def seconds_text(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


def gib_text(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**27 else f"{value / 2**20:.3g} MiB"


def colour_of(kind: str, index: int) -> str:
    return _KIND_COLOURS.get(kind, PALETTE[index % len(PALETTE)])


# ---------------------------------------------------------------- timeline


def timeline_svg(step: Step) -> Markup:
    """A row per pipeline rank; chunks of one rank differ in strength; what follows the pipeline is at the end."""
    ranks = len(step.ranks)
    height = max(9.0, min(26.0, 420.0 / ranks))
    end = step.end_s or 1.0
    scale = (WIDTH - _LEFT - _RIGHT) / end
    bottom = 8 + ranks * height
    parts = [*_time_axis(end, 8, bottom)]
    titled = sum(len(rank.actions) for rank in step.ranks) <= _MOST_TITLED
    for index, rank in enumerate(step.ranks):
        top = 8 + index * height
        if ranks <= 32 or index % 4 == 0:
            parts.append(text(_LEFT - 6, top + height * 0.72, f"rank {index}", text_anchor="end", class_="s"))
        parts.append(rect(_LEFT, top, step.span_s * scale, height - 1, class_="idle"))
        parts += _titled(rank, top, height, scale) if titled else _plain(rank, top, height, scale)
    now = step.span_s
    for kind, seconds in step.after:
        title = tag("title", f"{kind}: {seconds_text(seconds)}")
        parts.append(
            rect(_LEFT + now * scale, 8, seconds * scale, ranks * height - 1, title, fill=_AFTER[kind])
        )
        now += seconds
    return picture(WIDTH, bottom + 24, parts, label="timeline of the predicted step, a row per pipeline rank")


def _strength(rank: RankStep, chunk: int) -> float:
    """Opacity of a chunk: the first of a rank is the strongest."""
    order = sorted(rank.chunks)
    return round(1.0 - 0.55 * order.index(chunk) / max(1, len(order) - 1), 2) if len(order) > 1 else 1.0


def _titled(rank: RankStep, top: float, height: float, scale: float) -> list[Markup]:
    parts = []
    for start, end, (kind, chunk, micro_batch, _) in rank.actions:
        if end <= start:
            continue
        words = f"{_WORDS[kind]}, chunk {chunk}, micro-batch {micro_batch}: {seconds_text(end - start)} from {seconds_text(start)}"
        width = (end - start) * scale
        strength = _strength(rank, chunk)
        parts.append(
            rect(_LEFT + start * scale, top, max(0.3, width - 0.4), height - 1, tag("title", words),
                 fill=_COLOURS[kind], opacity=strength if strength < 1 else None)
        )  # fmt: skip
        if width > 14 and height > 12:
            parts.append(
                text(_LEFT + start * scale + width / 2, top + height * 0.68, str(micro_batch), class_="m")
            )
    return parts


def _plain(rank: RankStep, top: float, height: float, scale: float) -> list[Markup]:
    groups: dict[tuple[str, int], list[Event]] = {}
    for event in rank.actions:
        groups.setdefault((event[2].kind, event[2].chunk), []).append(event)
    parts = []
    for (kind, chunk), events in sorted(groups.items()):
        path = "".join(
            f"M{_LEFT + start * scale:.1f} {top:.1f}h{max(0.3, (end - start) * scale - 0.3):.1f}v{height - 1:.1f}"
            f"H{_LEFT + start * scale:.1f}"
            for start, end, _ in events
            if end > start
        )
        title = tag("title", f"{_WORDS[kind]}, chunk {chunk}")
        parts.append(tag("path", title, d=path, fill=_COLOURS[kind], opacity=_strength(rank, chunk)))
    return parts


def _time_axis(end: float, top: float, bottom: float) -> list[Markup]:
    scale = (WIDTH - _LEFT - _RIGHT) / end
    parts = []
    for value in ticks(0.0, end, 10):
        x = _LEFT + value * scale
        parts.append(line(x, top, x, bottom + 3, class_="g"))
        parts.append(
            text(x, bottom + 16, seconds_text(value) if value else "0", text_anchor="middle", class_="s")
        )
    return parts


def timeline_key(step: Step) -> list[tuple[str, str]]:
    """(colour, word) of what the timeline shows."""
    kinds = {event[2].kind for rank in step.ranks for event in rank.actions}
    return [(_COLOURS[kind], _WORDS[kind]) for kind in "FBIW" if kind in kinds] + [
        (_AFTER[kind], kind) for kind, _ in step.after
    ]


# ---------------------------------------------------------------- memory


def memory_svg(step: Step, limit_bytes: float) -> Markup:
    """Bytes over time, a small curve per pipeline rank (of many ranks some, the fullest among them)."""
    shown = memory_ranks(step)
    high = max(limit_bytes, max(rank.peak_bytes for rank in step.ranks)) * 1.02
    height = max(34.0, min(110.0, 640.0 / len(shown)))
    scale = (WIDTH - _LEFT - _RIGHT) / (step.span_s or 1.0)
    bottom = 8 + len(shown) * (height + 6)
    parts = _time_axis(step.span_s or 1.0, 8, bottom)
    for row, index in enumerate(shown):
        top = 8 + row * (height + 6)
        rank = step.ranks[index]

        def y(size: float, top: float = top) -> float:
            return top + height * (1 - size / high)

        parts.append(rect(_LEFT, top, WIDTH - _LEFT - _RIGHT, height, class_="frame"))
        parts.append(text(_LEFT - 6, top + 14, f"rank {index}", text_anchor="end"))
        parts.append(text(_LEFT - 6, top + 28, gib_text(rank.peak_bytes), text_anchor="end", class_="s"))
        stored = y(rank.stored_bytes)
        title = tag("title", f"stored all the time: {gib_text(rank.stored_bytes)}")
        parts.append(
            rect(
                _LEFT,
                stored,
                WIDTH - _LEFT - _RIGHT,
                top + height - stored,
                title,
                fill=PALETTE[0],
                opacity=0.35,
            )
        )
        path = _steps(rank.held, scale, y, stored)
        parts.append(
            tag(
                "path",
                tag("title", f"rank {index}, peak {gib_text(rank.peak_bytes)}"),
                d=path,
                fill=PALETTE[1],
                opacity=0.75,
            )
        )
        parts.append(line(_LEFT, y(limit_bytes), WIDTH - _RIGHT, y(limit_bytes), class_="limit"))
    return picture(
        WIDTH, bottom + 24, parts, label="memory over the predicted step, a curve per pipeline rank"
    )


def memory_ranks(step: Step) -> list[int]:
    """The ranks with a curve: all of them, or evenly spread ones with the first, the last and the fullest."""
    count = len(step.ranks)
    if count <= _MOST_CURVES:
        return list(range(count))
    chosen = {round(index * (count - 1) / (_MOST_CURVES - 2)) for index in range(_MOST_CURVES - 1)}
    return sorted(chosen | {step.fullest})


def _steps(
    held: Sequence[tuple[float, float]], scale: float, y: Callable[[float], float], floor: float
) -> str:
    """A closed outline; of changes within half a unit of the picture the highest is kept."""
    columns: list[list[float]] = []  # x, highest there, last there
    for time, size in held:
        x = round(_LEFT + time * scale, 1)
        if columns and x - columns[-1][0] < 0.5:
            columns[-1][1] = max(columns[-1][1], size)
            columns[-1][2] = size
        else:
            columns.append([x, size, size])
    path = [f"M{columns[0][0]:.1f} {floor:.1f}"]
    for x, high, last in columns:
        path.append(f"H{x:.1f}V{y(high):.1f}")
        if last != high:
            path.append(f"h.4V{y(last):.1f}")
    path.append(f"V{floor:.1f}Z")
    return "".join(path)


# ---------------------------------------------------------------- bars


def bar_svg(
    parts_of: Mapping[str, float],
    whole: float,
    label: str,
    told: Callable[[float], str],
    marks: Mapping[str, float] | None = None,
) -> Markup:
    """One stacked bar. `whole`: what the full width stands for; `marks`: places to mark, by name."""
    whole = max(whole, sum(parts_of.values()), 1e-12)
    x, parts = 0.0, [rect(0, 14, WIDTH, 30, class_="idle")]
    for index, (kind, size) in enumerate(parts_of.items()):
        width = size / whole * WIDTH
        if size > 0:
            words = f"{kind}: {told(size)}"
            parts.append(rect(x, 14, width, 30, tag("title", words), fill=colour_of(kind, index)))
            if width > 7.0 * len(kind) + 8:
                parts.append(text(x + width / 2, 33, kind, class_="m"))
        x += width
    for name, place in (marks or {}).items():
        at = place / whole * WIDTH
        parts.append(line(at, 8, at, 50, class_="limit"))
        parts.append(text(min(at, WIDTH - 4), 9, name, text_anchor="end", class_="s"))
    return picture(WIDTH, 54, parts, label=label)


# ---------------------------------------------------------------- mesh


def axis_rows(
    mesh: Mesh, cluster: Cluster, extra: Mapping[str, tuple[int, int]]
) -> list[tuple[str, int, int, str]]:
    """(axis, size, ranks between neighbours, where it lies) innermost first. `extra`: axes cut out of others, as
    name -> (size, stride)."""
    rows, stride = [], 1
    for name, size in reversed(list(mesh.sizes.items())):
        rows.append((name, size, stride))
        stride *= size
    rows += [(name, size, step) for name, (size, step) in extra.items()]
    return [(name, size, step, _where(cluster, size, step)) for name, size, step in rows if size > 1]


def _where(cluster: Cluster, size: int, stride: int) -> str:
    levels = group_levels(cluster.links, size, stride)
    words = [f"{level.fan} over {level.link.name} ({level.link.gbps:g} GB/s)" for level in levels]
    if len(levels) == 1:
        inside = levels[0].link.size
        return f"{levels[0].link.name} ({levels[0].link.gbps:g} GB/s)" + (
            f", inside its {inside}" if inside else ""
        )
    return ", each of them ".join(reversed(words)) if words else "one rank"


def mesh_svg(mesh: Mesh, cluster: Cluster, most_nodes: int = 12) -> Markup:
    """The first nodes with their devices; a device shows its coordinates, its colour the outermost axis that is split."""
    named = [(name, size) for name, size in mesh.sizes.items() if size > 1]
    nodes: list[tuple[str, int]] = []
    for pool in cluster.pools:
        nodes += [(pool.device.name, pool.devices_per_node)] * min(pool.nodes, most_nodes + 1)
    shown = nodes[:most_nodes]
    widest = max(count for _, count in shown)
    columns = min(widest, 8)
    cell_w, cell_h = (WIDTH - 84) / columns, 34.0
    parts: list[Markup] = []
    top, rank = 20.0, 0
    inner = cluster.links[0]
    for index, (device, count) in enumerate(shown):
        lines = -(-count // columns)
        box = lines * (cell_h + 4) + 8
        parts.append(text(66, top + 16, f"node {index}", text_anchor="end", class_="s"))
        parts.append(rect(74, top, WIDTH - 76, box, class_="node", rx=5))
        for place in range(count):
            row, column = divmod(place, columns)
            x, y = 78 + column * cell_w, top + 4 + row * (cell_h + 4)
            parts += _device(rank + place, device, named, mesh, (x, y, cell_w - 4, cell_h))
        rank += count
        top += box + 8
    title = f"{inner.name}: {inner.gbps:g} GB/s inside " + (f"each {inner.size}" if inner.size else "all")
    outer = ", ".join(f"{link.name}: {link.gbps:g} GB/s" for link in cluster.links[1:])
    parts.append(text(74, 12, f"{title}; {outer}" if outer else title, class_="s"))
    return picture(WIDTH, top + 4, parts, label="the first nodes of the cluster and the ranks on them")


def _device(
    rank: int, device: str, named: list[tuple[str, int]], mesh: Mesh, box: tuple[float, float, float, float]
) -> list[Markup]:
    x, y, width, height = box
    at, rest = {}, rank
    for name, size in reversed(list(mesh.sizes.items())):
        rest, at[name] = divmod(rest, size)
    words = " ".join(f"{name}{at[name]}" for name, _ in named) or "whole"
    colour = PALETTE[at[named[0][0]] % len(PALETTE)] if named else PALETTE[0]
    title = tag("title", f"rank {rank} on {device}: {words}")
    return [
        rect(x, y, width, height, title, fill=colour, opacity=0.35, rx=3),
        text(x + width / 2, y + 14, f"{rank}", text_anchor="middle", class_="s"),
        text(x + width / 2, y + 27, words, text_anchor="middle"),
    ]


# ---------------------------------------------------------------- alternatives


def scatter_svg(
    chosen: tuple[float, float], others: Sequence[tuple[float, float, bool, str]], limit: float
) -> Markup:
    """Seconds along, bytes up: what was chosen, and (seconds, bytes, fits, text) of the others."""
    height = 300.0
    times = [chosen[0], *(other[0] for other in others)]
    sizes = [limit, chosen[1], *(other[1] for other in others)]
    low, high = min(times) * 0.97, max(times) * 1.03
    most = max(sizes) * 1.05

    def x(value: float) -> float:
        return _LEFT + (value - low) / (high - low or 1.0) * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return 10 + (height - 10) * (1 - value / most)

    parts = []
    for value in ticks(low, high, 8):
        parts.append(line(x(value), 10, x(value), height, class_="g"))
        parts.append(text(x(value), height + 16, seconds_text(value), text_anchor="middle", class_="s"))
    for value in ticks(0, most / 2**30, 5):
        parts.append(line(_LEFT, y(value * 2**30), WIDTH - _RIGHT, y(value * 2**30), class_="g"))
        parts.append(text(_LEFT - 6, y(value * 2**30) + 4, f"{value:g} GiB", text_anchor="end", class_="s"))
    parts.append(line(_LEFT, y(limit), WIDTH - _RIGHT, y(limit), class_="limit"))
    for seconds, size, fits, words in others:
        title = tag("title", words)
        colour = PALETTE[0] if fits else PALETTE[4]
        parts.append(tag("circle", title, cx=x(seconds), cy=y(size), r=4.5, fill=colour, opacity=0.75))
    parts.append(
        tag("circle", tag("title", "this plan"), cx=x(chosen[0]), cy=y(chosen[1]), r=7, class_="chosen")
    )
    return picture(WIDTH, height + 24, parts, label="this plan and its alternatives, seconds and memory")
