"""Plan writer: what a search found, as a Plan.

In:  the winner, everything that was priced, the Program and its Problem.
Out: a Plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from autopar.cluster import Cluster
from autopar.cost.compute import model_flops
from autopar.cost.prices import Prices
from autopar.mesh import Mesh
from autopar.passes.candidates import active_axes
from autopar.passes.pricing import Pricer, arriving, makers
from autopar.plan_parts import Alternative, BlockPart, DataPart, ModelPart, PredictedPart, Unruled
from autopar.plans import Plan, fingerprint
from autopar.problem import Problem, Solution
from autopar.program import Program
from autopar.sharding import Sharding

_SLOWER, _MISSES = 8, 4


@dataclass(frozen=True)
class Found:
    """One priced combination. `solution` is on the mesh whose data axes are one `dp`."""

    mesh: Mesh
    micro_batches: int
    recompute: str
    lean: bool
    solution: Solution
    time_s: Mapping[str, float]
    memory_bytes: Mapping[str, int]
    limit_bytes: int

    @property
    def step_time_s(self) -> float:
        return sum(self.time_s.values())

    @property
    def memory_total_bytes(self) -> int:
        return sum(self.memory_bytes.values())

    @property
    def fits(self) -> bool:
        return self.memory_total_bytes <= self.limit_bytes


def write_plan(
    program: Program,
    winner: Found,
    tried: Sequence[Found],
    problem: Problem,
    cluster: Cluster,
    *,
    batch: int,
    seq: int,
    precision: str,
    task: str,
    constraints: Sequence[str],
    bound_s: float,
) -> Plan:
    """The Plan of the winner, with the others as alternatives."""
    mesh = winner.mesh
    solution = on_mesh(winner.solution, mesh)
    step_time_s = winner.step_time_s
    flops = 3 * model_flops(problem) * winner.micro_batches
    return Plan.model_validate(
        {
            **head_of(program, cluster, mesh, task),
            "data": DataPart(batch=batch, seq=seq, micro_batches=winner.micro_batches),
            "precision": precision,
            "recompute": winner.recompute,
            "zero": 3 if mesh.sizes["fsdp"] > 1 else 0,
            "axes": axes_of(problem, solution, mesh),
            "blocks": {
                name: block_part(program, problem, solution, mesh, name) for name in program.multiplicity
            },
            "state": state_of(program, solution, [axis for axis in active_axes(mesh) if axis == "fsdp"]),
            "predicted": PredictedPart(
                step_time_s=step_time_s,
                tokens_per_s=batch * seq / step_time_s,
                mfu=flops / (step_time_s * cluster.device_count * cluster.device.peak(precision)),
                time_s=dict(winner.time_s),
                memory_bytes=dict(winner.memory_bytes),
                memory_total_bytes=winner.memory_total_bytes,
                memory_limit_bytes=winner.limit_bytes,
                bound_s=bound_s,
            ),
            "alternatives": _alternatives(winner, tried),
            "unruled": _unruled(problem, winner, cluster, precision),
            "notes": [*program.notes, *_notes(winner)],
            "constraints": list(constraints),
        }
    )


def on_mesh(solution: Solution, mesh: Mesh) -> Solution:
    """The solution with its one data axis `dp` spelled out as the mesh's own data axes, outermost first."""
    data = tuple(axis for axis in active_axes(mesh) if axis in ("dp", "fsdp"))
    if data == ("dp",) or not data:
        return solution

    def spelled(sharding: Sharding) -> Sharding:
        def axes(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(axis for name in names for axis in (data if name == "dp" else (name,)))

        return Sharding(tuple(axes(dim) for dim in sharding.dims), axes(sharding.sums))

    choices = {
        op: {new: factor for axis, factor in choice.items() for new in (data if axis == "dp" else (axis,))}
        for op, choice in solution.choices.items()
    }
    shardings = {name: spelled(sharding) for name, sharding in solution.shardings.items()}
    return Solution(choices, shardings, solution.cost_s, solution.objective_s)


def head_of(program: Program, cluster: Cluster, mesh: Mesh, task: str) -> dict[str, object]:
    """The first fields of every plan: what it is of, and for."""
    return {
        "autopar_version": version_of(),
        "model": ModelPart(
            name=program.name,
            fingerprint=fingerprint(program),
            parameters=program.parameter_count,
            task=task,
        ),
        "cluster": cluster.to_dict(),
        "mesh": str(mesh),
    }


def version_of() -> str:
    try:
        return version("autopar")
    except PackageNotFoundError:
        return "0"


def axes_of(problem: Problem, solution: Solution, mesh: Mesh) -> dict[str, list[str]]:
    """Logical axis -> the mesh axes that split it in some op."""
    found: dict[str, set[str]] = {}
    for op in problem.ops:
        for axis, factor in solution.choices[op.name].items():
            name = op.logical.get(factor) if factor else None
            if name:
                found.setdefault(name, set()).add(axis)
    return {name: [axis for axis in mesh.names if axis in found[name]] for name in sorted(found)}


def block_part(program: Program, problem: Problem, solution: Solution, mesh: Mesh, name: str) -> BlockPart:
    block = program.blocks[name]
    groups, made = arriving(problem), makers(problem)

    def text(node: str, sharding: Sharding | None = None) -> str:
        value = f"{name}/{node}"
        return (sharding or solution.shardings[value]).format(problem.values[value].info.shape)

    def handed_on(node: str) -> str:
        """As the blocks that take it have it; whole for what the program returns."""
        value = problem.values[f"{name}/{node}"]
        if value.name not in made:
            return text(node)
        if value.interface in groups:
            return text(node, solution.shardings[groups[value.interface][0].name])
        return text(node, Sharding.whole(len(value.info.shape)))

    return BlockPart(
        times=program.multiplicity[name],
        inputs=tuple(text(node) for node in block.inputs),
        outputs=tuple(handed_on(node) for node in block.outputs),
        state={node: text(node) for node in block.state},
        ops={
            op.name.split("/", 1)[1]: {
                axis: factor for axis, factor in solution.choices[op.name].items() if factor
            }
            for op in problem.ops
            if op.name.split("/", 1)[0] == name
        },
    )


def state_of(program: Program, solution: Solution, rows: Sequence[str]) -> dict[str, str]:
    """Every parameter of the model as it is stored: ZeRO-3 cuts the rows of each rank's piece over the axes `rows`,
    but those on which the ranks have other parameters already (of experts, ep)."""
    where: dict[str, str] = {}
    for call in program.calls:
        for node, state in zip(program.blocks[call.block].state, call.state, strict=True):
            where.setdefault(state, f"{call.block}/{node}")
    texts = {}
    for state, info in program.state.items():
        if info.kind != "parameter" or state not in where:
            continue
        sharding = solution.shardings[where[state]]
        free = tuple(axis for axis in rows if axis not in sharding.axes)
        if free and sharding.dims:
            sharding = sharding.with_dim(0, (*sharding.dims[0], *free))
        texts[state] = sharding.format(info.shape)
    return texts


def _alternatives(winner: Found, tried: Sequence[Found]) -> list[Alternative]:
    """The fastest that fit and the fastest that do not, one per mesh and recompute."""
    best: dict[tuple[object, ...], Found] = {}
    for found in sorted(tried, key=lambda found: found.step_time_s):
        same = (found.mesh, found.recompute) == (winner.mesh, winner.recompute)
        if not found.fits or not same:
            best.setdefault((found.mesh, found.recompute, found.fits), found)
    slower = [found for found in best.values() if found.fits][:_SLOWER]
    misses = [found for found in best.values() if not found.fits][:_MISSES]
    return [
        Alternative(
            mesh=str(found.mesh),
            micro_batches=found.micro_batches,
            recompute="full" if found.recompute == "full" else "none",
            step_time_s=found.step_time_s,
            memory_total_bytes=found.memory_total_bytes,
            fits=found.fits,
            reason=_reason(found, winner),
        )
        for found in (*slower, *misses)
    ]


def _reason(found: Found, winner: Found) -> str:
    if not found.fits:
        kind = max(found.memory_bytes, key=lambda kind: found.memory_bytes[kind])
        return f"{(found.memory_total_bytes - found.limit_bytes) / 2**30:.2f} GiB over, most is {kind}"
    slower = 100 * (found.step_time_s / winner.step_time_s - 1)
    if slower <= 0:
        return "as fast, but leaves less memory free"
    kind = max(found.time_s, key=lambda kind: found.time_s[kind] - winner.time_s[kind])
    return f"{slower:.1f} % slower, most is {kind}"


def _unruled(problem: Problem, winner: Found, cluster: Cluster, precision: str) -> list[Unruled]:
    bare = [op for op in problem.ops if op.rule is None]
    if not bare:
        return []
    pricer = Pricer(problem, winner.mesh, Prices.of(cluster, winner.mesh, precision, problem))
    listed = []
    for op in bare:
        names = [name for name in (*op.operands, *op.results) if name in problem.values]
        seconds = (
            sum(pricer.bytes[name] for name in names) / pricer.prices.roofline.memory
            + pricer.prices.roofline.launch_s
        )
        both = 2 if any(problem.values[name].gradient for name in names) else 1
        block, _, node = op.name.partition("/")
        listed.append(
            Unruled(
                op=f"{node} = {op.kind}",
                block=block,
                times=op.times,
                bytes=math.ceil(sum(pricer.bytes[name] for name in names)),
                seconds=seconds * both * op.times * winner.micro_batches,
            )
        )
    return listed


def _notes(winner: Found) -> list[str]:
    notes = []
    if winner.lean:
        notes.append(
            "parameters are stored split over tp wherever possible: the fastest placement did not fit in memory"
        )
    return notes
