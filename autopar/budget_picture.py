"""Budget picture: the cost and time of every cluster as an SVG file. In: a Market. Out: text of a picture."""

from __future__ import annotations

import math
from collections.abc import Callable

from markupsafe import Markup

from autopar.cost.money import Point, count_text, frontier
from autopar.market import Market
from autopar.svg import PALETTE, line, log_ticks, picture, rect, tag, text, ticks

_WIDTH, _HEIGHT = 860.0, 520.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 84.0, 24.0, 64.0, 56.0


def frontier_svg(market: Market) -> str:
    """Days along, cost up, both logarithmic; the frontier is a line, limits are dashed, what breaks them is pale."""
    points = market.points
    parts = [
        tag("style", "text{font:12px system-ui,sans-serif;fill:#24292f}.g{stroke:#e3e6ea}.s{fill:#59636e}"),
        rect(0, 0, _WIDTH, _HEIGHT, fill="#fff"),
        text(_LEFT, 24, f"{market.model[:80]}", font_size=15, style="font-size:15px;font-weight:600"),
        text(
            _LEFT,
            44,
            f"{count_text(market.tokens).strip()} tokens: time and cost of each cluster",
            class_="s",
        ),
    ]
    if not points:
        parts.append(text(_LEFT, _HEIGHT / 2, "no run ends"))
        return str(picture(_WIDTH, _HEIGHT, parts, label="frontier", alone=True))
    limits = market.limits
    x, days_ticks = _scale([p.days for p in points], limits.deadline_days, _LEFT, _WIDTH - _RIGHT)
    y, cost_ticks = _scale([p.cost for p in points], limits.max_cost, _HEIGHT - _BOTTOM, _TOP)
    for value in days_ticks:
        parts += [line(x(value), _TOP, x(value), _HEIGHT - _BOTTOM, class_="g"),
                  text(x(value), _HEIGHT - _BOTTOM + 18, f"{value:g}", text_anchor="middle")]  # fmt: skip
    for value in cost_ticks:
        parts += [line(_LEFT, y(value), _WIDTH - _RIGHT, y(value), class_="g"),
                  text(_LEFT - 8, y(value) + 4, count_text(value).strip(), text_anchor="end")]  # fmt: skip
    parts.append(text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 14, "days", text_anchor="middle", class_="s"))
    parts.append(text(_LEFT - 8, _TOP - 8, market.currency, text_anchor="end", class_="s"))
    if limits.deadline_days is not None:
        parts.append(_limit(x(limits.deadline_days), _TOP, x(limits.deadline_days), _HEIGHT - _BOTTOM))
        parts.append(text(x(limits.deadline_days) + 4, _TOP + 12, "deadline", class_="s"))
    if limits.max_cost is not None:
        parts.append(_limit(_LEFT, y(limits.max_cost), _WIDTH - _RIGHT, y(limits.max_cost)))
        parts.append(
            text(_WIDTH - _RIGHT, y(limits.max_cost) - 5, "most it may cost", text_anchor="end", class_="s")
        )
    parts += _points(market, x, y)
    return str(picture(_WIDTH, _HEIGHT, parts, label=f"cost and time of {market.model}", alone=True)) + "\n"


def _points(market: Market, x: Callable[[float], float], y: Callable[[float], float]) -> list[Markup]:
    best = frontier(market.points)
    path = " ".join(f"{x(point.days):.2f},{y(point.cost):.2f}" for point in best)
    parts = [tag("polyline", points=path, fill="none", stroke="#24292f", stroke_width=1.5)]
    kinds = list(dict.fromkeys(offer.cluster.device.name for offer in market.offers))
    by_name = {offer.name: offer for offer in market.offers}
    answers = {answer.offer.name: answer.question for answer in reversed(market.answers)}
    for point in market.points:
        offer = by_name[point.label]
        colour = PALETTE[kinds.index(offer.cluster.device.name) % len(PALETTE)]
        meets = market.meets(offer)
        parts.append(
            tag("circle", tag("title", _told(point, market)), cx=x(point.days), cy=y(point.cost), r=6 if point in best else 4,
                fill=colour, fill_opacity=1 if meets else 0.3, stroke=colour)
        )  # fmt: skip
        if point in best or len(market.points) <= 24:
            word = f"{point.label}, {answers[point.label]}" if point.label in answers else point.label
            right = x(point.days) < _WIDTH - 180
            parts.append(
                text(x(point.days) + (9 if right else -9), y(point.cost) + (20 if point in best else -8), word,
                     text_anchor="start" if right else "end", font_weight=600 if point.label in answers else None)
            )  # fmt: skip
    return parts


def _told(point: Point, market: Market) -> str:
    return f"{point.label}: {point.days:.3g} days, {count_text(point.cost).strip()} {market.currency}"


def _limit(x1: float, y1: float, x2: float, y2: float) -> Markup:
    return line(x1, y1, x2, y2, stroke="#d55e00", stroke_dasharray="5 4")


def _scale(
    values: list[float], limit: float | None, start: float, end: float
) -> tuple[Callable[[float], float], list[float]]:
    """(a value's place from start to end, ticks): logarithmic, or plain where a value is 0."""
    known = [*values, *([limit] if limit is not None else [])]
    low, high = min(known), max(known)
    if low <= 0:
        high = high or 1.0
        return (lambda value: start + (end - start) * value / high), ticks(0.0, high)
    low, high = low / 1.15, high * 1.15
    span = math.log(high / low)
    return (lambda value: start + (end - start) * math.log(value / low) / span), log_ticks(low, high)
