"""Memory of a layout: the published formulas fall out of it, and what must not grow does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster import load_cluster
from autopar.cost.grid import Grid
from autopar.cost.held import held, stage
from autopar.cost.kept import in_flight, saved_bytes, saved_of_run
from autopar.cost.layout_memory import KINDS, RANKS, layout_memory, timeline
from autopar.cost.software import Software
from autopar.layout import Layout
from autopar.transformer_shape import TransformerShape
from autopar.workload import Workload

MEGATRON = Software("megatron")
FSDP = Software("fsdp", weight_bytes=4.0, master=False)
GPT = TransformerShape(
    "gpt", layers=16, hidden=512, heads=8, ffn=2048, vocab=1024, gated=False, bias=True, norm="layer",
    dropout=True, rotary=False, unfused_attention=True,
)  # fmt: skip


def peak(
    workload: Workload, text: str, software: Software = MEGATRON, batch: int = 256, **how: Any
) -> dict[str, float]:
    grid = Grid.of([Layout.parse(text)])
    micro_batches = np.maximum(1.0, batch / (grid.dp * grid.mbs))
    found = layout_memory(workload, grid, held(workload, grid), software, micro_batches, **how)
    return {kind: float(size[0]) for kind, size in found.items()}


def total(
    workload: Workload, text: str, software: Software = MEGATRON, batch: int = 256, **how: Any
) -> float:
    return sum(peak(workload, text, software, batch, **how).values())


# --- activations: Korthikanti et al. 2022, table 2 ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "per_sbh"),
    [
        ("tp=1,mbs=4", lambda scores, t: 34 + scores),
        ("tp=4,mbs=4,sp=0", lambda scores, t: 10 + 24 / t + scores / t),
        ("tp=4,mbs=4,sp=1", lambda scores, t: (34 + scores) / t),
        ("tp=1,mbs=4,recompute=selective", lambda scores, t: 34),
        ("tp=4,mbs=4,sp=1,recompute=selective", lambda scores, t: 34 / t),
        ("tp=1,mbs=4,recompute=full", lambda scores, t: 2),
    ],
)
def test_bytes_of_a_gpt_layer(text: str, per_sbh: Any) -> None:
    seq, layout = 1024, Layout.parse(text)
    workload = GPT.workload(seq)

    kept = saved_of_run(workload.layers[0][0], workload, Grid.of([layout]), MEGATRON)

    scores = 5 * GPT.heads * seq / GPT.hidden
    assert kept[0] == pytest.approx(seq * layout.mbs * GPT.hidden * per_sbh(scores, layout.tp))


def test_experts_keep_their_rows_wherever_they_lie() -> None:
    """One token's rows for topk experts: input, gate and up, product, output; ep moves them and does not add any."""
    moe = TransformerShape(
        "moe", layers=2, hidden=512, heads=8, ffn=0, vocab=1024, experts=8, topk=2, expert_ffn=256
    )
    dense = TransformerShape("none", layers=2, hidden=512, heads=8, ffn=0, vocab=1024)
    tokens, grid = 2048, Grid.of([Layout(dp=8, ep=1), Layout(dp=8, ep=8)])

    def kept(shape: TransformerShape) -> Any:
        workload = shape.workload(tokens)
        return saved_bytes(workload.layers[0][0], workload, grid, MEGATRON)

    rows = tokens * 2 * (512 + 3 * 256 + 512) * 2
    router = tokens * 2 * 8 * 4
    assert kept(moe) - kept(dense) == pytest.approx(np.full(2, rows + router))


def test_eight_bit_products_keep_their_operands_in_eight_bits() -> None:
    workload = GPT.workload(1024)
    grid = Grid.of([Layout(precision="bf16"), Layout(precision="fp8")])

    wide, narrow = saved_bytes(workload.layers[0][0], workload, grid, MEGATRON)

    assert wide - narrow == 1024 * 512 * (1 + 1 + 1 + 4)  # two norms' outputs, attention's, the mlp's product


# --- parameters: Rajbhandari et al. 2020, section 3.1 and 5 ---------------------------------------------------------


@pytest.mark.parametrize(
    ("software", "zero", "per_parameter"),
    [
        (MEGATRON, 0, 18),
        (MEGATRON, 1, 6 + 12 / 8),
        (MEGATRON, 2, 2 + 16 / 8),
        (MEGATRON, 3, 18 / 8),
        (MEGATRON.with_(gradient_bytes=2.0), 0, 20),  # and fp32 copies of the gradients
        (FSDP, 3, 16 / 8),
    ],
)
def test_bytes_per_parameter(software: Software, zero: int, per_parameter: float) -> None:
    workload = GPT.workload(1024)

    found = peak(workload, f"dp=8,zero={zero}", software)

    stored = found["weights"] + found["gradients"] + found["optimizer"]
    assert stored == pytest.approx(per_parameter * workload.parameters)


def test_zero_3_gathers_two_units_and_one_gradient() -> None:
    workload = GPT.workload(1024)
    layer = workload.layers[0][0].dense_parameters

    assert peak(workload, "dp=8,zero=3")["buffers"] == pytest.approx((2 * 2 + 4) * layer)


def test_an_optimizer_with_large_temporaries_sets_the_peak() -> None:
    workload = GPT.workload(64)
    greedy = MEGATRON.with_(optimizer_bytes=64.0)

    assert peak(workload, "dp=1", greedy)["buffers"] == pytest.approx(64 * workload.parameters)


# --- stages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("tied", [False, True])
def test_stages_hold_the_model_once_but_for_a_tied_table(pp: int, tied: bool) -> None:
    workload = TransformerShape(
        "x",
        layers=16,
        hidden=512,
        heads=8,
        ffn=2048,
        vocab=1024,
        tied=tied,
        experts=4,
        topk=1,
        dense_layers=1,
    ).workload(128)
    grid = Grid.of([Layout(pp=pp)])
    first, middle, last = (stage(workload, grid, place) for place in ("first", "middle", "last"))

    ends = [first] if pp == 1 else [first, last]
    between = (pp - len(ends)) if pp > 1 else 0
    held_once = sum(s.dense + s.experts for s in ends) + between * (middle.dense + middle.experts)

    copy = workload.vocab * workload.hidden if tied and pp > 1 else 0
    assert held_once[0] == pytest.approx(workload.parameters + copy)


def test_what_does_not_divide_goes_to_the_middle() -> None:
    workload = TransformerShape("bloom", layers=70, hidden=64, heads=4, ffn=256, vocab=512).workload(128)
    grid = Grid.of([Layout(pp=12)])

    assert [int(stage(workload, grid, place).layers[0]) for place in ("first", "middle", "last")] == [5, 6, 5]


def test_the_last_stage_holds_the_logits() -> None:
    workload = replace(GPT, vocab=65536).workload(1024)

    logits = 4 * 1024 * 65536
    assert peak(workload, "pp=4,mbs=4", rank="last")["logits and loss"] == pytest.approx(logits * (2 + 4))
    assert peak(workload, "pp=4,mbs=4", rank="first")["logits and loss"] == 0


def test_a_schedule_that_folds_back_has_the_head_on_the_first_rank() -> None:
    grid = Grid.of([Layout(pp=4, schedule="zbv", vpp=2)])
    workload = GPT.workload(128)

    assert [float(stage(workload, grid, place).head[0]) for place in ("first", "last")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("pp=1", 1, 1),
        ("pp=4", 4, 1),
        ("pp=4,schedule=gpipe", 16, 16),
        ("pp=4,vpp=2", 4 + 3 / 2, (4 + 1) / 2),  # Korthikanti et al. 2022: L * (1 + (p - 1) / (p * v))
        ("pp=4,schedule=zb-h1", 4, 4),
    ],
)
def test_micro_batches_in_flight(text: str, first: float, last: float) -> None:
    grid = Grid.of([Layout.parse(text)])

    found = [float(in_flight(grid, np.array([16.0]), rank)[0]) for rank in (0 * grid.pp, grid.pp - 1)]

    assert found == [first, last]


# --- what must hold for any layout ----------------------------------------------------------------------------------

powers = st.sampled_from([1, 2, 4, 8])
WORKLOAD = GPT.workload(1024)


@settings(max_examples=40, deadline=None)
@given(
    dp=st.sampled_from([4, 8]), tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2, 4]), mbs=powers,
    zero=st.sampled_from([0, 1, 2]), sp=st.booleans(), recompute=st.sampled_from(["none", "selective", "full"]),
)  # fmt: skip
def test_more_splitting_never_takes_more(
    dp: int, tp: int, pp: int, mbs: int, zero: int, sp: bool, recompute: str
) -> None:
    layout = Layout(dp=dp, tp=tp, pp=pp, mbs=mbs, zero=zero, sp=sp, recompute=recompute)
    here = total(WORKLOAD, str(layout))

    for change in (
        {"tp": 2 * tp},
        {"pp": 2 * pp},
        {"zero": zero + 1},
        {"dp": 2 * dp},
        {"sp": True},
        {"cp": 2},
    ):
        assert total(WORKLOAD, str(layout.with_(**change))) <= here * (1 + 1e-9), change
    assert total(WORKLOAD, str(layout.with_(mbs=2 * mbs))) >= here


@settings(max_examples=20, deadline=None)
@given(tp=powers, pp=powers, mbs=powers, vpp=st.sampled_from([1, 2]))
def test_the_fullest_rank_is_no_less_than_the_ends_and_each_count_adds(
    tp: int, pp: int, mbs: int, vpp: int
) -> None:
    vpp = vpp if pp > 1 else 1
    text = f"tp={tp},pp={pp},mbs={mbs},vpp={vpp}"
    by_rank = {rank: total(WORKLOAD, text, rank=rank) for rank in RANKS}
    by_kind = [total(WORKLOAD, text, kind=kind, reserved_bytes=3e9) for kind in KINDS]

    assert by_rank["fullest"] >= max(by_rank["first"], by_rank["last"])
    assert by_kind == sorted(by_kind)


def test_layouts_side_by_side_are_priced_as_alone() -> None:
    texts = ["tp=2,dp=4,zero=1", "pp=4,vpp=2,mbs=2", "dp=8,zero=3,recompute=full", "pp=4,schedule=zbv,vpp=2"]
    grid = Grid.of([Layout.parse(text) for text in texts])
    micro_batches = np.maximum(1.0, 256 / (grid.dp * grid.mbs))

    together = layout_memory(WORKLOAD, grid, held(WORKLOAD, grid), MEGATRON, micro_batches)

    assert sum(together.values()) == pytest.approx([total(WORKLOAD, text) for text in texts])


@pytest.mark.parametrize("text", ["pp=1,mbs=2", "pp=4,mbs=2", "dp=8,zero=3,recompute=full"])
def test_the_peak_is_the_largest_moment_of_the_timeline(text: str) -> None:
    cluster = load_cluster("h100:8")
    moments = timeline(WORKLOAD, Layout.parse(text), cluster, MEGATRON, batch=256)

    assert [label for label, _ in moments] == [
        "stored",
        "first forward",
        "loss",
        "backward",
        "optimizer step",
    ]
    assert max(sum(kinds.values()) for _, kinds in moments) == pytest.approx(
        total(WORKLOAD, text, reserved_bytes=cluster.device.reserved_bytes)
    )


@pytest.mark.parametrize(("text", "layers_away"), [("pp=1", 16 - 2), ("pp=4", 4 * 4 - 4)])
def test_offloaded_activations_leave_what_is_at_work(text: str, layers_away: int) -> None:
    away = peak(WORKLOAD, f"{text},offload=activations", rank="first")["activations"]
    here = peak(WORKLOAD, text, rank="first")["activations"]

    one = saved_of_run(WORKLOAD.layers[0][0], WORKLOAD, Grid.of([Layout()]), MEGATRON)[0]
    assert here - away == pytest.approx(layers_away * one)


# --- measured -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "unfused", "measured_gb"),
    [
        ("dp=8,zero=1", False, 2.743),
        ("dp=8,zero=1", True, 4.7024),
        ("dp=2,tp=2,pp=2,sp=0", False, 1.4392),
        ("dp=4,pp=2", True, 3.633),
        ("dp=2,pp=4,vpp=3", True, 4.119),
        ("dp=2,tp=4,zero=1,sp=0", False, 1.059),
    ],
)
def test_peaks_of_megatron_lm_test_runs(text: str, unfused: bool, measured_gb: float) -> None:
    """max_memory_allocated of the last rank: NVIDIA/Megatron-LM tests/functional_tests, gpt3_mcore golden values."""
    layout = Layout.parse(text + ",mbs=4")
    shape = TransformerShape(
        "gpt3_mcore", layers=12, hidden=512, heads=8, ffn=2048, vocab=-(-50257 // (128 * layout.tp)) * 128 * layout.tp,
        gated=False, bias=True, tied=True, norm="layer", dropout=True, rotary=False, positions=1024,
        unfused_attention=unfused,
    )  # fmt: skip

    predicted = total(shape.workload(1024), str(layout), batch=32, rank="last", kind="allocated")

    assert predicted / 1e9 == pytest.approx(measured_gb, rel=0.05)
