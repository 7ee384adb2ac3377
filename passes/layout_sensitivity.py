"""Layout sensitivity: whether the choice stays right when the cost model's constants are off, and what that costs.

In:  a Space, a Software, the layout that was chosen.
Out: per uncertain constant, what its error does to the step and to the choice; the layout with the least regret.

The layouts nearest to the best are priced again with every constant moved within its interval, nothing is searched
again. A layout's regret under some constants is how much slower it is than the best of them there.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from autopar.cluster import Cluster
from autopar.cost.estimate import estimate
from autopar.cost.grid import Array, Grid
from autopar.cost.pipeline import price
from autopar.cost.rates import calibration, family_of
from autopar.cost.software import Software, software_data
from autopar.layout import PRECISIONS, Layout
from autopar.passes.layout_search import TIED, Found, search_layouts
from autopar.passes.layout_space import Space, joined

DEFAULT = 0.15  # of a constant whose error nobody has measured
SLACK = 1.3  # layouts whose bound is so far from the best are priced too
_POINTS = 7  # at which a constant is tried, from one end of its interval to the other
_SAMPLES = 64  # joint draws of all constants
_SIMULATED = 24  # pipelines run event by event; the others of a schedule are taken to be off as these are
_RECENT = 2024.0  # stacks from then on say between what an overlap lies


@dataclass(frozen=True)
class Setting:
    """What a step is priced with. `memory`: a factor on the bytes that the model counts."""

    cluster: Cluster
    software: Software
    data: Mapping[str, Any]
    memory: float = 1.0


@dataclass(frozen=True)
class Constant:
    """One uncertain number: factors `low` to `high` of `value`, where they come from, what to measure to know it, and
    the Setting in which it is multiplied by a factor."""

    name: str
    value: float
    unit: str
    low: float
    high: float
    source: str
    measure: str
    apply: Callable[[Setting, float], Setting]


@dataclass(frozen=True)
class Effect:
    """What a constant's error does. `elasticity`: percent of step time per percent; `low_s`, `high_s`: the choice's
    step at the ends; `regret`: of keeping the choice, at its most; `flips`: share of the interval in which another
    layout is better; `nearest`: the factor nearest to 1 at which it is; `to`: that layout; `margin`: how much slower
    the best layout of another kind is, at its least."""

    constant: Constant
    elasticity: float
    low_s: float
    high_s: float
    regret: float
    flips: float
    nearest: float | None
    to: Layout | None
    margin: float


@dataclass(frozen=True)
class Robust:
    """`worst`, `chosen_worst`: the largest regret of the layout and of the choice; `in_`, `chosen_in`: where."""

    layout: Layout
    step_s: float
    worst: float
    in_: str
    chosen_worst: float
    chosen_in: str


class Nearby:
    """The layouts nearest to the best of a space, with the choice as row 0, priced under any Setting."""

    def __init__(self, space: Space, software: Software, chosen: Layout) -> None:
        found = search_layouts(space, software, slack=SLACK)
        plain = chosen.with_(cuts=())
        self.space, self.limit = space, found.limit_bytes
        rest = found.top
        own = np.array([rest.layout(row) != plain for row in range(len(rest))])
        self.grid = joined([Grid.of([plain]), rest.take(own)])
        self.nominal = Setting(space.cluster, software, calibration())
        self.factor: Array = np.ones(len(self.grid))
        self.factor = self._simulated(chosen)
        self.kinds = np.array([self._kind(row) for row in range(len(self.grid))])

    def price(self, setting: Setting) -> tuple[Array, Array]:
        """(seconds, whether it fits) of every layout."""
        workload, batch = self.space.workload, self.space.batch
        found = estimate(workload, self.grid, setting.cluster, setting.software, batch, setting.data)
        return found.step_s * self.factor, found.memory_total * setting.memory <= self.limit

    def layout(self, row: int) -> Layout:
        return self.grid.layout(row)

    def _kind(self, row: int) -> int:
        return hash(
            tuple(int(self.grid.columns[name][row]) for name in ("tp", "cp", "pp", "ep", "recompute"))
        )

    def _simulated(self, chosen: Layout) -> Array:
        """Seconds of the simulated step beside the closed form's, by layout."""
        seconds, _ = self.price(self.nominal)
        factor = np.ones(len(self.grid))
        piped = np.flatnonzero(self.grid.pp > 1)
        piped = piped[np.argsort(seconds[piped], kind="stable")]
        known: dict[int, list[float]] = {}
        cluster, software = self.nominal.cluster, self.nominal.software
        for row in dict.fromkeys([*([0] if chosen.pp > 1 else []), *piped[:_SIMULATED].tolist()]):
            layout = chosen if row == 0 else self.layout(row)
            exact = price(self.space.workload, layout, cluster, software, self.space.batch).step_s
            factor[row] = exact / seconds[row]
            known.setdefault(int(self.grid.schedule[row]), []).append(float(factor[row]))
        for row in piped[_SIMULATED:]:
            if row and (same := known.get(int(self.grid.schedule[row]))):
                factor[row] = float(np.median(same))
        return factor


def sensitivity(nearby: Nearby) -> list[Effect]:
    """The effect of every constant that changes anything, the one whose measurement matters most first."""
    base = float(nearby.price(nearby.nominal)[0][0])
    effects = [_effect(nearby, constant, base) for constant in constants(nearby)]
    effects = [effect for effect in effects if abs(effect.elasticity) > 1e-5 or effect.flips > 0]
    return sorted(effects, key=lambda effect: (-effect.flips * effect.regret, -effect.flips, effect.margin))


def _effect(nearby: Nearby, constant: Constant, base: float) -> Effect:
    factors = np.geomspace(constant.low, constant.high, _POINTS)
    flipped, regret, margin = [], 0.0, math.inf
    nearest: tuple[float, int] | None = None
    ends = []
    for factor in factors:
        seconds, fits = nearby.price(constant.apply(nearby.nominal, float(factor)))
        ends.append(float(seconds[0]))
        if not fits.any():
            flipped.append(False)
            continue
        best = int(np.flatnonzero(fits)[np.argmin(seconds[fits])])
        lost = math.inf if not fits[0] else float(seconds[0] / seconds[best] - 1)
        flips = lost > TIED - 1
        flipped.append(flips)
        regret = max(regret, lost) if flips else regret
        others = fits & (nearby.kinds != nearby.kinds[0])
        if others.any() and fits[0]:
            margin = min(margin, float(seconds[others].min() / seconds[0] - 1))
        if flips and (nearest is None or abs(math.log(factor)) < abs(math.log(nearest[0]))):
            nearest = float(factor), best
    up, _ = nearby.price(constant.apply(nearby.nominal, 1.02))
    return Effect(
        constant,
        elasticity=(float(up[0]) / base - 1) / 0.02,
        low_s=ends[0],
        high_s=ends[-1],
        regret=regret,
        flips=sum(flipped) / _POINTS,
        nearest=nearest[0] if nearest else None,
        to=nearby.layout(nearest[1]) if nearest else None,
        margin=margin,
    )


def robust(nearby: Nearby, seed: int = 0) -> Robust:
    """The layout whose largest regret over the intervals is least: one constant at a time at both its ends, and all at
    once, drawn at random."""
    scenarios = list(_scenarios(nearby, np.random.default_rng(seed)))
    regrets, names = [], []
    for name, setting in scenarios:
        seconds, fits = nearby.price(setting)
        if fits.any():
            regrets.append(np.where(fits, seconds / seconds[fits].min() - 1, np.inf))
            names.append(name)
    table = np.stack(regrets)
    worst = table.max(axis=0)
    nominal, _ = nearby.price(nearby.nominal)
    row = int(np.lexsort((nominal, np.round(worst, 6)))[0])
    return Robust(
        layout=nearby.layout(row),
        step_s=float(nominal[row]),
        worst=float(worst[row]),
        in_=names[int(table[:, row].argmax())],
        chosen_worst=float(worst[0]),
        chosen_in=names[int(table[:, 0].argmax())],
    )


def steadier(space: Space, software: Software, found: Found) -> Found:
    """What was found with its robust layout in the place of the fastest."""
    other = robust(Nearby(space, software, found.best.layout)).layout
    if other == found.best.layout.with_(cuts=()):
        return found
    return replace(found, best=price(space.workload, other, space.cluster, software, space.batch))


def _scenarios(nearby: Nearby, random: np.random.Generator) -> Iterator[tuple[str, Setting]]:
    known = constants(nearby)
    yield "the constants as they are", nearby.nominal
    for constant in known:
        for factor in (constant.low, constant.high):
            yield f"{constant.name} x {factor:.2f}", constant.apply(nearby.nominal, factor)
    for number in range(_SAMPLES):
        setting = nearby.nominal
        for constant in known:
            factor = math.exp(random.uniform(math.log(constant.low), math.log(constant.high)))
            setting = constant.apply(setting, factor)
        yield f"draw {number + 1} of all constants at once", setting


# ---------------------------------------------------------------- the constants and their intervals


def constants(nearby: Nearby) -> list[Constant]:
    """Every constant of the cost model that the layouts at hand may depend on."""
    device, software = nearby.space.cluster.device, nearby.nominal.software
    facts = family_of(device, calibration())
    grid, experts = nearby.grid, nearby.space.workload.experts
    name = device.name
    found = [
        _fact(device.name, "sustained", "sustained clock of matmuls", facts,
              f"the model's matmuls on one {name}, for minutes rather than in bursts", _step_errors(nearby)),
        _fact(device.name, "attention_speed", "speed of attention kernels", facts, f"the attention kernel on one {name}"),
        _fact(device.name, "stream", "speed of pointwise kernels", facts, f"norms and activations on one {name}"),
        Constant(
            "matmul size of half speed", device.matmul_half_size, "", *_around(), "assumed: 15 % either way",
            f"matmuls of growing size on one {device.name}", _half_size,
        ),
    ]  # fmt: skip
    for code in np.unique(grid.precision):
        low = PRECISIONS[int(code)]
        key = "fp4" if low == "nvfp4" else low
        if code >= 2 and key in facts:
            found.append(
                _fact(device.name, key, f"gain of {low} products", facts, f"{low} matmuls on one {name}")
            )
    for index, link in enumerate(nearby.space.cluster.links):
        pair = f"all-gathers of growing size over {link.name}"
        found.append(
            Constant(
                f"{link.name} bandwidth", link.bytes_per_s / 1e9, "GB/s", *_around(), "assumed: 15 % either way",
                pair, _link(index, "gbps"),
            )
        )  # fmt: skip
        found.append(
            Constant(
                f"{link.name} latency", link.collective_latency_s * 1e6, "us", *_around(),
                "assumed: 15 % either way", f"small collectives over {link.name}", _link(index, "latency"),
            )
        )  # fmt: skip
    found += [
        _stack(field, said, software) for field, said in _FIELDS.items() if experts or field not in _MOE
    ]
    found.append(
        Constant(
            "memory that the model counts", 1.0, "", 0.95, 1.05, "assumed: 5 % either way",
            "the peak of one training step, by torch.cuda.max_memory_reserved", _memory,
        )
    )  # fmt: skip
    return [constant for constant in found if constant.value > 0 and constant.high > constant.low]


_FIELDS = {
    "tp_exposed": "tensor traffic that stays exposed",
    "cp_exposed": "context traffic that stays exposed",
    "ep_exposed": "expert traffic that stays exposed",
    "pp_exposed": "pipeline traffic that stays exposed",
    "dp_window": "backward that hides gradient reduction",
    "dp_exposed": "data traffic exposed at the least",
    "fsdp_window": "compute that hides parameter gathers",
    "contention": "compute lost to hidden traffic",
    "grouped": "speed of products over many experts",
    "expert_s": "host's wait per layer with experts",
    "kernel_s": "host's launch per kernel",
}
_MOE = ("ep_exposed", "grouped", "expert_s")
_SHARES = ("tp_exposed", "cp_exposed", "ep_exposed", "pp_exposed", "dp_window", "dp_exposed", "fsdp_window")


def _around(share: float = DEFAULT) -> tuple[float, float]:
    return 1 - share, 1 + share


def _fact(
    device: str, key: str, said: str, facts: Mapping[str, Any], measure: str, interval: Any = None
) -> Constant:
    low, high, source = interval or (*_around(), "assumed: 15 % either way")

    def apply(setting: Setting, factor: float) -> Setting:
        family = setting.data["devices"].get(device, device)
        own = family_of(setting.cluster.device, setting.data)
        families = {**setting.data["family"], family: {**own, key: own[key] * factor}}
        return replace(setting, data={**setting.data, "family": families})

    return Constant(said, float(facts[key]), "", low, high, source, measure, apply)


def _stack(field: str, said: str, software: Software) -> Constant:
    """A constant of the stack: between what was fitted to the stacks of recent years, or 15 % either way."""
    value = float(getattr(software, field))
    low, high = value * (1 - DEFAULT), value * (1 + DEFAULT)
    source = "assumed: 15 % either way"
    fitted = [
        float(stack[field])
        for stack in software_data()["stack"].values()
        if stack.get("since", 0.0) >= _RECENT and field in stack
    ]
    if fitted and value and field in _SHARES:
        low, high = min(low, *fitted), max(high, *fitted)
        source = f"fitted to stacks since {_RECENT:.0f}: {min(fitted):.2g} to {max(fitted):.2g}"
    if field in _SHARES:
        high = min(high, 1.0)

    def apply(setting: Setting, factor: float) -> Setting:
        changed = getattr(setting.software, field) * factor
        changed = min(1.0, changed) if field in _SHARES else changed
        return replace(setting, software=setting.software.with_(**{field: changed}))

    low, high = max(low, 0.02 * value), max(high, low)
    factors = (low / value, high / value) if value else (1.0, 1.0)
    return Constant(said, value, "", *factors, source, "a profile of a few training steps", apply)


def _half_size(setting: Setting, factor: float) -> Setting:
    device = setting.cluster.device
    scaled = replace(device, matmul_half_size=device.matmul_half_size * factor)
    return replace(setting, cluster=replace(setting.cluster, device=scaled))


def _memory(setting: Setting, factor: float) -> Setting:
    return replace(setting, memory=setting.memory * factor)


def _link(index: int, what: str) -> Callable[[Setting, float], Setting]:
    def apply(setting: Setting, factor: float) -> Setting:
        links = list(setting.cluster.links)
        link = links[index]
        if what == "gbps":
            links[index] = replace(link, gbps=link.gbps * factor)
        else:
            links[index] = replace(
                link,
                latency_s=link.latency_s * factor,
                collective_latency_s=link.collective_latency_s * factor,
            )
        return replace(setting, cluster=replace(setting.cluster, links=tuple(links)))

    return apply


def _step_errors(nearby: Nearby) -> tuple[float, float, str] | None:
    """The errors of step times of published runs on this device (validation.toml): nine of ten are within."""
    kind = "moe" if nearby.space.workload.experts else "dense"
    errors = _validation().get("errors", {})
    for name in (f"{kind}, {nearby.space.cluster.device.name}", kind, "all"):
        if name in errors and errors[name]["rows"] >= 10:
            error = min(0.5, float(errors[name]["p90"]))
            source = f"step times of {errors[name]['rows']} published runs ({name}): 90 % within {100 * error:.0f} %"
            return 1 / (1 + error), 1 + error, source
    return None


@cache
def _validation() -> dict[str, Any]:
    path = files("autopar.cost").joinpath("validation.toml")
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
