"""The monitor: what a training loop tells of its steps, and to whom.

In:  a plan, a trainer, where to write; the loop says when a step begins and what it is doing.
Out: `metrics.jsonl`, one line per step (rank 0; other ranks `metrics-rank-N.jsonl`), TensorBoard, Prometheus and a live
     view where asked; a watch for hangs, and warnings of ranks that are slower than the others.

    {"event": "step", "step": 12, "seconds": 0.52, "seconds_by_kind": {"data": 0.001, "compute": 0.41, ...},
     "tokens_per_s": 7876.9, "mfu": 0.31, "loss": 3.21, "gradient_norm": 0.8, "goodput": 0.93, ...}

MFU is the plan's own count of floating-point operations of a step (`PredictedPart.mfu` undone: forward and backward of
products and attention, nothing recomputed) by the seconds that it took and the peak of the cluster's devices. Goodput
is the seconds of compute, communication, bubble and optimizer of the steps that count (of a repeated step only the
last time) by the wall time since the first start of the run.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopar.plans import Plan
from autopar.runtime.launch import attempt
from autopar.runtime.metrics_file import MetricsFile, process_began
from autopar.runtime.observe import (
    BUBBLE,
    CHECKPOINT,
    COMMUNICATION,
    COMPUTE,
    DATA,
    OPTIMIZER,
    OTHER,
    Observer,
)
from autopar.runtime.sinks import Sink, open_sinks
from autopar.runtime.stragglers import Stragglers
from autopar.runtime.trainer import StepResult, Trainer
from autopar.runtime.watch import Watch

_WAITS = (COMMUNICATION, BUBBLE)


@dataclass(frozen=True)
class MonitorOptions:
    """`out`: the folder of the metrics files, None for none. `tensorboard`: a folder. `metrics_port`: of Prometheus
    text, on this machine's loopback. `timeout_s`: a rank that waits for longer hangs; None for no watch.
    `slower`: a rank is a straggler whose own time is so many times the median, over its last `over` steps."""

    out: Path | None = None
    tensorboard: Path | None = None
    metrics_port: int | None = None
    live: bool = False
    timeout_s: float | None = 300.0
    slower: float = 1.3
    over: int = 20


class Monitor:
    """Used by a training loop, on every rank, as a context: `step` around a step, `doing` around its parts, `result`
    with what it gave."""

    def __init__(
        self,
        plan: Plan,
        trainer: Trainer,
        options: MonitorOptions,
        *,
        resumed: bool = False,
        say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    ) -> None:
        """`resumed`: the metrics of the run so far, if there are any, are gone on with; else they are put aside, unless
        torchrun has restarted this process. Raises UsageError for a sink that cannot be opened."""
        self.plan, self.trainer, self.options, self.say = plan, trainer, options, say
        self.rank = trainer.groups.rank
        self.observer = Observer(trainer.model, trainer.optimizer)
        self.tokens = plan.data.batch * plan.data.seq
        self.flops, self.peak_flops = flops_of_step(plan)
        self.file = _file(options.out, self.rank, resumed, say)
        self.sinks: list[Sink] = open_sinks(options, plan) if self.rank == 0 else []
        self.recent: deque[dict[str, float]] = deque(maxlen=options.over)
        self.stragglers = Stragglers(trainer.groups.mesh, options.slower)
        self.record: dict[str, Any] = {}
        self._result: StepResult | None = None
        self._beats = 0
        self.watch: Watch | None = None
        if options.timeout_s is not None:
            self.watch = Watch(self.observer, timeout_s=options.timeout_s, say=say, means=self.means)

    def __enter__(self) -> Monitor:
        self.observer.start()
        self.observer.at_step(self.trainer.step_count)
        if self.watch is not None:
            self.watch.start()
        self._write({"event": "start", "step": self.trainer.step_count, "time": process_began()}, sinks=False)
        self.observer.take_seconds()
        return self

    def __exit__(self, *error: object) -> None:
        seconds = self.observer.take_seconds()
        about = {"event": "end", "step": self.trainer.step_count, "time": time.time()}
        self._write({**about, "seconds_by_kind": _told(seconds)}, sinks=False)
        if self.watch is not None:
            self.watch.stop()
        self.observer.stop()
        for sink in self.sinks:
            sink.close()

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step; what is done between two counts to the later one. Nothing is told of a step that raises."""
        self.observer.at_step(self.trainer.step_count + 1)
        self._result = None
        yield
        if self._result is not None:
            self._tell(self._result)

    @contextmanager
    def doing(self, kind: str, note: str = "") -> Iterator[None]:
        """The time inside is of `kind`: data, compute, checkpoint or other. `note`: what a report of a hang says."""
        with self.observer.doing(kind, note):
            yield

    def result(self, result: StepResult) -> None:
        self._result = result

    def means(self) -> dict[str, float]:
        """Seconds by kind of this rank's last steps, waiting left out; nothing before there are enough of them."""
        recent = list(self.recent)
        if len(recent) < self.options.over:
            return {}
        return {kind: sum(one.get(kind, 0.0) for one in recent) / len(recent) for kind in recent[-1]}

    def _tell(self, result: StepResult) -> None:
        by_kind = self.observer.take_seconds()
        seconds = sum(by_kind.values())
        busy = seconds - by_kind.get(CHECKPOINT, 0.0)
        self.recent.append({kind: by_kind.get(kind, 0.0) for kind in (DATA, COMPUTE, OPTIMIZER, OTHER)})
        useful = sum(spent for kind, spent in by_kind.items() if kind not in (DATA, CHECKPOINT, OTHER))
        now = time.time()
        self.record = {
            "event": "step",
            "step": result.step,
            "time": now,
            "rank": self.rank,
            "seconds": seconds,
            "seconds_by_kind": _told(by_kind),
            "useful_s": useful,
            "tokens_per_s": self.tokens / busy if busy else 0.0,
            "mfu": self.flops / (busy * self.peak_flops) if busy and self.peak_flops else None,
            "memory": memory(self.trainer.groups.device),
            "loss": result.loss,
            "gradient_norm": result.gradient_norm,
            "goodput": self.file.goodput(result.step, useful, now) if self.file else None,
        }
        self._compare()
        self._write(self.record)

    def _compare(self) -> None:
        if self.rank != 0 or self.watch is None or self.trainer.groups.mesh.device_count == 1:
            return
        ranks = self.watch.ranks_seconds()
        if len(ranks) > 1:
            self.record["ranks"] = spread(ranks)
        beats = self.watch.beats()
        if beats != self._beats:  # since they told anew: steps may be shorter
            self._beats = beats
            for line in self.stragglers.update(ranks):
                self.say(line)
        self.record["stragglers"] = [vars(found) for found in self.stragglers.now.values()]

    def _write(self, record: Mapping[str, Any], *, sinks: bool = True) -> None:
        if self.file is not None:
            self.file.write(record)
        for sink in self.sinks if sinks else ():
            sink.step(record)


def flops_of_step(plan: Plan) -> tuple[float, float]:
    """(floating-point operations of a step as the plan counts them, operations per second of all its devices)."""
    cluster, predicted = plan.parsed_cluster, plan.predicted
    peak = cluster.device.peak(plan.precision if plan.layout is None or plan.precision == "fp32" else "bf16")
    peak *= cluster.device_count
    return predicted.mfu * predicted.step_time_s * peak, peak


def spread(ranks: Mapping[int, Mapping[str, float]]) -> dict[str, list[float]]:
    """Kind -> [least, mean, most] seconds over ranks."""
    found = {}
    for kind in dict.fromkeys(kind for means in ranks.values() for kind in means):
        seconds = [means.get(kind, 0.0) for means in ranks.values()]
        found[kind] = [min(seconds), sum(seconds) / len(seconds), max(seconds)]
    return found


def memory(device: torch.device) -> dict[str, int]:
    """Bytes of this process: resident now and at most so far; on CUDA the allocator's peaks."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    found = {"peak_rss_bytes": most}
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found["rss_bytes"] = pages * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        pass
    if device.type == "cuda":
        found["cuda_peak_allocated_bytes"] = torch.cuda.max_memory_allocated(device)
        found["cuda_peak_reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    return found


def _told(by_kind: Mapping[str, float]) -> dict[str, Any]:
    """With the axes of communication in a part of their own."""
    kinds: dict[str, Any] = {kind: by_kind.get(kind, 0.0) for kind in (DATA, COMPUTE)}
    kinds["communication"] = {
        kind.removeprefix(COMMUNICATION): seconds
        for kind, seconds in sorted(by_kind.items())
        if kind.startswith(COMMUNICATION)
    }
    kinds.update({kind: by_kind.get(kind, 0.0) for kind in (BUBBLE, OPTIMIZER, CHECKPOINT, OTHER)})
    return kinds


def _file(out: Path | None, rank: int, resumed: bool, say: Callable[[str], None]) -> MetricsFile | None:
    if out is None:
        return None
    name = "metrics.jsonl" if rank == 0 else f"metrics-rank-{rank}.jsonl"
    return MetricsFile(out / name, go_on=resumed or attempt() > 0, say=say)
