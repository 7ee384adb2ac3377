"""Clusters that are not plain: dead nodes, more link levels, unlike pools, the costs of a run, what-ifs."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import WHAT_IF, Cluster, Link, catalogue, load_cluster, load_device
from autopar.cost.communication import collective_s, fixed_and_rate, send_s
from autopar.errors import AutoparError, ClusterError, UsageError

MIXED = "h100:64x8+a100:32x8"
LEAVES = """
device: h100
nodes: 64
links:
  - {name: nvlink}
  - {name: leaf, like: infiniband, size: 256}
  - {name: spine, like: infiniband, oversubscription: 3}
"""
POOLS = """
pools:
  - {device: h100, nodes: 64, price_per_hour: 3}
  - {device: {base: a100, price_per_hour: 1}, nodes: 32, devices_per_node: 8}
links: [{name: infiniband, gbps: 12.5}]
dead: [3, 64, 65]
currency: EUR
failures_per_device_hour: 1.0e-5
restart_s: 300
storage_gbps: 200
"""


def _load(tmp_path: Path, text: str) -> Cluster:
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    return load_cluster(file)


# ---------------------------------------------------------------- dead nodes


def test_dead_nodes_are_not_counted(tmp_path: Path) -> None:
    cluster = _load(tmp_path, "device: h100\nnodes: 64\ndead: [3, 17]\n")

    assert (cluster.nodes, cluster.device_count, cluster.dead) == (64, 62 * 8, (3, 17))


def test_dead_nodes_leave_their_pool(tmp_path: Path) -> None:
    assert [pool.nodes for pool in _load(tmp_path, POOLS).pools] == [63, 30]


def test_a_pool_with_no_node_that_works_is_gone() -> None:
    cluster = replace(load_cluster("h100:2x8+a100:4x8"), dead=(0, 1))

    assert [pool.device.name for pool in cluster.pools] == ["a100"]


def test_describe_names_dead_nodes() -> None:
    assert "nodes that are out: 1" in replace(load_cluster("h100:4x8"), dead=(1,)).describe()


# ---------------------------------------------------------------- link levels


def test_a_level_like_another_takes_its_values(tmp_path: Path) -> None:
    _, leaf, spine = _load(tmp_path, LEAVES).links

    assert leaf == replace(load_device("h100").links[1], name="leaf", size=256)
    assert (spine.size, spine.oversubscription) == (0, 3)


def test_oversubscription_divides_the_bandwidth(tmp_path: Path) -> None:
    _, leaf, spine = _load(tmp_path, LEAVES).links

    assert spine.bytes_per_s == pytest.approx(leaf.bytes_per_s / 3)


def test_only_groups_beyond_the_leaf_pay_for_it(tmp_path: Path) -> None:
    plain, shared = load_cluster("h100:64x8"), _load(tmp_path, LEAVES)

    inside = [collective_s(cluster, "all_gather", 32, 8, 1e9) for cluster in (plain, shared)]
    beyond = [collective_s(cluster, "all_gather", 2, 256, 1e9) for cluster in (plain, shared)]
    sends = [send_s(cluster, 256, 1e12) for cluster in (plain, shared)]

    assert inside[0] == pytest.approx(inside[1])
    assert beyond[1] == pytest.approx(3 * beyond[0], rel=0.01)
    assert sends[1] == pytest.approx(3 * sends[0], rel=0.01)


@given(st.floats(1, 16), st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]))
def test_oversubscription_is_as_less_bandwidth(by: float, kind: str) -> None:
    nvlink, network = load_cluster("h100:4x8").links
    over = fixed_and_rate((nvlink, replace(network, oversubscription=by)), kind, 32, 1)
    slow = fixed_and_rate((nvlink, replace(network, gbps=network.gbps / by)), kind, 32, 1)

    assert over == pytest.approx(slow)


def test_a_send_in_a_node_is_one_hop() -> None:
    nvlink = load_cluster("h100:8").links[0]

    assert send_s(load_cluster("h100:8"), 1, 1e9) == pytest.approx(
        nvlink.latency_s + 1e9 / nvlink.bytes_per_s
    )


# ---------------------------------------------------------------- pools


def test_a_uniform_cluster_is_one_pool() -> None:
    cluster = load_cluster("h100:64x8")
    (pool,) = cluster.pools

    assert pool.as_cluster() == cluster


def test_a_name_of_two_pools() -> None:
    cluster = load_cluster(MIXED)

    assert [(p.device.name, p.nodes, p.devices_per_node) for p in cluster.pools] == [
        ("h100", 64, 8),
        ("a100", 32, 8),
    ]
    assert (cluster.name, cluster.nodes, cluster.device_count) == (MIXED, 96, 768)


def test_the_common_view_is_no_better_than_any_pool() -> None:
    cluster = load_cluster(MIXED)
    for pool in cluster.pools:
        assert cluster.device.memory_bytes <= pool.device.memory_bytes
        assert cluster.device.memory_gbps <= pool.device.memory_gbps
        assert cluster.device.peak("bf16") <= pool.device.peak("bf16")
        assert all(a.bytes_per_s <= b.bytes_per_s for a, b in zip(cluster.links, pool.links, strict=True))


@pytest.mark.parametrize("first", ["h100:2x8", "gb200:2x4", "l40s:4", "v100:8"])
@pytest.mark.parametrize("second", ["a100:2x4", "tpu-v5p:2x4", "mi300x:8"])
def test_the_common_view_times_collectives_no_faster(first: str, second: str) -> None:
    cluster = load_cluster(f"{first}+{second}")
    for pool in cluster.pools:
        mine, its = (fixed_and_rate(c.links, "all_gather", 2, 1)[1] for c in (cluster, pool.as_cluster()))
        assert mine >= its


def test_a_dtype_that_one_pool_lacks_is_not_in_the_common_view() -> None:
    device = load_cluster("h100:8+v100:8").device

    assert device.peak("bf16") == load_device("v100").peak("fp16")
    assert "fp8" not in device.peak_tflops


def test_domains_that_fit_both_pools_stay() -> None:
    assert [link.size for link in load_cluster("gb200:18x4+h100:8x8").links] == [8, 0]


def test_uneven_nodes_are_a_pool_of_their_own() -> None:
    cluster = load_cluster("h100:2x8+h100:4")

    assert cluster.device == load_device("h100")
    assert (cluster.device_count, cluster.devices_per_node, [k.size for k in cluster.links]) == (
        20,
        4,
        [4, 0],
    )


def test_yaml_with_pools(tmp_path: Path) -> None:
    cluster = _load(tmp_path, POOLS)

    assert [pool.name for pool in cluster.pools] == ["h100:64x8", "a100:32x8"]
    assert (cluster.name, cluster.links[-1].gbps) == ("mine", 12.5)
    assert [pool.links[-1].gbps for pool in cluster.pools] == [50, 25]


def test_describe_a_mixed_cluster() -> None:
    assert "64 x 8 h100 + 32 x 8 a100" in load_cluster(MIXED).describe()


# ---------------------------------------------------------------- the costs of a run


def test_the_costs_of_a_run_have_defaults_with_sources() -> None:
    cluster = load_cluster("h100:2048x8")

    assert cluster.failures_per_device_hour == pytest.approx(1.97e-5, rel=0.01)
    assert cluster.checkpoint_gbps == pytest.approx(2000)
    assert set(cluster.assumed) == {"failures_per_device_hour", "restart_s", "storage_gbps"}
    assert (cluster.price_per_hour, cluster.currency) == (None, "USD")


def test_given_costs_are_not_assumed(tmp_path: Path) -> None:
    cluster = _load(tmp_path, POOLS)

    assert (cluster.assumed, cluster.currency, cluster.checkpoint_gbps, cluster.restart_s) == (
        {},
        "EUR",
        200,
        300,
    )


def test_the_price_is_the_mean_over_working_devices(tmp_path: Path) -> None:
    assert _load(tmp_path, POOLS).price_per_hour == pytest.approx((63 * 3 + 30 * 1) / 93)


def test_a_price_names_the_file_as_its_source(tmp_path: Path) -> None:
    device = _load(tmp_path, "device: h100\nnodes: 1\nprice_per_hour: 2.5\n").device

    assert (device.price_per_hour, device.sources["price_per_hour"]) == (2.5, "given in mine.yaml")


@pytest.mark.parametrize("name", [name for name in catalogue() if name != "cpu"])
def test_every_accelerator_has_a_host(name: str) -> None:
    device = load_device(name)

    assert device.host_memory_bytes is not None
    assert device.host_gbps is not None
    assert 0 < device.host_gbps < device.memory_gbps


# ---------------------------------------------------------------- saved and refused


@pytest.mark.parametrize("text", [LEAVES, POOLS])
def test_a_cluster_from_a_file_round_trips(tmp_path: Path, text: str) -> None:
    cluster = _load(tmp_path, text)

    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    assert pickle.loads(pickle.dumps(cluster)) == cluster
    assert hash(cluster) == hash(_load(tmp_path, text))


def test_a_dict_that_an_older_version_saved_loads() -> None:
    cluster = load_cluster("h100:4x8")
    old = {key: cluster.to_dict()[key] for key in ("name", "device", "nodes", "devices_per_node", "links")}
    for key in ("host_memory_bytes", "host_gbps"):
        del old["device"][key]
    for link in (*old["links"], *old["device"]["links"]):
        del link["oversubscription"]

    assert Cluster.from_dict(old).device_count == 32
    assert Cluster.from_dict(old).links == cluster.links


TOP = "device: h100\nnodes: 4\n"
BAD_FILES = {
    "a dead node out of range": (f"{TOP}dead: [1, 4]\n", "dead node 4 is none of the nodes 0 to 3"),
    "where it is": (f"{TOP}dead:\n  - 1\n  - 4\n", "mine.yaml:5, dead.1"),
    "a dead node twice": (f"{TOP}dead: [1, 1]\n", "dead node 1 stands twice"),
    "a negative dead node": (f"{TOP}dead: [-1]\n", "dead.0"),
    "a dead node that is true": (f"{TOP}dead: [true]\n", "True"),
    "dead is a number": (f"{TOP}dead: 3\n", "dead"),
    "all dead": (f"{TOP}dead: [0, 1, 2, 3]\n", "all 4 nodes are dead"),
    "oversubscription below 1": (f"{TOP}links: [{{name: infiniband, oversubscription: 0.5}}]\n", "0.5"),
    "zero oversubscription": (
        f"{TOP}links: [{{name: infiniband, oversubscription: 0}}]\n",
        "oversubscription",
    ),
    "like nothing": (f"{TOP}links: [{{name: x, like: y, size: 0}}]\n", "unknown key 'like'"),
    "like a list": (f"{TOP}links: [{{name: x, like: [y], size: 0}}]\n", "like"),
    "zero price": (f"{TOP}price_per_hour: 0\n", "price_per_hour"),
    "negative price": (f"{TOP}price_per_hour: -1\n", "-1"),
    "currency in words": (f"{TOP}currency: euro\n", "euro"),
    "negative failures": (f"{TOP}failures_per_device_hour: -1\n", "failures_per_device_hour"),
    "infinite failures": (f"{TOP}failures_per_device_hour: .inf\n", "failures_per_device_hour"),
    "negative restart": (f"{TOP}restart_s: -1\n", "restart_s"),
    "restart in words": (f"{TOP}restart_s: ten\n", "ten"),
    "zero storage": (f"{TOP}storage_gbps: 0\n", "storage_gbps"),
    "a misspelt cost": (f"{TOP}storage_gb: 3\n", "unknown key 'storage_gb'"),
    "host memory without its unit": (
        "device: {base: h100, host_memory_bytes: 256}\nnodes: 1\n",
        "host_memory_bytes",
    ),
    "an unknown unit": ("device: {base: h100, host_memory_bytes: 256 gig}\nnodes: 1\n", "256 gig"),
    "zero host bandwidth": ("device: {base: h100, host_gbps: 0}\nnodes: 1\n", "host_gbps"),
    "no pools": ("pools: []\n", "pools"),
    "pools is a name": ("pools: h100\n", "pools"),
    "a pool is a name": ("pools: [h100]\n", "pools.0"),
    "a pool without nodes": ("pools:\n- device: h100\n", "'pools.0.nodes' is missing"),
    "pools beside nodes": ("pools: [{device: h100, nodes: 1}]\nnodes: 2\n", "unknown key 'nodes'"),
    "an unknown key in a pool": ("pools: [{device: h100, nodez: 1, nodes: 1}]\n", "unknown key 'nodez'"),
    "an unknown device in a pool": (
        "pools:\n- {device: h100, nodes: 1}\n- {device: h10, nodes: 1}\n",
        "mine.yaml:3",
    ),
    "a bad link in a pool": (
        "pools:\n- device: h100\n  nodes: 1\n  links:\n  - {name: nvlink}\n  - {name: infiniband, gbps: -1}\n",
        "mine.yaml:6",
    ),
    "two links beside pools": (
        "pools: [{device: h100, nodes: 1}]\nlinks: [{name: nvlink}, {name: infiniband}]\n",
        "2 levels",
    ),
    "an unknown link beside pools": (
        "pools: [{device: h100, nodes: 1}]\nlinks: [{name: x, size: 0}]\n",
        "missing",
    ),
    "too many devices in a pool": ("pools: [{device: h100, nodes: 1000000}]\n", "1000000 x 8"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused_with_advice(tmp_path: Path, case: str) -> None:
    text, named = BAD_FILES[case]
    with pytest.raises(ClusterError) as raised:
        _load(tmp_path, text)
    assert named in str(raised.value)
    assert "\n  try " in str(raised.value)


@pytest.mark.parametrize(
    "spec", ["h100:8+", "+h100:8", "h100:8+h10:8", "h100:8+a100:0", "h100:8+local", "h100:8+a100"]
)
def test_a_bad_name_is_refused_with_advice(spec: str) -> None:
    with pytest.raises(ClusterError, match="\n  try "):
        load_cluster(spec)


@pytest.mark.parametrize(
    "change",
    [{"dead": [9]}, {"dead": [0, 0]}, {"currency": "usd"}, {"storage_gbps": -1}, {"mixed": [{"name": "x"}]}],
)
def test_bad_saved_data_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ClusterError, match="try "):
        Cluster.from_dict(load_cluster("h100:8").to_dict() | change)


def test_saved_pools_must_fit_the_cluster() -> None:
    with pytest.raises(ClusterError, match="the pools have 96 nodes"):
        Cluster.from_dict(load_cluster(MIXED).to_dict() | {"nodes": 95})


# ---------------------------------------------------------------- what if


def _numbers(cluster: Cluster) -> dict[str, list[float]]:
    """What each word of a what-if may change."""
    device, (inner, *outer) = cluster.device, cluster.links
    return {
        "inter_bw": [link.gbps for link in outer],
        "intra_bw": [inner.gbps],
        "latency": [s for link in cluster.links for s in (link.latency_s, link.collective_latency_s)],
        "flops": list(device.peak_tflops.values()),
        "memory": [device.memory_bytes],
        "memory_bw": [device.memory_gbps],
    }


@pytest.mark.parametrize("spec", ["h100:4x8", "l40s:2x8", MIXED])
@pytest.mark.parametrize("word", WHAT_IF)
def test_a_what_if_changes_its_own_numbers_only(spec: str, word: str) -> None:
    before, after = load_cluster(spec), load_cluster(spec).scaled(word, 2)
    for key, numbers in _numbers(before).items():
        expected = [number * (2 if key == word else 1) for number in numbers]
        assert _numbers(after)[key] == pytest.approx(expected), key


def test_a_what_if_reaches_every_pool() -> None:
    cluster = load_cluster(MIXED).scaled("flops", 2)

    assert [pool.device.peak("bf16") for pool in cluster.pools] == [2 * 989.5e12, 2 * 312e12]


def test_a_what_if_is_told() -> None:
    cluster = load_cluster("h100:8").scaled("memory", 1.5)

    assert cluster.name == "h100:8, memory x 1.5"
    assert cluster.device.sources["memory_bytes"].startswith("what if: 1.5 times 81559 MiB")


@given(st.sampled_from(sorted(WHAT_IF)), st.floats(0.25, 4))
def test_a_what_if_can_be_taken_back(word: str, factor: float) -> None:
    cluster = load_cluster("h100:4x8")
    back = cluster.scaled(word, factor).scaled(word, 1 / factor)

    assert _numbers(back)[word] == pytest.approx(_numbers(cluster)[word], rel=1e-6)


@pytest.mark.parametrize(
    ("spec", "gpus", "same_as"),
    [
        ("h100:64x8", 512, "h100:64x8"),
        ("h100:8", 512, "h100:64x8"),
        ("h100:64x8", 4, "h100:4"),
        ("gb200:72", 8, "gb200:8"),
    ],
)
def test_more_or_fewer_devices(spec: str, gpus: int, same_as: str) -> None:
    assert load_cluster(spec).with_(gpus=gpus) == load_cluster(same_as)


def test_devices_and_factors_together(tmp_path: Path) -> None:
    cluster = _load(tmp_path, LEAVES + "dead: [1]\n").with_(gpus=1024, inter_bw=2.0)

    assert (cluster.device_count, cluster.dead, [k.gbps for k in cluster.links]) == (
        1024,
        (),
        [450, 100, 100],
    )
    assert cluster.links[2].oversubscription == 3


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"interbw": 2}, "inter_bw"),
        ({"speed": 2}, "one of inter_bw"),
        ({"flops": 0}, "above 0"),
        ({"flops": -1}, "-1"),
        ({"flops": float("nan")}, "nan"),
        ({"flops": float("inf")}, "inf"),
        ({"flops": True}, "True"),
        ({"flops": "2x"}, "2x"),
        ({"flops": 1e306}, "1e+06"),
        ({"memory": 1e-6}, "memory"),
        ({"memory": 0.01}, "reserved"),
        ({"gpus": 0}, "gpus=0"),
        ({"gpus": -8}, "-8"),
        ({"gpus": 12}, "gpus=8 or gpus=16"),
        ({"gpus": 2.5}, "2.5"),
        ({"gpus": True}, "True"),
        ({"gpus": 10**7}, "10000000"),
    ],
)
def test_nonsense_is_refused_with_advice(changes: dict[str, Any], named: str) -> None:
    with pytest.raises((UsageError, ClusterError)) as raised:
        load_cluster("h100:4x8").with_(**changes)
    assert named in str(raised.value)
    assert "\n  try " in str(raised.value)


def test_a_size_does_not_say_which_pool() -> None:
    with pytest.raises(AutoparError, match="which of the 2 pools"):
        load_cluster(MIXED).with_(gpus=512)


def test_a_cluster_of_one_level_has_nothing_between() -> None:
    cluster = load_cluster("h100:8")
    with pytest.raises(ClusterError, match="try intra_bw=2"):
        replace(cluster, links=cluster.links[1:]).scaled("inter_bw", 2)


def test_links_default_to_no_oversubscription() -> None:
    assert Link("x", 0, 1.0, 0.5, 0.0, 0.0).bytes_per_s == 0.5e9
