"""`autopar estimate`: pages and numbers of one layout, and errors for layouts that cannot run."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.cluster import load_cluster
from autopar.errors import UsageError
from autopar.layout import Layout
from autopar.layout_check import check, faults, filled
from autopar.layout_page import differences, runs, wrapped
from autopar.passes.layout_space import Space
from autopar.pricing_page import Pricing, crossings, price_layout, seconds_of
from autopar.transformer_shape import TransformerShape

LLAMA = TransformerShape(
    name="llama-3.1-405b", layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256
).workload(8192)
MOE = TransformerShape(
    name="moe", layers=24, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=32000, experts=8, topk=2,
    expert_ffn=1024,
).workload(4096)  # fmt: skip
H100S = load_cluster("h100:2048x8")
BASE = "tp=8,pp=16,vpp=8,cp=1,dp=128,zero=1,mbs=1,recompute=none,precision=bf16"


@pytest.fixture(scope="module")
def pricing() -> Pricing:
    return price_layout(LLAMA, H100S, Layout.parse(BASE), 2048, measured_s=6.72)


def test_kinds_of_time_sum_to_the_step(pricing: Pricing) -> None:
    assert sum(pricing.priced.time_s.values()) == pytest.approx(pricing.step_s)


def test_rates_agree_with_the_step_time(pricing: Pricing) -> None:
    tokens = 2048 * 8192

    assert pricing.tokens_per_s * pricing.step_s == pytest.approx(tokens)
    assert pricing.mfu * pricing.step_s * 16384 * pricing.peak_flops == pytest.approx(
        LLAMA.flops_per_token() * tokens
    )


def test_the_fullest_rank_is_no_emptier_than_the_first_and_the_last(pricing: Pricing) -> None:
    peak = {rank: max(sum(held.values()) for _, held in line) for rank, line in pricing.moments.items()}

    assert peak["fullest"] >= max(peak["first"], peak["last"])


def test_memory_of_the_page_is_the_peak_of_its_moments(pricing: Pricing) -> None:
    peak = max(sum(held.values()) for _, held in pricing.moments["fullest"])

    assert peak == pytest.approx(pricing.priced.memory_total)


def test_all_layers_are_on_some_stage(pricing: Pricing) -> None:
    assert sum(pricing.stage_layers) == 126
    assert sum(pricing.priced.stages.layers) == 126


def test_the_page_shows_every_kind_of_time_and_is_narrow(pricing: Pricing) -> None:
    page = pricing.page()

    assert all(kind in page for kind, seconds in pricing.priced.time_s.items() if seconds > 0)
    assert max(map(len, page.splitlines())) <= 100
    assert "..." not in page


def test_the_page_compares_with_what_was_measured(pricing: Pricing) -> None:
    error = pricing.step_s / 6.72 - 1

    assert f"the prediction is {100 * abs(error):.1f} %" in pricing.page()


def test_json_holds_the_numbers_of_the_page(pricing: Pricing) -> None:
    data = json.loads(json.dumps(pricing.to_dict()))

    assert data["step_time_s"] == pricing.step_s
    assert Layout.parse(data["layout"]) == pricing.layout


def test_axes_cross_the_links_that_their_strides_reach() -> None:
    layout = Layout.parse("tp=4,cp=4,dp=64,pp=16,zero=1,ep=1")

    links = {one.axis: (one.size, one.stride, one.link) for one in crossings(layout, H100S)}

    assert links == {
        "tp": (4, 1, "nvlink"),
        "cp": (4, 4, "infiniband"),
        "dp": (64, 16, "infiniband"),
        "pp": (16, 1024, "infiniband"),
        "zero": (256, 4, "infiniband"),
    }


def test_dp_left_out_is_what_the_cluster_leaves() -> None:
    assert filled("tp=8,pp=16", H100S) == Layout(tp=8, pp=16, dp=128)


@pytest.mark.parametrize(
    ("workload", "batch", "text", "what", "hint"),
    [
        (LLAMA, 2048, "tp=8,pp=16,dp=64", "= 8192 ranks, the cluster has 16384 devices", "dp=128"),
        (LLAMA, 2048, "tp=3", "does not divide the cluster's 16384 devices", "product"),
        (LLAMA, 2048, "tp=256", "tp=256 does not divide the 128 heads", "tp=128"),
        (LLAMA, 2048, "pp=128", "pp=128 stages, but llama-3.1-405b has 126 layers", "at most 126"),
        (LLAMA, 2048, "pp=16,vpp=9", "pp * vpp = 144 chunks for 126 layers", "vpp of at most 8"),
        (LLAMA, 2048, "pp=1,vpp=2,tp=8", "with pp=1 there is no pipeline", "vpp=1"),
        (LLAMA, 2048, "pp=16,tp=8,vpp=3,schedule=zbv", "has 2 chunks per rank, found vpp=3", "vpp=2"),
        (LLAMA, 2048, "pp=16,tp=8,vpp=3,schedule=1f1b", "has 1 chunk per rank, found vpp=3", "interleaved"),
        (LLAMA, 2048, "pp=16,tp=8,schedule=interleaved", "nothing to interleave", "1f1b"),
        (LLAMA, 1024, "pp=16,vpp=2,tp=8", "in groups of pp = 16, which 8", "2048"),
        (LLAMA, 1024, "pp=16,vpp=2,tp=8,schedule=zbv", "needs 16 micro-batches or more", "1f1b"),
        (LLAMA, 2048, "tp=8,pp=16,mbs=3", "does not divide by dp * mbs = 128 * 3", "mbs=2 or 4"),
        (LLAMA, 100, "tp=8,pp=16", "a batch of 100 does not divide", "a batch of 128"),
        (LLAMA.at(8200), 2048, "tp=8,cp=16", "cp=16 does not cut 8200 tokens", "cp=10 or 20"),
        (LLAMA, 2048, "tp=8,pp=16,ep=8", "has no experts", "ep=1"),
        (MOE, 2048, "pp=8,ep=16", "ep=16 does not divide the 8 experts", "ep=8"),
        (MOE, 2048, "tp=8,pp=8,etp=2048", "etp=2048 does not divide the", "etp=1024"),
        (LLAMA, 2048, "tp=8,pp=16,zero=1,shard=96", "shard=96 does not divide the 128 data ranks", "shard=64"),
        (LLAMA, 2048, "tp=8,pp=2,cuts=60/60", "cuts give 120 layers", "126"),
    ],
)  # fmt: skip
def test_a_layout_that_cannot_run_says_why_and_what_to_try(
    workload: object, batch: int, text: str, what: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        check(filled(text, H100S), workload, H100S, batch)  # type: ignore[arg-type]

    assert what in caught.value.what
    assert hint in (caught.value.hint or "")


def test_experts_are_cut_out_of_the_other_axes() -> None:
    cluster = load_cluster("h100:3x8")

    found = [fault.what for fault in faults(Layout(dp=2, pp=12, ep=8), MOE, cluster, 24)]

    assert found == ["ep * etp = 8 does not divide dp * cp * tp = 2, out of which experts are cut"]


def test_a_precision_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(UsageError, match="a100 has no peak"):
        check(Layout.parse("tp=8,precision=fp8"), LLAMA, load_cluster("a100:1x8"), 8)


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    heads = draw(st.sampled_from([4, 6, 12, 16, 32]))
    experts = draw(st.sampled_from([0, 0, 6, 8, 64]))
    shape = TransformerShape(
        name="random", layers=draw(st.integers(1, 30)), hidden=heads * 64, heads=heads,
        kv_heads=draw(st.sampled_from([0, 2])), ffn=draw(st.sampled_from([384, 1000, 4096])), vocab=1000,
        experts=experts, topk=min(2, experts), expert_ffn=draw(st.sampled_from([96, 250, 512])) if experts else 0,
        dense_layers=draw(st.integers(0, 1)),
    )  # fmt: skip
    cluster = load_cluster(f"h100:{draw(st.integers(1, 6))}x{draw(st.sampled_from([1, 4, 8]))}")
    seq = draw(st.sampled_from([128, 1000, 1024, 8192]))
    return Space(shape.workload(seq), cluster, draw(st.integers(1, 96)), precisions=("bf16", "fp8"))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(spaces(), st.integers(0, 2**32 - 1))
def test_every_layout_of_a_space_can_run(space: Space, seed: int) -> None:
    cores = space.cores()
    if not len(cores):
        return
    chosen = np.random.default_rng(seed)
    rows = space.expand(cores.take(chosen.permutation(len(cores))[:50]))

    for row in chosen.permutation(len(rows))[:200]:
        check(rows.layout(int(row)), space.workload, space.cluster, space.batch)


def test_a_measured_time_is_read_in_seconds() -> None:
    assert [seconds_of(text) for text in ("7.1s", "250ms", "7.1")] == [7.1, 0.25, 7.1]


@pytest.mark.parametrize("text", ["", "fast", "-1s", "0", "1.2.3s", "7.1h"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no time"):
        seconds_of(text)


def test_equal_neighbours_are_written_once() -> None:
    assert runs([8] * 14 + [7, 7]) == "8 x 14, 7 x 2"


def test_only_differences_are_written() -> None:
    one = Layout.parse("dp=4,tp=2,cp=16,pp=4,zero=1")

    assert differences(one, one.with_(dp=2, tp=4, sp=False)) == "tp 2->4, sp 1->0"


def test_a_wrapped_layout_still_parses() -> None:
    layout = Layout.parse("dp=64,tp=2,cp=2,pp=16,vpp=4,ep=8,etp=2,zero=1,shard=8,mbs=2,recompute=selective,"
                          "precision=fp8,offload=optimizer")  # fmt: skip

    lines = list(wrapped("layout", str(layout), width=60))

    assert max(map(len, lines)) <= 60
    assert Layout.parse("".join(line[10:] for line in lines)) == layout
