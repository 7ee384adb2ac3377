"""Calibrate: fit the constants of devices and stacks to published step times.

    python bench/calibrate.py --rows training.csv [--write] [--steps 8]

Fits the constants named in bench/priors.toml (which stand in autopar/cost/calibration.toml and software.toml) by least
squares on the logarithm of predicted over measured step time (soft L1, so that a strange row pulls little), with a
pull towards the values of that file, so that what the rows don't determine stays where physics puts it or as the
neighbouring era or family has it. How hard it pulls was chosen by what predicts left-out sources best. Rows of one
source, device and kind of model count together as the square root of their number. Then the constants are fitted
anew without each source in turn. --write stores the constants and what was found (autopar/cost/validation.toml).
"""

from __future__ import annotations

import argparse
import copy
import datetime
import multiprocessing
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from metrics import Errors
from pricing import Batch, batches
from published_rows import Run, read_runs

from autopar.cost.grid import Array
from autopar.cost.held import Held, held
from autopar.cost.layout_time import LayoutTime
from autopar.cost.rates import calibration
from autopar.cost.software import ancestry, changed, load_software, software_data

PRIORS = Path(__file__).with_name("priors.toml")
COST = Path(__file__).parent.parent / "autopar" / "cost"
_SMALL = 12  # rows of a source, up to which its absence is a small change
_WORKERS = 2
NOISE = 0.08  # size of a residual (of log step time) from which it counts less than squared


@dataclass(frozen=True)
class Constant:
    """One constant to fit: where it stands, its bounds, what it is pulled to, how hard (log standard deviation)."""

    path: tuple[str, ...]
    low: float
    high: float
    sigma: float
    prior: float
    like: tuple[str, ...] = ()


# name: (lowest, highest, log standard deviation of the prior)
OF_FAMILY = {
    "sustained": (0.4, 1.1, 0.02),
    "edge": (5.0, 500.0, 1.0),
    "fp8": (0.3, 1.0, 0.06),
    "mxfp8": (0.3, 1.0, 0.3),
    "fp4": (0.2, 1.0, 0.15),
    "stream": (0.3, 1.1, 0.08),
    "unaligned": (0.4, 1.0, 0.15),
    "within": (0.4, 1.4, 0.3),
    "across": (0.2, 1.16, 0.4),
}
OF_STACK = {
    "expert_stream": (0.15, 1.5, 0.06),
    "distinct": (0.02, 1.0, 0.5),
    "scan": (0.1, 2.0, 0.3),
    "stream": (0.3, 1.3, 0.1),
    "grouped": (0.3, 1.0, 0.15),
    "quantize": (0.1, 3.0, 0.3),
    "tp_exposed": (0.02, 1.0, 0.3),
    "ep_exposed": (0.05, 1.3, 0.06),
    "pp_exposed": (0.02, 2.0, 0.5),
    "dp_window": (0.05, 1.0, 0.3),
    "dp_exposed": (0.01, 1.0, 0.4),
    "step_s": (1e-4, 0.1, 0.5),
    "step_share": (0.001, 0.15, 0.8),
    "straggle": (0.0003, 0.03, 0.5),
}
OF_OPTION = {
    "matmul": (0.5, 1.1, 0.1),
    "launch": (0.05, 5.0, 0.3),
    "gather_rank_s": (1e-5, 1e-2, 0.5),
}


@dataclass(frozen=True)
class Priceable:
    """A batch with what doesn't depend on the constants."""

    batch: Batch
    held: Held
    micro_batches: Array
    places: Array
    measured: Array
    touches: frozenset[tuple[str, str]]


def prepare(runs: Sequence[Run]) -> list[Priceable]:
    usable = [run for run in runs if run.step_time_s]
    found, _ = batches(usable)
    out = []
    for batch in found:
        grid = batch.grid
        options = frozenset(batch.options) & frozenset(software_data()["option"])
        stacks = software_data()["stack"]
        family = calibration()["devices"].get(batch.cluster.device.name, batch.cluster.device.name)
        touches = {
            ("family", family),
            *(("stack", name) for name in ancestry(batch.stack, stacks)),
            *(("option", name) for name in options),
        }
        out.append(
            Priceable(
                batch,
                held(batch.workload, grid),
                np.maximum(1.0, batch.sequences / (grid.dp * grid.mbs)),
                np.array(batch.places),
                np.array([run.step_time_s for run in batch.runs]),
                frozenset(touches),
            )
        )
    return out


def seconds(one: Priceable, data: dict[str, Any]) -> Array:
    """Predicted step times of a batch under constants."""
    b = one.batch
    stack = changed(load_software(b.stack, data), b.options, data)
    model = LayoutTime(b.workload, b.grid, one.held, b.cluster, stack, one.micro_batches, data)
    return np.asarray(sum(model.kinds().values()))


def constants(prepared: Sequence[Priceable]) -> list[Constant]:
    """What to fit: the constants of priors.toml that some rows touch."""
    used = {touch for one in prepared for touch in one.touches}
    priors = tomllib.loads(PRIORS.read_text(encoding="utf-8"))
    out = []
    for kind, sections in priors.items():
        for name, section in sections.items():
            for key, value in section.items():
                if (kind, name) in used:
                    like: tuple[str, ...] = ()
                    if isinstance(value, str):  # as that section's, which stands in the file too
                        like, value = (kind, value, key), sections[value][key]
                        while isinstance(value, str):
                            value = sections[value][key]
                    table = {"family": OF_FAMILY, "stack": OF_STACK, "option": OF_OPTION}[kind]
                    out.append(Constant((kind, name, key), *table[key], prior=value, like=like))
    return out


def merged() -> dict[str, Any]:
    """Both files as one mapping, free to change."""
    return copy.deepcopy({**calibration(), **software_data()})


def placed(data: dict[str, Any], known: Sequence[Constant], values: Array) -> dict[str, Any]:
    """`data` with the constants at exp(values)."""
    out = {
        **data,
        **{kind: {name: dict(v) for name, v in data[kind].items()} for kind in ("family", "stack", "option")},
    }
    for constant, value in zip(known, values, strict=True):
        kind, name, key = constant.path
        out[kind][name][key] = float(np.exp(value))
    return out


class Fit:
    """Residuals of log step time, and the constants at the least of their cost, for all rows or some."""

    def __init__(self, prepared: Sequence[Priceable], data: dict[str, Any]) -> None:
        self.prepared, self.data = list(prepared), data
        self.constants = constants(prepared)
        self.low = np.log([c.low for c in self.constants])
        self.high = np.log([c.high for c in self.constants])
        now = [data[c.path[0]][c.path[1]].get(c.path[2], c.prior) for c in self.constants]
        self.now = np.clip(np.log(now), self.low, self.high)
        place = {c.path: n for n, c in enumerate(self.constants)}
        pull = np.eye(len(self.constants))
        target = np.log([constant.prior for constant in self.constants])
        for n, c in enumerate(self.constants):
            if c.like in place:
                pull[n, place[c.like]], target[n] = -1.0, 0.0
            pull[n], target[n] = pull[n] / c.sigma, target[n] / c.sigma
        self.pull, self.target = pull, target
        self.runs = [run for one in self.prepared for run in one.batch.runs]
        self.log_measured = np.log(np.concatenate([one.measured for one in self.prepared]))
        edges = np.cumsum([0, *(len(one.places) for one in self.prepared)])
        self.slices = [slice(a, b) for a, b in pairwise(edges)]
        group = [f"{run.source}|{run.device}|{run.kind}" for run in self.runs]
        many = Counter(group)
        # of a row's cost: a group of alike rows counts as the square root of their number
        self.weight = np.array([many[name] ** -0.5 for name in group])
        self.sources = np.array([run.source for run in self.runs])

    def predict(self, values: Array, only: Sequence[int] | None = None) -> Array:
        data = placed(self.data, self.constants, values)
        out = np.full(len(self.log_measured), np.nan)
        for n in range(len(self.prepared)) if only is None else only:
            out[self.slices[n]] = np.log(seconds(self.prepared[n], data))
        return out

    def residuals(self, values: Array, only: Sequence[int] | None = None) -> Array:
        """Log of predicted over measured; 0 for what is in none of the batches `only`."""
        return np.asarray(np.nan_to_num(self.predict(values, only) - self.log_measured))

    def jacobian(self, values: Array, base: Array, only: Sequence[int] | None = None) -> Array:
        """Derivatives of `base`, the residuals at `values`, by finite differences of only what a constant touches."""
        out = np.zeros((len(base), len(self.constants)))
        chosen = range(len(self.prepared)) if only is None else only
        for column, constant in enumerate(self.constants):
            touched = [n for n in chosen if constant.path[:2] in self.prepared[n].touches]
            step = 0.02 if values[column] + 0.02 < self.high[column] else -0.02
            moved = values.copy()
            moved[column] += step
            new = self.predict(moved, touched)
            for n in touched:
                place = self.slices[n]
                out[place, column] = (new[place] - self.log_measured[place] - base[place]) / step
        return out

    def cost(self, residuals: Array, values: Array, keep: Array) -> float:
        rows = 2.0 * (np.sqrt(1.0 + (residuals / NOISE) ** 2) - 1.0)
        return float(np.sum(self.weight * keep * rows) + np.sum((self.pull @ values - self.target) ** 2))

    def solve(
        self, start: Array, keep: Array, steps: int, slope: Array | None = None, log: bool = False
    ) -> tuple[Array, Array]:
        """The constants (as logarithms) at the least of the cost of the rows that `keep` weighs, and the derivatives
        last taken: damped Gauss-Newton steps with the soft L1 loss as weights. `slope`: derivatives to start with."""
        only = [n for n in range(len(self.prepared)) if np.any(keep[self.slices[n]] > 0)]
        now, damping = start.copy(), 1e-3
        base = self.residuals(now, only)
        best = self.cost(base, now, keep)
        for step in range(steps):
            if slope is None or step > 0:
                slope = self.jacobian(now, base, only)
            improved = False
            for _ in range(4):
                move = self._move(now, base, slope, keep, damping)
                tried = np.clip(now + move, self.low, self.high)
                residuals = self.residuals(tried, only)
                cost = self.cost(residuals, tried, keep)
                if cost < best:
                    improved = True
                    gain, now, base, best = best - cost, tried, residuals, cost
                    damping = max(1e-4, damping / 10)
                    if gain < 0.002 * best:
                        break
                else:
                    damping = max(damping, 1e-2) * 10
                    if damping > 1e3:
                        break
            if log:
                print(f"  step {step}: cost {best:.3f}")
            if not improved:
                break
        assert slope is not None
        return now, slope

    def _move(self, now: Array, base: Array, slope: Array, keep: Array, damping: float) -> Array:
        """A Newton step within the bounds: constants that would leave them stay."""
        pull = self.weight * keep / np.sqrt(1.0 + (base / NOISE) ** 2) / NOISE**2
        hessian = slope.T @ (slope * pull[:, None]) + self.pull.T @ self.pull
        gradient = slope.T @ (base * pull) + self.pull.T @ (self.pull @ now - self.target)
        hessian = hessian + damping * np.diag(np.diag(hessian))
        free = np.ones(len(now), dtype=bool)
        move = np.zeros(len(now))
        for _ in range(4):
            move[:] = 0.0
            move[free] = -np.linalg.solve(hessian[np.ix_(free, free)], gradient[free])
            out = free & (((now <= self.low) & (move < 0)) | ((now >= self.high) & (move > 0)))
            if not out.any():
                break
            free &= ~out
        return np.clip(move, -0.5, 0.5)


def left_out(fit: Fit, values: Array, slope: Array, source: str) -> Array:
    """Log predictions of a source's rows by constants fitted to all others (0 elsewhere): from the fit to all, whose
    derivatives serve for the first steps, and for all of them where the source is too small to move much."""
    theirs = fit.sources == source
    keep = 1.0 - theirs
    now, _ = fit.solve(values, keep, 3 if theirs.sum() > _SMALL else 1, slope)
    mine = [n for n in range(len(fit.prepared)) if theirs[fit.slices[n]].any()]
    return np.where(theirs, np.nan_to_num(fit.predict(now, mine)), 0.0)


def cross_validated(fit: Fit, values: Array, slope: Array) -> Array:
    """Log predictions, each source's by constants fitted without it."""
    sources = [name for name, _ in Counter(fit.sources.tolist()).most_common()]
    context = multiprocessing.get_context("fork")  # the workers see this process's fit; only results travel

    def work(names: Sequence[str], out: Connection) -> None:
        out.send(sum(left_out(fit, values, slope, name) for name in names))
        out.close()

    found = []
    for worker in range(_WORKERS):
        here, there = context.Pipe(duplex=False)
        context.Process(target=work, args=(sources[worker::_WORKERS], there)).start()
        found.append(here)
    return np.asarray(sum(pipe.recv() for pipe in found))


def validation(fit: Fit, values: Array, crossed: Array) -> dict[str, Any]:
    measured = np.exp(fit.log_measured)
    inside, outside = np.exp(fit.residuals(values) + fit.log_measured), np.exp(crossed)
    parts: dict[str, list[int]] = defaultdict(list)
    for n, run in enumerate(fit.runs):
        parts["all"].append(n)
        parts[run.kind].append(n)
        if run.kind == "dense" and run.device in ("a100", "a100-40g", "h100", "h800", "h200"):
            parts["dense on a100, h100, h200, h800"].append(n)
        parts[f"{run.kind}, {run.device}"].append(n)
        parts[f"from {run.source}"].append(n)
    errors = {
        name: asdict(found)
        for name, rows in sorted(parts.items(), key=lambda kv: -len(kv[1]))
        if (found := Errors.of(outside[rows].tolist(), measured[rows].tolist()))
    }
    whole = Errors.of(inside.tolist(), measured.tolist())
    assert whole
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "rows": len(measured),
        "sources": len({run.source for run in fit.runs}),
        "in_sample": asdict(whole),
        "errors": errors,
    }


def cross_validate(runs: Sequence[Run], steps: int = 4) -> dict[str, Any]:
    """Fit to the runs, then leave each source out: what validation.toml holds."""
    fit = Fit(prepare(runs), merged())
    values, slope = fit.solve(fit.now, np.ones(len(fit.runs)), steps)
    return validation(fit, values, cross_validated(fit, values, slope))


def write_constants(fit: Fit, values: Array) -> None:
    """Put the fitted numbers in the two files, which keep all else (comments, order)."""
    for kind, file in (
        ("family", "calibration.toml"),
        ("stack", "software.toml"),
        ("option", "software.toml"),
    ):
        path = COST / file
        text = path.read_text(encoding="utf-8")
        for constant, value in zip(fit.constants, np.exp(values), strict=True):
            if constant.path[0] == kind:
                text = _with_value(text, f"[{kind}.{constant.path[1]}]", constant.path[2], float(value))
        path.write_text(text, encoding="utf-8")


def _with_value(text: str, header: str, key: str, value: float) -> str:
    start = text.index(header + "\n") + len(header) + 1
    end = text.find("\n[", start)
    body = text[start : end if end >= 0 else len(text)]
    line = f"{key} = {value:.4g}"
    pattern = re.compile(rf"^{key} = .*$", re.MULTILINE)
    new = pattern.sub(line, body, count=1) if pattern.search(body) else f"{line}\n{body}"
    return text[:start] + new + (text[end:] if end >= 0 else "")


def write_validation(found: dict[str, Any]) -> None:
    lines = [
        "# What bench/calibrate.py found when it fitted the constants: errors of step times by leave-one-source-out.",
        *(
            f'{key} = "{found[key]}"' if isinstance(found[key], str) else f"{key} = {found[key]}"
            for key in ("date", "rows", "sources")
        ),
        f"in_sample = {_inline(found['in_sample'])}",
        "",
        "[errors]",
        *(f'"{name}" = {_inline(errors)}' for name, errors in found["errors"].items()),
    ]
    (COST / "validation.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _inline(values: dict[str, float]) -> str:
    return "{" + ", ".join(f"{key} = {value:.4g}" for key, value in values.items()) + "}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rows", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=8, help="evaluations of the fit")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    runs, _ = read_runs(options.rows)
    fit = Fit(prepare(runs), merged())
    print(f"{len(fit.runs)} rows in {len(fit.prepared)} batches, {len(fit.constants)} constants")
    values, slope = fit.solve(fit.now, np.ones(len(fit.runs)), options.steps, log=True)
    for constant, value in zip(fit.constants, np.exp(values), strict=True):
        edge = (
            " (at its bound)"
            if min(abs(np.log(value / constant.low)), abs(np.log(value / constant.high))) < 0.01
            else ""
        )
        print(f"  {'.'.join(constant.path):40} {value:10.4g}  prior {constant.prior:10.4g}{edge}")
    if options.write:
        write_constants(fit, values)
    found = validation(fit, values, cross_validated(fit, values, slope))
    print("in-sample", found["in_sample"])
    for name, errors in found["errors"].items():
        print(f"  {name:34}", "  ".join(f"{key} {value:.3g}" for key, value in errors.items()))
    if options.write:
        write_validation(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
