"""Market: the offers of clusters of many sizes and kinds for one run, and which to rent.

In:  a Workload, clusters with their prices, tokens, a deadline, the most it may cost.
Out: an Offer per cluster, the answers to what was asked, a page and a picture.

    market = market_of(workload, offered_clusters(devices=("h100",)), Limits(30, 3e6), batch=512, tokens=15e12)
    market.answers  ->  smallest cluster, cheapest, fastest
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from textwrap import wrap
from typing import Any

from autopar.budget import DEVICE_HOURS, assumed_lines, budget_data, finite, run_budget
from autopar.budget_asked import Limits
from autopar.cluster import Cluster
from autopar.cost.money import DAY_S, Budget, Point, count_text, draw, duration_text, frontier
from autopar.cost.pipeline import Priced
from autopar.cost.software import default_software
from autopar.errors import ClusterError, InfeasibleError, UsageError
from autopar.layout import Layout
from autopar.passes.decisions import Decisions
from autopar.passes.layout_mixed import search_any
from autopar.passes.layout_space import Space
from autopar.workload import Workload


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
                    "cost_per_token": finite(self.cost(offer) / self.tokens),
                    **budget_data(offer.budget),
                }
                for offer in self.offers
            ],
            "refused": [{"cluster": one.name, "why": one.why} for one in self.refused],
            "answers": {answer.question: answer.offer.name for answer in self.answers},
            "nearest": list(self.nearest),
        }


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
