"""Every published model, built on meta, has the number of parameters that its authors publish."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import ModelError
from autopar.models import find_model, published_names
from autopar.models.catalogue import canonical_name, published

# The published count is rounded (B), or that of a checkpoint with one more head; the others must be exact.
ROUNDED = {"gpt3-175b", "mt-nlg-530b", "gpt-1t", "nemotron-4-340b", "bert-large"}


def stored_count(module: torch.nn.Module) -> int:
    """Parameters, and those that Transformers holds as buffers and saves with them (router biases)."""
    parameters = {name for name, _ in module.named_parameters()}
    saved = {
        name: value
        for name, value in module.named_buffers()
        if name in module.state_dict().keys() - parameters and value.is_floating_point()
    }
    return sum(p.numel() for p in module.parameters()) + sum(b.numel() for b in saved.values())


@pytest.mark.parametrize("name", published_names())
def test_parameter_count_is_the_published_one(name: str) -> None:
    facts = published(name)
    with torch.device("meta"):
        model = find_model(name).build()
    count = stored_count(model)
    if name in ROUNDED:
        assert count == pytest.approx(facts.parameters, rel=0.01)
    else:
        assert count == facts.parameters


@pytest.mark.parametrize("name", published_names())
def test_every_fact_has_a_source(name: str) -> None:
    sources = published(name).sources
    assert "config" in sources
    assert "parameters" in sources


@pytest.mark.parametrize("name", published_names())
def test_every_alias_in_any_case_is_the_same_model(name: str) -> None:
    for alias in (name, *published(name).aliases):
        assert canonical_name(alias) == canonical_name(f" {alias.upper()} ") == name


def test_hub_id_finds_the_model() -> None:
    assert find_model("META-LLAMA/Llama-3.1-405B").name == "llama-3.1-405b"


def test_unknown_name_suggests_the_close_one() -> None:
    with pytest.raises(ModelError, match=r"try llama-3\.1-8b"):
        find_model("lama-3.1-8b")


def test_unknown_hub_id_says_to_download_it_first() -> None:
    with pytest.raises(ModelError, match=r"never downloads.*hf download acme/rocket-7b"):
        find_model("acme/rocket-7b")
