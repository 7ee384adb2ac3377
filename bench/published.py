"""Published: what the simulator says of published training runs, beside what was measured.

    python bench/published.py --rows training.csv [--json OUT] [--list] [--cross-validate]

Prices every row at its own layout with the constants that ship with autopar, and prints by source, hardware and kind
of model the error of step time and of peak memory; and for rows that differ only in layout, whether the order is
right. Rows that can't be priced are listed with the reason. The constants were fitted to rows of published runs: what
they are worth on sources they haven't seen is below the table, as bench/calibrate.py stored it when it fitted them
(autopar/cost/validation.toml); --cross-validate finds it anew for this file, which takes minutes.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from metrics import Errors, kendall_tau, regret
from pricing import batches
from published_rows import Run, read_runs

from autopar.errors import AutoparError

# Why the headline of a file like memory.csv has no step time.
_HOST_BOUND = "rows of memory tests time tiny models in deterministic mode, where the host decides: trust their memory, not their time"
BY: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("kind", lambda run: run.kind),
    ("hardware", lambda run: run.device),
    ("source", lambda run: run.source),
)


@dataclass(frozen=True)
class Priced:
    """A run with what the simulator says of it."""

    run: Run
    step_s: float
    memory_bytes: float
    kinds: dict[str, float]
    parts: dict[str, float]

    @property
    def error(self) -> float | None:
        return self.step_s / self.run.step_time_s - 1.0 if self.run.step_time_s else None

    @property
    def memory_error(self) -> float | None:
        measured = self.run.memory_bytes
        return self.memory_bytes / measured - 1.0 if measured and not self.run.out_of_memory else None


def price(runs: Sequence[Run]) -> tuple[list[Priced], list[tuple[str, str]]]:
    """Every run with the shipped constants, in order; and (id, reason) of those without a price or a measurement."""
    grouped, refused = batches(runs)
    found: dict[int, Priced] = {}
    for batch in grouped:
        try:
            out = batch.price()
        except (AutoparError, ArithmeticError, ValueError) as error:
            refused += [(run.id, f"no price: {error}") for run in batch.runs]
            continue
        step = out.step_s
        ways = {_counting(run) for run in batch.runs}
        memory = {way: batch.memory(*way) for way in ways}
        for n, (place, run) in enumerate(zip(batch.places, batch.runs, strict=True)):
            if run.step_time_s is None and run.memory_bytes is None:
                refused.append((run.id, "neither step time nor memory was measured"))
                continue
            if not 0 < float(step[n]) < float("inf"):
                refused.append((run.id, f"no price: a step of {step[n]} s"))
                continue
            parts = {part: float(value[n]) for part, value in memory[_counting(run)].items()}
            times = {kind: float(value[n]) for kind, value in out.time_s.items()}
            found[place] = Priced(run, float(step[n]), sum(parts.values()), times, parts)
    return [found[place] for place in sorted(found)], refused


def _counting(run: Run) -> tuple[str, str]:
    """(rank, kind) of a row's memory, as `layout_memory` calls them: the fullest rank and all that the device holds
    where the row says nothing."""
    rank = run.memory_rank if run.memory_rank in ("first", "last") else "fullest"
    return rank, run.memory_kind or "device"


def step_errors(priced: Iterable[Priced]) -> Errors | None:
    rows = [one for one in priced if one.run.step_time_s]
    return Errors.of([one.step_s for one in rows], [one.run.step_time_s or 0.0 for one in rows])


def memory_errors(priced: Iterable[Priced]) -> Errors | None:
    rows = [one for one in priced if one.memory_error is not None]
    return Errors.of([one.memory_bytes for one in rows], [one.run.memory_bytes or 0.0 for one in rows])


def orderings(priced: Iterable[Priced]) -> list[dict[str, Any]]:
    """One entry for each group of runs that differ in nothing but the layout: tau, regret. What was measured several
    times counts once, at its median."""
    groups: dict[str, dict[Any, list[Priced]]] = defaultdict(lambda: defaultdict(list))
    for one in priced:
        if one.run.group and one.run.step_time_s:
            groups[f"{one.run.group}|{replace(one.run.shape, name='')}"][one.run.layout].append(one)
    out = []
    for name, layouts in groups.items():
        if len(layouts) < 2:
            continue
        predicted = [same[0].step_s for same in layouts.values()]
        measured = [
            statistics.median(one.run.step_time_s or 0.0 for one in same) for same in layouts.values()
        ]
        tau = kendall_tau(predicted, measured)
        if tau is not None:
            out.append(
                {
                    "group": name.split("|Transformer")[0],
                    "layouts": len(layouts),
                    "tau": tau,
                    "regret": regret(predicted, measured),
                }
            )
    return out


def conflicts(priced: Iterable[Priced]) -> list[tuple[str, str]]:
    """Rows whose own figures contradict each other (counted all the same)."""
    return [
        (one.run.id, entry)
        for one in priced
        for entry in one.run.assumed
        if entry.startswith("step time") and "printed rate" in entry
    ]


def report(
    runs: Sequence[Run], refused: Sequence[tuple[str, str]], total: int, *, memory_file: bool = False
) -> dict[str, Any]:
    """Everything that is printed, as plain data. `memory_file`: the rows are there for their memory; the headline
    leaves their step times out, which stand under "step_time_of_tests" instead."""
    priced, more = price(runs)
    groups = [] if memory_file else orderings(priced)
    times, memory = step_errors(priced), memory_errors(priced)
    step = None if memory_file else times
    tables: dict[str, dict[str, Any]] = {}
    for name, key in BY:
        parts: dict[str, list[Priced]] = defaultdict(list)
        for one in priced:
            parts[key(one.run)].append(one)
        tables[name] = {part: _both(rows) for part, rows in sorted(parts.items(), key=lambda kv: -len(kv[1]))}
    crossed: dict[str, list[Priced]] = defaultdict(list)
    for one in priced:
        crossed[f"{one.run.kind}, {one.run.device}"].append(one)
    tables["kind and hardware"] = {
        part: _both(rows) for part, rows in sorted(crossed.items(), key=lambda kv: -len(kv[1]))
    }
    return {
        "headline": {
            "step_time_median_abs_error": step.median if step else None,
            "step_time_p90_abs_error": step.p90 if step else None,
            "memory_median_abs_error": memory.median if memory else None,
            "rows_priced": len(priced),
            "rows_total": total,
            "kendall_tau": statistics.fmean(g["tau"] for g in groups) if groups else None,
            "regret": statistics.fmean(g["regret"] for g in groups) if groups else None,
        },
        "step_time_left_out": _HOST_BOUND if memory_file and times else None,
        "step_time_of_tests": asdict(times) if memory_file and times else None,
        "all": _both(priced),
        "tables": tables,
        "orderings": groups,
        "not_priced": [{"id": name, "reason": why} for name, why in [*refused, *more]],
        "conflicts": [{"id": name, "what": what} for name, what in conflicts(priced)],
        "rows": [_row(one) for one in priced],
    }


def _both(rows: Sequence[Priced]) -> dict[str, Any]:
    step, memory = step_errors(rows), memory_errors(rows)
    return {"step_time": asdict(step) if step else None, "memory": asdict(memory) if memory else None}


def _row(one: Priced) -> dict[str, Any]:
    run = one.run
    return {
        "id": run.id,
        "source": run.source,
        "model": run.model,
        "kind": run.kind,
        "device": run.device,
        "gpus": run.gpus,
        "layout": str(run.layout),
        "step_time_s": run.step_time_s,
        "predicted_step_time_s": one.step_s,
        "step_time_error": one.error,
        "memory_bytes": run.memory_bytes,
        "predicted_memory_bytes": one.memory_bytes,
        "memory_error": one.memory_error,
        "time_s": one.kinds,
        "memory_parts_bytes": one.parts,
        "assumed": list(run.assumed),
    }


def validation() -> dict[str, Any] | None:
    """What the constants said of sources they were not fitted to, as stored when they were fitted."""
    path = files("autopar.cost").joinpath("validation.toml")
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def show(data: dict[str, Any], stored: dict[str, Any] | None, list_rows: bool = False) -> None:
    """Print a report."""
    head = data["headline"]
    print(f"rows: {head['rows_priced']} priced of {head['rows_total']}")
    _headline(data, stored)
    print("error of this file's rows with the shipped constants (in-sample if they were fitted to it):")
    _heading()
    _line("all", data["all"])
    for name, parts in data["tables"].items():
        print(f"\nby {name}")
        _heading()
        for part, errors in parts.items():
            _line(part, errors)
    groups = data["orderings"]
    if groups:
        print(
            f"\norder of layouts: {len(groups)} groups of {sum(g['layouts'] for g in groups)} rows that differ only in"
            f" layout: Kendall's tau {head['kendall_tau']:.2f}, regret of the predicted best {head['regret']:.1%}"
        )
        for g in sorted(groups, key=lambda g: -g["layouts"])[:12]:
            print(
                f"  {g['layouts']:3d} layouts  tau {g['tau']:5.2f}  regret {g['regret']:6.1%}  {g['group'][:90]}"
            )
    if stored:
        _show_stored(stored)
    if data["conflicts"]:
        print(f"\n{len(data['conflicts'])} rows contradict themselves (counted):")
        for one in data["conflicts"]:
            print(f"  {one['id']}: {one['what']}")
    if data["not_priced"]:
        print(f"\n{len(data['not_priced'])} rows not priced:")
        for why, names in _by_reason(data["not_priced"]):
            print(f"  {why}: {', '.join(names)}")
    if list_rows:
        _list(data["rows"])


def _headline(data: dict[str, Any], stored: dict[str, Any] | None) -> None:
    head = data["headline"]
    for what, name in (("step_time", "step time"), ("memory", "peak memory")):
        median, p90 = head[f"{what}_median_abs_error"], head.get(f"{what}_p90_abs_error")
        if median is not None:
            tail = f", 90th percentile {p90:.1%}" if p90 is not None else ""
            print(
                f"{name} of this file's rows (in-sample if the constants were fitted to it): median error {median:.1%}{tail}"
            )
    if data["step_time_left_out"]:
        e = data["step_time_of_tests"]
        print(f"no step time in the headline: {data['step_time_left_out']}")
        print(
            f"step time of those tests: {e['rows']} rows, median error {e['median']:.1%}, 90th percentile {e['p90']:.1%}"
        )
    elif stored and head["step_time_median_abs_error"] is not None:
        e = stored["errors"]["all"]
        print(
            f"step time of sources the constants were not fitted to (leave one source out, {stored['rows']} rows of"
            f" {stored['sources']} sources, {stored['date']}): median error {e['median']:.1%}, 90th percentile {e['p90']:.1%}"
        )
    if head["kendall_tau"] is not None:
        print(f"order of layouts: Kendall's tau {head['kendall_tau']:.2f}, regret {head['regret']:.1%}")


def _show_stored(stored: dict[str, Any]) -> None:
    print(
        f"\nleave one source out ({stored['rows']} rows of {stored['sources']} sources, fitted {stored['date']}):"
        " each source's step times predicted by constants fitted to the others"
    )
    _heading()
    for part, errors in stored["errors"].items():
        _line(part, {"step_time": errors, "memory": None})
    _line("the same rows, in-sample", {"step_time": stored["in_sample"], "memory": None})


def _by_reason(rows: Sequence[dict[str, str]]) -> list[tuple[str, list[str]]]:
    reasons: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        reasons[row["reason"]].append(row["id"])
    return sorted(reasons.items(), key=lambda kv: -len(kv[1]))


def _heading() -> None:
    columns = "rows  median     p90    bias  <=10%"
    print(f"  {'':44}  {'step time':>34}  {'peak memory':>34}\n  {'':44}  {columns}  {columns}")


def _line(name: str, errors: dict[str, Any]) -> None:
    text = "  ".join(_errors(errors[what]) for what in ("step_time", "memory"))
    print(f"  {name[:44]:44}  {text}")


def _errors(e: dict[str, Any] | None) -> str:
    if e is None:
        return f"{0:4d} {'-':>7} {'-':>7} {'-':>7} {'-':>6}"
    return f"{e['rows']:4d} {e['median']:7.1%} {e['p90']:7.1%} {e['bias']:+7.1%} {e['within_tenth']:6.0%}"


def _list(rows: Sequence[dict[str, Any]]) -> None:
    print("\nrows by error of step time, then memory")
    for row in sorted(rows, key=lambda row: -abs(row["step_time_error"] or row["memory_error"] or 0.0)):
        words = [f"{row['id']:16}", f"{row['model'][:22]:22}", f"{row['device']:10}", f"{row['gpus']:5d}"]
        if row["step_time_error"] is not None:
            words.append(
                f"step {row['step_time_s']:9.3f} s, predicted {row['predicted_step_time_s']:9.3f}"
                f" ({row['step_time_error']:+.0%})"
            )
        if row["memory_error"] is not None:
            words.append(
                f"memory {row['memory_bytes'] / 1e9:6.1f} GB, predicted {row['predicted_memory_bytes'] / 1e9:6.1f}"
                f" ({row['memory_error']:+.0%})"
            )
        print("  " + "  ".join(words) + f"  {row['layout']}")


def is_memory_file(path: Path) -> bool:
    """Whether a file is shaped like memory.csv: it has columns for allocators' counts and none for measured steps."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        columns = set(csv.DictReader(file).fieldnames or ())
    return "mem_max_alloc_gb" in columns and "metric_step_time_s" not in columns


def count_rows(path: Path) -> int:
    with path.open(newline="", encoding="utf-8") as file:
        return sum(1 for _ in csv.DictReader(file))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rows", required=True, type=Path, help="a CSV as training.csv")
    parser.add_argument(
        "--json", type=Path, help="write everything that is printed, and each row, to this file"
    )
    parser.add_argument(
        "--list", action="store_true", help="print every row with its prediction, worst first"
    )
    parser.add_argument(
        "--cross-validate",
        action="store_true",
        help="refit without each source of this file in turn (minutes)",
    )
    options = parser.parse_args(arguments)
    runs, refused = read_runs(options.rows)
    data = report(runs, refused, count_rows(options.rows), memory_file=is_memory_file(options.rows))
    stored = validation()
    if options.cross_validate:
        from calibrate import cross_validate

        stored = cross_validate(runs)
    data["leave_one_source_out"] = stored
    show(data, stored, options.list)
    if options.json:
        options.json.write_text(json.dumps(data, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
