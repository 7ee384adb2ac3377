"""Ring: seconds of what attention sends when its rows and its keys are split over one axis.

In:  the cluster, how the axis lies on it, the bytes of the keys and values that one device holds.
Out: (forward seconds, backward seconds).

Every device hands what it has to its neighbour, all at once, so a move takes as long as over the slowest link between
neighbours. Forward: keys and values make all moves but the last. Backward: they do so again, and their gradients, in
the precision of the sums, make one more, home. That the moves run beside the computation is not counted.
"""

from __future__ import annotations

from autopar.cluster import Cluster
from autopar.cost.communication import group_levels


def moves(size: int, visible: float, *, windowed: bool) -> int:
    """How often keys move around a ring of `size`: with a causal window, which leaves `visible` of all scores, no
    further than some row can look."""
    return min(size - 1, int(visible * size) + 1) if windowed else size - 1


def ring_s(
    cluster: Cluster, size: int, stride: int, held_bytes: float, gradient_bytes: float, count: int
) -> tuple[float, float]:
    """`held_bytes`: keys and values of one device; `gradient_bytes`: their gradients; `count`: moves of the keys."""
    levels = group_levels(cluster.links, size, stride)
    if not levels:
        return 0.0, 0.0
    link = levels[-1].link
    latency_s = link.collective_latency_s + link.latency_s

    def move_s(sent_bytes: float) -> float:
        return latency_s + sent_bytes / link.bytes_per_s

    forward = count * move_s(held_bytes)
    return forward, forward + (count + 1) * move_s(gradient_bytes)
