"""Layout search: the fastest layout that fits, with a proof of how near the best of the space it is.

In:  a Space (workload, cluster, batch, what the user decided), a Software, an objective.
Out: a Found: the best layout, priced; a lower bound over the whole space; the alternatives a person would ask about.

Branch and bound over arrays. Every core (what sets a rank's own work) gets a bound: its share of the work at full
speed and the shortest fill any schedule has. Cores are expanded best bound first, all their layouts priced in closed
form and bounded; the most promising are cut and simulated event by event. It ends when no bound that is left is
below the best simulated layout, so that the gap is nil, or when its budget of simulations is used up: then the least
bound left is the certificate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from autopar.cost.estimate import Estimates, estimate
from autopar.cost.grid import Array, Grid
from autopar.cost.layout_bound import beside, core_bound_s, row_bound_s
from autopar.cost.pipeline import Pipelines, Priced, price
from autopar.cost.software import Software
from autopar.errors import InfeasibleError
from autopar.layout import Layout
from autopar.passes.layout_space import Space, joined

OBJECTIVES = ("time", "memory")
_CHUNK = 60_000  # rows priced at a time
_SIMULATIONS = 40
_STAGE_BOUNDS = 1000
TIED = 1.005  # of layouts as close as this, which no prediction can tell apart, the one with most memory free
_HEADROOM = 0.9


@dataclass(frozen=True)
class Alternative:
    """A layout that was not chosen, in closed form. `why`: fits or not, and how much slower."""

    layout: Layout
    step_s: float
    memory_bytes: float
    fits: bool


@dataclass(frozen=True)
class Found:
    """`bound_s`: no layout of the space that fits is faster. `cores`, `rows`: how much was bounded and priced;
    `best_by`: decision -> value -> its best alternative; `top`: the layouts nearest to the best, for what is
    priced again with other constants."""

    best: Priced
    bound_s: float
    limit_bytes: float
    cores: int
    rows: int
    simulated: int
    alternatives: tuple[Alternative, ...]
    best_by: dict[str, dict[str, Alternative]] = field(default_factory=dict)
    top: Grid = field(default_factory=lambda: Grid.of([]))

    @property
    def gap(self) -> float:
        """How far from the best of the space at most, as a share: 0.01 is within 1 %."""
        return self.best.step_s / self.bound_s - 1 if self.bound_s else 0.0


class _Pool:
    """Priced rows so far: seconds in closed form, their bounds, bytes, and what `step_of` needs of a row: seconds
    beside the pipeline, and the share that goes with the whole."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.grids: list[Grid] = []
        self.columns: list[Array] = []
        self.rows = 0

    def add(self, found: Estimates, bound: Array, software: Software) -> None:
        self.rows += len(found.grid)
        outside, share = beside(found, software)
        self.grids.append(found.grid)
        self.columns.append(np.stack([found.step_s, bound, found.memory_total, outside, share]))

    def whole(self) -> tuple[Grid, Array]:
        """(all rows, [seconds, bounds, bytes, outside, share] of each)."""
        return joined(self.grids), np.concatenate(self.columns, axis=1)


def search_layouts(
    space: Space,
    software: Software,
    *,
    objective: str = "time",
    limit_bytes: float | None = None,
    slack: float = 1.0,
    progress: Callable[[str], None] | None = None,
) -> Found:
    """The fastest layout of the space that fits in `limit_bytes` (default: the device's memory). `slack`:
    cores are priced whose bound is below so many times the best, more than the proof needs.

    Raises InfeasibleError: nothing divides, or nothing fits, and what would.
    """
    tell = progress or (lambda _: None)
    limit = float(limit_bytes or space.cluster.device.memory_bytes)
    workload, cluster, batch = space.workload, space.cluster, space.batch
    cores = space.cores()
    if not len(cores):
        raise nothing_divides(space)
    tell(f"bounding {len(cores):,} cores")
    bounds, floor = core_bound_s(workload, cores, cluster, software, batch)
    possible = floor <= limit
    if not possible.any():
        raise nothing_fits(space, software, limit)
    cores, bounds = cores.take(possible), bounds[possible]
    turn = np.argsort(bounds, kind="stable")
    cores, bounds = cores.take(turn), bounds[turn]
    pool = _Pool(limit)
    best_s = np.inf
    start, size = 0, 64
    while start < len(cores) and bounds[start] < slack * best_s:
        chunk = space.expand(cores.take(slice(start, start + size)))
        for part in range(0, len(chunk), _CHUNK):
            rows = chunk.take(slice(part, part + _CHUNK))
            found = estimate(workload, rows, cluster, software, batch)
            pool.add(found, row_bound_s(workload, found, cluster, software), software)
            fits = found.memory_total <= limit
            if fits.any():
                best_s = min(best_s, float(found.step_s[fits].min()))
        start += size
        size = min(4096, 2 * size)
    unseen = float(bounds[start]) if start < len(cores) else np.inf
    if not np.isfinite(best_s):
        raise nothing_fits(space, software, limit)
    tell(f"priced {pool.rows:,} layouts; simulating the best")
    return _finish(space, software, pool, unseen, len(cores))


def _finish(space: Space, software: Software, pool: _Pool, unseen: float, cores: int) -> Found:
    """Settle pipelines from the least seconds on, until no bound that is left is below the best simulated.

    Rows that differ in ZeRO or offload only share a pipeline, which is cut, bounded and simulated once.
    """
    grid, (seconds, bounds, memory, outside, share) = pool.whole()
    fits = np.flatnonzero(memory <= pool.limit)
    fits = fits[np.argsort(seconds[fits], kind="stable")]
    _, first, pipeline = np.unique(_keys(grid.take(fits), _PIPELINE), return_index=True, return_inverse=True)
    order = np.argsort(first)  # pipelines by their fastest row in closed form
    rows_of = np.split(fits[np.argsort(pipeline, kind="stable")], np.cumsum(np.bincount(pipeline))[:-1])
    found = Pipelines(space.workload, grid.take(fits[first]), space.cluster, software, space.batch)
    best_s, left, best_row = np.inf, unseen, int(fits[0])
    bounded = simulated = 0
    tied: list[tuple[int, float]] = []

    def step(span: float, rows: Array) -> Array:
        return np.where(
            grid.pp[rows] == 1, seconds[rows], (span + outside[rows]) * (1 + share[rows]) + software.step_s
        )

    for place in order:
        rows = rows_of[place]
        least = float(bounds[rows].min())
        if least >= best_s:
            continue
        if bounded >= _STAGE_BOUNDS:
            left = min(left, least)
            continue
        bounded += 1
        layout = grid.layout(int(fits[first[place]]))
        span = 0.0
        if layout.pp > 1:
            stages = found.stages(int(place), layout)
            bound = float(step(stages.bound_s(layout), rows).min())
            if bound >= best_s:
                continue
            if simulated >= _SIMULATIONS:
                left = min(left, bound)
                continue
            simulated += 1
            span, _ = stages.simulate(layout)
        exact = step(span, rows)
        tied += [
            (int(row), float(value)) for row, value in zip(rows, exact, strict=True) if value <= best_s * TIED
        ]
        if exact.min() < best_s:
            best_s, best_row = float(exact.min()), int(rows[exact.argmin()])
    near = [row for row, value in tied if value <= best_s * TIED]
    roomy = [row for row in near if memory[row] <= _HEADROOM * pool.limit]
    exact_of = dict(tied)
    best_row = min(roomy, key=lambda row: exact_of[row]) if roomy else best_row
    best = price(space.workload, grid.layout(best_row), space.cluster, software, space.batch)
    return Found(
        best=best,
        bound_s=min(left, best_s),
        limit_bytes=pool.limit,
        cores=cores,
        rows=pool.rows,
        simulated=simulated,
        alternatives=_alternatives(grid, seconds, memory, pool.limit),
        best_by=_best_by(grid, seconds, memory, pool.limit),
        top=_top(grid, seconds, memory, pool.limit),
    )


_PIPELINE = ("dp", "tp", "cp", "pp", "vpp", "ep", "etp", "mbs", "precision", "recompute", "schedule", "sp")


def _keys(grid: Grid, names: tuple[str, ...]) -> Array:
    """One number per row, equal for rows that are equal in these columns."""
    key = np.zeros(len(grid), dtype=np.int64)
    for name in names:
        values, codes = np.unique(getattr(grid, name), return_inverse=True)
        key = key * len(values) + codes
    return key


def _alternatives(
    grid: Grid, seconds: Array, memory: Array, limit: float, count: int = 12
) -> tuple[Alternative, ...]:
    """The fastest layouts that differ in more than details, those that do not fit among them."""
    turn = np.argsort(seconds, kind="stable")[:4000]
    seen: set[tuple[int, ...]] = set()
    found = []
    for row in turn:
        key = tuple(int(getattr(grid, name)[row]) for name in ("tp", "cp", "pp", "ep", "dp"))
        if key in seen:
            continue
        seen.add(key)
        found.append(
            Alternative(grid.layout(row), float(seconds[row]), float(memory[row]), bool(memory[row] <= limit))
        )
        if len(found) == count:
            break
    return tuple(found)


_KINDS = ("tp", "cp", "pp", "ep", "zero", "recompute", "schedule", "precision", "offload")


def _top(grid: Grid, seconds: Array, memory: Array, limit: float, count: int = 300) -> Grid:
    """The fastest layouts, and the fastest of every kind there is, that fit or miss by a sixth at most."""
    near = np.flatnonzero(memory <= limit * 7 / 6)
    near = near[np.argsort(seconds[near], kind="stable")]
    _, kinds = np.unique(_keys(grid.take(near), _KINDS), return_index=True)
    return grid.take(
        near[np.unique(np.concatenate([np.arange(min(count, len(near))), np.sort(kinds)[:count]]))]
    )


_ASKED = ("tp", "cp", "pp", "ep", "zero", "recompute", "schedule", "precision", "mbs", "offload")


def _best_by(grid: Grid, seconds: Array, memory: Array, limit: float) -> dict[str, dict[str, Alternative]]:
    """Per decision and value, the fastest layout that fits among those priced."""
    fits = memory <= limit
    found: dict[str, dict[str, Alternative]] = {}
    for name in _ASKED:
        column = getattr(grid, name)
        by: dict[str, Alternative] = {}
        for code in np.unique(column):
            rows = np.flatnonzero((column == code) & fits)
            if len(rows):
                row = rows[np.argmin(seconds[rows])]
                layout = grid.layout(row)
                by[str(getattr(layout, name))] = Alternative(
                    layout, float(seconds[row]), float(memory[row]), True
                )
        found[name] = by
    return found


def nothing_divides(space: Space) -> InfeasibleError:
    """No layout divides: which numbers stand in the way."""
    w, world = space.workload, space.cluster.device_count
    return InfeasibleError(
        f"no layout of {w.name} divides {world} devices at a batch of {space.batch} sequences"
        + (
            f" with {', '.join(word.said for word in space.decisions.words)}" if space.decisions.words else ""
        ),
        where="layout",
        hint=f"a batch that is a multiple of {world} (or of its share in dp), or fewer constraints",
    )


def nothing_fits(space: Space, software: Software, limit: float) -> InfeasibleError:
    """No layout fits: by how much, and the leanest one."""
    cores = space.cores()
    lean = space.expand(cores)
    if not len(lean):
        return nothing_divides(space)
    if len(lean) > 400_000:
        lean = lean.take(np.linspace(0, len(lean) - 1, 400_000).astype(int))
    found = estimate(space.workload, lean, space.cluster, software, space.batch)
    memory = found.memory_total
    row = int(np.argmin(memory))
    need, gib = float(memory[row]), 2**30
    return InfeasibleError(
        f"{space.workload.name} does not fit: the leanest layout needs {need / gib:.1f} GiB per device,"
        f" a {space.cluster.device.name} has {limit / gib:.1f}",
        where=f"layout {lean.layout(row)}",
        hint=f"at least {int(np.ceil(space.cluster.device_count * need / limit))} devices, or devices with more memory",
    )
