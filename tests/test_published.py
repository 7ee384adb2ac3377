"""bench/published.py end to end on a tiny handmade file, and its measures on constructed cases."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _load(name: str) -> ModuleType:
    path = Path(__file__).parents[1] / "bench" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


metrics, published = _load("metrics"), _load("published")

ROW = {
    "source": "someone/else docs/speed.md",
    "model": "Llama2-7B",
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "ffn": "11008",
    "vocab": "32000",
    "seq_len": "4096",
    "gpu": "A100-80GB",
    "gpu_count": "64",
    "gpus_per_node": "8",
    "precision": "BF16",
    "tp": "2",
    "pp": "1",
    "cp": "1",
    "dp": "32",
    "zero_or_fsdp": "ZeRO-1",
    "recompute": "none",
    "micro_batch": "1",
    "global_batch": "256",
    "metric_step_time_s": "5.0",
    "metric_tokens_per_s_per_gpu": "",
    "metric_mem_gb_per_gpu": "60",
    "notes": "Megatron-LM 2024",
}


def priced(folder: Path, *changes: dict[str, str]) -> dict[str, Any]:
    """The JSON of a file with one row per change of ROW."""
    rows = [{"id": f"row-{n}", **ROW, **change} for n, change in enumerate(changes)]
    path, out = folder / "rows.csv", folder / "out.json"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["id", *ROW])
        writer.writeheader()
        writer.writerows(rows)
    assert published.main(["--rows", str(path), "--json", str(out)]) == 0
    return dict(json.loads(out.read_text(encoding="utf-8")))


def test_the_headline_holds_the_errors_of_one_row(tmp_path: Path) -> None:
    data = priced(tmp_path, {})
    (row,) = data["rows"]
    head = data["headline"]
    assert head["step_time_median_abs_error"] == pytest.approx(abs(row["predicted_step_time_s"] / 5.0 - 1))
    assert head["memory_median_abs_error"] == pytest.approx(abs(row["predicted_memory_bytes"] / 60e9 - 1))
    assert (head["rows_priced"], head["rows_total"]) == (1, 1)


def test_what_a_file_lacks_is_null(tmp_path: Path) -> None:
    head = priced(tmp_path, {"metric_mem_gb_per_gpu": ""})["headline"]
    assert head["memory_median_abs_error"] is None
    assert head["kendall_tau"] is None
    assert head["regret"] is None


def test_a_row_without_a_price_is_listed_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = priced(tmp_path, {}, {"gpu": "Abacus"})
    assert [row["id"] for row in data["not_priced"]] == ["row-1"]
    assert data["headline"]["rows_total"] == 2
    assert "row-1" in capsys.readouterr().out


def test_figures_that_contradict_each_other_are_reported_and_counted(tmp_path: Path) -> None:
    """256 sequences of 4096 in 5 s on 64 devices are 3277 tokens per second and device."""
    data = priced(tmp_path, {"metric_tokens_per_s_per_gpu": "1638"}, {"metric_tokens_per_s_per_gpu": "3277"})
    assert [row["id"] for row in data["conflicts"]] == ["row-0"]
    assert data["headline"]["rows_priced"] == 2


@pytest.mark.parametrize("faster", [0, 1])
def test_rows_that_differ_only_in_layout_are_judged_by_their_order(tmp_path: Path, faster: int) -> None:
    """tp 8 sends far more than tp 2: measured so, the order is right; measured otherwise, the regret is the loss."""
    times = ("4.0", "5.0") if faster == 0 else ("5.0", "4.0")
    data = priced(
        tmp_path,
        {"metric_step_time_s": times[0]},
        {"tp": "8", "dp": "8", "metric_step_time_s": times[1]},
    )
    head = data["headline"]
    assert head["kendall_tau"] == (1.0 if faster == 0 else -1.0)
    assert head["regret"] == pytest.approx(0.0 if faster == 0 else 0.25)


def test_tau_counts_pairs_and_skips_ties_of_the_measurement() -> None:
    assert metrics.kendall_tau([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)
    assert metrics.kendall_tau([1, 2], [5, 5]) is None


def test_errors_keep_their_sign_in_the_bias() -> None:
    errors = metrics.Errors.of([0.8, 0.9, 1.3], [1.0, 1.0, 1.0])
    assert errors.bias == pytest.approx(-0.1)
    assert errors.median == pytest.approx(0.2)
    assert errors.within_tenth == pytest.approx(1 / 3)


def test_a_file_of_memory_tests_has_no_step_time_in_its_headline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {key: value for key, value in ROW.items() if not key.startswith("metric")}
    row |= {"id": "r", "iter_time_s": "5.0", "mem_max_alloc_gb": "60", "mem_kind": "allocated"}
    path, out = tmp_path / "rows.csv", tmp_path / "out.json"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerow(row)
    assert published.main(["--rows", str(path), "--json", str(out)]) == 0
    data = json.loads(out.read_text(encoding="utf-8"))
    assert data["headline"]["step_time_median_abs_error"] is None
    assert data["headline"]["memory_median_abs_error"] is not None
    assert data["step_time_of_tests"]["rows"] == 1
    assert "no step time in the headline" in capsys.readouterr().out
