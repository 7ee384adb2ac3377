"""Prices: what the searches ask of the cost model, for one cluster, mesh and precision.

prices = Prices.of(cluster, mesh, "bf16", problem)
prices.step_s(Step("all_gather", "tp", 1), local_bytes=2**20) -> (forward seconds, backward seconds)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.cluster import Cluster
from autopar.cost.communication import collective_s, fixed_and_rate
from autopar.cost.compute import Roofline
from autopar.errors import UsageError
from autopar.mesh import Mesh
from autopar.problem import Problem
from autopar.program import ITEM_BYTES
from autopar.sharding import COLLECTIVES, Step, sent_bytes

PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class Prices:
    """`item_bytes`: bytes per element by dtype, as the run holds it. `fused`: chains of pointwise ops run as one
    kernel. `parameter_s`: seconds per micro-batch that each element of a trainable parameter a rank stores costs
    (optimizer traffic, data-parallel gradient reduction). `micro_batches`: how many share the sums of whole parameters'
    gradients, which are made once per step."""

    cluster: Cluster
    mesh: Mesh
    precision: str
    roofline: Roofline
    item_bytes: Mapping[str, int] = field(hash=False)
    fused: bool = True
    parameter_s: float = 0.0
    micro_batches: int = 1

    @staticmethod
    def of(
        cluster: Cluster,
        mesh: Mesh,
        precision: str,
        problem: Problem,
        *,
        parameter_s: float = 0.0,
        micro_batches: int = 1,
    ) -> Prices:
        """Prices of a run in `precision`; on CPU devices the ops run one by one, elsewhere compiled and fused."""
        if precision not in PRECISIONS:
            raise UsageError(f"unknown precision {precision!r}", hint=f"one of {', '.join(PRECISIONS)}")
        roofline = Roofline.of(cluster.device, precision)
        fused = cluster.device.name != "cpu"
        sizes = item_bytes(problem, precision)
        return Prices(cluster, mesh, precision, roofline, sizes, fused, parameter_s, micro_batches)

    def collective_s(self, kind: str, axis: str, total_bytes: float) -> float:
        return collective_s(self.cluster, kind, self.mesh.sizes[axis], self.mesh.stride(axis), total_bytes)

    def state_sum_s(self, axis: str, local_bytes: float) -> float:
        """Seconds per micro-batch of summing a whole parameter's gradient over `axis` once per step, in buckets large
        enough that only bytes count."""
        _, rate = fixed_and_rate(
            self.cluster.links, "all_reduce", self.mesh.sizes[axis], self.mesh.stride(axis)
        )
        return rate * local_bytes / self.micro_batches

    def step_s(self, step: Step, local_bytes: float) -> tuple[float, float]:
        """(forward, backward) seconds of one reshard step that starts from `local_bytes`."""
        kinds = COLLECTIVES[step.kind, step.grad_sums]
        sizes = sent_bytes(step, local_bytes, self.mesh.sizes[step.axis])
        forward, backward = (
            self.collective_s(kind, step.axis, size) if kind else 0.0
            for kind, size in zip(kinds, sizes, strict=True)
        )
        return forward, backward


def item_bytes(problem: Problem, precision: str) -> dict[str, int]:
    """Bytes per element as the run holds them.

    A model captured in fp32 runs in bf16 with its floats halved; one captured in bf16 keeps its own fp32 casts. In
    fp32 all floats are fp32.
    """
    sizes = dict(ITEM_BYTES)
    if precision == "fp32":
        sizes["bfloat16"] = sizes["float16"] = 4
    elif not any(value.info.dtype == "bfloat16" for value in problem.values.values()):
        sizes["float32"] = 2
    return sizes
