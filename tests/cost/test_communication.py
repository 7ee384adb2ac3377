"""Collectives: hand-computed times, laws that hold for every group, and measured rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import load_cluster
from autopar.cost.communication import KINDS, collective_s, group_levels

NODE, NODES = load_cluster("h100:8"), load_cluster("h100:4x8")
NVLINK, NETWORK = NODES.links
GIB = 2.0**30


def test_all_gather_in_one_node_is_a_ring() -> None:
    expected = NVLINK.collective_latency_s + 7 * NVLINK.latency_s + GIB * 7 / 8 / (450e9 * NVLINK.efficiency)

    assert collective_s(NODE, "all_gather", 8, 1, GIB) == pytest.approx(expected)


def test_a_group_of_one_rank_per_node_uses_only_the_network() -> None:
    assert [level.link.name for level in group_levels(NODES.links, 4, 8)] == ["infiniband"]


def test_a_group_over_nodes_moves_only_an_eighth_between_them() -> None:
    levels = group_levels(NODES.links, 32, 1)

    assert [(level.link.name, level.inner, level.fan) for level in levels] == [
        ("nvlink", 1, 8),
        ("infiniband", 8, 4),
    ]


def test_groups_that_straddle_nodes_are_split_as_their_stride_says() -> None:
    assert [(level.inner, level.fan) for level in group_levels(NODES.links, 8, 4)] == [(1, 2), (2, 4)]


@given(st.sampled_from(KINDS), st.sampled_from([2, 3, 4, 6, 8, 16, 32]), st.floats(1, 1e12))
def test_more_bytes_never_take_less_time(kind: str, size: int, total: float) -> None:
    assert collective_s(NODES, kind, size, 1, 2 * total) > collective_s(NODES, kind, size, 1, total)


@given(st.sampled_from([2, 3, 4, 8, 16, 32]), st.floats(1e6, 1e12))
def test_all_reduce_moves_what_reduce_scatter_and_all_gather_move(size: int, total: float) -> None:
    both = sum(collective_s(NODES, kind, size, 1, total) for kind in ("reduce_scatter", "all_gather"))

    assert collective_s(NODES, "all_reduce", size, 1, total) <= both * (1 + 1e-9)


@given(st.sampled_from(KINDS), st.sampled_from([2, 4]))
def test_neighbours_in_a_node_are_faster_than_ranks_apart(kind: str, size: int) -> None:
    assert collective_s(NODES, kind, size, 1, GIB) < collective_s(NODES, kind, size, 8, GIB)


def test_one_rank_sends_nothing() -> None:
    assert collective_s(NODES, "all_reduce", 1, 1, GIB) == 0.0


def test_unknown_collective_is_refused() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        collective_s(NODES, "broadcast", 2, 1, 1.0)
