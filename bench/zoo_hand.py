"""As good as by hand: our placement beside the plan that Transformers ships with each model, under one cost model.

    python bench/zoo_hand.py [--models llama,qwen3_moe] [--jobs 1] [--out rows.json]

Both are placements of the same captured program at the config class's size, batch 1, bf16, on the mesh tp=8 of one
node of eight H100, priced by `autopar/cost`: seconds of a training step, bytes a rank sends in it, memory of a rank.
The hand plan is one of the placements our search chooses from, so ours must not be slower; a row where it is, or where
something could not be priced, says so and fails the run. `found` names where our placement saves the most.

What the sizes of a row leave out: nothing is recomputed and the optimizer's state is whole on tp ranks, so the largest
models do not fit one node in either column. The comparison does not depend on that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import multiprocessing
import resource
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from autopar.cluster import load_cluster
from autopar.cost import step
from autopar.cost.prices import Prices
from autopar.mesh import Mesh
from autopar.passes.axes import name_axes
from autopar.passes.capture import capture
from autopar.passes.combinations import mesh_of
from autopar.passes.hand_plan import hand_placement, plans_of
from autopar.passes.placement import solve
from autopar.passes.pricing import (
    Pricer,
    block_of,
    candidate_of,
    evaluate,
    normal_use,
    steps_between,
    total_s,
)
from autopar.passes.problem import build_problem
from autopar.passes.search import price_placement
from autopar.problem import Op, Problem, Solution
from autopar.program import Program
from autopar.rules.rule import PAIR, SUMS
from autopar.sharding import COLLECTIVES, Use, sent_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.zoo_published import SEQUENCE, hand_planned, published_model

CLUSTER, TP = "h100:1x8", 8
# Hand and ours are sums of the same prices in another order.
ROUNDING = 1e-9
CPU_S, TIMEOUT_S = 45.0, 900.0
SHORT = 256  # tokens, where SEQUENCE takes longer than CPU_S
_SENT = {"all_reduce": 2.0}  # bytes on the wire per byte of the tensor and (k-1)/k; 1 for the others


@dataclass(frozen=True)
class Cost:
    """Of one training step. `objective_s`: what the search minimises (ops, moves, the optimizer's traffic)."""

    step_s: float
    sent_bytes: float
    memory_bytes: float
    objective_s: float
    kinds_s: Mapping[str, float]


@dataclass(frozen=True)
class HandRow:
    """One model. `error`: why there is no comparison (then `hand` and `ours` are None). `plan`: which plan by hand, the
    faster of `tp` and `tp+ep`; `named`: how many parameters of the unique blocks it names; `notes`: where it could not
    be followed. `found`: what our placement does otherwise, by seconds saved."""

    model: str
    class_name: str = ""
    parameters: int = 0
    sequence: int = 0
    hand: Cost | None = None
    ours: Cost | None = None
    plan: str = ""
    named: int = 0
    notes: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def ratio(self) -> float | None:
        """Hand's seconds by ours: above 1 where ours is faster."""
        return self.hand.step_s / self.ours.step_s if self.hand and self.ours else None

    @property
    def worse(self) -> bool:
        """Ours costs more by the measure that it was to minimise."""
        return bool(
            self.hand and self.ours and self.ours.objective_s > self.hand.objective_s * (1 + ROUNDING)
        )


def compare(model_type: str) -> HandRow:
    """Price the hand plan and ours. Errors become a row's `error`. A model whose 4096 tokens take too long (a loop over
    positions, which export unrolls) is compared with fewer."""
    try:
        for sequence in (SEQUENCE, SHORT):
            with contextlib.suppress(_TooLong), _cpu_limit(CPU_S):
                return _compare(model_type, sequence)
        return HandRow(model_type, error=f"more than {CPU_S} CPU seconds with {SHORT} tokens too")
    except Exception as error:  # a bench row says what went wrong, whatever it was
        text = " ".join(str(error).split())[:300]
        return HandRow(model_type, error=f"{type(error).__name__}: {text}")


class _TooLong(BaseException):  # one that no library takes for an error of its own
    pass


@contextlib.contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Raise _TooLong after so much CPU time (in the main thread of a process; elsewhere there is no limit)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def _compare(model_type: str, sequence: int) -> HandRow:
    clock = _Clock()
    published = published_model(model_type, sequence)
    clock.lap("build")
    program = capture(
        published.model, published.inputs, outputs=(published.output,), name=model_type, dtype=torch.bfloat16
    )
    program, axes = name_axes(program)
    problem = build_problem(program, axes)
    clock.lap("capture")
    cluster, mesh = load_cluster(CLUSTER), mesh_of(tp=TP)
    bare = Prices.of(cluster, mesh, "bf16", problem)
    prices = replace(bare, parameter_s=step.parameter_s(bare, 1))
    ours = solve(problem, mesh, prices)
    clock.lap("solve")
    placed = {
        name: hand_placement(program, problem, plan, mesh) for name, plan in plans_of(published.model).items()
    }
    clock.lap("hand plan")

    def cost(solution: Solution) -> Cost:
        found = price_placement(program, problem, cluster, mesh, solution, precision="bf16")
        objective = total_s(evaluate(problem, mesh, prices, solution.choices, solution.shardings))
        return Cost(
            found.step_time_s, sent(problem, mesh, prices, solution), found.memory_total_bytes, objective,
            {kind: seconds for kind, seconds in found.time_s.items() if seconds},
        )  # fmt: skip

    by_hand = {name: Solution(hand.choices, hand.shardings, {}, 0.0) for name, hand in placed.items()}
    costs = {name: cost(solution) for name, solution in by_hand.items()}
    fastest = min(costs, key=lambda name: costs[name].objective_s)
    own = cost(ours)
    clock.lap("price")
    return HandRow(
        model_type,
        type(published.model).__name__,
        program.parameter_count,
        published.sequence,
        costs[fastest],
        own,
        fastest,
        placed[fastest].used,
        placed[fastest].notes,
        tuple(differences(program, problem, mesh, prices, by_hand[fastest], ours)),
        cpu_s=clock.laps,
    )


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.last = time.process_time()

    def lap(self, name: str) -> None:
        now = time.process_time()
        self.laps[name], self.last = round(now - self.last, 3), now


def sent(problem: Problem, mesh: Mesh, prices: Prices, solution: Solution) -> float:
    """Bytes one rank sends in a step, forward and backward, by ring collectives: (k-1)/k of the tensor, twice for an
    all-reduce. Every reshard once for each distinct use, as they are lowered; and what ops send inside of them."""
    pricer = Pricer(problem, mesh, prices)
    total = 0.0
    for name, use in _uses(problem, mesh, solution):
        value, made = problem.values[name], solution.shardings[name]
        local = pricer.bytes[name] / pricer.ways(made)
        for move in steps_between(made, use) or ():
            size = mesh.sizes[move.axis]
            kinds = COLLECTIVES[move.kind, move.grad_sums]
            moved = list(zip(kinds, sent_bytes(move, local, size), strict=True))
            for kind, count in moved if value.gradient else moved[:1]:
                if kind:
                    total += pricer.times[block_of(name)] * count * _SENT.get(kind, 1.0) * (size - 1) / size
            if move.kind == "all_gather":
                local *= size
            elif move.kind in ("slice", "reduce_scatter"):
                local /= size
    for op in problem.ops:
        candidate = candidate_of(op, problem, mesh, solution.choices[op.name])
        total += op.times * pricer.sent_inside(op, candidate)
    return total


def _uses(problem: Problem, mesh: Mesh, solution: Solution) -> list[tuple[str, Use]]:
    """(value, use): every distinct use, those by other blocks and by the program's outputs included."""
    from autopar.passes.pricing import arriving, makers
    from autopar.sharding import Sharding

    found: dict[tuple[str, Use], None] = {}
    for op in problem.ops:
        candidate = candidate_of(op, problem, mesh, solution.choices[op.name])
        for name, use in zip(op.operands, candidate.uses, strict=True):
            found[name, normal_use(problem.values[name], use)] = None
    groups = arriving(problem)
    for name in makers(problem):
        value = problem.values[name]
        if value.interface in groups:
            found[name, Use(solution.shardings[groups[value.interface][0].name])] = None
        if name in problem.outputs:
            found[name, Use(Sharding.whole(len(value.info.shape)))] = None
    return list(found)


# ---- what is different -------------------------------------------------------------------------------------------


def differences(
    program: Program, problem: Problem, mesh: Mesh, prices: Prices, hand: Solution, ours: Solution
) -> list[str]:
    """`loss: vocab instead of whole, 2.4 ms`: ops that the two split otherwise, by compute saved; then moves."""
    pricer = Pricer(problem, mesh, prices)
    names = _state_names(program)
    saved: dict[str, float] = defaultdict(float)
    for op in problem.ops:
        before, after = hand.choices[op.name].get("tp"), ours.choices[op.name].get("tp")
        if before == after:
            continue
        seconds = [
            op.times * sum(pricer.op_s(op, candidate_of(op, problem, mesh, solution.choices[op.name])))
            for solution in (hand, ours)
        ]
        what = f"{_kind(op, names)}: {_word(op, after)} instead of {_word(op, before)}"
        saved[what] += seconds[0] - seconds[1]
    ranked = sorted(saved.items(), key=lambda item: -abs(item[1]))
    found = [f"{what} ({_ms(-seconds)})" for what, seconds in ranked[:4] if abs(seconds) > 1e-6]
    moves = [_moves_s(problem, mesh, prices, solution) for solution in (hand, ours)]
    if abs(moves[0] - moves[1]) > 1e-6:
        found.append(f"communication ({_ms(moves[1] - moves[0])})")
    return found


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:+.2f} ms"


def _moves_s(problem: Problem, mesh: Mesh, prices: Prices, solution: Solution) -> float:
    costs = evaluate(problem, mesh, prices, solution.choices, solution.shardings)
    return sum(
        seconds for cost in costs.values() for kind, seconds in cost.items() if "communication" in kind
    )


def _state_names(program: Program) -> dict[str, str]:
    """Value name -> the short name of the module it belongs to (`q_proj`)."""
    found: dict[str, str] = {}
    for call in program.calls:
        for node, state in zip(program.blocks[call.block].state, call.state, strict=True):
            parts = [part for part in state.split(".") if not part.isdigit()]
            found.setdefault(f"{call.block}/{node}", parts[-2] if len(parts) > 1 else parts[-1])
    return found


def _kind(op: Op, names: Mapping[str, str]) -> str:
    short = op.kind.split(".")[-1]
    if "cross_entropy" in short or "loss" in short:
        return "loss"
    if "attention" in short:
        return "attention"
    if short in ("linear", "mm", "bmm", "matmul", "embedding", "experts", "_grouped_mm", "conv2d", "conv1d"):
        own = [names[name] for name in op.operands if name in names]
        return own[0] if own else short
    return "pointwise, norms"


def _word(op: Op, factor: str | None) -> str:
    if factor is None:
        return "whole"
    if factor.startswith(SUMS):
        return "partial sums"
    words = [op.logical.get(part, part) for part in factor.split(PAIR)]
    return "~".join(words)


# ---- running -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="our placements beside the plans that Transformers ships")
    parser.add_argument("--models", help="comma-separated model types (default: all with a plan)")
    parser.add_argument("--jobs", type=int, default=1, help="models priced at a time")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options = parser.parse_args(arguments)
    models = options.models.split(",") if options.models else hand_planned()
    rows = run(models, options.jobs, options.out)
    print(summary(rows))
    return 1 if any(row.worse for row in rows) else 0


def run(models: Sequence[str], jobs: int = 1, out: Path | None = None) -> list[HandRow]:
    """One process per model, so that its memory goes with it; forked, so that libraries are imported once. `out` holds
    the rows there are at any time."""
    import transformers.modeling_utils  # noqa: F401  (imported here for all children)

    context = multiprocessing.get_context("fork")
    waiting, rows = list(models), {}
    running: dict[str, tuple[Any, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(name, there))
            process.start()
            there.close()
            running[name] = (process, here, time.monotonic())
        for name, (process, pipe, started) in list(running.items()):
            row = None
            if pipe.poll(0.05):
                try:
                    row = pipe.recv()
                except EOFError:
                    process.join()
                    row = HandRow(name, error=f"its process ended with {process.exitcode}")
            elif time.monotonic() - started > TIMEOUT_S:
                row = HandRow(name, error=f"no row within {TIMEOUT_S:.0f} s")
            if row is not None:
                process.kill()
                process.join()
                rows[name] = row
                del running[name]
                print(line(row), flush=True)
                if out is not None:
                    done = [asdict(rows[each]) for each in models if each in rows]
                    out.write_text(json.dumps(done, indent=1) + "\n")
    return [rows[name] for name in models]


def _child(name: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    pipe.send(compare(name))
    pipe.close()


def line(row: HandRow) -> str:
    """`llama  0.072 s | 0.066 s  1.09x  0.41 | 0.36 GB  ...`."""
    if row.error or row.hand is None or row.ours is None:
        return f"{row.model:34} {row.error}"
    hand, ours = row.hand, row.ours
    assert row.ratio is not None
    mark = "WORSE " if row.worse else ""
    return (
        f"{row.model:34} {mark}{hand.step_s * 1e3:9.1f} | {ours.step_s * 1e3:9.1f} ms {row.ratio:6.2f}x  "
        f"{hand.sent_bytes / 1e9:7.2f} | {ours.sent_bytes / 1e9:7.2f} GB  "
        f"{hand.memory_bytes / 2**30:7.1f} | {ours.memory_bytes / 2**30:7.1f} GiB  "
        f"{sum(row.cpu_s.values()):5.1f} s  {'; '.join(row.found[:3])}"
        + (f"  [{len(row.notes)} notes]" if row.notes else "")
    )


def hand_section(models: Sequence[str], jobs: int = 1) -> str:
    """A page's section in Markdown on those of the models that have a plan by hand."""
    return page(run([name for name in hand_planned() if name in set(models)], jobs))


def page(rows: Sequence[HandRow]) -> str:
    """A line per model: seconds, bytes sent and memory by hand | ours, and what ours does otherwise."""
    lines = [
        "## As good as by hand",
        "",
        "Our placement beside the plan in the model's own config, both of the program captured at the config class's "
        f"size (batch 1, bf16, up to 4096 tokens), on tp={TP} of `{CLUSTER}`, priced by the same cost model: one training "
        "step, gigabytes a rank sends in it, GiB of a rank without recomputation (the largest models do not fit one node "
        "under either). `tp+ep`: with the experts' plan, where that is faster. `python bench/zoo_hand.py`.",
        "",
        summary(rows),
        "",
        "| model | parameters | tokens | plan | ms by hand | ours | ratio | GB sent | ours | GiB | ours | what ours does |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.hand is None or row.ours is None or row.ratio is None:
            continue
        hand, ours = row.hand, row.ours
        cells = (
            row.model, f"{row.parameters / 1e9:.2f} B", str(row.sequence), row.plan,
            f"{hand.step_s * 1e3:.1f}", f"{ours.step_s * 1e3:.1f}", f"{row.ratio:.2f}" + (" WORSE" if row.worse else ""),
            f"{hand.sent_bytes / 1e9:.2f}", f"{ours.sent_bytes / 1e9:.2f}",
            f"{hand.memory_bytes / 2**30:.1f}", f"{ours.memory_bytes / 2**30:.1f}", "; ".join(row.found[:3]),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    noted = [row for row in rows if row.notes]
    if noted:
        lines += ["", "Where a plan by hand could not be followed:", ""]
        lines += [f"- {row.model}: {'; '.join(row.notes[:3])}" for row in noted]
    missing = [row for row in rows if row.error]
    if missing:
        lines += ["", "Not compared:", ""]
        lines += [f"- {row.model}: {row.error}" for row in missing]
    compared = {row.model for row in rows}
    left = [name for name in hand_planned() if name not in compared]
    if left:
        lines += ["", f"Not run ({len(left)} types): {', '.join(left)}."]
    return "\n".join(lines) + "\n"


def summary(rows: Sequence[HandRow]) -> str:
    able = [row for row in rows if row.ratio is not None]
    if not able:
        return f"no row of {len(rows)} compared"
    ratios = [row.ratio for row in able if row.ratio is not None]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    more = [sum(getattr(row.ours, name) > getattr(row.hand, name) * (1 + ROUNDING) for row in able)
            for name in ("step_s", "sent_bytes", "memory_bytes")]  # fmt: skip
    used = sum(sum(row.cpu_s.values()) for row in able) / len(able)
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    memory = f", {children:.1f} GiB at most" if children > 0.1 else ""  # of rows made here, not of those read
    return (
        f"{len(able)} of {len(rows)} compared, {len(rows) - len(able)} without; ours worse: {sum(row.worse for row in able)}; "
        f"faster by 1 % or more: {sum(ratio > 1.01 for ratio in ratios)}; geometric mean {mean:.2f}x, most {max(ratios):.2f}x; "
        f"ours takes more seconds in {more[0]}, sends more in {more[1]}, holds more in {more[2]}; "
        f"{used:.1f} CPU s a model{memory}"
    )


if __name__ == "__main__":
    sys.exit(main())
