"""The simulator: its collectives against plain tensors, its failures, and its results against real processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar import api, collectives
from autopar.errors import PeerError, UsageError
from autopar.mesh import Mesh
from autopar.runtime.groups import Groups, join_mesh
from autopar.runtime.simulate import simulate
from tests.runtime.equality_worker import fixes
from tests.runtime.processes import run_on
from tests.tiny import tiny

MESH = Mesh.parse("dp=2,tp=2")


def whole(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def own(rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


# ---- torch.distributed ---------------------------------------------------------------------------------------------


def test_collectives_over_all_ranks() -> None:
    def work(rank: int) -> dict[str, Any]:
        total, most = own(rank, 3, 4), own(rank, 3)
        dist.all_reduce(total)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        gathered, scattered = torch.empty(6, 4), torch.empty(1, 4)
        dist.all_gather_single(gathered, own(rank, 2, 4))
        dist.reduce_scatter_single(scattered, own(rank, 3, 4))
        objects: list[Any] = [None] * 3
        dist.all_gather_object(objects, {"rank": rank})
        text = ["from 1"] if rank == 1 else [None]
        dist.broadcast_object_list(text, src=1)
        dist.barrier()
        return {
            "total": total,
            "most": most,
            "gathered": gathered,
            "scattered": scattered,
            "objects": objects,
            "text": text,
        }

    results = simulate(3, work)
    expected = own(0, 3, 4) + own(1, 3, 4) + own(2, 3, 4)
    for rank, found in enumerate(results):
        assert torch.equal(found["total"], expected)
        assert torch.equal(found["most"], torch.stack([own(each, 3) for each in range(3)]).amax(0))
        assert torch.equal(found["gathered"], torch.cat([own(each, 2, 4) for each in range(3)]))
        assert torch.equal(found["scattered"], expected[rank : rank + 1])
        assert found["objects"] == [{"rank": each} for each in range(3)]
        assert found["text"] == ["from 1"]


def test_uneven_all_to_all() -> None:
    rows = [[1, 0, 2], [3, 1, 0], [0, 0, 4]]  # rows[i][j]: from i to j

    def work(rank: int) -> Tensor:
        sent = torch.arange(sum(rows[rank])).float().unsqueeze(1) + 10 * rank
        expected = [rows[source][rank] for source in range(3)]
        received = torch.empty(sum(expected), 1)
        dist.all_to_all_single(received, sent, expected, rows[rank])
        return received.flatten()

    first, second, third = simulate(3, work)
    assert first.tolist() == [0, 10, 11, 12]
    assert second.tolist() == [13]
    assert third.tolist() == [1, 2, 20, 21, 22, 23]


def test_messages() -> None:
    def work(rank: int) -> Tensor:
        if rank == 0:
            dist.send(torch.ones(3), 1, tag=5)
            dist.send(torch.zeros(2), 1, tag=6)
            return torch.empty(0)
        later, sooner = torch.empty(2), torch.empty(3)
        waiting = dist.irecv(later, 0, tag=6)
        dist.recv(sooner, 0, tag=5)
        assert waiting is not None
        waiting.wait()
        return torch.cat([later, sooner])

    assert simulate(2, work)[1].tolist() == [0, 0, 1, 1, 1]


def test_a_rank_may_change_what_it_gave() -> None:
    def work(rank: int) -> Tensor:
        given, gathered = torch.full((2,), float(rank)), torch.empty(4)
        dist.all_gather_single(gathered, given)
        given.fill_(-1.0)
        return gathered

    assert all(found.tolist() == [0, 0, 1, 1] for found in simulate(2, work))


# ---- autopar.collectives, through the groups of a mesh ---------------------------------------------------------------


def test_steps_of_a_mesh_and_their_gradients() -> None:
    """Gather over one axis, scatter and exchange over another: value and gradient are those of the whole tensor."""

    def work(rank: int) -> tuple[Tensor, Tensor]:
        groups = join_mesh(MESH)
        weights = whole(4, 8)
        tensor = (own(0, 4, 8).narrow(0, 2 * groups.coordinate["dp"], 2) / 2).requires_grad_()
        total = collectives.all_reduce(tensor, groups.name("tp"), False)
        rows = collectives.all_gather(total, 0, groups.name("dp"), 2, groups.coordinate_tensor("dp"), False)
        piece = collectives.slice_own(rows, 1, groups.name("tp"), 2, groups.coordinate_tensor("tp"))
        piece = collectives.all_to_all(piece, 1, 0, groups.name("tp"), 2)
        mine = weights.narrow(0, 2 * groups.coordinate["tp"], 2)
        (piece * mine).sum().backward()
        assert tensor.grad is not None
        return piece.detach(), tensor.grad

    for rank, (value, gradient) in enumerate(simulate(4, work)):
        place = MESH.coordinate(rank)
        assert torch.equal(value, own(0, 4, 8).narrow(0, 2 * place["tp"], 2))
        assert torch.equal(gradient, whole(4, 8).narrow(0, 2 * place["dp"], 2))


def test_worlds_follow_each_other() -> None:
    for world in (1, 4, 2, 3, 1, 4):
        assert simulate(world, lambda rank: dist.get_world_size()) == [world] * world
    assert not dist.is_initialized()


def test_results_repeat_bit_for_bit() -> None:
    def work(rank: int) -> Tensor:
        tensor = own(rank, 1000) * 10.0 ** own(rank + 9, 1000)
        dist.all_reduce(tensor)
        return tensor

    first = simulate(4, work)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, simulate(4, work), strict=True))


# ---- failures: an error, soon, and never a hang ----------------------------------------------------------------------


def fails(function: Callable[[int], Any], expected: str, world: int = 2, timeout_s: float = 60) -> None:
    before = time.monotonic()
    with pytest.raises(PeerError, match=expected):
        simulate(world, function, timeout_s=timeout_s)
    assert time.monotonic() - before < 10


def test_the_error_of_one_rank_ends_all() -> None:
    def work(rank: int) -> None:
        groups = join_mesh(MESH)
        if rank == 3:
            raise ValueError("rank 3 is unwell")
        dist.all_reduce(torch.ones(1), group=groups.group["dp"])
        dist.barrier()

    with pytest.raises(ValueError, match="rank 3 is unwell"):
        simulate(4, work)


def test_an_error_before_the_groups_are_made() -> None:
    def work(rank: int) -> Groups:
        if rank == 1:
            raise ValueError("early")
        return join_mesh(MESH)

    before = time.monotonic()
    with pytest.raises(ValueError, match="early"):
        simulate(4, work)
    assert time.monotonic() - before < 10


def test_an_error_in_backward() -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor) -> Tensor:
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ValueError("bad gradient")

    def work(rank: int) -> None:
        groups = join_mesh(Mesh.parse("tp=2"))
        tensor = torch.ones(2, requires_grad=True)
        copied = collectives.copy(tensor, groups.name("tp"))
        (Bad.apply(copied) if rank else copied).sum().backward()  # type: ignore[no-untyped-call]

    with pytest.raises(ValueError, match="bad gradient"):
        simulate(2, work)


def test_another_collective() -> None:
    def work(rank: int) -> None:
        if rank:
            dist.all_reduce(torch.ones(4))
        else:
            dist.all_gather_single(torch.empty(8), torch.ones(4))

    fails(work, "do not agree on collective 1 .*rank 0 calls all_gather.*rank 1 calls all_reduce")


@pytest.mark.parametrize("other", [torch.ones(5), torch.ones(4, dtype=torch.float64), torch.ones(2, 2)])
def test_another_shape_or_dtype(other: Tensor) -> None:
    fails(lambda rank: dist.all_reduce(other.clone() if rank else torch.ones(4)), "do not agree")


def test_another_reduction() -> None:
    operations = [dist.ReduceOp.SUM, dist.ReduceOp.MAX]
    fails(lambda rank: dist.all_reduce(torch.ones(1), operations[rank]), "all_reduce sum.*all_reduce max")


def test_in_backward_through_the_graph() -> None:
    def work(rank: int) -> None:
        groups = join_mesh(Mesh.parse("tp=2"))
        tensor = torch.ones(4, requires_grad=True)
        if rank:
            collectives.copy(tensor, groups.name("tp")).sum().backward()
        else:
            collectives.reduce_scatter(tensor, 0, groups.name("tp"), 2).sum().backward()

    fails(work, "do not agree|wait for each other")


def test_no_collective_at_all() -> None:
    fails(lambda rank: dist.barrier() if rank else None, "rank 0 has ended; rank 1 waits in barrier")


def test_a_circle() -> None:
    def work(rank: int) -> None:
        groups = join_mesh(MESH)
        first, second = ("dp", "tp") if rank in (0, 3) else ("tp", "dp")
        dist.all_reduce(torch.ones(1), group=groups.group[first])
        dist.all_reduce(torch.ones(1), group=groups.group[second])

    fails(work, "the ranks wait for each other", world=4)


def test_a_message_that_never_comes() -> None:
    fails(lambda rank: dist.recv(torch.empty(2), 1 - rank), "a message of float32\\[2\\] from rank")


def test_a_message_of_another_shape() -> None:
    fails(lambda rank: dist.recv(torch.empty(2), 0) if rank else dist.send(torch.ones(3), 1), "has sent")


def test_uneven_sizes_that_do_not_agree() -> None:
    def work(rank: int) -> None:
        dist.all_to_all_single(torch.empty(3), torch.ones(3), [2, 1], [1, 2])

    fails(work, "expects \\[2, 1\\] rows, is sent \\[1, 1\\]")


def test_a_rank_that_takes_too_long() -> None:
    stop = threading.Event()
    try:
        fails(lambda rank: stop.wait(30) if rank else dist.barrier(), "not done after 1 s", timeout_s=1)
    finally:
        stop.set()
    assert simulate(2, lambda rank: rank) == [0, 1]


def test_no_ranks() -> None:
    with pytest.raises(UsageError, match="0 ranks"):
        simulate(0, lambda rank: rank)


def test_no_simulation_in_a_simulation() -> None:
    with pytest.raises(UsageError, match="one simulation at a time"):
        simulate(2, lambda rank: simulate(2, lambda other: other))


# ---- against processes -----------------------------------------------------------------------------------------------

CASES = ["llama/fsdp=2/recompute", "vit/tp=2/megatron"]


@pytest.fixture(scope="module")
def in_processes() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = run_on(2, "simulate_worker.py", *CASES)[0]
    return found


@pytest.mark.parametrize("case", CASES)
def test_as_in_processes(in_processes: dict[str, dict[str, float]], case: str) -> None:
    """Loss, norm and the norm of every gradient: two ranks' sums have one order, so to the last bits."""
    run, batch = compiled(case)
    found = simulate(2, partial(outcome, run, batch))
    assert found[0] == found[1]
    expected = in_processes[case]
    assert found[0].keys() == expected.keys()
    largest = max(expected.values())
    for name, value in expected.items():
        assert abs(found[0][name] - value) <= 1e-6 * max(value, 1e-4 * largest), name


def compiled(case: str) -> tuple[api.Compiled, dict[str, Any]]:
    kind, mesh, variant = case.split("/")
    model, batch = tiny(kind)
    options: dict[str, dict[str, Any]] = {"recompute": {"recompute": "full"}, "micro": {"micro_batches": 2}}
    made = api.compile(
        model,
        "cpu:2",
        example_inputs=batch,
        mesh=mesh,
        fix=fixes(kind, variant),
        **options.get(variant, {}),
    )
    return made, batch


def outcome(made: api.Compiled, batch: dict[str, Any], rank: int = 0) -> dict[str, float]:
    run = made.on_rank()
    loss = run.trainer.gradients(batch)
    return {
        "loss": loss,
        "norm": float(run.trainer.gradient_norm()),
        **{name: float(run.whole_gradient(name).norm()) for name in run.parameters},
    }
