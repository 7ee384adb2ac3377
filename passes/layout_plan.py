"""Layout plan: a layout that was found, with the placement of one stage, as a Plan.

In:  what the layout search found, the Program and Problem it was described from.
Out: a Plan whose mesh is pp, dp, fsdp, cp, tp, and whose blocks say how every tensor lies.

The placement is made at the layout's micro-batch, on the mesh that the runtime joins: data, ep, cp and tp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autopar.cluster import Cluster
from autopar.cost import step
from autopar.cost.compute import kind_of
from autopar.cost.layout_memory import timeline
from autopar.cost.pipeline import Priced
from autopar.cost.prices import PRECISIONS, Prices
from autopar.cost.software import default_software, load_software
from autopar.errors import ConstraintError, ShardingError, UsageError
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.passes.combinations import mesh_of
from autopar.passes.decisions import Decisions, Word, parse_decisions
from autopar.passes.describe import describe
from autopar.passes.layout_mixed import search_any
from autopar.passes.layout_search import Alternative as Other
from autopar.passes.layout_search import Found
from autopar.passes.layout_sensitivity import steadier
from autopar.passes.layout_space import Space
from autopar.passes.placement import solve
from autopar.passes.plan_writer import axes_of, block_part, head_of, on_mesh, state_of
from autopar.passes.propagate import check_fixed
from autopar.plan_parts import Alternative, DataPart, PredictedPart
from autopar.plans import Plan
from autopar.problem import Problem, Solution
from autopar.program import Program
from autopar.workload import Workload

OBJECTIVES = ("time", "memory", "robust")
_SLOWER, _MISSES = 8, 4
EXPERT, SEQUENCE = "expert", "sequence"
INNER = frozenset(
    {"heads", "ffn", "vocab", "expert"}
)  # logical axes that lie inside a tensor-parallel region


def plan_layout(
    program: Program,
    problem: Problem,
    cluster: Cluster,
    *,
    batch: int,
    decisions: Decisions,
    objective: str = "time",
    task: str = "causal-lm",
    constraints: Sequence[str] = (),
    shardings: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Describe the program, search all layouts, place the best one. `shardings`: those of the constraints that are
    about shardings; the problem has them fixed. Raises InfeasibleError, ConstraintError, UsageError."""
    workload = describe(program, problem)
    software = default_software(cluster.device.name)
    precisions = ("fp32",) if cluster.device.name == "cpu" else ("bf16",)
    space = Space(workload, cluster, batch, decisions, precisions)
    space = replace(space, decisions=Decisions((*decisions.words, *_divides(problem, space, shardings))))
    if objective not in OBJECTIVES:
        raise UsageError(
            f"unknown objective {objective!r}", where="objective", hint=f"one of {', '.join(OBJECTIVES)}"
        )
    aim = "time" if objective == "robust" else objective
    found, where, note = search_any(space, software, objective=aim, progress=progress)
    if objective == "robust" and not where.mixed:
        found = steadier(replace(space, cluster=where), software, found)
    plan = write_layout_plan(
        program, problem, workload, found, where,
        batch=batch, task=task, software=software.name, constraints=constraints,
    )  # fmt: skip
    return plan if note is None else plan.model_copy(update={"notes": (note, *plan.notes)})


def _divides(problem: Problem, space: Space, shardings: Sequence[str]) -> tuple[Word, ...]:
    """What the user's shardings leave of tp: the sizes at which all that is fixed divides."""
    if not shardings:
        return ()
    sizes, refusal = [], None
    for tp in space.allowed("tp", space.tensor_ways):
        try:
            check_fixed(problem, mesh_of(tp=tp), shardings)
            sizes.append(tp)
        except ConstraintError as error:
            refusal = refusal or error
    if refusal is not None and not sizes:
        raise refusal
    return parse_decisions([f"tp={'|'.join(map(str, sizes))}"]).words


def layout_words(
    mesh: str | Mesh | None,
    micro_batches: int | None,
    recompute: str | None,
    precision: str,
    batch: int,
    devices: int,
) -> list[str]:
    """The options of a plan as decisions: `mesh` fixes the axes that it names (fsdp as ZeRO-3), `micro_batches` the
    size of one."""
    words = [f"precision={precision}"]
    if recompute is not None:
        words.append(f"recompute={recompute}")
    try:
        named = (Mesh.parse(mesh) if isinstance(mesh, str) else mesh).sizes if mesh is not None else {}
    except ShardingError as error:
        raise UsageError(error.what, where=error.where, hint=error.hint) from None
    known = {"dp", "fsdp", "tp", "cp", "pp", "ep", "etp"}
    if unknown := set(named) - known:
        raise UsageError(
            f"mesh {mesh}: unknown axis {sorted(unknown)[0]!r}", hint=f"axes {', '.join(sorted(known))}"
        )
    product = math.prod(size for axis, size in named.items() if axis not in ("ep", "etp"))
    if devices % product or ("dp" in named and product != devices):
        raise UsageError(
            f"mesh {mesh} has {product} devices, the cluster {devices} devices",
            hint="sizes whose product is that",
        )
    words += [f"{axis}={named[axis]}" for axis in ("tp", "cp", "pp", "ep", "etp") if axis in named]
    fsdp = named.get("fsdp", 1)
    if "dp" in named:
        if batch % (named["dp"] * fsdp):
            raise UsageError(
                f"batch {batch} does not divide over dp*fsdp = {named['dp'] * fsdp}",
                where=f"mesh {mesh}",
                hint=f"a multiple of {named['dp'] * fsdp}",
            )
        words.append(f"dp={named['dp'] * fsdp}")
    if fsdp > 1:
        words += ["zero=3", f"shard={fsdp if named.get('dp', 1) > 1 else 0}"]
    if micro_batches is not None:
        sizes = [
            size
            for size in range(1, batch + 1)
            if batch % (size * micro_batches) == 0 and devices % (batch // (size * micro_batches)) == 0
        ]
        if not sizes:
            raise UsageError(
                f"batch {batch} in {micro_batches} micro-batches does not divide over {devices} devices",
                where="micro-batches",
                hint="a number that divides the batch",
            )
        words.append("mbs=" + "|".join(map(str, sizes)))
    return words


def write_layout_plan(
    program: Program,
    problem: Problem,
    workload: Workload,
    found: Found,
    cluster: Cluster,
    *,
    batch: int,
    task: str,
    software: str,
    constraints: Sequence[str] = (),
) -> Plan:
    """The Plan of the best layout."""
    best, layout = found.best, found.best.layout
    sizes = layout.mesh_sizes()
    mesh = Mesh.of(sizes)
    run = Mesh.of({axis: size for axis, size in layout.run_sizes().items() if axis != "pp"})
    micro_batches = batch // (layout.dp * layout.mbs)
    problem = problem.with_batch(batch // micro_batches)
    solution = on_mesh(_place(problem, layout, cluster, micro_batches), run)
    step_s = best.step_s
    peak = cluster.device.peak("fp32" if layout.precision == "fp32" else "bf16")
    flops = workload.flops_per_token() * batch * workload.seq
    memory = {kind: int(size) for kind, size in best.memory_bytes.items()}
    moments = timeline(workload, layout, cluster, load_software(software), batch)
    return Plan.model_validate(
        {
            **head_of(program, cluster, mesh, task),
            "data": DataPart(batch=batch, seq=workload.seq, micro_batches=micro_batches),
            "precision": layout.precision,
            "recompute": layout.recompute,
            "zero": layout.zero,
            "axes": axes_of(problem, solution, run),
            "blocks": {
                name: block_part(program, problem, solution, run, name) for name in program.multiplicity
            },
            "state": state_of(program, solution, zero_axes(layout, run) if layout.zero == 3 else ()),
            "predicted": PredictedPart(
                step_time_s=step_s,
                tokens_per_s=batch * workload.seq / step_s,
                mfu=flops / (step_s * cluster.device_count * peak),
                time_s=dict(best.time_s),
                memory_bytes=memory,
                memory_total_bytes=int(best.memory_total),
                memory_limit_bytes=int(found.limit_bytes),
                bound_s=min(found.bound_s, step_s),
                searched={"cores": found.cores, "layouts": found.rows, "simulated": found.simulated},
                moments={label: int(sum(held.values())) for label, held in moments},
            ),
            "alternatives": alternatives(found),
            "notes": [*padded(workload, layout), *program.notes, *workload.notes[:10]],
            "constraints": list(constraints),
            "layout": str(layout),
            "software": software,
            "workload": workload.to_dict(),
        }
    )


def zero_axes(layout: Layout, mesh: Mesh) -> tuple[str, ...]:
    """The axes over which ZeRO splits what the ranks along them would hold the same of."""
    axes = ("fsdp", "ep", "cp") if layout.zero == 3 else ("dp", "fsdp", "ep", "cp") if layout.zero else ()
    return tuple(axis for axis in axes if mesh.sizes.get(axis, 1) > 1)


def padded(workload: Workload, layout: Layout) -> list[str]:
    """What is to be said of a vocabulary that tp does not divide."""
    vocab, tp = workload.vocab, layout.tp
    if vocab % tp == 0:
        return []
    return [
        f"the vocabulary of {vocab:,} does not divide by tp={tp}: priced as padded to {-(-vocab // tp) * tp:,}; "
        "unless the model is padded so, its products are placed as the blocks say, without splitting it"
    ]


def _place(small: Problem, layout: Layout, cluster: Cluster, micro_batches: int) -> Solution:
    """The placement of a micro-batch's ops on the mesh that the runtime joins, its data axes one."""
    sizes = layout.run_sizes()
    mesh = mesh_of(dp=sizes["dp"] * sizes["fsdp"], ep=sizes["ep"], cp=sizes["cp"], tp=sizes["tp"])
    precision = layout.precision if layout.precision in PRECISIONS else "bf16"
    prices = Prices.of(cluster, mesh, precision, small, micro_batches=micro_batches)
    prices = Prices.of(
        cluster, mesh, precision, small,
        parameter_s=step.parameter_s(prices, micro_batches), micro_batches=micro_batches,
    )  # fmt: skip
    if layout.sp and layout.tp > 1:
        small = replace(small, fixed=dict(small.fixed) | _as_priced(small, layout))
    return solve(small, mesh, prices)


def _as_priced(problem: Problem, layout: Layout) -> dict[str, dict[str, str | None]]:
    """What the layout's price takes for granted, where it divides and the user fixed nothing else: products of heads,
    ffn and vocabulary split there, and what lies between on the residual stream split over the sequence."""
    found: dict[str, dict[str, str | None]] = {}
    for op in problem.ops:
        chosen = dict(problem.fixed.get(op.name, {}))
        if op.rule is None or "tp" in chosen:
            continue
        kind, names = kind_of(op), set(op.logical.values())
        if kind in ("matmul", "attention"):
            wanted = {name for name in names & INNER if name != EXPERT}
        elif kind == "pointwise" and {SEQUENCE, "hidden"} <= names and not names & INNER:
            wanted = {SEQUENCE}
        else:
            continue
        ways = layout.tp * (layout.cp if SEQUENCE in wanted else 1)
        able = [
            factor
            for factor in op.rule.splittable()
            if op.logical.get(factor) in wanted and op.rule.sizes[factor] % ways == 0
        ]
        if len(able) == 1:
            found[op.name] = {**chosen, "tp": able[0]}
    return found


def alternatives(found: Found) -> list[Alternative]:
    """The fastest other layouts that fit and that do not, and why they were not chosen."""
    best = found.best
    own = best.layout.with_(cuts=())
    others = [other for other in found.alternatives if other.layout != own]
    slower = [other for other in others if other.fits][:_SLOWER]
    misses = [other for other in others if not other.fits][:_MISSES]
    return [
        Alternative(
            mesh=str(other.layout),
            micro_batches=max(
                1,
                round(
                    best.micro_batches
                    * best.layout.dp
                    * best.layout.mbs
                    / (other.layout.dp * other.layout.mbs)
                ),
            ),
            recompute=_word(other.layout.recompute),
            step_time_s=other.step_s,
            memory_total_bytes=int(other.memory_bytes),
            fits=other.fits,
            reason=_reason(other, best, found.limit_bytes),
        )
        for other in (*slower, *misses)
    ]


def _word(recompute: str) -> Any:
    return recompute


def _reason(other: Other, best: Priced, limit: float) -> str:
    if not other.fits:
        return f"{(other.memory_bytes - limit) / 2**30:.2f} GiB over"
    slower = 100 * (other.step_s / best.step_s - 1)
    return f"{slower:.1f} % slower" if slower > 0 else "as fast as can be told"
