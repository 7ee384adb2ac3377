"""Rates: seconds of the kernels of training on one device with one software stack; arrays in, arrays out.

The roofline of `compute.py` with what end-to-end runs add to it: the clock a device sustains under load, the attention
kernels of an era, what 8-bit recipes quantize, how grouped products of experts fall behind single ones.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Device
from autopar.cost.software import Software

Array = NDArray[Any]
Data = Mapping[str, Any]

# Attention kernels from old to new; a device without a constant for one takes the newest that it has below it.
KERNELS = ("flash1", "flash2", "flash3")
# Sequence length at which a fused attention kernel reaches half its speed, and head size of full speed (FlashAttention-2
# README, figures for A100 and H100: head size 64 runs at 0.8 to 0.9 of 128, 512 tokens at 0.5 to 0.6 of 16384).
HALF_SEQUENCE, FULL_HEAD = 512.0, 128.0
# Bytes that quantizing one element of an operand moves: read 16 bits, write 8 bits and their transpose.
QUANTIZE_BYTES = 4.0
# Matmul dims of which this is no divisor leave tiles of the tensor cores part empty (NVIDIA, "Matrix Multiplication
# Background User's Guide", section 4: multiples of 128 bytes on A100).
ALIGNED = 64
# The units of a device work on tiles of a product, as many at once as there are units; its last round is part empty,
# half on average (NVIDIA, "Matrix Multiplication Background User's Guide", section 3: wave quantization).
TILE, EMPTY_ROUND = 128.0 * 256.0, 0.5
# A head size that is no multiple of this keeps the products of unfused attention off the tensor cores' fast kernels;
# speed of those it gets (BLOOM's chronicles, "NHEADs comparison": 108 beside 104 and 112).
HEAD_ALIGNED, UNALIGNED_HEAD = 8, 0.3


@cache
def calibration() -> dict[str, Any]:
    """`calibration.toml`."""
    return tomllib.loads(files("autopar.cost").joinpath("calibration.toml").read_text(encoding="utf-8"))


def family_of(device: Device, data: Data) -> dict[str, Any]:
    """The constants of a device's family over those of the default family, which stand for unknown devices."""
    name = data["devices"].get(device.name, device.name)
    families = data["family"]
    return {**families["default"], **families.get(name, {})}


@dataclass(frozen=True)
class Rates:
    """FLOP/s and bytes/s after all losses. `matmul`: by precision, in the order of `layout.PRECISIONS`; `memory`: of
    matmuls' operands; `stream`: of pointwise kernels; `grouped`: speed of a product of many experts beside a single
    one, `around_experts` of what surrounds it; `quantize`: seconds per element; `host_s`: per kernel launched from the host."""

    matmul: tuple[float, ...]
    half_size: float
    edge: float
    memory: float
    stream: float
    grouped: float
    around_experts: float
    quantize: float
    launch_s: float
    host_s: float
    attention_f: float
    attention_b: float
    unfused: bool
    unaligned: float
    within: float
    across: float
    units: float

    @staticmethod
    def of(device: Device, software: Software, data: Data | None = None) -> Rates:
        """The rates of `device` under `software`. `data`: constants other than those of calibration.toml."""
        facts = family_of(device, calibration() if data is None else data)
        sustained = facts["sustained"]
        kernels = device.efficiency["matmul"] * sustained * software.matmul
        bf16 = device.peak("bf16") * kernels
        # fp32 products run in tf32 where there is such a thing; else bf16 units take three to six passes
        single = _peak(device, "tf32") or _peak(device, "fp32") or device.peak("bf16") / 4
        eight, four = _peak(device, "fp8"), _peak(device, "fp4")
        fp8 = eight * kernels * facts["fp8"] if eight else bf16
        mxfp8 = eight * kernels * facts["mxfp8"] if eight else bf16
        fp4 = four * kernels * facts["fp4"] if four else mxfp8
        memory = device.memory_gbps * 1e9 * device.efficiency["memory"]
        stream = memory * facts["stream"] * software.stream
        attention = device.peak("bf16") * sustained * facts["attention_speed"]
        forward, backward = _attention(facts["attention"], software.attention)
        return Rates(
            matmul=(single * kernels, bf16, fp8, mxfp8, fp4),
            half_size=device.matmul_half_size,
            edge=facts["edge"],
            memory=memory,
            stream=stream,
            grouped=software.grouped,
            around_experts=software.expert_stream,
            quantize=QUANTIZE_BYTES * software.quantize / memory,
            launch_s=device.launch_s * software.launch,
            host_s=software.kernel_s * facts["host"],
            attention_f=attention * forward,
            attention_b=attention * backward,
            unfused=software.attention == "unfused",
            unaligned=facts["unaligned"],
            within=facts["within"],
            across=facts["across"],
            units=facts["units"],
        )

    def matmul_s(self, m: Any, n: Any, k: Any, count: Any, precision: Any, quantized: bool = True) -> Array:
        """One product of [m, k] x [k, n], `count` of them in one kernel. `quantized`: in 8 or 4 bits, the left operand
        is brought into them first (a weight gradient's are there already)."""
        side = np.cbrt(m * n * k)
        least = np.minimum(np.minimum(m, n), k)
        rate = (
            np.asarray(self.matmul)[precision] * side / (side + self.half_size) * least / (least + self.edge)
        )
        rounds = m * n * count / (TILE * self.units)
        rate = rate * rounds / (rounds + EMPTY_ROUND)
        rate = rate * np.where(np.mod(n, ALIGNED) + np.mod(k, ALIGNED) == 0, 1.0, self.unaligned)
        rate = rate * np.where(np.asarray(count) > 1, self.grouped, 1.0)
        flops = 2.0 * m * n * k * count
        moved = 2.0 * count * (m * k + k * n + m * n)
        seconds = self.launch_s + np.maximum(flops / rate, moved / self.memory)
        if quantized:
            each = np.where(np.asarray(count) > 1, self.quantize / self.around_experts, self.quantize)
            seconds = seconds + np.where(np.asarray(precision) >= 2, count * (m * k) * each, 0.0)
        return np.asanyarray(seconds)

    def attention_s(
        self, flops: Array, moved: Array, scores: Array, dim: int, keys: float
    ) -> tuple[Array, Array]:
        """(forward, backward); `keys`: that a query can see; `scores`: bytes of the whole score matrix, which an unfused
        kernel moves: written by the product, read and written by the softmax (and dropout), read by the second product;
        backward likewise for scores and their gradients. A fused backward does 5 products for the forward's 2 (Dao
        2023, FlashAttention-2, section 3.1)."""
        if self.unfused:
            rate = (
                self.matmul[1]
                * keys
                / (keys + HALF_SEQUENCE)
                * (1.0 if dim % HEAD_ALIGNED == 0 else UNALIGNED_HEAD)
            )
            products = 2.0 * flops / rate  # no causal half is left out
            return (
                products + 5.0 * scores / self.stream + 6 * self.launch_s,
                2 * products + 8.0 * scores / self.stream + 8 * self.launch_s,
            )
        grow = keys / (keys + HALF_SEQUENCE) * (min(1.0, dim / FULL_HEAD) ** 0.3)
        forward = np.maximum(flops / (self.attention_f * grow), moved / self.memory) + self.launch_s
        backward = (
            np.maximum(2.5 * flops / (self.attention_b * grow), 3 * moved / self.memory) + 2 * self.launch_s
        )
        return forward, backward

    def stream_s(self, moved: Array, kernels: int) -> Array:
        """A memory-bound op that moves `moved` bytes in `kernels` launches."""
        return np.asanyarray(moved / self.stream + kernels * self.launch_s)


def _peak(device: Device, dtype: str) -> float:
    """Peak FLOP/s of a dtype, 0 where the device has none."""
    return device.peak(dtype) if dtype in device.peak_tflops else 0.0


def _attention(known: Mapping[str, list[float]], kernel: str) -> tuple[float, float]:
    """(forward, backward) share of the peak that an attention kernel reaches."""
    if kernel not in KERNELS:
        return 1.0, 1.0
    older = [name for name in KERNELS[: KERNELS.index(kernel) + 1] if name in known]
    chosen = known[older[-1] if older else next(iter(known))]
    return float(chosen[0]), float(chosen[1])
