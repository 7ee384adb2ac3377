"""Pricing: published runs at their own layouts, all runs of one workload on one kind of cluster at once.

In:  Runs (published_rows.py). Out: Batches, one grid each; and what the simulator says of every run.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from published_rows import Run

from autopar.cluster import Cluster, Device, load_device
from autopar.cost.estimate import Estimates, estimate, memory_bytes
from autopar.cost.grid import Grid
from autopar.cost.software import changed, load_software, software_data, stack_of
from autopar.errors import AutoparError
from autopar.hardware import fitted
from autopar.workload import Workload

# What a row says of its machines where they differ from the device file: GB/s per device and direction.
NETWORKS = {
    "omnipath": 6.25,  # Jean Zay: 4 Omni-Path adapters of 100 Gb/s for 8 A100 (BLOOM chronicles)
    "ethernet": 25.0,  # llm-foundry: 1600 Gb/s RoCE for 8 A100; InternEvo: 4 x 100 Gb/s says so in its notes
    "efa": 25.0,
}


@dataclass(frozen=True)
class Batch:
    """Runs of one workload on one kind of cluster with one software."""

    runs: tuple[Run, ...]
    places: tuple[int, ...]
    workload: Workload
    grid: Grid
    cluster: Cluster
    stack: str
    options: frozenset[str]
    sequences: Any

    def price(
        self, software: Mapping[str, Any] | None = None, devices: Mapping[str, Any] | None = None
    ) -> Estimates:
        """`software`, `devices`: constants other than those that ship."""
        stack = changed(load_software(self.stack, software), self.options, software)
        return estimate(self.workload, self.grid, self.cluster, stack, self.sequences, devices)

    def memory(self, rank: str, kind: str) -> dict[str, Any]:
        """Bytes by kind of one rank, counted as a row counts them."""
        stack = changed(load_software(self.stack), self.options)
        return dict(
            memory_bytes(self.workload, self.grid, self.cluster, stack, self.sequences, rank=rank, kind=kind)
        )


def batches(runs: Sequence[Run]) -> tuple[list[Batch], list[tuple[str, str]]]:
    """(the runs in batches, what no batch takes and why)."""
    found: dict[Any, list[int]] = defaultdict(list)
    refused = []
    clusters: dict[Any, Cluster] = {}
    for place, run in enumerate(runs):
        about = frozenset(filter(_matters, {*run.options, run.framework}))
        machine = (run.device, run.per_node, frozenset(filter(_machine, about)))
        try:
            if machine not in clusters:
                clusters[machine] = cluster_of(run)
        except AutoparError as error:
            refused.append((run.id, str(error)))
            continue
        stack = stack_of(run.framework, run.year)
        found[replace(run.shape, name=""), run.seq, machine, stack, about].append(place)
    out = []
    for (shape, seq, machine, stack, about), places in found.items():
        chosen = tuple(runs[place] for place in places)
        out.append(
            Batch(
                chosen,
                tuple(places),
                shape.workload(seq),
                Grid.of([run.layout for run in chosen]),
                clusters[machine],
                stack,
                about,
                np.array([float(run.batch) for run in chosen]),
            )
        )
    return out, refused


def _machine(option: str) -> bool:
    return option in (*NETWORKS, "hbm2e", "nvlink-400") or option.startswith("network=")


def _matters(option: str) -> bool:
    """Whether an option changes the machine or the software."""
    return _machine(option) or option in software_data()["option"] or option.startswith("activation-offload=")


def cluster_of(run: Run) -> Cluster:
    """The machines of a run. The number of nodes says nothing here, so it is as small as holds the run."""
    device: Device = load_device(run.device)
    links = fitted(device.links, device.devices_per_node, min(run.per_node, device.devices_per_node))
    said = [float(option.partition("=")[2]) for option in run.options if option.startswith("network=")]
    for gbps in said or [gbps for name, gbps in NETWORKS.items() if name in run.options]:
        if len(links) > 1 and links[-1].gbps > gbps:
            links = (*links[:-1], replace(links[-1], gbps=gbps))
    if (
        "omnipath" in run.options and len(links) > 1
    ):  # driven by the host's cores, not by the adapter: assumed
        links = (*links[:-1], replace(links[-1], efficiency=0.5))
    if "nvlink-400" in run.options:
        links = tuple(replace(one, gbps=200.0) if one.name == "nvlink" else one for one in links)
    if "hbm2e" in run.options and run.device == "h100":
        device = replace(device, memory_gbps=2400.0)
    per_node = min(run.per_node, device.devices_per_node)
    return Cluster(device.name, device, max(1, -(-run.gpus // per_node)), per_node, links)
