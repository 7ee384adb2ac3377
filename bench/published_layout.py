"""Layout of a published row: its columns first, then an MLPerf config's name, then what its framework does by default.

In:  the row's cells and options, the device, the GPU count, then the model's shape.
Out: a Layout; what the row doesn't say is named in `assumed`. Raises RowError where a layout can't be told.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from published_cells import RowError
from published_shape import ShapeReader
from published_words import MEGATRONS, PER_NODE, SC21, SHARDED

from autopar.layout import Layout
from autopar.transformer_shape import TransformerShape


class LayoutReader(ShapeReader):
    """Cells that know the layout they tell of."""

    def _config_words(self) -> dict[str, int]:
        """tp, pp, cp and mbs from the name of an MLPerf config: NODESxGPUSxMICROBATCHESxTPxPP or ..xtpAppBcpC."""
        found = self.says(r"config_\w*?_\d+x\d+x\d+x(\d+)x(\d+)(?:xmbs|_mbs)?(\d+)?")
        if found:
            return {"tp": int(found[1]), "pp": int(found[2]), "mbs": int(found[3] or 0)}
        found = self.says(r"config_\w*?tp(\d+)pp(\d+)cp(\d+)")
        if found:
            return {"tp": int(found[1]), "pp": int(found[2]), "cp": int(found[3])}
        if "sc21" in self.source:
            return self._sc21_words()
        return {}

    def _sc21_words(self) -> dict[str, int]:
        params, layers, pp = self.number("params_B") or 0.0, self.whole("layers"), self.whole("pp")
        for size, (mbs, chunk) in SC21.items():
            if abs(params / size - 1) < 0.02 and layers and pp:
                return {
                    "mbs": mbs,
                    "vpp": layers // pp // chunk if chunk and layers % (pp * chunk) == 0 else 1,
                }
        return {}

    def _layout(
        self, device: str, gpus: int, family: dict[str, Any], options: set[str]
    ) -> tuple[Layout, int]:
        words = self._config_words()
        size: dict[str, int] = {}
        for cell in ("tp", "pp", "cp"):
            size[cell] = self.whole(cell) or words.get(cell, 0)
        sharded = self.framework in SHARDED or re.search(
            r"\bfsdp\b|zero-?3", self.cells.get("zero_or_fsdp", "").lower()
        )
        deepspeed = self.framework != "megatron-deepspeed" and re.search(
            "deepspeed", self.source + self.notes
        )
        sharded = sharded or bool(deepspeed)
        for cell in ("tp", "pp"):
            if size[cell]:
                continue
            others = size["pp" if cell == "tp" else "tp"]
            if not (sharded or others or self.golden or gpus == 1 or self._small(device)):
                raise RowError("parallel sizes not stated")
            size[cell] = 1
            self.assume(cell, 1)
        size["cp"] = size["cp"] or 1
        tp, pp, cp = size["tp"], size["pp"], size["cp"]
        inside, dp = tp * pp * cp, self.whole("dp")
        if gpus % inside:
            if not dp:
                raise RowError(f"{gpus} gpus can't hold tp {tp} * pp {pp} * cp {cp}")
            self.assume("gpu_count", dp * inside, f"{gpus} as printed doesn't match the layout")
            gpus = dp * inside
        if dp and dp != gpus // inside:
            self.assume("dp", gpus // inside, f"{dp} as printed doesn't match gpus / (tp * pp * cp)")
        dp = gpus // inside
        zero, shard = self._zero(dp * cp, device)
        if zero == 3 and pp > 1 and self.framework == "torchtitan":
            zero = 2  # its FSDP keeps gathered parameters under pipeline parallelism (reshard_after_forward: default)
            self.assume("zero_or_fsdp", "zero 2", "parameters stay gathered under pp")
        mbs = self.whole("micro_batch") or words.get("mbs", 0)
        return Layout(
            dp=dp,
            tp=tp,
            pp=pp,
            cp=cp,
            vpp=words.get("vpp", self._vpp(pp)),
            zero=zero,
            shard=shard,
            mbs=mbs or 1,
            precision=self._precision(device),
            sp=self._sequence_parallel(tp),
            offload=self._offload(options),
        ), gpus

    def _small(self, device: str) -> bool:
        """One node with a sequence or more for each GPU, or a stated way to split the data: data parallel."""
        count, batch = self.whole("gpu_count"), self.whole("global_batch")
        one_node = 0 < count <= self._devices(device)
        return one_node and (bool(self.cells.get("zero_or_fsdp")) or (batch > 0 and batch % count == 0))

    @staticmethod
    def _devices(device: str) -> int:
        return PER_NODE.get(device, 8)

    def _vpp(self, pp: int) -> int:
        value = self.whole("vpp")
        return value if value and pp > 1 else 1

    def _zero(self, ranks: int, device: str) -> tuple[int, int]:
        cell = self.cells.get("zero_or_fsdp", "").lower()
        text = cell or self.notes
        found = re.search(
            r"zero[- ]?([0123])|shard_grad_op|optim_grads_params|\bhsdp|\bfsdp|dist(ributed)?[-_ ]?opt", text
        )
        if cell and found:
            word = found[0]
            like = re.search(r"zero[- ]?([0123])", cell)
            zero = int(like[1]) if like else 2 if "shard_grad_op" in cell else 3
            if not like and word.startswith("dist"):
                zero = 1
            shard = re.search(r"(?:shard|group) (\d+)|fsdp(\d{2,})|fsdp=(\d+)", cell)
            size = int(next(group for group in shard.groups() if group)) if shard else 0
            if "hsdp" in cell and not size:
                size = self._devices(device)
                self.assume("zero_or_fsdp", f"shard {size}", "one node")
            return zero, 0 if size >= ranks else size
        if cell:
            if re.search(r"\bd?dp\b|none|replicat|baseline", cell):
                if self.framework in ("megatron-bridge", "nemo") and ranks > 1:
                    self.assume("zero_or_fsdp", "zero 1", "its DDP splits the optimizer")
                    return 1, 0
                return 0, 0
            self.assume("zero_or_fsdp", "as if empty", f"{cell!r} is not understood")
        if found:
            zero = 1 if found[0].startswith("dist") or not found[1] else int(found[1])
            if "fsdp" in found[0] or found[0].startswith("optim"):
                zero = 3
            if "without reshard" in text:
                zero = 2
            return zero, 0
        if self.framework in SHARDED or self.says(r"\bdeepspeed\b(?!.*zero)"):
            zero = 3
        elif self.framework in ("megatron-bridge", "nemo", "megatron-deepspeed", "internevo"):
            zero = 1
        elif self.framework == "megatron":
            zero = 1 if self.year >= 2023 else 0
        else:
            zero = 3 if re.search("deepspeed", self.source) else 0
        if ranks > 1:
            self.assume("zero_or_fsdp", f"zero {zero}")
        return zero, 0

    def _precision(self, device: str) -> str:
        cell = self.cells.get("precision", "").lower()
        if not cell:
            found = self.says(r"\bfp8\b|\bbf16\b|\bmxfp8\b|\bnvfp4\b|\bfloat8\b")
            eight = not re.match(r"a100|v100|tpu|gaudi2|h20$", device)
            # language models of MLPerf train in fp8 where there is such a thing (its rows that say so all do); Google's
            # recipes for A4 machines default to it (their README)
            usual = ("mlcommons" in self.source and self.year >= 2023) or "gpu-recipes" in self.source
            cell = found[0] if found else "fp8" if usual and eight else "bf16"
            self.assume("precision", cell)
        low = re.sub(r"\(.*?fp32.*?\)", "", cell)
        if re.search(r"nvfp4|\bfp4|mxfp4", low):
            return "nvfp4"
        if "mxfp8" in low and "blockwise" in low:
            return "mxfp8" if re.match(r"g?b\d", device) else "fp8"
        if re.search(r"mxfp8|fp8[- ]mx", low):
            return "mxfp8"
        if re.search(r"fp8|float8|e4m3", low):
            return "fp8"
        if re.search(r"bf16|fp16|half|nf4|float16", low):
            return "bf16"
        if re.search(r"fp32|tf32|float32", low):
            return "fp32"
        self.assume("precision", "bf16", f"for {cell!r}")
        return "bf16"

    def _sequence_parallel(self, tp: int) -> bool:
        said = self.cells.get("sp", "").lower()
        if tp == 1:
            return True
        if said:
            return said not in ("0", "false", "no", "off")
        value = not (self.framework in MEGATRONS | {"other"} and self.year < 2022.5)
        if self.framework == "megatron-deepspeed":
            value = False
        self.assume("sp", int(value))
        return value

    @staticmethod
    def _offload(options: set[str]) -> str:
        activations, optimizer = "activation-offload" in options, "cpu-offload" in options
        return (
            "all"
            if activations and optimizer
            else "activations"
            if activations
            else "optimizer"
            if optimizer
            else "none"
        )

    def _experts(self, layout: Layout, shape: TransformerShape) -> Layout:
        """ep and etp, which dp * cp * tp ranks must hold."""
        ep = self.whole("ep") or 1
        if not shape.experts:
            return layout
        if not self.whole("ep"):
            self.assume("ep", 1)
        ranks = layout.dp * layout.cp * layout.tp
        found = self.says(r"\betp[ =]?(\d+)")
        etp = self.whole("etp") or (int(found[1]) if found else 0)
        if not etp:
            wide = (
                shape.expert_ffn >= 8192
            )  # fine-grained experts are not split; Megatron splits by tp unless told
            etp = layout.tp if self.golden or (wide and self.framework in MEGATRONS) else 1
            if ranks % (ep * etp):
                etp = 1
            if layout.tp > 1:
                self.assume("etp", etp)
        if ranks % (ep * etp):
            fit = gcd(ranks // gcd(ranks, etp), ep)
            self.assume("ep", fit, f"{ep} * etp {etp} doesn't divide dp * cp * tp = {ranks}")
            ep, etp = fit, gcd(ranks, etp)
        return replace(layout, ep=ep, etp=etp)

    def _recompute(self, layout: Layout, shape: TransformerShape, options: set[str]) -> Layout:
        cell = self.cells.get("recompute", "").lower()
        found = re.search(r"block[:=]?\s*(\d+)", cell)
        if not cell:
            for name, pattern in (
                ("none", r"no (activation )?(ckpt|checkpoint|recompute)"),
                ("full", r"full (activation )?recompute"),
            ):
                if self.says(pattern):
                    return replace(layout, recompute=name)
            value = self._usual_recompute(shape, options)
            self.assume("recompute", value)
            return replace(layout, recompute=value)
        if re.match(r"none|no\b|off|false|0$", cell):
            return replace(layout, recompute="none")
        if cell.startswith(("full", "yes", "true")):
            return replace(layout, recompute="full", recompute_layers=int(found[1]) if found else None)
        if not cell.startswith("selective"):
            self.assume("recompute", "selective", f"for {cell!r}")
            options.add("recompute-" + re.sub(r"\W+", "-", cell).strip("-"))
        return replace(layout, recompute="selective")

    def _usual_recompute(self, shape: TransformerShape, options: set[str]) -> str:
        if self.framework in ("maxtext", "paxml"):
            return "selective"
        old = self.framework in MEGATRONS and self.year < 2022.5
        if old or (
            self.framework in SHARDED and shape.hidden * shape.layers > 250_000 and "lora" not in options
        ):
            return "full"
        return "none"

    def _schedule(self, layout: Layout, shape: TransformerShape) -> Layout:
        vpp, schedule = layout.vpp, "1f1b"
        per_stage = shape.layers // layout.pp
        if layout.pp > 1 and vpp == 1 and not (self.whole("vpp") or "vpp" in self._config_words()):
            candidates: list[int] = []
            stages = -(-shape.layers // layout.pp)  # the ends may hold a layer fewer
            plain = self.framework in ("megatron", "nemo", "megatron-bridge", "other") and self.year >= 2023
            # at scale or with few micro-batches nobody would leave the bubble of plain 1F1B
            micro_batches = self.whole("global_batch") / (layout.dp * layout.mbs)
            wide = micro_batches > 0 and (layout.pp - 1) / micro_batches > 0.25
            if (
                plain
                and (layout.world >= 128 or wide)
                and not shape.experts
                and stages * layout.pp - shape.layers <= 2
            ):
                # what such recipes state is 1 to 4 layers per chunk, mostly 2
                candidates = [v for v in (stages // 2, stages) if v and stages % v == 0]
                per_stage = stages
            if "mlcommons" in self.source and self.framework == "nemo":
                candidates = [per_stage // 2, per_stage]
            elif self.says(r"(?<!non-)\binterleaved"):
                candidates = [2] if self.framework == "torchtitan" else list(range(2, per_stage + 1))
            fits = [v for v in candidates if v and (per_stage % v == 0 or self.framework == "torchtitan")]
            if fits:
                vpp = fits[0]
                self.assume("vpp", vpp)
        if self.says(r"dualpipe"):
            schedule, vpp = "dualpipev", 2
            self.assume("schedule", "dualpipev", "for DualPipe")
        elif self.says(r"zero[- ]bubble|\bzb-?h1\b|\bzbv\b"):
            schedule, vpp = ("zbv", 2) if self.says(r"zb-?v|v-?schedule") else ("zb-h1", vpp)
        elif self.says(r"\bgpipe\b"):
            schedule = "gpipe"
        elif vpp > 1:
            schedule = "interleaved"
        layout = replace(layout, vpp=vpp, schedule=schedule)
        return replace(layout, cuts=self._cuts(layout, shape))

    def _cuts(self, layout: Layout, shape: TransformerShape) -> tuple[int, ...]:
        """Layers per virtual stage, where the notes or a test's name say that stages differ."""
        stages = layout.pp * layout.vpp
        if layout.pp == 1:
            return ()
        ends = (
            bool(self.says("account.for.embedding")),
            bool(self.says("account.for.(embedding.)?(and.)?loss")),
        )
        if any(ends) and (shape.layers + sum(ends)) % stages == 0:
            even = (shape.layers + sum(ends)) // stages
            return tuple(even - (i == 0 and ends[0]) - (i == stages - 1 and ends[1]) for i in range(stages))
        first = self._note_number("decoder-first-pipeline-num-layers")
        last = self._note_number("decoder-last-pipeline-num-layers")
        inner = layout.pp - bool(first) - bool(last)
        rest = shape.layers - first - last
        if not (first or last) or (inner and rest % inner) or (not inner and rest):
            return ()
        ranks = [first or rest // inner, *[rest // inner] * (layout.pp - 2), last or rest // inner]
        if any(count % layout.vpp for count in ranks):
            return ()
        return tuple(ranks[i % layout.pp] // layout.vpp for i in range(stages))
