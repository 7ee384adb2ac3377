"""Explain the cost model: what errors of its constants do to a choice, and a layout's cost as formulas; torch-free.

In:  a Study (`explain.py`).
Out: plain data, as --json prints it.

    uncertain(study)   every uncertain constant: elasticity of the step, regret of the choice; what to measure first
    steady(study)      the layout with the least largest regret
    symbols(study)     seconds and bytes as sympy expressions in sequence length and batch
"""

from __future__ import annotations

import numpy as np

from autopar.cost.estimate import estimate
from autopar.cost.formula import LONGEST, SHORTEST, formula
from autopar.cost.grid import Grid
from autopar.explain import Data, Study
from autopar.passes.layout_sensitivity import robust, sensitivity


def uncertain(study: Study) -> Data:
    """Every uncertain constant: what its error does to the step and to the choice; the one to measure first."""
    effects = sensitivity(study.nearby)
    lines = [
        {
            "constant": one.constant.name,
            "value": one.constant.value,
            "unit": one.constant.unit,
            "low": one.constant.low,
            "high": one.constant.high,
            "source": one.constant.source,
            "measure": one.constant.measure,
            "elasticity": one.elasticity,
            "low_s": one.low_s,
            "high_s": one.high_s,
            "stays_best": one.flips == 0,
            "regret": one.regret,
            "flips_at": one.nearest,
            "flips_to": None if one.to is None else str(one.to),
            "margin": one.margin,
        }
        for one in effects
    ]
    return {"layouts": len(study.nearby.grid), "constants": lines, "measure": lines[0] if lines else None}


def steady(study: Study) -> Data:
    """The layout with the least largest regret over the constants' intervals, beside the choice."""
    found = robust(study.nearby)
    return {
        "layout": str(found.layout),
        "is_choice": found.layout == study.chosen.layout.with_(cuts=()),
        "step_s": found.step_s,
        "chosen_s": study.chosen.step_s,
        "worst_regret": found.worst,
        "worst_in": found.in_,
        "chosen_worst_regret": found.chosen_worst,
        "chosen_worst_in": found.chosen_in,
        "layouts": len(study.nearby.grid),
    }


def symbols(study: Study) -> Data:
    """The chosen layout's seconds and bytes as formulas, and how far they are from the estimate where both are asked."""
    workload, layout = study.workload, study.chosen.layout.with_(cuts=())
    found = formula(workload, layout, study.cluster, study.software)
    tokens = np.array(
        [found.step * -(-tokens // found.step) for tokens in (2048, workload.seq, 4 * workload.seq)]
    )
    batches = study.space.batch * np.array([[1], [2]])
    times, memory = found.evaluate(tokens, batches)
    grid, worst = Grid.of([layout]), 0.0
    for (row, column), batch in np.ndenumerate(np.broadcast_to(batches, (2, 3))):
        exact = estimate(workload.at(int(tokens[column])), grid, study.cluster, study.software, int(batch))
        step_s = sum(kind[row, column] for kind in times.values())
        total = sum(kind[row, column] for kind in memory.values())
        worst = max(worst, abs(step_s / exact.step_s[0] - 1), abs(total / exact.memory_total[0] - 1))
    lines = list(found.lines())
    at = f"S = {', '.join(map(str, tokens))} and B = {batches[0, 0]}, {batches[1, 0]}"
    lines.append(f"check  evaluated with numpy at {at}: within {100 * worst:.2g} % of the estimate")
    if layout.pp > 1:
        lines.append("note   the plan's pipeline is simulated; the formula has its closed form")
    return {
        "layout": str(layout),
        "M": f"B / {found.per_micro_batch}",
        "S_multiple_of": found.step,
        "S_from": SHORTEST,
        "S_to": LONGEST,
        "parts": {
            str(symbol): {"formula": str(one), "what": what} for symbol, (one, what) in found.parts.items()
        },
        "time_s": {kind: str(one) for kind, one in found.time_s.items()},
        "memory_bytes": [
            {"moment": label, "formulas": {kind: str(one) for kind, one in kinds.items()}}
            for label, kinds in found.moments
        ],
        "worst_error": float(worst),
        "lines": lines,
    }
