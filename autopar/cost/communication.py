"""Communication: seconds of one collective along a mesh axis, hierarchical alpha-beta over the cluster's links.

In:  a Cluster, how a group lies on it (size and stride in ranks), the kind of collective and its bytes.
Out: seconds.

A group of `n` ranks, `stride` apart, has at each link level some members in one domain. Where it crosses several
levels the collective is done level by level (reduce-scatter inside a node, then between the peers of the nodes on
the pieces, as NCCL and Megatron's hierarchical groups do), so an outer level moves only the piece that the inner
one leaves. Bandwidths are per device: the groups of a mesh run side by side, each on its own devices' share.

Byte conventions (those of `sharding.sent_bytes`): all_gather the gathered bytes, reduce_scatter the bytes before
scattering, all_reduce and all_to_all the bytes one device holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from autopar.cluster import Cluster, Link

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class Level:
    """The part of a group at one link level: `fan` sub-groups joined there, each of `inner` members."""

    link: Link
    inner: int
    fan: int


def group_levels(links: tuple[Link, ...], size: int, stride: int) -> tuple[Level, ...]:
    """The levels that a group of `size` ranks, `stride` apart, crosses; innermost first, none for size 1.

    A domain of `d` devices holds `d // stride` neighbours of the group, at least one and at most all. Where the
    group does not fill domains evenly the fan is rounded up, which is the slowest member's view.
    """
    levels = []
    inner = 1
    for link in links:
        reach = size if link.size == 0 else max(1, min(size, link.size // stride))
        if reach > inner:
            levels.append(Level(link, inner, -(-reach // inner)))
            inner = reach
    return tuple(levels)


def collective_s(cluster: Cluster, kind: str, size: int, stride: int, total_bytes: float) -> float:
    """Seconds of one collective; see `fixed_and_rate`, which it applies."""
    fixed_s, s_per_byte = fixed_and_rate(cluster.links, kind, size, stride)
    return fixed_s + s_per_byte * total_bytes


def send_s(cluster: Cluster, distance: int, total_bytes: float) -> float:
    """Seconds to send bytes from one device to the one `distance` ranks away, as pipeline stages do.

    One hop over the outermost link that the pair crosses: latency_s + v / bytes_per_s. From pool to pool of a mixed
    cluster that is the link that joins them, `cluster.links[-1]`.
    """
    link = group_levels(cluster.links, 2, distance)[-1].link
    return link.latency_s + total_bytes / link.bytes_per_s


@lru_cache(maxsize=16384)
def fixed_and_rate(links: tuple[Link, ...], kind: str, size: int, stride: int) -> tuple[float, float]:
    """(seconds before the first byte, seconds per byte): time = collective latency + hops * latency + v / (bandwidth
    * efficiency), the form the device files' numbers were fitted with, summed over the levels crossed.

    With k = fan of a level and m = members below it, a ring moves per device (Thakur, Rabenseifner and Gropp, 2005,
    "Optimization of Collective Communication Operations in MPICH", sections 4.1-4.5):
      all_gather, reduce_scatter   v/m * (k-1)/k bytes in k-1 hops
      all_reduce                   twice the bytes; hops the fewer of a ring's 2(k-1) and a tree's 2*ceil(log2 k)
      all_to_all                   v * (members of the level - members below) / n bytes in k-1 hops, the levels at once
    """
    if kind not in KINDS:
        raise ValueError(f"no collective {kind!r}: one of {', '.join(KINDS)}")
    fixed_s = rate = 0.0
    for level in group_levels(links, size, stride):
        link, k = level.link, level.fan
        bandwidth = link.bytes_per_s
        hops = min(2 * (k - 1), 2 * math.ceil(math.log2(k))) if kind == "all_reduce" else k - 1
        latency_s = link.collective_latency_s + hops * link.latency_s
        if kind == "all_to_all":
            here = min(size, level.inner * k) - level.inner
            fixed_s, rate = max(fixed_s, latency_s), max(rate, here / size / bandwidth)
        else:
            share = (k - 1) / k / level.inner * (2 if kind == "all_reduce" else 1)
            fixed_s, rate = fixed_s + latency_s, rate + share / bandwidth
    return fixed_s, rate
