"""What a row of a published table measured: seconds per step, bytes of memory, or that it ran out.

In:  the cells of a row, and the run that was read from it. Out: numbers in seconds and bytes, or None.
"""

from __future__ import annotations

import re
from dataclasses import replace

from published_layout import LayoutReader
from published_words import MEGATRONS, PEAK_TFLOPS

from autopar.transformer_shape import TransformerShape


class MeasuredReader(LayoutReader):
    """Reads what was measured. `framework` and `year`: of the row's software, set before."""

    framework: str
    year: float

    def said_step(self) -> float | None:
        return self.number("metric_step_time_s") or self.number("iter_time_s")

    def step(
        self, shape: TransformerShape, device: str, gpus: int, batch: int, seq: int, options: set[str]
    ) -> float | None:
        """Seconds per step: as printed, else from the rate, else from TFLOP/s or MFU by the row's own definition."""
        step, rate = self.said_step(), self.number("metric_tokens_per_s_per_gpu")
        from_rate = batch * seq / (rate * gpus) if rate else None
        if step:
            if from_rate and not 0.9 < step / from_rate < 1.1:
                self.assume("step time", step, f"the printed rate gives {from_rate:.4g}")
            return step
        if from_rate:
            return from_rate
        tflops, mfu = self.number("metric_tflops_per_gpu"), self.number("metric_mfu")
        if not tflops and mfu and device in PEAK_TFLOPS:
            tflops = (mfu if mfu < 2 else mfu / 100) * PEAK_TFLOPS[device]
            self.assume("tflops", round(tflops, 1), "MFU of the bf16 peak")
        if not tflops or shape.scan_layers or {"lora", "sft"} & options:
            return None
        step = batch * self._flops_per_sequence(shape, seq) / (tflops * 1e12 * gpus)
        self.assume("step time", f"{step:.4g}", "from TFLOP/s by the row's definition")
        return step

    def _flops_per_sequence(self, shape: TransformerShape, seq: int) -> float:
        """Operations that the row's own TFLOP/s counts. SC21 (Narayanan et al. 2021, eq. 3) counts a second forward."""
        said = self.cells.get("flops_def", "").lower()
        causal = "causal" in said and not re.search(r"non-?causal|not causal", said)
        causal = causal or (self.framework in MEGATRONS and self.year >= 2025.66)  # as Megatron-LM since then
        again = 4 / 3 if re.search(r"hardware|recompute|hfu|sc21", said) else 1.0
        whole = shape.workload(seq)
        if not causal:
            whole = replace(shape, causal=False, window=0).workload(seq)
        return whole.flops_per_token() * seq * again

    def memory(self) -> tuple[float | None, str, str]:
        """Bytes, which of the allocator's counts, of which rank."""
        kind_cell = self.cells.get("mem_kind", "").lower()
        value = next(
            (
                n
                for n in map(self.number, ("mem_max_alloc_gb", "mem_reported_gb", "metric_mem_gb_per_gpu"))
                if n
            ),
            None,
        )
        if value is None:
            return None, "", ""
        binary = "gib" in kind_cell or bool(self.says(r"\bgib\b"))
        if not binary and self.framework in ("torchtitan", "torchao") and "1e9" not in kind_cell:
            binary = True
            self.assume("memory unit", "GiB", "as torchtitan prints")
        if re.search(r"reserved", kind_cell) or (
            self.framework in ("torchtitan", "torchao") and not self.number("mem_max_alloc_gb")
        ):
            kind = "reserved"
        elif re.search(r"alloc", kind_cell) or self.number("mem_max_alloc_gb"):
            kind = "allocated"
        else:
            kind = "device" if re.search(r"nvidia-smi|device", kind_cell + self.notes) else ""
        rank_cell = self.cells.get("rank_measured", "").lower() or self.notes
        rank = (
            "last" if re.search(r"\blast (global )?rank|last pp stage|last pipeline", rank_cell)
            else "max" if re.search(r"\bmax\b|peak over ranks", rank_cell)
            else "first" if re.search(r"\bfirst\b|\brank 0\b", rank_cell) and self.cells.get("rank_measured")
            else ""
        )  # fmt: skip
        return value * (2**30 if binary else 1e9), kind, rank

    def ran_out(self) -> bool:
        """Whether the row itself says so, and measured no step."""
        words = "; ".join(value for key, value in self.cells.items() if key not in ("id", "source", "model"))
        words = re.sub(
            r"(?i)(close to|near(ly)?|almost|avoid(s|ing)?|without|no|before|prevents?|not)\W+(an? )?(oom|out[- ]of[- ]memory)",
            "",
            words,
        )
        said = re.search(r"(?i)\bOOM\b|out[- ]of[- ]memory|\bOOM(s|ed)\b", words)
        return bool(said) and (self.said_step() is None)
