"""Memory: bytes per parameter, and what is kept against what torch keeps."""

from __future__ import annotations

import pytest
from hand_problems import layer_problem, parse_problem

from autopar.cost.memory import Activations, activations, static_bytes
from autopar.mesh import Mesh
from autopar.passes.pricing import Pricer
from autopar.problem import Problem
from autopar.program import ITEM_BYTES
from autopar.sharding import Sharding

ONE = Mesh.parse("tp=1")


def kept(
    problem: Problem,
    mesh: Mesh = ONE,
    fused: bool = False,
    choices: dict[str, dict[str, str | None]] | None = None,
) -> Activations:
    whole = {name: Sharding.whole(len(value.info.shape)) for name, value in problem.values.items()}
    return activations(
        problem, mesh, choices or {op.name: {} for op in problem.ops}, whole, ITEM_BYTES, fused
    )


@pytest.mark.parametrize(
    ("precision", "fsdp", "per_element"), [("fp32", 1, 16), ("bf16", 1, 18), ("fp32", 8, 2), ("bf16", 8, 2)]
)
def test_bytes_per_parameter(precision: str, fsdp: int, per_element: int) -> None:
    kinds = static_bytes(1e9, 0.0, 1e7, precision, fsdp)

    assert kinds["weights"] + kinds["gradients"] + kinds["optimizer"] == pytest.approx(per_element * 1e9)


def test_fsdp_gathers_two_calls_and_one_gradient() -> None:
    assert static_bytes(1e9, 0.0, 1e7, "bf16", 8)["gather and reduce buffers"] == pytest.approx(
        (2 * 2 + 4) * 1e7
    )


def test_each_value_is_kept_once() -> None:
    """q, k and v take one tensor."""
    problem = layer_problem(batch=1, seq=8, hidden=64, ffn=128, heads=4, times=3)
    x, kv, ffn = 8 * 64 * 2, 8 * 32 * 2, 8 * 128 * 2

    # norm inputs and outputs, q, attention's result; k, v; gate, silu, up, product
    assert kept(problem).kept["layer"] == 3 * (6 * x + 2 * kv + 4 * ffn)


def test_fusion_makes_the_activation_again() -> None:
    problem = layer_problem(batch=1, seq=8, hidden=64, ffn=128, heads=4, times=3)

    assert kept(problem).kept["layer"] - kept(problem, fused=True).kept["layer"] == 3 * 8 * 128 * 2


def test_recompute_keeps_only_what_enters() -> None:
    problem = layer_problem(batch=1, seq=8, hidden=64, ffn=128, heads=4, times=3)
    found = kept(problem)

    assert found.peak(["layer"]) == found.kept["in"] + found.kept["out"] + 3 * 8 * 64 * 2 + found.one["layer"]


def test_splits_divide_what_is_kept() -> None:
    problem = parse_problem(
        """
        value a/x: float32[64, 64] gradient
        value a/y: float32[64, 64] gradient
        op a/y = aten.silu(a/x) -> a/y x1: b c -> b c
        """,
        outputs=["a/y"],
        batch=64,
    )
    mesh = Mesh.parse("tp=4")

    assert kept(problem, mesh, choices={"a/y": {"tp": "b"}}).kept["a"] == 64 * 64 * 4 / 4


def test_views_and_additions_keep_nothing() -> None:
    problem = parse_problem(
        """
        value a/x: float32[64, 64] gradient
        value a/y: float32[64, 64] gradient
        value a/z: float32[4096] gradient
        op a/y = aten.add(a/x, a/x) -> a/y x1: b c, b c -> b c
        op a/z = aten.view(a/y) -> a/z x1: b c -> (b c) options free=True
        """,
        outputs=["a/z"],
        batch=64,
    )

    assert kept(problem).kept["a"] == 0


def test_torch_keeps_the_same_for_an_mlp() -> None:
    """The bytes autograd saves of a gated MLP, parameters aside."""
    torch = pytest.importorskip("torch")
    x = torch.randn(8, 64, requires_grad=True)
    weights = [
        torch.randn(128, 64, requires_grad=True),
        torch.randn(128, 64, requires_grad=True),
        torch.randn(64, 128, requires_grad=True),
    ]
    saved: dict[int, int] = {}

    def pack(tensor):  # type: ignore[no-untyped-def]
        if all(
            tensor.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr() for weight in weights
        ):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    held = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held.append(torch.nn.functional.linear(x, weights[0]))
        held.append(torch.nn.functional.silu(held[0]))
        held.append(torch.nn.functional.linear(x, weights[1]))
        held.append(held[1] * held[2])
        held.append(torch.nn.functional.linear(held[3], weights[2]))
    linear = "options sums=((0,), (1,)), flops_per_point=2.0"
    problem = parse_problem(
        f"""
        value a/x: float32[8, 64] gradient
        value a/w: float32[128, 64] state gradient
        value a/u: float32[128, 64] state gradient
        value a/d: float32[64, 128] state gradient
        value a/g: float32[8, 128] gradient
        value a/s: float32[8, 128] gradient
        value a/h: float32[8, 128] gradient
        value a/m: float32[8, 128] gradient
        value a/y: float32[8, 64] gradient
        op a/g = aten.linear(a/x, a/w) -> a/g x1: b k, n k -> b n {linear}
        op a/s = aten.silu(a/g) -> a/s x1: b n -> b n
        op a/h = aten.linear(a/x, a/u) -> a/h x1: b k, n k -> b n {linear}
        op a/m = aten.mul(a/s, a/h) -> a/m x1: b n, b n -> b n
        op a/y = aten.linear(a/m, a/d) -> a/y x1: b k, n k -> b n {linear}
        """,
        outputs=["a/y"],
        batch=8,
    )

    assert kept(problem).kept["a"] == sum(saved.values())


def test_pricer_and_memory_agree_on_bytes() -> None:
    from autopar.cluster import load_cluster
    from autopar.cost.prices import Prices

    problem = layer_problem()
    prices = Prices.of(load_cluster("h100:1"), ONE, "bf16", problem)

    assert Pricer(problem, ONE, prices).bytes["layer/x"] == 4 * 512 * 1024 * 2
