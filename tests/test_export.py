"""A checkpoint, whatever mesh it is of, as a folder that Transformers loads with the same numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import autopar
from autopar.compiled import Compiled
from autopar.errors import ModelError, UsageError
from autopar.export import CONFIG, export_checkpoint, export_model
from autopar.models.source import find_model
from autopar.runtime.checkpoint import newest
from autopar.runtime.saving import SavePolicy, Saver
from autopar.runtime.simulate import simulate

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def config_of(kind: str) -> Any:
    if kind == "gpt2":
        return transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=96, bos_token_id=0, eos_token_id=0
        )
    if kind == "mixtral":
        return transformers.MixtralConfig(**SIZES, num_local_experts=4)
    if kind == "bert":
        sizes = {name: size for name, size in SIZES.items() if "key_value" not in name}
        return transformers.BertConfig(**sizes, architectures=["BertForMaskedLM"])
    return transformers.LlamaConfig(**SIZES, tie_word_embeddings=kind == "tied")


def saved(kind: str, mesh: str, out: Path) -> list[dict[str, torch.Tensor]]:
    """Train a step on a mesh and save it as `autopar train` does; the parameters, whole, by the model's names."""
    config = config_of(kind)
    made = autopar.compile(config, f"cpu:{mesh.rpartition('=')[2]}", batch=4, seq=8, mesh=mesh)
    batch = find_model(config).example_inputs(4, 8)

    def rank(_: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        run: Compiled = made.on_rank().start(lr=1e-2)
        run.train_step(batch)
        files = {CONFIG: config.to_json_string(use_diff=False)}
        about = {"seed": 0}
        saver = Saver(run.trainer, out, SavePolicy(), about=lambda: about, files=files)
        saver.finish()
        store = run.trainer.store
        return {
            name: store.whole_parameter(name, lambda entry: entry.parameter.detach()) for name in store.parts
        }

    if mesh.endswith("=1"):
        return [rank(0)]
    # ranks in turn would draw from one generator: every one builds the model under its own seed
    return simulate(int(mesh.rpartition("=")[2]), rank)


@pytest.mark.parametrize("kind", ["llama", "tied", "gpt2", "mixtral", "bert"])
def test_transformers_loads_what_was_trained(kind: str, tmp_path: Path) -> None:
    whole = saved(kind, "dp=1", tmp_path / "run")[0]
    export_checkpoint(tmp_path / "run", tmp_path / "model")
    auto = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    loaded, report = auto.from_pretrained(
        tmp_path / "model", output_loading_info=True, local_files_only=True, dtype=torch.float32
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    found = dict(loaded.named_parameters(remove_duplicate=False))
    assert whole.keys() <= found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    source = find_model(str(tmp_path / "model"))  # and autopar does
    assert source.load is not None
    again: nn.Module = source.load()
    parameters = dict(again.named_parameters(remove_duplicate=False))
    assert all(torch.equal(parameters[name], tensor) for name, tensor in whole.items())


def test_pieces_of_a_mesh_become_shards_with_an_index(tmp_path: Path) -> None:
    wholes = saved("llama", "fsdp=2", tmp_path / "run")
    config = config_of("llama")
    checkpoint = newest(tmp_path / "run")
    simulate(
        2, lambda rank: export_model(checkpoint, tmp_path / "model", find_model(config), shard_bytes=20_000)
    )
    files = sorted(file.name for file in (tmp_path / "model").glob("*.safetensors"))
    weight_map = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(files) > 2
    assert set(weight_map.values()) == set(files)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for whole in wholes:
        assert all(
            torch.equal(dict(loaded.named_parameters())[name], tensor) for name, tensor in whole.items()
        )


def test_the_command_in_another_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from autopar.cli import main

    whole = saved("llama", "dp=1", tmp_path / "run")[0]

    def command(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["autopar", "export", str(tmp_path / "run"), *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), capsys.readouterr().err

    assert command(str(tmp_path / "half"), "--format", "hf", "--dtype", "bfloat16")[0] == 0
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "half")
    assert loaded.dtype == torch.bfloat16
    name = "model.embed_tokens.weight"
    assert torch.equal(loaded.state_dict()[name], whole[name].to(torch.bfloat16))
    code, told = command(str(tmp_path / "half"))
    assert code == 2
    assert "something already" in told
    assert command(str(tmp_path / "x"), "--format", "gguf")[0] == 2


def test_what_is_no_transformers_model_is_told(tmp_path: Path) -> None:
    saved("llama", "dp=1", tmp_path / "run")
    (newest(tmp_path / "run") / CONFIG).unlink()
    with pytest.raises(ModelError, match="does not hold a Transformers config"):
        export_checkpoint(tmp_path / "run", tmp_path / "model", verify=False)
    with pytest.raises(ModelError, match=r"has no model\.embed_tokens\.weight"):
        export_model(newest(tmp_path / "run"), tmp_path / "model", find_model(config_of("gpt2")))
    (tmp_path / "taken").mkdir()
    with pytest.raises(UsageError, match="something already"):
        export_model(newest(tmp_path / "run"), tmp_path / "taken", find_model(config_of("llama")))
