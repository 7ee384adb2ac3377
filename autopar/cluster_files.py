"""How a cluster's data is read and checked. In: a YAML file or plain data. Out: the same, checked, or a ClusterError.

    nodez: 2    ->    ClusterError: unknown key 'nodez'
                        at mine.yaml:2, nodez
                        try the number of nodes, as in `nodes: 64`

Here are the types of the fields (which numbers may be zero, which have a unit), the hint of each, and the reader
that knows the line of every key. What the fields mean is in cluster.py. Reading never runs code.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from autopar.errors import ClusterError

DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")
MAX_DEVICES = 1_000_000
MAX_BYTES = 2**60  # of one device
_BYTE_UNITS = {"B": 1, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
EXPECTED = {  # what each field of a file holds, as the hint of an error says it
    "name": "a short name, as in `name: my-cluster`",
    "title": "the full name, as in `title: NVIDIA H100 SXM5 80GB`",
    "device": "a name such as `device: h100`, or `device: {base: h100, memory_bytes: 94 GiB}`",
    "nodes": "the number of nodes, as in `nodes: 64`",
    "devices_per_node": "the number of devices in one node, as in `devices_per_node: 8`",
    "links": "a list of levels, innermost first, as in `links: [{name: nvlink, size: 8, gbps: 450}, ...]`",
    "pools": "a list of unlike parts, as in `pools: [{device: h100, nodes: 64}, {device: a100, nodes: 32}]`",
    "dead": "the numbers of the nodes that are out, counted from 0, as in `dead: [3, 17]`",
    "size": "the number of devices one domain of the link joins, or 0 for all, as in `size: 8`",
    "gbps": "GB/s per device in one direction, as in `gbps: 450`",
    "oversubscription": "what the bandwidth of the level is divided by, 1 or more, as in `oversubscription: 3`",
    "like": "the name of a link of the device whose values this level takes, as in `like: infiniband`",
    "efficiency": "a share, at most 1: `efficiency: 0.7` of a link; of a device matmul, attention and memory",
    "latency_s": "seconds per hop, as in `latency_s: 1.0e-6`",
    "collective_latency_s": "seconds, as in `collective_latency_s: 1.0e-5`",
    "memory_bytes": "bytes or a number with its unit, as in `memory_bytes: 80 GiB`",
    "reserved_bytes": "bytes or a number with its unit, as in `reserved_bytes: 3 GiB`",
    "host_memory_bytes": "the host's memory per device, with its unit, as in `host_memory_bytes: 256 GiB`",
    "host_gbps": "GB/s between a device and its host, one direction, as in `host_gbps: 64`",
    "memory_gbps": "GB/s, as in `memory_gbps: 3350`",
    "peak_tflops": f"dense TFLOP/s for some of {', '.join(DTYPES)}, as in `peak_tflops: {{bf16: 989.5}}`",
    "matmul_half_size": "the matmul size at half efficiency, as in `matmul_half_size: 200`",
    "launch_s": "seconds per kernel, as in `launch_s: 4.0e-6`",
    "price_per_hour": "the price of one device hour, as in `price_per_hour: 2.5`",
    "currency": "three capital letters, as in `currency: EUR`",
    "failures_per_device_hour": "failures of one device in an hour, as in `failures_per_device_hour: 2.0e-5`",
    "restart_s": "seconds from a failure noticed to training again, as in `restart_s: 600`",
    "storage_gbps": "GB/s that the whole cluster writes to checkpoint storage, as in `storage_gbps: 100`",
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
    match = re.fullmatch(r"([0-9]+\.?[0-9]*(?:e\+?[0-9]{1,2})?|\.[0-9]+)\s*([A-Za-z]*)", value.strip())
    if match is None or (match[2] or "B") not in _BYTE_UNITS:
        text = "has no known unit, expected a number and one of {units}"
        raise PydanticCustomError("unit", text, {"units": ", ".join(_BYTE_UNITS)})
    return round(float(match[1]) * _BYTE_UNITS[match[2] or "B"])


# no control characters: a name is printed on terminals
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
Currency = Annotated[str, Field(pattern="^[A-Z]{3}$")]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
AtLeastOne = Annotated[float, BeforeValidator(_number), Field(ge=1, allow_inf_nan=False)]
Share = Annotated[float, BeforeValidator(_number), Field(gt=0, le=1)]
Count = Annotated[int, BeforeValidator(_number), Field(gt=0, le=MAX_DEVICES)]
Index = Annotated[int, BeforeValidator(_number), Field(ge=0, le=MAX_DEVICES)]
MemoryBytes = Annotated[int, Field(ge=2**20, le=MAX_BYTES), BeforeValidator(_bytes), BeforeValidator(_number)]
ReservedBytes = Annotated[int, Field(ge=0, le=MAX_BYTES), BeforeValidator(_bytes)]
Dtype = Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]
Kind = Annotated[str, Field(pattern="^(matmul|attention|memory)$")]
STRICT = ConfigDict(extra="forbid")

DataPath = tuple[str | int, ...]
Where = Callable[[DataPath], str]
_T = TypeVar("_T")
_UNKNOWN_KEY = ("unexpected_keyword_argument", "extra_forbidden")


def dotted(path: DataPath) -> str:
    return ".".join(str(part) for part in path) or "top level"


def near(word: str, names: Iterable[str]) -> list[str]:
    """Up to three of `names` that begin with `word` or look like it."""
    word, names = word.lower(), list(names)
    return ([n for n in names if n.startswith(word)] or difflib.get_close_matches(word, names))[:3]


def validated(kind: type[_T], data: object, where: Where, schemas: Mapping[str, type]) -> _T:
    """Check data against a dataclass; the first fault becomes a ClusterError with its place and a hint.

    `schemas` names the dataclass that lies below a key (`links` -> Link), to list what an unknown key could be.
    """
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
    # an unknown key often explains a missing one, so it is told first
    fault = min(faults, key=lambda fault: fault["type"] not in _UNKNOWN_KEY)
    path, message = tuple(part for part in fault["loc"] if part != "[key]"), fault["msg"]
    key = next((part for part in reversed(path) if part in EXPECTED), "device")
    hint = EXPECTED[str(key)]
    if fault["type"] in _UNKNOWN_KEY:
        schema: Any = next((schemas[str(part)] for part in reversed(path[:-1]) if part in schemas), kind)
        known = [member.name for member in dataclasses.fields(schema)]
        likely = ["like"] if path[-1] == "like" else near(str(path[-1]), known)
        what = f"unknown key '{path[-1]}'"
        hint = ", or ".join(EXPECTED[name] for name in likely) or f"one of {', '.join(known)}"
    elif fault["type"].startswith("missing"):
        what, path = f"'{dotted(path)}' is missing", path[:-1]
    else:
        what = f"'{dotted(path)}': {message[0].lower()}{message[1:]} (found {reprlib.repr(fault['input'])})"
    what += f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    raise ClusterError(what, where=where(path), hint=hint)


def read_yaml(path: Path) -> tuple[dict[str, Any], Where]:
    """The mapping in a YAML file, and what says where in the file a key is: `mine.yaml:4, links.1.gbps`."""
    try:
        text = path.read_bytes().decode("utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        lines: dict[DataPath, int] = {}
        if isinstance(node, yaml.MappingNode):
            _note_lines(node, (), lines, path)
            data = yaml.safe_load(text)
            if isinstance(data, dict):
                return data, lambda at: f"{path}:{_line(at, lines)}, {dotted(at)}"
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


def _line(at: DataPath, lines: Mapping[DataPath, int]) -> int:
    """The line of a key, or of the nearest key around it."""
    return next((lines[at[:n]] for n in range(len(at), -1, -1) if at[:n] in lines), 1)


def _note_lines(node: yaml.Node, at: DataPath, lines: dict[DataPath, int], path: Path) -> None:
    if (
        len(at) > 5
    ):  # as deep as a cluster goes (pools.0.device.links.0); also ends a file that refers to itself
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
