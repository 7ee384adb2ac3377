"""Whatever the model and the cluster, a layout that is found is sound, or an AutoparError says what and what to try."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import stacks

from autopar.cluster import Cluster, load_cluster
from autopar.cost.software import Software
from autopar.errors import AutoparError
from autopar.layout import Layout
from autopar.passes.decisions import parse_decisions
from autopar.passes.layout_search import Found, search_layouts
from autopar.passes.layout_space import Space
from autopar.transformer_shape import TransformerShape
from autopar.workload import Attention, Matmul, Workload

_SECONDS = 5.0
_WORDS = ("tp=2", "tp=7", "pp=2", "pp=4", "pp>=3", "vpp=2", "schedule=dualpipev", "zero=3", "ep=4", "mbs=7", "cp=4",
          "recompute=full", "recompute_layers=1", "offload=all", "shard=3", "dp=1", "etp=2", "sp=0")  # fmt: skip


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    heads = draw(st.sampled_from([1, 3, 7, 8, 13, 16, 31]))
    experts = draw(st.sampled_from([0, 0, 6, 7, 16]))
    shape = TransformerShape(
        name="odd",
        layers=draw(st.sampled_from([1, 2, 3, 7, 12, 61])),
        hidden=heads * draw(st.sampled_from([8, 64, 512])),
        heads=heads,
        kv_heads=draw(st.sampled_from([1, heads])),
        ffn=draw(st.sampled_from([97, 1000, 8192])),
        vocab=draw(st.sampled_from([0, 1, 101, 50257])),
        experts=experts,
        topk=min(experts, draw(st.integers(1, 6))),
        expert_ffn=draw(st.sampled_from([33, 256])) if experts else 0,
        dense_layers=draw(st.sampled_from([0, 1, 100])) if experts else 0,
        scan_layers=draw(st.sampled_from([0, 0, 1])),
        scan_state=16,
        scan_heads=heads,
        scan_head_dim=16,
        scan_groups=1,
    )
    return shape.workload(draw(st.sampled_from([1, 2, 63, 128, 1000, 8192])))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    cluster = load_cluster(draw(st.sampled_from(
        ["h100:1x1", "h100:3x2", "h100:2x6", "h100:3x8", "h100:12x8", "h100:7x1", "h100:5x3", "cpu:6", "cpu:1", "b200:2x8", "a100:16x8"]
    )))  # fmt: skip
    if cluster.nodes > 2 and draw(st.booleans()):
        cluster = replace(cluster, dead=(0, cluster.nodes - 1))
    return cluster


def sound(space: Space, found: Found) -> None:
    """Every rule that a runtime would stumble over."""
    layout, w, world, batch = found.best.layout, space.workload, space.cluster.device_count, space.batch
    assert layout.dp * layout.tp * layout.cp * layout.pp == world
    assert batch % (layout.dp * layout.mbs) == 0
    assert found.best.micro_batches == batch // (layout.dp * layout.mbs)
    for layer, _ in w.layers:
        for op in layer.ops:
            if isinstance(op, Attention):
                assert op.heads % layout.tp == 0
                assert op.kv_heads % layout.tp == 0 or layout.tp % op.kv_heads == 0
            elif isinstance(op, Matmul) and op.split in ("column", "row"):
                size = op.n if op.split == "column" else op.k
                assert size % (layout.etp if op.experts else layout.tp) == 0
        assert not layer.experts or layer.experts % layout.ep == 0
    assert (layout.dp * layout.cp * layout.tp) % (layout.ep * layout.etp) == 0
    assert layout.cp == 1 or w.seq % (2 * layout.cp) == 0
    assert not layout.sp or w.seq % (layout.cp * layout.tp) == 0
    assert layout.pp * layout.vpp <= w.depth
    assert layout.pp > 1 or layout.vpp == 1
    if layout.cuts:
        assert len(layout.cuts) == layout.pp * layout.vpp
        assert min(layout.cuts) >= 0
        assert sum(layout.cuts) == w.depth
    assert not layout.shard or (layout.data_ranks % layout.shard == 0 and layout.zero)
    assert layout.recompute_layers is None or 0 < layout.recompute_layers < -(-w.depth // layout.pp)
    assert found.best.memory_total <= found.limit_bytes
    assert 0 < found.bound_s <= found.best.step_s
    assert found.gap >= 0
    assert Layout.parse(str(layout)) == layout
    assert all(other.layout.world == world for other in found.alternatives)


@settings(max_examples=60)
@given(
    workloads(),
    clusters(),
    stacks(),
    st.sampled_from([1, 2, 5, 24, 96, 768]),
    st.lists(st.sampled_from(_WORDS), max_size=2, unique=True),
    st.sampled_from(_WORDS),
    st.sampled_from(["time", "time", "memory"]),
)
def test_sound_or_an_error_that_teaches(
    workload: Workload,
    cluster: Cluster,
    software: Software,
    batch: int,
    fix: list[str],
    forbid: str,
    objective: str,
) -> None:
    precisions = ("fp32",) if cluster.device.name == "cpu" else ("bf16",)
    space = Space(workload, cluster, batch, parse_decisions(fix, [forbid]), precisions)
    start = time.process_time()
    error = None
    try:
        sound(space, search_layouts(space, software, objective=objective))
    except AutoparError as refused:
        error = refused
    assert time.process_time() - start < _SECONDS
    assert error is None or (error.what and error.hint)


def test_alone_on_one_device() -> None:
    """One layer, one sequence, one device: there is one thing to do."""
    workload = TransformerShape(name="one", layers=1, hidden=64, heads=1, ffn=64, vocab=0).workload(1)
    layout = search_layouts(
        Space(workload, load_cluster("cpu:1"), 1, precisions=("fp32",)), Software("plain")
    ).best.layout
    assert (layout.world, layout.mbs, layout.recompute) == (1, 1, "none")


def test_more_stages_than_layers_is_refused() -> None:
    workload = TransformerShape(name="short", layers=2, hidden=64, heads=2, ffn=64, vocab=8).workload(128)
    space = Space(workload, load_cluster("h100:1x8"), 8, parse_decisions(["pp=4"]))
    with pytest.raises(AutoparError, match="divides"):
        search_layouts(space, Software("plain"))
