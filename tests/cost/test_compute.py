"""Ops: the roofline by hand, which ops fuse, and the flops of a model."""

from __future__ import annotations

import pytest
from hand_problems import layer_problem

from autopar.cluster import load_device
from autopar.cost.compute import Roofline, Work, fused_values, kind_of, matmul_side, model_flops, works

H100 = load_device("h100")
LINE = Roofline.of(H100, "bf16")
MATMUL = Work("matmul", (True, True), (True, True), (True,), False)


def test_a_large_matmul_runs_at_its_efficiency_of_the_peak() -> None:
    flops, side = 2 * 8192.0**3, 8192.0
    forward, _ = LINE.op_s(MATMUL, flops, side, [2 * 8192.0**2] * 2, [2 * 8192.0**2])

    assert flops / forward == pytest.approx(989.5e12 * H100.efficiency["matmul"], rel=0.01)


def test_backward_of_a_matmul_is_one_product_per_gradient() -> None:
    forward, backward = LINE.op_s(MATMUL, 1e12, 4096, [1e6, 1e6], [1e6])
    _, one = LINE.op_s(
        Work("matmul", (True, False), (True, True), (True,), False), 1e12, 4096, [1e6, 1e6], [1e6]
    )

    assert (backward, one) == pytest.approx((2 * forward, forward))


def test_a_thin_matmul_is_bound_by_memory() -> None:
    moved = 2 * 8192.0**2
    forward, _ = LINE.op_s(MATMUL, 2 * 8192.0**2, 400, [moved, 0], [0])

    assert forward == pytest.approx(H100.launch_s + moved / (3350e9 * H100.efficiency["memory"]))


def test_a_view_is_free() -> None:
    assert LINE.op_s(Work("free", (True,), (True,), (True,), False), 0, 1, [1e9], [1e9]) == (0, 0)


def test_kinds_of_a_layer() -> None:
    kinds = {op.name.split("/")[1]: kind_of(op) for op in layer_problem().ops}

    assert [kinds[name] for name in ("q", "attention", "embed", "loss", "qh", "s")] == [
        "matmul", "attention", "embedding", "cross_entropy", "free", "pointwise",
    ]  # fmt: skip


def test_silu_of_the_gate_never_reaches_memory_when_fused() -> None:
    problem = layer_problem()

    assert "layer/s" in fused_values(problem)
    assert not works(problem, True)["layer/s"].writes[0]
    assert works(problem, False)["layer/s"].writes[0]


def test_what_a_matmul_takes_is_in_memory() -> None:
    assert not fused_values(layer_problem()) & {"layer/a", "layer/normed", "layer/q", "layer/out"}


def test_side_leaves_batch_dims_out() -> None:
    problem = layer_problem()
    op = next(op for op in problem.ops if op.name == "layer/q")
    assert op.rule is not None

    assert matmul_side(op, op.rule.sizes) == pytest.approx((4 * 512 * 1024 * 1024) ** (1 / 3))


def test_flops_are_twice_the_parameters_per_token() -> None:
    problem = layer_problem(batch=1, seq=1, hidden=1024, ffn=4096, times=4)
    weights = 4 * (1024 * 1024 * 2 + 2 * 128 * 1024 + 3 * 4096 * 1024) + 32000 * 1024

    assert model_flops(problem) == pytest.approx(2 * weights, rel=1e-3)
