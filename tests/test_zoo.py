"""Some of the zoo, one of each mechanism: two simulated ranks give the unsharded loss and every gradient.

The whole zoo is `make zoo`; the same on processes, with fewer models, is tests/runtime.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.zoo import load_cells, run_all
from bench.zoo_models import WELL_KNOWN, zoo_types
from bench.zoo_page import page
from bench.zoo_run import Built, Cell, WrongNumbersError, compare_gradients, run_model

DOZEN = {
    "llama": "grouped heads",
    "gemma2": "sliding and full attention in turn, softcaps",
    "deepseek_v3": "latent attention, dense layers before experts in groups",
    "mixtral": "experts by softmax",
    "gpt_oss": "attention sinks, experts with biases",
    "bert": "an encoder",
    "t5": "encoder and decoder, relative positions",
    "vit": "images",
    "llava": "images among text",
    "bamba": "Mamba and attention layers",
    "whisper": "audio",
    "qwen3_next": "linear attention",
    "wav2vec2": "a CTC loss",
    "qwen4_exp_text": "blocks of keys chosen for each query",
}


# Five to ten seconds to capture.
SLOW = {"qwen3_next", "qwen4_exp_text"}


@pytest.mark.parametrize(
    "model_type", [pytest.param(kind, marks=[pytest.mark.slow] if kind in SLOW else []) for kind in DOZEN]
)
@pytest.mark.timeout(120)
def test_two_ranks_equal_one(model_type: str) -> None:
    torch.set_num_threads(1)
    for cell in run_model(model_type, ("tp2",)):
        assert cell.status in ("pass", "none"), f"{cell.step}: {cell.reason} ({cell.where})"
        if cell.step == "tp2 forced":
            assert cell.status == "pass"
            assert cell.facts["split ops"] > 0


def test_wrong_gradients_are_seen() -> None:
    whole = Built(torch.nn.Linear(1, 1), {}, 1.0, {"w": torch.ones(4), "b": torch.zeros(2)})

    assert compare_gradients(whole, [1.0], [{"w": torch.ones(4), "b": torch.zeros(2)}])["gradient"] == 0.0
    assert compare_gradients(whole, [1.0], [{"w": 2 * torch.ones(4), "b": torch.zeros(2)}])["gradient"] == 1.0
    assert compare_gradients(whole, [1.1], [{"w": torch.ones(4)}])["loss"] == pytest.approx(0.1)
    with pytest.raises(WrongNumbersError):
        compare_gradients(whole, [1.0], [{"b": torch.zeros(2)}])


def test_every_type_with_a_plan_is_in_the_zoo() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    names = {one.model_type for one in zoo_types()}

    assert {
        kind for kind in CONFIG_MAPPING if getattr(CONFIG_MAPPING[kind], "base_model_tp_plan", None)
    } <= names
    assert set(WELL_KNOWN) <= names


def test_a_worker_that_dies_or_hangs_fails_its_model_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the worker that does what each model is named for."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, os, sys, time\n"
        "for line in sys.stdin:\n"
        "    model = json.loads(line)['model']\n"
        "    print(json.dumps(dict(model=model, step='build', status='pass', reason='', where='', seconds=0, facts={})),"
        " flush=True)\n"
        "    if model == 'dies': os._exit(3)\n"
        "    if model == 'hangs': time.sleep(60)\n"
        "    print(json.dumps(dict(done=model)), flush=True)\n"
    )
    monkeypatch.setattr("bench.zoo.WORKER", [str(script)])
    monkeypatch.setattr("bench.zoo.TIME_LIMIT_S", 2.0)

    run = run_all(["dies", "good", "hangs", "fine"], ("tp2",), jobs=1, log=tmp_path / "log", quiet=True)

    assert "died" in run.cells["dies"]["capture"]["reason"]
    assert "not done" in run.cells["hangs"]["capture"]["reason"]
    assert all(list(run.cells[name]) == ["build"] for name in ("good", "fine"))


def test_cells_are_saved_and_shown(tmp_path: Path) -> None:
    cells = [Cell("llama", "build", "pass"), Cell("llama", "capture", "fail", "CaptureError: no", "x.py:1")]
    saved = tmp_path / "cells.json"
    saved.write_text("".join(json.dumps(cell.to_dict()) + "\n" for cell in cells))
    run = load_cells(saved)
    text = page(run, zoo_types(), None)

    assert "| llama | pp tp | ok | FAIL |" in text
    assert "**capture** llama: CaptureError: no (`x.py:1`)" in text
    assert "mixtral" in text.split("**not run**")[1]
