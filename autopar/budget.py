"""Budget: what training on so many tokens takes, for a plan or for clusters of many sizes and kinds, and which to rent.

In:  a Plan and tokens; or a Workload, clusters with their prices, tokens, a deadline, the most it may cost.
Out: a Budget (cost/money.py); or an Offer per cluster, the answers to what was asked, a page and a picture.

    offers, refused = search_offers(workload, offered_clusters(devices=("h100",)), batch=512, tokens=15e12)
    answers(offers, Limits(deadline_days=30, max_cost=3e6))  ->  smallest cluster, cheapest, fastest
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from textwrap import wrap
from typing import Any

from autopar.cluster import Cluster, Device, load_cluster, load_device
from autopar.cost.money import DAY_S, Budget, Point, count_text, draw, duration_text, frontier
from autopar.cost.pipeline import Priced
from autopar.cost.software import default_software
from autopar.errors import ClusterError, InfeasibleError, UsageError
from autopar.layout import Layout
from autopar.layout_check import runs_precision
from autopar.passes.decisions import Decisions, parse_decisions
from autopar.passes.layout_mixed import search_any
from autopar.passes.layout_space import Space
from autopar.plans import Plan
from autopar.workload import Workload

# A checkpoint holds the fp32 weights and Adam's two moments (Rajbhandari et al. 2020, "ZeRO", section 3.1: 4 + 4 + 4
# bytes per parameter); 16-bit copies are made from the former. Of what is not trained it holds the 16-bit weights.
TRAINED_BYTES, FROZEN_BYTES = 12.0, 2.0
DEVICE_HOURS = "device hours"


def checkpoint_bytes(parameters: float, frozen: float = 0.0) -> float:
    """Bytes of the checkpoint of a whole model. `frozen`: share of the parameters that are not trained."""
    return parameters * ((1 - frozen) * TRAINED_BYTES + frozen * FROZEN_BYTES)


def run_budget(
    cluster: Cluster,
    *,
    step_s: float,
    tokens_per_step: float,
    tokens: float,
    parameters: float,
    frozen: float,
) -> Budget:
    """What `tokens` take on a cluster. Raises UsageError for tokens that cannot be."""
    return Budget.on(
        cluster,
        step_time_s=step_s,
        tokens_per_step=tokens_per_step,
        total_tokens=tokens,
        state_bytes=checkpoint_bytes(parameters, frozen),
    )


def plan_budget(plan: Plan, tokens: float) -> Budget:
    """What `tokens` take with this plan, on its cluster."""
    return run_budget(
        plan.parsed_cluster,
        step_s=plan.predicted.step_time_s,
        tokens_per_step=plan.data.batch * plan.data.seq,
        tokens=tokens,
        parameters=plan.model.parameters,
        frozen=plan.parsed_workload.frozen if plan.workload is not None else 0.0,
    )


def budget_lines(budget: Budget, cluster: Cluster) -> list[str]:
    """The budget as the last part of a page, with the source of every number that nobody gave."""
    lines = ["budget", *(f"  {line}" for line in budget.lines())]
    if budget.price_per_device_hour is None:
        lines.append(
            "  price         unknown: `price_per_hour` in the cluster file, or autopar budget --price"
        )
    given = {"failures_per_device_hour": budget.failures_per_device_hour, "restart_s": budget.restart_s}
    given["storage_gbps"] = budget.storage_bytes_per_s / 1e9
    return lines + assumed_lines({f"{name} {given[name]:.3g}": why for name, why in cluster.assumed.items()})


def assumed_lines(assumed: Mapping[str, str]) -> list[str]:
    """Numbers that nobody gave, with their sources, in lines of a page."""
    told = (f"{name}: {source.removeprefix('assumed: ')}" for name, source in assumed.items())
    return [line for words in told for line in wrap(words, 98, initial_indent="  ", subsequent_indent="    ")]


def budget_data(budget: Budget) -> dict[str, Any]:
    """JSON-friendly: what was given, and what follows from it; None for what is infinite."""
    derived = (
        "steps", "ideal_days", "ideal_device_hours", "ideal_cost", "mtbf_s", "save_s", "interval_s", "interval_steps",
        "failures", "goodput", "days", "device_hours", "cost", "lost_s",
    )  # fmt: skip
    names = [member.name for member in fields(budget)] + list(derived)
    return {name: _finite(getattr(budget, name)) for name in names}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---------------------------------------------------------------- what is asked


@dataclass(frozen=True)
class Limits:
    """What a run may take; None: no limit. `max_cost` in `currency`, or in device hours where no price is known."""

    deadline_days: float | None = None
    max_cost: float | None = None

    def __str__(self) -> str:
        words = []
        if self.deadline_days is not None:
            words.append(f"within {duration_text(self.deadline_days * DAY_S)}")
        if self.max_cost is not None:
            words.append(f"for at most {count_text(self.max_cost).strip()}")
        return " ".join(words)


_UNITS = {"h": 1 / 24, "d": 1.0, "w": 7.0, "": 1.0}


def parse_days(text: str) -> float:
    """`30d`, `36h`, `6w`, `30` as days. Raises UsageError."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([hdw]?)\s*", text)
    days = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < days < math.inf:
        raise UsageError(f"{text!r} is no time", where="deadline", hint="30d, 36h or 6w")
    return days


def parse_prices(texts: Iterable[str]) -> dict[str, float]:
    """`h100=2.5` -> {"h100": 2.5}: currency per device hour. Raises UsageError."""
    prices: dict[str, float] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        try:
            price = float(value)
        except ValueError:
            price = 0.0
        if not equals or not name or not 0 < price < math.inf:
            raise UsageError(f"{text!r} is no price", where="price", hint="h100=2.5, per device hour")
        device = load_device(name).name
        if device in prices:
            raise UsageError(f"{device} has two prices", where="price", hint=f"one {device}=..")
        prices[device] = price
    return prices


def check_prices(prices: Mapping[str, float], clusters: Iterable[Cluster], currency: str | None) -> None:
    """Raise UsageError for a price of a device that no cluster has, or a currency that is none."""
    names = sorted({pool.device.name for cluster in clusters for pool in cluster.pools})
    for name in prices:
        if name not in names:
            raise UsageError(
                f"{name} has a price, but no cluster to compare has one",
                where="price",
                hint=f"--price {names[0]}=.., or --device {name}",
            )
    if currency is not None and re.fullmatch("[A-Z]{3}", currency) is None:
        raise UsageError(f"{currency!r} is no currency", where="currency", hint="three capitals, as in EUR")


# ---------------------------------------------------------------- clusters


def offered_clusters(
    names: Sequence[str] = (), *, devices: Sequence[str] = (), max_devices: int = 4096
) -> list[Cluster]:
    """The clusters of `names`, and of each device in `devices` 1, 2, 4, ... full nodes up to `max_devices`."""
    found = [load_cluster(name) for name in names]
    for name in devices:
        device = load_device(name)
        nodes, per_node = 1, device.devices_per_node
        if per_node > max_devices:
            raise UsageError(
                f"a node of {device.name} has {per_node} devices, at most {max_devices} are asked for",
                where="max-devices", hint=f"{per_node} or more",
            )  # fmt: skip
        while nodes * per_node <= max_devices:
            found.append(load_cluster(f"{device.name}:{nodes}x{per_node}"))
            nodes *= 2
    if not found:
        raise UsageError(
            "no cluster to search", where="budget", hint="--device h100 or --clusters h100:8x8,h100:64x8"
        )
    return list({cluster.name: cluster for cluster in found}.values())


def with_prices(cluster: Cluster, prices: Mapping[str, float], currency: str | None = None) -> Cluster:
    """The cluster with other prices of its devices, in `currency` (None: as it was)."""

    def priced(device: Device) -> Device:
        if device.name not in prices:
            return device
        sources = {**device.sources, "price_per_hour": "given"}
        return replace(device, price_per_hour=prices[device.name], sources=sources)

    names = {pool.device.name for pool in cluster.pools}
    return replace(
        cluster,
        device=priced(cluster.device),
        mixed=tuple(replace(pool, device=priced(pool.device)) for pool in cluster.mixed),
        currency=currency if currency and names <= set(prices) else cluster.currency,
    )


# ---------------------------------------------------------------- offers


@dataclass(frozen=True)
class Offer:
    """A cluster that can train the model: its best layout, and what the run takes there."""

    cluster: Cluster
    layout: Layout
    mfu: float
    budget: Budget

    @property
    def name(self) -> str:
        return self.cluster.name

    @property
    def ends(self) -> bool:
        return math.isfinite(self.budget.days)


@dataclass(frozen=True)
class Refused:
    """A cluster that cannot, and why."""

    name: str
    why: str


def search_offers(
    workload: Workload,
    clusters: Sequence[Cluster],
    *,
    batch: int,
    tokens: float,
    decisions: Decisions | None = None,
    precisions: tuple[str, ...] = ("bf16",),
    progress: Callable[[str], None] | None = None,
) -> tuple[list[Offer], list[Refused]]:
    """The fastest layout on every cluster. Raises InfeasibleError where none of them can run the model."""
    tell = progress or (lambda _: None)
    offers, refused = [], []
    error: InfeasibleError | None = None
    for cluster in clusters:
        tell(f"searching {cluster.name}")
        space = Space(workload, cluster, batch, decisions or Decisions(), precisions)
        try:
            found, _, _ = search_any(space, default_software(cluster.device.name))
        except (InfeasibleError, ClusterError) as problem:
            refused.append(Refused(cluster.name, problem.what))
            error = problem if isinstance(problem, InfeasibleError) else error
            continue
        offers.append(offer_of(workload, cluster, found.best, batch, tokens))
    if not offers:
        raise error or InfeasibleError(refused[-1].why, where=refused[-1].name, hint="other clusters")
    return offers, refused


def between(market: Market) -> list[Cluster]:
    """Sizes between a cluster that meets the limits and its neighbour that does not, to find where they are met:
    three for each device, in full nodes."""
    found = []
    known = {offer.name for offer in market.offers} | {one.name for one in market.refused}
    for name in dict.fromkeys(offer.cluster.device.name for offer in market.offers):
        kind = [o for o in market.offers if o.cluster.device.name == name and not o.cluster.mixed]
        kind.sort(key=lambda offer: offer.cluster.nodes)
        for low, high in itertools.pairwise(kind):
            if market.meets(low) == market.meets(high) or low.cluster.nodes == high.cluster.nodes:
                continue
            for eighths in (2, 4, 6):
                nodes = low.cluster.nodes + (high.cluster.nodes - low.cluster.nodes) * eighths // 8
                cluster = high.cluster.with_(gpus=nodes * high.cluster.devices_per_node)
                if cluster.name not in known:
                    known.add(cluster.name)
                    found.append(cluster)
    return found


def offer_of(workload: Workload, cluster: Cluster, best: Priced, batch: int, tokens: float) -> Offer:
    """The offer of one priced layout."""
    peak = cluster.device.peak("fp32" if best.layout.precision == "fp32" else "bf16")
    flops = workload.flops_per_token() * batch * workload.seq
    budget = run_budget(
        cluster,
        step_s=best.step_s,
        tokens_per_step=batch * workload.seq,
        tokens=tokens,
        parameters=workload.parameters,
        frozen=workload.frozen,
    )
    return Offer(cluster, best.layout, flops / (best.step_s * peak * cluster.device_count), budget)


@dataclass(frozen=True)
class Answer:
    """`question`: smallest, cheapest or fastest."""

    question: str
    offer: Offer


@dataclass(frozen=True)
class Market:
    """All offers in one measure of cost: a currency, or device hours where no offer has a price. Of offers with and
    without one, those without are only timed."""

    offers: tuple[Offer, ...]
    refused: tuple[Refused, ...] = ()
    tokens: float = 0.0
    model: str = ""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        found = {offer.budget.currency for offer in self.offers if offer.budget.cost is not None}
        if len(found) > 1:
            what = f"prices are in {' and '.join(sorted(found))}, expected one currency"
            raise UsageError(what, where="price", hint="--price for each device, with one --currency")

    @property
    def currency(self) -> str:
        """What costs are in."""
        return next((o.budget.currency for o in self.offers if o.budget.cost is not None), DEVICE_HOURS)

    def cost(self, offer: Offer) -> float:
        """In `currency`; inf where the offer has no price and others have, or never ends."""
        if self.currency == DEVICE_HOURS:
            return offer.budget.device_hours
        cost = offer.budget.cost
        return math.inf if cost is None else cost

    @property
    def points(self) -> list[Point]:
        return [
            Point(offer.budget.days, self.cost(offer), offer.name)
            for offer in self.offers
            if math.isfinite(self.cost(offer)) and offer.ends
        ]

    def meets(self, offer: Offer) -> bool:
        limits = self.limits
        soon = limits.deadline_days is None or offer.budget.days <= limits.deadline_days
        return offer.ends and soon and (limits.max_cost is None or self.cost(offer) <= limits.max_cost)

    @property
    def answers(self) -> tuple[Answer, ...]:
        """The smallest cluster, the cheapest and the fastest that meet the limits; empty where none does."""
        fit = [offer for offer in self.offers if self.meets(offer)]
        if not fit:
            return ()
        smallest = min(fit, key=lambda o: (o.cluster.device_count, self.cost(o), o.budget.days))
        cheapest = min(fit, key=lambda o: (self.cost(o), o.budget.days))
        fastest = min(fit, key=lambda o: (o.budget.days, self.cost(o)))
        found = [Answer("smallest", smallest)]
        if math.isfinite(self.cost(cheapest)):
            found.append(Answer("cheapest", cheapest))
        return (*found, Answer("fastest", fastest))

    @property
    def nearest(self) -> tuple[str, ...]:
        """Where nothing meets the limits: what comes nearest, and by how much it misses."""
        ending = [offer for offer in self.offers if offer.ends]
        if self.answers:
            return ()
        if not ending:
            return ("no run ends: failures come faster than it can save",)
        limits, lines = self.limits, []
        soon = [o for o in ending if limits.deadline_days is None or o.budget.days <= limits.deadline_days]
        cheap = [o for o in ending if limits.max_cost is None or self.cost(o) <= limits.max_cost]
        if limits.deadline_days is not None and not soon:
            best = min(ending, key=lambda o: o.budget.days)
            late = duration_text((best.budget.days - limits.deadline_days) * DAY_S)
            lines.append(f"the fastest, {self.told(best)}, is {late} late")
        if limits.max_cost is not None and not cheap:
            best = min(ending, key=self.cost)
            over = count_text(self.cost(best) - limits.max_cost).strip()
            lines.append(f"the cheapest, {self.told(best)}, is {over} {self.currency} over")
        if soon and cheap and limits.deadline_days is not None and limits.max_cost is not None:
            one, other = min(soon, key=self.cost), min(cheap, key=lambda o: o.budget.days)
            over = count_text(self.cost(one) - limits.max_cost).strip()
            late = duration_text((other.budget.days - limits.deadline_days) * DAY_S)
            lines.append(f"the cheapest in time, {self.told(one)}, is {over} {self.currency} over")
            lines.append(f"the fastest for the cost, {self.told(other)}, is {late} late")
        return tuple(lines)

    def told(self, offer: Offer) -> str:
        cost = self.cost(offer)
        money = f", {count_text(cost).strip()} {self.currency}" if math.isfinite(cost) else ", no price"
        return f"{offer.name} ({duration_text(offer.budget.days * DAY_S)}{money})"

    # ---- text

    def lines(self) -> list[str]:
        """The page, at most 100 columns wide but for layouts."""
        first = self.offers[0].budget
        out = [
            f"model     {self.model}",
            f"tokens    {count_text(self.tokens).strip()} in {first.steps:,} steps of"
            f" {count_text(first.tokens_per_step).strip()}; checkpoints of {count_text(first.state_bytes)}B",
            "",
            *self._table(),
        ]
        for one in self.refused:
            out += wrap(f"{one.name}: {one.why}", 98, initial_indent="  ", subsequent_indent="    ")
        if self.points:
            out += ["", *draw(self.points, width=90, currency=self.currency)]
        if self.currency == DEVICE_HOURS:
            device = self.offers[0].cluster.device.name
            out += [
                "",
                f"prices    unknown, so costs are device hours; for money, --price {device}=2.5 (per hour)",
            ]
        money = f" {self.currency}" if self.limits.max_cost is not None else ""
        out += ["", f"{self.limits}{money}" or "without limits"]
        for answer in self.answers:
            out.append(f"  {answer.question:<10}{self.told(answer.offer)}")
        for offer in dict.fromkeys(answer.offer for answer in self.answers):
            out.append(f"  on {offer.name}")
            out.append(f"    {offer.layout}")  # whole, to be copied to --layout
        if not self.answers:
            out += ["  nothing does", *(f"  {line}" for line in self.nearest)]
        assumed = {key: why for offer in self.offers for key, why in offer.cluster.assumed.items()}
        if assumed:
            out += ["", "assumed", *assumed_lines(assumed)]
        return out

    def _table(self) -> list[str]:
        money = self.currency != DEVICE_HOURS
        head = ["cluster", "devices", "step", "MFU", "goodput", "time", "device hours"]
        head += [self.currency, "per M tokens"] if money else []
        rows = [head]
        for offer in self.offers:
            budget, cost = offer.budget, offer.budget.cost
            row = [
                offer.name, f"{budget.devices:,}", duration_text(budget.step_time_s), f"{offer.mfu:.1%}",
                f"{budget.goodput:.1%}",
            ]  # fmt: skip
            row += [duration_text(budget.days * DAY_S) if offer.ends else "never ends"]
            row += [count_text(budget.device_hours).strip() if offer.ends else "-"]
            if money:
                known = cost is not None and offer.ends
                row += (
                    [count_text(cost).strip(), f"{cost / self.tokens * 1e6:.3g}"]
                    if known and cost
                    else ["-", "-"]
                )
            rows.append(row)
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        return [
            "  "
            + "  ".join(
                [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
            )
            for row in rows
        ]

    def data(self) -> dict[str, Any]:
        """JSON-friendly."""
        best = {point.label for point in frontier(self.points)}
        return {
            "model": self.model,
            "tokens": self.tokens,
            "currency": self.currency,
            "limits": {"deadline_days": self.limits.deadline_days, "max_cost": self.limits.max_cost},
            "offers": [
                {
                    "cluster": offer.name,
                    "layout": str(offer.layout),
                    "mfu": offer.mfu,
                    "frontier": offer.name in best,
                    "meets": self.meets(offer),
                    "cost_per_token": _finite(self.cost(offer) / self.tokens),
                    **budget_data(offer.budget),
                }
                for offer in self.offers
            ],
            "refused": [{"cluster": one.name, "why": one.why} for one in self.refused],
            "answers": {answer.question: answer.offer.name for answer in self.answers},
            "nearest": list(self.nearest),
        }


def asked(
    clusters: Sequence[Cluster],
    limits: Limits,
    fix: Sequence[str],
    forbid: Sequence[str],
    precision: str | None,
) -> tuple[Decisions, tuple[str, ...]]:
    """What the search may choose, and the precisions; refuses a cost limit that is none or where no price is known,
    and a precision that no cluster has."""
    if limits.max_cost is not None and not 0 < limits.max_cost < math.inf:
        raise UsageError(f"{limits.max_cost} is no cost", where="max-cost", hint="a number above 0")
    if limits.max_cost is not None and all(cluster.price_per_hour is None for cluster in clusters):
        device = clusters[0].device.name
        raise UsageError("no price is known", where="max-cost", hint=f"--price {device}=2.5, per device hour")
    precise = "fp32" if all(cluster.device.name == "cpu" for cluster in clusters) else "bf16"
    chosen = precise if precision is None else precision
    decisions, precisions = parse_decisions([*fix, f"precision={chosen}"], forbid), tuple(chosen.split("|"))
    if not any(runs_precision(one, cluster.device) for one in precisions for cluster in clusters):
        has = clusters[0].device
        raise UsageError(
            f"precision={chosen}: no cluster to compare has such a number format",
            where="precision",
            hint=f"one that {has.name} has: {', '.join(has.peak_tflops)}",
        )
    return decisions, precisions


def market_of(
    workload: Workload,
    clusters: Sequence[Cluster],
    limits: Limits,
    *,
    batch: int,
    tokens: float,
    decisions: Decisions | None = None,
    precisions: tuple[str, ...] = ("bf16",),
    refine: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Market:
    """The offers of all clusters; with `refine` also of sizes between those that meet the limits and do not."""
    found = Market((), (), tokens, workload.name, limits)
    for turn in range(1 + refine):
        wanted = between(found) if turn else clusters
        if not wanted:
            break
        try:
            offers, refused = search_offers(
                workload, wanted, batch=batch, tokens=tokens, decisions=decisions, precisions=precisions,
                progress=progress,
            )  # fmt: skip
        except InfeasibleError:
            if not turn:
                raise
            break  # none of the sizes between divides
        order = sorted(
            (*found.offers, *offers), key=lambda o: (o.cluster.device.name, o.cluster.device_count)
        )
        found = replace(found, offers=tuple(order), refused=(*found.refused, *(refused if not turn else ())))
    return found
