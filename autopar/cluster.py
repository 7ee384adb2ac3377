"""Clusters by name. In: a name, a YAML file or this machine. Out: a Cluster (hardware.py says what that is).

    load_cluster("h100:64x8")  ->  Cluster: 64 nodes of 8 x NVIDIA H100 SXM5 80GB
                                   nvlink joins 8, infiniband joins all
    load_cluster("h100:64x8+a100:32x8").pools  ->  two Pools, each with its own links, infiniband between them

Hardware is data: one `devices/<name>.toml` per accelerator, in which every number names its source. Bad input is
refused here with a ClusterError, and trusted afterwards. Loading never runs code.
"""

from __future__ import annotations

import dataclasses
import os
import re
import reprlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from autopar.cluster_files import (
    EXPECTED,
    STRICT,
    Count,
    Currency,
    DataPath,
    Index,
    Name,
    NotNegative,
    Positive,
    Where,
    dotted,
    near,
    read_yaml,
    validated,
)
from autopar.errors import ClusterError
from autopar.hardware import (
    WHAT_IF,
    Cluster,
    Device,
    Link,
    Links,
    Pool,
    check_dead,
    fitted,
    joined,
    plain_name,
)

__all__ = ["WHAT_IF", "Cluster", "Device", "Link", "Pool", "catalogue", "load_cluster", "load_device"]

_DEVICE_ALIASES = {"a100-80g": "a100", "a100-sxm": "a100", "h100-sxm": "h100", "h200-sxm": "h200"}
_DEVICE_ALIASES |= {"tpu-v6e": "tpu-trillium"}


@cache
def _device_file(name: str) -> tuple[Device, frozenset[str]] | None:
    """One device of the catalogue, with the words that torch's name of it holds (for `local`)."""
    entry = files("autopar").joinpath("devices", f"{name}.toml")
    if re.fullmatch(r"[a-z0-9.\-]+", name) is None or not entry.is_file():
        return None
    data = tomllib.loads(entry.read_text(encoding="utf-8"))
    words = frozenset(data.pop("torch_words", ()))
    return validated(Device, data, partial(_in_device_file, entry.name), _SCHEMAS), words


@cache
def _device_files() -> dict[str, tuple[Device, frozenset[str]]]:
    """The whole catalogue; a file is named as its device."""
    entries = sorted(files("autopar").joinpath("devices").iterdir(), key=lambda entry: entry.name.split("."))
    found = {}
    for entry in entries:
        if entry.name.endswith(".toml") and (loaded := _device_file(entry.name.removesuffix(".toml"))):
            found[loaded[0].name] = loaded
    return found


def _in_device_file(name: str, path: DataPath) -> str:
    return f"devices/{name}, {dotted(path)}"


def catalogue() -> dict[str, str]:
    """The devices that ship with autopar: name -> title."""
    return {name: device.title for name, (device, _) in _device_files().items()}


def load_device(name: str) -> Device:
    """A device of the catalogue by name or alias, case ignored."""
    key = str(name).strip().lower()
    key = _DEVICE_ALIASES.get(key, key)
    if (one := _device_file(key)) is not None:
        return one[0]
    known = _device_files()
    likely = near(key, [*known, *_DEVICE_ALIASES])
    hint = " or ".join(likely) if likely else f"one of {', '.join(known)}"
    raise ClusterError(f"unknown device '{key}', expected a name of the catalogue", where="device", hint=hint)


def load_cluster(spec: str | Path | Cluster) -> Cluster:
    """A cluster from `h100:64x8`, `h100:16`, `h100:64x8+a100:32x8`, `cpu:4`, `local`, or the path of a YAML file."""
    if isinstance(spec, Cluster):
        return spec
    if not isinstance(spec, str | Path):
        raise ClusterError(f"a cluster is a name or a path, found {type(spec).__name__}", hint="h100:64x8")
    text = str(spec).strip()
    if isinstance(spec, Path) or text.lower().endswith((".yaml", ".yml")):
        return _from_file(Path(spec))
    if text.lower() == "local":
        return _local()
    pools = tuple(_from_name(part, f"cluster {reprlib.repr(text)}") for part in text.split("+"))
    return pools[0].as_cluster() if len(pools) == 1 else joined("+".join(p.name for p in pools)[:200], pools)


def _from_name(text: str, where: str) -> Pool:
    match = re.fullmatch(r"([A-Za-z0-9_.\-]+):([0-9]{1,7})(?:[xX]([0-9]{1,7}))?", text.strip())
    if match is None:
        what = f"{reprlib.repr(text)} is not a cluster, expected <device>:<nodes>x<devices per node>"
        hint = "h100:8, h100:64x8, h100:64x8+a100:32x8, cpu:4, local, or the path of a .yaml file"
        raise ClusterError(what, where=where, hint=hint)
    device = load_device(match[1])
    count, per_node = int(match[2]), device.devices_per_node
    if match[3] is not None:
        nodes, per_node = count, int(match[3])
    elif count <= per_node:
        nodes, per_node = 1, count
    else:
        nodes, rest = divmod(count, per_node)
        if rest:
            what = f"{count} devices do not fill nodes of {per_node} {device.name}"
            hint = f"{device.name}:{nodes * per_node} or {device.name}:{nodes * per_node + per_node}"
            raise ClusterError(what, where=where, hint=hint)
    return _assembled(plain_name(device, nodes, per_node), device, nodes, per_node, where)


def _assembled(name: str, device: Device, nodes: int, per_node: int, where: str) -> Pool:
    """Lay the device's own links on nodes of `per_node`."""
    full = device.devices_per_node
    if per_node > full:
        what = f"{per_node} devices per node, but a node of {device.name} has {full}"
        hint = f"{device.name}:{nodes * -(-per_node // full)}x{full}, or a YAML file with its own links"
        raise ClusterError(what, where=where, hint=hint)
    return Pool(name, device, nodes, per_node, fitted(device.links, full, per_node))


# ---------------------------------------------------------------- YAML files


@dataclass(frozen=True, kw_only=True)
class _PoolFile:
    """One pool in a YAML file; device and links are merged with the catalogue, then checked."""

    __pydantic_config__ = STRICT
    device: Any
    nodes: Count
    devices_per_node: Count | None = None
    name: Name | None = None
    links: Any = None
    price_per_hour: Positive | None = None


@dataclass(frozen=True, kw_only=True)
class _RunFile:
    """What a YAML file can say of the whole cluster."""

    __pydantic_config__ = STRICT
    dead: tuple[Index, ...] | None = None
    currency: Currency | None = None
    failures_per_device_hour: NotNegative | None = None
    restart_s: NotNegative | None = None
    storage_gbps: Positive | None = None


@dataclass(frozen=True, kw_only=True)
class _ClusterFile(_PoolFile, _RunFile):
    """The top level of a YAML file of equal nodes."""


@dataclass(frozen=True, kw_only=True)
class _MixedFile(_RunFile):
    """The top level of a YAML file with `pools`; its one link joins them."""

    pools: Annotated[tuple[_PoolFile, ...], Field(min_length=1, max_length=64)]
    name: Name | None = None
    links: Any = None


_SCHEMAS: dict[str, type] = {"links": Link, "device": Device, "pools": _PoolFile}


def _from_file(path: Path) -> Cluster:
    data, where = read_yaml(path)
    file: _ClusterFile | _MixedFile
    if "pools" in data:
        file = validated(_MixedFile, data, where, _SCHEMAS)
        pools = tuple(
            _file_pool(pool, path.name, pool.name, partial(_below, where, ("pools", index)))
            for index, pool in enumerate(file.pools)
        )
        outer = None if file.links is None else _file_outer(file.links, pools, where)
        cluster = joined(file.name or path.stem, pools, outer)
    else:
        file = validated(_ClusterFile, data, where, _SCHEMAS)
        cluster = _file_pool(file, path.name, file.name or path.stem, where).as_cluster()
    check_dead(file.dead or (), cluster.nodes, where)
    given = {member.name: getattr(file, member.name) for member in dataclasses.fields(_RunFile)}
    return replace(cluster, **{key: value for key, value in given.items() if value is not None})


def _below(where: Where, above: DataPath, path: DataPath) -> str:
    return where((*above, *path))


def _file_pool(file: _PoolFile, file_name: str, name: str | None, where: Where) -> Pool:
    device = _file_device(file.device, file_name, where)
    if file.price_per_hour is not None:
        sources = {**device.sources, "price_per_hour": f"given in {file_name}"}
        device = replace(device, price_per_hour=file.price_per_hour, sources=sources)
    per_node = file.devices_per_node or device.devices_per_node
    name = name or plain_name(device, file.nodes, per_node)
    if file.links is None:
        return _assembled(name, device, file.nodes, per_node, where(("devices_per_node",)))
    links = _merged_links(device.links, file.links)
    data = {"name": name, "device": device, "nodes": file.nodes, "devices_per_node": per_node, "links": links}
    return validated(Pool, data, where, _SCHEMAS)


def _file_outer(given: Any, pools: Sequence[Pool], where: Where) -> Link:
    """The one link of a file with pools: what joins them."""
    known = {link.name: link for pool in pools for link in pool.links}
    links = validated(_Outer, {"links": _merged_links(tuple(known.values()), given)}, where, _SCHEMAS).links
    if len(links) > 1:
        what = f"'links' has {len(links)} levels beside pools, expected the one that joins them"
        raise ClusterError(what, where=where(("links",)), hint="the inner levels in `links` of each pool")
    return links[0]


@dataclass(frozen=True)
class _Outer:
    links: Links


def _merged_links(known: tuple[Link, ...], given: Any) -> Any:
    """A link takes the values it does not state from the device's link that it names, itself or in `like`."""
    if not isinstance(given, list):
        return given  # the check says what was expected
    base = {link.name: dataclasses.asdict(link) for link in known}

    def merged(link: Any) -> Any:
        if not isinstance(link, dict):
            return link
        like = str(link.get("like", link.get("name")))
        # a `like` that names no link stays, and the check refuses it
        kept = {key: value for key, value in link.items() if key != "like" or like not in base}
        return base.get(like, {}) | kept

    return [merged(link) for link in given]


def _file_device(given: Any, file_name: str, where: Where) -> Device:
    """`h100`, or a mapping whose values override those of the catalogue device in `base` (or `name`)."""
    try:
        if isinstance(given, str):
            return load_device(given)
        if not isinstance(given, dict):
            raise ClusterError(f"'device' is {reprlib.repr(given)}", hint=EXPECTED["device"])
        values = dict(given)
        named = str(values.get("name"))
        base_name = values.pop("base", named if named in _device_files() else None)
        base = load_device(base_name) if base_name is not None else None
    except ClusterError as error:
        raise ClusterError(error.what, where=where(("device",)), hint=error.hint) from None
    merged = dataclasses.asdict(base) if base else {"sources": {}}
    stated = {key: f"given in {file_name}" for key in values if key not in ("name", "title", "sources")}
    merged["sources"] |= stated
    for key, value in values.items():
        known = merged.get(key)
        if base and key == "links":
            merged[key] = _merged_links(base.links, value)
        else:
            merged[key] = known | value if isinstance(known, dict) and isinstance(value, dict) else value
    return validated(Device, merged, lambda path: where(("device", *path)), _SCHEMAS)


# ---------------------------------------------------------------- this machine


def _local() -> Cluster:
    """This machine: its CUDA devices where torch sees any, else one CPU process per physical core."""
    import torch

    if not torch.cuda.is_available():
        cores, memory_bytes = _cpu_cores_and_memory()
        return _measured_cluster(load_device("cpu"), cores, memory_bytes // cores)
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    if len({properties.name for properties in found}) > 1:
        names = ", ".join(sorted({properties.name for properties in found}))
        what = f"this machine has different devices ({names}), expected equal ones"
        raise ClusterError(what, where="cluster local", hint="hiding some with CUDA_VISIBLE_DEVICES")
    device = _recognised(found[0].name, found[0].total_memory)
    return _measured_cluster(device, len(found), min(properties.total_memory for properties in found))


def _recognised(name: str, memory_bytes: int) -> Device:
    """The catalogue device with the most words in torch's name of it; of equals, the nearest in memory."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    fits = [
        (len(w), -abs(d.memory_bytes - memory_bytes), d)
        for d, w in _device_files().values()
        if w and w <= words
    ]
    if fits:
        return max(fits, key=lambda fit: fit[:2])[2]
    what, hint = (
        f"no device of the catalogue is called '{name}'",
        "a YAML file with `device: {base: h100, name: ...}`",
    )
    raise ClusterError(what, where="cluster local", hint=hint)


def _measured_cluster(device: Device, count: int, memory_bytes: int) -> Cluster:
    sources = {**device.sources, "memory_bytes": "this machine's own"}
    device = replace(device, memory_bytes=memory_bytes, sources=sources)
    return _assembled("local", device, 1, count, "cluster local").as_cluster()


def _cpu_cores_and_memory() -> tuple[int, int]:
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    siblings = Path("/sys/devices/system/cpu/smt/active")
    two_per_core = siblings.exists() and siblings.read_text().strip() == "1"
    return max(1, threads // (1 + two_per_core)), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
