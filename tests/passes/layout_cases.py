"""Small random workloads, clusters and spaces of layouts, for the tests of the layout search."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from autopar.cluster import Cluster, load_cluster
from autopar.cost.software import Software, default_software
from autopar.passes.decisions import parse_decisions
from autopar.passes.layout_space import Space
from autopar.transformer_shape import TransformerShape
from autopar.workload import Workload

_FIX = (
    "tp=2", "tp<=2", "pp=2", "pp=1", "pp>=2", "zero=1", "zero=0|3", "recompute=none", "recompute=full", "schedule=zbv",
    "schedule=1f1b", "schedule=gpipe", "vpp=2", "cp=1", "cp=2", "mbs=1", "mbs=5", "dp>1", "ep=2", "sp=0", "sp=0|1",
    "recompute_layers=2", "recompute_layers<=1", "offload=none", "precision=fp8", "shard=2", "etp=1",
)  # fmt: skip
_FORBID = (
    "tp=2",
    "pp=1",
    "pp=2",
    "zero=0",
    "recompute=none",
    "schedule=interleaved",
    "cp>1",
    "mbs=1",
    "dp=1",
    "sp=1",
)


@st.composite
def workloads(draw: st.DrawFn, layers: int = 6) -> Workload:
    heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    experts = draw(st.sampled_from([0, 0, 4]))
    shape = TransformerShape(
        name="tiny",
        layers=draw(st.integers(1, layers)),
        hidden=heads * draw(st.sampled_from([16, 64, 256, 4096])),
        heads=heads,
        kv_heads=draw(st.sampled_from([ways for ways in range(1, heads + 1) if heads % ways == 0])),
        ffn=draw(st.sampled_from([96, 384, 1000])),
        vocab=draw(st.sampled_from([0, 101, 1024, 200000])),
        tied=draw(st.booleans()),
        dropout=draw(st.booleans()),
        bias=draw(st.booleans()),
        experts=experts,
        topk=draw(st.integers(1, 2)) if experts else 0,
        expert_ffn=draw(st.sampled_from([30, 128])) if experts else 0,
        shared_ffn=draw(st.sampled_from([0, 48])) if experts else 0,
        dense_layers=draw(st.integers(0, 2)) if experts else 0,
        moe_every=draw(st.integers(1, 2)) if experts else 1,
        mtp=draw(st.integers(0, 1)),
    )
    return shape.workload(draw(st.sampled_from([64, 250, 512, 2048])))


@st.composite
def clusters(draw: st.DrawFn, most: int = 16) -> Cluster:
    names = [
        "h100:1x1",
        "h100:1x2",
        "h100:1x3",
        "h100:1x4",
        "h100:1x6",
        "h100:1x8",
        "h100:2x2",
        "h100:2x4",
        "h100:3x2",
        "cpu:4",
    ]
    names += ["h100:2x8", "h100:4x4", "a100:2x6", "h800:4x3"] if most > 8 else []
    cluster = load_cluster(draw(st.sampled_from(names)))
    speed = st.sampled_from([0.02, 0.3, 1.0, 5.0])
    return cluster.with_(inter_bw=draw(speed), intra_bw=draw(speed), latency=draw(speed), flops=draw(speed))


@st.composite
def stacks(draw: st.DrawFn) -> Software:
    share = st.sampled_from([0.0, 0.3, 1.0])
    return default_software("h100").with_(
        pp_exposed=draw(share),
        tp_exposed=draw(share),
        contention=draw(share),
        dp_exposed=draw(share),
        step_share=draw(st.sampled_from([0.0, 0.05])),
        step_s=draw(st.sampled_from([0.0, 0.005])),
        selective_matmul=draw(share),
    )


@st.composite
def spaces(draw: st.DrawFn, most: int = 16, layers: int = 6) -> Space:
    cluster = draw(clusters(most))
    fix = draw(st.lists(st.sampled_from(_FIX), max_size=2, unique=True))
    forbid = draw(st.lists(st.sampled_from(_FORBID), max_size=1))
    precisions = ("fp32",) if cluster.device.name == "cpu" else ("bf16",)
    decisions = parse_decisions(fix, forbid)
    return Space(draw(workloads(layers)), cluster, draw(st.integers(1, 32)), decisions, precisions)


def unlimited(space: Space) -> Space:
    """The same space where every rank has all the memory there is."""
    device = replace(space.cluster.device, memory_bytes=2**60)
    return replace(space, cluster=replace(space.cluster, device=device))
