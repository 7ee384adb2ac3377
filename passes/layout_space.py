"""Layout space: every layout that can run a workload on a cluster, as a Grid.

In:  a Workload, the number of devices, sequences per step, what the user decided.
Out: `cores`, the choices that set what a rank computes (tp, cp, pp, ep, etp, mbs, precision, sp), and `expand`, which
     gives each core every choice of schedule, virtual stages, ZeRO level, recompute and offload.

What the cost model can tell to be never better is left out: GPipe (as slow as 1F1B, and more memory), tp without the
split sequence where tp divides it. Micro-batch sizes and virtual stages are those of the two lists below, unless the
decisions name others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

from autopar.cluster import Cluster
from autopar.cost.grid import Grid, code_of
from autopar.layout import ORDERS, PRECISIONS, RECOMPUTE, SCHEDULES, Layout
from autopar.layout_check import ENDS, runs_precision
from autopar.passes.decisions import Decisions
from autopar.workload import Attention, Matmul, Workload

_MICRO = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_VIRTUAL = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 32)
_MOST_TP = 64
_LEAST_TOKENS = 128  # per rank of cp: below that a ring moves less than a kernel takes to launch
_PLAIN, _INTER, _ZERO, _VEE, _DUAL = (
    SCHEDULES.index(word) for word in ("1f1b", "interleaved", "zb-h1", "zbv", "dualpipev")
)


@dataclass(frozen=True)
class Space:
    """`batch`: sequences per step over the whole cluster. `precisions`: codes allowed unless the user fixes one."""

    workload: Workload
    cluster: Cluster
    batch: int
    decisions: Decisions = field(default_factory=Decisions)
    precisions: tuple[str, ...] = ("bf16",)

    def allowed(self, name: str, values: Sequence[int]) -> list[int]:
        """Of `values` those that the decisions leave, and those that the decisions name beyond them."""
        named = self.decisions.only(name)
        candidates = sorted(set(values) | set(named or ())) if named is not None else list(values)
        kept = np.array(candidates)
        mask = np.ones(len(kept), dtype=bool)
        for word in self.decisions.words:
            if word.name == name:
                mask &= word.allows(Grid({name: kept}))
        return [int(value) for value in kept[mask]]

    @cached_property
    def tensor_ways(self) -> list[int]:
        """Sizes of tp that divide every matmul it splits."""
        splits = [
            op
            for layer, _ in self.workload.layers
            for op in layer.ops
            if isinstance(op, Matmul) and not op.experts
        ]
        dims = {
            op.ways or (op.n if op.split == "column" else op.k)
            for op in splits
            if op.split in ("column", "row")
        }
        dims |= {
            op.heads for layer, _ in self.workload.layers for op in layer.ops if isinstance(op, Attention)
        }
        if not dims:
            return [1]
        common = math.gcd(*dims)
        return [ways for ways in divisors(common) if ways <= _MOST_TP and self._shares_keys(ways)]

    def _shares_keys(self, tp: int) -> bool:
        """Whether each rank has whole key and value heads, or as many ranks share each."""
        heads = {
            op.kv_heads for layer, _ in self.workload.layers for op in layer.ops if isinstance(op, Attention)
        }
        return all(count % tp == 0 or tp % count == 0 for count in heads)

    @cached_property
    def _expert_gcd(self) -> int:
        """What etp must divide: the widths of the experts that it splits."""
        ops = [op for layer, _ in self.workload.layers for op in layer.expert_matmuls]
        return math.gcd(
            *(op.n if op.split == "column" else op.k for op in ops if op.split in ("column", "row"))
        )

    def cores(self) -> Grid:
        """Every (tp, cp, pp, ep, etp, mbs, precision, sp) that divides. The sequence is split by tp where it can be."""
        w, world = self.workload, self.cluster.device_count
        experts = [layer.experts for layer, _ in w.layers if layer.experts]
        seq_ways = [
            ways for ways in divisors(world) if w.seq % (2 * ways) == 0 and w.seq // ways >= _LEAST_TOKENS
        ]
        tps = [ways for ways in self.allowed("tp", self.tensor_ways) if ways in self.tensor_ways]
        cps = [ways for ways in self.allowed("cp", [1, *seq_ways]) if ways == 1 or ways in seq_ways]
        pps = [
            ways
            for ways in self.allowed("pp", [ways for ways in divisors(world) if ways <= w.depth])
            if ways <= w.depth
        ]
        precisions = self.allowed("precision", [code_of("precision", name) for name in self.precisions])
        precisions = [code for code in precisions if runs_precision(PRECISIONS[code], self.cluster.device)]
        expert_gcd = math.gcd(*experts) if experts else 1
        eps = [ways for ways in self.allowed("ep", divisors(expert_gcd)) if expert_gcd % ways == 0]
        micro = self.allowed("mbs", [size for size in _MICRO if size <= self.batch])
        rows = []
        for tp in tps:
            etps = self.allowed("etp", sorted({1, tp})) if experts else [1]
            etps = [ways for ways in etps if ways in (1, tp) and self._expert_gcd % ways == 0]
            for cp in cps:
                splits = self._sequence_splits(tp, cp)
                for pp in pps:
                    dp, rest = divmod(world, tp * cp * pp)
                    if rest or self.batch % dp:
                        continue
                    each = self.batch // dp
                    sizes = [size for size in micro if each % size == 0]
                    for ep in eps:
                        for etp in etps:
                            if (dp * cp * tp) % (ep * etp) == 0:
                                core = (dp, tp, cp, pp, ep, etp)
                                rows += [
                                    (*core, *rest) for rest in itertools.product(sizes, precisions, splits)
                                ]
        table = np.array(sorted(set(rows)), dtype=np.int64).reshape(-1, 9)
        names = ("dp", "tp", "cp", "pp", "ep", "etp", "mbs", "precision", "sp")
        grid = _with_defaults(dict(zip(names, table.T, strict=True)))
        return grid.take(self._mask(grid, names))

    def _sequence_splits(self, tp: int, cp: int) -> list[int]:
        """Values of sp: split where tp divides a rank's tokens, unless the decisions say otherwise."""
        divides = self.workload.seq % (cp * tp) == 0
        return [sp for sp in self.allowed("sp", [int(divides)]) or [0] if divides or not sp]

    def _mask(self, grid: Grid, names: Sequence[str]) -> Any:
        mask = np.ones(len(grid), dtype=bool)
        for word in self.decisions.words:
            if word.name in names:
                mask &= word.allows(grid)
        return mask

    @cached_property
    def _zero(self) -> list[int]:
        return self.allowed("zero", [0, 1, 2, 3])

    @cached_property
    def recomputes(self) -> list[int]:
        """Codes of recompute that the decisions leave."""
        return self.allowed("recompute", range(len(RECOMPUTE)))

    @property
    def partial_recompute(self) -> bool:
        """Whether the search may recompute as few layers as make a row fit: where nothing is said of them."""
        return not any(word.name == "recompute_layers" for word in self.decisions.words)

    @cached_property
    def _offload(self) -> list[int]:
        return self.allowed("offload", [0, 1] if self.cluster_offloads else [0])

    @property
    def cluster_offloads(self) -> bool:
        return getattr(self.cluster.device, "host_gbps", None) is not None

    def expand(self, cores: Grid, recomputes: Sequence[int] | None = None) -> Grid:
        """Every choice of the rest for each row of `cores`; of `recomputes` only (codes; None: all allowed)."""
        schedules, virtual = self._schedules()
        rest = [
            (vpp, schedule, zero, recompute, layers, offload)
            for schedule, vpp in zip(schedules, virtual, strict=True)
            for zero in self._zero
            for recompute in (self.recomputes if recomputes is None else recomputes)
            for layers in self._recompute_layers(recompute)
            for offload in self._offload
        ]
        table = np.array(rest, dtype=np.int64).reshape(-1, 6)
        count, times = len(cores), len(table)
        columns = {name: np.repeat(column, times) for name, column in cores.columns.items()}
        for index, name in enumerate(("vpp", "schedule", "zero", "recompute", "recompute_layers", "offload")):
            columns[name] = np.tile(table[:, index], count)
        grid = Grid(columns)
        grid = grid.take(self._runs(grid))
        grid = self._ordered(self._sharded(grid))
        # "all layers" is as many as the fullest stage has
        most = np.ceil(self.workload.depth / grid.pp).astype(np.int64)
        layers = np.where(grid.recompute_layers < 0, most, grid.recompute_layers)
        named = grid.with_(recompute_layers=np.where(grid.recompute == 0, 0, layers))
        return grid.take(self.decisions.allows(named) & (grid.recompute_layers < most))

    def _recompute_layers(self, recompute: int) -> list[int]:
        named = self.decisions.only("recompute_layers") if recompute else None
        return [-1] if named is None else [-1, *(count for count in named if count)]

    def _ordered(self, grid: Grid) -> Grid:
        """With dp outermost too, where that puts all stages of a replica into one domain of the fastest link: its
        sends then stay inside, and gradients cross. Experts and hybrid shards keep to ranks next to each other."""
        outer = ORDERS.index("dp-outer")
        within = self.cluster.links[0].size or self.cluster.device_count
        named = self.decisions.only("order")
        fits = (grid.pp > 1) & (grid.dp > 1) & (grid.shard == 0) & (grid.ep * grid.etp <= grid.tp * grid.cp)
        if named is None:
            fits &= grid.tp * grid.cp * grid.pp <= within
        elif outer not in named:
            return grid
        return joined([grid, grid.take(fits).with_(order=outer)]) if fits.any() else grid

    def _schedules(self) -> tuple[list[int], list[int]]:
        pairs = [(_PLAIN, 1), (_ZERO, 1), (_VEE, 2), (_DUAL, 2)] + [
            (_INTER, vpp) for vpp in _VIRTUAL if vpp > 1
        ]
        if (named := self.decisions.only("schedule")) is not None:
            pairs += [(code, 1) for code in named if code == SCHEDULES.index("gpipe")]
        if (named := self.decisions.only("vpp")) is not None:
            pairs += [(_INTER, vpp) for vpp in named if vpp > 1 and (_INTER, vpp) not in pairs]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    def _runs(self, grid: Grid) -> Any:
        """Rows that a runtime can run: chunks that hold layers, schedules that have enough micro-batches."""
        g = grid
        m = self.batch // (g.dp * g.mbs)
        mask = (g.pp > 1) | ((g.vpp == 1) & (g.schedule == _PLAIN))
        mask &= g.pp * g.vpp <= self.workload.depth + np.where(g.vpp > 1, ENDS, 0)
        mask &= (g.schedule != _INTER) | (m % g.pp == 0)
        mask &= (g.schedule != _DUAL) | (m >= 2 * g.pp)
        mask &= ((g.schedule != _ZERO) & (g.schedule != _VEE)) | (m >= g.pp)
        ranks = g.dp * g.cp
        mask &= (g.zero == 0) | (ranks > 1)
        return mask

    def _sharded(self, grid: Grid) -> Grid:
        """Hybrid shard: for ZeRO, one copy over all data ranks, or over those of one domain of each link level."""
        ranks = grid.dp * grid.cp
        parts = [grid]
        for link in self.cluster.links:
            if link.size:
                shard = link.size // grid.tp
                fits = (grid.zero >= 1) & (shard > 1) & (shard < ranks) & (ranks % np.maximum(1, shard) == 0)
                fits &= (grid.zero < 3) | (shard % grid.cp == 0)
                if fits.any():
                    part = grid.take(fits)
                    parts.append(Grid({**part.columns, "shard": shard[fits]}))
        if (named := self.decisions.only("shard")) is not None:
            for size in named:
                fits = (grid.zero >= 1) & (size > 1) & (size < ranks) & (ranks % max(1, size) == 0)
                fits &= (grid.zero < 3) | (size % grid.cp == 0)
                part = grid.take(fits)
                parts.append(Grid({**part.columns, "shard": np.full(len(part), size)}))
        return joined(parts)


def joined(parts: Sequence[Grid]) -> Grid:
    names = parts[0].columns
    return Grid({name: np.concatenate([part.columns[name] for part in parts]) for name in names})


def divisors(number: int) -> list[int]:
    small = [ways for ways in range(1, math.isqrt(number) + 1) if number % ways == 0]
    return sorted({*small, *(number // ways for ways in small)})


def _with_defaults(columns: Mapping[str, Any]) -> Grid:
    """The columns and, for what they lack, those of a default Layout."""
    count = len(next(iter(columns.values())))
    one = Grid.of([Layout()])
    return Grid(
        {
            member.name: columns.get(member.name, np.repeat(getattr(one, member.name), count))
            for member in fields(Layout)
            if member.name in one.columns
        }
    )
