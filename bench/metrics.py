"""Metrics: how far predictions are from measurements, and whether they order layouts rightly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np


@dataclass(frozen=True)
class Errors:
    """Relative errors (predicted / measured - 1) of some rows: how many, median and 90th percentile of their size,
    median with sign (bias), share within a tenth."""

    rows: int
    median: float
    p90: float
    bias: float
    within_tenth: float

    @staticmethod
    def of(predicted: Sequence[float], measured: Sequence[float]) -> Errors | None:
        """None for no rows."""
        if not len(predicted):
            return None
        relative = np.asarray(predicted, dtype=float) / np.asarray(measured, dtype=float) - 1.0
        size = np.abs(relative)
        return Errors(
            rows=len(relative),
            median=float(np.median(size)),
            p90=float(np.percentile(size, 90)),
            bias=float(np.median(relative)),
            within_tenth=float(np.mean(size <= 0.1)),
        )


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Pairs ordered alike less pairs ordered otherwise, over all pairs that the measurement orders (Kendall 1938);
    None where there is no such pair."""
    score = pairs = 0
    for (p, m), (q, n) in combinations(zip(predicted, measured, strict=True), 2):
        if m != n:
            pairs += 1
            score += int(np.sign(p - q) * np.sign(m - n))
    return score / pairs if pairs else None


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """How much longer the layout predicted best took than the one measured best."""
    return float(measured[int(np.argmin(predicted))] / min(measured) - 1.0)
