"""Rows of published measurements, as runs that the cost model can price.

In:  a CSV shaped like training.csv or memory.csv (which of the two: by its columns).
Out: `read_runs(path)` -> ([Run], [(id, why it can't be priced)]); each row is in one of them.

    llama,8,H100,BF16,tp=1,FSDP2,mbs=2 ...  ->  Run(shape=TransformerShape(..), layout=Layout(dp=8, zero=3, mbs=2), ..)

Everything follows from the columns, the notes and the source's text by rules that hold for any row: the tables of
`published_words.py`, and `model_families.toml` for what a model's name says where its cells are
empty. What a row leaves open is filled by a rule and named in `Run.assumed`.

    python bench/published_rows.py FILE.csv ..      a table of what is read and refused, by source
"""

from __future__ import annotations

import csv
import re
import sys
import tomllib
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from published_cells import RowError
from published_measured import MeasuredReader
from published_words import (
    DEVICE_YEARS,
    DEVICES,
    FRAMEWORKS,
    MCORE_YEARS,
    OPTIONS,
    PER_NODE,
    SHARDED,
    SOURCE_YEARS,
    YEARS,
    source_group,
)

from autopar.errors import AutoparError
from autopar.layout import Layout
from autopar.transformer_shape import TransformerShape

_USUAL_TOKENS = 8192  # of a micro-batch, where a source gives a rate and no batch
_FAMILIES = Path(__file__).with_name("model_families.toml")


@dataclass(frozen=True)
class Run:
    """One published measurement: what ran (shape, layout, device) and what was measured.

    `source` is the cross-validation group; `year` the software's date; `batch` counts sequences per step over all;
    `memory_kind`: allocated, reserved, device or ""; `memory_rank`: last (pipeline stage), max, first or "";
    `group`: key of the rows that differ in nothing but the layout ("" if alone); `assumed`: cells the source leaves
    open, with what was taken.
    """

    id: str
    source: str
    model: str
    kind: str
    shape: TransformerShape
    layout: Layout
    device: str
    gpus: int
    per_node: int
    batch: int
    seq: int
    framework: str
    year: float
    options: frozenset[str]
    step_time_s: float | None
    memory_bytes: float | None
    memory_kind: str
    memory_rank: str
    out_of_memory: bool
    training: bool = True
    group: str = ""
    assumed: tuple[str, ...] = ()


def read_runs(path: str | Path) -> tuple[list[Run], list[tuple[str, str]]]:
    """Every row of the CSV, as a Run or as (id, the reason it can't be priced)."""
    families = _families()
    runs: list[Run] = []
    refused: list[tuple[str, str]] = []
    with Path(path).open(newline="", encoding="utf-8-sig") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            cells = {key: (value or "").strip() for key, value in row.items() if isinstance(key, str)}
            name = cells.get("id") or f"line {number}"
            try:
                runs.append(_Reader(cells, name, families).run())
            except (RowError, AutoparError) as error:
                refused.append((name, str(error)))
            except (ValueError, ArithmeticError, KeyError, IndexError) as error:
                refused.append((name, f"unreadable: {error!r}"))
    return _grouped(runs), refused


def _grouped(runs: list[Run]) -> list[Run]:
    """Runs with `group` set where two or more layouts of one problem are known."""

    def key(run: Run) -> str:
        shape = f"{run.shape.layers}x{run.shape.hidden}"
        # Options that are the layout's own, or of no effect.
        own = ("recompute-", "activation-offload", "resumed", "frozen-checkpoint")
        about = sorted(option for option in run.options if not option.startswith(own))
        scale = (run.device, run.gpus, run.batch, run.seq, run.layout.precision, round(run.year, 2))
        return "|".join(map(str, (run.source, run.model, shape, *scale, ",".join(about))))

    layouts: dict[str, set[Layout]] = defaultdict(set)
    for run in runs:
        layouts[key(run)].add(run.layout)
    return [replace(run, group=key(run)) if len(layouts[key(run)]) > 1 else run for run in runs]


class _Reader(MeasuredReader):
    """One row being read; MeasuredReader reads what was measured, LayoutReader its layout, ShapeReader its model, Cells its cells."""

    def run(self) -> Run:
        self._refuse_what_is_no_training_run()
        device = self._device()
        family = self._family()
        framework, year = self._framework(device), self._year(device)
        self.framework, self.year = framework, year
        options = self._options(family, device)
        seq = self._seq(family, options)
        gpus = self._gpus(device, options)
        layout, gpus = self._layout(device, gpus, family, options)
        shape = self._shape(family, layout, seq, options)
        layout = self._experts(layout, shape)
        layout = self._recompute(layout, shape, options)
        layout = self._schedule(layout, shape)
        layout, batch = self._batch(layout, gpus, seq, options)
        step = self.step(shape, device, gpus, batch, seq, options)
        memory, memory_kind, memory_rank = self.memory()
        return Run(
            id=self.name,
            source=source_group(self.cells.get("source", "")),
            model=self.cells["model"],
            kind=_kind(shape),
            shape=shape,
            layout=layout,
            device=device,
            gpus=gpus,
            per_node=self._per_node(device),
            batch=batch,
            seq=seq,
            framework=framework,
            year=year,
            options=frozenset(options),
            step_time_s=step,
            memory_bytes=memory,
            memory_kind=memory_kind,
            memory_rank=memory_rank,
            out_of_memory=self.ran_out(),
            assumed=tuple(self.assumed),
        )

    def _refuse_what_is_no_training_run(self) -> None:
        if not self.cells.get("model"):
            raise RowError("no model")
        kind = self.cells.get("mem_kind", "").lower()
        if "component" in kind:
            raise RowError("one component of the memory, not a run's peak")
        if "analytical" in kind or "not measured" in kind or "formula values" in self.source:
            raise RowError("a formula's value, not a measurement")
        if re.search(r"\binference\b|\bserving\b|\bdecode\b", self.source + "; " + self.notes):
            raise RowError("inference, not training")
        if re.search(r"multimodal|llava|\bvlm\b|_vlm_", self.cells["model"].lower()):
            raise RowError("a vision encoder whose sizes the columns don't hold")

    def _device(self) -> str:
        cell = self.cells.get("gpu", "").lower().replace("_", "-")
        if not cell:
            raise RowError("gpu not stated")
        for name, pattern in DEVICES:
            if re.search(pattern, cell):
                if name == "a100" and not re.search(r"80 ?g", cell):
                    self.assume("device memory", "80 GB")
                return name
        raise RowError(f"no known device in {cell!r}")

    def _per_node(self, device: str) -> int:
        said = self.whole("gpus_per_node")
        if said:
            return said
        value = PER_NODE.get(device, 4 if device.startswith("tpu") else 8)
        if "gpus_per_node" in self.cells:
            self.assume("gpus_per_node", value)
        return value

    def _family(self) -> dict[str, Any]:
        """What the model's name says, with family names of published configs. Patterns see a lower-case name."""
        name = re.sub(r"[_\s]+", "-", self.cells["model"].lower())
        merged: dict[str, Any] = {}
        for family in self.families:
            if re.search(family["pattern"], name):
                self.families_known = True
                merged |= {key: value for key, value in family.items() if key not in ("pattern", "source")}
        return merged

    def _framework(self, device: str) -> str:
        for text in (self.source, self.notes, self.text):
            for name, pattern in FRAMEWORKS:
                if re.search(pattern, text):
                    # sharded data parallelism under tensor and pipeline stages is no plain FSDP
                    own = name == "fsdp" and self.whole("tp") > 1 and self.whole("pp") > 1
                    return "other" if own else name
        return "maxtext" if device.startswith("tpu") else "other"

    def _year(self, device: str) -> float:
        text = f"{self.source}; {self.notes}"
        for pattern, year in YEARS:
            if re.search(pattern, self.source):
                return year
        tag = r"(?<![\d.])(2\d)\.(0[1-9]|1[0-2])(?![\d])(?:\.\d+)?"
        for part in re.split(r"[;\[\]/()]", text):
            found = re.search(
                rf"(?:release|container|recipe|ngc|nemo|nvidia)[ _-]?{tag}|{tag}(?:-\d\d\.\d\d)?(?:\s|-)*(?:recipe|dev|container|release|\[)|^\s*{tag}(?:-\d\d\.\d\d)?\s*$",
                part,
            )
            if found:
                year, month = [group for group in found.groups() if group][:2]
                return round(2000 + int(year) + (int(month) - 1) / 12, 3)
        found = re.search(r"arxiv:? ?(\d\d)(\d\d)\.\d{4,5}", text)
        if found:
            return round(2000 + int(found[1]) + (int(found[2]) - 1) / 12, 3)
        found = re.search(r"(?<!\d)(20[12]\d)(0[1-9]|1[0-2])(?!\d)", text)
        if found:
            return round(int(found[1]) + (int(found[2]) - 1) / 12, 3)
        found = re.search(r"(?:mcore|megatron-core|core_r?)[ _-]?[rv]?0\.(\d+)", text)
        if found:
            return MCORE_YEARS.get(int(found[1]), 2024.5)
        for pattern, year in SOURCE_YEARS:
            if re.search(pattern, text):
                return year
        found = re.search(r"(?<![\d.])(20[12]\d)(?![\d.])", text)
        if found:
            return int(found[1]) + 0.5
        usual = next((date for pattern, date in DEVICE_YEARS if re.match(pattern, device)), 2024.5)
        if re.search(r"mxfp8|nvfp4|mxfp4", self.text):
            usual = max(usual, 2025.5)
        self.assume("year", usual, "of such devices")
        return usual

    def _options(self, family: dict[str, Any], device: str) -> set[str]:
        text = f"{self.text}; {self.source}"
        if self.golden:
            text = self.text
        options = {name for name, pattern in OPTIONS if re.search(pattern, text)}
        for part in re.findall(r"[a-z_]+", self._parts("recompute")):
            options.add(f"recompute-{part.replace('_', '-')}")
        if {"lora", "adapter"} & options:
            options.discard("sft")
        network = self._network(device)
        if network:
            options.add(f"network={network:g}")
        found = self.says(r"offload ratio alpha=(\d+(\.\d+)?)")
        if found:
            options.discard("activation-offload")
            if float(found[1]) > 0:
                options |= {"activation-offload", f"activation-offload={float(found[1]):g}"}
        if "flash-attention-1" in options and re.search(r"flash-?attention-[23]", self.notes):
            options.discard("flash-attention-1")
        if self.says(r"natural routing|w/o force"):
            options.discard("force-balanced")
        experts = self.whole("experts") or family.get("experts", 0)
        if self.framework == "megatron-bridge" and experts and not {"sft", "lora"} & options:
            options.add("force-balanced")
        if re.match(r"mi\d|gaudi", self.cells.get("gpu", "").lower()):
            options.add("not-nvidia")
        return options

    def _network(self, device: str) -> float:
        """GB/s between nodes per device, one direction, where the row says it: 4x100Gb a node of 8 is 6.25."""
        per_node = self.whole("gpus_per_node") or self._devices(device)
        for text in (self.cells.get("interconnect", "").split(" | ")[-1], self.cells.get("notes", "")):
            each = re.search(
                r"(\d+)\s*(Gb|GB)(?:ps|/s)?\s*(?:/|per )GPU|(\d+)(Gb)(?:ps|/s) RDMA per GPU", text
            )
            if each:
                amount, unit = (part for part in each.groups() if part)
                return float(amount) / (8 if unit == "Gb" else 1)
            some = re.search(
                r"(\d+)\s*x\s*(?:[A-Za-z][\w-]* ){0,4}(\d+)\s*(Gb|GB(?=/s|ps))(?:ps|/s|E|e)?\b", text
            )
            if some and "storage" not in text.lower():
                return int(some[1]) * float(some[2]) / (8 if some[3] == "Gb" else 1) / per_node
            node = re.search(r"(\d+)\s*(Gb|GB)(?:ps|/s) (?:RoCE|RDMA|IB|InfiniBand)/node", text)
            if node:
                return float(node[1]) / (8 if node[2] == "Gb" else 1) / per_node
        return 0.0

    def _parts(self, cell: str) -> str:
        found = re.search(r"selective\s*\(\[?(.*?)\]?\)", self.cells.get(cell, "").lower())
        return found[1].replace("per-op", "per_op") if found else ""

    # --- what ran ----------------------------------------------------------------------------------------------

    def _seq(self, family: dict[str, Any], options: set[str]) -> int:
        said = self.whole("seq_len")
        if said:
            return said
        found = self.says(r"\bseq(?:uence)?(?:[ _]len(?:gth)?)?[ =:]+(\d{3,6})\b")
        if found:
            self.assume("seq_len", int(found[1]), "from the notes")
            return int(found[1])
        found = self.says(r"\bdefault (\d{3,6}) likely")
        value = int(found[1]) if found else family.get("seq", 0)
        if not value or {"sft", "lora", "adapter"} & options or self.framework in ("litgpt", "torchtune"):
            raise RowError("sequence length not stated")
        self.assume("seq_len", value)
        return int(value)

    def _gpus(self, device: str, options: set[str]) -> int:
        said = self.whole("gpu_count")
        if said:
            return said
        found = re.match(r"(\d+)\s*x\b", self.cells.get("gpu", "").lower()) or re.search(
            r"\b(\d+)\s*x\s*(?:nvidia )?[abhv]\d{2,3}", self.notes
        )
        if found:
            return int(found[1])
        dp, tp, pp, cp = (self.whole(cell) for cell in ("dp", "tp", "pp", "cp"))
        if dp and tp and pp:
            self.assume("gpu_count", dp * tp * pp * max(cp, 1), "dp * tp * pp * cp")
            return dp * tp * pp * max(cp, 1)
        sharded = self.framework in SHARDED and not (tp > 1 or pp > 1 or cp > 1)
        if sharded and self.number("metric_tokens_per_s_per_gpu") and not self.whole("global_batch"):
            self.assume(
                "gpu_count", self._devices(device), "one node: a rate per device hardly depends on it"
            )
            return self._devices(device)
        if not self.golden:
            raise RowError("gpu count not stated")
        # CI of Megatron-LM: one node of 8 (4 of a GB200), release tests 64 GPUs; more where the layout needs them.
        inside = max(tp, 1) * max(pp, 1) * max(cp, 1)
        model = self.cells["model"].lower()
        found = re.search(r"(\d+)n(\d+)g", model)
        start = 64 if "release" in model else 4 if device in PER_NODE and "1node" in model else 8
        if found:
            start = int(found[1]) * int(found[2])
        count = max(start, inside, max(self.whole("ep"), 1) * max(self.whole("etp"), 1) * max(pp, 1))
        count = -(-count // inside) * inside
        self.assume("gpu_count", count)
        return count

    # --- what was measured -------------------------------------------------------------------------------------

    def _batch(self, layout: Layout, gpus: int, seq: int, options: set[str]) -> tuple[Layout, int]:
        """Sequences per step; the layout with a micro-batch that divides it."""
        mbs_said = self.whole("micro_batch") or self._config_words().get("mbs", 0)
        batch = self.whole("global_batch")
        micros = self.says(r"\bmicro_num (\d+)") or self.says(r"\bga (\d+)\b")
        per_rank = self.says(r"\b(?:local batch|batch per dp(?: group)?) (\d+)")
        if not batch:
            rate, step = self.number("metric_tokens_per_s_per_gpu"), self.said_step()
            if micros:
                batch, why = layout.mbs * int(micros[1]) * layout.dp, "micro-batches of the notes"
            elif per_rank:
                batch, why = int(per_rank[1]) * layout.dp, "batch per rank of the notes"
            elif rate and step:
                batch, why = max(1, round(rate * gpus * step / seq)), "from the rate and the step time"
            elif not mbs_said and layout.pp == 1:
                many = max(1, _USUAL_TOKENS // seq)
                batch, why = many * layout.dp, f"micro-batches of {_USUAL_TOKENS} tokens"
                layout = replace(layout, mbs=many)
                self.assume("micro_batch", many)
                mbs_said = many
            elif mbs_said and layout.pp == 1:
                batch, why = layout.mbs * layout.dp, "one micro-batch"
            else:
                many = 1 if layout.pp == 1 else 8 * layout.pp
                batch, why = layout.mbs * layout.dp * many, f"{many} micro-batches"
            self.assume("global_batch", batch, why)
        each = batch / layout.dp
        if not mbs_said:
            mbs = 1
            whole = self.framework in SHARDED or self.year < 2022.5  # early runs did not accumulate gradients
            if layout.pp == 1 and whole and each == int(each):
                mbs = min(int(each), 8) if int(each) % min(int(each), 8) == 0 else 1
            self.assume("micro_batch", mbs)
            layout = replace(layout, mbs=max(1, mbs))
        if each % layout.mbs:
            self.assume("micro-batches", round(each / layout.mbs, 3), f"{batch} doesn't split over dp * mbs")
        return layout, batch


def _kind(shape: TransformerShape) -> str:
    if shape.scan_layers:
        return "hybrid"
    if shape.kv_lora:
        return "mla"
    return "moe" if shape.experts else "dense"


def _families() -> list[dict[str, Any]]:
    with _FAMILIES.open("rb") as file:
        return list(tomllib.load(file)["family"])


def main(paths: list[str]) -> None:
    for path in paths:
        runs, refused = read_runs(path)
        with Path(path).open(newline="", encoding="utf-8") as file:
            sources = {row["id"]: source_group(row["source"]) for row in csv.DictReader(file)}
        read = Counter(run.source for run in runs)
        not_read = Counter(sources.get(name, "?") for name, _ in refused)
        why = Counter((sources.get(name, "?"), reason) for name, reason in refused)
        print(f"{path}: {len(runs)} read, {len(refused)} refused")
        for source in sorted(read.keys() | not_read.keys(), key=lambda s: -read[s] - not_read[s]):
            print(f"  {read[source]:5d} {not_read[source]:5d}  {source}")
            for (place, reason), count in why.most_common():
                if place == source:
                    print(f"               {count} x {reason}")
        cells = Counter(entry.partition(":")[0] for run in runs for entry in run.assumed)
        print("  assumed: " + ", ".join(f"{cell} {count}" for cell, count in cells.most_common()))


if __name__ == "__main__":
    main(sys.argv[1:])
