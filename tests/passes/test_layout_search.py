"""Layout search against every layout priced one by one, its bounds against the simulator, its cut against a MILP."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import spaces, stacks
from scipy.optimize import Bounds, LinearConstraint, milp

from autopar.cost.estimate import estimate, memory_bytes
from autopar.cost.grid import Array, Grid
from autopar.cost.held import held
from autopar.cost.layout_bound import core_bound_s, row_bound_s, step_of
from autopar.cost.layout_time import LayoutTime
from autopar.cost.pipeline import Pipelines, price
from autopar.cost.schedule import cut
from autopar.cost.software import Software
from autopar.errors import InfeasibleError
from autopar.layout import OFFLOAD, PRECISIONS, RECOMPUTE, SCHEDULES, Layout
from autopar.passes.decisions import Decisions
from autopar.passes.layout_rows import Pool, stage_layers
from autopar.passes.layout_search import ENOUGH, SIMULATIONS, SOON, THOROUGH, TIED, search_layouts
from autopar.passes.layout_space import Space
from autopar.workload import Attention, Matmul

CLOSE = 1 + 1e-9


def _divides(space: Space, tp: int, etp: int) -> bool:
    """Whether tp and etp split every product and the heads of every layer."""
    for layer, _ in space.workload.layers:
        for op in layer.ops:
            if isinstance(op, Attention):
                if op.heads % tp or (op.kv_heads % tp and tp % op.kv_heads):
                    return False
            elif isinstance(op, Matmul) and op.split in ("column", "row"):
                size = op.n if op.split == "column" else op.k
                if size % (etp if op.experts else tp) or (op.ways and op.ways % tp):
                    return False
    return True


def enumerated(space: Space) -> set[Layout]:
    """Every layout of a space by the rules as a person would say them, one layout at a time."""
    w, world, batch = space.workload, space.cluster.device_count, space.batch
    ways = [size for size in range(1, world + 1) if world % size == 0]
    domains = {link.size for link in space.cluster.links if link.size}
    found = set()
    for tp, cp, pp in itertools.product(ways, ways, ways):
        dp, rest = divmod(world, tp * cp * pp)
        if (
            rest
            or dp < 1
            or batch % dp
            or pp > w.depth
            or (cp > 1 and (w.seq % (2 * cp) or w.seq // cp < 128))
        ):
            continue
        orders = [("1f1b", 1)]
        if pp > 1:
            orders += [("zb-h1", 1), ("zbv", 2), ("dualpipev", 2), ("gpipe", 1)]
            orders += [("interleaved", vpp) for vpp in range(2, w.depth + 3)]
        for ep, etp, mbs in itertools.product(
            range(1, max(1, w.experts) + 1), {1, tp}, range(1, batch // dp + 1)
        ):
            if (dp * cp * tp) % (ep * etp) or (etp > 1 and not w.experts) or not _divides(space, tp, etp):
                continue
            if any(layer.experts % ep for layer, _ in w.layers if layer.experts) or batch % (dp * mbs):
                continue
            m = batch // (dp * mbs)
            for (order, vpp), zero, recompute, offload, sp in itertools.product(
                orders, range(4), RECOMPUTE, OFFLOAD, (True, False)
            ):
                needs = {"zb-h1": pp, "zbv": pp, "dualpipev": 2 * pp}.get(order, 1)
                if (
                    pp * vpp > w.depth + (2 if vpp > 1 else 0)
                    or m < needs
                    or (order == "interleaved" and m % pp)
                    or (zero and dp * cp == 1)
                ):
                    continue
                if sp and w.seq % (cp * tp):
                    continue
                shards = {0} | ({size // tp for size in domains} | {2} if zero else set())
                for shard in shards:
                    if shard and (shard == 1 or shard >= dp * cp or (dp * cp) % shard):
                        continue
                    if shard and zero == 3 and shard % cp:
                        continue
                    most = -(-w.depth // pp)
                    outer = pp > 1 and dp > 1 and not shard and ep * etp <= tp * cp
                    for layers, rank_order in itertools.product(
                        [None, *range(1, most)] if recompute != "none" else [None],
                        ("pp-outer", "dp-outer") if outer else ("pp-outer",),
                    ):
                        found.add(
                            Layout(dp=dp, tp=tp, cp=cp, pp=pp, vpp=vpp, ep=ep, etp=etp, zero=zero, shard=shard, mbs=mbs,
                                   recompute=recompute, recompute_layers=layers, schedule=order, sp=sp, offload=offload,
                                   order=rank_order)
                        )  # fmt: skip
    return found


def said(space: Space, layout: Layout) -> bool:
    """Whether the decisions allow a layout, and those beyond what is listed unless named: gpipe, odd micro-batch sizes,
    no split sequence, activations on the host, partial recompute."""
    words = space.decisions.words
    named = {word.name: word for word in words if word.compare == "=" and not word.forbids}

    def value(name: str) -> int:
        if name == "recompute_layers":
            most = -(-space.workload.depth // layout.pp)
            return 0 if layout.recompute == "none" else layout.recompute_layers or most
        of = {"recompute": RECOMPUTE, "schedule": SCHEDULES, "offload": OFFLOAD, "precision": PRECISIONS}
        found = getattr(layout, name)
        return of[name].index(found) if name in of else int(found)

    compare = {"=": lambda a, b: a == b, "<=": lambda a, b: a <= b, ">=": lambda a, b: a >= b,
               "<": lambda a, b: a < b, ">": lambda a, b: a > b}  # fmt: skip
    for word in words:
        if (
            word.name != "precision"
            and any(compare[word.compare](value(word.name), v) for v in word.values) == word.forbids
        ):
            return False
    divides = space.workload.seq % (layout.cp * layout.tp) == 0
    usual = {
        "schedule": layout.schedule != "gpipe",
        "mbs": layout.mbs in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32),
        "sp": layout.sp == divides or any(word.name == "sp" for word in words),
        "offload": layout.offload == "none" or (layout.offload == "optimizer" and space.cluster_offloads),
        "recompute_layers": layout.recompute_layers is None,
        "order": layout.order == "pp-outer"
        or layout.tp * layout.cp * layout.pp <= (space.cluster.links[0].size or space.cluster.device_count),
        "shard": layout.shard in {0} | {link.size // layout.tp for link in space.cluster.links},
    }
    return all(ok or name in named for name, ok in usual.items())


def exact(space: Space, software: Software, grid: Grid) -> tuple[Array, Array]:
    """(seconds as simulated, bytes) of every row."""
    w, cluster, batch = space.workload, space.cluster, space.batch
    found = estimate(w, grid, cluster, software, batch)
    pipelines = Pipelines(w, grid, cluster, software, batch)
    spans, known = np.zeros(len(grid)), dict[Layout, float]()
    for row in np.flatnonzero(grid.pp > 1):
        layout = grid.layout(int(row))
        key = layout.with_(zero=0, shard=0, offload="none")
        if key not in known:
            known[key] = pipelines.stages(int(row), layout).simulate(layout)[0]
        spans[row] = known[key]
    seconds = np.where(grid.pp > 1, step_of(found.time_s, software, spans), found.step_s)
    return seconds, found.memory_total


def with_counts(space: Space, grid: Grid) -> Grid:
    """The rows and those with every number of recomputed layers."""
    parts = [grid]
    if space.partial_recompute and 0 in space.recomputes:
        most = np.ceil(space.workload.depth / grid.pp)
        for count in range(1, space.workload.depth):
            some = grid.take((grid.recompute > 0) & (count < most))
            parts.append(some.with_(recompute_layers=count))
    return Grid({name: np.concatenate([part.columns[name] for part in parts]) for name in grid.columns})


@settings(max_examples=60)
@given(spaces(most=6, layers=5))
def test_space_holds_every_layout_and_no_other(space: Space) -> None:
    cores = space.cores()
    grid = space.expand(cores) if len(cores) else cores
    names = [name for name in grid.columns if name != "precision"]
    found = list(zip(*(grid.columns[name].tolist() for name in names), strict=True))
    plain = Grid.of([layout for layout in enumerated(space) if said(space, layout)])
    expected = set(zip(*(plain.columns[name].tolist() for name in names), strict=True))
    assert len(found) == len(set(found))
    assert set(found) == expected


@settings(max_examples=100)
@given(spaces(), stacks(), st.floats(0, 1.2))
def test_best_is_the_best_of_all(space: Space, software: Software, part: float) -> None:
    cores = space.cores()
    grid = space.expand(cores) if len(cores) else cores
    if len(grid) > 2500:
        return
    if not len(grid):
        with pytest.raises(InfeasibleError):
            search_layouts(space, software)
        return
    grid = with_counts(space, grid)
    seconds, memory = exact(space, software, grid)
    limit = float(np.quantile(memory, min(part, 1.0)) * (0.99 if part == 0 else 1 + 1e-6))  # no knife edge
    fits = memory <= limit
    if not fits.any():
        with pytest.raises(InfeasibleError):
            search_layouts(space, software, limit_bytes=limit)
        return
    found = search_layouts(space, software, limit_bytes=limit)
    least = float(seconds[fits].min())
    assert found.best.memory_total <= limit * CLOSE
    assert found.bound_s <= least * CLOSE
    assert found.best.step_s <= (1 + found.gap) * least * CLOSE
    assert found.best.step_s >= least / CLOSE
    if (
        found.simulated < SIMULATIONS
    ):  # the proof is complete, to a thousandth and the preference for free memory
        enough = ENOUGH if found.simulated < THOROUGH else SOON
        assert found.gap <= TIED * enough - 1 + 1e-9
        roomy = fits & (memory <= 0.9 * limit) & (seconds <= TIED * enough * least)
        assert found.best.step_s <= (TIED if roomy.any() else 1.0) * enough * least * CLOSE


@settings(max_examples=100)
@given(spaces(), stacks(), st.randoms(use_true_random=False))
def test_no_bound_is_above_the_price(space: Space, software: Software, random: object) -> None:
    w, cluster, batch = space.workload, space.cluster, space.batch
    cores = space.cores()
    if not len(cores):
        return
    floor_s, floor_bytes = core_bound_s(w, cores, cluster, software, batch)
    grid = with_counts(space, space.expand(cores))
    if not len(grid):
        return
    some = np.array(sorted(random.sample(range(len(grid)), min(len(grid), 150))))  # type: ignore[attr-defined]
    grid = grid.take(some)
    seconds, memory = exact(space, software, grid)
    model = LayoutTime(
        w, grid, held(w, grid), cluster, software, np.maximum(1.0, batch / (grid.dp * grid.mbs))
    )
    assert (row_bound_s(model, model.kinds()) <= seconds * CLOSE).all()
    names = ("dp", "tp", "cp", "pp", "ep", "etp", "mbs", "precision", "sp")
    place = {
        key: row
        for row, key in enumerate(zip(*(cores.columns[name].tolist() for name in names), strict=True))
    }
    core = np.array(
        [place[key] for key in zip(*(grid.columns[name].tolist() for name in names), strict=True)]
    )
    assert (floor_s[core] <= seconds * CLOSE).all()
    assert (floor_bytes[core] <= memory * CLOSE).all()
    pipelines = Pipelines(w, grid, cluster, software, batch)
    piped = np.flatnonzero(grid.pp > 1)
    bounds = pipelines.bounds_s(piped) if len(piped) else np.zeros(0)
    for row, bound in list(zip(piped, bounds, strict=True))[:40]:
        layout = grid.layout(int(row))
        stages = pipelines.stages(int(row), layout)
        assert stages.bound_s(layout) == pytest.approx(bound, rel=1e-9)
        assert bound <= stages.simulate(layout)[0] * CLOSE
    for row in random.sample(range(len(grid)), min(3, len(grid))):  # type: ignore[attr-defined]
        alone = price(w, grid.layout(int(row)), cluster, software, batch)
        assert alone.step_s == pytest.approx(seconds[row], rel=1e-9)
        assert alone.memory_total == pytest.approx(memory[row], rel=1e-9)
        assert price(w, alone.layout, cluster, software, batch).step_s == pytest.approx(
            alone.step_s, rel=1e-9
        )


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=3),
    st.integers(2, 5),
    st.integers(0, 9),
    st.floats(0.9, 2.0),
)
def test_cut_is_that_of_a_mixed_integer_program(
    runs: list[tuple[int, int]], stages: int, last: int, room: float
) -> None:
    """Contiguous layers to stages, each within its memory, the busiest with the least to do: HiGHS as the peer."""
    seconds = np.repeat([float(t) for t, _ in runs], [count for _, count in runs])
    held_bytes = np.repeat([float(10 - t) for t, _ in runs], [count for _, count in runs])
    layers = len(seconds)
    limits = np.full(stages, room * held_bytes.sum() / stages)
    # x[l, s]: layer l lies at stage s; a layer's stage is not before that of the layer before it; the last number: load
    size = layers * stages + 1
    rows, low, high = [], [], []

    def constrain(weights: dict[int, float], least: float, most: float) -> None:
        row = np.zeros(size)
        for place, weight in weights.items():
            row[place] += weight
        rows.append(row)
        low.append(least)
        high.append(most)

    for layer in range(layers):
        constrain({layer * stages + s: 1.0 for s in range(stages)}, 1, 1)
        if layer:
            forward = {layer * stages + s: float(s) for s in range(stages)}
            constrain(forward | {(layer - 1) * stages + s: -float(s) for s in range(stages)}, 0, np.inf)
    for s in range(stages):
        load = {layer * stages + s: seconds[layer] for layer in range(layers)}
        constrain(load | {size - 1: -1.0}, -np.inf, -float(last if s == stages - 1 else 0))
        constrain({layer * stages + s: held_bytes[layer] for layer in range(layers)}, -np.inf, limits[s])
    goal = np.eye(size)[-1]
    whole = np.ones(size)
    whole[-1] = 0
    answer = milp(goal, integrality=whole.astype(int), bounds=Bounds(0, np.where(whole == 1, 1, np.inf)),
                  constraints=LinearConstraint(np.array(rows), low, high))  # fmt: skip
    times = [(float(t), count) for t, count in runs]
    memory = [float(10 - t) for t, _ in runs]
    if answer.x is None:
        with pytest.raises(InfeasibleError):
            cut(times, stages, last_extra=last, memory=memory, limits=limits.tolist(), minimum=0)
        return
    ends = np.cumsum(
        [0, *cut(times, stages, last_extra=last, memory=memory, limits=limits.tolist(), minimum=0)]
    )
    loads = np.array([seconds[a:b].sum() for a, b in itertools.pairwise(ends)])
    sizes = np.array([held_bytes[a:b].sum() for a, b in itertools.pairwise(ends)])
    loads[-1] += last
    # the program's own answer, from the raw seconds
    chosen = answer.x[:-1].reshape(layers, stages).argmax(axis=1)
    theirs = np.bincount(chosen, seconds, minlength=stages) + np.eye(stages)[-1] * last
    assert (sizes <= limits * CLOSE).all()
    assert loads.max() == pytest.approx(theirs.max(), rel=1e-9)


@settings(max_examples=25)
@given(spaces(most=8), stacks(), st.floats(0.0, 1.0))
def test_fewest_recomputed_layers(space: Space, software: Software, part: float) -> None:
    """The count in closed form is the least of all counts, tried one after the other."""
    space = replace(space, decisions=Decisions())
    cores = space.cores()
    grid = space.expand(cores, [1, 2]) if len(cores) else cores
    grid = grid.take(slice(0, 3000))
    if not len(grid):
        return
    w, cluster, batch = space.workload, space.cluster, space.batch

    def memory(rows: Grid) -> Array:
        return np.asarray(sum(memory_bytes(w, rows, cluster, software, batch).values()))

    none, whole = memory(grid.with_(recompute=0)), memory(grid)
    limit = float(np.quantile(whole, part))
    some = np.flatnonzero((none > limit) & (whole <= limit))
    if not len(some):
        return
    rows = grid.take(some)
    found = Pool(space, software, limit)._fewest(rows, none[some], whole[some])
    most = stage_layers(space, rows)
    least = most.copy()
    for count in range(int(most.max()), 0, -1):
        fits = memory(rows.with_(recompute_layers=np.minimum(count, most))) <= limit
        least = np.where((count < most) & fits, count, least)
    assert (found == least).all()
