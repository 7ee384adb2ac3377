"""Search: the fastest combination of mesh, micro-batches and recomputation that fits, with its placement.

In:  a Program, its Problem, a Cluster, the batch, what the user forces.
Out: a Plan, or an InfeasibleError that says by how much and what would fit.

Combinations are taken best first. One is priced at the fewest micro-batches first: with more, kernels are smaller,
parameters are gathered more often and less hides the gradient's reduction, so no combination gets faster by more
micro-batches. What it takes with few is therefore a lower bound of what it takes with more, and the first that is
popped and fits is the best (of those within half a percent, one that leaves a tenth of the memory free is taken
where there is one). Where the fastest placement does not fit, one that stores parameters split comes next.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cluster import Cluster
from autopar.cost import lifetimes, memory, step
from autopar.cost.alive import BUFFERS
from autopar.cost.prices import Prices
from autopar.errors import ConstraintError, InfeasibleError, UsageError
from autopar.mesh import Mesh
from autopar.passes import pricing
from autopar.passes.candidates import candidates
from autopar.passes.combinations import data_ways, mesh_of, meshes, splits
from autopar.passes.placement import solve
from autopar.passes.plan_writer import Found, write_plan
from autopar.passes.propagate import check_fixed
from autopar.plans import Plan
from autopar.problem import Problem, Solution
from autopar.program import Program

RECOMPUTE = ("none", "full")
_LEAN = (
    100.0  # times what the optimizer takes per element: makes a placement store every large parameter split
)
# Once the best is known, more placements are made for the list of alternatives up to this many.
_PLACEMENTS = 20
_TIED = 1.005  # of plans as close as this, which no prediction can tell apart, one with headroom in memory is taken
_HEADROOM = 0.9


@dataclass(frozen=True)
class _Placed:
    """A placement of one (tp, data ways, micro-batches): its solution on the mesh dp x tp, and what it keeps."""

    problem: Problem
    prices: Prices
    solution: Solution
    part: step.MicroBatch
    holdings: step.Holdings
    stored: memory.Stored


@dataclass(frozen=True)
class _Key:
    mesh: Mesh
    micro_batches: int
    recompute: str
    lean: bool


def search(
    program: Program,
    problem: Problem,
    cluster: Cluster,
    *,
    batch: int,
    seq: int,
    precision: str,
    mesh: Mesh | None = None,
    micro_batches: int | None = None,
    recompute: str | None = None,
    constraints: Sequence[str] = (),
    task: str = "causal-lm",
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The fastest Plan that fits. `batch`: sequences per step over the whole cluster; what is None is searched.

    Raises UsageError (nothing divides), ConstraintError (no mesh allows the constraints), InfeasibleError.
    """
    _check(batch, seq, micro_batches, recompute)
    allowed = _allowed(problem, meshes(cluster.device_count, mesh, _experts(problem)), constraints)
    counts = splits(batch, allowed, micro_batches)
    work = _Work(program, problem, cluster, batch, precision, progress)
    tried: list[Found] = []
    heap: list[tuple[float, int, _Key, Found | None]] = []
    serial = 0

    def push(bound: float, key: _Key, found: Found | None) -> None:
        nonlocal serial
        serial += 1
        heapq.heappush(heap, (bound, serial, key, found))

    for candidate in counts:
        for again in RECOMPUTE if recompute is None else (recompute,):
            push(
                work.bound_s(candidate, counts[candidate][0]),
                _Key(candidate, counts[candidate][0], again, False),
                None,
            )
    best: Found | None = None
    while heap:
        bound, _, key, found = heapq.heappop(heap)
        if found is None:
            worse = best is not None and bound > best.step_time_s * _TIED
            if worse and not work.is_placed(key) and len(work.placed) >= _PLACEMENTS:
                continue
            found = work.price(key)
            if found is not None:
                push(max(bound, found.step_time_s), key, found)
            continue
        tried.append(found)
        if found.fits:
            best = best or found
            continue
        more = [count for count in counts[key.mesh] if count > key.micro_batches and _may_fit(found, count)]
        if more:
            push(found.step_time_s, replace(key, micro_batches=more[0]), None)
        if not key.lean and key.mesh.sizes["tp"] > 1 and _may_fit(found, key.micro_batches, lean=True):
            push(found.step_time_s, replace(key, lean=True), None)
    if best is None:
        raise _infeasible(tried, cluster, recompute, precision, work)
    tied = [found for found in tried if found.fits and found.step_time_s <= best.step_time_s * _TIED]
    winner = min(
        tied, key=lambda found: (found.memory_total_bytes > _HEADROOM * found.limit_bytes, found.step_time_s)
    )
    lower = min(work.bound_s(candidate, able[0]) for candidate, able in counts.items())
    return write_plan(
        program, winner, tried, work.problem_at(winner.micro_batches), cluster, batch=batch, seq=seq, precision=precision,
        task=task, constraints=constraints, bound_s=min(lower, winner.step_time_s),
    )  # fmt: skip


def _may_fit(found: Found, micro_batches: int, *, lean: bool = False) -> bool:
    """Whether it is worth a placement: what scales with the micro-batch is taken at half of its share, since another
    placement may keep less, and a lean one stores a part for each rank of tp."""
    kinds = found.memory_bytes
    stored = sum(kinds[kind] for kind in memory.STORED) / (found.mesh.sizes["tp"] if lean else 1)
    scaling = sum(kinds[kind] for kind in memory.SCALING) * found.micro_batches / micro_batches
    return stored + 0.5 * scaling + kinds[memory.RESERVED] <= found.limit_bytes


def _check(batch: int, seq: int, micro_batches: int | None, recompute: str | None) -> None:
    for name, number in (("batch", batch), ("seq", seq), ("micro-batches", micro_batches)):
        if number is not None and number < 1:
            raise UsageError(
                f"{name} is {number}, expected a positive number", where=name, hint=f"{name} 1 or more"
            )
    if recompute is not None and recompute not in RECOMPUTE:
        raise UsageError(
            f"unknown recompute {recompute!r}", where="recompute", hint=f"one of {', '.join(RECOMPUTE)}"
        )


def _allowed(problem: Problem, found: list[Mesh], constraints: Sequence[str]) -> list[Mesh]:
    """The meshes on which what the user fixed divides; the first refusal if there is none."""
    allowed, refusal = [], None
    for mesh in found:
        try:
            check_fixed(problem, mesh, constraints)
            allowed.append(mesh)
        except ConstraintError as error:
            refusal = refusal or error
    if not allowed and refusal:
        raise refusal
    return allowed


class _Work:
    """Prices combinations; placements are made once per (tp, data ways, micro-batches)."""

    def __init__(
        self,
        program: Program,
        problem: Problem,
        cluster: Cluster,
        batch: int,
        precision: str,
        progress: Callable[[str], None] | None,
    ) -> None:
        self.program, self.cluster, self.batch, self.precision = program, cluster, batch, precision
        self.problem = replace(
            problem, fixed={op: _data_as_one(choice) for op, choice in problem.fixed.items()}
        )
        self.progress = progress or (lambda _: None)
        self.recomputed = {call.block for call in program.calls if call.path}
        self.problems: dict[int, Problem] = {}
        self.placed: dict[tuple[Mesh, int, bool], _Placed] = {}
        self.bounds: dict[tuple[Mesh, int], float] = {}
        self.calls: dict[tuple[Mesh, int, bool, int], dict[str, lifetimes.Call]] = {}
        self.parameters = _parameters(program)

    def problem_at(self, micro_batches: int) -> Problem:
        if micro_batches not in self.problems:
            self.problems[micro_batches] = self.problem.with_batch(self.batch // micro_batches)
        return self.problems[micro_batches]

    def _place_key(self, key: _Key) -> tuple[Mesh, int, bool]:
        return _unsharded(key.mesh), key.micro_batches, key.lean

    def is_placed(self, key: _Key) -> bool:
        return self._place_key(key) in self.placed

    def bound_s(self, mesh: Mesh, micro_batches: int) -> float:
        """A lower bound of any plan on this mesh with so many micro-batches or more: the least compute of every op,
        no communication, and the optimizer on an even share of all parameters."""
        one = _unsharded(mesh)
        key = (one, micro_batches)
        if key not in self.bounds:
            problem = self.problem_at(micro_batches)
            pricer = pricing.Pricer(problem, one, Prices.of(self.cluster, one, self.precision, problem))
            least = sum(
                op.times * min(sum(pricer.op_s(op, candidate)) for candidate in candidates(op, problem, one))
                for op in problem.ops
            )
            stored = sum(elements * count for elements, count in self.parameters.values())
            self.bounds[key] = micro_batches * least + step.optimizer_s(
                stored / mesh.device_count, pricer.prices
            )
        return self.bounds[key]

    def price(self, key: _Key) -> Found | None:
        """Time and memory of one combination; None if its lean placement stores as much as the fast one."""
        placed = self._place(key)
        if key.lean and placed.holdings == self._place(replace(key, lean=False)).holdings:
            return None
        prices = replace(placed.prices, mesh=key.mesh)
        full = key.recompute == "full"
        seconds = step.step_s(placed.part, placed.holdings, prices, key.micro_batches, full)
        kinds = self._memory_bytes(placed, key)
        return Found(
            mesh=key.mesh,
            micro_batches=key.micro_batches,
            recompute=key.recompute,
            lean=key.lean,
            solution=placed.solution,
            time_s=seconds,
            memory_bytes={kind: int(size) for kind, size in kinds.items()},
            limit_bytes=self.cluster.device.memory_bytes,
        )

    def _memory_bytes(self, placed: _Placed, key: _Key) -> dict[str, float]:
        """Bytes by kind at the fullest moment of a step."""
        fsdp, prices = key.mesh.sizes["fsdp"], placed.prices
        added = key.micro_batches > 1
        where = (*self._place_key(key), fsdp)
        if where not in self.calls:  # the same for every choice of recompute
            self.calls[where] = lifetimes.calls(
                placed.problem, prices.mesh, placed.solution.choices, placed.solution.shardings,
                prices.item_bytes, prices.fused, lifetimes.Parameters(fsdp, added, hidden=prices.fused),
            )  # fmt: skip
        calls = self.calls[where]
        full = key.recompute == "full"
        runs = [
            memory.Run(calls[block], times, full and block in self.recomputed)
            for block, times in self.program.multiplicity.items()
        ]
        stored = (
            placed.stored
            if data_ways(key.mesh) == key.mesh.sizes["fsdp"]
            else replace(placed.stored, summed=placed.stored.all)
        )
        kinds = memory.fullest(
            runs,
            replace(stored, summed=stored.summed / fsdp),
            fsdp=fsdp,
            added=added,
            copy_bytes=2 if self.precision == "bf16" else 4,
            overlap=prices.fused,
        )
        passing = sum(kinds[kind] for kind in (BUFFERS, *memory.SCALING))
        kinds[memory.FRAGMENTS] = memory.FRAGMENTATION * passing
        kinds[memory.RESERVED] = self.cluster.device.reserved_bytes
        return kinds

    def _place(self, key: _Key) -> _Placed:
        where = self._place_key(key)
        if where not in self.placed:
            mesh, micro_batches, lean = where
            self.progress(
                f"placing tp={mesh.sizes['tp']}, {data_ways(mesh)} data ranks, {micro_batches} micro-batches{', lean' if lean else ''}"
            )
            problem = self.problem_at(micro_batches)
            prices = Prices.of(self.cluster, mesh, self.precision, problem, micro_batches=micro_batches)
            real = step.parameter_s(prices, micro_batches)
            solution = solve(
                problem,
                mesh,
                replace(prices, parameter_s=_LEAN * step.optimizer_s(1.0, prices) if lean else real),
            )
            self.placed[where] = self._measure(problem, mesh, prices, solution)
        return self.placed[where]

    def _measure(self, problem: Problem, mesh: Mesh, prices: Prices, solution: Solution) -> _Placed:
        """What a placement takes and keeps."""
        costs = pricing.evaluate(problem, mesh, prices, solution.choices, solution.shardings)
        kinds = pricing.by_kind(costs)
        part = step.MicroBatch(
            kinds[pricing.FORWARD],
            kinds[pricing.BACKWARD],
            kinds[pricing.FORWARD_MOVES],
            kinds[pricing.BACKWARD_MOVES],
            sum(costs[block][pricing.FORWARD] for block in self.recomputed),
            sum(costs[block][pricing.FORWARD_MOVES] for block in self.recomputed),
        )
        ways = {
            name: mesh.size(*solution.shardings[name].axes)
            for name, value in problem.values.items()
            if value.state
        }
        stored = sum(elements * count / ways[name] for name, (elements, count) in self.parameters.items())
        calls = []
        for block, times in self.program.multiplicity.items():
            elements = sum(
                problem_elements(problem, name) / ways[name]
                for name in (f"{block}/{node}" for node in self.program.blocks[block].state)
                if problem.values[name].gradient
            )
            calls.append((elements, times, block in self.recomputed))
        frozen = sum(
            problem_elements(problem, name) * prices.item_bytes[problem.values[name].info.dtype] / ways[name]
            for name in ways
            if not problem.values[name].gradient
        )
        summed = {
            axis: sum(
                elements * count / ways[name]
                for name, (elements, count) in self.parameters.items()
                if axis not in solution.shardings[name].axes
            )
            for axis in ("ep", "cp")
            if mesh.sizes.get(axis, 1) > 1
        }
        holdings = step.Holdings(stored, tuple(calls), summed)
        held = memory.Stored(
            all=stored,
            largest=max(
                (elements / ways[name] for name, (elements, _) in self.parameters.items()), default=0.0
            ),
            largest_call=holdings.largest_call,
            summed=sum(
                elements * count / ways[name]
                for name, (elements, count) in self.parameters.items()
                if name in _summed(problem, solution, mesh)
            ),
            frozen_bytes=frozen,
        )
        return _Placed(problem, prices, solution, part, holdings, held)


def _unsharded(mesh: Mesh) -> Mesh:
    """The mesh whose placement serves `mesh`: dp and fsdp act together on ops."""
    sizes = mesh.sizes
    return mesh_of(**{**sizes, "dp": sizes["dp"] * sizes["fsdp"], "fsdp": 1})


def _experts(problem: Problem) -> list[int]:
    """The numbers of experts of the ops that can split tokens and experts at once."""
    pairs = [
        (op.rule, pair)
        for op in problem.ops
        if op.rule is not None
        for pair in op.rule.pairs
        if op.logical.get(pair[0]) == "batch"
    ]
    return sorted({rule.sizes[pair[1]] for rule, pair in pairs})


def price_placement(
    program: Program, problem: Problem, cluster: Cluster, mesh: Mesh, solution: Solution, *, precision: str
) -> Found:
    """Time and memory of a step under any placement, a hand-made one for instance: one micro-batch of the problem's
    batch, nothing recomputed."""
    work = _Work(program, problem, cluster, problem.batch, precision, None)
    key = _Key(mesh, 1, "none", lean=False)
    prices = Prices.of(cluster, mesh, precision, problem)
    work.placed[work._place_key(key)] = work._measure(problem, mesh, prices, solution)
    found = work.price(key)
    assert found is not None
    return found


def problem_elements(problem: Problem, name: str) -> int:
    total = 1
    for size in problem.values[name].info.shape:
        total *= size
    return total


def _summed(problem: Problem, solution: Solution, mesh: Mesh) -> set[str]:
    """The state of which every use gives its gradient as sums over tp: reduced at the end of the step."""
    found: dict[str, bool] = {}
    for op in problem.ops:
        uses = op.rule.shard(solution.choices[op.name], mesh.sizes).uses if op.rule is not None else ()
        for name, use in zip(op.operands, uses or (None,) * len(op.operands), strict=True):
            if problem.values[name].state:
                found[name] = found.get(name, True) and use is not None and "tp" in use.grad_sums
    return {name for name, sums in found.items() if sums}


def _parameters(program: Program) -> dict[str, tuple[int, int]]:
    """Value name -> (elements of one, how many trainable parameters it stands for), each parameter counted once."""
    seen: set[str] = set()
    found: dict[str, tuple[int, int]] = {}
    for call in program.calls:
        for node, state in zip(program.blocks[call.block].state, call.state, strict=True):
            info = program.state[state]
            if state in seen or not info.trainable:
                continue
            seen.add(state)
            name = f"{call.block}/{node}"
            elements = 1
            for size in info.shape:
                elements *= size
            found[name] = (elements, found.get(name, (0, 0))[1] + 1)
    return found


def _data_as_one(choice: Mapping[str, str | None]) -> dict[str, str | None]:
    """What is fixed for dp or fsdp, as fixed for the one data axis that placements are made with."""
    merged = {axis: factor for axis, factor in choice.items() if axis != "fsdp"}
    if "fsdp" in choice:
        merged.setdefault("dp", choice["fsdp"])
    return merged


def _infeasible(
    tried: list[Found], cluster: Cluster, recompute: str | None, precision: str, work: _Work
) -> InfeasibleError:
    """By how much the smallest misses, and what would fit."""
    smallest = min(tried, key=lambda found: found.memory_total_bytes)
    gib = 2**30
    missing = smallest.memory_total_bytes - smallest.limit_bytes
    hints = []
    if recompute == "none":
        hints.append("recompute full")
    if precision == "fp32" and "bf16" in cluster.device.peak_tflops:
        hints.append("precision bf16")
    per_node, nodes = cluster.devices_per_node, cluster.nodes
    stored = sum(elements * count for elements, count in work.parameters.values())
    fixed = sum(size for kind, size in smallest.memory_bytes.items() if kind not in memory.STORED)
    room = smallest.limit_bytes - fixed
    if room > 0:
        needed = -(-stored * 16 // room)
        more = max(nodes + 1, -(-int(needed) // per_node))
        hints.append(f"about {more * per_node} devices ({more} nodes of {per_node})")
    largest = ", ".join(
        f"{kind} {size / gib:.2f}"
        for kind, size in sorted(smallest.memory_bytes.items(), key=lambda kv: -kv[1])[:4]
    )
    return InfeasibleError(
        f"no plan fits: the smallest needs {smallest.memory_total_bytes / gib:.2f} GiB per device, there are "
        f"{smallest.limit_bytes / gib:.2f} GiB: {missing / gib:.2f} GiB too much ({largest})",
        where=f"cluster {cluster.name}, mesh {smallest.mesh}, {smallest.micro_batches} micro-batches, "
        f"recompute {smallest.recompute}",
        hint=", or ".join(hints) or "a smaller batch, a shorter sequence, or devices with more memory",
    )
