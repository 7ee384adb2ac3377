"""The reshard algebra: text, DTensor, and that the steps really take a value from one sharding to another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar import Mesh, Sharding
from autopar.errors import ShardingError
from autopar.sharding import COLLECTIVES, Step, Use, reshard_steps

MESH = Mesh.parse("dp=2,cp=3,tp=2")
SHAPE = (12, 12, 12)


@st.composite
def shardings(draw: st.DrawFn, sums: bool = True) -> Sharding:
    """Any sharding of a 3-d tensor over the mesh: each axis splits a dim, sums, or does nothing."""
    dims: list[list[str]] = [[], [], []]
    summed = []
    for axis in draw(st.permutations(MESH.names)):
        place = draw(st.integers(-2 if sums else -1, 2))
        if place == -2:
            summed.append(axis)
        elif place >= 0:
            dims[place].append(axis)
    return Sharding(tuple(map(tuple, dims)), tuple(summed))


@given(shardings())
def test_text_round_trips(sharding: Sharding) -> None:
    assert Sharding.parse(str(sharding)) == sharding
    assert Sharding.parse(sharding.format(SHAPE)) == sharding


def cut(whole: Tensor, sharding: Sharding, rank: int) -> Tensor:
    coordinate = MESH.coordinate(rank)
    for dim, axes in enumerate(sharding.dims):
        for axis in axes:
            whole = whole.chunk(MESH.sizes[axis], dim)[coordinate[axis]]
    return whole


def pieces_of(whole: Tensor, sharding: Sharding) -> dict[int, Tensor]:
    """What each rank holds of `whole`: its piece, divided into unequal addends along axes of sums."""
    ranks = range(MESH.device_count)
    generator = torch.Generator().manual_seed(1)
    pieces = {}
    for rank in ranks:
        pieces[rank] = cut(whole, sharding, rank).clone()
    for axis in sharding.sums:
        for rank in ranks:
            group = MESH.group_ranks(axis, rank)
            if rank == group[0]:
                rest = pieces[rank]
                for other in group[1:]:
                    part = torch.randint(-9, 9, rest.shape, generator=generator).to(rest.dtype)
                    pieces[other], rest = part, rest - part
                pieces[rank] = rest
    return pieces


def apply(step: Step, pieces: dict[int, Tensor]) -> dict[int, Tensor]:
    """A step's forward on all ranks, in plain words."""
    size = MESH.sizes[step.axis]
    result = {}
    for rank in pieces:
        group = [pieces[other] for other in MESH.group_ranks(step.axis, rank)]
        own = MESH.coordinate(rank)[step.axis]
        if step.kind == "copy":
            result[rank] = pieces[rank]
        elif step.kind == "all_gather":
            result[rank] = torch.cat(group, step.dim)
        elif step.kind == "all_reduce":
            result[rank] = torch.stack(group).sum(0)
        elif step.kind == "reduce_scatter":
            result[rank] = torch.stack(group).sum(0).chunk(size, step.dim)[own]
        elif step.kind == "slice":
            result[rank] = pieces[rank].chunk(size, step.dim)[own]
        else:
            result[rank] = torch.cat([piece.chunk(size, step.to_dim)[own] for piece in group], step.dim)
    return result


def summed(pieces: dict[int, Tensor], sharding: Sharding) -> Iterator[tuple[Tensor, int]]:
    """The value each rank's pieces stand for: added up along axes of sums."""
    for rank in pieces:
        totals = dict(pieces)
        for axis in sharding.sums:
            totals = {
                other: torch.stack([totals[r] for r in MESH.group_ranks(axis, other)]).sum(0)
                for other in totals
            }
        yield totals[rank], rank


@settings(max_examples=300, deadline=None)
@given(shardings(), shardings())
def test_steps_take_a_value_from_one_sharding_to_another(source: Sharding, target: Sharding) -> None:
    if set(target.sums) - set(source.sums):
        with pytest.raises(ShardingError):
            reshard_steps(source, Use(target))
        return
    whole = torch.arange(12**3, dtype=torch.int64).reshape(SHAPE)
    pieces = pieces_of(whole, source)
    for step in reshard_steps(source, Use(target)):
        pieces = apply(step, pieces)
    for found, rank in summed(pieces, target):
        assert torch.equal(found, cut(whole, target, rank))


@given(shardings(), shardings(sums=False), st.sets(st.sampled_from(MESH.names)))
def test_every_step_has_a_price_and_sums_of_gradients_are_reduced_once(
    source: Sharding, target: Sharding, axes: set[str]
) -> None:
    grad_sums = tuple(sorted(axis for axis in axes if target.dim_of(axis) is None))
    steps = reshard_steps(source, Use(target, grad_sums))
    for step in steps:
        assert (step.kind, step.grad_sums) in COLLECTIVES
    for axis in grad_sums:
        assert sum(step.grad_sums for step in steps if step.axis == axis) == 1


@given(shardings())
def test_no_step_where_nothing_changes(sharding: Sharding) -> None:
    assert reshard_steps(sharding, Use(sharding)) == ()


def test_megatron_pairs() -> None:
    hidden, heads = Sharding.parse("[_@dp, _@tp, _]"), Sharding.parse("[_@dp, _, _]")
    gather = reshard_steps(hidden, Use(heads, ("tp",)))
    scatter = reshard_steps(Sharding.parse("[_@dp, _, _] + sum(tp)"), Use(hidden))
    assert [str(step) for step in (*gather, *scatter)] == [
        "all_gather(tp) dim 1 +grad",
        "reduce_scatter(tp) dim 1",
    ]


@given(shardings(sums=False))
def test_dtensor_placements_round_trip_where_dtensor_can_say_it(sharding: Sharding) -> None:
    order = {name: index for index, name in enumerate(MESH.names)}
    if all(list(axes) == sorted(axes, key=order.__getitem__) for axes in sharding.dims):
        placements = sharding.to_placements(MESH)
        assert Sharding.from_placements(placements, MESH, 3) == sharding
    else:
        with pytest.raises(ShardingError, match="mesh order"):
            sharding.to_placements(MESH)


@given(shardings(sums=False))
def test_local_shape_is_the_shape_of_a_piece(sharding: Sharding) -> None:
    whole = torch.empty(SHAPE, device="meta")
    assert sharding.local_shape(SHAPE, MESH) == tuple(cut(whole, sharding, 0).shape)


def test_a_dim_that_does_not_divide_is_an_error_that_teaches() -> None:
    with pytest.raises(
        ShardingError, match=r"size 9, axis 'tp' has size 2(.|\n)*at here(.|\n)*try an axis of size 3"
    ):
        Sharding.parse("[_@tp]").local_shape([9], MESH, where="here")


@pytest.mark.parametrize(
    "text", ["8@dp", "[8@]", "[8@dp] + sum", "[8@dp, 4@dp]", "[a]", "[8@dp] + sum(dp)", "[8,,8]"]
)
def test_malformed_text(text: str) -> None:
    with pytest.raises(ShardingError):
        Sharding.parse(text)
