"""What a spec means, and what is said about one that means nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    CLIPTextConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    T5Config,
    ViTConfig,
)

from autopar.errors import ModelError
from autopar.models import find_model

TINY: dict[str, tuple[Callable[[], Any], str]] = {
    "gpt2": (lambda: GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50, n_positions=32), "causal-lm"),
    "bert": (
        lambda: BertConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            vocab_size=50,
            max_position_embeddings=32,
        ),
        "masked-lm",
    ),
    "bert classifier": (
        lambda: BertConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            vocab_size=50,
            architectures=["BertForSequenceClassification"],
        ),
        "classification",
    ),
    "llama classifier": (
        lambda: LlamaConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            vocab_size=50,
            architectures=["LlamaForSequenceClassification"],
        ),
        "classification",
    ),
    "vit": (
        lambda: ViTConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            image_size=16,
            patch_size=8,
        ),
        "image-classification",
    ),
    "t5": (
        lambda: T5Config(d_model=16, d_ff=16, d_kv=8, num_heads=2, num_layers=1, vocab_size=50),
        "seq2seq",
    ),
    "mixtral": (
        lambda: MixtralConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=16,
            vocab_size=50,
            num_local_experts=4,
        ),
        "causal-lm",
    ),
}


@pytest.mark.parametrize("kind", TINY)
def test_a_config_gives_a_model_that_trains_on_its_example(kind: str) -> None:
    make, task = TINY[kind]
    source = find_model(make())
    assert source.task == task
    torch.manual_seed(0)
    model = source.build()
    loss = model(**source.example_inputs(2, 8)).loss
    loss.backward()
    assert torch.isfinite(loss)


@pytest.mark.parametrize("kind", TINY)
def test_the_example_on_meta_has_the_shapes_of_the_one_on_cpu(kind: str) -> None:
    source = find_model(TINY[kind][0]())
    real = source.example_inputs(2, 8)
    with torch.device("meta"):
        shapes = source.example_inputs(2, 8)
    assert all(value.is_meta for value in shapes.values())
    assert {k: (v.shape, v.dtype) for k, v in shapes.items()} == {
        k: (v.shape, v.dtype) for k, v in real.items()
    }


@pytest.mark.parametrize("kind", TINY)
def test_two_forwards_in_training_mode_agree_because_dropout_is_off(kind: str) -> None:
    source = find_model(TINY[kind][0]())
    model, inputs = source.build().train(), source.example_inputs(2, 8)
    assert torch.equal(model(**inputs).loss, model(**inputs).loss)


def test_the_given_config_is_left_as_it_was() -> None:
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50)
    before = config.to_dict()
    find_model(config).build()
    assert config.to_dict() == before
    assert config.attn_pdrop == 0.1


def test_examples_do_not_disturb_or_depend_on_the_global_seed(tiny_config: Any) -> None:
    source = find_model(tiny_config)
    torch.manual_seed(1)
    first, state = source.example_inputs(2, 8), torch.random.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(first["input_ids"], source.example_inputs(2, 8)["input_ids"])


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_tied_weights_stay_tied(tiny_config: Any, device: str) -> None:
    with torch.device(device):
        model: Any = find_model(tiny_config).build()
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_experts_are_the_kind_that_can_be_captured() -> None:
    with torch.device("meta"):
        model: Any = find_model(TINY["mixtral"][0]()).build()
    assert model.config._experts_implementation == "grouped_mm"


def test_parameters_are_float32_whatever_the_checkpoint_says(tiny_config: Any) -> None:
    tiny_config.dtype = torch.bfloat16
    with torch.device("meta"):
        assert {p.dtype for p in find_model(tiny_config).build().parameters()} == {torch.float32}


def test_a_checkpoint_folder_loads_the_weights_that_were_saved(tiny_folder: Path) -> None:
    source = find_model(str(tiny_folder))
    assert (source.name, source.task, source.path) == ("tiny-llama", "causal-lm", tiny_folder)
    assert source.load is not None
    loaded = source.load().state_dict()
    saved = LlamaForCausalLM.from_pretrained(tiny_folder).state_dict()
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def test_a_folder_with_a_config_alone_can_be_built_and_not_loaded(tiny_folder: Path) -> None:
    (tiny_folder / "model.safetensors").unlink()
    source = find_model(str(tiny_folder))
    assert source.load is None
    with torch.device("meta"):
        assert source.build().training


def test_a_folder_comes_before_a_published_name(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_folder.rename(tiny_folder.parent / "gpt2")
    monkeypatch.chdir(tiny_folder.parent)
    assert find_model("gpt2").path == Path("gpt2")


def test_weights_that_lack_a_parameter_are_refused(tiny_folder: Path) -> None:
    config = json.loads((tiny_folder / "config.json").read_text())
    (tiny_folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    load = find_model(str(tiny_folder)).load
    assert load is not None
    with pytest.raises(ModelError, match=r"not in the checkpoint.*layers\.2"):
        load()


def test_weights_cut_short_are_refused(tiny_folder: Path) -> None:
    weights = tiny_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    load = find_model(str(tiny_folder)).load
    assert load is not None
    with pytest.raises(ModelError, match="cannot be loaded"):
        load()


def test_a_sequence_beyond_the_position_table_is_refused() -> None:
    with pytest.raises(ModelError, match="longer than the 32 positions"):
        find_model(TINY["gpt2"][0]()).example_inputs(1, 33)


CONFIGS = {
    "cut short": ('{"model_type": "llama", ', "not valid JSON"),
    "empty": ("", "not valid JSON"),
    "a list": ("[1, 2]", "model_type is None"),
    "no model type": ('{"hidden_size": 64}', "model_type is None"),
    "model type a number": ('{"model_type": 3}', "model_type is 3"),
    "unknown model type": ('{"model_type": "rocket"}', "does not know"),
    "own code": ('{"model_type": "rocket", "auto_map": {"AutoModel": "m.M"}}', "autopar does not run"),
    "a size in words": ('{"model_type": "llama", "hidden_size": "large"}', "cannot"),
    "no task": ('{"model_type": "clip_text_model"}', "no class for any of the tasks"),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_bad_config_is_explained(tmp_path: Path, kind: str) -> None:
    text, message = CONFIGS[kind]
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message) as caught:
        find_model(str(tmp_path)).build()
    assert "\n  try " in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_sizes_that_do_not_fit_together_are_explained() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4)
    config.num_attention_heads = 0
    with pytest.raises(ModelError, match="cannot build 'llama'"):
        find_model(config).build()


BAD = {
    "empty name": "",
    "unknown name": "llama-9000",
    "unknown hub id": "acme/rocket",
    "missing path": "./no/such/folder",
    "missing gguf": "no-such.gguf",
    "missing python file": "no-such.py:make",
    "python file without a function": "no-such.py",
    "name far too long": "x" * 5000,
    "not a string": 7,
    "a config without a task": CLIPTextConfig(),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_spec_is_a_model_error_that_says_what_to_try(kind: str) -> None:
    with pytest.raises(ModelError, match="\n  try "):
        find_model(BAD[kind])


def test_an_empty_folder_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither config\.json nor a \.gguf file"):
        find_model(str(tmp_path))


def test_a_folder_with_two_gguf_files_asks_which(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"2 \.gguf files.*\n.*\n  try .*a\.gguf"):
        find_model(str(tmp_path))


def test_a_gguf_file_of_rubbish_is_explained(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"rubbish" * 10)
    with pytest.raises(ModelError, match="cannot be read"):
        find_model(str(tmp_path / "a.gguf"))


def test_a_file_that_is_no_model_is_explained(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="this file is not a model"):
        find_model(str(tmp_path / "weights.safetensors"))
