"""Validation: how far predictions of step times were off on published runs that the constants were not fitted to.

In:  a Workload and a device; the errors that bench/calibrate.py stored (validation.toml, leave one source out).
Out: a Band for the kind of model and device nearest to what is asked.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from autopar.workload import Attention, Stream, Workload

_FEWEST = 10  # published runs, below which a band says too little


@dataclass(frozen=True)
class Band:
    """Errors of published step times, |predicted / measured - 1|: half are below `median`, nine tenths below `p90`.
    `bias`: the median signed error. `about`: of which runs; `rows`: how many."""

    about: str
    rows: int
    median: float
    p90: float
    bias: float

    def __str__(self) -> str:
        return (
            f"median {100 * self.median:.1f} %, 90th percentile {100 * self.p90:.0f} %,"
            f" bias {100 * self.bias:+.1f} % ({self.rows} runs: {self.about})"
        )


def kind_of(workload: Workload) -> str:
    """hybrid (with state-space layers), mla (latent attention), moe or dense."""
    ops = [op for layer, _ in workload.layers for op in layer.ops]
    if any(isinstance(op, Stream) and op.kind == "scan" for op in ops):
        return "hybrid"
    if any(isinstance(op, Attention) and op.qk_dim != op.v_dim for op in ops):
        return "mla"
    return "moe" if workload.experts else "dense"


@cache
def validation_data() -> dict[str, Any]:
    """`validation.toml`; empty where the constants were shipped without it."""
    path = files("autopar.cost").joinpath("validation.toml")
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def band(workload: Workload, device: str) -> Band | None:
    """The band of the workload's kind on the device; of its kind, or of all runs, where those are too few."""
    errors = validation_data().get("errors", {})
    kind = kind_of(workload)
    for about in (f"{kind}, {device}", kind, "all"):
        found = errors.get(about)
        if found and found["rows"] >= _FEWEST:
            return Band(about, found["rows"], found["median"], found["p90"], found["bias"])
    return None
