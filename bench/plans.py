"""Plans: the layouts that experts published beside those the planner finds, under one cost model.

    python bench/plans.py --rows training.csv [--check] [--only ID ..]

For each published run: the search with the run's model, cluster, batch, sequence, precision and software; what is
predicted of the expert's layout and of the found one, what was measured, how near the best of the space the found one
is proven to be, and the way from one layout to the other, one decision at a time. --check also writes docs/plans.md
and fails where a found layout is predicted to be slower than an expert's that fits.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from pricing import cluster_of
from published_rows import Run, read_runs

from autopar.cluster import Cluster
from autopar.cost.estimate import estimate
from autopar.cost.grid import Grid
from autopar.cost.pipeline import Priced, price
from autopar.cost.software import Software, software_of
from autopar.layout import Layout
from autopar.layout_check import check, runs
from autopar.passes.decisions import parse_decisions
from autopar.passes.layout_search import Found, search_layouts
from autopar.passes.layout_space import Space
from autopar.workload import Workload

PAGE = Path(__file__).parents[1] / "docs" / "plans.md"

# Row of training.csv -> what it doesn't say of its layout, and where that is said.
RUNS: dict[str, tuple[str, str]] = {
    "llama3-001": ("", ""),
    "llama3-002": ("", ""),
    "llama3-003": ("", ""),
    "dsv3-001": (
        "recompute=selective",
        "recompute=selective (norms and MLA up-projections: report, section 3.2.3)",
    ),
    "sc21-007": ("", ""),
    "sc21-009": ("", ""),
    "sc21-010": ("", ""),
    "megascale-016": ("", ""),
    "bloom-127": ("", ""),
    "dgxc-038": ("", ""),
    "titan-009": ("", ""),
    "mbridge-127": ("", ""),
    "dgxc-062": ("", ""),
    "dgxc-096": ("", ""),
    "mcoremoe-010": ("", ""),
    "mbridge-106": ("", ""),
    "mbridge-290": ("", ""),
    "mlperf-068": ("", ""),
    "mbridge-091": ("", ""),
    "mbridge-036": ("", ""),
    "mbridge-103": ("", ""),
    "mbridge-074": ("", ""),
    "mbridge-019": ("", ""),
    "maxtext-009": ("", ""),
}
_DECISIONS: tuple[tuple[str, ...], ...] = (("tp",), ("cp",), ("pp",), ("schedule", "vpp"), ("ep",), ("etp",), ("mbs",), ("zero", "shard"),
              ("recompute", "recompute_layers"), ("sp",), ("offload",))  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One published run: what ran, in the expert's layout, and how long a step took. `assumed`: what its row leaves open."""

    id: str
    model: str
    source: str
    workload: Workload
    cluster: Cluster
    software: Software
    batch: int
    expert: Layout
    measured_s: float
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """One decision changed on the way from the expert's layout to the found one. `moved`: seconds by kind of time."""

    change: str
    before_s: float
    after_s: float
    moved: dict[str, float]
    fits: bool


@dataclass(frozen=True)
class Outcome:
    case: Case
    expert: Priced
    found: Found
    cpu_s: float
    steps: tuple[Step, ...]

    @property
    def expert_fits(self) -> bool:
        return self.expert.memory_total <= self.found.limit_bytes

    @property
    def error(self) -> float:
        return self.expert.step_s / self.case.measured_s - 1

    @property
    def gain(self) -> float:
        """Share of the expert's step that the found layout saves."""
        return 1 - self.found.best.step_s / self.expert.step_s

    @property
    def worse(self) -> bool:
        return self.expert_fits and self.found.best.step_s > self.expert.step_s


def case_of(run: Run, words: str = "", note: str = "") -> Case:
    """A published run, with what its row leaves open."""
    said = dict(word.split("=", 1) for word in words.split(",") if word)
    layout = run.layout.with_(**{name: getattr(Layout.parse(words), name) for name in said})
    open_cells = [entry for entry in run.assumed if entry.split(":")[0] not in said]
    assert run.step_time_s is not None
    return Case(
        run.id, run.model, run.source, run.shape.workload(run.seq), cluster_of(run),
        software_of(run.framework, run.year, run.options), run.batch, layout, run.step_time_s,
        (*filter(None, (note,)), *open_cells),
    )  # fmt: skip


def compare(case: Case) -> Outcome:
    """Search, and walk from the expert's layout to the found one. What is in host memory stays as the expert has it:
    what moving it takes is not priced."""
    check(case.expert, case.workload, case.cluster, case.batch)
    expert = price(case.workload, case.expert, case.cluster, case.software, case.batch)
    words = [f"precision={case.expert.precision}", f"offload={case.expert.offload}"]
    space = Space(
        case.workload, case.cluster, case.batch, parse_decisions(words), precisions=(case.expert.precision,)
    )
    began = time.process_time()
    # runs that were made may fill the whole device, so the search may too
    found = search_layouts(space, case.software, limit_bytes=space.cluster.device.memory_bytes)
    cpu_s = time.process_time() - began
    return Outcome(case, expert, found, cpu_s, tuple(walk(case, found)))


def walk(case: Case, found: Found) -> Iterator[Step]:
    """From the expert's layout to the found one, each time by the decision that gains most of those that can be taken
    alone; by two or more where one alone can't run. dp follows from the others."""
    goal = found.best.layout.with_(cuts=())
    here = case.expert.with_(cuts=())
    left = [names for names in _DECISIONS if any(getattr(here, n) != getattr(goal, n) for n in names)]
    before = price(case.workload, case.expert, case.cluster, case.software, case.batch)
    while left:
        options: list[tuple[float, tuple[tuple[str, ...], ...], Layout]] = []
        for count in range(1, len(left) + 1):
            for chosen in combinations(left, count):
                layout = _changed(here, goal, [name for names in chosen for name in names], case)
                if layout is not None and runs(layout, case.workload, case.cluster, case.batch):
                    options.append((_closed_s(case, layout), chosen, layout))
            if options:
                break
        _, chosen, layout = min(options, key=lambda option: option[0])
        after = price(case.workload, layout, case.cluster, case.software, case.batch)
        moved = {
            kind: after.time_s.get(kind, 0.0) - before.time_s.get(kind, 0.0)
            for kind in dict.fromkeys((*before.time_s, *after.time_s))
        }
        change = ", ".join(changes(here, layout))
        yield Step(change, before.step_s, after.step_s, moved, after.memory_total <= found.limit_bytes)
        here, before = layout, after
        left = [names for names in left if names not in chosen]


def _changed(here: Layout, goal: Layout, names: Sequence[str], case: Case) -> Layout | None:
    layout = here.with_(**{name: getattr(goal, name) for name in names})
    dp, rest = divmod(case.cluster.device_count, layout.tp * layout.cp * layout.pp)
    return None if rest or not dp else layout.with_(dp=dp)


def _closed_s(case: Case, layout: Layout) -> float:
    grid = Grid.of([layout])
    return float(estimate(case.workload, grid, case.cluster, case.software, case.batch).step_s[0])


def changes(one: Layout, other: Layout) -> list[str]:
    """`tp 8 to 4`, for all that differs but cuts."""
    found = []
    for field in fields(Layout):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if mine != theirs and field.name != "cuts":
            found.append(f"{field.name} {_word(mine)} to {_word(theirs)}")
    return found


def _word(value: object) -> str:
    """A value of a Layout; None is the default of recompute_layers."""
    if value is None:
        return "all"
    return str(int(value)) if isinstance(value, bool) else str(value)


# ---- the page ------------------------------------------------------------------------------------------------------

_HEAD = """\
# Plans beside those of experts

Each published run searched anew with the planner: same model, cluster, batch, sequence, precision and software, one
cost model for both layouts. Written by `python bench/plans.py --rows training.csv --check`; runs are
named by their row there.

- expert: the step time predicted of the published layout, and how far that is from the measured one. The constants
  were fitted to published runs, these among them; what they are worth on others says [cost.md](cost.md).
  [1]: by the cost model the published layout takes more memory than the device has, though it ran.
- found: the step time predicted of the layout that the search returns; it fits in memory by the cost model.
- proof: no layout of the space that fits is predicted to be faster than the found one by more than this.
- layouts: how many were priced; CPU: seconds of the search on one core.

Found layouts may use what the run's software did not have: schedules that split the backward (zb-h1, zbv, dualpipev),
the split sequence in 2021. A gain below the error of the cost model is no promise; where the found layout and the
expert's differ in what the model knows least (experts over slow links), the gain is as uncertain as that.
"""


def page(outcomes: Sequence[Outcome]) -> str:
    """docs/plans.md."""
    lines = [_HEAD, "| run | model | devices | measured | expert | found | gain | proof | layouts | CPU |"]
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    lines += [_row(one) for one in outcomes]
    gains = sorted(one.gain for one in outcomes)
    total = sum(one.cpu_s for one in outcomes)
    lines.append(
        f"\nMedian gain {100 * gains[len(gains) // 2]:.0f} %; {total:.0f} CPU seconds for all {len(outcomes)} searches."
    )
    for one in outcomes:
        lines += ["", *_section(one)]
    return "\n".join(lines) + "\n"


def _row(one: Outcome) -> str:
    case = one.case
    expert = f"{_s(one.expert.step_s)} ({100 * one.error:+.0f} %)" + ("" if one.expert_fits else " [1]")
    cells = (
        f"[{case.id}](#{case.id})", case.model, f"{case.cluster.device_count:,} {case.cluster.device.name}",
        _s(case.measured_s), expert, _s(one.found.best.step_s), f"{100 * one.gain:.1f} %",
        f"{100 * max(0.0, one.found.gap):.1f} %", f"{one.found.rows:,}", f"{one.cpu_s:.1f} s",
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _section(one: Outcome) -> Iterator[str]:
    case, best = one.case, one.found.best
    yield f"## {case.id}"
    yield ""
    tokens = case.batch * case.workload.seq
    yield (
        f"{case.model} on {case.cluster.device_count:,} {case.cluster.device.title}; {case.batch:,} sequences of"
        f" {case.workload.seq:,} tokens ({tokens / 1e6:.1f} M per step); {case.expert.precision}; software"
        f" {case.software.name}. Source: {case.source}."
    )
    if case.assumed:
        yield f"\nThe row leaves open, and taken here: {'; '.join(case.assumed)}."
    if not one.expert_fits:
        over = (one.expert.memory_total - one.found.limit_bytes) / 2**30
        yield f"\n[1] By the cost model the published layout is {over:.1f} GiB over the device's memory."
    yield ""
    yield "| | expert | found |"
    yield "|---|---|---|"
    expert = case.expert
    for field in fields(Layout):
        mine, theirs = getattr(expert, field.name), getattr(best.layout, field.name)
        if field.name == "cuts" or mine == theirs == field.default:
            continue
        text = f"**{_word(theirs)}**" if mine != theirs else _word(theirs)
        yield f"| {field.name} | {_word(mine)} | {text} |"
    yield f"| micro-batches | {one.expert.micro_batches} | {best.micro_batches} |"
    yield f"| bubble | {_bubble(one.expert)} | {_bubble(best)} |"
    yield f"| memory | {_gib(one.expert.memory_total)} | {_gib(best.memory_total)} |"
    yield f"| step | {_s(one.expert.step_s)} | {_s(best.step_s)} |"
    yield ""
    if one.steps:
        yield "One decision at a time, the one that gains most first:"
        yield ""
    for step in one.steps:
        gain = step.after_s - step.before_s
        most = sorted(step.moved.items(), key=lambda item: -abs(item[1]))[:2]
        why = ", ".join(f"{kind} {value:+.2f} s" for kind, value in most if abs(value) >= 0.005)
        fits = "" if step.fits else "; does not fit"
        yield f"- {step.change}: {gain:+.2f} s, to {_s(step.after_s)}{f' ({why})' if why else ''}{fits}"


def _bubble(priced: Priced) -> str:
    return f"{100 * priced.time_s.get('pipeline bubble', 0.0) / priced.step_s:.1f} %"


def _s(value: float) -> str:
    return f"{value:.2f} s"


def _gib(value: float) -> str:
    return f"{value / 2**30:.1f} GiB"


def failures(outcomes: Sequence[Outcome]) -> list[str]:
    """Where an expert's layout that fits is predicted to be faster than the found one."""
    return [
        f"{one.case.id}: found {one.found.best.step_s:.3f} s, the expert's layout takes {one.expert.step_s:.3f} s"
        for one in outcomes
        if one.worse
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--rows", type=Path, required=True, help="the published runs (bench/published_rows.py)"
    )
    parser.add_argument("--only", nargs="*", help="rows to compare (default: those of the page)")
    parser.add_argument(
        "--check", action="store_true", help="write docs/plans.md; fail where an expert's is faster"
    )
    options = parser.parse_args(arguments)
    if options.check and options.only:
        parser.error("--check is of all runs")
    known = {run.id: run for run in read_runs(options.rows)[0]}
    outcomes = []
    for name in options.only or RUNS:
        one = compare(case_of(known[name], *RUNS.get(name, ("", ""))))
        outcomes.append(one)
        print(re.sub(r"\[([^]]+)\]\(#[^)]*\)", r"\1", _row(one)), flush=True)
        print(f"    {one.case.expert}\n    {one.found.best.layout.with_(cuts=())}", flush=True)
    if options.check:
        PAGE.write_text(page(outcomes), encoding="utf-8")
        print(f"written: docs/{PAGE.name}")
    failed = failures(outcomes)
    for line in failed:
        print(f"slower than the expert's: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
