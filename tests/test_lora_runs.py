"""LoRA from the command line: only adapters are trained, saved and resumed; PEFT and Transformers load what comes out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from autopar.adapter import base_digest, merge
from autopar.errors import AutoparError, ModelError, UsageError
from autopar.models.source import find_model
from autopar.runtime.checkpoint import newest, read_about, read_checkpoint_index
from tests.tiny import MODELS

pytest.importorskip("peft")
LORA = "r=4,alpha=8,targets=q_proj,o_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    MODELS["llama"]().save_pretrained(folder)  # type: ignore[operator]
    return folder


def train(base: Path, out: Path, *more: str, cluster: str = "cpu:1") -> list[dict[str, float]]:
    """The lines of a run; raises AssertionError with what it said if it failed."""
    command = [
        sys.executable, "-m", "autopar", "train", str(base), "-c", cluster, "--batch", "4", "--seq", "16", "--lr", "0.01",
        "--lora", LORA, "--json", "-q", "--out", str(out), "--timeout", "60", *more,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    """Two steps on two processes, and two more on one."""
    out = tmp_path_factory.mktemp("run") / "out"
    lines = train(base, out, "--steps", "2", "--mesh", "tp=2", cluster="cpu:2")
    return out, lines + train(base, out, "--steps", "4", "--resume")


def test_a_run_goes_on_elsewhere(
    base: Path, run: tuple[Path, list[dict[str, float]]], tmp_path: Path
) -> None:
    straight = train(base, tmp_path / "straight", "--steps", "4", "--no-export")
    assert [line["step"] for line in run[1]] == [1, 2, 3, 4]
    for one, other in zip(straight, run[1], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-4)
    assert straight[-1]["loss"] < straight[0]["loss"]


def test_only_adapters_are_saved(run: tuple[Path, list[dict[str, float]]]) -> None:
    _, index = read_checkpoint_index(newest(run[0]))
    parameters = [name for name in index if name.startswith(("model/", "optimizer/"))]
    assert len([name for name in parameters if name.startswith("model/")]) == 2 * 2 * 3
    assert all(".lora_A." in name or ".lora_B." in name for name in parameters)
    assert read_about(run[0])["lora"] == LORA


def test_peft_and_transformers_load_it(
    base: Path, run: tuple[Path, list[dict[str, float]]], tmp_path: Path
) -> None:
    """The adapter in PEFT, the model that `autopar export` merges, and W + alpha / r * B A by hand: the same."""
    import peft
    from transformers import AutoModelForCausalLM

    adapter = run[0] / "model"
    assert sorted(path.name for path in adapter.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    merge(str(base), adapter, tmp_path / "merged")
    command = [sys.executable, "-m", "autopar", "export", str(run[0]), str(tmp_path / "exported"), "-q"]
    subprocess.run(command, check=True, timeout=120)
    plain = AutoModelForCausalLM.from_pretrained(base)
    weight = plain.model.layers[1].self_attn.o_proj.weight
    kept = load_file(adapter / "adapter_model.safetensors")
    a, b = (kept[f"base_model.model.model.layers.1.self_attn.o_proj.lora_{x}.weight"] for x in "AB")
    assert b.abs().max() > 1e-3
    by_hand = weight.detach() + 8 / 4 * b @ a
    ids = torch.arange(16)[None]
    for folder in ("merged", "exported"):
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        torch.testing.assert_close(merged.model.layers[1].self_attn.o_proj.weight.detach(), by_hand)
        loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
        with torch.no_grad():
            torch.testing.assert_close(merged(ids).logits, loaded(ids).logits, atol=1e-5, rtol=1e-4)


def test_another_base_is_refused(
    base: Path, run: tuple[Path, list[dict[str, float]]], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    MODELS["llama"]().save_pretrained(tmp_path / "other")  # type: ignore[operator]
    assert base_digest(find_model(str(base)), 0) != base_digest(find_model(str(tmp_path / "other")), 0)
    with pytest.raises(AssertionError, match="base model's weights are other ones"):
        train(tmp_path / "other", run[0], "--steps", "5", "--resume")


def test_what_does_not_fit_is_told(
    base: Path, run: tuple[Path, list[dict[str, float]]], tmp_path: Path
) -> None:
    def fails(kind: type[AutoparError], match: str, adapter: Path, model: Path = base) -> None:
        with pytest.raises(kind, match=match) as caught:
            merge(str(model), adapter, tmp_path / "merged")
        assert caught.value.hint
        assert not (tmp_path / "merged").exists()

    fails(UsageError, "cannot be read", tmp_path)
    MODELS["gpt2"]().save_pretrained(tmp_path / "gpt2")  # type: ignore[operator]
    fails(ModelError, "does not fit", run[0] / "model", tmp_path / "gpt2")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text((run[0] / "model" / "adapter_config.json").read_text())
    whole = (run[0] / "model" / "adapter_model.safetensors").read_bytes()
    (broken / "adapter_model.safetensors").write_bytes(whole[: len(whole) // 2])
    fails(UsageError, "cannot be read", broken)
