"""Plan: the answer of the planner as plain data: mesh, shardings, batch split, prediction, and what was rejected.

In:  what a search found, or a JSON file.
Out: a frozen value that prints as a page, is saved, loaded and compared. Loading never runs code and trusts nothing.

    plan = Plan.load("plan.json"); print(plan.page()); print(plan.diff(other))
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from autopar.cluster import Cluster
from autopar.errors import AutoparError, ClusterError, PlanError, ShardingError, UsageError
from autopar.layout import Layout
from autopar.layout_check import check
from autopar.mesh import Mesh
from autopar.program import Program, op_name
from autopar.sharding import Sharding
from autopar.workload import MOST_TOKENS, Workload

VERSION = 1
MESH_AXES = ("dp", "fsdp", "tp")  # of a plan without a layout; ep and cp between them where larger than 1
ALL_AXES = (
    "pp",
    "dp",
    "fsdp",
    "cp",
    "tp",
)  # of a plan with a layout; ep and etp are cut out of dp, cp and tp
_MAX_BYTES = 256 * 2**20  # larger files are no plans


class _Part(BaseModel):
    """Strict: a number is no text, an unknown field is an error, and nothing changes afterwards."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


_Positive = Annotated[int, Field(gt=0)]
_Count = Annotated[int, Field(ge=0)]
_Seconds = Annotated[
    float, BeforeValidator(lambda value: float(value) if type(value) is int else value), Field(ge=0)
]
_Fraction = _Seconds
_Bytes = _Count
_Recompute = Literal["none", "selective", "full"]
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def _printable(text: str) -> str:
    """Texts are printed on terminals: control characters but tab and newline are spelled out."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


_Text = Annotated[str, Field(max_length=100_000), AfterValidator(_printable)]
_Tuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)


class ModelPart(_Part):
    """`fingerprint`: of the Program (see `fingerprint`); a plan runs only the model it was made for."""

    name: _Text
    fingerprint: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    parameters: _Count
    task: _Text


class DataPart(_Part):
    """`batch`: sequences per step over the whole cluster, in `micro_batches` parts one after the other."""

    batch: Annotated[int, Field(gt=0, le=MOST_TOKENS)]
    seq: Annotated[int, Field(gt=0, le=MOST_TOKENS)]
    micro_batches: _Positive


class BlockPart(_Part):
    """One unique block: in-graph shardings. `ops`: node -> mesh axis -> the loop of the op that the axis splits."""

    times: _Positive
    inputs: Annotated[tuple[_Text, ...], _Tuple]
    outputs: Annotated[tuple[_Text, ...], _Tuple]
    state: dict[str, _Text]
    ops: dict[str, dict[str, _Text]]


class PredictedPart(_Part):
    """What the cost model says of one step; memory is of one rank. `bound_s`: no plan of the searched space is faster.
    `searched`: how much of the space was bounded, priced and simulated. `frontier`: (seconds, bytes) of the layouts
    that no other beats in both. `moments`: bytes of the fullest rank at each moment of a step."""

    step_time_s: _Seconds
    tokens_per_s: _Seconds
    mfu: _Fraction
    time_s: dict[str, _Seconds]
    memory_bytes: dict[str, _Bytes]
    memory_total_bytes: _Bytes
    memory_limit_bytes: _Bytes
    bound_s: _Seconds | None = None
    searched: dict[str, _Count] = {}
    moments: dict[str, _Bytes] = {}


class Alternative(_Part):
    """A rejected combination and why. `mesh`: of a plan with a layout, the other layout."""

    mesh: _Text
    micro_batches: _Positive
    recompute: _Recompute
    step_time_s: _Seconds
    memory_total_bytes: _Bytes
    fits: bool
    reason: _Text


class Unruled(_Part):
    """An op that has no rule and so runs whole on every rank; `seconds` per step on each."""

    op: _Text
    block: _Text
    times: _Positive
    bytes: _Bytes
    seconds: _Seconds


class Plan(_Part):
    """One parallel plan. `mesh`: outermost first, the axes dp, fsdp, tp; with a `layout`, pp, dp, fsdp, cp, tp. fsdp > 1
    only when `zero` is 3. `state`: the stored sharding of every parameter of the whole model, fsdp included.

    `layout`: the text of a Layout, which has all decisions (schedule, cuts, experts, ...); without one the plan is of
    one stage. `workload`: the model as the cost model sees it, so that a plan is explained without the model;
    `software`: the stack it was priced with."""

    version: Literal[1] = 1
    autopar_version: _Text
    model: ModelPart
    cluster: dict[str, Any]
    mesh: _Text
    data: DataPart
    precision: Literal["fp32", "bf16", "fp8", "mxfp8", "nvfp4"]
    recompute: _Recompute
    zero: Literal[0, 1, 2, 3]
    axes: dict[str, Annotated[tuple[_Text, ...], _Tuple]]
    blocks: dict[str, BlockPart]
    state: dict[str, _Text]
    predicted: PredictedPart
    alternatives: Annotated[tuple[Alternative, ...], _Tuple] = ()
    unruled: Annotated[tuple[Unruled, ...], _Tuple] = ()
    notes: Annotated[tuple[_Text, ...], _Tuple] = ()
    constraints: Annotated[tuple[_Text, ...], _Tuple] = ()
    layout: _Text | None = None
    software: _Text | None = None
    workload: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        """What types cannot say: the mesh fits the cluster, shardings parse, use its axes and divide."""
        mesh = self.parsed_mesh
        expected = self._runtime_axes(mesh) if self.layout is None else tuple(self.parsed_layout.mesh_sizes())
        if mesh.names != expected:
            raise PlanError(
                f"mesh {self.mesh!r} has the axes {', '.join(mesh.names)}",
                where="mesh",
                hint=",".join(f"{axis}=.." for axis in expected),
            )
        devices = Cluster.from_dict(self.cluster).device_count
        if mesh.device_count != devices:
            raise PlanError(
                f"mesh {self.mesh} has {mesh.device_count} devices, the cluster {devices}", where="mesh"
            )
        split = mesh.sizes["fsdp"] * mesh.sizes.get("cp", 1) > 1
        if (mesh.sizes["fsdp"] > 1 and self.zero != 3) or (self.zero == 3 and not split):
            raise PlanError(
                f"zero is {self.zero} on mesh {self.mesh}, expected 3 exactly if fsdp > 1", where="zero"
            )
        if self.layout is None and self.zero not in (0, 3):
            raise PlanError(f"zero is {self.zero}, a plan without a layout has 0 or 3", where="zero")
        if self.layout is not None:
            mesh = self._with_layout(mesh)
        experts = mesh.sizes.get("ep", 1) if self.layout is None else 1
        ways = mesh.size("dp", "fsdp") * experts * self.data.micro_batches
        if self.data.batch % ways:
            raise PlanError(
                f"batch {self.data.batch} does not divide by dp*fsdp*micro_batches = {ways}",
                where="data.batch",
                hint=f"a multiple of {ways}",
            )
        for axis, names in self.axes.items():
            _known(names, mesh, f"axes.{axis}")
        seen: set[tuple[bool, str]] = set()  # layers of a deep model have the same few shardings
        for where, text in self._shardings():
            key = where.startswith("state."), text
            if key not in seen:
                _check_sharding(text, mesh, where)
                seen.add(key)
        for name, block in self.blocks.items():
            for node, choice in block.ops.items():
                _known(choice, mesh, f"blocks.{name}.ops.{node}")
        if self.workload is not None:
            self._check_layout(self.parsed_workload)
        return self

    @staticmethod
    def _runtime_axes(mesh: Mesh) -> tuple[str, ...]:
        extra = [axis for axis in ("ep", "cp") if mesh.sizes.get(axis, 1) > 1]
        return (*MESH_AXES[:-1], *extra, MESH_AXES[-1])

    def _check_layout(self, workload: Workload) -> None:
        """The layout can run the workload on the cluster."""
        if self.layout is None:
            return
        try:
            check(self.parsed_layout, workload, self.parsed_cluster, self.data.batch)
        except UsageError as error:
            raise PlanError(error.what, where="layout", hint=error.hint) from None

    def _with_layout(self, mesh: Mesh) -> Mesh:
        """The mesh and the expert axes, after the layout has been found to agree with the rest of the plan."""
        layout = self.parsed_layout
        sizes = mesh.sizes
        says = layout.mesh_sizes()
        wrong = [
            f"{name} is {mine}, the layout has {theirs}"
            for name, mine, theirs in (
                *((name, sizes[name], says[name]) for name in says),
                ("zero", self.zero, layout.zero),
                ("recompute", self.recompute, layout.recompute),
                ("precision", self.precision, layout.precision),
                ("micro_batches", self.data.micro_batches, self.data.batch // (layout.dp * layout.mbs)),
            )
            if mine != theirs
        ]
        if wrong:
            raise PlanError(wrong[0], where="layout", hint="to plan again")
        return Mesh.of({**sizes, "ep": layout.ep, "etp": layout.etp})

    def _shardings(self) -> Iterator[tuple[str, str]]:
        for name, block in self.blocks.items():
            yield from ((f"blocks.{name}.inputs[{index}]", text) for index, text in enumerate(block.inputs))
            yield from ((f"blocks.{name}.outputs[{index}]", text) for index, text in enumerate(block.outputs))
            yield from ((f"blocks.{name}.state.{key}", text) for key, text in block.state.items())
        yield from ((f"state.{key}", text) for key, text in self.state.items())

    # ---- reading ------------------------------------------------------------------------------------------

    @property
    def parsed_mesh(self) -> Mesh:
        return Mesh.parse(self.mesh)

    @property
    def parsed_cluster(self) -> Cluster:
        return Cluster.from_dict(self.cluster)

    @property
    def parsed_layout(self) -> Layout:
        """The layout; of a plan without one, what its mesh says."""
        if self.layout is not None:
            try:
                return Layout.parse(self.layout)
            except UsageError as error:
                raise PlanError(error.what, where="layout", hint=error.hint) from None
        sizes = self.parsed_mesh.sizes
        data = sizes["dp"] * sizes["fsdp"] * sizes.get("ep", 1)
        return Layout(
            dp=data,
            tp=sizes["tp"],
            cp=sizes.get("cp", 1),
            ep=sizes.get("ep", 1),
            zero=self.zero,
            shard=sizes["fsdp"] if sizes["dp"] > 1 and self.zero == 3 else 0,
            mbs=self.data.batch // data // self.data.micro_batches,
            recompute=self.recompute,
            precision=self.precision,
        )

    @property
    def parsed_workload(self) -> Workload:
        """What the cost model sees of the model. Raises PlanError if the plan has none."""
        if self.workload is None:
            raise PlanError(
                "the plan holds no workload", where="workload", hint="to plan again with this version"
            )
        try:
            return Workload.from_dict(self.workload)
        except UsageError as error:
            raise PlanError(error.what, where=f"workload, {error.where}", hint="to plan again") from None

    def why_not_run(self) -> str | None:
        """What of this plan the runtime of this version does not run, or None."""
        layout = self.parsed_layout
        whole = (
            self.layout is not None
        )  # a plan of the whole space, and not of what the runtime was asked for
        wants = [
            text
            for needed, text in (
                (layout.pp > 1, f"pp={layout.pp}"),
                (whole and layout.cp > 1, f"cp={layout.cp}"),
                (whole and layout.ep * layout.etp > 1, f"ep={layout.ep}, etp={layout.etp}"),
                (layout.zero in (1, 2), f"zero={layout.zero}"),
                (layout.recompute == "selective", "recompute=selective"),
                (layout.offload != "none", f"offload={layout.offload}"),
                (layout.precision not in ("fp32", "bf16"), f"precision={layout.precision}"),
                (whole, "its own shardings"),
            )
            if needed
        ]
        return wants[0] if wants else None

    def page(self) -> str:
        """What a person reads, at most 100 columns wide."""
        from autopar.plan_page import page

        return page(self)

    def __str__(self) -> str:
        return self.page()

    def diff(self, other: Plan) -> str:
        """One line per difference, `-` this plan's and `+` the other's; empty for equal plans."""
        mine, theirs = dict(_flat("", self._data())), dict(_flat("", other._data()))
        lines = []
        for key in [*mine, *(key for key in theirs if key not in mine)]:
            old = f"- {mine[key]}" if key in mine else ""
            new = f"+ {theirs[key]}" if key in theirs else ""
            if old[1:] != new[1:]:
                lines.append(f"{key}: {'  '.join(filter(None, (old, new)))}")
        return "\n".join(lines)

    # ---- files --------------------------------------------------------------------------------------------

    def _data(self) -> dict[str, Any]:
        data = self.model_dump(mode="json")
        if self.predicted.bound_s is None:
            del data["predicted"]["bound_s"]
        for name in ("searched", "moments"):  # of plans with a layout
            if not data["predicted"][name]:
                del data["predicted"][name]
        if self.layout is None:
            for name in ("layout", "software", "workload"):
                del data[name]
        return data

    def to_json(self) -> str:
        return json.dumps(self._data(), indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the plan whole or not at all: to a temporary file beside it, then renamed. Raises PlanError."""
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(self.to_json())
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise PlanError(
                f"cannot write {target}: {error.strerror}",
                where=str(target),
                hint="a path in a folder that exists",
            ) from None

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read and check a plan file. Raises PlanError saying where it is wrong, what was expected, what to try."""
        file = Path(path)
        try:
            if file.stat().st_size > _MAX_BYTES:
                raise PlanError(
                    f"{file} is larger than any plan ({_MAX_BYTES >> 20} MiB)",
                    where=str(file),
                    hint="a plan file",
                )
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(
                f"cannot read {file}: {error.strerror}", where=str(file), hint="the path of a saved plan"
            ) from None
        except UnicodeDecodeError:
            raise PlanError(
                f"{file} is not UTF-8 text", where=str(file), hint="a file that `autopar plan -o` wrote"
            ) from None
        return cls.from_json(text, where=str(file))

    @classmethod
    def from_json(cls, text: str, *, where: str = "plan") -> Plan:
        """The Plan in a JSON text; `where` names it in errors."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            place = f"{where}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else where
            cut = isinstance(error, json.JSONDecodeError) and error.pos >= len(text.rstrip())
            what = (
                "the plan ends too early: it is truncated"
                if cut
                else f"not readable as JSON: {_short(error)}"
            )
            raise PlanError(what, where=place, hint="to plan again, or the original file") from None
        if not isinstance(data, dict):
            raise PlanError(
                f"a plan is a JSON object, found {type(data).__name__}", where=where, hint="to plan again"
            )
        version = data.get("version")
        if isinstance(version, int) and not isinstance(version, bool) and version > VERSION:
            raise PlanError(
                f"plan version {version} is newer than this autopar reads (up to {VERSION})",
                where=f"{where}, version",
                hint="a newer autopar, or to plan again",
            )
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise _plan_error(error, where) from None
        except AutoparError as error:
            place = f"{where}, {error.where}" if error.where else where
            prefix = "cluster: " if isinstance(error, ClusterError) else ""
            raise PlanError(prefix + error.what, where=place, hint=error.hint or "to plan again") from None


def fingerprint(program: Program) -> str:
    """sha256 of what makes a Program this model: state names, shapes, dtypes, and the ops of its blocks in call order;
    the same at every batch and sequence size."""
    digest = hashlib.sha256()
    for name, info in sorted(program.state.items()):
        if info.kind != "constant":
            digest.update(f"{name} {info.dtype} {list(info.shape)} {info.kind}\n".encode())
    for block in program.blocks.values():
        digest.update(f"block {' '.join(op_name(node) for node in block.op_nodes)}\n".encode())
    order = {name: index for index, name in enumerate(program.blocks)}
    for call in program.calls:
        digest.update(f"call {order[call.block]} {' '.join(call.state)}\n".encode())
    return digest.hexdigest()


def _known(names: Any, mesh: Mesh, where: str) -> None:
    for name in names:
        if name not in mesh.names:
            raise PlanError(
                f"{name!r} is not an axis of the mesh", where=where, hint=f"one of {', '.join(mesh.names)}"
            )


def _check_sharding(text: str, mesh: Mesh, where: str) -> None:
    """The text parses, uses axes of the mesh, and its sizes divide; fsdp (and cp) cut rows as evenly as they can."""
    try:
        sharding = Sharding.parse(text)
        _known(sharding.axes, mesh, where)
        even = sharding.without(["fsdp", "cp"]) if where.startswith("state.") else sharding
        sizes = [int(size) for size in re.findall(r"[\[,]\s*(\d+)", text)]
        if len(sizes) != len(sharding.dims):
            raise ShardingError(
                f"{text!r} does not give the sizes of all dims", hint="a form such as '[8@dp, 4096]'"
            )
        even.local_shape(sizes, mesh)
    except ShardingError as error:
        raise PlanError(error.what, where=where, hint=error.hint) from None


def _plan_error(error: ValidationError, where: str) -> PlanError:
    faults = error.errors(include_url=False, include_context=False)
    fault = faults[0]
    place = ".".join(str(part) for part in fault["loc"]) or "top level"
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    kind = fault["type"]
    if kind == "missing":
        what, hint = f"{place} is missing", "the original file, or to plan again"
    elif kind == "extra_forbidden":
        what, hint = f"unknown field {place}", "to take it out, or a newer autopar"
    else:
        message = fault["msg"]
        what = f"{place}: {message[0].lower()}{message[1:]}, found {_short(repr(fault['input']))}"
        hint = "the original file, or to plan again"
    return PlanError(what + more, where=f"{where}, {place}", hint=hint)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Nested data as (dotted path, leaf)."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(f"{path}.{key}" if path else str(key), item)
    elif isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        for index, item in enumerate(value):
            yield from _flat(f"{path}[{index}]", item)
    else:
        yield path, value
