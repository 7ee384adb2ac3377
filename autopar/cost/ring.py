"""Ring: seconds of what attention sends when its rows and its keys are split over one axis.

In:  the cluster, how the axis lies on it, the bytes that one device holds.
Out: (forward seconds, backward seconds).

Every device hands what it has to its neighbour, all at once, so a move takes as long as over the slowest link between
neighbours. Forward: keys and values make all moves but the last. Backward: they do so again, and their gradients, in
the precision of the sums, make one more, home. That the moves run beside the computation is not counted.

In zigzag (`autopar/attention_ring.py`) queries, keys and values change hands before, and the result after, each in one
exchange of all that a device holds; backward the gradients do. Devices at the two ends of the ring exchange with each
other, so that is priced like a move over the slowest link, with the bytes of all four. What it buys is that no device
computes twice the mean (`rules.attention.row_excess`).
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.cost.communication import group_levels

EXCHANGES = 4  # of queries, keys, values and the result; one after the other


@dataclass(frozen=True)
class Ring:
    """Per device. `held_bytes`: keys and values; `gradient_bytes`: their gradients; `count`: moves of the keys;
    `exchanged_bytes`: what changes hands for an even load, 0 in order."""

    axis: str
    held_bytes: float
    gradient_bytes: float
    count: int
    exchanged_bytes: float = 0.0

    @property
    def sent_bytes(self) -> float:
        """Forward and backward."""
        around = 2 * self.count * self.held_bytes + (self.count + 1) * self.gradient_bytes
        return around + 2 * self.exchanged_bytes


def moves(size: int, visible: float, *, windowed: bool) -> int:
    """How often keys move around a ring of `size`: with a causal window, which leaves `visible` of all scores, no
    further than some row can look."""
    return min(size - 1, int(visible * size) + 1) if windowed else size - 1


def ring_s(cluster: Cluster, size: int, stride: int, ring: Ring) -> tuple[float, float]:
    levels = group_levels(cluster.links, size, stride)
    if not levels:
        return 0.0, 0.0
    link = levels[-1].link
    latency_s = link.collective_latency_s + link.latency_s

    def move_s(sent_bytes: float) -> float:
        return latency_s + sent_bytes / link.bytes_per_s

    forward = ring.count * move_s(ring.held_bytes)
    backward = forward + (ring.count + 1) * move_s(ring.gradient_bytes)
    if not ring.exchanged_bytes:
        return forward, backward
    exchange = EXCHANGES * latency_s + ring.exchanged_bytes / link.bytes_per_s
    return forward + exchange, backward + exchange
