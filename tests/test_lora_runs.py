"""LoRA from the command line: only adapters are trained, saved and resumed; PEFT and Transformers load what comes out."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from autopar.adapter import base_digest, merge
from autopar.cli import main
from autopar.data import prepare
from autopar.errors import AutoparError, ModelError, UsageError
from autopar.models.source import find_model
from autopar.runtime.checkpoint import newest, read_about, read_checkpoint_index
from tests.tiny import MODELS
from tests.words import save_tokenizer

pytest.importorskip("peft")
LORA = "r=4,alpha=8,targets=q_proj,o_proj"


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer, and beside it conversations, prepared."""
    folder = tmp_path_factory.mktemp("base") / "model"
    torch.manual_seed(0)
    MODELS["llama"]().save_pretrained(folder)  # type: ignore[operator]
    save_tokenizer(folder, words=80)
    talk = [{"role": "user", "content": " w1 w2 "}, {"role": "assistant", "content": " w3 w4 w5 "}]
    source = folder.parent / "talks.jsonl"
    source.write_text(f"{json.dumps({'messages': talk})}\n" * 12)
    prepare([source], tokenizer=folder, out=folder.parent / "tokens")
    return folder


def train(base: Path, out: Path, *more: str, cluster: str = "cpu:1") -> list[dict[str, float]]:
    """The lines of a run, of one process in this one; raises AssertionError with what it said if it failed."""
    arguments = [
        "train", str(base), "-c", cluster, "--batch", "4", "--seq", "16", "--lr", "0.01", "--lora", LORA, "--json", "-q",
        "--out", str(out), "--timeout", "60", "--data", str(base.parent / "tokens"), "--packing", "whole", *more,
    ]  # fmt: skip
    told, said, code = autopar(*arguments) if cluster == "cpu:1" else started(*arguments)
    assert code == 0, said[-3000:]
    return [json.loads(line) for line in told.splitlines()]


def started(*arguments: str) -> tuple[str, str, int]:
    ended = subprocess.run(
        [sys.executable, "-m", "autopar", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    return ended.stdout, ended.stderr, ended.returncode


def autopar(*arguments: str) -> tuple[str, str, int]:
    """A command in this process: standard output, standard error, exit code."""
    told, said = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(told), redirect_stderr(said):
        patch.setattr(sys, "argv", ["autopar", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    return told.getvalue(), said.getvalue(), int(ended.value.code or 0)


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
    saved = [name for name in index if name.startswith(("model/", "optimizer/")) and "inv_freq" not in name]
    assert len([name for name in saved if name.startswith("model/")]) == 2 * 2 * 3
    assert all(".lora_A." in name or ".lora_B." in name for name in saved)
    assert read_about(run[0])["lora"] == LORA


def test_peft_and_transformers_load_it(
    base: Path, run: tuple[Path, list[dict[str, float]]], tmp_path: Path
) -> None:
    """The adapter in PEFT, the model that `autopar export` merges, and W + alpha / r * B A by hand: the same."""
    import peft
    from transformers import AutoModelForCausalLM

    adapter = run[0] / "model"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in adapter.iterdir()}
    assert not (adapter / "model.safetensors").exists()
    merge(str(base), adapter, tmp_path / "merged")
    assert autopar("export", str(run[0]), str(tmp_path / "exported"), "-q")[2] == 0
    assert autopar("export", "--format", "peft", str(run[0]), str(tmp_path / "peft"), "-q")[2] == 0
    assert (tmp_path / "peft" / "adapter_model.safetensors").read_bytes() == (
        adapter / "adapter_model.safetensors"
    ).read_bytes()
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
    other = tmp_path / "other" / "model"
    shutil.copytree(base.parent, other.parent)
    MODELS["llama"]().save_pretrained(other)  # type: ignore[operator]
    assert base_digest(find_model(str(base)), 0) != base_digest(find_model(str(other)), 0)
    with pytest.raises(AssertionError, match="base model's weights are other ones"):
        train(other, run[0], "--steps", "5", "--resume")


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
