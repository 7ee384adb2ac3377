"""Training steps of autopar beside torch's own parallelism: seconds and memory, on gloo processes of this machine.

    python bench/train.py [--models smollm2,llama4l] [--ranks 2,4] [--parts time,memory,compile] [--rounds 9]
                          [--peers ddp,fsdp,fsdp+tp] [--precision fp32] [--results FILE] [--page docs/training_speed.md]

    time     autopar and a peer in the same processes, in turns step by step (A B A B ...); where both do not fit into
             memory together, in processes of their own, in turns. Per step the slowest rank counts.
    memory   each alone: high-water mark of resident memory after set-up, of the rank with most.
    compile  what `autopar.compile` takes for Llamas of 4 and 16 layers, in a process of its own each time.

Contenders are in `train_peers.py`, models in `train_models.py`, what a rank does in `train_worker.py`. Losses of the two
must agree to 1e-3 in every step, or the comparison is refused. With --results, what is measured is added to FILE (JSON
lines), and what is there already is not measured again: a bench that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.train_page import page, table
from tests.runtime.processes import run_on

ROOT = Path(__file__).resolve().parents[1]
PAIRS = {
    2: (("ours/dp=2", "ddp"), ("ours/fsdp=2", "fsdp")),
    4: (("ours/dp=4", "ddp"), ("ours/fsdp=4", "fsdp"), ("ours/fsdp=2,tp=2", "fsdp+tp")),
}
SHAPES = {"smollm2": (4, 64), "tiny": (4, 32)}  # rows and length of the whole batch
LLAMA_SHAPE = (4, 256)
APART = {("smollm2", 4)}  # two of these take more than 16 GB on all ranks together
COMPILED_LAYERS = (4, 16)


@dataclass(frozen=True)
class Case:
    """`contenders`: in the same processes; one alone for memory."""

    part: str
    model: str
    ranks: int
    contenders: tuple[str, ...]
    precision: str
    rounds: int

    @property
    def key(self) -> list[Any]:
        return [self.part, self.model, self.ranks, list(self.contenders), self.precision]


def cases(
    models: list[str], ranks: list[int], parts: list[str], peers: list[str], precision: str, rounds: int
) -> Iterator[Case]:
    for model in models:
        for count in ranks:
            for pair in (pair for pair in PAIRS[count] if pair[1] in peers):
                if "time" in parts:
                    yield Case("time", model, count, pair, precision, rounds)
                if "memory" in parts:
                    yield from (Case("memory", model, count, (each,), precision, 2) for each in pair)
    if "compile" in parts:
        for layers in COMPILED_LAYERS:
            yield Case("compile", f"llama{layers}l", 2, ("ours/tp=2",), precision, 3)


def run_processes(case: Case, contenders: tuple[str, ...], rounds: int) -> list[Any]:
    """Each rank's measurement."""
    rows, length = SHAPES.get(case.model, LLAMA_SHAPE)
    wanted = {
        "model": case.model, "contenders": contenders, "rows": rows, "length": length, "rounds": rounds,
        "precision": case.precision,
    }  # fmt: skip
    limit = 300.0 + 60.0 * (rounds + 1) * len(contenders)
    return run_on(case.ranks, "../../bench/train_worker.py", json.dumps(wanted), timeout=limit)


def measure(case: Case) -> dict[str, Any]:
    if case.part == "compile":
        return {**asdict(case), "compile": [_compile_seconds(case) for _ in range(case.rounds)]}
    if case.part == "memory":
        ranks = run_processes(case, case.contenders, case.rounds)
        fields = ("before_mb", "after_setup_mb", "peak_mb")
        return {**asdict(case), **{field: max(rank[field] for rank in ranks) for field in fields}}
    seconds: dict[str, list[float]] = {contender: [] for contender in case.contenders}
    busy: dict[str, list[float]] = {contender: [] for contender in case.contenders}
    losses: dict[str, list[float]] = {}
    for contenders, rounds in _turns(case):
        ranks = run_processes(case, contenders, rounds)
        for contender in contenders:
            seconds[contender] += [
                max(each) for each in zip(*(r["seconds"][contender] for r in ranks), strict=True)
            ]
            busy[contender] += [
                statistics.mean(each)
                for each in zip(*(r["cpu_seconds"][contender] for r in ranks), strict=True)
            ]
            losses[contender] = ranks[0]["losses"][contender]
    _check_losses(case, losses)
    return {**asdict(case), "seconds": seconds, "cpu_seconds": busy, "losses": losses}


def _turns(case: Case) -> list[tuple[tuple[str, ...], int]]:
    """Which contenders run in which processes, one after the other, and for how many steps."""
    if (case.model, case.ranks) not in APART:
        return [(case.contenders, case.rounds)]
    return [((contender,), -(-case.rounds // 2)) for contender in case.contenders * 2]


def _check_losses(case: Case, losses: dict[str, list[float]]) -> None:
    ours, theirs = (losses[contender] for contender in case.contenders)
    tolerance = 1e-3 if case.precision == "fp32" else 2e-2
    if any(abs(one - other) > tolerance * abs(other) for one, other in zip(ours, theirs, strict=True)):
        raise RuntimeError(
            f"{case.key}: the losses differ, so the steps do not do the same: {ours}, {theirs}"
        )


_COMPILE = """
import json, sys, time
import torch, autopar
from bench.train_models import batch_of, build
torch.set_num_threads(1)
model, batch = build(sys.argv[1]), batch_of(sys.argv[1], 4, 256, 0)
start, busy = time.perf_counter(), time.process_time()
autopar.compile(model, "cpu:2", batch, mesh="tp=2", micro_batches=1, precision="fp32")
print(json.dumps([time.perf_counter() - start, time.process_time() - busy]))
"""


def _compile_seconds(case: Case) -> list[float]:
    """Seconds by the clock and CPU seconds."""
    command = [sys.executable, "-c", _COMPILE, case.model]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="smollm2,llama4l")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--parts", default="time,memory,compile")
    parser.add_argument("--peers", default="ddp,fsdp,fsdp+tp")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--page", type=Path)
    chosen = parser.parse_args()
    found: list[dict[str, Any]] = []
    if chosen.results is not None and chosen.results.exists():
        found = [json.loads(line) for line in chosen.results.read_text().splitlines()]
    ranks = [int(count) for count in chosen.ranks.split(",")]
    models, parts, peers = (text.split(",") for text in (chosen.models, chosen.parts, chosen.peers))
    for case in cases(models, ranks, parts, peers, chosen.precision, chosen.rounds):
        if any(Case(**_fields(row)).key == case.key for row in found):
            continue
        start = time.monotonic()
        row = measure(case)
        print(f"{case.key}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        found.append(row)
        if chosen.results is not None:
            with chosen.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(table(found))
    if chosen.page is not None:
        chosen.page.write_text(page(found))


def _fields(row: dict[str, Any]) -> dict[str, Any]:
    return {
        **{name: row[name] for name in ("part", "model", "ranks", "precision", "rounds")},
        "contenders": tuple(row["contenders"]),
    }


if __name__ == "__main__":
    main()
