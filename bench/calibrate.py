"""Calibrate: fit the constants of devices and stacks to published step times.

    python bench/calibrate.py --rows shared/published/training.csv [--write] [--steps 8]

Fits the constants named in bench/priors.toml (which stand in autopar/cost/calibration.toml
and software.toml) by least squares on the logarithm
of predicted over measured step time (soft L1, so that a strange row pulls little), with a pull towards the values of that
file so that what the rows don't determine stays where physics puts it. A source's rows count together as the square
root of their number. Then each source is left out in turn. --write stores the constants and what was found
(autopar/cost/validation.toml).
"""

from __future__ import annotations

import argparse
import copy
import datetime
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

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
    "sustained": (0.4, 1.1, 0.10),
    "edge": (5.0, 500.0, 0.5),
    "fp8": (0.3, 1.0, 0.15),
    "mxfp8": (0.3, 1.0, 0.15),
    "fp4": (0.2, 1.0, 0.15),
    "stream": (0.3, 1.1, 0.08),
    "unaligned": (0.4, 1.0, 0.15),
    "host": (0.2, 3.0, 0.3),
    "within": (0.4, 1.4, 0.15),
    "across": (0.2, 1.16, 0.2),
    "attention_speed": (0.4, 1.4, 0.12),
}
OF_STACK = {
    "matmul": (0.5, 1.1, 0.05),
    "expert_stream": (0.15, 1.5, 0.3),
    "distinct": (0.02, 1.0, 0.5),
    "expert_kernels": (0.02, 6.0, 0.6),
    "gather_rank_s": (1e-5, 1e-2, 0.5),
    "kernel_s": (1e-7, 3e-5, 0.5),
    "launch": (0.05, 2.0, 0.4),
    "stream": (0.3, 1.3, 0.15),
    "grouped": (0.3, 1.0, 0.15),
    "quantize": (0.1, 3.0, 0.3),
    "expert_s": (1e-6, 4e-4, 0.5),
    "tp_exposed": (0.02, 1.0, 0.3),
    "cp_exposed": (0.05, 1.0, 0.3),
    "ep_exposed": (0.05, 1.3, 0.3),
    "pp_exposed": (0.02, 2.0, 0.5),
    "dp_window": (0.05, 1.0, 0.3),
    "dp_exposed": (0.01, 1.0, 0.4),
    "fsdp_window": (0.1, 1.0, 0.3),
    "step_s": (1e-4, 0.1, 0.5),
    "step_share": (0.001, 0.15, 0.5),
    "straggle": (0.0003, 0.03, 0.5),
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
                    table = OF_FAMILY if kind == "family" else OF_STACK
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
    """Residuals of log step time, their derivatives by finite differences of only what a constant touches."""

    def __init__(self, prepared: Sequence[Priceable], data: dict[str, Any]) -> None:
        self.prepared, self.data = list(prepared), data
        self.constants = constants(prepared)
        self.start = np.log([constant.prior for constant in self.constants])
        now = [data[c.path[0]][c.path[1]].get(c.path[2], c.prior) for c in self.constants]
        self.low = np.log([c.low for c in self.constants])
        self.high = np.log([c.high for c in self.constants])
        self.now = np.clip(np.log(now), self.low + 1e-6, self.high - 1e-6)
        place = {c.path: n for n, c in enumerate(self.constants)}
        pull = np.eye(len(self.constants))
        target = self.start.copy()
        for n, c in enumerate(self.constants):
            if c.like in place:
                pull[n, place[c.like]], target[n] = -1.0, 0.0
            pull[n], target[n] = pull[n] / c.sigma, target[n] / c.sigma
        self.pull, self.target = pull, target
        self.rows = np.concatenate([one.places for one in self.prepared])
        self.runs = [run for one in self.prepared for run in one.batch.runs]
        self.log_measured = np.log(np.concatenate([one.measured for one in self.prepared]))
        edges = np.cumsum([0, *(len(one.places) for one in self.prepared)])
        self.slices = [slice(a, b) for a, b in pairwise(edges)]
        group = [f"{run.source}|{run.device}|{run.kind}" for run in self.runs]
        many = Counter(group)
        self.weight = np.array(
            [many[name] ** -0.25 for name in group]
        )  # of a residual; its square is the row's

    def predict(self, values: Array, only: Sequence[int] | None = None) -> Array:
        data = placed(self.data, self.constants, values)
        out = np.full(len(self.log_measured), np.nan)
        for n in range(len(self.prepared)) if only is None else only:
            out[self.slices[n]] = np.log(seconds(self.prepared[n], data))
        return out

    def residuals(self, values: Array) -> Array:
        return self.predict(values) - self.log_measured

    def jacobian(self, values: Array, base: Array) -> Array:
        out = np.zeros((len(base), len(self.constants)))
        for column, constant in enumerate(self.constants):
            touched = [n for n, one in enumerate(self.prepared) if constant.path[:2] in one.touches]
            step = 0.02 if values[column] + 0.02 < self.high[column] else -0.02
            moved = values.copy()
            moved[column] += step
            new = self.predict(moved, touched)
            for n in touched:
                place = self.slices[n]
                out[place, column] = (new[place] + 0.0 - self.log_measured[place] - base[place]) / step
        return out

    def solve(self, steps: int) -> Array:
        """The constants (as logarithms) at the least of the cost."""
        cache: dict[bytes, Array] = {}

        def base(values: Array) -> Array:
            key = values.tobytes()
            if key not in cache:
                cache.clear()
                cache[key] = self.residuals(values)
            return cache[key]

        def cost(values: Array) -> Array:
            return np.concatenate([base(values) / NOISE * self.weight, self.pull @ values - self.target])

        def slope(values: Array) -> Array:
            rows = self.jacobian(values, base(values)) / NOISE * self.weight[:, None]
            return np.vstack([rows, self.pull])

        found = least_squares(
            cost, self.now, jac=slope, bounds=(self.low, self.high), loss="soft_l1", max_nfev=steps, verbose=1
        )
        return np.asarray(found.x)

    def without(self, keep: Array, values: Array, slope: Array) -> Array:
        """The constants without some rows: Newton steps from the full fit with its derivatives, residuals anew."""
        now = values.copy()
        for _ in range(4):
            r = self.residuals(now)
            pull = self.weight**2 * keep / np.sqrt(1 + (r / NOISE * self.weight) ** 2) / NOISE**2
            hessian = slope.T @ (slope * pull[:, None]) + self.pull.T @ self.pull
            gradient = slope.T @ (r * pull) + self.pull.T @ (self.pull @ now - self.target)
            now = np.clip(now - 0.8 * np.linalg.solve(hessian, gradient), self.low, self.high)
        return now


def cross_validated(fit: Fit, values: Array) -> Array:
    """Log predictions, each source's by constants fitted without it."""
    base = fit.residuals(values)
    slope = fit.jacobian(values, base)
    sources = np.array([run.source for run in fit.runs])
    out = base + fit.log_measured
    for source in sorted(set(sources)):
        keep = (sources != source).astype(float)
        now = fit.without(keep, values, slope)
        mine = [
            n
            for n, one in enumerate(fit.prepared)
            if one.batch.runs[0].source == source or any(r.source == source for r in one.batch.runs)
        ]
        new = fit.predict(now, mine)
        chosen = sources == source
        out[chosen] = new[chosen]
    return out


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
        if (found := Errors.of(outside[rows], measured[rows]))
    }
    whole = Errors.of(inside, measured)
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
    values = fit.solve(steps)
    return validation(fit, values, cross_validated(fit, values))


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
    new = pattern.sub(line, body, count=1) if pattern.search(body) else body.rstrip("\n") + f"\n{line}\n"
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
    values = fit.solve(options.steps)
    for constant, value in zip(fit.constants, np.exp(values), strict=True):
        edge = (
            " (at its bound)"
            if min(abs(np.log(value / constant.low)), abs(np.log(value / constant.high))) < 0.01
            else ""
        )
        print(f"  {'.'.join(constant.path):40} {value:10.4g}  prior {constant.prior:10.4g}{edge}")
    found = validation(fit, values, cross_validated(fit, values))
    print("in-sample", found["in_sample"])
    for name, errors in found["errors"].items():
        print(f"  {name:34}", "  ".join(f"{key} {value:.3g}" for key, value in errors.items()))
    if options.write:
        write_constants(fit, values)
        write_validation(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
