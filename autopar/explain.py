"""Explain: why a plan is as it is, why not otherwise, and what if the cluster were another; torch-free.

In:  a Plan that holds its workload and layout (`autopar plan --space all` writes such plans), words.
Out: plain data (dicts of numbers and text, as --json prints them); `explain_text.py` makes the pages of them.

    study = Study.of(Plan.load("plan.json"))
    why(study)                          every decision, its best alternative, and what that costs
    why_not(study, "tp=4,pp=8")         the best plan with these, side by side
    what_if(study, "inter_bw=2x")       the best plan on another cluster, batch or sequence length
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autopar.cluster import WHAT_IF, Cluster
from autopar.cost.communication import group_levels
from autopar.cost.pipeline import Priced, price
from autopar.cost.software import Software, load_software
from autopar.errors import InfeasibleError, PlanError, UsageError
from autopar.layout import PRECISIONS, Layout
from autopar.passes.decisions import Decisions, is_decision, parse_decisions
from autopar.passes.layout_relax import reasons, search_or_relax
from autopar.passes.layout_search import TIED, Found, search_layouts
from autopar.passes.layout_sensitivity import Nearby
from autopar.passes.layout_space import Space
from autopar.plans import Plan
from autopar.workload import Workload, check_sizes

Data = dict[str, Any]
GIB = 2**30
DECISIONS = (
    "tp", "cp", "pp", "vpp", "schedule", "cuts", "ep", "etp", "dp", "zero", "shard", "mbs", "recompute", "precision",
    "offload",
)  # fmt: skip
NUMBERS = ("gpus", "batch", "seq")  # of what-if, beside the factors of WHAT_IF


@dataclass(frozen=True)
class Study:
    """A plan's problem and answer: what was searched, with the constants of this version, and the layout chosen."""

    space: Space
    software: Software
    chosen: Priced
    predicted_s: float

    @classmethod
    def of(cls, plan: Plan) -> Study:
        """Raises PlanError for a plan without a layout or a workload."""
        if plan.layout is None:
            raise PlanError(
                "the plan has no layout, so its choices cannot be priced anew",
                where="layout",
                hint="autopar plan ... --space all",
            )
        workload, cluster, layout = plan.parsed_workload, plan.parsed_cluster, plan.parsed_layout
        software = load_software(plan.software or "autopar")
        fixed = [text for text in plan.constraints if is_decision(text)]
        forbidden = [text.removeprefix("not ") for text in plan.constraints if text.startswith("not ")]
        decisions = parse_decisions(fixed, [text for text in forbidden if is_decision(text)])
        space = Space(workload, cluster, plan.data.batch, decisions, precisions=(layout.precision,))
        return cls(
            space, software, price(workload, layout, cluster, software, plan.data.batch), plan.predicted.step_time_s
        )  # fmt: skip

    @property
    def workload(self) -> Workload:
        return self.space.workload

    @property
    def cluster(self) -> Cluster:
        return self.space.cluster

    @property
    def limit(self) -> float:
        return float(self.cluster.device.usable_bytes)

    @property
    def tokens(self) -> int:
        return self.space.batch * self.workload.seq

    @cached_property
    def nearby(self) -> Nearby:
        return Nearby(self.space, self.software, self.chosen.layout)

    def search(self, fix: Sequence[str] = (), forbid: Sequence[str] = (), **changes: Any) -> Found:
        """The best layout with further decisions. Raises InfeasibleError, UsageError."""
        more = parse_decisions(fix, forbid)
        words = (*self.space.decisions.words, *more.words)
        return search_or_relax(replace(self.space, decisions=Decisions(words), **changes), self.software)


# ---------------------------------------------------------------- why


def why(study: Study) -> Data:
    """Every decision: its value, the best plan with another value, and the difference by kind."""
    chosen = study.chosen
    best = study.search()
    return {
        "model": study.workload.name,
        "cluster": study.cluster.name,
        "batch": study.space.batch,
        "seq": study.workload.seq,
        "chosen": numbers(study, chosen),
        "limit_bytes": study.limit,
        "planned_s": study.predicted_s,
        "best": numbers(study, best.best),
        "bound_s": best.bound_s,
        "constraints": [word.said for word in study.space.decisions.words],
        "decisions": [_decision(study, name) for name in DECISIONS],
        "axes": list(_axes(study)),
    }


def _decision(study: Study, name: str) -> Data:
    layout = study.chosen.layout
    value = getattr(layout, name)
    found: Data = {"name": name, "value": _word(value), "why": "", "alternative": None, "too_large": None}
    if (none := _no_choice(study, name)) is not None:
        return found | {"why": none}
    if name == "cuts":
        return found | _cuts(study)
    changes: Data = {}
    if name == "precision":  # what another would do is worth knowing, asked for or not
        changes = {"precisions": _precisions(study)}
        kept = tuple(word for word in study.space.decisions.words if word.name != name)
        study = replace(study, space=replace(study.space, decisions=Decisions(kept)))
    decisions = [word for word in study.space.decisions.words if word.name == name]
    if decisions:
        return found | {"why": f"asked for: {', '.join(word.said for word in decisions)}"}
    try:
        other = study.search(forbid=[f"{name}={value}"], **changes)
    except InfeasibleError as error:
        return found | {"why": f"no other value runs: {error.what}"}
    found["alternative"] = compare(study, other.best) | {"value": _word(getattr(other.best.layout, name))}
    lost = next(
        (
            one
            for one in other.alternatives
            if not one.fits and one.step_s < min(other.best.step_s, study.chosen.step_s)
        ),
        None,
    )
    if lost is not None:
        found["too_large"] = {
            "value": _word(getattr(lost.layout, name)),
            "layout": str(lost.layout),
            "step_s": lost.step_s,
            "over_bytes": lost.memory_bytes - study.limit,
        }
    if name == "precision":
        found["why"] = "the numerics are the user's choice: --precision 'bf16|fp8' lets the planner choose"
    return found


def _no_choice(study: Study, name: str) -> str | None:
    """Why a decision has no other value here, or None."""
    layout, workload = study.chosen.layout, study.workload
    if name in ("vpp", "schedule", "cuts") and layout.pp == 1:
        return "one stage: there is no pipeline"
    if name in ("ep", "etp") and not workload.experts:
        return "the model has no experts"
    if name == "etp" and layout.tp == 1:
        return "tp=1: an expert has nothing to be split over"
    if name == "shard" and layout.zero == 0:
        return "zero=0: nothing is sharded"
    if name == "offload" and not study.space.cluster_offloads:
        return f"{study.cluster.device.name} names no bandwidth to its host"
    if name == "precision" and len(_precisions(study)) < 2:
        return f"{study.cluster.device.name} has no other"
    return None


def _cuts(study: Study) -> Data:
    """The cut beside the plain one: as many layers on every virtual stage."""
    layout = study.chosen.layout
    stages, depth = layout.pp * layout.vpp, study.workload.depth
    plain = tuple(depth // stages + (index < depth % stages) for index in range(stages))
    if plain == layout.cuts:
        return {"why": "as many layers on every stage"}
    other = price(study.workload, layout.with_(cuts=plain), study.cluster, study.software, study.space.batch)
    return {"alternative": compare(study, other) | {"value": _word(plain)}}


def _precisions(study: Study) -> tuple[str, ...]:
    """What the device multiplies in, beside the chosen precision."""
    peaks = study.cluster.device.peak_tflops
    if study.chosen.layout.precision == "fp32" and "bf16" not in peaks:
        return ("fp32",)
    needs = {"fp32": "fp32", "bf16": "bf16", "fp8": "fp8", "mxfp8": "fp4", "nvfp4": "fp4"}
    return tuple(
        name
        for name in PRECISIONS
        if name == study.chosen.layout.precision or (name != "fp32" and needs[name] in peaks)
    )


def _axes(study: Study) -> Iterator[Data]:
    """Where each axis lies: ranks are numbered tp first, then cp, dp, pp, so that inner axes are on faster links."""
    layout, stride = study.chosen.layout, 1
    for name in ("tp", "cp", "dp", "pp"):
        size = getattr(layout, name)
        if size > 1:
            levels = [level.link.name for level in group_levels(study.cluster.links, size, stride)]
            yield {"axis": name, "size": size, "stride": stride, "links": levels}
        stride *= size


# ---------------------------------------------------------------- why not, what if


def why_not(study: Study, text: str) -> Data:
    """The best plan with the words of `text` (`tp=4`, `tp=4,pp=8`, a whole layout), or why there is none."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    cuts = [word for word in words if word.startswith("cuts=")]
    fix = [word for word in words if not word.startswith("cuts=")]
    if not words:
        raise UsageError("nothing to compare with", where="why not", hint="tp=4, or tp=4,pp=8")
    asked = {word.name for word in parse_decisions(fix).words}
    kept = [word for word in study.space.decisions.words if word.name not in asked]
    space = replace(study.space, decisions=Decisions(tuple(kept)))
    try:
        found = replace(study, space=space).search(fix)
    except InfeasibleError as error:
        return {"words": text, "possible": False, "why": error.what, "hint": error.hint}
    best = found.best
    if cuts:
        layout = best.layout.with_(
            cuts=Layout.parse(f"pp={best.layout.pp},vpp={best.layout.vpp},{cuts[0]}").cuts
        )
        if sum(layout.cuts) != study.workload.depth:
            return {
                "words": text,
                "possible": False,
                "why": f"{cuts[0]} places {sum(layout.cuts)} layers, the model has {study.workload.depth}",
                "hint": f"numbers whose sum is {study.workload.depth}",
            }
        best = price(study.workload, layout, study.cluster, study.software, study.space.batch)
    data = {"words": text, "possible": True} | compare(study, best)
    lost = next((one for one in found.alternatives if not one.fits and one.step_s < best.step_s), None)
    if lost is not None:
        over = lost.memory_bytes - study.limit
        data["too_large"] = {"layout": str(lost.layout), "step_s": lost.step_s, "over_bytes": over}
    return data | {"why": _verdict(study, best)}


def _verdict(study: Study, other: Priced) -> str:
    """One sentence: how much slower, and what it is that grows."""
    chosen = study.chosen
    if other.layout == chosen.layout:
        return "it is the plan"
    ratio = other.step_s / chosen.step_s
    grown = _grown(chosen, other)
    if ratio <= TIED:
        room = other.memory_total - chosen.memory_total
        how = f"{100 * (ratio - 1):+.2f} %"
        if room > 0:
            return f"as fast ({how}, closer than predictions can tell), but it needs {room / GIB:.2f} GiB more memory"
        return f"as fast ({how}): closer than predictions can tell"
    most = grown[0]
    share = (other.time_s[most] - chosen.time_s[most]) / (other.step_s - chosen.step_s)
    return (
        f"{100 * (ratio - 1):.1f} % slower, most of it {most}: {REASONS[most]}"
        if share > 0.5
        else f"{100 * (ratio - 1):.1f} % slower: more {' and '.join(grown[:3])}"
    )


REASONS = {
    "forward": "smaller or more kernels, which run below their best speed",
    "backward": "kernels that are smaller, or share the device with traffic that they hide",
    "recompute": "the forward that is run again to save memory",
    "tensor communication": "hidden states that tp gathers and scatters in every layer",
    "context communication": "keys and values that go round the cp ranks",
    "expert communication": "tokens that go to their experts and back",
    "pipeline communication": "hidden states that go from stage to stage",
    "pipeline bubble": "ranks that wait while the pipeline fills and drains, or for a fuller stage",
    "data communication": "gradients and parameters that no compute hides",
    "optimizer": "more parameters that one rank updates",
    "other": "fixed work per step and waiting for the slowest node",
}


def what_if(study: Study, text: str) -> Data:
    """The best plan when something is otherwise: `inter_bw=2x`, `gpus=512`, `batch=1024`, or several with commas."""
    factors, counts = _what_if_words(text)
    cluster = study.cluster.with_(gpus=counts.get("gpus"), **factors)
    workload = study.workload.at(counts["seq"]) if "seq" in counts else study.workload
    batch = counts.get("batch", study.space.batch)
    check_sizes(batch, workload.seq)
    changed = replace(study.space, workload=workload, cluster=cluster, batch=batch)
    other = replace(study, space=changed)
    data: Data = {"words": text, "cluster": cluster.name, "batch": batch, "seq": workload.seq}
    try:
        found = other.search()
    except InfeasibleError as error:
        return data | {"possible": False, "why": error.what, "hint": error.hint}
    data |= {"possible": True} | compare(other, found.best, study.chosen)
    data["same_layout"] = found.best.layout.with_(cuts=()) == study.chosen.layout.with_(cuts=())
    data["changed"] = _changed(study.chosen.layout, found.best.layout)
    data["tokens_per_s_ratio"] = (other.tokens / found.best.step_s) / (study.tokens / study.chosen.step_s)
    words = [f"{name}={value}" for name, value in _whole(study.chosen.layout)]
    same = replace(changed, decisions=parse_decisions(words))
    try:
        data["kept"] = numbers(other, search_layouts(same, study.software).best)
    except InfeasibleError as error:
        data["kept_why_not"] = "; ".join(reasons(same)) or error.what
    return data


def _what_if_words(text: str) -> tuple[dict[str, float], dict[str, int]]:
    factors: dict[str, float] = {}
    counts: dict[str, int] = {}
    for part in filter(None, (word.strip() for word in text.split(","))):
        match = re.fullmatch(r"([a-z_]+)\s*=\s*([0-9.eE+-]+)(x?)", part)
        if match is None or (match[1] not in WHAT_IF and match[1] not in NUMBERS):
            raise UsageError(
                f"{part!r} is no what-if",
                where="what if",
                hint=f"inter_bw=2x, gpus=512; one of {', '.join((*WHAT_IF, *NUMBERS))}",
            )
        name, number = match[1], match[2]
        if name in factors or name in counts:
            raise UsageError(f"{name} is given twice", where="what if", hint=f"one {name}=..")
        try:
            if name in WHAT_IF:
                factors[name] = float(number)
            else:
                counts[name] = int(number)
                if counts[name] < 1 or match[3]:
                    raise ValueError
        except ValueError:
            form = f"{name}=2x" if name in WHAT_IF else f"{name}=512"
            raise UsageError(f"{part!r}: {number!r} is no number", where="what if", hint=form) from None
    if not factors and not counts:
        raise UsageError("nothing is otherwise", where="what if", hint="inter_bw=2x or gpus=512")
    return factors, counts


def _whole(layout: Layout) -> list[tuple[str, Any]]:
    """What makes the layout but for dp, which takes the devices that are left, and its cuts."""
    return [(name, getattr(layout, name)) for name in DECISIONS if name not in ("cuts", "dp", "shard")]


def _changed(old: Layout, new: Layout) -> list[str]:
    return [
        f"{name} {_word(getattr(old, name))} -> {_word(getattr(new, name))}"
        for name in DECISIONS
        if name != "cuts" and getattr(old, name) != getattr(new, name)
    ]


# ---------------------------------------------------------------- numbers


def numbers(study: Study, one: Priced) -> Data:
    return {
        "layout": str(one.layout),
        "step_s": one.step_s,
        "tokens_per_s": study.tokens / one.step_s,
        "time_s": dict(one.time_s),
        "memory_bytes": dict(one.memory_bytes),
        "memory_total": one.memory_total,
    }


def compare(study: Study, other: Priced, chosen: Priced | None = None) -> Data:
    """Another plan's numbers and what it has more or less of than the choice, by kind."""
    own = chosen or study.chosen
    return numbers(study, other) | {
        "slower": other.step_s / own.step_s - 1,
        "over_bytes": max(0.0, other.memory_total - study.limit),
        "time_difference_s": {kind: other.time_s[kind] - own.time_s[kind] for kind in own.time_s},
        "memory_difference_bytes": {
            kind: other.memory_bytes.get(kind, 0.0) - own.memory_bytes[kind] for kind in own.memory_bytes
        },
    }


def _grown(chosen: Priced, other: Priced) -> list[str]:
    """Kinds of time that the other has more of, most first."""
    more = {kind: other.time_s[kind] - chosen.time_s[kind] for kind in chosen.time_s}
    return sorted((kind for kind in more if more[kind] > 0), key=lambda kind: -more[kind])


def _word(value: Any) -> Any:
    return "/".join(map(str, value)) if isinstance(value, tuple) else value
