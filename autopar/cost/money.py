"""Money: days, device hours and cost of a whole run, with the failures it will meet, and which plans are worth it.

In:  seconds and tokens of a step, tokens in all, devices and their price, failure rate, checkpoint size and storage.
Out: a Budget, whose `lines()` are a page; `frontier` and `draw` compare several (days, cost) points.

    Budget(step_time_s=5.2, tokens_per_step=16.8e6, total_tokens=15.6e12, devices=16384, state_bytes=5.7e12,
           failures_per_device_hour=1.97e-5, storage_bytes_per_s=2e12, restart_s=600.0)
      -> 55.9 days without failures, 60.3 with 467 of them; a checkpoint every 4 minutes, 92.6 % goodput

The model is Daly's (2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
Generation Computer Systems 22): failures come as a Poisson process with mean time M between them over all devices,
also during saves and restarts. After each the run waits R until it trains again from the last checkpoint. Work
comes in segments of t seconds of training and d seconds of saving, so the expected time of Ts seconds of work is

    T = M * exp(R/M) * (exp((t + d)/M) - 1) * Ts/t                                             (Daly, equation 20)

Letters: M `mtbf_s`, t `interval_s`, d `stall_s`, R `wait_s`, Ts `compute_s`, T `wall_s`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from autopar.cluster import Cluster
from autopar.errors import UsageError

DAY_S, HOUR_S = 86400.0, 3600.0
_OVERFLOW = 700.0  # exp() of more is no float: such a run never ends


def young_interval_s(stall_s: float, mtbf_s: float) -> float:
    """Seconds of training between two saves, first order: sqrt(2 d M) (Young, 1974, CACM 17(9))."""
    return math.sqrt(2 * stall_s * mtbf_s)


def daly_interval_s(stall_s: float, mtbf_s: float) -> float:
    """Seconds of training between the end of a save and the start of the next (Daly, 2006, equation 37).

    sqrt(2 d M) * (1 + sqrt(d/2M)/3 + (d/2M)/9) - d for d < 2M, and M for saves that take as long as that.
    """
    if math.isinf(mtbf_s):
        return math.inf
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2 * mtbf_s)
    return young_interval_s(stall_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def expected_wall_s(
    compute_s: float, interval_s: float, stall_s: float, wait_s: float, mtbf_s: float
) -> float:
    """Expected seconds of a run (Daly's equation 20, above); inf where it would never end."""
    if math.isinf(mtbf_s):
        return compute_s * (1 + stall_s / interval_s)
    segment_s = interval_s + stall_s
    if (segment_s + wait_s) / mtbf_s > _OVERFLOW:
        return math.inf
    return mtbf_s * math.exp(wait_s / mtbf_s) * math.expm1(segment_s / mtbf_s) * compute_s / interval_s


@dataclass(frozen=True)
class Budget:
    """What a run takes. All `_s` are seconds of the whole cluster; UsageError for a number that cannot be.

    Given: one step's seconds and tokens, tokens of the run, devices; the price of a device hour (None: no costs);
    failures of one device in an hour; bytes of a checkpoint (weights and optimizer state, all ranks together) and
    bytes per second at which the whole cluster writes them; seconds to notice a failure and to train again after it
    (starting and reading the checkpoint). A synchronous save stops training while it is written. An asynchronous one
    stops it for `copy_s` only (the copy to host memory), but a failure falls back behind the save that is under
    way. `interval_given_s` sets the interval; None takes Daly's.
    """

    step_time_s: float
    tokens_per_step: float
    total_tokens: float
    devices: int
    state_bytes: float
    failures_per_device_hour: float
    storage_bytes_per_s: float
    restart_s: float
    detection_s: float = 0.0
    price_per_device_hour: float | None = None
    currency: str = "USD"
    asynchronous: bool = False
    copy_s: float = 0.0
    interval_given_s: float | None = None

    def __post_init__(self) -> None:
        positive = ("step_time_s", "tokens_per_step", "total_tokens", "devices", "storage_bytes_per_s")
        for member in fields(self):
            value = getattr(self, member.name)
            if member.name in ("currency", "asynchronous") or value is None:
                continue
            least = "above 0" if member.name in (*positive, "interval_given_s") else "0 or more"
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < 0 or (value == 0 and least == "above 0"):
                what = f"{member.name} is {value!r}, expected a number {least}"
                raise UsageError(what, where="budget", hint=f"a finite number in {_unit(member.name)}")
        if self.devices != int(self.devices):
            what = f"devices is {self.devices!r}, expected a whole number"
            raise UsageError(what, where="budget", hint="the devices that work at the same time")

    @classmethod
    def on(
        cls,
        cluster: Cluster,
        *,
        step_time_s: float,
        tokens_per_step: float,
        total_tokens: float,
        state_bytes: float,
        detection_s: float = 0.0,
        asynchronous: bool = False,
        copy_s: float = 0.0,
        interval_given_s: float | None = None,
    ) -> Budget:
        """The budget of a run on all working devices of a cluster, with the cluster's price, failures and storage."""
        return cls(
            step_time_s=step_time_s,
            tokens_per_step=tokens_per_step,
            total_tokens=total_tokens,
            devices=cluster.device_count,
            state_bytes=state_bytes,
            failures_per_device_hour=cluster.failures_per_device_hour,
            storage_bytes_per_s=cluster.checkpoint_gbps * 1e9,
            restart_s=cluster.restart_s,
            detection_s=detection_s,
            price_per_device_hour=cluster.price_per_hour,
            currency=cluster.currency,
            asynchronous=asynchronous,
            copy_s=copy_s,
            interval_given_s=interval_given_s,
        )

    # without failures

    @property
    def steps(self) -> int:
        """Steps to see all tokens; the last may be smaller."""
        return math.ceil(self.total_tokens / self.tokens_per_step)

    @property
    def compute_s(self) -> float:
        """Seconds of training: steps * step_time_s. Nothing fails and nothing is saved."""
        return self.steps * self.step_time_s

    @property
    def ideal_days(self) -> float:
        """Days of `compute_s`."""
        return self.compute_s / DAY_S

    @property
    def ideal_device_hours(self) -> float:
        """Device hours of `compute_s`."""
        return self.compute_s / HOUR_S * self.devices

    @property
    def ideal_cost(self) -> float | None:
        """Cost of `ideal_device_hours` in `currency`; None without a price."""
        return (
            None
            if self.price_per_device_hour is None
            else self.ideal_device_hours * self.price_per_device_hour
        )

    # failures and checkpoints

    @property
    def mtbf_s(self) -> float:
        """M: mean seconds between failures of any device, 3600 / (devices * failures_per_device_hour); inf for none."""
        per_hour = self.devices * self.failures_per_device_hour
        return HOUR_S / per_hour if per_hour else math.inf

    @property
    def save_s(self) -> float:
        """Seconds to write one checkpoint: state_bytes / storage_bytes_per_s."""
        return self.state_bytes / self.storage_bytes_per_s

    @property
    def stall_s(self) -> float:
        """d: seconds that one save stops training: all of `save_s`, or `copy_s` where it is asynchronous."""
        return self.copy_s if self.asynchronous else self.save_s

    @property
    def behind_s(self) -> float:
        """Seconds of training lost to a save under way when a failure comes: `save_s` if asynchronous, else 0."""
        return self.save_s if self.asynchronous else 0.0

    @property
    def wait_s(self) -> float:
        """R: seconds from a failure until training is where the last checkpoint's segment began.

        detection_s + restart_s, and for an asynchronous save the `behind_s` to do again before that."""
        return self.detection_s + self.restart_s + self.behind_s

    @property
    def interval_s(self) -> float:
        """t: seconds of training between two saves: Daly's optimum, or what is given.

        At least a step; at least `save_s` where saves are asynchronous, as one must end before the next begins; at
        most the run.
        """
        wanted = self.interval_given_s or daly_interval_s(self.stall_s, self.mtbf_s)
        return min(max(wanted, self.step_time_s, self.behind_s), self.compute_s)

    @property
    def interval_steps(self) -> int:
        """`interval_s` in steps, rounded, at least one."""
        return max(1, round(self.interval_s / self.step_time_s))

    @property
    def saves(self) -> float:
        """Checkpoints that the run keeps: compute_s / interval_s; 0 where nothing fails and no interval is given."""
        if math.isinf(self.mtbf_s) and self.interval_given_s is None:
            return 0.0
        return self.compute_s / self.interval_s

    # with failures

    @property
    def wall_s(self) -> float:
        """T: expected seconds of the run with saves and failures, by `expected_wall_s`; inf if it never ends."""
        if not self.saves:
            return self.compute_s
        return expected_wall_s(self.compute_s, self.interval_s, self.stall_s, self.wait_s, self.mtbf_s)

    @property
    def failures(self) -> float:
        """Expected failures in `wall_s`: T / M."""
        return 0.0 if math.isinf(self.mtbf_s) else self.wall_s / self.mtbf_s

    @property
    def lost_s(self) -> dict[str, float]:
        """Where `wall_s` - `compute_s` goes: seconds of saving, rework, detection and restart.

        Each failure waits min(R, time to the next failure), on average M * (1 - exp(-R/M)); so waiting takes
        T * (1 - exp(-R/M)), shared by detection, restart and (into rework) `behind_s` as they share R. Saving is
        saves * d. The rest of rework is training and saves that a failure cut off: n * (M * (exp((t+d)/M) - 1) -
        (t + d)) with n = compute_s / interval_s.
        """
        saving = self.saves * self.stall_s
        if math.isinf(self.mtbf_s):
            return {"saving": saving, "rework": 0.0, "detection": 0.0, "restart": 0.0}
        if math.isinf(self.wall_s):
            return {"saving": saving, "rework": math.inf, "detection": math.inf, "restart": math.inf}
        waiting = self.wall_s * -math.expm1(-self.wait_s / self.mtbf_s)
        share = waiting / self.wait_s if self.wait_s else 0.0
        cut_off = self.wall_s - waiting - self.compute_s - saving
        return {
            "saving": saving,
            "rework": max(0.0, cut_off) + share * self.behind_s,
            "detection": share * self.detection_s,
            "restart": share * self.restart_s,
        }

    @property
    def goodput(self) -> float:
        """The share of the time that trains: compute_s / wall_s, 1 without failures, 0 for a run that never ends."""
        return self.compute_s / self.wall_s

    @property
    def days(self) -> float:
        """Days of `wall_s`."""
        return self.wall_s / DAY_S

    @property
    def device_hours(self) -> float:
        """Device hours of `wall_s`."""
        return self.wall_s / HOUR_S * self.devices

    @property
    def cost(self) -> float | None:
        """Cost of `device_hours` in `currency`; None without a price."""
        return None if self.price_per_device_hour is None else self.device_hours * self.price_per_device_hour

    def lines(self) -> list[str]:
        """The page: one line for each subject, the parts of the lost time below."""
        price = self.price_per_device_hour
        each = "no price given" if price is None else f"{price:g} {self.currency} an hour"
        rows = [
            ("tokens", f"{count_text(self.total_tokens)} in {self.steps:,} steps of {count_text(self.tokens_per_step)},"
             f" {duration_text(self.step_time_s)} each"),
            ("devices", f"{self.devices:,}, {each}"),
            ("no failures", self._total(self.ideal_days, self.ideal_device_hours, self.ideal_cost)),
        ]  # fmt: skip
        if math.isinf(self.mtbf_s):
            rows.append(("failures", "none expected"))
        else:
            every = f"one every {duration_text(self.mtbf_s)}"
            rows.append(
                ("failures", f"{self.failures:,.0f} expected, {every}" if self.failures < 1e9 else every)
            )
        if self.saves:
            how = "asynchronous" if self.asynchronous else "synchronous"
            chosen = "Daly 2006" if self.interval_given_s is None else "as given"
            rows.append(("checkpoint", f"{count_text(self.state_bytes)}B in {duration_text(self.save_s)} ({how}), every"
                         f" {duration_text(self.interval_s)}, {self.interval_steps:,} step{'s' * (self.interval_steps > 1)} ({chosen})"))  # fmt: skip
        if math.isinf(self.wall_s):
            rows.append(("with failures", "never ends: a segment outlasts the time between failures"))
            return [f"{name:<14}{text}" for name, text in rows]
        parts = ", ".join(f"{kind} {seconds / self.wall_s:.2%}" for kind, seconds in self.lost_s.items())
        rows += [
            ("lost", parts),
            ("goodput", f"{self.goodput:.1%}"),
            ("with failures", self._total(self.days, self.device_hours, self.cost)),
        ]
        return [f"{name:<14}{text}" for name, text in rows]

    def _total(self, days: float, device_hours: float, cost: float | None) -> str:
        text = f"{duration_text(days * DAY_S)}, {count_text(device_hours)} device hours"
        return text if cost is None else f"{text}, {count_text(cost)} {self.currency}"


def _unit(name: str) -> str:
    """What a field of Budget counts, for a hint: by its ending."""
    endings = {
        "bytes_per_s": "bytes per second",
        "_s": "seconds",
        "bytes": "bytes",
        "hour": "each device hour",
    }
    return next((unit for ending, unit in endings.items() if name.endswith(ending)), name.replace("_", " "))


def count_text(value: float) -> str:
    """1536 -> 1.54 k, in powers of 1000."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g} "


def duration_text(seconds: float) -> str:
    """259200 -> 3.0 days."""
    for size, unit in ((DAY_S, "days"), (HOUR_S, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= size * (2 if unit == "days" else 1):
            value = seconds / size
            return f"{value:,.1f} {unit}" if value < 1e6 else f"{value:.1e} {unit}"
    return f"{seconds * 1e3:.3g} ms"


class Point(NamedTuple):
    """One plan on one cluster: days of the run and its cost, in one currency for all points."""

    days: float
    cost: float
    label: str = ""


def frontier(points: Iterable[Point]) -> list[Point]:
    """The Pareto frontier: no other point is as fast and as cheap and better in one. Fastest first, of equals the first."""
    best: list[Point] = []
    for point in sorted(_checked(points), key=lambda point: (point.days, point.cost)):
        if not best or point.cost < best[-1].cost:
            best.append(point)
    return best


def draw(points: Iterable[Point], *, width: int = 72, height: int = 16, currency: str = "USD") -> list[str]:
    """A scatter of cost over days, in text of at most `width` columns (40 to 100).

    `·` is a point, the digits and letters are the frontier, which the lines below the drawing list, fastest first.
    Past 35 of them the rest are `*`.
    """
    if not 40 <= width <= 100 or not 4 <= height <= 100:
        what = f"a drawing of {width} x {height}, expected 40 to 100 columns and 4 to 100 lines"
        raise UsageError(what, where="draw", hint="width=72, height=16")
    known = _checked(points)
    if not known:
        return ["no points to draw"]
    best = frontier(known)
    marks = "123456789abcdefghijklmnopqrstuvwxyz"
    labels = [f"{count_text(value).strip():>9} " for value in _ends([point.cost for point in known])]
    columns = width - len(labels[0]) - 1
    grid = [[" "] * columns for _ in range(height)]

    def put(point: Point, mark: str) -> None:
        row = _place(point.cost, [p.cost for p in known], height)
        grid[height - 1 - row][_place(point.days, [p.days for p in known], columns)] = mark

    for point in known:
        put(point, "·")
    for index in reversed(range(len(best))):  # of two in one place the faster shows
        put(best[index], marks[index] if index < len(marks) else "*")
    blank = " " * len(labels[0])
    sides = [labels[1], *[blank] * (height - 2), labels[0]]
    low, high = (duration_text(days * DAY_S) for days in _ends([point.days for point in known]))
    lines = [f"cost in {currency}"[:width]]
    lines += [f"{side}|{''.join(row)}".rstrip() for side, row in zip(sides, grid, strict=True)]
    lines += [f"{blank}+{'-' * columns}", f"{blank} {low}{high:>{columns - len(low)}}"]
    for index, point in enumerate(best):
        mark = marks[index] if index < len(marks) else "*"
        text = f"{mark} {duration_text(point.days * DAY_S):>12} {count_text(point.cost).strip():>9} {currency}  {point.label}"
        lines.append(text[:width].rstrip())
    return lines


def _checked(points: Iterable[Point]) -> list[Point]:
    known = list(points)
    for point in known:
        if not all(math.isfinite(value) and value >= 0 for value in point[:2]):
            what = f"the point {tuple(point)} has days or a cost that is no number"
            raise UsageError(what, where="frontier", hint="leaving out runs that never end or have no price")
    return known


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _place(value: float, values: Sequence[float], cells: int) -> int:
    """The cell of a value between the least and the greatest, on a logarithmic scale where they are more than 8 times
    apart; the first where all are equal."""
    low, high = _ends(values)
    if high > 8 * low > 0:
        value, low, high = math.log(value), math.log(low), math.log(high)
    return min(cells - 1, int((value - low) / (high - low) * cells)) if high > low else 0
