"""Layout relaxation: which constraints clash where no layout is left, and the nearest request that has one.

In:  a Space whose decisions leave nothing, a Software.
Out: an InfeasibleError that names a smallest set of words that cannot hold together, why, and what to drop or change.

    pp=5 and tp=16 cannot hold together: tp * cp * pp = 80 does not divide the 256 devices
      try without pp=5: tp=16,dp=16,... takes 2.31 s; or pp=4 in its place
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np

from autopar.cost.held import held
from autopar.cost.layout_memory import layout_memory
from autopar.cost.software import Software
from autopar.errors import InfeasibleError
from autopar.layout import OFFLOAD, PRECISIONS, SCHEDULES
from autopar.layout_check import runs_precision
from autopar.passes.decisions import WORDS, Decisions, Word
from autopar.passes.layout_search import Found, search_layouts
from autopar.passes.layout_space import Space, divisors
from autopar.workload import Matmul

_MOST_DROPPED = 3  # words that are dropped together at most, and the size of a clash that is looked for
_ROWS = 20_000  # rows whose memory is counted at a time


_SLACK = 1.02  # as much slower than the best are layouts that are priced to be told of


def search_or_relax(
    space: Space,
    software: Software,
    *,
    objective: str = "time",
    limit_bytes: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Found:
    """`search_layouts`; where nothing is left because of the decisions, the InfeasibleError says which of them clash
    and the nearest relaxation."""
    try:
        return search_layouts(
            space, software, objective=objective, limit_bytes=limit_bytes, slack=_SLACK, progress=progress
        )
    except InfeasibleError as error:
        if not space.decisions.words:
            raise
        raise relaxed(space, software, error, limit_bytes) from None


def relaxed(
    space: Space, software: Software, error: InfeasibleError, limit_bytes: float | None = None
) -> InfeasibleError:
    """`error` with the clash and the nearest relaxation; `error` itself where no constraint is to blame."""
    words = space.decisions.words
    limit = float(limit_bytes or space.cluster.device.usable_bytes)

    def leaves(kept: Sequence[Word]) -> bool:
        return feasible(replace(space, decisions=Decisions(tuple(kept))), software, limit)

    clash = next(
        (
            some
            for size in range(1, min(len(words), _MOST_DROPPED) + 1)
            for some in combinations(words, size)
            if not leaves(some)
        ),
        words,
    )
    best = _nearest(space, software, leaves, limit_bytes)
    if best is None:
        return error
    dropped, found = best
    why = reasons(replace(space, decisions=Decisions(tuple(clash)))) or [_first_line(error)]
    verb = "cannot hold" if len(clash) == 1 else "cannot hold together"
    hints = [
        f"without {_listed(dropped)}: {found.best.layout.with_(cuts=())} takes {found.best.step_s:.4g} s"
    ]
    for word in dropped:
        near = _other_value(space, word, dropped, leaves)
        if near is not None:
            hints.append(f"or {near} in the place of {word.text}")
    return InfeasibleError(
        f"{_listed(clash)} {verb}: {'; '.join(why)}",
        where=f"constraints {', '.join(word.said for word in words)}",
        hint="; ".join(hints),
    )


def feasible(space: Space, software: Software, limit: float) -> bool:
    """Whether any layout of the space divides and fits."""
    cores = space.cores()
    size, start = 64, 0
    turn = np.argsort(-(cores.tp * cores.pp * cores.cp), kind="stable") if len(cores) else np.zeros(0, int)
    while start < len(cores):
        rows = space.expand(cores.take(turn[start : start + size]))
        for part in range(0, len(rows), _ROWS):
            some = rows.take(slice(part, part + _ROWS))
            micro = np.maximum(1.0, space.batch / (some.dp * some.mbs))
            memory: Any = sum(
                layout_memory(space.workload, some, held(space.workload, some), software, micro).values()
            )
            if np.any(memory <= limit):
                return True
        start += size
    return False


def _nearest(
    space: Space, software: Software, leaves: Callable[[Sequence[Word]], bool], limit_bytes: float | None
) -> tuple[tuple[Word, ...], Found] | None:
    """The fewest words to drop, of those the ones that leave the fastest layout; None if nothing helps."""
    words = space.decisions.words
    for size in (*range(1, min(len(words), _MOST_DROPPED) + 1), len(words)):
        options: list[tuple[tuple[Word, ...], Found]] = []
        for dropped in combinations(words, size):
            kept = space.decisions.without(dropped)
            if leaves(kept.words):
                found = search_layouts(replace(space, decisions=kept), software, limit_bytes=limit_bytes)
                options.append((dropped, found))
        if options:
            return min(options, key=lambda option: option[1].best.step_s)
    return None


def _other_value(
    space: Space, word: Word, dropped: Sequence[Word], leaves: Callable[[Sequence[Word]], bool]
) -> str | None:
    """The value of the word's decision nearest to the one asked for that leaves something, all else kept."""
    if word.forbids or word.compare != "=" or word.name in WORDS or len(word.values) != 1:
        return None
    asked = word.values[0]
    kept = [other for other in space.decisions.words if other not in dropped]
    values = [value for value in _values(space, word.name) if value != asked]
    values.sort(key=lambda value: (abs(math.log(max(value, 0.5) / max(asked, 0.5))), value))
    for value in values[:8]:
        other = Word(f"{word.name}={value}", word.name, "=", (value,))
        if leaves([*kept, other]):
            return other.text
    return None


def _values(space: Space, name: str) -> list[int]:
    if name == "zero":
        return [0, 1, 2, 3]
    if name == "pp":
        return [ways for ways in divisors(space.cluster.device_count) if ways <= space.workload.depth]
    if name == "tp":
        return space.tensor_ways
    if name in ("vpp", "mbs", "recompute_layers"):
        return list(range(1, 33))
    return divisors(space.cluster.device_count)


# ---------------------------------------------------------------- why it cannot be


def reasons(space: Space) -> list[str]:
    """What of the fixed values does not divide, or is not there; empty where it is memory that is short."""
    fixed = {
        name: only[0]
        for name in {word.name for word in space.decisions.words}
        if (only := space.decisions.only(name)) is not None and len(only) == 1
    }
    return list(dict.fromkeys(_reasons(space, fixed)))


def _reasons(space: Space, fixed: dict[str, int]) -> Iterator[str]:
    w, world, batch = space.workload, space.cluster.device_count, space.batch
    tp, cp, pp, dp = (fixed.get(name, 1) for name in ("tp", "cp", "pp", "dp"))
    if tp not in space.tensor_ways:
        yield _tensor_reason(space, tp)
    if cp > 1 and w.seq % (2 * cp):
        yield f"cp={cp} does not split {w.seq} tokens into {2 * cp} equal parts"
    elif cp > 1 and w.seq // cp < 128:
        yield f"cp={cp} leaves {w.seq // cp} of {w.seq} tokens on a rank, fewer than 128"
    if pp > w.depth:
        yield f"pp={pp} stages are more than the {w.depth} layers"
    product = tp * cp * pp * dp
    if world % product:
        names = [name for name in ("dp", "tp", "cp", "pp") if fixed.get(name, 1) > 1]
        said = f"{names[0]}={product}" if len(names) == 1 else f"{' * '.join(names)} = {product}"
        yield f"{said} does not divide the {world} devices"
    elif "dp" in fixed and {"tp", "cp", "pp"} <= set(fixed) and product != world:
        yield f"dp * tp * cp * pp = {product}, but there are {world} devices"
    ranks = dp if "dp" in fixed else world // (tp * cp * pp) if {"tp", "cp", "pp"} <= set(fixed) else 0
    mbs = fixed.get("mbs", 1)
    if ranks and batch % ranks:
        yield f"a batch of {batch} sequences does not divide over dp={ranks}"
    elif batch % (mbs * max(1, ranks)):
        over = f" over dp={ranks}" if ranks else ""
        yield f"a batch of {batch} sequences does not divide{over} into micro-batches of {mbs}"
    yield from _expert_reasons(space, fixed)
    yield from _schedule_reasons(space, fixed)
    if fixed.get("zero", 0) > 0 and ranks == 1 and cp == 1:
        yield f"zero={fixed['zero']} needs data ranks to split over, and dp * cp is 1"
    precision, device = PRECISIONS[fixed.get("precision", 0)], space.cluster.device
    if not runs_precision(precision, device):
        yield f"precision={precision}: {device.name} has no such number format, it has {', '.join(device.peak_tflops)}"
    if fixed.get("offload", 0) > 0 and not space.cluster_offloads:
        yield f"offload={OFFLOAD[fixed['offload']]}: {space.cluster.device.name} names no bandwidth to its host"


def _tensor_reason(space: Space, tp: int) -> str:
    for layer, _ in space.workload.layers:
        for op in layer.ops:
            if isinstance(op, Matmul) and not op.experts and op.split in ("column", "row"):
                ways = op.ways or (op.n if op.split == "column" else op.k)
                if ways % tp:
                    what = f"the {ways} heads" if op.ways else f"the {ways} {op.split}s"
                    return f"tp={tp} does not divide {what} of {op.name}"
    return f"tp={tp} is more than {max(space.tensor_ways)}, the most this model can use"


def _expert_reasons(space: Space, fixed: dict[str, int]) -> Iterator[str]:
    experts = [layer.experts for layer, _ in space.workload.layers if layer.experts]
    ep, etp = fixed.get("ep", 1), fixed.get("etp", 1)
    if not experts:
        if ep > 1 or etp > 1:
            yield f"{'ep' if ep > 1 else 'etp'}={max(ep, etp)}: the model has no experts"
        return
    if math.gcd(*experts) % ep:
        yield f"ep={ep} does not divide the {math.gcd(*experts)} experts"
    if etp > 1 and etp != fixed.get("tp", etp):
        yield f"etp={etp} is neither 1 nor tp={fixed['tp']}"
    ranks = space.cluster.device_count // fixed.get("pp", 1)
    if ranks % (ep * etp):
        yield f"ep * etp = {ep * etp} does not divide the {ranks} ranks of a stage"


def _schedule_reasons(space: Space, fixed: dict[str, int]) -> Iterator[str]:
    pp, vpp, code = fixed.get("pp", 0), fixed.get("vpp", 0), fixed.get("schedule", -1)
    name = SCHEDULES[code] if code >= 0 else ""
    if pp == 1 and name not in ("", "1f1b"):
        yield f"schedule={name} needs pp > 1"
    if pp == 1 and vpp > 1:
        yield f"vpp={vpp} needs pp > 1"
    if vpp and pp * vpp > space.workload.depth:
        yield f"pp * vpp = {pp * vpp} chunks are more than the {space.workload.depth} layers"
    chunks = {"gpipe": 1, "1f1b": 1, "zb-h1": 1, "zbv": 2, "dualpipev": 2}.get(name)
    if vpp and chunks is not None and vpp != chunks:
        yield f"schedule={name} has vpp={chunks}"
    if name == "interleaved" and vpp == 1:
        yield "schedule=interleaved needs vpp > 1"
    stages = pp or 2
    needs = {"zb-h1": 1, "zbv": 1, "dualpipev": 2, "interleaved": 1}.get(name, 0) * stages
    if needs > 1:
        least = fixed.get("dp", 1) * fixed.get("mbs", 1)
        most = space.batch // least
        if most < needs or (name == "interleaved" and "dp" in fixed and "mbs" in fixed and most % stages):
            many = f"a multiple of {stages}" if name == "interleaved" else f"at least {needs}"
            yield f"schedule={name} on pp={stages} needs {many} micro-batches, a rank has {most}"


def _listed(words: Sequence[Word]) -> str:
    return " and ".join(word.said for word in words)


def _first_line(error: InfeasibleError) -> str:
    return error.what
