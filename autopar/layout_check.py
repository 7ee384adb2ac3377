"""Layout check: whether a layout can run a workload on a cluster, and if not, what stands in the way.

In:  a Layout (or its text), a Workload, a Cluster, sequences per step.
Out: nothing, or a UsageError that names the numbers and a value that would do.

    UsageError: tp=5 does not divide the 128 heads of attention+mlp's qkv
      at layout
      try tp=4 or tp=8

What it says is what runtimes need in general (Megatron-LM's own checks are these). That a layout fits in memory is
the cost model's to say.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cluster import Cluster, Device
from autopar.errors import ClusterError, UsageError
from autopar.layout import Layout
from autopar.workload import Layer, Matmul, Workload

_CHUNKS = {"gpipe": 1, "1f1b": 1, "zb-h1": 1, "zbv": 2, "dualpipev": 2}
_PEAKS = {"mxfp8": "fp8", "nvfp4": "fp4"}  # the products of a precision run at this peak of the device file
# A first chunk may hold the embedding alone, a last one the head and the loss alone (Llama 3 paper, section 3.3.2).
ENDS = 2


def check(layout: Layout, workload: Workload, cluster: Cluster, batch: int) -> None:
    """Raise the first of `faults`."""
    for fault in faults(layout, workload, cluster, batch):
        raise fault


def runs(layout: Layout, workload: Workload, cluster: Cluster, batch: int) -> bool:
    """Whether `check` finds nothing."""
    return next(faults(layout, workload, cluster, batch), None) is None


def filled(text: str | Layout, cluster: Cluster) -> Layout:
    """Read a layout; where a text leaves `dp` out it is what the cluster leaves. Raises UsageError for another world
    than the cluster's."""
    layout = Layout.parse(text) if isinstance(text, str) else text
    if isinstance(text, str) and not any(word.partition("=")[0].strip() == "dp" for word in text.split(",")):
        dp, rest = divmod(cluster.device_count, layout.world)
        if rest:
            raise _fault(
                f"{_product(layout, without_dp=True)} = {layout.world}, which does not divide the cluster's"
                f" {cluster.device_count} devices",
                "sizes whose product does",
            )
        layout = layout.with_(dp=dp)
    for fault in _world(layout, cluster):
        raise fault
    return layout


def faults(layout: Layout, workload: Workload, cluster: Cluster, batch: int) -> Iterator[UsageError]:
    """Everything that stands in the way, in the order in which one would mend it."""
    yield from _world(layout, cluster)
    yield from _device(layout, cluster)
    yield from _tensor(layout, workload)
    yield from _context(layout, workload)
    yield from _experts(layout, workload)
    yield from _stages(layout, workload)
    yield from _batch(layout, batch)


def _world(layout: Layout, cluster: Cluster) -> Iterator[UsageError]:
    count = cluster.device_count
    if layout.world != count:
        dp, rest = divmod(count, layout.world // layout.dp)
        yield _fault(
            f"{_product(layout)} = {layout.world} ranks, the cluster has {count} devices",
            f"dp={dp}, or leave dp out" if dp and not rest else "sizes whose product is that",
        )
    if layout.shard and layout.zero and layout.data_ranks % layout.shard:
        yield _fault(
            f"shard={layout.shard} does not divide the {layout.data_ranks} data ranks (dp * cp)",
            f"shard={_near(layout.data_ranks, layout.shard)}",
        )


def runs_precision(precision: str, device: Device) -> bool:
    """Whether the device has the number format of a precision (16 and 32 bits fall back on one another)."""
    return precision in ("fp32", "bf16") or _PEAKS.get(precision, precision) in device.peak_tflops


def _device(layout: Layout, cluster: Cluster) -> Iterator[UsageError]:
    try:
        cluster.device.peak(_PEAKS.get(layout.precision, layout.precision))
    except ClusterError as error:
        yield _fault(f"precision={layout.precision}: {error.what}", f"precision=bf16, or {error.hint}")
    if layout.offload != "none" and cluster.device.host_gbps is None:
        yield _fault(
            f"offload={layout.offload}, but how fast {cluster.device.name} reaches its host is not known",
            "offload=none, or a device file with host_gbps",
        )


def _tensor(layout: Layout, workload: Workload) -> Iterator[UsageError]:
    """Megatron-LM: heads, key-value groups and ffn widths divide by tp."""
    for layer, op in _products(workload):
        dim = op.ways or (op.n if op.split == "column" else op.k)
        if not op.experts and op.split in ("column", "row") and dim % layout.tp:
            what = f"{dim} heads" if dim in (workload.heads, workload.kv_heads) else str(dim)
            yield _fault(
                f"tp={layout.tp} does not divide the {what} of {layer.name}'s {op.name}",
                f"tp={_near(dim, layout.tp)}",
            )


def _context(layout: Layout, workload: Workload) -> Iterator[UsageError]:
    """Each rank takes one early and one late piece of the sequence, so that causal attention is balanced."""
    if layout.cp > 1 and workload.seq % (2 * layout.cp):
        yield _fault(
            f"cp={layout.cp} does not cut {workload.seq} tokens: every rank takes an early and a late piece of"
            f" {2 * layout.cp} equal ones",
            f"cp={_near(workload.seq // 2, layout.cp) if workload.seq % 2 == 0 else 1}",
        )


def _experts(layout: Layout, workload: Workload) -> Iterator[UsageError]:
    ep, etp, ranks = layout.ep, layout.etp, layout.dp * layout.cp * layout.tp
    if ep * etp > 1 and not workload.experts:
        yield _fault(f"ep={ep}, etp={etp}, but {workload.name} has no experts", "ep=1,etp=1")
        return
    if not workload.experts:
        return
    for layer, op in _products(workload):
        dim = op.n if op.split == "column" else op.k
        if op.experts and op.experts % ep:
            yield _fault(
                f"ep={ep} does not divide the {op.experts} experts of {layer.name}",
                f"ep={_near(op.experts, ep)}",
            )
        if op.experts and op.split in ("column", "row") and dim % etp:
            yield _fault(
                f"etp={etp} does not divide the {dim} of {layer.name}'s {op.name}", f"etp={_near(dim, etp)}"
            )
    if ranks % (ep * etp):
        yield _fault(
            f"ep * etp = {ep * etp} does not divide dp * cp * tp = {ranks}, out of which experts are cut",
            f"ep={_near(ranks, ep)}",
        )


def _stages(layout: Layout, workload: Workload) -> Iterator[UsageError]:
    pp, vpp, name, depth = layout.pp, layout.vpp, layout.schedule, workload.depth
    if pp > depth:
        yield _fault(f"pp={pp} stages, but {workload.name} has {depth} layers", f"pp of at most {depth}")
    if pp == 1 and vpp > 1:
        yield _fault(f"vpp={vpp} chunks, but with pp=1 there is no pipeline to interleave", "vpp=1")
        return
    if pp > 1 and name in _CHUNKS and vpp != _CHUNKS[name]:
        folds = ", which runs down the stages and back," if _CHUNKS[name] == 2 else ""
        yield _fault(
            f"schedule {name}{folds} has {_CHUNKS[name]} chunk{'s' * (_CHUNKS[name] > 1)} per rank, found vpp={vpp}",
            f"vpp={_CHUNKS[name]}" + (", or schedule=interleaved" if vpp > 1 else ""),
        )
    if pp > 1 and name == "interleaved" and vpp == 1:
        yield _fault("interleaved with vpp=1 has nothing to interleave", "schedule=1f1b, or vpp=2")
    if pp <= depth and pp > 1 and pp * vpp > depth + ENDS:
        yield _fault(
            f"pp * vpp = {pp * vpp} chunks for {depth} layers: only the first and the last may hold none",
            f"vpp of at most {(depth + ENDS) // pp}",
        )
    if (layout.recompute_layers or 0) > depth:
        yield _fault(
            f"recompute_layers={layout.recompute_layers}, but {workload.name} has {depth} layers",
            "to leave it out, which is all layers of a stage",
        )
    if layout.cuts and (sum(layout.cuts) != depth or min(layout.cuts) < 0):
        yield _fault(
            f"cuts give {sum(layout.cuts)} layers, {workload.name} has {depth}",
            f"{pp * vpp} numbers that sum to {depth}",
        )


def _batch(layout: Layout, batch: int) -> Iterator[UsageError]:
    ways = layout.dp * layout.mbs
    if batch % ways:
        per = batch // layout.dp
        yield _fault(
            f"a batch of {batch} does not divide by dp * mbs = {layout.dp} * {layout.mbs} = {ways}",
            f"a batch of {-(-batch // ways) * ways}"
            + (f", or mbs={_near(per, layout.mbs)}" if per and batch % layout.dp == 0 else ""),
        )
        return
    count, pp = batch // ways, layout.pp
    if pp == 1:
        return
    if layout.schedule == "interleaved" and count % pp:
        yield _fault(
            f"interleaved runs micro-batches in groups of pp = {pp}, which {count} (= {batch} / {ways}) is no multiple of",
            f"a batch that is a multiple of {ways * pp}, or schedule=1f1b,vpp=1",
        )
    least = {"dualpipev": 2 * pp, "zbv": pp, "zb-h1": pp}.get(layout.schedule, 1)
    if count < least:
        yield _fault(
            f"{layout.schedule} on {pp} stages needs {least} micro-batches or more, {batch} / {ways} are {count}",
            "schedule=1f1b,vpp=1, or a larger batch",
        )


def _products(workload: Workload) -> Iterator[tuple[Layer, Matmul]]:
    for layer in dict.fromkeys(layer for layer, _ in workload.layers):
        yield from ((layer, op) for op in layer.ops if isinstance(op, Matmul))


def _product(layout: Layout, *, without_dp: bool = False) -> str:
    names = ("tp", "cp", "pp") if without_dp else ("dp", "tp", "cp", "pp")
    return " * ".join(f"{name} {getattr(layout, name)}" for name in names)


def _near(number: int, wanted: int) -> str:
    """The divisors of a number next to what was wanted: `4 or 8`."""
    below = max((one for one in range(1, min(number, wanted) + 1) if number % one == 0), default=1)
    above = next((one for one in range(wanted + 1, min(number, 4 * wanted) + 1) if number % one == 0), None)
    return f"{below}" if above is None else f"{below} or {above}"


def _fault(what: str, hint: str) -> UsageError:
    return UsageError(what, where="layout", hint=hint)
