"""Layout rows: the layouts of cores, priced with as little work as an incumbent allows.

In:  a Space, a Software, bytes that a rank has, cores.
Out: a Pool: rows with seconds in closed form, bounds and bytes; what cannot be better than the incumbent is left out.

Rows whose bound is not below the incumbent need no bytes. Rows that fit with nothing recomputed need no recompute, which
costs seconds; the others get it of all layers, and of the fewest layers with which they fit.
"""

from __future__ import annotations

import numpy as np

from autopar.cost.estimate import memory_bytes
from autopar.cost.grid import Array, Grid
from autopar.cost.held import held
from autopar.cost.layout_bound import beside, row_bound_s
from autopar.cost.layout_time import LayoutTime
from autopar.cost.software import Software
from autopar.passes.layout_space import Space, joined

_CHUNK = 60_000  # rows priced at a time


class Pool:
    """Priced rows so far, as columns: seconds in closed form, their bounds, bytes, and what `step_of` needs of a row:
    seconds beside the pipeline, and the share that goes with the whole. `spare`: rows that fit in less than this share
    of the limit need no recompute (less than 1 for those who ask what less memory would do)."""

    def __init__(self, space: Space, software: Software, limit: float, spare: float = 1.0) -> None:
        self.space, self.software, self.limit, self.spare = space, software, limit, spare
        self.grids: list[Grid] = []
        self.columns: list[Array] = []
        self.rows = 0
        self.fits = False

    def add(self, cores: Grid, below_s: float) -> None:
        """All layouts of the cores whose bound is below `below_s`."""
        kinds = self.space.recomputes
        plain = 0 in kinds
        grid = self.space.expand(cores, [0] if plain else kinds)
        for start in range(0, len(grid), _CHUNK):
            rows, memory = self._price(grid.take(slice(start, start + _CHUNK)), below_s)
            short = memory > self.spare * self.limit
            if plain and len(kinds) > 1 and short.any():
                self._recompute(rows.take(short), memory[short], [kind for kind in kinds if kind], below_s)

    def whole(self) -> tuple[Grid, Array]:
        """(all rows, [seconds, bounds, bytes, outside, share] of each)."""
        return joined(self.grids), np.concatenate(self.columns, axis=1)

    def _price(self, rows: Grid, below_s: float, memory: Array | None = None) -> tuple[Grid, Array]:
        """Keeps the rows whose bound is below `below_s`; (those, their bytes)."""
        self.rows += len(rows)
        workload, cluster, batch = self.space.workload, self.space.cluster, self.space.batch
        micro_batches = np.maximum(1.0, batch / (rows.dp * rows.mbs))
        model = LayoutTime(workload, rows, held(workload, rows), cluster, self.software, micro_batches)
        times = model.kinds()
        bound = row_bound_s(model, times)
        near = np.flatnonzero(bound < below_s)
        rows = rows.take(near)
        memory = self._memory(rows) if memory is None else memory[near]
        columns = (np.asarray(sum(times.values())), bound, *beside(times, self.software))
        seconds, bound, outside, share = (column[near] for column in columns)
        self.grids.append(rows)
        self.columns.append(np.stack([seconds, bound, memory, outside, share]))
        self.fits = self.fits or bool((memory <= self.limit).any())
        return rows, memory

    def _memory(self, rows: Grid) -> Array:
        space = self.space
        found = memory_bytes(space.workload, rows, space.cluster, self.software, space.batch)
        return np.asarray(sum(found.values()))

    def _recompute(self, rows: Grid, none: Array, kinds: list[int], below_s: float) -> None:
        """Of rows that are short of memory (`none`: their bytes) those that recompute all, or just enough, layers."""
        partly = self.space.partial_recompute
        for kind in kinds:
            whole = rows.with_(recompute=kind)
            memory = self._memory(whole)
            self._price(whole, below_s, memory)
            if not partly:
                continue
            some = np.flatnonzero((memory <= self.limit) & (none > self.limit))
            counts = self._fewest(whole.take(some), none[some], memory[some])
            fewer = counts < stage_layers(self.space, rows)[some]
            if fewer.any():
                some = some[fewer]
                self._price(rows.take(some).with_(recompute=kind, recompute_layers=counts[fewer]), below_s)

    def _fewest(self, rows: Grid, none: Array, whole: Array) -> Array:
        """The fewest layers per stage whose recompute makes each row fit, for rows that fit with all of them (`whole`:
        bytes) and not with none. Bytes are linear in the count at each moment of a step, so their peak is convex: the
        count that a chord says fits does. It is tried, then one less, in turn until one less does not fit."""
        few, enough = np.zeros(len(rows), dtype=np.int64), stage_layers(self.space, rows)
        above, below = none.copy(), whole.copy()  # bytes at `few` and at `enough`
        chord = True
        while len(wide := np.flatnonzero(enough - few > 1)):
            low, high = few[wide], enough[wide]
            share = (above[wide] - self.limit) / (above[wide] - below[wide])
            tried = np.ceil(low + share * (high - low) - 1e-9).astype(np.int64) if chord else high - 1
            tried = np.clip(tried, low + 1, high - 1)
            size = self._memory(rows.take(wide).with_(recompute_layers=tried))
            fits = size <= self.limit
            enough[wide[fits]], below[wide[fits]] = tried[fits], size[fits]
            few[wide[~fits]], above[wide[~fits]] = tried[~fits], size[~fits]
            chord = not chord
        return enough


def stage_layers(space: Space, rows: Grid) -> Array:
    """Layers of the fullest stage: as many can be recomputed."""
    return np.asarray(np.ceil(space.workload.depth / rows.pp), dtype=np.int64)
