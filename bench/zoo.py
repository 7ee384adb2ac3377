"""The zoo: every Transformers model type with a plan by hand, and the well-known ones, through capture, planning and runs.

    python bench/zoo.py                                    all types, all steps; writes docs/zoo.md
    python bench/zoo.py --models llama,mixtral --steps tp2,ep2
    python bench/zoo.py --json build/zoo.json --jobs 2     cells as they are done; --resume takes up where it ended

In:  nothing but the installed Transformers: tiny random models are made from its registered config classes.
Out: per type and step `pass`, or the reason; a page; exit status 0 whatever the models do, 1 if the bench itself failed.

Models run in worker processes that import once. One that dies, hangs or grows too large ends that model only.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

STEPS = ("capture", "plan", "tp2", "dp2tp2", "ep2", "pp2", "fold", "hand")
TIME_LIMIT_S = 240.0  # of one model
MEMORY_LIMIT_BYTES = 3_000_000_000  # of one worker
WORKER = ["-m", "bench.zoo_worker"]
RECYCLE_BYTES = 1_400_000_000  # above this a worker is replaced between models


@dataclass
class _Worker:
    """One worker process and the model it is at."""

    process: subprocess.Popen[str]
    model: str | None = None
    began: float = 0.0
    buffer: str = ""
    seen: list[str] = field(default_factory=list)


def start_worker(log: Path) -> _Worker:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TOKENIZERS_PARALLELISM": "false",
    }
    process = subprocess.Popen(
        [sys.executable, *WORKER],
        cwd=ROOT, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("a"),
    )  # fmt: skip
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    return _Worker(process)


@dataclass
class Run:
    """What a run of the bench gave: cells by model and step, and what it took."""

    cells: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    seconds: float = 0.0
    peak_bytes: int = 0
    jobs: int = 1

    def add(self, cell: Mapping[str, Any]) -> None:
        self.cells.setdefault(cell["model"], {})[cell["step"]] = dict(cell)


def run_all(
    models: Sequence[str],
    steps: Sequence[str],
    *,
    jobs: int,
    log: Path,
    save: Path | None = None,
    quiet: bool = False,
) -> Run:
    """Run every model through the steps, on `jobs` workers at once."""
    result, began = Run(jobs=jobs), time.monotonic()
    waiting = list(models)
    selector = selectors.DefaultSelector()
    workers: list[_Worker] = []
    output = save.open("a") if save is not None else None

    def add(cell: Mapping[str, Any]) -> None:
        result.add(cell)
        if output is not None:
            output.write(json.dumps(cell) + "\n")
            output.flush()
        if not quiet:
            reason = f"  {cell['reason']} ({cell['where']})" if cell["reason"] else ""
            print(
                f"{cell['model']:36s} {cell['step']:14s} {cell['status']:5s} {cell['seconds']:6.1f}s{reason}",
                flush=True,
            )

    def begin() -> None:
        while waiting and len(workers) < jobs:
            worker = start_worker(log)
            workers.append(worker)
            selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
            give(worker)

    def give(worker: _Worker) -> None:
        worker.model, worker.began, worker.seen = waiting.pop(0), time.monotonic(), []
        assert worker.process.stdin is not None
        worker.process.stdin.write(json.dumps({"model": worker.model, "steps": list(steps)}) + "\n")
        worker.process.stdin.flush()

    def end(worker: _Worker, reason: str | None) -> None:
        """Stop a worker; with a reason its model fails at the step it was at."""
        if reason is not None and worker.model is not None:
            step = _next_step(worker.seen, steps)
            add({"model": worker.model, "step": step, "status": "fail", "reason": reason, "where": "",
                 "seconds": time.monotonic() - worker.began, "facts": {}})  # fmt: skip
        selector.unregister(worker.process.stdout)  # type: ignore[arg-type]
        workers.remove(worker)
        worker.process.kill()
        worker.process.wait()

    try:
        begin()
        while workers:
            for key, _ in selector.select(timeout=1.0):
                _read(key.data, add, result)
            for worker in list(workers):
                peak = _rss(worker.process.pid)
                result.peak_bytes = max(result.peak_bytes, sum(_rss(one.process.pid) for one in workers))
                if worker.process.poll() is not None:
                    end(worker, f"the worker died with status {worker.process.returncode}")
                elif worker.model is None:
                    if waiting and peak < RECYCLE_BYTES:
                        give(worker)
                    else:
                        end(worker, None)
                elif time.monotonic() - worker.began > TIME_LIMIT_S:
                    end(worker, f"not done after {TIME_LIMIT_S:.0f} s")
                elif peak > MEMORY_LIMIT_BYTES:
                    end(worker, f"more than {MEMORY_LIMIT_BYTES / 1e9:.0f} GB of memory")
            begin()
    finally:
        for worker in list(workers):
            end(worker, None)
        if output is not None:
            output.close()
    result.seconds = time.monotonic() - began
    return result


def _read(worker: _Worker, add: Any, result: Run) -> None:
    assert worker.process.stdout is not None
    text = worker.process.stdout.read()
    worker.buffer += text or ""
    *lines, worker.buffer = worker.buffer.split("\n")
    for line in lines:
        answer = json.loads(line)
        if "done" in answer:
            worker.model = None
        elif "step" in answer:
            worker.seen.append(answer["step"])
            add(answer)


def _next_step(seen: Sequence[str], steps: Sequence[str]) -> str:
    order = ["build", "capture", *(step for step in steps if step != "capture")]
    left = [step for step in order if step not in seen]
    return left[0] if left else "end"


def _rss(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def load_cells(path: Path) -> Run:
    run = Run()
    for line in path.read_text().splitlines():
        run.add(json.loads(line))
    return run


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", help="types, separated by commas (default: all)")
    parser.add_argument("--steps", default=",".join(STEPS), help=f"among {','.join(STEPS)}")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--json", type=Path, help="file that cells are appended to, one a line")
    parser.add_argument("--resume", action="store_true", help="leave out models that --json has already")
    parser.add_argument(
        "--page", type=Path, help="file to write (default docs/zoo.md for all models and steps)"
    )
    parser.add_argument("--log", type=Path, default=Path("/dev/null"), help="what workers print")
    options = parser.parse_args(None if arguments is None else list(arguments))

    from bench.zoo_models import zoo_types
    from bench.zoo_page import page

    types = {one.model_type: one for one in zoo_types()}
    models = options.models.split(",") if options.models else list(types)
    unknown = [name for name in models if name not in types]
    if unknown:
        parser.error(f"unknown model type {unknown[0]!r}")
    steps = options.steps.split(",")
    wrong = [step for step in steps if step not in STEPS]
    if wrong:
        parser.error(f"unknown step {wrong[0]!r}; one of {', '.join(STEPS)}")
    known = load_cells(options.json) if options.json and options.resume and options.json.exists() else Run()
    left = [model for model in models if model not in known.cells]
    run = run_all(
        left,
        [step for step in steps if step != "hand"],
        jobs=options.jobs,
        log=options.log,
        save=options.json,
    )
    run.cells = {**known.cells, **run.cells}
    hand = None
    if "hand" in steps:
        from bench.zoo_hand import hand_section

        hand = hand_section(models, options.jobs)
    target = options.page or (
        ROOT / "docs" / "zoo.md" if not options.models and set(steps) == set(STEPS) else None
    )
    text = page(run, list(types.values()), hand)
    if target is not None:
        target.write_text(text)
    else:
        print(text.split("\n## ")[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
