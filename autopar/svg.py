"""SVG: elements as escaped text, ticks and colours, for pages and pictures.

In:  names, numbers, texts (which may be hostile: everything is escaped).
Out: `Markup`, safe to put into a page.

    tag("text", "a < b", x=1, font_size=9)  ->  <text x="1" font-size="9">a &lt; b</text>
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from markupsafe import Markup, escape

# Colours that differ in lightness too, so that they survive grey print and colour blindness (after Okabe and Ito 2008).
PALETTE = (
    "#3b7dd8", "#e69f00", "#6fb8ae", "#b3589a", "#d55e00", "#8c9a2b", "#56b4e9", "#b8bcc4", "#7d6bc4", "#2f9e6e",
    "#8a6d5a", "#c9a0b6",
)  # fmt: skip


def tag(name: str, *inside: str, **attributes: object) -> Markup:
    """One element. Attribute names: `_` becomes `-`, a last `_` is dropped (`class_`); None leaves one out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_value(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    body = "".join(escape(part) for part in inside)
    return Markup(f"<{name}{written}>{body}</{name}>")


def picture(
    width: float, height: float, parts: Iterable[Markup], *, label: str, alone: bool = False
) -> Markup:
    """A whole <svg> that scales with its column. `alone`: for a file of its own."""
    space = "http://www.w3.org/2000/svg" if alone else None
    return tag(
        "svg", tag("title", label), *parts,
        xmlns=space, viewBox=f"0 0 {_value(width)} {_value(height)}", role="img", aria_label=label,
        width=_value(width) if alone else None, height=_value(height) if alone else None,
    )  # fmt: skip


def _value(value: object) -> str:
    """Two decimals of a unit of the picture are finer than any screen."""
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(value)


def line(x1: float, y1: float, x2: float, y2: float, **more: object) -> Markup:
    return tag("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), **more)


def text(x: float, y: float, words: str, **more: object) -> Markup:
    return tag("text", words, x=float(x), y=float(y), **more)


def rect(x: float, y: float, width: float, height: float, *inside: str, **more: object) -> Markup:
    return tag("rect", *inside, x=float(x), y=float(y), width=float(width), height=float(height), **more)


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """About `count` round numbers from low to high."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, int(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten from low to high; where that is too few, plain ticks."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    found = [
        factor * 10.0**power
        for power in range(first, last + 1)
        for factor in (1, 2, 5)
        if low <= factor * 10.0**power <= high
    ]
    if len(found) > 10:
        found = [value for value in found if abs(math.log10(value) % 1) < 1e-9]
    return found if len(found) >= 2 else ticks(low, high, 4)
