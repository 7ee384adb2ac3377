"""Estimate: seconds and bytes of one training step for any number of layouts at once, in closed form.

In:  a Workload, a Grid of layouts (arrays), a Cluster, a Software, sequences per step.
Out: arrays by kind of time (seconds per step of the slowest rank) and of memory (bytes of the fullest rank).

Everything is a numpy expression over the whole grid, so that a search prices a million layouts in a second and one
layout is the grid of size one: there is one meaning of a layout's cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.cluster import Cluster
from autopar.cost.grid import Array, Grid
from autopar.cost.held import held
from autopar.cost.layout_memory import layout_memory
from autopar.cost.layout_time import LayoutTime
from autopar.cost.rates import Data
from autopar.cost.software import Software
from autopar.workload import Workload


@dataclass(frozen=True)
class Estimates:
    """`time_s`, `memory_bytes`: kind -> array over the grid. `micro_batches`: per data rank and step."""

    grid: Grid
    time_s: dict[str, Array]
    memory_bytes: dict[str, Array]
    micro_batches: Array

    @property
    def step_s(self) -> Array:
        return np.asanyarray(sum(self.time_s.values()))

    @property
    def memory_total(self) -> Array:
        return np.asanyarray(sum(self.memory_bytes.values()))


def estimate(
    workload: Workload,
    grid: Grid,
    cluster: Cluster,
    software: Software,
    batch: int | Array,
    data: Data | None = None,
) -> Estimates:
    """Price every layout of the grid. `batch`: sequences per step over the whole cluster (one number, or one per
    layout). `data`: constants of devices other than those of calibration.toml."""
    micro_batches = np.maximum(1.0, batch / (grid.dp * grid.mbs))
    share = held(workload, grid)
    times = LayoutTime(workload, grid, share, cluster, software, micro_batches, data).kinds()
    return Estimates(grid, times, memory_bytes(workload, grid, cluster, software, batch), micro_batches)


def memory_bytes(
    workload: Workload,
    grid: Grid,
    cluster: Cluster,
    software: Software,
    batch: int | Array,
    *,
    rank: str = "fullest",
    kind: str = "device",
) -> dict[str, Array]:
    """Bytes of one rank by kind, of every layout of the grid; `rank` and `kind` as in `layout_memory`."""
    micro_batches = np.maximum(1.0, batch / (grid.dp * grid.mbs))
    return layout_memory(
        workload, grid, held(workload, grid), software, micro_batches,
        rank=rank, kind=kind, reserved_bytes=cluster.device.reserved_bytes,
    )  # fmt: skip
