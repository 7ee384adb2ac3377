"""The words of a layout: what a person reads of one. In: a Layout and the batch. Out: (title, text) lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import groupby

from autopar.layout import Layout

_ZERO = (
    "nothing split over data ranks",
    "optimizer state split",
    "optimizer state and gradients split",
    "optimizer state, gradients and parameters split",
)
_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zb-h1": "zero bubble (ZB-H1)",
    "zbv": "zero bubble that folds back (ZB-V)",
    "dualpipev": "DualPipe that folds back (DualPipeV)",
}
_OFFLOAD = {
    "optimizer": "optimizer state",
    "activations": "activations",
    "all": "optimizer state and activations",
}
_RECOMPUTE = {
    "none": "nothing is recomputed",
    "selective": "cheap ops are recomputed (selective)",
    "full": "layers are recomputed from their inputs (full)",
}


def layout_lines(layout: Layout, *, batch: int, seq: int, experts: int = 0) -> Iterator[tuple[str, str]]:
    """What each decision is, in the order in which one would explain them. `experts`: of one layer."""
    if layout.pp > 1:
        chunks = f" x {layout.vpp} chunks" if layout.vpp > 1 else ""
        yield "pipeline", f"{layout.pp} stages{chunks}, {_SCHEDULES[layout.schedule]}"
        if layout.cuts:
            yield "layers", f"{runs(layout.cuts)} per {'virtual ' * (layout.vpp > 1)}stage, in model order"
    else:
        yield "pipeline", "no stages: every rank holds all layers"
    over = ""
    if layout.zero and layout.data_ranks > 1:
        partial = 0 < layout.shard < layout.data_ranks
        over = (
            f" over {f'groups of {layout.shard} of the' if partial else 'all'} {layout.data_ranks} data ranks"
        )
    yield "data", f"dp {layout.dp}; ZeRO {layout.zero}: {_ZERO[layout.zero]}{over}"
    if layout.tp > 1:
        split = "split over the sequence" if layout.sp else "repeated on each rank"
        yield "tensor", f"tp {layout.tp}; norms and residuals {split}"
    if layout.cp > 1:
        yield "context", f"cp {layout.cp}: {seq // layout.cp:,} of {seq:,} tokens of a sequence on a rank"
    if experts:
        each = max(1, experts // layout.ep)
        inside = f", each split over {layout.etp}" if layout.etp > 1 else ""
        yield "experts", f"ep {layout.ep}: {each} of {experts} experts on a rank{inside} (etp {layout.etp})"
    kept = _RECOMPUTE[layout.recompute]
    if layout.recompute != "none" and layout.recompute_layers is not None:
        kept += f", {layout.recompute_layers} layers per stage"
    away = f"; {_OFFLOAD[layout.offload]} in host memory" if layout.offload != "none" else ""
    yield "kept", f"{kept}{away}; {layout.precision}"
    count = batch // (layout.dp * layout.mbs)
    sequences = f"{layout.mbs} sequence{'s' * (layout.mbs > 1)}"
    yield (
        "batch",
        f"{batch:,} sequences of {seq:,} tokens: {count} micro-batch{'es' * (count > 1)} of {sequences} on each of"
        f" {layout.dp} replicas",
    )


def wrapped(title: str, text: str, *, column: int = 10, width: int = 100) -> Iterator[str]:
    """`title`, and from `column` on `text`, on as many lines of at most `width` as it takes, broken after commas."""
    line = title.ljust(column)
    for index, word in enumerate(text.split(",")):
        piece = word if index == 0 else f",{word}"
        if index and len(line) + len(piece) >= width:
            yield f"{line},"
            line, piece = " " * column, word.lstrip()
        line += piece
    yield line


def runs(numbers: Sequence[int]) -> str:
    """Numbers in order, equal neighbours together: `8 x 14, 7 x 2`."""
    groups = [(number, len(list(group))) for number, group in groupby(numbers)]
    if len(groups) > 8:  # mixed
        return f"{min(numbers)} to {max(numbers)}"
    return ", ".join(f"{number} x {count}" if count > 1 else str(number) for number, count in groups)


def differences(one: Layout, other: Layout) -> str:
    """What `other` has otherwise: `tp 2->4, cp 16->8`; empty for equal layouts. Left out are cuts, and dp where it
    follows from tp, cp and pp."""
    words = []
    left_out = {"cuts", "dp"} if one.world == other.world else {"cuts"}
    for field in fields(Layout):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if field.name not in left_out and mine != theirs:
            if isinstance(mine, bool):
                mine, theirs = int(mine), int(theirs)
            words.append(f"{field.name} {mine}->{theirs}")
    return ", ".join(words)
