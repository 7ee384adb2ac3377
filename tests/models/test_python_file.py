"""Models from the user's own Python: a function in a file, a module in hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.errors import ModelError
from autopar.models import find_model

FILE = """
import torch
from sizes import WIDTH

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
    def forward(self, x, labels):
        return torch.nn.functional.mse_loss(self.linear(x), labels)

def bare():
    return Net()

def with_example():
    return Net(), {"x": torch.ones(4, WIDTH), "labels": torch.zeros(4, WIDTH)}

def tokens():
    return Net(), {"input_ids": torch.zeros(4, 8, dtype=torch.int64)}

def not_tensors():
    return Net(), {"x": 3}

def number():
    return 7

def broken():
    raise ValueError("no such thing")

def leaves():
    raise SystemExit(3)

constant = 5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "sizes.py").write_text("WIDTH = 16\n")
    (tmp_path / "net.py").write_text(FILE)
    return tmp_path / "net.py"


def test_the_function_builds_the_module_on_the_default_device(file: Path) -> None:
    source = find_model(f"{file}:bare")
    with torch.device("meta"):
        on_meta: Any = source.build()
    on_cpu: Any = source.build()
    assert on_meta.linear.weight.is_meta
    assert on_cpu.linear.weight.shape == (16, 16)
    assert (source.name, source.task) == ("bare", "module")


def test_its_example_is_used_as_it_is(file: Path) -> None:
    source = find_model(f"{file}:with_example")
    example = source.example_inputs(4, 128)
    assert torch.equal(example["x"], torch.ones(4, 16))
    assert source.build()(**example).dim() == 0


MISMATCHES = {
    "batch": ("with_example", 5, 128, "has batch 4; batch 5 was asked for"),
    "sequence": ("tokens", 4, 16, "has sequence 8; sequence 16 was asked for"),
    "no example": ("bare", 4, 16, "does not say what its inputs look like"),
    "not a tensor": ("not_tensors", 4, 16, "'x' is a int; expected a tensor"),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_an_example_that_does_not_match_is_explained(file: Path, kind: str) -> None:
    function, batch, seq, message = MISMATCHES[kind]
    with pytest.raises(ModelError, match=message):
        find_model(f"{file}:{function}").example_inputs(batch, seq)


def test_an_error_in_the_function_names_its_line(file: Path) -> None:
    line = FILE.splitlines().index('    raise ValueError("no such thing")') + 1
    with pytest.raises(ModelError, match=rf"ValueError: no such thing\n  at .*net\.py:{line} in broken"):
        find_model(f"{file}:broken").build()


@pytest.mark.parametrize(
    ("function", "message"), [("number", "returned int; expected an nn.Module"), ("leaves", "SystemExit")]
)
def test_a_function_that_returns_no_module_is_explained(file: Path, function: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        find_model(f"{file}:{function}").build()


@pytest.mark.parametrize("name", ["nothing", "constant", ""])
def test_a_missing_function_lists_those_there_are(file: Path, name: str) -> None:
    with pytest.raises(ModelError, match=r"not a function in this file\n.*\n  try one of .*bare"):
        find_model(f"{file}:{name}")


@pytest.mark.parametrize("text", ["def f(:\n", "import no_such_module_at_all\n", "1 / 0\n", "\0"])
def test_a_file_that_cannot_be_run_is_explained(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ModelError, match=r"Python raised .*\n  at .*bad\.py"):
        find_model(f"{tmp_path / 'bad.py'}:f")


class Shared(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.register_buffer("scale", torch.ones(4))


def test_a_module_is_copied_to_meta_with_its_ties() -> None:
    module = Shared()
    with torch.device("meta"):
        copy: Any = find_model(module).build()
    assert copy.a.weight is copy.b.weight
    assert copy.a.weight.is_meta
    assert copy.scale.is_meta
    assert not module.a.weight.is_meta


def test_a_module_in_hand_is_its_own_weights() -> None:
    module = Shared()
    source = find_model(module)
    assert source.load is not None
    assert source.load() is module
    with torch.device("meta"):
        assert find_model(Shared()).load is None


def test_a_transformers_module_knows_its_example(tiny_config: Any) -> None:
    module = find_model(tiny_config).build()
    source = find_model(module)
    assert (source.task, source.name) == ("causal-lm", "LlamaForCausalLM")
    assert source.build()(**source.example_inputs(2, 8)).loss.isfinite()
