"""What is asked of a market: the clusters and their prices, the limits, and what the search may choose.

In:  the words of a user, `30d`, `h100=2.5`, `h100:8x8`.
Out: Limits, clusters with prices, Decisions. What cannot be meant is refused here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cluster import Cluster, Device, load_cluster, load_device
from autopar.cost.money import DAY_S, count_text, duration_text
from autopar.errors import UsageError
from autopar.layout_check import runs_precision
from autopar.passes.decisions import Decisions, parse_decisions


@dataclass(frozen=True)
class Limits:
    """What a run may take; None: no limit. `max_cost` in `currency`, or in device hours where no price is known."""

    deadline_days: float | None = None
    max_cost: float | None = None

    def __str__(self) -> str:
        words = []
        if self.deadline_days is not None:
            words.append(f"within {duration_text(self.deadline_days * DAY_S)}")
        if self.max_cost is not None:
            words.append(f"for at most {count_text(self.max_cost).strip()}")
        return " ".join(words)


_UNITS = {"h": 1 / 24, "d": 1.0, "w": 7.0, "": 1.0}


def parse_days(text: str) -> float:
    """`30d`, `36h`, `6w`, `30` as days. Raises UsageError."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([hdw]?)\s*", text)
    days = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < days < math.inf:
        raise UsageError(f"{text!r} is no time", where="deadline", hint="30d, 36h or 6w")
    return days


def parse_prices(texts: Iterable[str]) -> dict[str, float]:
    """`h100=2.5` -> {"h100": 2.5}: currency per device hour. Raises UsageError."""
    prices: dict[str, float] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        try:
            price = float(value)
        except ValueError:
            price = 0.0
        if not equals or not name or not 0 < price < math.inf:
            raise UsageError(f"{text!r} is no price", where="price", hint="h100=2.5, per device hour")
        device = load_device(name).name
        if device in prices:
            raise UsageError(f"{device} has two prices", where="price", hint=f"one {device}=..")
        prices[device] = price
    return prices


def check_prices(prices: Mapping[str, float], clusters: Iterable[Cluster], currency: str | None) -> None:
    """Raise UsageError for a price of a device that no cluster has, or a currency that is none."""
    names = sorted({pool.device.name for cluster in clusters for pool in cluster.pools})
    for name in prices:
        if name not in names:
            raise UsageError(
                f"{name} has a price, but no cluster to compare has one",
                where="price",
                hint=f"--price {names[0]}=.., or --device {name}",
            )
    if currency is not None and re.fullmatch("[A-Z]{3}", currency) is None:
        raise UsageError(f"{currency!r} is no currency", where="currency", hint="three capitals, as in EUR")


def offered_clusters(
    names: Sequence[str] = (), *, devices: Sequence[str] = (), max_devices: int = 4096
) -> list[Cluster]:
    """The clusters of `names`, and of each device in `devices` 1, 2, 4, ... full nodes up to `max_devices`."""
    found = [load_cluster(name) for name in names]
    for name in devices:
        device = load_device(name)
        nodes, per_node = 1, device.devices_per_node
        if per_node > max_devices:
            raise UsageError(
                f"a node of {device.name} has {per_node} devices, at most {max_devices} are asked for",
                where="max-devices", hint=f"{per_node} or more",
            )  # fmt: skip
        while nodes * per_node <= max_devices:
            found.append(load_cluster(f"{device.name}:{nodes}x{per_node}"))
            nodes *= 2
    if not found:
        raise UsageError(
            "no cluster to search", where="budget", hint="--device h100 or --clusters h100:8x8,h100:64x8"
        )
    return list({cluster.name: cluster for cluster in found}.values())


def with_prices(cluster: Cluster, prices: Mapping[str, float], currency: str | None = None) -> Cluster:
    """The cluster with other prices of its devices, in `currency` (None: as it was)."""

    def priced(device: Device) -> Device:
        if device.name not in prices:
            return device
        sources = {**device.sources, "price_per_hour": "given"}
        return replace(device, price_per_hour=prices[device.name], sources=sources)

    names = {pool.device.name for pool in cluster.pools}
    return replace(
        cluster,
        device=priced(cluster.device),
        mixed=tuple(replace(pool, device=priced(pool.device)) for pool in cluster.mixed),
        currency=currency if currency and names <= set(prices) else cluster.currency,
    )


def asked(
    clusters: Sequence[Cluster],
    limits: Limits,
    fix: Sequence[str],
    forbid: Sequence[str],
    precision: str | None,
) -> tuple[Decisions, tuple[str, ...]]:
    """What the search may choose, and the precisions; refuses a cost limit that is none or where no price is known,
    and a precision that no cluster has."""
    if limits.max_cost is not None and not 0 < limits.max_cost < math.inf:
        raise UsageError(f"{limits.max_cost} is no cost", where="max-cost", hint="a number above 0")
    if limits.max_cost is not None and all(cluster.price_per_hour is None for cluster in clusters):
        device = clusters[0].device.name
        raise UsageError("no price is known", where="max-cost", hint=f"--price {device}=2.5, per device hour")
    precise = "fp32" if all(cluster.device.name == "cpu" for cluster in clusters) else "bf16"
    chosen = precise if precision is None else precision
    decisions, precisions = parse_decisions([*fix, f"precision={chosen}"], forbid), tuple(chosen.split("|"))
    if not any(runs_precision(one, cluster.device) for one in precisions for cluster in clusters):
        has = clusters[0].device
        raise UsageError(
            f"precision={chosen}: no cluster to compare has such a number format",
            where="precision",
            hint=f"one that {has.name} has: {', '.join(has.peak_tflops)}",
        )
    return decisions, precisions
