"""What hardware is: Link, Device, Pool and Cluster, several unlike pools seen as one, and what-ifs.

    Cluster: 64 nodes of 8 x NVIDIA H100 SXM5 80GB, nvlink joins 8, infiniband joins all
    cluster.pools                       ->  its equal parts, without the nodes that are dead
    cluster.with_(gpus=512, inter_bw=2) ->  the same with other numbers

The dataclasses are also the schema of the device files, of the YAML files and of the cluster in a saved plan;
`autopar.cluster` reads those, and is what other modules import from.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from autopar.cluster_files import (
    DTYPES,
    EXPECTED,
    MAX_DEVICES,
    STRICT,
    AtLeastOne,
    Count,
    Currency,
    Dtype,
    Index,
    Kind,
    MemoryBytes,
    Name,
    NotNegative,
    Positive,
    ReservedBytes,
    Share,
    Where,
    dotted,
    near,
    validated,
)
from autopar.errors import ClusterError, UsageError

_FALLBACK = {"bf16": ("bf16", "fp16", "fp32"), "fp16": ("fp16", "fp32"), "tf32": ("tf32", "fp32")}
_DTYPE_ALIASES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
# What a cluster is taken to be where nobody says; `Cluster.assumed` gives the sources.
FAILURES_PER_DEVICE_HOUR = 419 / (54 * 24 * 16384)
RESTART_S = 600.0
STORAGE_GBPS_PER_DEVICE = 2000 / 16384
_DEFAULT_SOURCES = {
    "failures_per_device_hour": "The Llama 3 Herd of Models, section 3.3.4: 419 unexpected interruptions in 54 days"
    " on 16,384 H100",
    "restart_s": "assumed: ten minutes to replace a node, start every process and read the checkpoint",
    "storage_gbps": "assumed: 2 TB/s sustained for 16,384 devices, the Tectonic storage of The Llama 3 Herd of"
    " Models (section 3.3.1), in proportion to the devices",
}


def _levels(links: tuple[Link, ...]) -> tuple[Link, ...]:
    sizes = [link.size for link in links]
    growing = sorted(set(sizes[:-1])) == sizes[:-1] and 0 not in sizes[:-1]
    if not links or sizes[-1] != 0 or not growing or len({link.name for link in links}) != len(links):
        text = "has the sizes {sizes}, expected distinct levels that grow and end in 0 (all)"
        raise PydanticCustomError("levels", text, {"sizes": str(sizes)})
    return links


@dataclass(frozen=True)
class Link:
    """One level of the network: domains of `size` devices joined at `gbps` per device, one direction.

    A collective of n devices in one domain that moves v bytes per device in h hops is modelled as
    collective_latency_s + h * latency_s + v / bytes_per_s; its numbers were fitted with that. `oversubscription`
    (3 where a leaf has three times the bandwidth to its devices that it has to the spine) divides the bandwidth.
    """

    __pydantic_config__ = STRICT
    name: Name
    size: Index  # 0: joins all devices
    gbps: Positive
    efficiency: Share
    latency_s: NotNegative
    collective_latency_s: NotNegative
    oversubscription: AtLeastOne = 1.0

    @property
    def bytes_per_s(self) -> float:
        """What a device reaches in a collective, one direction: gbps * 1e9 * efficiency / oversubscription."""
        return self.gbps * 1e9 * self.efficiency / self.oversubscription


Links = Annotated[tuple[Link, ...], AfterValidator(_levels)]


@dataclass(frozen=True)
class Device:
    """One accelerator (or one CPU process). `sources` names where each number comes from.

    A matmul of m*n*k runs at peak * efficiency["matmul"] * s / (s + matmul_half_size), s = (m*n*k)**(1/3).
    `host_memory_bytes` is the host's memory per device, `host_gbps` the datasheet's GB/s between a device and its
    host in one direction (PCIe or C2C): what offloading can use. None: not known.
    """

    __pydantic_config__ = STRICT
    name: Name
    title: Name
    memory_bytes: MemoryBytes
    memory_gbps: Positive
    peak_tflops: Annotated[Mapping[Dtype, Positive], Field(min_length=1)] = field(hash=False)
    efficiency: Annotated[Mapping[Kind, Share], Field(min_length=3)] = field(hash=False)
    matmul_half_size: NotNegative
    launch_s: NotNegative
    reserved_bytes: ReservedBytes
    devices_per_node: Count
    links: Links
    sources: Mapping[str, str] = field(hash=False)
    price_per_hour: Positive | None = None
    host_memory_bytes: MemoryBytes | None = None
    host_gbps: Positive | None = None

    @property
    def usable_bytes(self) -> int:
        """What a plan may fill: the count of memory is off by some per cent of what runs measure, and a plan that
        fails for want of memory is worth nothing."""
        return int(USABLE * self.memory_bytes)

    def peak(self, dtype: str) -> float:
        """Dense peak in FLOP/s; bf16 falls back to fp16 then fp32, fp16 and tf32 to fp32."""
        name = dtype.removeprefix("torch.")
        name = "fp8" if name.startswith("float8") else _DTYPE_ALIASES.get(name, name)
        for candidate in _FALLBACK.get(name, (name,)):
            if candidate in self.peak_tflops:
                return self.peak_tflops[candidate] * 1e12
        have = ", ".join(self.peak_tflops)
        raise ClusterError(
            f"{self.name} has no peak for '{dtype}', it has {have}",
            where=f"device {self.name}",
            hint=f"one of {have}",
        )


@dataclass(frozen=True)
class Pool:
    """Equal nodes of one device, all or a part of a cluster; `links` innermost first, the last joins the pool.

    A planner gives each pipeline stage to one pool. Ranks run through the pools in order.
    """

    __pydantic_config__ = STRICT
    name: Name
    device: Device
    nodes: Count
    devices_per_node: Count
    links: Links

    def __post_init__(self) -> None:
        _check_size(self)

    @property
    def device_count(self) -> int:
        return self.nodes * self.devices_per_node

    def as_cluster(self) -> Cluster:
        """The pool by itself, for code that times one cluster; what a run costs is at its defaults."""
        return Cluster(self.name, self.device, self.nodes, self.devices_per_node, self.links)


@dataclass(frozen=True)
class Cluster:
    """`nodes` x `devices_per_node` devices; `links` innermost first, the last joins all of them.

    `dead` numbers the nodes that are out, counted from 0 through all pools. Where the nodes are unlike, `mixed`
    holds its parts, and `device`, `devices_per_node` and `links` are what all of them can do: the slowest device,
    the smallest node, the domains that every part has. `pools` serves both kinds. The rest is what a run costs:
    `failures_per_device_hour`, `restart_s` from a failure noticed to training again, and `storage_gbps`, GB/s that
    the whole cluster writes to checkpoint storage (None: in proportion to the devices, see `checkpoint_gbps`).
    """

    __pydantic_config__ = STRICT
    name: Name
    device: Device
    nodes: Count
    devices_per_node: Count
    links: Links
    dead: tuple[Index, ...] = ()
    mixed: Annotated[tuple[Pool, ...], Field(max_length=64)] = ()
    currency: Currency = "USD"
    failures_per_device_hour: NotNegative = FAILURES_PER_DEVICE_HOUR
    restart_s: NotNegative = RESTART_S
    storage_gbps: Positive | None = None

    def __post_init__(self) -> None:
        if not self.mixed:
            _check_size(self)
        nodes, devices = (sum(getattr(p, key) for p in self.mixed) for key in ("nodes", "device_count"))
        if self.mixed and (nodes != self.nodes or devices > MAX_DEVICES):
            what = f"the pools have {nodes} nodes and {devices} devices,"
            what = f"{what} expected {self.nodes} nodes and at most {MAX_DEVICES} devices"
            raise ClusterError(what, where=f"cluster {self.name}", hint=EXPECTED["pools"])
        check_dead(self.dead, self.nodes, lambda path: f"cluster {self.name}, {dotted(path)}")

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The working nodes: one pool where all are alike, else one for each part that has any."""
        whole = Pool(self.name, self.device, self.nodes, self.devices_per_node, self.links)
        found, first = [], 0
        for pool in self.mixed or (whole,):
            out = sum(first <= node < first + pool.nodes for node in self.dead)
            if out < pool.nodes:
                found.append(replace(pool, nodes=pool.nodes - out))
            first += pool.nodes
        return tuple(found)

    @property
    def device_count(self) -> int:
        """Devices of the nodes that work."""
        if self.mixed:
            return sum(pool.device_count for pool in self.pools)
        return (self.nodes - len(self.dead)) * self.devices_per_node

    @property
    def price_per_hour(self) -> float | None:
        """One device hour in `currency`, the mean over the working devices; None where a price is missing."""
        total = 0.0
        for pool in self.pools:
            if pool.device.price_per_hour is None:
                return None
            total += pool.device.price_per_hour * pool.device_count
        return total / self.device_count

    @property
    def checkpoint_gbps(self) -> float:
        """GB/s that the whole cluster writes to checkpoint storage: `storage_gbps`, or the assumed share."""
        return self.storage_gbps or STORAGE_GBPS_PER_DEVICE * self.device_count

    @property
    def assumed(self) -> dict[str, str]:
        """The costs of a run that nobody gave, with the source of the number taken instead."""
        given = {
            "failures_per_device_hour": self.failures_per_device_hour != FAILURES_PER_DEVICE_HOUR,
            "restart_s": self.restart_s != RESTART_S,
            "storage_gbps": self.storage_gbps is not None,
        }
        return {key: source for key, source in _DEFAULT_SOURCES.items() if not given[key]}

    def with_(self, *, gpus: int | None = None, **factors: float) -> Cluster:
        """What if: `with_(gpus=512, inter_bw=2.0)`; first the devices, then each factor as in `scaled`."""
        cluster = self if gpus is None else _resized(self, gpus)
        for word, factor in factors.items():
            cluster = cluster.scaled(word, factor)
        return cluster

    def scaled(self, word: str, factor: float) -> Cluster:
        """What if one thing were `factor` times what it is, everywhere: a word of WHAT_IF. UsageError for another."""
        return _scaled(self, word, factor)

    def describe(self) -> str:
        device, gib = self.device, 2**30
        peaks = ", ".join(f"{dtype} {value:g}" for dtype, value in device.peak_tflops.items())
        shape = " + ".join(f"{p.nodes} x {p.devices_per_node} {p.device.name}" for p in self.mixed)
        shape = shape or f"{self.nodes} x {self.devices_per_node}"
        lines = [
            f"{self.name}: {self.device_count} x {device.title}, {shape}",
            f"  memory {device.memory_bytes / gib:.1f} GiB each ({device.reserved_bytes / gib:.1f} reserved)"
            f" at {device.memory_gbps:g} GB/s; dense peak TFLOP/s: {peaks}",
        ]
        if self.dead:
            lines.append(f"  nodes that are out: {', '.join(str(node) for node in sorted(self.dead))}")
        for link in self.links:
            joins = f"joins {link.size}" if link.size else "joins all"
            shared = f" / {link.oversubscription:g}" if link.oversubscription != 1 else ""
            lines.append(
                f"  {link.name:<12}{joins:<11}{link.gbps:g} GB/s x {link.efficiency:g}{shared},"
                f" {link.latency_s * 1e6:g} us per hop, {link.collective_latency_s * 1e6:g} us per collective"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """JSON-friendly; `from_dict` gives back an equal Cluster."""
        data: dict[str, Any] = _plain(dataclasses.asdict(self))
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cluster:
        """From `to_dict`; what older versions did not save takes its default."""
        return validated(cls, data, lambda path: f"cluster data, {dotted(path)}", _SCHEMAS)


_SCHEMAS: dict[str, type] = {"links": Link, "device": Device, "mixed": Pool}


def _plain(value: Any) -> Any:
    """Lists in the place of tuples, as JSON has them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _check_size(part: Pool | Cluster) -> None:
    if not 0 < part.nodes * part.devices_per_node <= MAX_DEVICES:
        what = f"{part.nodes} x {part.devices_per_node} devices, expected 1 to {MAX_DEVICES} in all"
        raise ClusterError(what, where=f"cluster {part.name}", hint="64x8 for 64 nodes of 8 devices")


def check_dead(dead: Sequence[int], nodes: int, where: Where) -> None:
    """Node numbers that exist, each once, and not all of them; else a ClusterError at where(("dead", index))."""
    seen: set[int] = set()
    for index, node in enumerate(dead):
        if node in seen or not 0 <= node < nodes:
            why = "stands twice" if node in seen else f"is none of the nodes 0 to {nodes - 1}"
            raise ClusterError(f"dead node {node} {why}", where=where(("dead", index)), hint=EXPECTED["dead"])
        seen.add(node)
    if len(dead) == nodes:
        what = f"all {nodes} nodes are dead, expected one that works"
        raise ClusterError(what, where=where(("dead",)), hint=EXPECTED["dead"])


# ---------------------------------------------------------------- unlike nodes


def joined(name: str, pools: tuple[Pool, ...], outer: Link | None = None) -> Cluster:
    """One cluster of unlike pools; `outer` joins them, else the slowest of their own outermost links."""
    outer = outer or _slowest_link([pool.links[-1] for pool in pools], 0)
    device = _slowest_device([pool.device for pool in pools])
    per_node = min(pool.devices_per_node for pool in pools)
    nodes = sum(pool.nodes for pool in pools)
    return Cluster(name, device, nodes, per_node, _common_links(pools, outer), mixed=pools)


def _slowest_device(devices: Sequence[Device]) -> Device:
    """What every one of the devices can do."""
    if all(device == devices[0] for device in devices):
        return devices[0]
    names = " and ".join(dict.fromkeys(device.name for device in devices))
    shared = [dtype for dtype in DTYPES if all(_has_peak(device, dtype) for device in devices)]
    if not shared:
        what = f"{names} have no dtype in common"
        raise ClusterError(what, where="pools", hint="devices that share bf16, fp16 or fp32")
    hosts = [d.host_memory_bytes for d in devices if d.host_memory_bytes is not None]
    host_gbps = [d.host_gbps for d in devices if d.host_gbps is not None]
    slowest = replace(
        devices[0],
        name=names.replace(" and ", "+")[:200],
        title=f"slowest of {names}"[:200],
        memory_bytes=min(d.memory_bytes for d in devices),
        memory_gbps=min(d.memory_gbps for d in devices),
        peak_tflops={dtype: min(d.peak(dtype) for d in devices) / 1e12 for dtype in shared},
        efficiency={k: min(d.efficiency[k] for d in devices) for k in devices[0].efficiency},
        matmul_half_size=max(d.matmul_half_size for d in devices),
        launch_s=max(d.launch_s for d in devices),
        reserved_bytes=max(d.reserved_bytes for d in devices),
        devices_per_node=min(d.devices_per_node for d in devices),
        price_per_hour=None,  # Cluster.price_per_hour has the mean
        host_memory_bytes=min(hosts) if len(hosts) == len(devices) else None,
        host_gbps=min(host_gbps) if len(host_gbps) == len(devices) else None,
    )
    return replace(slowest, sources=dict.fromkeys(devices[0].sources, f"the slowest of {names}"))


def _has_peak(device: Device, dtype: str) -> bool:
    return any(name in device.peak_tflops for name in _FALLBACK.get(dtype, (dtype,)))


def _slowest_link(links: Sequence[Link], size: int) -> Link:
    return replace(
        min(links, key=lambda link: link.bytes_per_s),
        size=size,
        latency_s=max(link.latency_s for link in links),
        collective_latency_s=max(link.collective_latency_s for link in links),
    )


def _common_links(pools: Sequence[Pool], outer: Link) -> tuple[Link, ...]:
    """The domain sizes that fit into domains of every pool, each as slow as the slowest there; then `outer`."""
    found: list[Link] = []
    for size in sorted({link.size for pool in pools for link in pool.links[:-1]}):
        levels = [next((k for k in pool.links[:-1] if k.size % size == 0), None) for pool in pools]
        around = [level for level in levels if level is not None]
        if len(around) == len(pools):
            link = _slowest_link(around, size)
            taken = {outer.name, *(other.name for other in found)}
            found.append(replace(link, name=f"{link.name[:180]}-{size}") if link.name in taken else link)
    return (*found, outer)


# ---------------------------------------------------------------- what if

USABLE = 0.95  # of the memory of a device: see docs/cost.md, "How good it is"
WHAT_IF = {  # what `Cluster.scaled` knows
    "inter_bw": "bandwidth of every link level but the innermost",
    "intra_bw": "bandwidth of the innermost link level",
    "latency": "latency of every link level, per hop and per collective",
    "flops": "peak of every dtype",
    "memory": "memory of a device",
    "memory_bw": "memory bandwidth of a device",
}


MOST_FACTOR = 1e6  # beyond it no number of the cost model means anything


def _scaled(cluster: Cluster, word: str, factor: float) -> Cluster:
    if word not in WHAT_IF:
        hint = " or ".join(near(word, WHAT_IF)) or f"one of {', '.join(WHAT_IF)}, gpus"
        raise UsageError(f"unknown what-if '{word}'", where="what if", hint=hint)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf:
        what = f"{word} is scaled by {factor!r}, expected a number above 0"
        raise UsageError(what, where="what if", hint=f"{word}=2.0 for twice the {WHAT_IF[word]}")
    if not 1 / MOST_FACTOR <= factor <= MOST_FACTOR:
        what = f"{word} is scaled by {factor:g}, expected {1 / MOST_FACTOR:g} to {MOST_FACTOR:g}"
        raise UsageError(what, where="what if", hint=f"{word}=2.0 for twice the {WHAT_IF[word]}")
    if word == "inter_bw" and len(cluster.links) == 1:
        what = f"{cluster.name} has one link level, '{cluster.links[0].name}'"
        raise ClusterError(what, where="what if", hint=f"intra_bw={factor:g}")
    name = f"{cluster.name}, {word} x {factor:g}"[:200]
    mixed = tuple(
        replace(p, device=_scaled_device(p.device, word, factor), links=_scaled_links(p.links, word, factor))
        for p in cluster.mixed
    )
    links, device = _scaled_links(cluster.links, word, factor), _scaled_device(cluster.device, word, factor)
    found = replace(cluster, name=name, mixed=mixed, links=links, device=device)
    if word == "memory" and any(p.device.memory_bytes <= p.device.reserved_bytes for p in found.pools):
        what = f"memory x {factor:g} leaves nothing beside the reserved bytes"
        raise ClusterError(what, where=f"cluster {cluster.name}", hint="a larger factor")
    return Cluster.from_dict(found.to_dict())  # checked again: a factor can make a number that is none


def _scaled_links(links: tuple[Link, ...], word: str, factor: float) -> tuple[Link, ...]:
    def scaled(index: int, link: Link) -> Link:
        if word == "latency":
            per_collective = link.collective_latency_s * factor
            return replace(link, latency_s=link.latency_s * factor, collective_latency_s=per_collective)
        return (
            replace(link, gbps=link.gbps * factor) if word == ("inter_bw" if index else "intra_bw") else link
        )

    return tuple(scaled(index, link) for index, link in enumerate(links))


def _scaled_device(device: Device, word: str, factor: float) -> Device:
    key = {"flops": "peak_tflops", "memory": "memory_bytes", "memory_bw": "memory_gbps"}.get(word)
    if key is None:
        return replace(device, links=_scaled_links(device.links, word, factor))
    old = getattr(device, key)
    new: Any = (
        {k: v * factor for k, v in old.items()} if isinstance(old, Mapping) else type(old)(old * factor)
    )
    source = f"what if: {factor:g} times {device.sources.get(key, 'the number')}"
    return replace(device, sources={**device.sources, key: source}, **{key: new})


def _resized(cluster: Cluster, gpus: int) -> Cluster:
    """The same devices and links with `gpus` of them, in full nodes, none dead."""
    where, full = f"cluster {cluster.name}", cluster.devices_per_node
    if isinstance(gpus, bool) or not isinstance(gpus, int) or not 0 < gpus <= MAX_DEVICES:
        raise UsageError(f"gpus={gpus!r}, expected 1 to {MAX_DEVICES}", where="what if", hint="gpus=512")
    if cluster.mixed:
        what = f"gpus={gpus} does not say of which of the {len(cluster.mixed)} pools"
        raise UsageError(what, where=where, hint="the new sizes in the name, as in h100:64x8+a100:32x8")
    nodes, rest = divmod(gpus, full)
    if nodes and rest:
        what = f"{gpus} devices do not fill nodes of {full} {cluster.device.name}"
        raise ClusterError(what, where=where, hint=f"gpus={nodes * full} or gpus={nodes * full + full}")
    nodes, per_node = (nodes, full) if nodes else (1, gpus)
    own = cluster.name.startswith(f"{cluster.device.name}:") and "," not in cluster.name
    name = plain_name(cluster.device, nodes, per_node) if own else f"{cluster.name}, gpus = {gpus}"[:200]
    links = fitted(cluster.links, full, per_node)
    return replace(cluster, name=name, nodes=nodes, devices_per_node=per_node, links=links, dead=())


def plain_name(device: Device, nodes: int, per_node: int) -> str:
    return f"{device.name}:{nodes}x{per_node}" if nodes > 1 else f"{device.name}:{per_node}"


def fitted(links: tuple[Link, ...], full: int, per_node: int) -> tuple[Link, ...]:
    """Links of nodes of `full` devices on smaller nodes: a domain inside one full node shrinks with the node."""
    shrunk = [link if link.size > full else replace(link, size=min(link.size, per_node)) for link in links]
    # a small node can leave two levels of one size: the inner one suffices
    return tuple(link for n, link in enumerate(shrunk) if n == 0 or link.size != shrunk[n - 1].size)
