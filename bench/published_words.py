"""Words of published measurements: what names of devices, frameworks, options and dates look like in their text.

Pairs of (what is meant, pattern); patterns see lower-case text, and where one answer is wanted the first that is found
gives it. A new device, framework or option is one line here; see published_rows.py for who reads them.
"""

from __future__ import annotations

import re

# Framework by the source, then the notes; the first pattern that is found.
FRAMEWORKS = (
    ("megatron-bridge", r"megatron-bridge"),
    ("maxtext", r"maxtext"),
    ("paxml", r"\bpax(ml)?\b|paxml"),
    ("internevo", r"internevo"),
    ("litgpt", r"litgpt"),
    ("torchtune", r"torchtune"),
    ("torchtitan", r"torchtitan"),
    ("torchao", r"pytorch/ao\b|torchao"),
    ("levanter", r"levanter"),
    ("colossalai", r"colossal"),
    ("megatron-deepspeed", r"bigscience|megatron-deepspeed|habanalabs.*/gpt3"),
    ("nemo", r"\bnemo\b|_nemo|nvidia/dgxc|\bconfig_(dgx|gb\d|l40s)"),
    ("megatron", r"megatron|megascale|sc21|\bmcore"),
    ("fsdp", r"llm-foundry|mosaicml|olmo|\bfsdp|axolotl|lightning"),
    ("maxtext", r"\bjax\b|\bt5x\b|\bpalm\b|gspmd|\btpu"),
)
SHARDED = {"maxtext", "paxml", "torchtitan", "fsdp", "litgpt", "torchao", "levanter", "torchtune"}
MEGATRONS = {"megatron", "megatron-bridge", "nemo", "megatron-deepspeed"}

# Device by the gpu cell; the first pattern that is found.
DEVICES = (
    *(
        (name, rf"\b{name}")
        for name in ("gb300", "gb200", "b300", "b200", "b100", "gh200", "h200", "h800", "h20")
    ),
    ("h100-pcie", r"h100.*pcie"),
    ("h100-nvl", r"h100.*nvl"),
    ("h100", r"\bh100"),
    ("a100", r"\ba800"),
    ("a100-40g", r"\ba100.*\b40 ?gi?b?\b"),
    ("a100", r"\ba100"),
    *(
        (name, rf"\b{name}")
        for name in ("mi355x", "mi325x", "mi300x", "mi300a", "mi250x", "l40s", "l40", "v100")
    ),
    ("tpu-trillium", r"trillium|tpu[ -]?v6e?\b"),
    *((f"tpu-{name}", rf"tpu[ -]?{name}") for name in ("v5p", "v5e", "v7", "v4", "v3", "v2")),
    ("gaudi3", r"gaudi.{0,2} ?3"),
    ("gaudi2", r"gaudi.{0,2} ?2"),
    *(
        (name, rf"\b(rtx ?)?{name}\b")
        for name in ("5090", "4090", "3090", "a6000", "a40", "a30", "a10g", "a10", "l4", "t4")
    ),
)
# Devices of one node where the row doesn't say, else 4 for a TPU and 8 for others.
PER_NODE = {"gb300": 4, "gb200": 4}

# bf16 dense peak in TFLOP/s, to turn an MFU into a time; as vendors' data sheets.
PEAK_TFLOPS = {
    "a100": 312, "a100-40g": 312, "h100": 989.5, "h200": 989.5, "h800": 989.5, "b200": 2250, "b300": 2250,
    "gb200": 2450, "gb300": 2450, "v100": 125, "mi300x": 1307, "mi325x": 1307, "l40s": 362,
    "tpu-v3": 123, "tpu-v4": 275, "tpu-v5e": 197, "tpu-v5p": 459, "tpu-trillium": 918, "gaudi2": 432,
}  # fmt: skip

# Facts that a cost model could use, by what notes, cells and the model's name hold.
OPTIONS = (
    ("force-balanced", r"forced? ?-?balance"),
    ("dropless", r"dropless"),
    ("tokendrop", r"(?<!tagged )token-?drop"),
    ("deepep", r"deep-?ep"),
    ("hybridep", r"hybrid-?ep"),
    ("ep-overlap", r"ep[ _-]overlap|a2a_ovlp"),
    ("cuda-graphs", r"cuda[ _-]?graph|_cg(\b|_)"),
    ("deterministic", r"(?<!non)deterministic"),
    ("unfused-attention", r"attention-backend=(unfused|local)|\bno flash-?attention|transformer-impl=local"),
    ("flash-attention-2", r"flash-?attention-2"),
    ("flash-attention-1", r"(?<!no )flash-?attention(?!-?\d)"),
    ("local-implementation", r"transformer-impl=local|spec=local"),
    ("no-gradient-accumulation-fusion", r"no-gradient-accumulation-fusion"),
    ("launch-blocking", r"bigscience"),  # its scripts export CUDA_LAUNCH_BLOCKING=1
    ("no-reshard", r"without reshard|no reshard"),
    ("overlap-grad-reduce", r"overlap[-_]grad[-_]reduce|overlappeddistributedoptimizer"),
    ("overlap-param-gather", r"overlap(-param-gather|[-_]grad[-_]reduce_param_gather)|overlappeddistributedoptimizer"),
    ("tp-overlap", r"tp-comm-overlap|tp_overlap|async-?tp"),
    ("fp16", r"\bfp16\b"),
    ("fp32-grad-accum", r"fp32 grad"),
    ("lora", r"\blora\b|-lora\b|_lora\b"),
    ("adapter", r"with adapter"),
    ("sft", r"\bsft\b|full finetune|fine-?tuning(?! with| lora)"),
    ("packed", r"\bpacked"),
    ("strong-scaling", r"strong scaling"),
    ("compile", r"\bcompile\b|torch\.compile"),
    ("eager", r"\beager\b"),
    ("fp8-all-gather", r"float8 all-gather|fp8-param-gather"),
    ("power-limited", r"power-limited|\d+w\b cap|-\d{3}w\b"),
    ("precision-aware-optimizer", r"precision[-_]aware[-_]optimizer"),
    ("muon", r"muon"),
    ("frozen-checkpoint", r"_frozen_resume"),
    ("resumed", r"resumed second run"),
    ("dp-last", r"dp_?last"),
    ("grouped-gemm", r"grouped-?gemm"),
    ("cross-entropy-fusion", r"cross[-_]entropy[-_](loss[-_])?fusion"),
    ("activation-offload", r"activation offload|fine_grained_offloading"),
    ("cpu-offload", r"cpu[-_ ]offload|optimizer[-_ ]offload"),
    ("parallel-block", r"parallel transformer block"),
    ("sliding-window", r"sliding-window attention"),
    ("lamb", r"\blamb\b"),
    ("defer-embedding-wgrad", r"defer_embedding_wgrad"),
    ("multiple-optimizer-instances", r"multi_dist_optimizer_instances"),
    ("not-tuned", r"not well tuned"),
    ("known-regression", r"known cudnn regression"),
    ("quantised-int8", r"\bint8\b(?! unspecified)"),
    ("quantised-nf4", r"bnb\.nf4|\bqlora\b"),
    ("nvlink-400", r"\ba800"),
    ("dgx-2h", r"dgx-2h"),
    ("hbm2e", r"hbm2e"),
    ("ethernet", r"\broce|ethernet"),
    ("efa", r"\befa\b"),
    ("omnipath", r"omni-?path"),
    ("infiniband", r"\bib\b|infiniband"),
    ("nvl72", r"nvl72"),
    ("delayed-scaling", r"delayed"),
    ("current-scaling", r"fp8-?cs|current[ _-]scaling"),
    ("tensorwise", r"tensor-?wise|per-tensor"),
    ("rowwise", r"row-?wise"),
    ("blockwise", r"block-?wise"),
    ("transformer-engine", r"\(te\)|transformer-impl=transformer_engine"),
)  # fmt: skip

# The software's date where a pattern is found in "source; notes", as a year; dates such as 24.07 are read first.
YEARS = (
    *((rf"training_results_v{v}\b|mlperf training v{v}\b", y) for v, y in (
        (r"1\.0", 2021.5), (r"1\.1", 2021.9), (r"2\.0", 2022.4), (r"2\.1", 2022.8), (r"3\.0", 2024.15),
        (r"3\.1", 2024.2), (r"4\.0", 2024.3), (r"4\.1", 2024.8), (r"5\.0", 2025.4), (r"5\.1", 2025.8),
        (r"6\.0", 2026.4))),
    (r"\bsc21\b", 2021.3),
    (r"\bnsdi ?24\b", 2024.1),
    (r"\batc ?'?24\b", 2024.2),
)  # fmt: skip
MCORE_YEARS = {0: 2023.5, 5: 2024.0, 6: 2024.2, 7: 2024.3, 8: 2024.5, 9: 2024.7, 10: 2025.0, 11: 2025.2, 12: 2025.4,
          13: 2025.6, 14: 2025.7, 15: 2025.9, 16: 2026.1, 17: 2026.3}  # fmt: skip
# What is left: the time a family of documents was written.
SOURCE_YEARS = (
    (r"bigscience|bloom", 2022.1), (r"llm-foundry", 2023.9), (r"internevo", 2024.0), (r"megatronlmv1", 2019.6),
    (r"functional_tests.*lts", 2025.5), (r"functional_tests", 2025.9), (r"megatron-moe-modelzoo", 2025.8),
    (r"megatron-bridge", 2025.9), (r"dgxc", 2024.9), (r"megatron-llama", 2023.7), (r"jax-toolbox", 2023.9),
    (r"gpu-recipes", 2025.4), (r"maxtext", 2024.2), (r"levanter", 2023.45), (r"olmo", 2024.9),
    (r"colossal", 2025.3), (r"pytorch/ao", 2025.5), (r"torchtitan", 2024.7), (r"litgpt", 2023.9),
    (r"torchtune", 2024.7), (r"examples/llama", 2025.3), (r"megatron-lm readme", 2024.5),
)  # fmt: skip


# Where nothing tells the date: when runs on a device were published, the first pattern that is found.
DEVICE_YEARS = ((r"g?b300", 2025.9), (r"g?b200|mi355", 2025.5), (r"h200|h20$|h800|mi3", 2024.9), (r"h100|l40|gaudi", 2024.4),
                (r"a100", 2023.2), (r"tpu-(v5|tri)", 2024.2), (r"tpu", 2022.5), (r"v100", 2020.5))  # fmt: skip

# Micro-batch and layers per pipeline chunk (0: not interleaved) of SC21's Table 1, by billions of parameters
# (NVIDIA/Megatron-LM examples/sc21/run_table_1.sh).
SC21 = {1.7: (16, 0), 3.6: (16, 0), 7.5: (16, 0), 18.4: (8, 0), 39.1: (4, 0), 76.1: (2, 5), 145.6: (2, 5),
        310.1: (1, 3), 529.6: (1, 1), 1008.0: (1, 0)}  # fmt: skip


def source_group(source: str) -> str:
    """The family of documents a source belongs to: no commit, release, table, nor one file of many.

    >>> source_group("NVIDIA-NeMo/Megatron-Bridge docs/performance-summary-archive.md @067f987 [26.06 / DGX-GB300]")
    'NVIDIA-NeMo/Megatron-Bridge docs/performance-summary-archive.md'
    """
    text = re.sub(r"\s*@[0-9a-f]{6,}\b.*|\s*\[.*|\s*\(.*|;.*", "", source).strip()
    whole = re.match(
        r"(mlcommons/training_results|NVIDIA/dgxc-benchmarking|yanring/[\w-]+|pytorch/torchtitan|AI-Hypercomputer/[\w-]+"
        r"|NVIDIA/JAX-Toolbox|bigscience-workshop/bigscience|kwai/[\w-]+|InternLM/InternEvo"
        r"|NVIDIA/Megatron-LM tests/functional_tests|NVIDIA/Megatron-LM README)",
        text,
    )
    if whole:
        return whole.group(1)
    text = re.sub(r"\s+(Table|Fig(ure)?|README|sec(tion)?|Appendix)\b(?!\.).*", "", text) or text
    text = re.sub(r":.*", "", text)
    return re.sub(r"[-_]?v?\d+[bB](?=\.md)", "", text).strip()
