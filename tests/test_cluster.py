"""Clusters: the catalogue and its sources, names, YAML files good and bad, links against measured rows."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autopar import cluster as cluster_module
from autopar.cluster import Cluster, Device, catalogue, load_cluster, load_device
from autopar.errors import ClusterError

GPUS = ["v100", "a100-40g", "a100", "h100", "h100-pcie", "h200", "h800", "h20"]
GPUS += ["b200", "b300", "gb200", "gb300", "l40s", "mi300x", "mi325x"]
OTHERS = ["cpu", "gaudi2", "tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-trillium"]
BF16_TFLOPS = {"a100": 312, "h100": 989.5, "h200": 989.5, "h800": 989.5, "b200": 2250, "b300": 2250}
BF16_TFLOPS |= {"gb200": 2450, "gb300": 2450, "v100": 125, "mi325x": 1307.4, "gaudi2": 432}
BF16_TFLOPS |= {"tpu-v3": 123, "tpu-v4": 275, "tpu-v5e": 197, "tpu-v5p": 459, "tpu-trillium": 918}


def test_catalogue_holds_every_device() -> None:
    assert set(catalogue()) == {*GPUS, *OTHERS}


def _numbers(device: Device) -> Iterator[str]:
    for name in ("memory_bytes", "memory_gbps", "matmul_half_size", "launch_s", "reserved_bytes"):
        yield name
    yield from ("devices_per_node", "peak_tflops")
    yield from (f"efficiency.{kind}" for kind in device.efficiency)
    optional = ("price_per_hour", "host_memory_bytes", "host_gbps")
    yield from (name for name in optional if getattr(device, name) is not None)
    for link in device.links:
        for name in ("size", "gbps", "efficiency", "latency_s", "collective_latency_s"):
            yield f"links.{link.name}.{name}"


@pytest.mark.parametrize("name", [*GPUS, *OTHERS])
def test_every_number_has_a_source_and_every_source_a_number(name: str) -> None:
    device = load_device(name)
    assert set(device.sources) == set(_numbers(device))
    assert all(len(text) > 4 for text in device.sources.values())


@pytest.mark.parametrize(("name", "tflops"), BF16_TFLOPS.items())
def test_peak_in_flops(name: str, tflops: float) -> None:
    assert load_device(name).peak("bf16") == tflops * 1e12


@pytest.mark.parametrize(
    ("dtype", "same_as"),
    [("bfloat16", "bf16"), ("torch.float32", "fp32"), ("float8_e4m3fn", "fp8"), ("torch.float16", "fp16")],
)
def test_peak_knows_the_names_of_torch(dtype: str, same_as: str) -> None:
    assert load_device("h100").peak(dtype) == load_device("h100").peak(same_as)


def test_peak_falls_back() -> None:
    assert load_device("v100").peak("bf16") == load_device("v100").peak("fp16")
    assert load_device("cpu").peak("fp16") == load_device("cpu").peak("fp32")


def test_peak_says_what_there_is() -> None:
    with pytest.raises(ClusterError, match=r"no peak for 'fp4', it has fp32, tf32[\s\S]*try one of"):
        load_device("a100").peak("fp4")


def test_aliases_and_case() -> None:
    assert load_device("A100-80G") == load_device("a100")


@pytest.mark.parametrize(
    ("spec", "nodes", "per_node", "sizes"),
    [
        ("h100:64x8", 64, 8, [8, 0]),
        ("h100:8", 1, 8, [8, 0]),
        ("h100:16", 2, 8, [8, 0]),
        ("h100:4", 1, 4, [4, 0]),
        ("H100:2X4", 2, 4, [4, 0]),
        ("gb200:72", 18, 4, [72, 0]),
        ("gb200:2x2", 2, 2, [72, 0]),
        ("l40s:2", 1, 2, [2, 0]),
        ("cpu:4", 1, 4, [4, 0]),
        ("cpu:1", 1, 1, [1, 0]),
        ("tpu-v5p:64x4", 64, 4, [8960, 0]),
        ("tpu-v6e:512", 64, 8, [256, 0]),
        ("gaudi2:2x8", 2, 8, [8, 0]),
    ],
)
def test_names(spec: str, nodes: int, per_node: int, sizes: list[int]) -> None:
    cluster = load_cluster(spec)
    assert (cluster.nodes, cluster.devices_per_node) == (nodes, per_node)
    assert [link.size for link in cluster.links] == sizes
    assert cluster.device_count == nodes * per_node


@pytest.mark.parametrize("spec", ["h100:64x8", "gb300:72", "l40s:2x1", "cpu:4"])
def test_a_cluster_round_trips(spec: str) -> None:
    cluster = load_cluster(spec)
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    assert pickle.loads(pickle.dumps(cluster)) == cluster
    assert load_cluster(cluster.name) == cluster
    assert load_cluster(cluster) is cluster
    assert hash(cluster) == hash(load_cluster(spec))


def test_describe() -> None:
    text = load_cluster("h100:64x8").describe()
    for part in ("h100:64x8", "512 x NVIDIA H100", "nvlink", "joins 8", "infiniband", "joins all"):
        assert part in text


BAD_NAMES = [
    ("h10:8", "h10"),
    ("h100x:8", "h100x"),
    ("rtx9090:8", "rtx9090"),
    ("h100", "h100"),
    ("h100:", "h100:"),
    ("h100:x8", "h100:x8"),
    ("h100:0", "1 x 0 devices"),
    ("h100:0x8", "0 x 8 devices"),
    ("h100:-8", "h100:-8"),
    ("h100:8x0", "8 x 0 devices"),
    ("h100:2.5", "h100:2.5"),
    ("h100:12", "12 devices"),
    ("h100:2x16", "16 devices per node"),
    ("gb200:8x72", "72 devices per node"),
    ("h100:9999999x8", "9999999 x 8"),
    ("h100:99999999999999999999", "9999"),
    ("h100:\u0663", "h100:\u0663"),
    ("h100:8 rm -rf", "h100:8 rm"),
    ("", "''"),
    ("local:2", "local"),
    ("no/such/file.yaml", "no/such/file.yaml"),
    (None, "NoneType"),
    (8, "int"),
]


@pytest.mark.parametrize(("spec", "named"), BAD_NAMES)
def test_a_bad_name_is_refused_with_advice(spec: Any, named: str) -> None:
    with pytest.raises(ClusterError) as raised:
        load_cluster(spec)
    assert named in str(raised.value)
    assert "\n  try " in str(raised.value)


def test_did_you_mean() -> None:
    with pytest.raises(ClusterError, match=r"try .*h100"):
        load_cluster("h1000:8")


def _load(tmp_path: Path, text: str) -> Cluster:
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    return load_cluster(file)


def test_yaml_by_name(tmp_path: Path) -> None:
    cluster = _load(tmp_path, "device: h100\nnodes: 2\n")
    expected = load_cluster("h100:2x8")
    assert (cluster.name, cluster.device, cluster.links) == ("mine", expected.device, expected.links)


def test_yaml_overrides_catalogue_values(tmp_path: Path) -> None:
    text = """
name: borrowed
device:
  base: h100
  name: h100-nvl
  memory_bytes: 94 GiB
  peak_tflops: {bf16: 835}
  links:
    - {name: nvlink, gbps: 300, size: 2}
    - {name: infiniband}
nodes: 3
devices_per_node: 8
"""
    device = _load(tmp_path, text).device
    base = load_device("h100")
    assert (device.name, device.memory_bytes, device.peak("bf16")) == ("h100-nvl", 94 * 2**30, 835e12)
    assert device.peak("fp8") == base.peak("fp8")
    assert [(link.size, link.gbps) for link in device.links] == [(2, 300), (0, 50)]
    assert device.links[1] == base.links[1]
    assert device.sources["memory_bytes"] == "given in mine.yaml"


def test_yaml_links_of_its_own(tmp_path: Path) -> None:
    text = """
device: h100
nodes: 4
devices_per_node: 16
links:
  - {name: nvlink, size: 16}
  - {name: infiniband, gbps: 25, latency_s: 1e-5}
"""
    cluster = _load(tmp_path, text)
    assert [(link.name, link.size, link.gbps) for link in cluster.links] == [
        ("nvlink", 16, 450),
        ("infiniband", 0, 25),
    ]
    assert cluster.links[1].latency_s == 1e-5  # YAML 1.1 reads 1e-5 as text


def test_yaml_with_a_whole_new_device(tmp_path: Path) -> None:
    data = load_cluster("h100:8").to_dict()["device"] | {"name": "mine", "title": "My chip"}
    file = tmp_path / "new.yml"
    file.write_text(json.dumps({"device": data, "nodes": 2}))  # JSON is YAML
    assert load_cluster(str(file)).device.title == "My chip"


NVLINK = "links: [{name: nvlink, size: 8}, {name: infiniband}]"
BAD_FILES = {
    "empty": ("", "no mapping"),
    "a list": ("- 1\n- 2\n", "no mapping"),
    "text": ("h100\n", "no mapping"),
    "no device": ("nodes: 2\n", "'device' is missing"),
    "no nodes": ("device: h100\n", "'nodes' is missing"),
    "unknown key": ("device: h100\nnodez: 2\nnodes: 2\n", "mine.yaml:2"),
    "unknown key is named": ("device: h100\nnodez: 2\n", "unknown key 'nodez'"),
    "unknown device": ("device: h10\nnodes: 2\n", "h10"),
    "device is a number": ("device: 100\nnodes: 2\n", "100"),
    "unknown base": ("device: {base: h10}\nnodes: 2\n", "h10"),
    "base is a list": ("device: {base: [h100]}\nnodes: 2\n", "h100"),
    "name is a list": ("device: {name: [h100]}\nnodes: 2\n", "device"),
    "zero nodes": ("device: h100\nnodes: 0\n", "mine.yaml:2, nodes"),
    "negative nodes": ("device: h100\nnodes: -2\n", "-2"),
    "half a node": ("device: h100\nnodes: 1.5\n", "1.5"),
    "nodes in words": ("device: h100\nnodes: two\n", "two"),
    "nodes is true": ("device: h100\nnodes: true\n", "True"),
    "nodes is a mapping": ("device: h100\nnodes: {a: 1}\n", "nodes"),
    "too many": ("device: h100\nnodes: 1000000\n", "1000000 x 8"),
    "zero per node": ("device: h100\nnodes: 1\ndevices_per_node: 0\n", "devices_per_node"),
    "too many per node": ("device: h100\nnodes: 1\ndevices_per_node: 16\n", "16 devices per node"),
    "no unit": ("device: {base: h100, memory_bytes: 80}\nnodes: 1\n", "memory_bytes"),
    "unknown unit": ("device: {base: h100, memory_bytes: 80 gigs}\nnodes: 1\n", "80 gigs"),
    "not a number": ("device: {base: h100, memory_gbps: .nan}\nnodes: 1\n", "memory_gbps"),
    "infinite": ("device: {base: h100, memory_gbps: .inf}\nnodes: 1\n", "memory_gbps"),
    "negative": ("device: {base: h100, memory_gbps: -1}\nnodes: 1\n", "memory_gbps"),
    "unitless key": ("device: {base: h100, memory: 80}\nnodes: 1\n", "unknown key 'memory'"),
    "unknown dtype": ("device: {base: h100, peak_tflops: {fp12: 1}}\nnodes: 1\n", "fp12"),
    "peak is a number": ("device: {base: h100, peak_tflops: 3}\nnodes: 1\n", "peak_tflops"),
    "efficiency above 1": ("device: {base: h100, efficiency: {matmul: 1.2}}\nnodes: 1\n", "1.2"),
    "sources is a list": ("device: {base: h100, sources: [a]}\nnodes: 1\n", "sources"),
    "incomplete new device": ("device: {title: x}\nnodes: 1\n", "is missing"),
    "links is a name": ("device: h100\nnodes: 1\nlinks: nvlink\n", "nvlink"),
    "links is empty": ("device: h100\nnodes: 1\nlinks: []\n", "links"),
    "a link is a name": ("device: h100\nnodes: 1\nlinks: [nvlink]\n", "nvlink"),
    "a new link lacks values": ("device: h100\nnodes: 1\nlinks: [{name: x, size: 0}]\n", "links.0"),
    "no outermost link": ("device: h100\nnodes: 1\nlinks: [{name: nvlink}]\n", "[8]"),
    "links out of order": ("device: h100\nnodes: 1\nlinks: [{name: infiniband}, {name: nvlink}]\n", "[0, 8]"),
    "misspelt in a link": (f"device: h100\nnodes: 1\n{NVLINK[:-2]}, gbs: 3}}]\n", "unknown key 'gbs'"),
    "key twice": ("device: h100\nnodes: 1\nnodes: 2\n", "mine.yaml:3"),
    "key is a number": ("device: h100\nnodes: 1\n3: 4\n", "mine.yaml:3"),
    "not YAML": ("device: [h100\nnodes: 2\n", "mine.yaml"),
    "a tab": ("device: h100\n\tnodes: 2\n", "mine.yaml:2"),
    "two documents": ("device: h100\nnodes: 1\n---\na: b\n", "mine.yaml:3"),
    "a bad date": ("device: 2024-99-99\nnodes: 1\n", "mine.yaml"),
    "refers to itself": ("device: &a {base: h100, links: [*a]}\nnodes: 1\n", "links"),
    "deep": ("device: " + "[" * 5000 + "]" * 5000 + "\nnodes: 1\n", "mine.yaml"),
    "control character": ("device: h100\x01\nnodes: 1\n", "mine.yaml"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused_with_advice(tmp_path: Path, case: str) -> None:
    text, named = BAD_FILES[case]
    with pytest.raises(ClusterError) as raised:
        _load(tmp_path, text)
    assert named in str(raised.value)
    assert "\n  try " in str(raised.value)


def test_a_file_runs_no_code(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    with pytest.raises(ClusterError, match="python/object"):
        _load(tmp_path, f"device: !!python/object/apply:os.mkdir ['{marker}']\nnodes: 1\n")
    assert not marker.exists()


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "latin.yaml"
    file.write_bytes(b"name: caf\xe9\ndevice: h100\nnodes: 1\n")
    with pytest.raises(ClusterError, match=r"not UTF-8[\s\S]*try "):
        load_cluster(file)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"cannot read[\s\S]*try "):
        load_cluster(tmp_path)


@pytest.mark.parametrize(
    "change", [{"nodes": 0}, {"links": []}, {"extra": 1}, {"device": "h100"}, {"name": 3}]
)
def test_bad_saved_data_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ClusterError, match="try "):
        Cluster.from_dict(load_cluster("h100:8").to_dict() | change)


def test_local_on_a_machine_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cluster = load_cluster("local")
    assert (cluster.name, cluster.device.name, cluster.nodes) == ("local", "cpu", 1)
    assert cluster.device.sources["memory_bytes"] == "this machine's own"


@pytest.mark.parametrize(
    ("name", "gib", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
        ("NVIDIA H100 PCIe", 79.1, "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100"),
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA H20", 95.0, "h20"),
        ("NVIDIA GB200", 184.0, "gb200"),
        ("NVIDIA B300 SXM6 AC", 267.0, "b300"),
        ("Tesla V100-SXM2-32GB", 31.7, "v100"),
        ("AMD Instinct MI300X", 191.5, "mi300x"),
    ],
)
def test_local_recognises_a_gpu(
    monkeypatch: pytest.MonkeyPatch, name: str, gib: float, expected: str
) -> None:
    torch = pytest.importorskip("torch")
    properties = SimpleNamespace(name=name, total_memory=int(gib * 2**30))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    cluster = load_cluster("local")
    assert (cluster.device.name, cluster.device_count) == (expected, 2)
    assert cluster.device.memory_bytes == properties.total_memory


def test_local_refuses_an_unknown_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match=r"GeForce[\s\S]*try a YAML file"):
        cluster_module._recognised("NVIDIA GeForce RTX 4090", 24 * 2**30)


def test_import_needs_no_torch() -> None:
    code = "import sys, autopar.cluster as c; c.load_cluster('h100:8'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# (row of aiconfigurator-core 0.12.0's NCCL tables, op, device, devices, bytes, measured us)
MEASURED = [
    ("aicnccl-0047", "all_reduce", "a100", 8, 134217728, 1169.1),
    ("aicnccl-0023", "all_gather", "a100", 8, 134217728, 660.3),
    ("aicnccl-0094", "reduce_scatter", "a100", 8, 33554432, 210.0),
    ("aicnccl-0072", "alltoall", "a100", 8, 536870912, 2313.5),
    ("aicnccl-0041", "all_reduce", "a100", 8, 2048, 21.53),
    ("aicnccl-0143", "all_reduce", "h100", 8, 134217728, 578.74),
    ("aicnccl-0119", "all_gather", "h100", 8, 134217728, 392.82),
    ("aicnccl-0190", "reduce_scatter", "h100", 8, 33554432, 111.29),
    ("aicnccl-0168", "alltoall", "h100", 8, 536870912, 1490.42),
    ("aicnccl-0137", "all_reduce", "h100", 8, 2048, 15.68),
    ("aicnccl-0239", "all_reduce", "h200", 8, 134217728, 564.52),
    ("aicnccl-0215", "all_gather", "h200", 8, 134217728, 379.88),
    ("aicnccl-0286", "reduce_scatter", "h200", 8, 33554432, 111.62),
    ("aicnccl-0264", "alltoall", "h200", 8, 536870912, 1509.91),
    ("aicnccl-0233", "all_reduce", "h200", 8, 2048, 15.98),
    ("aicnccl-0335", "all_reduce", "b200", 8, 134217728, 398.37),
    ("aicnccl-0311", "all_gather", "b200", 8, 134217728, 206.75),
    ("aicnccl-0382", "reduce_scatter", "b200", 8, 33554432, 107.13),
    ("aicnccl-0360", "alltoall", "b200", 8, 536870912, 834.17),
    ("aicnccl-0329", "all_reduce", "b200", 8, 2048, 25.65),
    ("aicnccl-0559", "all_reduce", "b300", 8, 134217728, 391.53),
    ("aicnccl-0535", "all_gather", "b300", 8, 134217728, 204.5),
    ("aicnccl-0606", "reduce_scatter", "b300", 8, 33554432, 105.88),
    ("aicnccl-0584", "alltoall", "b300", 8, 536870912, 809.9),
    ("aicnccl-0553", "all_reduce", "b300", 8, 2048, 25.17),
    ("aicnccl-0415", "all_reduce", "gb200", 4, 134217728, 342.48),
    ("aicnccl-0399", "all_gather", "gb200", 4, 134217728, 195.27),
    ("aicnccl-0446", "reduce_scatter", "gb200", 4, 33554432, 71.5),
    ("aicnccl-0432", "alltoall", "gb200", 4, 536870912, 825.37),
    ("aicnccl-0409", "all_reduce", "gb200", 4, 2048, 16.03),
    ("aicnccl-0479", "all_reduce", "gb300", 4, 134217728, 338.78),
    ("aicnccl-0463", "all_gather", "gb300", 4, 134217728, 191.81),
    ("aicnccl-0510", "reduce_scatter", "gb300", 4, 33554432, 70.13),
    ("aicnccl-0496", "alltoall", "gb300", 4, 536870912, 786.48),
    ("aicnccl-0473", "all_reduce", "gb300", 4, 2048, 15.27),
]


@pytest.mark.parametrize(("row", "op", "device", "n", "size_bytes", "measured_us"), MEASURED)
def test_links_predict_measured_collectives(
    row: str, op: str, device: str, n: int, size_bytes: float, measured_us: float
) -> None:
    """Ring alpha-beta (Thakur et al. 2005, section 4) with the link's numbers, within 1.6x of the row."""
    link = load_device(device).links[0]
    passes = 2 if op == "all_reduce" else 1
    moved = passes * (n - 1) / n * size_bytes
    time_s = (
        link.collective_latency_s
        + passes * (n - 1) * link.latency_s
        + moved / (link.gbps * 1e9 * link.efficiency)
    )
    assert 1 / 1.6 < time_s * 1e6 / measured_us < 1.6, row


# (row of aiconfigurator-core 0.12.0's bf16 gemm tables, device, m, n, k, measured us)
MEASURED_MATMULS = [
    ("aicgemm-0061", "a100", 4096, 2048, 2048, 165.171),
    ("aicgemm-0065", "a100", 4096, 6144, 4096, 818.449),
    ("aicgemm-0021", "a100", 128, 2048, 2048, 12.595),
    ("aicgemm-0141", "h100", 4096, 2048, 2048, 46.315),
    ("aicgemm-0145", "h100", 4096, 6144, 4096, 264.669),
    ("aicgemm-0101", "h100", 128, 2048, 2048, 7.133),
    ("aicgemm-0441", "h200", 4096, 2048, 2048, 50.356),
    ("aicgemm-0445", "h200", 4096, 6144, 4096, 259.163),
    ("aicgemm-0401", "h200", 128, 2048, 2048, 6.457),
    ("aicgemm-0741", "b200", 4096, 2048, 2048, 24.41),
    ("aicgemm-0745", "b200", 4096, 6144, 4096, 143.922),
    ("aicgemm-0701", "b200", 128, 2048, 2048, 4.77),
    ("aicgemm-1941", "b300", 4096, 2048, 2048, 22.206),
    ("aicgemm-1945", "b300", 4096, 6144, 4096, 143.938),
    ("aicgemm-1901", "b300", 128, 2048, 2048, 4.226),
    ("aicgemm-1141", "gb200", 4096, 2048, 2048, 23.925),
    ("aicgemm-1145", "gb200", 4096, 6144, 4096, 138.235),
    ("aicgemm-1101", "gb200", 128, 2048, 2048, 4.221),
    ("aicgemm-1541", "gb300", 4096, 2048, 2048, 22.181),
    ("aicgemm-1545", "gb300", 4096, 6144, 4096, 123.426),
    ("aicgemm-1501", "gb300", 128, 2048, 2048, 4.305),
    ("aicgemm-2341", "l40s", 4096, 2048, 2048, 133.222),
    ("aicgemm-2345", "l40s", 4096, 6144, 4096, 954.368),
    ("aicgemm-2301", "l40s", 128, 2048, 2048, 19.388),
]


@pytest.mark.parametrize(("row", "name", "m", "n", "k", "measured_us"), MEASURED_MATMULS)
def test_devices_predict_measured_matmuls(
    row: str, name: str, m: int, n: int, k: int, measured_us: float
) -> None:
    """Roofline (Williams et al. 2009) with the device's efficiencies, within 1.5x of the row (the fit to l40s is the loosest)."""
    device = load_device(name)
    size = (m * n * k) ** (1 / 3)
    reached = device.efficiency["matmul"] * size / (size + device.matmul_half_size)
    compute_s = 2 * m * n * k / (device.peak("bf16") * reached)
    memory_s = 2 * (m * n + n * k + m * k) / (device.memory_gbps * 1e9 * device.efficiency["memory"])
    time_s = device.launch_s + max(compute_s, memory_s)
    assert 1 / 1.5 < time_s * 1e6 / measured_us < 1.5, row
