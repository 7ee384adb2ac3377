"""Profiling: a trace of real steps with the plan's names, next to the predicted timeline, and what differs.

In:  a Compiled that runs, and a file to write.
Out: a Chrome trace (Perfetto reads it) of three processes: what torch's profiler saw, `measured` (blocks, collectives
     and kinds of time under the names of the plan), `predicted` (the plan's own timeline); and a table of both.

    with autopar.profile(run, "trace.json") as profiled:
        run.train_step(batch)
    profiled.table()[0]  ->  Row(name="forward compute", predicted_s=0.0021, measured_s=0.0034)
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from autopar.compiled import Compiled
from autopar.errors import TrainingError, UsageError
from autopar.profile_trace import Measured, Row, measured_events, measured_of, predicted_events, rows
from autopar.runtime.observe import COMPUTE, Observer

_STEPS = re.compile(r"(\d+)(?:-(\d+))?:(.+)")


class Profile:
    """What a profile found, once its context is left. `steps`: how many were run; `file`: this rank's trace."""

    def __init__(self, compiled: Compiled, file: Path) -> None:
        self.plan, self.file = compiled.plan, file
        self.steps = 0
        self.measured: Measured | None = None

    def table(self) -> list[Row]:
        """Seconds per step by kind, then by block: predicted (None: the plan has no such number) and measured."""
        if self.measured is None or not self.steps:
            raise UsageError("no step was profiled yet", hint="to leave the context after a train_step")
        return rows(self.plan, self.measured, self.steps)

    def page(self) -> str:
        """The table as text."""
        page = Table("seconds per step", "predicted", "measured", "ratio", box=None, pad_edge=False)
        for row in self.table():
            ratio = row.ratio
            page.add_row(
                row.name,
                "" if row.predicted_s is None else f"{row.predicted_s:.5f}",
                f"{row.measured_s:.5f}",
                "" if ratio is None else f"{ratio:.2f}",
            )
        console = Console(width=100, record=True, file=StringIO())
        console.print(page)
        return console.export_text()


@contextmanager
def profile(
    compiled: Compiled,
    file: str | Path,
    *,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> Iterator[Profile]:
    """Profile the steps inside. Every rank may call it: rank 0 writes `file` and says the table, rank N writes
    `NAME.rank-N.SUFFIX` beside it.

    Raises TrainingError where the file cannot be written, before anything runs. Tracing slows a step, by Python and
    by what torch's profiler keeps: compare shares, and the seconds with those of an unprofiled step.
    """
    trainer = compiled.trainer
    rank = trainer.groups.rank
    target = _target(Path(file), rank)
    found = Profile(compiled, target)
    first = trainer.step_count
    own, models = None, Observer(trainer.model, trainer.optimizer)
    observer = models.models[0].observer
    if observer is None:
        own = observer = models
        own.start()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    around: AbstractContextManager[Any] = own.doing(COMPUTE) if own is not None else nullcontext()
    observer.profiling = True
    try:
        with torch_profile(activities=activities) as profiler, around:
            yield found
    finally:
        observer.profiling = False
        if own is not None:
            own.stop()
    found.steps = trainer.step_count - first
    with tempfile.TemporaryDirectory(prefix="autopar-") as folder:
        raw = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(raw))
        trace = json.loads(raw.read_text())
    found.measured = measured_of(trace["traceEvents"], observer.named)
    observer.named.clear()
    start = found.measured.start_us
    trace["traceEvents"] += measured_events(found.measured, rank)
    trace["traceEvents"] += predicted_events(found.plan, start)
    target.write_text(json.dumps(trace))
    if rank == 0 and found.steps:
        say(found.page())
        say(f"trace of {found.steps} step{'s' * (found.steps > 1)} written to {target}")


class StepProfiler:
    """`--profile STEPS:FILE`: the steps of a training loop that are profiled. `3:trace.json`, `3-5:trace.json`."""

    def __init__(
        self,
        compiled: Compiled,
        text: str | None,
        *,
        until: int | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`until`: the last step of the run, with which a profile ends at the latest. Raises UsageError for a text of
        another form."""
        self.compiled, self.say = compiled, say
        self.first, self.last, self.file = parse_steps(text) if text is not None else (0, -1, "")
        if until is not None:
            self.last = min(self.last, until)
        self._running: AbstractContextManager[Profile] | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around the step of that number, counted from 1."""
        if number == self.first:
            more = {} if self.say is None else {"say": self.say}
            self._running = profile(self.compiled, self.file, **more)
            self._running.__enter__()
        try:
            yield
        except BaseException:
            self._end(*sys.exc_info())
            raise
        if number == self.last:
            self._end(None, None, None)

    def _end(self, *error: Any) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.__exit__(*error)


def parse_steps(text: str) -> tuple[int, int, str]:
    """`3-5:trace.json` -> (3, 5, "trace.json")."""
    match = _STEPS.fullmatch(text)
    if match is None or not 0 < int(match[1]) <= int(match[2] or match[1]):
        raise UsageError(
            f"{text!r} names no steps and file", where="--profile", hint="3:trace.json, or 3-5:trace.json"
        )
    return int(match[1]), int(match[2] or match[1]), match[3]


def _target(file: Path, rank: int) -> Path:
    target = file if rank == 0 else file.with_name(f"{file.stem}.rank-{rank}{file.suffix}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("a"):
            pass
    except OSError as error:
        raise TrainingError(
            f"the trace cannot be written: {error.strerror}",
            where=str(target),
            hint="another file for the trace",
        ) from None
    return target
