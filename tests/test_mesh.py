"""Meshes: reading, ranks and groups."""

from __future__ import annotations

import pytest

from autopar import Mesh
from autopar.errors import ShardingError


def test_text_round_trips() -> None:
    assert str(Mesh.parse("dp=2, fsdp=1,tp=4")) == "dp=2,fsdp=1,tp=4"


def test_the_last_axis_is_innermost() -> None:
    mesh = Mesh.parse("dp=2,tp=4")
    assert mesh.group_ranks("tp", 5) == (4, 5, 6, 7)
    assert mesh.group_ranks("dp", 5) == (1, 5)


@pytest.mark.parametrize("rank", range(12))
def test_coordinates_give_the_rank_back(rank: int) -> None:
    mesh = Mesh.parse("dp=2,cp=3,tp=2")
    coordinate = mesh.coordinate(rank)
    assert sum(coordinate[name] * mesh.stride(name) for name in mesh.names) == rank


@pytest.mark.parametrize("text", ["dp", "dp=x", "dp=0", "dp=2,dp=2", "Dp=2", "dp=-1"])
def test_bad_meshes_are_errors_that_teach(text: str) -> None:
    with pytest.raises(ShardingError, match="try"):
        Mesh.parse(text)
