"""Budget: what training on so many tokens takes, in time, devices and money.

In:  a Plan and tokens; or a step's time and a cluster with its prices.
Out: a Budget (cost/money.py), its page and its JSON. `market.py` compares those of many clusters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from textwrap import wrap
from typing import Any

from autopar.cluster import Cluster
from autopar.cost.money import Budget
from autopar.plans import Plan

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
    return {name: finite(getattr(budget, name)) for name in names}


def finite(value: Any) -> Any:
    """The value with None for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
