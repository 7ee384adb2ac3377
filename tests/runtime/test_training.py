"""Training steps equal torch's own, a checkpoint goes on under any mesh, compiled or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.processes import run_on


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [("llama", "fsdp=2", "tp=2"), pytest.param("gpt2", "tp=2", "dp=2", marks=pytest.mark.slow)],
)
def test_steps_and_a_checkpoint_on_another_mesh(kind: str, first: str, second: str, tmp_path: Path) -> None:
    result = run_on(2, "training_worker.py", "main", kind, first, second, str(tmp_path / "run"))[0]
    for found, expected in zip(result["found"], result["expected"], strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    assert [folder.name for folder in (tmp_path / "run").iterdir()] == ["step-00000003"]


@pytest.mark.slow
def test_compiled_blocks_train_the_same() -> None:
    result = run_on(2, "training_worker.py", "compiled", "llama", "fsdp=2")[0]
    for found, expected in zip(result["found"], result["expected"], strict=True):
        assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_bf16_blocks_over_fp32_parameters() -> None:
    result = run_on(2, "training_worker.py", "bf16", "llama", "fsdp=2")[0]
    assert result["found"] == pytest.approx(result["expected"], rel=2e-2)
    assert result["found"][-1] < result["found"][0]


@pytest.mark.slow
def test_any_torch_optimizer() -> None:
    result = run_on(2, "training_worker.py", "own_optimizer", "qwen3", "tp=2")[0]
    assert result["found"] == pytest.approx(result["expected"], rel=1e-5)
