"""Memory: bytes per parameter, and what is kept against what torch keeps."""

from __future__ import annotations

import pytest
from hand_problems import layer_problem, parse_problem

from autopar.cost import memory
from autopar.cost.lifetimes import Call, Parameters, calls
from autopar.cost.memory import Run, Stored, fullest
from autopar.mesh import Mesh
from autopar.passes.pricing import Pricer
from autopar.problem import Problem
from autopar.program import ITEM_BYTES
from autopar.sharding import Sharding

ONE = Mesh.parse("tp=1")
NOTHING = Call(0.0, 0.0, {}, {}, {}, {}, {}, 0.0, 0.0)


def of_blocks(
    problem: Problem,
    mesh: Mesh = ONE,
    fused: bool = False,
    choices: dict[str, dict[str, str | None]] | None = None,
    parameters: Parameters = Parameters(),  # noqa: B008
) -> dict[str, Call]:
    whole = {name: Sharding.whole(len(value.info.shape)) for name, value in problem.values.items()}
    return calls(
        problem, mesh, choices or {op.name: {} for op in problem.ops}, whole, ITEM_BYTES, fused, parameters
    )


def step(runs: list[Run], elements: float = 0.0, *, fsdp: int = 1, added: bool = False) -> dict[str, float]:
    stored = Stored(elements, 0.0, 0.0, 0.0, 0.0)
    return fullest(runs, stored, fsdp=fsdp, added=added, copy_bytes=4, overlap=False)


@pytest.mark.parametrize(("fsdp", "per_element"), [(1, 16), (8, 2)])
def test_bytes_per_parameter(fsdp: int, per_element: int) -> None:
    kinds = step([Run(NOTHING, 1, False)], 1e9, fsdp=fsdp)

    assert sum(kinds[kind] for kind in memory.STORED) == pytest.approx(per_element * 1e9)


def test_overlapping_fsdp_gathers_two_calls_and_one_gradient() -> None:
    stored = Stored(1e9, 1e6, 1e7, 0.0, 0.0)

    assert memory.in_flight_bytes(stored, 8, 2) == pytest.approx((2 * 2 + 4) * 1e7)


def test_gradients_grow_while_what_was_kept_shrinks() -> None:
    """4 calls keep 10 and make gradients of 1: with one micro-batch the fullest moment has no gradient yet."""
    call = Call(10.0, 0.0, {}, {"activations": 10.0}, {}, {"activations": 10.0}, {}, 0.0, 1.0)

    assert step([Run(call, 4, False)], 1.0)["gradients"] == 0
    assert step([Run(call, 4, False)], 1.0, added=True)["gradients"] == 4


def test_each_value_is_kept_once() -> None:
    """q, k and v take one tensor."""
    problem = layer_problem(batch=1, seq=8, hidden=64, ffn=128, heads=4, times=3)
    x, kv, ffn = 8 * 64 * 2, 8 * 32 * 2, 8 * 128 * 2

    # norm inputs and outputs, q, attention's result; k, v; gate, silu, up, product
    layer = of_blocks(problem)["layer"]
    assert layer.kept - layer.copies == 6 * x + 2 * kv + 4 * ffn


def test_fusion_makes_the_activation_again() -> None:
    problem = layer_problem(batch=1, seq=8, hidden=64, ffn=128, heads=4, times=3)

    assert of_blocks(problem)["layer"].kept - of_blocks(problem, fused=True)["layer"].kept == 8 * 128 * 2


def test_recompute_keeps_only_what_enters() -> None:
    problem = layer_problem(batch=1, seq=8, hidden=64, ffn=128, heads=4, times=3)
    layer = of_blocks(problem)["layer"]
    kinds = step([Run(layer, 3, True)])

    assert layer.entering == 8 * 64 * 2
    assert sum(kinds.values()) == 2 * layer.entering + sum(layer.again.values())


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

    assert of_blocks(problem, mesh, choices={"a/y": {"tp": "b"}})["a"].kept == 64 * 64 * 4 / 4


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

    assert of_blocks(problem)["a"].kept == 0


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

    assert of_blocks(problem)["a"].kept == sum(saved.values())


def test_pricer_and_memory_agree_on_bytes() -> None:
    from autopar.cluster import load_cluster
    from autopar.cost.prices import Prices

    problem = layer_problem()
    prices = Prices.of(load_cluster("h100:1"), ONE, "bf16", problem)

    assert Pricer(problem, ONE, prices).bytes["layer/x"] == 4 * 512 * 1024 * 2
