"""Reading rows of published measurements: each rule on a handmade row, and that no row is lost."""

from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load() -> ModuleType:
    path = Path(__file__).parents[1] / "bench" / "published_rows.py"
    spec = importlib.util.spec_from_file_location("published_rows", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["published_rows"] = module
    spec.loader.exec_module(module)
    return module


rows = _load()

TRAINING = [
    "id",
    "source",
    "model",
    "params_B",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "experts",
    "topk",
    "seq_len",
    "gpu",
    "gpu_count",
    "gpus_per_node",
    "interconnect",
    "precision",
    "tp",
    "sp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "dp",
    "zero_or_fsdp",
    "recompute",
    "micro_batch",
    "global_batch",
    "metric_tflops_per_gpu",
    "metric_mfu",
    "metric_tokens_per_s_per_gpu",
    "metric_step_time_s",
    "metric_mem_gb_per_gpu",
    "flops_def",
    "evidence",
    "notes",
]
MEMORY = [
    "id",
    "source",
    "model",
    "params_B",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "experts",
    "topk",
    "seq_len",
    "gpu",
    "gpu_count",
    "precision",
    "tp",
    "sp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "etp",
    "dp",
    "zero_or_fsdp",
    "recompute",
    "micro_batch",
    "global_batch",
    "rank_measured",
    "mem_max_alloc_gb",
    "mem_steady_alloc_gb",
    "mem_reported_gb",
    "mem_kind",
    "iter_time_s",
    "evidence",
    "notes",
]

# A model nobody has heard of, with every cell that a price needs.
PLAIN = {
    "id": "r1", "source": "someone/else docs/speed.md @0123456 [table 1]", "model": "Zebra-9B", "layers": 40,
    "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 64000, "seq_len": 4096, "gpu": "H100-80GB",
    "gpu_count": 64, "gpus_per_node": 8, "precision": "BF16", "tp": 4, "pp": 2, "cp": 1, "dp": 8,
    "zero_or_fsdp": "ZeRO-1", "recompute": "none", "micro_batch": 2, "global_batch": 128, "metric_step_time_s": 7.5,
}  # fmt: skip


def read(tmp_path: Path, *given: dict[str, object], columns: list[str] = TRAINING):  # type: ignore[no-untyped-def]
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(given)
    runs, refused = rows.read_runs(path)
    assert len(runs) + len(refused) == len(given)
    return runs, refused


def one(tmp_path: Path, columns: list[str] = TRAINING, **changes: object):  # type: ignore[no-untyped-def]
    cells = {key: value for key, value in (PLAIN | changes).items() if key in columns}
    runs, refused = read(tmp_path, cells, columns=columns)
    assert not refused
    return runs[0]


def test_an_unknown_model_with_complete_columns_is_priced_from_them(tmp_path: Path) -> None:
    run = one(tmp_path)
    assert str(run.layout) == "dp=8,tp=4,pp=2,zero=1,mbs=2,recompute=none,precision=bf16"
    assert (run.shape.layers, run.shape.kv_heads, run.shape.gated, run.kind) == (40, 8, True, "dense")
    assert (run.device, run.gpus, run.batch, run.seq, run.step_time_s) == ("h100", 64, 128, 4096, 7.5)
    assert run.source == "someone/else docs/speed.md"


def test_what_the_row_leaves_open_is_named(tmp_path: Path) -> None:
    run = one(tmp_path, micro_batch="", recompute="")
    assert {"micro_batch: 1", "recompute: none"} <= set(run.assumed)


@pytest.mark.parametrize(
    ("text", "gpu", "precision"),
    [
        ("FP16/BF16 mixed", "H100", "bf16"),
        ("BF16(fp32 grad acc)", "H100", "bf16"),
        ("FP8-rowwise", "H100", "fp8"),
        ("FP8-CS", "GB200", "fp8"),
        ("FP8-MX", "GB200", "mxfp8"),
        ("MXFP8/FP8-blockwise", "H100", "fp8"),
        ("MXFP8/FP8-blockwise", "B200", "mxfp8"),
        ("NVFP4", "GB300", "nvfp4"),
        ("TF32", "A100-40GB", "fp32"),
    ],
)
def test_precision(tmp_path: Path, text: str, gpu: str, precision: str) -> None:
    assert one(tmp_path, precision=text, gpu=gpu).layout.precision == precision


@pytest.mark.parametrize(
    ("text", "zero", "shard"),
    [
        ("DDP", 0, 0),
        ("DDP+distopt", 1, 0),
        ("ZeRO-1(group 4)", 1, 4),
        ("ZeRO-1(group -1)", 1, 0),
        ("FSDP SHARD_GRAD_OP", 2, 0),
        ("FSDP(ZeRO-2 like)", 2, 0),
        ("FSDP2", 3, 0),
        ("FSDP(shard 4)", 3, 4),
        ("FSDP(shard 64)", 3, 0),
        ("Megatron-FSDP optim_grads_params", 3, 0),
    ],
)
def test_zero(tmp_path: Path, text: str, zero: int, shard: int) -> None:
    layout = one(tmp_path, zero_or_fsdp=text).layout
    assert (layout.zero, layout.shard) == (zero, shard)


@pytest.mark.parametrize(
    ("cell", "device"),
    [
        ("A800-80GB", "a100"),
        ("A100-SXM4-40GB", "a100-40g"),
        ("H100-SXM5-80GB", "h100"),
        ("H100 PCIe", "h100-pcie"),
        ("B200(power-limited)", "b200"),
        ("MI325X 256GB HBM3e", "mi325x"),
        ("TPU-v5p", "tpu-v5p"),
        ("TPU-trillium", "tpu-trillium"),
        ("IntelR GaudiR 2 AI Accelerator", "gaudi2"),
    ],
)
def test_device(tmp_path: Path, cell: str, device: str) -> None:
    assert one(tmp_path, gpu=cell).device == device


@pytest.mark.parametrize(
    ("text", "kind"),
    [("full", "full"), ("selective(norm,act)", "selective"), ("none", "none"), ("full/block:3", "full")],
)
def test_recompute(tmp_path: Path, text: str, kind: str) -> None:
    layout = one(tmp_path, recompute=text).layout
    assert layout.recompute == kind
    assert layout.recompute_layers == (3 if "block" in text else None)


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("4x100Gb RoCE/node", "network=6.25"),
        ("1600Gbps RoCE/node", "network=25"),
        ("400Gbps/GPU RDMA", "network=50"),
        ("IB 8x50GB/s", "network=50"),
        ("NVLINK Gen4 900 GB/s | 8x ConnectX-7 IB NDR 400Gb/s", "network=50"),
    ],
)
def test_network_per_device(tmp_path: Path, text: str, network: str) -> None:
    assert network in one(tmp_path, interconnect=text).options


def test_virtual_stages_are_interleaved(tmp_path: Path) -> None:
    assert one(tmp_path, vpp=5).layout.schedule == "interleaved"


def test_a_cell_with_words_keeps_its_number(tmp_path: Path) -> None:
    run = one(tmp_path, tp="4 (intra-node)", gpu_count="64(8x8)", global_batch="1,024", seq_len="8k")
    assert (run.layout.tp, run.gpus, run.batch, run.seq) == (4, 64, 1024, 8192)


def test_dp_follows_from_the_gpus(tmp_path: Path) -> None:
    run = one(tmp_path, dp=5)
    assert run.layout.world == 64
    assert any(entry.startswith("dp: 8") for entry in run.assumed)


def test_step_time_from_the_rate(tmp_path: Path) -> None:
    run = one(tmp_path, metric_step_time_s="", metric_tokens_per_s_per_gpu=1000)
    assert run.step_time_s == pytest.approx(128 * 4096 / 64000)


def test_step_time_from_operations_is_longer_when_recompute_counts(tmp_path: Path) -> None:
    rate = {"metric_step_time_s": "", "metric_tflops_per_gpu": 400}
    plain = one(tmp_path, flops_def="model_flops_full_attention", **rate).step_time_s
    again = one(tmp_path, flops_def="hardware_flops_with_full_recompute", **rate).step_time_s
    assert again == pytest.approx(plain * 4 / 3)


def test_an_mlperf_config_name_gives_the_layout(tmp_path: Path) -> None:
    run = one(
        tmp_path, source="mlcommons/training_results_v4.0 NVIDIA/results/x_ngc24.04_nemo/gpt3", tp="", pp="",
        micro_batch="", notes="config config_DGXH100_8x8x6x4x2_mbs2_cg.sh",
    )  # fmt: skip
    assert (run.layout.tp, run.layout.pp, run.layout.mbs) == (4, 2, 2)
    assert (run.framework, run.year, run.source) == ("nemo", 2024.3, "mlcommons/training_results")
    assert "cuda-graphs" in run.options


def test_an_unknown_mixture_takes_the_width_as_the_experts(tmp_path: Path) -> None:
    run = one(tmp_path, experts=64, topk=6, ffn=1408, ep=8)
    assert (run.kind, run.shape.expert_ffn, run.layout.ep) == ("moe", 1408, 8)


def test_deepseek_gets_its_latent_attention_and_dense_layers(tmp_path: Path) -> None:
    run = one(
        tmp_path, model="DeepSeek-V3", layers=61, hidden=7168, heads=128, kv_heads="", ffn=2048, vocab=129280,
        experts=256, topk=8, tp=1, pp=4, ep=16,
    )  # fmt: skip
    shape = run.shape
    assert (shape.kv_lora, shape.rope_dim, shape.dense_layers, shape.ffn, shape.expert_ffn) == (
        512,
        64,
        3,
        18432,
        2048,
    )
    assert run.kind == "mla"


def test_a_proxy_takes_its_layers_from_the_row(tmp_path: Path) -> None:
    bare = {"layers": "", "hidden": "", "heads": "", "kv_heads": "", "ffn": "", "vocab": ""}
    assert one(tmp_path, model="Llama3.1-405B", **bare).shape.layers == 126
    assert one(tmp_path, model="Llama3.1-405B-proxy-8L", **bare).shape.layers == 8


def test_published_sizes_give_the_published_parameters(tmp_path: Path) -> None:
    bare = {"layers": "", "hidden": "", "heads": "", "kv_heads": "", "ffn": "", "vocab": "", "tp": 1, "pp": 1}
    for model, billions in (("Llama3-8B", 8.03), ("Nemotron_3_Nano", 31.6), ("Nemotron_3_Super", 120.7), ("Qwen3-235B-A22B", 235.1)):  # fmt: skip
        shape = one(tmp_path, model=model, **bare).shape
        assert shape.workload(4096).parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_lora_freezes_the_model(tmp_path: Path) -> None:
    run = one(tmp_path, notes="Finetuning; task LoRA")
    assert run.shape.frozen
    assert "lora" in run.options
    assert "sft" not in run.options


@pytest.mark.parametrize(
    ("source", "notes", "year"),
    [
        ("a/b", "release 26.06.01; Pre-Training", 2026.417),
        ("a/b", "24.11; MFU peak", 2024.833),
        ("a/b", "25.04-25.05 recipe", 2025.25),
        ("Some paper (arXiv 2402.15627) Table 2", "", 2024.083),
        ("a/b", "time-to-train 24.11 min", 2024.4),
    ],
)
def test_year(tmp_path: Path, source: str, notes: str, year: float) -> None:
    assert one(tmp_path, source=source, notes=notes).year == pytest.approx(year, abs=0.01)


def test_a_run_out_of_memory_is_kept_without_measures(tmp_path: Path) -> None:
    run = one(tmp_path, metric_step_time_s="OOM")
    assert run.out_of_memory
    assert run.step_time_s is None
    assert not one(tmp_path, notes="too close to OOM").out_of_memory


def test_rows_that_differ_in_layout_alone_share_a_group(tmp_path: Path) -> None:
    other = PLAIN | {"id": "r2", "tp": 8, "dp": 4}
    alone = PLAIN | {"id": "r3", "global_batch": 256}
    runs, _ = read(tmp_path, PLAIN, other, alone)
    assert runs[0].group == runs[1].group != ""
    assert runs[2].group == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": "Abacus"}, "device"),
        ({"gpu_count": ""}, ""),
        ({"tp": "", "pp": ""}, "parallel sizes"),
        ({"seq_len": ""}, "sequence length"),
        ({"hidden": ""}, "model sizes"),
        ({"gpu_count": 63, "dp": ""}, "can't hold"),
        ({"model": "some_vlm_pretrain"}, "vision"),
        ({"model": ""}, "no model"),
        ({"kv_heads": 64}, "above heads"),
    ],
)
def test_what_cannot_be_priced_is_refused_with_its_reason(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    runs, refused = read(tmp_path, PLAIN | changes, PLAIN)
    if reason:
        assert reason in refused[0][1]
    else:
        assert runs[0].gpus == 64  # dp * tp * pp


GOLDEN = {
    "source": "NVIDIA/Megatron-LM tests/functional_tests/test_cases/gpt/x/golden_values_dev_dgx_h100.json @d98e8a64",
    "model": "gpt/gpt3_mcore_te_tp2_pp2_resume", "layers": 12, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 2048,
    "vocab": "", "seq_len": 1024, "gpu_count": 8, "tp": 2, "pp": 2, "dp": "", "zero_or_fsdp": "DDP", "micro_batch": 4,
    "global_batch": 32, "sp": 0, "mem_max_alloc_gb": 2.5,
    "mem_kind": "torch caching-allocator peak bytes /1e9; no CUDA context/NCCL buffers",
    "rank_measured": "last global rank (last PP stage)",
    "notes": "env dev; deterministic-mode;no-gradient-accumulation-fusion;attention-backend=unfused",
}  # fmt: skip


def test_a_megatron_golden_row(tmp_path: Path) -> None:
    run = one(tmp_path, MEMORY, **GOLDEN)
    assert (run.memory_bytes, run.memory_kind, run.memory_rank) == (2.5e9, "allocated", "last")
    assert run.shape.vocab == 50432  # 50257 padded to 128 * tp
    assert run.shape.unfused_attention
    assert run.shape.tied
    assert not run.layout.sp
    assert {"deterministic", "no-gradient-accumulation-fusion", "unfused-attention"} <= run.options


def test_uneven_stages_of_a_golden_row(tmp_path: Path) -> None:
    notes = "env dev; decoder-first-pipeline-num-layers=2;decoder-last-pipeline-num-layers=2"
    assert one(tmp_path, MEMORY, **GOLDEN | {"tp": 1, "pp": 4, "notes": notes}).layout.cuts == (2, 4, 4, 2)
    notes = "env dev; account-for-embedding-in-pipeline-split;account-for-loss-in-pipeline-split"
    split = GOLDEN | {"tp": 1, "pp": 4, "vpp": 2, "layers": 6, "notes": notes}
    assert one(tmp_path, MEMORY, **split).layout.cuts == (0, 1, 1, 1, 1, 1, 1, 0)


def test_parts_formulas_and_inference_are_no_runs(tmp_path: Path) -> None:
    plain = {key: value for key, value in PLAIN.items() if key in MEMORY}
    _, refused = read(
        tmp_path,
        plain | {"mem_kind": "GB, component: activations"},
        plain | {"mem_kind": "analytical model-state GB (not measured)"},
        plain | {"source": "a/b tables.md [Single-GPU Inference]"},
        columns=MEMORY,
    )
    assert len(refused) == 3


@pytest.mark.parametrize(
    ("gpu", "earlier"), [("GB300", "H100"), ("H100", "A100-80GB"), ("A100-80GB", "V100")]
)
def test_without_a_date_a_newer_device_means_newer_software(tmp_path: Path, gpu: str, earlier: str) -> None:
    source = "a/b"
    assert one(tmp_path, gpu=gpu, source=source).year > one(tmp_path, gpu=earlier, source=source).year


def test_an_unknown_framework_on_a_tpu_is_jax(tmp_path: Path) -> None:
    assert one(tmp_path, gpu="TPU v4", source="a/b").framework == "maxtext"


@pytest.mark.parametrize(
    ("source", "gpu", "precision"),
    [
        ("mlcommons/training_results_v5.0 AMD/results/x/llama2_70b_lora", "MI300X", "fp8"),
        ("mlcommons/training_results_v5.0 x/results/x/llama2_70b_lora", "A100-80GB", "bf16"),
        ("a/b", "H100", "bf16"),
    ],
)
def test_an_open_precision_is_what_such_sources_use(
    tmp_path: Path, source: str, gpu: str, precision: str
) -> None:
    assert one(tmp_path, source=source, gpu=gpu, precision="").layout.precision == precision


def test_sc21s_recipes_give_its_micro_batch_and_chunks(tmp_path: Path) -> None:
    run = one(
        tmp_path, source="Narayanan et al. SC21 Table 1", params_B="145.6", layers="80", hidden="12288", heads="96",
        kv_heads="", ffn="49152", gpu="A100-80GB", gpu_count="1536", tp="8", pp="8", dp="24", micro_batch="",
        global_batch="2304",
    )  # fmt: skip
    assert (run.layout.mbs, run.layout.vpp) == (2, 2)


def test_a_rate_without_a_batch_means_micro_batches_that_fill_a_device(tmp_path: Path) -> None:
    run = one(
        tmp_path, tp="1", pp="1", dp="64", seq_len="2048", micro_batch="", global_batch="", metric_step_time_s="",
        metric_tokens_per_s_per_gpu="5000",
    )  # fmt: skip
    assert run.layout.mbs * run.seq == 8192
    assert run.batch == run.layout.mbs * 64
    assert run.step_time_s == pytest.approx(8192 / 5000)
