"""Search: the whole way from a small transformer to a Plan, on clusters where the answer can be told, and its refusals."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from autopar.cluster import Cluster, load_cluster
from autopar.cost.step import FSDP
from autopar.errors import ConstraintError, InfeasibleError, UsageError
from autopar.mesh import Mesh
from autopar.passes.combinations import divisors, meshes, splits
from autopar.passes.search import search
from autopar.plans import Plan, fingerprint
from autopar.problem import Problem
from autopar.program import Program


@pytest.fixture(scope="module")
def captured() -> tuple[Program, Problem]:
    """Four transformer layers, hidden 256, captured at batch 2 and sequence 64."""
    return capture_transformer(batch=2, seq=64)


def capture_transformer(batch: int, seq: int) -> tuple[Program, Problem]:
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

    from autopar.passes.axes import name_axes
    from autopar.passes.capture import capture
    from autopar.passes.problem import build_problem

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(256), nn.RMSNorm(256)
            self.q, self.k, self.v, self.o = (nn.Linear(256, 256, bias=False) for _ in range(4))
            self.up, self.down = nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            normed = self.norm1(x)
            q, k, v = (f(normed).unflatten(-1, (8, 32)).transpose(1, 2) for f in (self.q, self.k, self.v))
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.o(mixed.transpose(1, 2).flatten(2))
            return x + self.down(functional.silu(self.up(self.norm2(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(1024, 256), nn.Linear(256, 1024, bias=False)
            self.layers = nn.ModuleList(Layer() for _ in range(4))

        def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            return {"loss": functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}

    with torch.device("meta"):
        model = Model()
        ids = torch.zeros(batch, seq, dtype=torch.int64)
    program, axes = name_axes(capture(model, {"ids": ids, "labels": ids}))
    return program, build_problem(program, axes)


def plan(captured: tuple[Program, Problem], cluster: str | Cluster, **options: Any) -> Plan:
    program, problem = captured
    return search(
        program, problem, load_cluster(cluster), **{"batch": 16, "seq": 64, "precision": "fp32", **options}
    )


def shrunk(cluster: Cluster, memory_bytes: int) -> Cluster:
    return replace(cluster, device=replace(cluster.device, memory_bytes=memory_bytes, reserved_bytes=0))


def test_one_device_splits_nothing(captured: tuple[Program, Problem]) -> None:
    found = plan(captured, "h100:1")

    assert (found.mesh, found.zero, found.axes) == ("dp=1,fsdp=1,tp=1", 0, {})


def test_large_batch_of_a_small_model_splits_nothing_but_the_batch(captured: tuple[Program, Problem]) -> None:
    found = plan(captured, "h100:2", batch=4096)

    assert found.parsed_mesh.sizes["tp"] == 1
    assert list(found.axes) == ["batch"]


@pytest.mark.parametrize("cluster", ["cpu:3", "cpu:6", "h100:2x4"])
def test_any_device_count_gives_a_valid_plan(captured: tuple[Program, Problem], cluster: str) -> None:
    found = plan(captured, cluster, batch=24)

    assert Plan.from_json(found.to_json()) == found
    assert found.parsed_mesh.device_count == load_cluster(cluster).device_count


@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=4,tp=2", "dp=2,fsdp=2,tp=2", "tp=4,dp=2"])
def test_forced_mesh_is_used(captured: tuple[Program, Problem], mesh: str) -> None:
    forced = Mesh.parse(mesh)
    found = plan(captured, f"h100:{forced.device_count}", mesh=forced)

    assert {axis: size for axis, size in found.parsed_mesh.axes if size > 1} == forced.sizes


def test_winner_is_the_cheapest_of_all_forced_combinations(captured: tuple[Program, Problem]) -> None:
    """The best-first search against pricing every combination by itself."""
    cluster = shrunk(load_cluster("cpu:4"), 120 * 2**20)
    free = plan(captured, cluster)
    forced = []
    for mesh, count, again in itertools.product(meshes(4, None), divisors(16), ("none", "full")):
        try:
            forced.append(
                plan(captured, cluster, mesh=mesh, micro_batches=count, recompute=again).predicted.step_time_s
            )
        except (InfeasibleError, UsageError):
            continue

    assert free.predicted.step_time_s <= min(forced) * 1.005
    assert free.predicted.bound_s is not None
    assert free.predicted.bound_s <= min(forced)


def test_too_little_memory_for_whole_parameters_turns_to_fsdp_or_tp(
    captured: tuple[Program, Problem],
) -> None:
    roomy, tight = load_cluster("cpu:4"), shrunk(load_cluster("cpu:4"), 60 * 2**20)

    assert plan(captured, roomy).parsed_mesh.sizes["fsdp"] == 1
    assert plan(captured, tight).predicted.memory_total_bytes <= 60 * 2**20


def test_more_memory_is_never_slower(captured: tuple[Program, Problem]) -> None:
    times = [
        plan(captured, shrunk(load_cluster("cpu:4"), size * 2**20)).predicted.step_time_s
        for size in (60, 90, 200, 2000)
    ]

    assert all(later <= earlier * 1.005 for earlier, later in itertools.pairwise(times))


def test_time_and_memory_add_up(captured: tuple[Program, Problem]) -> None:
    found = plan(captured, "cpu:4", mesh=Mesh.parse("fsdp=2,tp=2"))

    assert sum(found.predicted.time_s.values()) == pytest.approx(found.predicted.step_time_s)
    assert sum(found.predicted.memory_bytes.values()) == found.predicted.memory_total_bytes
    assert found.predicted.time_s[FSDP] > 0


def test_state_lists_every_parameter_with_fsdp_minor(captured: tuple[Program, Problem]) -> None:
    found = plan(captured, "h100:4", mesh=Mesh.parse("fsdp=2,tp=2"), batch=2)

    assert set(found.state) == {name for name, info in captured[0].state.items() if info.kind == "parameter"}
    assert all("fsdp" in text for text in found.state.values())
    assert all("fsdp" not in text for block in found.blocks.values() for text in block.state.values())


def test_infeasible_says_by_how_much_and_what_would_fit(captured: tuple[Program, Problem]) -> None:
    with pytest.raises(InfeasibleError, match=r"GiB too much") as error:
        plan(captured, shrunk(load_cluster("cpu:1"), 60 * 2**20), recompute="none")
    assert "recompute full" in (error.value.hint or "")
    assert "devices" in (error.value.hint or "")


def test_batch_that_does_not_divide_names_the_nearest(captured: tuple[Program, Problem]) -> None:
    with pytest.raises(UsageError, match="a batch of 16 or 20"):
        plan(captured, "cpu:4", batch=18, mesh=Mesh.parse("dp=4"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"micro_batches": 5}, "does not divide"),
        ({"recompute": "some"}, "recompute"),
        ({"precision": "fp12"}, "precision"),
        ({"mesh": Mesh.parse("dp=3")}, "3 devices"),
        ({"mesh": Mesh.parse("pp=4")}, "axis 'pp'"),
    ],
)
def test_bad_requests_are_usage_errors(
    captured: tuple[Program, Problem], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        plan(captured, "cpu:4", **options)


def test_constraint_decides_the_placement(captured: tuple[Program, Problem]) -> None:
    from autopar.passes.propagate import parse_constraint, propagate

    program, problem = captured
    fixed, _ = propagate(problem, program, [parse_constraint("ffn=tp")])
    found = plan((program, fixed), "h100:2", mesh=Mesh.parse("tp=2"), constraints=["ffn=tp"])

    assert found.axes["ffn"] == ("tp",)
    assert found.constraints == ("ffn=tp",)


def test_constraint_that_no_mesh_allows_is_told(captured: tuple[Program, Problem]) -> None:
    from autopar.passes.propagate import parse_constraint, propagate

    program, problem = captured
    fixed, _ = propagate(problem, program, [parse_constraint("heads=tp")])

    with pytest.raises(ConstraintError, match="heads"):
        plan((program, fixed), "h100:3", mesh=Mesh.parse("tp=3"), batch=24, constraints=["heads=tp"])


def test_fingerprint_does_not_depend_on_batch_and_sequence(captured: tuple[Program, Problem]) -> None:
    assert fingerprint(captured[0]) == fingerprint(capture_transformer(batch=4, seq=32)[0])


def test_splits_of_a_batch() -> None:
    assert splits(12, meshes(2, None), None)[Mesh.parse("dp=2,fsdp=1,tp=1")] == [1, 2, 3, 6]


def test_page_is_at_most_100_wide_and_tells_the_alternatives(captured: tuple[Program, Problem]) -> None:
    page = plan(captured, "h100:2x4").page()

    assert max(map(len, page.splitlines())) <= 100
    assert "rejected: slower" in page
