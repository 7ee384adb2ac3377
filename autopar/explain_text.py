"""The pages of `autopar explain`. In: the data of `explain.py`. Out: lines, at most 100 columns wide."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

WIDTH = 100
Data = Mapping[str, Any]


def text(data: Data) -> str:
    """All that the data holds, section by section."""
    lines: list[str] = []
    for name, page in _PAGES.items():
        for part in _parts(data.get(name)):
            lines += ["", *page(part)] if lines else list(page(part))
    return "\n".join(line.rstrip() for line in lines)


def as_json(data: Data) -> str:
    """The data as JSON, which has no infinities: a regret without end is null."""
    return json.dumps(_finite(data), indent=1)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parts(part: Any) -> Sequence[Any]:
    return part if isinstance(part, list) else [part] if part is not None else []


def _why(data: Data) -> Iterator[str]:
    chosen, best = data["chosen"], data["best"]
    yield f"{data['model']} on {data['cluster']}, {data['batch']} sequences of {data['seq']}"
    yield from _wrapped(f"chosen    {chosen['layout']}", 10)
    yield f"step      {seconds(chosen['step_s'])}, {chosen['tokens_per_s']:,.0f} tokens/s"
    share = chosen["memory_total"] / data["limit_bytes"]
    yield f"memory    {gib(chosen['memory_total'])} of {gib(data['limit_bytes'])} ({100 * share:.0f} %)"
    if abs(data["planned_s"] / chosen["step_s"] - 1) > 1e-6:
        yield f"note      planned as {seconds(data['planned_s'])}, with other constants than this version's"
    if best["step_s"] < chosen["step_s"] * 0.995:
        faster = 100 * (chosen["step_s"] / best["step_s"] - 1)
        yield from _wrapped(f"note      a search now finds {best['layout']}, {faster:.1f} % faster", 10)
    if data["constraints"]:
        yield from _wrapped(f"asked     {', '.join(data['constraints'])}", 10)
    yield ""
    yield "why each choice: its value, then the best plan with another one"
    for decision in data["decisions"]:
        yield from _decision(decision, data)
    for axis in data["axes"]:
        near = f"{axis['stride']} ranks apart" if axis["stride"] > 1 else "neighbours"
        links = " and ".join(axis["links"])
        yield f"  {'placement':<10}{axis['axis']}: {axis['size']} ranks, {near}, over {links}"


def _decision(decision: Data, data: Data) -> Iterator[str]:
    value = str(decision["value"])
    head = f"  {decision['name']:<10}"
    if len(value) > 14:
        yield from _wrapped(head + value, 12)
        head, value = " " * 12, ""
    head += f"{value:<15}"
    other, lost = decision["alternative"], decision["too_large"]
    if other is None:
        yield from _wrapped(head + decision["why"], 27)
        return
    yield from _wrapped(f"{head}{decision['name']}={other['value']}: {_slower(other)}; {_details(other)}", 27)
    yield from _wrapped(
        " " * 27 + _other_choices(other["layout"], data["chosen"]["layout"], decision["name"]), 27
    )
    if lost is not None:
        over = gib(lost["over_bytes"])
        yield from _wrapped(
            f"{'':27}{decision['name']}={lost['value']} would take {seconds(lost['step_s'])} but does not fit,"
            f" by {over}: {_other_choices(lost['layout'], data['chosen']['layout'], decision['name'])}",
            27,
        )
    if decision["why"]:
        yield from _wrapped(" " * 27 + decision["why"], 27)


def _slower(other: Data) -> str:
    slower = 100 * other["slower"]
    said = f"{slower:.1f} % slower" if slower >= 0.5 else f"as fast ({slower:+.2f} %)"
    if slower < -0.5:
        said = f"{-slower:.1f} % faster"
    return f"{seconds(other['step_s'])}, {said}"


def _details(other: Data) -> str:
    """The kinds of time and the memory that differ most."""
    times = sorted(other["time_difference_s"].items(), key=lambda item: -abs(item[1]))
    words = [f"{kind} {_signed(value)}" for kind, value in times[:3] if abs(value) > 0.002 * other["step_s"]]
    memory = sum(other["memory_difference_bytes"].values())
    if abs(memory) > 2**27:
        kind, most = max(other["memory_difference_bytes"].items(), key=lambda item: abs(item[1]))
        words.append(f"memory {memory / 2**30:+.1f} GiB ({kind} {most / 2**30:+.1f})")
    return ", ".join(words) or "no kind of time or memory differs by much"


def _other_choices(layout: str, chosen: str, name: str) -> str:
    """What else that plan has otherwise."""
    own = dict(word.partition("=")[::2] for word in chosen.split(","))
    words = [
        word
        for word in layout.split(",")
        if own.get(word.partition("=")[0]) != word.partition("=")[2]
        and word.partition("=")[0] not in ("cuts", name)
    ]
    return f"with {', '.join(words)}" if words else "with all else as chosen"


def _why_not(data: Data) -> Iterator[str]:
    yield from _wrapped(f"why not {data['words']}", 8)
    if not data["possible"]:
        yield from _wrapped(f"  it cannot be: {data['why']}", 4)
        if data["hint"]:
            yield from _wrapped(f"  try {data['hint']}", 4)
        return
    yield from _wrapped(f"  {data['why']}", 2)
    yield from _wrapped(f"  best with it: {data['layout']}", 16)
    if data["over_bytes"]:
        yield f"  it does not fit, by {gib(data['over_bytes'])}"
    if data.get("too_large"):
        lost = data["too_large"]
        yield from _wrapped(
            f"  {lost['layout']} would take {seconds(lost['step_s'])} but does not fit, by {gib(lost['over_bytes'])}",
            4,
        )
    yield from _side_by_side(data, "chosen", "with it")


def _what_if(data: Data) -> Iterator[str]:
    yield from _wrapped(f"what if {data['words']}", 8)
    if not data["possible"]:
        yield from _wrapped(f"  no plan: {data['why']}", 4)
        if data["hint"]:
            yield from _wrapped(f"  try {data['hint']}", 4)
        return
    ratio = data["tokens_per_s_ratio"]
    yield f"  {data['tokens_per_s']:,.0f} tokens/s, {ratio:.3g} times the plan's; step {seconds(data['step_s'])}"
    changes = "the same layout stays best" if data["same_layout"] else "changes " + ", ".join(data["changed"])
    yield from _wrapped(f"  {changes}", 4)
    yield from _wrapped(f"  best: {data['layout']}", 8)
    if not data["same_layout"]:
        if "kept" in data:
            lost = 100 * (data["kept"]["step_s"] / data["step_s"] - 1)
            if lost > 0.05:
                yield f"  the plan's layout would take {seconds(data['kept']['step_s'])} there, {lost:.1f} % more"
        else:
            yield from _wrapped(f"  the plan's layout does not run there: {data['kept_why_not']}", 4)
    yield from _side_by_side(data, "plan", "what if")


def _side_by_side(other: Data, left: str, right: str) -> Iterator[str]:
    yield f"  {'':24}{left:>12}{right:>12}{'difference':>14}"
    before = other["step_s"] - sum(other["time_difference_s"].values())
    yield f"  {'step':<24}{seconds(before):>12}{seconds(other['step_s']):>12}{_signed(other['step_s'] - before):>14}"
    for kind, difference in other["time_difference_s"].items():
        value = other["time_s"][kind]
        if max(value, value - difference) > 0:
            yield f"    {kind:<22}{seconds(value - difference):>12}{seconds(value):>12}{_signed(difference):>14}"
    total = other["memory_total"]
    before = total - sum(other["memory_difference_bytes"].values())
    yield f"  {'memory':<24}{gib(before):>12}{gib(total):>12}{(total - before) / 2**30:>+10.2f} GiB"
    for kind, difference in other["memory_difference_bytes"].items():
        value = other["memory_bytes"][kind]
        if max(value, value - difference) > 0:
            yield f"    {kind:<22}{gib(value - difference):>12}{gib(value):>12}{difference / 2**30:>+10.2f} GiB"


def _uncertain(data: Data) -> Iterator[str]:
    yield f"if the constants are off ({data['layouts']} nearest layouts priced again; regret: of keeping the choice)"
    yield f"  {'constant':<36}{'interval':>14}{'elasticity':>12}{'step':>20}{'choice':>14}"
    for one in data["constants"]:
        interval = f"x {one['low']:.2f}..{one['high']:.2f}"
        step = f"{seconds(one['low_s'])}..{seconds(one['high_s'])}"
        choice = "stays" if one["stays_best"] else f"{_percent(one['regret'])} lost"
        yield f"  {one['constant']:<36}{interval:>14}{one['elasticity']:>+12.3f}{step:>20}{choice:>14}"
    sources: dict[str, list[str]] = {}
    for one in data["constants"]:
        sources.setdefault(one["source"], []).append(one["constant"])
    for source, names in sources.items():
        yield from _wrapped(f"  interval {source} ({', '.join(names)})", 4)
    most = data["measure"]
    if most is None:
        return
    if most["stays_best"]:
        yield from _wrapped(
            f"  No constant alone makes the choice wrong. Nearest to it is {most['constant']}, at which the next kind"
            f" of layout is within {_percent(max(0.0, most['margin']))}: to be surer, measure {most['measure']}.",
            2,
        )
    else:
        yield from _wrapped(
            f"  Measure {most['measure']}: if {most['constant']} is {most['flips_at']:.2f} times what is assumed"
            f" ({most['value']:.3g} {most['unit']}".rstrip()
            + f"), {most['flips_to']} is better; keeping the choice then costs up to {_percent(most['regret'])}.",
            2,
        )


def _robust(data: Data) -> Iterator[str]:
    yield f"robust: the least largest regret over all intervals, among {data['layouts']} layouts"
    if data["worst_regret"] == float("inf"):
        yield "  none of them fits under all the constants"
        return
    if data["is_choice"]:
        yield from _wrapped(
            f"  the choice itself: at most {_percent(data['worst_regret'])} slower than the best"
            f" (in: {data['worst_in']})",
            4,
        )
        return
    yield from _wrapped(f"  {data['layout']}", 4)
    slower = 100 * (data["step_s"] / data["chosen_s"] - 1)
    yield f"  {seconds(data['step_s'])} with the constants as they are, {slower:.1f} % more than the choice"
    yield f"  at most {_percent(data['worst_regret'])} slower than the best (in: {data['worst_in']})"
    yield f"  the choice: at most {_percent(data['chosen_worst_regret'])} (in: {data['chosen_worst_in']})"


def _formula(data: Data) -> Iterator[str]:
    for line in data["lines"]:
        yield from _wrapped(line, 6)


_PAGES = {
    "why": _why,
    "why_not": _why_not,
    "what_if": _what_if,
    "sensitivity": _uncertain,
    "robust": _robust,
    "formula": _formula,
}


def _wrapped(line: str, indent: int) -> list[str]:
    """The line in pieces of at most WIDTH columns; layouts and cuts break after their commas and slashes."""
    lines, current = [], re.match(" *", line)[0]  # type: ignore[index]
    for piece in re.findall(r"[^ ,/]*(?:[,/] *| +|$)", line.strip()):
        if len((current + piece).rstrip()) > WIDTH and current.strip():
            lines.append(current.rstrip())
            current = " " * indent
        current += piece
    return [*lines, current.rstrip()]


def seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.3f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 or value == 0 else f"{value * 1e6:.1f} us"


def gib(value: float) -> str:
    return f"{value / 2**30:.2f} GiB"


def _signed(value: float) -> str:
    sign = "-" if value < 0 else "+"
    return sign + seconds(abs(value))


def _percent(share: float) -> str:
    return "does not fit" if share == float("inf") else f"{100 * share:.1f} %"
