"""Plan: the answer of the planner as plain data: mesh, shardings, batch split, prediction, and what was rejected.

In:  what a search found, or a JSON file.
Out: a frozen value that prints as a page, is saved, loaded and compared. Loading never runs code and trusts nothing.

    plan = Plan.load("plan.json"); print(plan.page()); print(plan.diff(other))
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ValidationError, model_validator

from autopar.cluster import Cluster
from autopar.errors import AutoparError, ClusterError, PlanError, ShardingError, UsageError
from autopar.layout import Layout
from autopar.layout_check import check
from autopar.mesh import Mesh
from autopar.plan_files import plan_error, read_fields, read_text, write_text
from autopar.plan_parts import (
    Alternative,
    BlockPart,
    DataPart,
    ModelPart,
    Part,
    PredictedPart,
    Recompute,
    Text,
    Tuple,
    Unruled,
)
from autopar.program import Program, op_name
from autopar.sharding import Sharding
from autopar.workload import Workload

MESH_AXES = ("dp", "fsdp", "tp")  # of a plan without a layout; ep and cp between them where larger than 1
# Of a plan with a layout; ep and etp are cut out of dp, cp and tp.
ALL_AXES = ("pp", "dp", "fsdp", "cp", "tp")


class Plan(Part):
    """One parallel plan. `mesh`: outermost first, the axes dp, fsdp, tp; with a `layout`, pp, dp, fsdp, cp, tp. fsdp > 1
    only when `zero` is 3. `state`: the stored sharding of every parameter of the whole model, fsdp included.

    `layout`: the text of a Layout, which has all decisions (schedule, cuts, experts, ...); without one the plan is of
    one stage. `workload`: the model as the cost model sees it, so that a plan is explained without the model;
    `software`: the stack it was priced with."""

    version: Literal[1] = 1
    autopar_version: Text
    model: ModelPart
    cluster: dict[str, Any]
    mesh: Text
    data: DataPart
    precision: Literal["fp32", "bf16", "fp8", "mxfp8", "nvfp4"]
    recompute: Recompute
    zero: Literal[0, 1, 2, 3]
    axes: dict[str, Annotated[tuple[Text, ...], Tuple]]
    blocks: dict[str, BlockPart]
    state: dict[str, Text]
    predicted: PredictedPart
    alternatives: Annotated[tuple[Alternative, ...], Tuple] = ()
    unruled: Annotated[tuple[Unruled, ...], Tuple] = ()
    notes: Annotated[tuple[Text, ...], Tuple] = ()
    constraints: Annotated[tuple[Text, ...], Tuple] = ()
    layout: Text | None = None
    software: Text | None = None
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
        ways = mesh.size("dp", "fsdp") * mesh.sizes.get("ep", 1) * self.data.micro_batches
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
        """The mesh as the runtime joins it, after the layout has been found to agree with the rest of the plan."""
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
        return self.whole_mesh

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

    @property
    def whole_mesh(self) -> Mesh:
        """The mesh of all ranks as the runtime joins it: with pp, ep and cp where they are larger than 1."""
        if self.layout is None:
            return self.parsed_mesh
        sizes = self.parsed_layout.run_sizes()
        return Mesh.of({axis: size for axis, size in sizes.items() if size > 1 or axis in MESH_AXES})

    @property
    def run_mesh(self) -> Mesh:
        """The mesh of one pipeline stage; shardings of blocks are over its axes."""
        return Mesh(tuple((axis, size) for axis, size in self.whole_mesh.axes if axis != "pp"))

    def why_not_run(self) -> str | None:
        """What of this plan the runtime of this version does not run, or None."""
        return self.parsed_layout.why_not_run()

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
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read and check a plan file. Raises PlanError saying where it is wrong, what was expected, what to try."""
        return cls.from_json(read_text(path), where=str(Path(path)))

    @classmethod
    def from_json(cls, text: str, *, where: str = "plan") -> Plan:
        """The Plan in a JSON text; `where` names it in errors."""
        data = read_fields(text, where)
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise plan_error(error, where) from None
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
