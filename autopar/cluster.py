"""What the hardware is: Device, Link, Cluster. In: a name, a YAML file or this machine. Out: a Cluster.

    load_cluster("h100:64x8")  ->  Cluster: 64 nodes of 8 x NVIDIA H100 SXM5 80GB
                                   nvlink joins 8, infiniband joins all

Hardware is data: one `devices/<name>.toml` per accelerator, in which every number names its source. The
dataclasses below are also the schema of those files, of the YAML files and of the cluster in a saved plan:
bad input is refused here with a ClusterError, and trusted afterwards. Loading never runs code.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import reprlib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from autopar.errors import ClusterError

DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")
MAX_DEVICES = 1_000_000
_FALLBACK = {"bf16": ("bf16", "fp16", "fp32"), "fp16": ("fp16", "fp32"), "tf32": ("tf32", "fp32")}
_DTYPE_ALIASES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
_DEVICE_ALIASES = {"a100-80g": "a100", "a100-sxm": "a100", "h100-sxm": "h100", "h200-sxm": "h200"}
_BYTE_UNITS = {"B": 1, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_EXPECTED = {  # what each field of a file holds, as the hint of an error says it
    "name": "a short name, as in `name: my-cluster`",
    "title": "the full name, as in `title: NVIDIA H100 SXM5 80GB`",
    "device": "a name such as `device: h100`, or `device: {base: h100, memory_bytes: 94 GiB}`",
    "nodes": "the number of nodes, as in `nodes: 64`",
    "devices_per_node": "the number of devices in one node, as in `devices_per_node: 8`",
    "links": "a list of levels, innermost first, as in `links: [{name: nvlink, size: 8, gbps: 450}, ...]`",
    "size": "the number of devices one domain of the link joins, or 0 for all, as in `size: 8`",
    "gbps": "GB/s per device in one direction, as in `gbps: 450`",
    "efficiency": "a share, at most 1: `efficiency: 0.7` of a link; of a device matmul, attention and memory",
    "latency_s": "seconds per hop, as in `latency_s: 1.0e-6`",
    "collective_latency_s": "seconds, as in `collective_latency_s: 1.0e-5`",
    "memory_bytes": "bytes or a number with its unit, as in `memory_bytes: 80 GiB`",
    "reserved_bytes": "bytes or a number with its unit, as in `reserved_bytes: 3 GiB`",
    "memory_gbps": "GB/s, as in `memory_gbps: 3350`",
    "peak_tflops": f"dense TFLOP/s for some of {', '.join(DTYPES)}, as in `peak_tflops: {{bf16: 989.5}}`",
    "matmul_half_size": "the matmul size at half efficiency, as in `matmul_half_size: 200`",
    "launch_s": "seconds per kernel, as in `launch_s: 4.0e-6`",
    "price_per_hour": "USD per device hour, as in `price_per_hour: 2.5`",
    "sources": "a mapping from field to the place its number comes from",
}


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticCustomError("number", "is true or false, expected a number")
    return value


def _bytes(value: object) -> object:
    """`80 GiB` -> bytes; a text that is a plain number stays one (PyYAML reads 80e9 as text)."""
    if not isinstance(value, str):
        return _number(value)
    match = re.fullmatch(r"([0-9.]+(?:e\+?[0-9]+)?)\s*([A-Za-z]*)", value.strip())
    if match is None or (match[2] or "B") not in _BYTE_UNITS:
        text = "has no known unit, expected a number and one of {units}"
        raise PydanticCustomError("unit", text, {"units": ", ".join(_BYTE_UNITS)})
    return round(float(match[1]) * _BYTE_UNITS[match[2] or "B"])


def _levels(links: tuple[Link, ...]) -> tuple[Link, ...]:
    sizes = [link.size for link in links]
    growing = sorted(set(sizes[:-1])) == sizes[:-1] and 0 not in sizes[:-1]
    if not links or sizes[-1] != 0 or not growing or len({link.name for link in links}) != len(links):
        text = "has the sizes {sizes}, expected distinct levels that grow and end in 0 (all)"
        raise PydanticCustomError("levels", text, {"sizes": str(sizes)})
    return links


_Name = Annotated[str, Field(min_length=1, max_length=200)]
_Positive = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
_NotNegative = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
_Share = Annotated[float, BeforeValidator(_number), Field(gt=0, le=1)]
_Count = Annotated[int, BeforeValidator(_number), Field(gt=0, le=MAX_DEVICES)]
_Dtype = Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]
_Kind = Annotated[str, Field(pattern="^(matmul|attention|memory)$")]
_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Link:
    """One level of the network: domains of `size` devices joined at `gbps` per device, one direction.

    A collective of n devices in one domain that moves v bytes per device in h hops is modelled as
    collective_latency_s + h * latency_s + v / (gbps * 1e9 * efficiency); its numbers were fitted with that.
    """

    __pydantic_config__ = _STRICT
    name: _Name
    size: Annotated[int, BeforeValidator(_number), Field(ge=0, le=MAX_DEVICES)]  # 0: joins all devices
    gbps: _Positive
    efficiency: _Share
    latency_s: _NotNegative
    collective_latency_s: _NotNegative


_Links = Annotated[tuple[Link, ...], AfterValidator(_levels)]


@dataclass(frozen=True)
class Device:
    """One accelerator (or one CPU process). `sources` names where each number comes from.

    A matmul of m*n*k runs at peak * efficiency["matmul"] * s / (s + matmul_half_size), s = (m*n*k)**(1/3).
    """

    __pydantic_config__ = _STRICT
    name: _Name
    title: _Name
    memory_bytes: Annotated[int, Field(ge=2**20), BeforeValidator(_bytes), BeforeValidator(_number)]
    memory_gbps: _Positive
    peak_tflops: Annotated[Mapping[_Dtype, _Positive], Field(min_length=1)] = field(hash=False)
    efficiency: Annotated[Mapping[_Kind, _Share], Field(min_length=3)] = field(hash=False)
    matmul_half_size: _NotNegative
    launch_s: _NotNegative
    reserved_bytes: Annotated[int, Field(ge=0), BeforeValidator(_bytes)]
    devices_per_node: _Count
    links: _Links
    sources: Mapping[str, str] = field(hash=False)
    price_per_hour: _Positive | None = None

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
class Cluster:
    """`nodes` x `devices_per_node` devices; `links` innermost first, the last joins all of them."""

    __pydantic_config__ = _STRICT
    name: _Name
    device: Device
    nodes: _Count
    devices_per_node: _Count
    links: _Links

    def __post_init__(self) -> None:
        if not 0 < self.device_count <= MAX_DEVICES:
            what = f"{self.nodes} x {self.devices_per_node} devices, expected 1 to {MAX_DEVICES} in all"
            raise ClusterError(what, where=f"cluster {self.name}", hint="64x8 for 64 nodes of 8 devices")

    @property
    def device_count(self) -> int:
        return self.nodes * self.devices_per_node

    def describe(self) -> str:
        device, gib = self.device, 2**30
        peaks = ", ".join(f"{dtype} {value:g}" for dtype, value in device.peak_tflops.items())
        lines = [
            f"{self.name}: {self.device_count} x {device.title}, {self.nodes} x {self.devices_per_node}",
            f"  memory {device.memory_bytes / gib:.1f} GiB each ({device.reserved_bytes / gib:.1f} reserved)"
            f" at {device.memory_gbps:g} GB/s; dense peak TFLOP/s: {peaks}",
        ]
        for link in self.links:
            joins = f"joins {link.size}" if link.size else "joins all"
            lines.append(
                f"  {link.name:<12}{joins:<11}{link.gbps:g} GB/s x {link.efficiency:g},"
                f" {link.latency_s * 1e6:g} us per hop, {link.collective_latency_s * 1e6:g} us per collective"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """JSON-friendly; `from_dict` gives back an equal Cluster."""
        data = dataclasses.asdict(self)
        data["links"] = list(data["links"])
        data["device"]["links"] = list(data["device"]["links"])
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cluster:
        return _validated(cls, data, lambda path: f"cluster data, {_dotted(path)}")


@dataclass(frozen=True)
class _ClusterFile:
    """The top level of a YAML file; device and links are merged with the catalogue, then checked."""

    __pydantic_config__ = _STRICT
    device: Any
    nodes: _Count
    devices_per_node: _Count | None = None
    name: _Name | None = None
    links: Any = None


_T = TypeVar("_T")
_UNKNOWN_KEY = ("unexpected_keyword_argument", "extra_forbidden")
_Path = tuple[str | int, ...]
_Where = Callable[[_Path], str]


def _dotted(path: _Path) -> str:
    return ".".join(str(part) for part in path) or "top level"


def _near(word: str, names: list[str]) -> list[str]:
    word = word.lower()
    return ([n for n in names if n.startswith(word)] or difflib.get_close_matches(word, names))[:3]


def _validated(kind: type[_T], data: object, where: _Where) -> _T:
    """Check data against a dataclass; the first fault becomes a ClusterError with its place and a hint."""
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
    # an unknown key often explains a missing one, so it is told first
    fault = min(faults, key=lambda fault: fault["type"] not in _UNKNOWN_KEY)
    path, message = tuple(part for part in fault["loc"] if part != "[key]"), fault["msg"]
    key = next((part for part in reversed(path) if part in _EXPECTED), "device")
    hint = _EXPECTED[str(key)]
    if fault["type"] in _UNKNOWN_KEY:
        schema: Any = Link if "links" in path else Device if "device" in path else kind
        known = [member.name for member in dataclasses.fields(schema)]
        near = _near(str(path[-1]), known)
        what = f"unknown key '{path[-1]}'"
        hint = ", or ".join(_EXPECTED[name] for name in near) or f"one of {', '.join(known)}"
    elif fault["type"].startswith("missing"):
        what, path = f"'{_dotted(path)}' is missing", path[:-1]
    else:
        what = f"'{_dotted(path)}': {message[0].lower()}{message[1:]} (found {reprlib.repr(fault['input'])})"
    what += f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    raise ClusterError(what, where=where(path), hint=hint)


@cache
def _device_files() -> dict[str, tuple[Device, frozenset[str]]]:
    """The catalogue, with the words that torch's name of the device holds (for `local`)."""
    found = {}
    for entry in sorted(files("autopar").joinpath("devices").iterdir(), key=lambda e: e.name.split(".")):
        if entry.name.endswith(".toml"):
            data = tomllib.loads(entry.read_text(encoding="utf-8"))
            words = frozenset(data.pop("torch_words", ()))
            device = _validated(Device, data, partial("devices/{}, {}".format, entry.name))
            found[device.name] = device, words
    return found


def catalogue() -> dict[str, str]:
    """The devices that ship with autopar: name -> title."""
    return {name: device.title for name, (device, _) in _device_files().items()}


def load_device(name: str) -> Device:
    """A device of the catalogue by name or alias, case ignored."""
    known = _device_files()
    key = str(name).strip().lower()
    key = _DEVICE_ALIASES.get(key, key)
    if key in known:
        return known[key][0]
    near = _near(key, [*known, *_DEVICE_ALIASES])
    hint = " or ".join(near) if near else f"one of {', '.join(known)}"
    raise ClusterError(f"unknown device '{key}', expected a name of the catalogue", where="device", hint=hint)


def load_cluster(spec: str | Path | Cluster) -> Cluster:
    """A cluster from `h100:64x8`, `h100:16`, `cpu:4`, `local`, or the path of a YAML file."""
    if isinstance(spec, Cluster):
        return spec
    if not isinstance(spec, str | Path):
        raise ClusterError(f"a cluster is a name or a path, found {type(spec).__name__}", hint="h100:64x8")
    text = str(spec).strip()
    if isinstance(spec, Path) or text.lower().endswith((".yaml", ".yml")):
        return _from_file(Path(spec))
    return _local() if text.lower() == "local" else _from_name(text)


def _from_name(text: str) -> Cluster:
    where = f"cluster {reprlib.repr(text)}"
    match = re.fullmatch(r"([A-Za-z0-9_.\-]+):([0-9]{1,7})(?:[xX]([0-9]{1,7}))?", text)
    if match is None:
        what = f"{reprlib.repr(text)} is not a cluster, expected <device>:<nodes>x<devices per node>"
        hint = "h100:8, h100:64x8, cpu:4, local, or the path of a .yaml file"
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
    size = f"{nodes}x{per_node}" if nodes > 1 else str(per_node)
    return _assembled(f"{device.name}:{size}", device, nodes, per_node, where)


def _assembled(name: str, device: Device, nodes: int, per_node: int, where: str) -> Cluster:
    """Lay the device's own links on nodes of `per_node`: a domain of one full node shrinks with the node."""
    full = device.devices_per_node
    if per_node > full:
        what = f"{per_node} devices per node, but a node of {device.name} has {full}"
        hint = f"{device.name}:{nodes * -(-per_node // full)}x{full}, or a YAML file with its own links"
        raise ClusterError(what, where=where, hint=hint)
    links = [
        link if link.size > full else replace(link, size=min(link.size, per_node)) for link in device.links
    ]
    # a small node can leave two levels of one size: the inner one suffices
    kept = tuple(link for n, link in enumerate(links) if n == 0 or link.size != links[n - 1].size)
    return Cluster(name, device, nodes, per_node, kept)


def _from_file(path: Path) -> Cluster:
    data, lines = _read_yaml(path)

    def where(at: _Path) -> str:
        known = next((at[:n] for n in range(len(at), -1, -1) if at[:n] in lines), ())
        return f"{path}:{lines.get(known, 1)}, {_dotted(at)}"

    file = _validated(_ClusterFile, data, where)
    device = _file_device(file.device, path.name, where)
    per_node = file.devices_per_node or device.devices_per_node
    name = file.name or path.stem
    if file.links is None:
        return _assembled(name, device, file.nodes, per_node, where(("devices_per_node",)))
    links = _merged_links(device.links, file.links)
    data = {"name": name, "device": device, "nodes": file.nodes, "devices_per_node": per_node, "links": links}
    return _validated(Cluster, data, where)


def _merged_links(known: tuple[Link, ...], given: Any) -> Any:
    """A link that names one of the device's links takes from it the values it does not state."""
    if not isinstance(given, list):
        return given  # the check says what was expected
    base = {link.name: dataclasses.asdict(link) for link in known}
    return [base.get(str(link.get("name")), {}) | link if isinstance(link, dict) else link for link in given]


def _file_device(given: Any, file_name: str, where: _Where) -> Device:
    """`h100`, or a mapping whose values override those of the catalogue device in `base` (or `name`)."""
    try:
        if isinstance(given, str):
            return load_device(given)
        if not isinstance(given, dict):
            raise ClusterError(f"'device' is {reprlib.repr(given)}", hint=_EXPECTED["device"])
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
    return _validated(Device, merged, lambda path: where(("device", *path)))


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[_Path, int]]:
    """The mapping in a YAML file, and the line of each of its keys."""
    try:
        text = path.read_bytes().decode("utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        lines: dict[_Path, int] = {}
        if isinstance(node, yaml.MappingNode):
            _note_lines(node, (), lines, path)
            data = yaml.safe_load(text)
            if isinstance(data, dict):
                return data, lines
    except OSError as error:
        hint = "the path of a readable .yaml file, or a name such as h100:64x8"
        raise ClusterError(f"cannot read '{path}': {error.strerror}", where=str(path), hint=hint) from None
    except UnicodeDecodeError as error:
        what = f"'{path}' is not UTF-8 text (byte {error.start})"
        raise ClusterError(what, where=str(path), hint="saving it as UTF-8") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error)
        what = f"'{path.name}' is not readable as YAML: {problem.splitlines()[0]}"
        raise ClusterError(what, where=where, hint="the format in docs/clusters.md") from None
    what = f"'{path.name}' holds no mapping, expected the keys device and nodes"
    raise ClusterError(what, where=str(path), hint="the two lines `device: h100` and `nodes: 2`")


def _note_lines(node: yaml.Node, at: _Path, lines: dict[_Path, int], path: Path) -> None:
    if len(at) > 4:  # as deep as a cluster goes; also ends a file that refers to itself
        return
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*at, index)] = item.start_mark.line + 1
            _note_lines(item, (*at, index), lines, path)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            where = f"{path}:{key.start_mark.line + 1}"
            if key.tag != "tag:yaml.org,2002:str" or (*at, key.value) in lines:
                what = f"the key {reprlib.repr(key.value)} is not text, or stands twice"
                raise ClusterError(what, where=where, hint="keys as in docs/clusters.md, each once")
            lines[(*at, key.value)] = key.start_mark.line + 1
            _note_lines(value, (*at, key.value), lines, path)


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
    return _assembled("local", device, 1, count, "cluster local")


def _cpu_cores_and_memory() -> tuple[int, int]:
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    siblings = Path("/sys/devices/system/cpu/smt/active")
    two_per_core = siblings.exists() and siblings.read_text().strip() == "1"
    return max(1, threads // (1 + two_per_core)), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
