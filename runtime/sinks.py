"""Sinks: where the metrics of a run go beside their file: TensorBoard, Prometheus text, a live view in the terminal.

In:  the record of a step (see `monitor.py`).
Out: event files, a page at http://127.0.0.1:PORT/metrics, a table that is drawn anew.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from autopar.errors import UsageError
from autopar.plans import Plan
from autopar.runtime.metrics_file import finite

if TYPE_CHECKING:
    from autopar.runtime.monitor import MonitorOptions

_HOST = "127.0.0.1"
_BARS = " ▁▂▃▄▅▆▇█"


class Sink(Protocol):
    def step(self, record: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


def open_sinks(options: MonitorOptions, plan: Plan) -> list[Sink]:
    """What was asked for. Raises UsageError for a package that is not installed, a folder that cannot be written, a
    port in use."""
    sinks: list[Sink] = []
    if options.tensorboard is not None:
        sinks.append(TensorBoard(options.tensorboard))
    if options.metrics_port is not None:
        sinks.append(Prometheus(options.metrics_port, plan.model.name))
    if options.live:
        sinks.append(LiveView(plan))
    return sinks


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by path: `seconds_by_kind/communication/tp`; lists and what is no number left out."""
    found: dict[str, float] = {}

    def walk(path: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                walk(f"{path}/{key}" if path else str(key), item)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[path] = float(value)

    walk("", finite(record))
    return {path: value for path, value in found.items() if path not in ("time", "rank")}


class TensorBoard:
    """Event files through `torch.utils.tensorboard`."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise UsageError(
                f"--tensorboard needs the package tensorboard ({error})",
                hint="pip install 'autopar[tensorboard]'",
            ) from None
        try:
            self.writer = SummaryWriter(str(folder))
        except OSError as error:
            raise UsageError(
                f"TensorBoard's files cannot be written: {error.strerror}",
                where=str(folder),
                hint="another folder",
            ) from None

    def step(self, record: Mapping[str, Any]) -> None:
        for path, value in scalars(record).items():
            if path != "step":
                self.writer.add_scalar(path, value, int(record["step"]), float(record["time"]))

    def close(self) -> None:
        self.writer.close()


class Prometheus:
    """Gauges named `autopar_...` at http://127.0.0.1:PORT/metrics; of another machine, only through a tunnel."""

    def __init__(self, port: int, model: str) -> None:
        try:
            from prometheus_client import CollectorRegistry, Gauge, start_http_server
        except ImportError as error:
            raise UsageError(
                f"--metrics-port needs the package prometheus-client ({error})",
                hint="pip install 'autopar[prometheus]'",
            ) from None
        self.registry = CollectorRegistry()
        self.model, self._gauge = model, Gauge
        self.gauges: dict[str, Any] = {}
        try:
            self.server, self.thread = start_http_server(port, addr=_HOST, registry=self.registry)
        except OSError as error:
            raise UsageError(
                f"port {port} cannot be used for metrics: {error.strerror}",
                where=f"{_HOST}:{port}",
                hint="another --metrics-port",
            ) from None

    def step(self, record: Mapping[str, Any]) -> None:
        for path, value in scalars(record).items():
            name, labels = _gauge_of(path)
            if name not in self.gauges:
                self.gauges[name] = self._gauge(
                    name, f"{name} of the last step", ["model", *labels], registry=self.registry
                )
            self.gauges[name].labels(self.model, *labels.values()).set(value)
        for kind, (least, mean, most) in record.get("ranks", {}).items():
            for of, value in (("least", least), ("mean", mean), ("most", most)):
                self._ranks().labels(self.model, kind, of).set(value)

    def _ranks(self) -> Any:
        name = "autopar_rank_seconds"
        if name not in self.gauges:
            self.gauges[name] = self._gauge(
                name, "seconds of a rank's own per step", ["model", "kind", "of"], registry=self.registry
            )
        return self.gauges[name]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(timeout=5)


def _gauge_of(path: str) -> tuple[str, dict[str, str]]:
    """`seconds_by_kind/communication/tp` -> autopar_seconds_by_kind {kind: "communication", axis: "tp"}."""
    first, *rest = path.split("/")
    if first == "seconds_by_kind":
        return "autopar_seconds_by_kind", {"kind": rest[0], "axis": rest[1] if len(rest) > 1 else ""}
    return "autopar_" + "_".join([first, *rest]), {}


class LiveView:
    """A table of the run, drawn anew after every step, on standard output. Only the last state stays where the output
    is no terminal."""

    def __init__(self, plan: Plan, console: Console | None = None) -> None:
        self.plan = plan
        self.losses: deque[float] = deque(maxlen=60)
        self.began = time.monotonic()
        self.live = Live(console=console or Console(), auto_refresh=False, transient=False)
        self.live.start()

    def step(self, record: Mapping[str, Any]) -> None:
        if math.isfinite(record["loss"]):
            self.losses.append(record["loss"])
        self.live.update(self.page(record), refresh=True)

    def page(self, record: Mapping[str, Any]) -> Group:
        head = Text(f"{self.plan.model.name}   {self.plan.mesh}   step {record['step']}", style="bold")
        numbers = Table(show_header=False, box=None, pad_edge=False)
        for name, text in self._numbers(record):
            numbers.add_row(name, text)
        kinds = Table("time", "seconds", "share", box=None, pad_edge=False)
        total = float(record["seconds"]) or 1.0
        for path, seconds in scalars({"": record["seconds_by_kind"]}).items():
            if seconds > 0:
                share = seconds / total
                kinds.add_row(
                    path.strip("/").replace("/", " "),
                    f"{seconds:.4f}",
                    f"{share:5.1%} {'█' * round(24 * share)}",
                )
        slow = [
            Text(f"slow: rank {one['rank']}, {one['kind']}", style="red")
            for one in record.get("stragglers", ())
        ]
        return Group(head, numbers, kinds, *slow)

    def _numbers(self, record: Mapping[str, Any]) -> list[tuple[str, str]]:
        rows = [
            ("loss", f"{record['loss']:.4f}  {sparkline(self.losses)}"),
            ("gradient norm", f"{record['gradient_norm']:.4f}"),
            ("step", f"{record['seconds']:.3f} s   predicted {self.plan.predicted.step_time_s:.3f} s"),
            ("tokens/s", f"{record['tokens_per_s']:,.0f}"),
            ("memory", f"{record['memory']['peak_rss_bytes'] / 2**30:.2f} GiB at most"),
        ]
        for name in ("mfu", "goodput"):
            if record.get(name) is not None:
                rows.append((name, f"{record[name]:.1%}"))
        return rows

    def close(self) -> None:
        self.live.stop()
        if not self.live.console.is_terminal:
            self.live.console.print()  # the last line of what stays


def sparkline(values: deque[float]) -> str:
    """Values as bars from the least to the most."""
    if not values:
        return ""
    least, most = min(values), max(values)
    steps = len(_BARS) - 2
    return "".join(_BARS[1 + round(steps * (value - least) / ((most - least) or 1.0))] for value in values)
