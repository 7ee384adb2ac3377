"""Layout search: the fastest layout that fits, with a proof of how near the best of the space it is.

In:  a Space (workload, cluster, batch, what the user decided), a Software, an objective.
Out: a Found: the best layout, priced; a lower bound over the whole space; the alternatives a person would ask about.

Branch and bound over arrays. Every core (what sets a rank's own work) gets a bound: the busiest rank's work. Cores are
expanded best bound first, all their layouts priced in closed form and bounded; the most promising are cut and simulated
event by event. It ends when no bound that is left is below the best simulated layout by a thousandth, or when its budget of
simulations is used up: the least bound left is the certificate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from autopar.cost.estimate import memory_bytes
from autopar.cost.grid import Array, Grid
from autopar.cost.layout_bound import core_bound_s
from autopar.cost.pipeline import Pipelines, Priced, price
from autopar.cost.software import Software
from autopar.errors import InfeasibleError
from autopar.layout import Layout
from autopar.passes.layout_rows import Pool
from autopar.passes.layout_space import Space

OBJECTIVES = ("time", "memory")
_FIRST = 64  # cores whose layouts are priced first
_EARLY = 4  # simulations before all rows are known
SIMULATIONS = 100
_NEARLY = 1.5  # times the limit: layouts beyond that are not worth telling of
_SEES_LESS = 1.03  # slack from which rows that would fit in less memory are priced too
_LESS_MEMORY = 6 / 7  # of the limit: what `Found.top` is to answer for
_STAGE_BOUNDS = 20_000
ENOUGH = 1.001  # what could be faster by less is not simulated; the certificate says so
THOROUGH, SOON = 12, 1.005  # after so many simulations what could be faster by less than that is not either
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


def search_layouts(
    space: Space,
    software: Software,
    *,
    objective: str = "time",
    limit_bytes: float | None = None,
    slack: float = 1.0,
    progress: Callable[[str], None] | None = None,
) -> Found:
    """The fastest layout of the space that fits in `limit_bytes` (default: the device's `usable_bytes`). `slack`:
    layouts are priced whose bound is below so many times the best, more than the proof needs. `objective`: "memory"
    for the leanest instead, of equally lean ones the fastest.

    Raises InfeasibleError: nothing divides, or nothing fits, and what would.
    """
    tell = progress or (lambda _: None)
    limit = float(limit_bytes or space.cluster.device.usable_bytes)
    cores = space.cores()
    if not len(cores):
        raise nothing_divides(space)
    tell(f"bounding {len(cores):,} cores")
    bounds, floor = core_bound_s(space.workload, cores, space.cluster, software, space.batch)
    possible = floor <= limit * (1 + 1e-12)
    if not possible.any():
        raise nothing_fits(space, software, limit)
    cores, bounds, floor = cores.take(possible), bounds[possible], floor[possible]
    pool = Pool(space, software, limit, 1.0 if slack < _SEES_LESS else _LESS_MEMORY)
    settled = _Settled(space, software, limit)
    if objective == "memory":
        return _leanest(settled, pool, cores, floor)
    turn = np.argsort(bounds, kind="stable")
    cores, bounds = cores.take(turn), bounds[turn]
    start, size = 0, _FIRST
    # rows about as fast as the best may be chosen for their free memory, so those just above it are priced too
    while start < len(cores) and bounds[start] < slack * settled.best_s:
        pool.add(cores.take(slice(start, start + size)), max(slack, TIED) * settled.best_s)
        start += size
        size = min(4096, 2 * size)
        if pool.fits:
            settled.run(pool, _EARLY, 4 * _EARLY)
    if not pool.fits:
        raise nothing_fits(space, software, limit)
    tell(f"priced {pool.rows:,} layouts; simulating the best")
    settled.run(pool, SIMULATIONS, _STAGE_BOUNDS)
    unseen = float(bounds[start]) if start < len(cores) else np.inf
    return settled.found(pool, min(unseen, settled.left), len(cores))


class _Settled:
    """Pipelines that are cut, bounded and simulated so far; `best_s`: the least seconds simulated of a row that fits;
    `left`: the least bound of what a run left out. Rows that differ in ZeRO or offload share a pipeline."""

    def __init__(self, space: Space, software: Software, limit: float) -> None:
        self.space, self.software, self.limit = space, software, limit
        self.best_s = self.left = np.inf
        self.exact: dict[int, float] = {}  # by row
        self.spans: dict[int, float] = {}  # by the first row that has the pipeline
        self.best_row = -1

    def run(self, pool: Pool, simulations: int, stage_bounds: int) -> None:
        """Settle pipelines from the least seconds on, until no bound that is left is below the best simulated, or so
        many more are simulated or bounded by their stages."""
        grid, (seconds, bounds, memory, outside, share) = pool.whole()
        fits = np.flatnonzero((memory <= self.limit) & (bounds < self.best_s * TIED))
        self.left = np.inf
        if not len(fits):
            return
        _, pipeline = np.unique(_keys(grid.take(fits), _PIPELINE), return_inverse=True)
        by = np.lexsort((seconds[fits], pipeline))
        starts = np.flatnonzero(np.diff(pipeline[by], prepend=-1))
        rows_of = np.split(fits[by], starts[1:])
        names = np.minimum.reduceat(fits[by], starts)  # rows are only added: a pipeline's first one names it
        least = np.minimum.reduceat(bounds[fits[by]], starts)
        order = np.argsort(seconds[fits[by][starts]], kind="stable")
        order = order[least[order] < self.best_s]
        near = order[:stage_bounds]
        self.left = float(least[order[stage_bounds:]].min(initial=np.inf))
        found = Pipelines(
            self.space.workload, grid.take(names[near]), self.space.cluster, self.software, self.space.batch
        )
        spans = np.zeros(len(near))
        piped = np.flatnonzero(found.grid.pp > 1)
        spans[piped] = found.bounds_s(piped)
        simulated = 0

        def step(span: float, rows: Array) -> Array:
            whole = (span + outside[rows]) * (1 + share[rows]) + self.software.step_s
            return np.asarray(np.where(grid.pp[rows] == 1, seconds[rows], whole))

        for index, place in enumerate(near):
            rows, name = rows_of[place], int(names[place])
            bound = float(step(spans[index], rows).min())
            if bound >= self.best_s:
                continue
            if bound * (ENOUGH if simulated < THOROUGH else SOON) >= self.best_s:
                self.left = min(self.left, bound)
                continue
            if found.grid.pp[index] > 1 and name not in self.spans:
                if simulated >= simulations:
                    self.left = min(self.left, bound)
                    continue
                simulated += 1
                layout = grid.layout(name)
                self.spans[name], _ = found.stages(index, layout).simulate(layout)
            exact = step(self.spans.get(name, 0.0), rows)
            self.exact.update(zip(rows.tolist(), exact.tolist(), strict=True))
            if exact.min() < self.best_s:
                self.best_s, self.best_row = float(exact.min()), int(rows[exact.argmin()])

    def found(self, pool: Pool, left: float, cores: int) -> Found:
        """The best row, or of those as good the best with memory free, as a Found."""
        grid, (seconds, _, memory, _, _) = pool.whole()
        near = [row for row, value in self.exact.items() if value <= self.best_s * TIED]
        roomy = [row for row in near if memory[row] <= _HEADROOM * self.limit]
        row = min(roomy, key=lambda row: self.exact[row]) if roomy else self.best_row
        best = price(
            self.space.workload, grid.layout(row), self.space.cluster, self.software, self.space.batch
        )
        return Found(
            best=best,
            bound_s=min(left, self.best_s, best.step_s),
            limit_bytes=self.limit,
            cores=cores,
            rows=pool.rows,
            simulated=len(self.spans),
            alternatives=_alternatives(grid, seconds, memory, self.limit),
            best_by=_best_by(grid, seconds, memory, self.limit),
            top=_top(grid, seconds, memory, self.limit),
        )


def _leanest(settled: _Settled, pool: Pool, cores: Grid, floor: Array) -> Found:
    """The layout with the least bytes, of equal ones the fastest in closed form; its bound is on its own seconds."""
    turn = np.argsort(floor, kind="stable")
    cores, floor = cores.take(turn), floor[turn]
    pool.spare = 0.0
    least, start, size = np.inf, 0, _FIRST
    while start < len(cores) and floor[start] <= least:
        pool.add(cores.take(slice(start, start + size)), np.inf)
        least = min(least, float(pool.columns[-1][2].min(initial=np.inf)))
        start += size
    _, (seconds, _, memory, _, _) = pool.whole()
    if not pool.fits:
        raise nothing_fits(settled.space, settled.software, settled.limit)
    row = int(np.lexsort((seconds, memory))[0])
    settled.best_row, settled.best_s = row, np.inf
    return settled.found(pool, np.inf, len(cores))


_PIPELINE = ("dp", "tp", "cp", "pp", "vpp", "ep", "etp", "mbs", "precision", "recompute", "schedule", "order", "sp",
             "recompute_layers")  # fmt: skip


def _keys(grid: Grid, names: tuple[str, ...]) -> Array:
    """One number per row, equal for rows that are equal in these columns."""
    key = np.zeros(len(grid), dtype=np.int64)
    for name in names:
        values, codes = np.unique(getattr(grid, name), return_inverse=True)
        key = key * len(values) + codes
    return key


def _alternatives(
    grid: Grid, seconds: Array, memory: Array, limit: float, count: int = 8
) -> tuple[Alternative, ...]:
    """The fastest layouts that differ in more than details: `count` that fit, and half as many that are faster and do
    not, of those that come nearest to it."""
    fits = memory <= limit
    near = ~fits & (memory <= _NEARLY * limit)
    found = []
    for rows, wanted in ((np.flatnonzero(fits), count + 1), (np.flatnonzero(near), count // 2)):
        seen: set[tuple[int, ...]] = set()
        for row in rows[np.argsort(seconds[rows], kind="stable")[:4000]]:
            key = tuple(int(getattr(grid, name)[row]) for name in ("tp", "cp", "pp", "ep", "dp"))
            if key not in seen and len(seen) < wanted:
                seen.add(key)
                found.append(
                    Alternative(grid.layout(row), float(seconds[row]), float(memory[row]), bool(fits[row]))
                )
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
    _, floor = core_bound_s(space.workload, cores, space.cluster, software, space.batch)
    cores = cores.take(turn := np.argsort(floor, kind="stable"))
    need, leanest = np.inf, None
    for start in range(0, len(cores), _FIRST):
        if floor[turn[start]] >= need:
            break
        rows = space.expand(cores.take(slice(start, start + _FIRST)))
        memory = np.asarray(
            sum(memory_bytes(space.workload, rows, space.cluster, software, space.batch).values())
        )
        if len(rows) and memory.min() < need:
            need, leanest = float(memory.min()), rows.layout(int(np.argmin(memory)))
    if leanest is None:
        return nothing_divides(space)
    gib = 2**30
    return InfeasibleError(
        f"{space.workload.name} does not fit: the leanest layout needs {need / gib:.1f} GiB per device,"
        f" a {space.cluster.device.name} may be given {limit / gib:.1f}",
        where=f"layout {leanest}",
        hint=f"at least {int(np.ceil(space.cluster.device_count * need / limit))} devices, or devices with more memory",
    )
