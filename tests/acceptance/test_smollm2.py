"""Real weights, real text: SmolLM2-135M trained and sampled under every layout equals the single process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import pytest
import torch

from tests.acceptance.reference import (
    BATCH,
    SEQUENCE,
    STEPS,
    distance,
    gradient_in,
    reference_gradients,
    reference_losses,
)

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / ".cache" / "smollm2"

pytestmark = pytest.mark.slow


def _fixed(*words: str) -> list[str]:
    return ["--space", "all", *(part for word in words for part in ("--fix", word))]


# Name -> processes, and what `autopar plan` is told.
LAYOUTS = {
    "chosen": (4, []),
    "dp=4": (4, ["--mesh", "dp=4"]),
    "fsdp=4": (4, ["--mesh", "fsdp=4"]),
    "dp=2,tp=2": (4, ["--mesh", "dp=2,tp=2"]),
    "tp=3": (3, ["--mesh", "tp=3", "--fix", "heads=tp", "--fix", "ffn=tp", "--fix", "vocab=tp"]),
    "pp=2,dp=2 zero 1": (4, _fixed("pp=2", "dp=2", "tp=1", "zero=1", "schedule=1f1b", "mbs=1")),
    "pp=2,tp=3": (6, _fixed("pp=2", "tp=3", "vpp=2", "schedule=zbv", "mbs=1")),
    "pp=2,dp=2,fsdp=2": (8, _fixed("pp=2", "dp=4", "tp=1", "zero=3", "shard=2", "schedule=1f1b", "mbs=1")),
}

PROMPTS = [
    "The capital of France is",
    "To install a Python package, run",
    "Water boils at a temperature of",
    "Once upon a time there was a",
    "The three primary colors are",
]


@dataclass(frozen=True)
class Reference:
    """Losses of the single process; its gradients in float32 and in float64."""

    losses: list[float]
    single: Path
    exact: Path

    def rounding(self, name: str) -> float:
        """How far the single process's own float32 gradient is from the exact one."""
        return distance(gradient_in(self.single, name), gradient_in(self.exact, name))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("reference")
    single, exact = folder / "single.safetensors", folder / "exact.safetensors"
    reference_gradients(MODEL, single, torch.float32)
    reference_gradients(MODEL, exact, torch.float64)
    return Reference(reference_losses(MODEL), single, exact)


@dataclass(frozen=True)
class Gradient:
    """Relative distances of a sharded gradient from the single process's and from the exact one, and of the single
    process's from the exact one."""

    single: float
    exact: float
    rounding: float

    def __str__(self) -> str:
        return f"{self.single:.1e} from the single process, {self.exact:.1e} from float64 (the single process: {self.rounding:.1e})"


def autopar(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "autopar", *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=900, check=check)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_thirty_steps_equal_the_single_process(reference: Reference, layout: str, tmp_path: Path) -> None:
    processes, options = LAYOUTS[layout]
    plan, result = tmp_path / "plan.json", tmp_path / "result.json"
    sizes = ["--batch", str(BATCH), "--seq", str(SEQUENCE)]
    autopar("plan", str(MODEL), "--cluster", f"cpu:{processes}", *sizes, *options, "-o", str(plan))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    files = [str(plan), str(STEPS), str(result), str(reference.single), str(reference.exact)]
    command += ["tests/acceptance/train_worker.py", str(MODEL), *files]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=900)
    found = json.loads(result.read_text())
    errors = [abs(one / other - 1) for one, other in zip(found["losses"], reference.losses, strict=True)]
    gradients = {name: Gradient(*pair, reference.rounding(name)) for name, pair in found["errors"].items()}
    worst = max(gradients, key=lambda name: gradients[name].single)
    print(f"{layout}: worst loss error {max(errors):.1e}; worst gradient {worst}: {gradients[worst]}")
    assert max(errors) < 1e-4
    # Float32 has a limit of its own on this model: the single process is up to 3e-5 from float64, and summing one of
    # its matmuls in another order moves its gradients by 1e-5. So: all but one in a hundred within 1e-5 of the single
    # process, and those no further from float64 than the single process's own worst.
    limit = max(gradient.rounding for gradient in gradients.values())
    beyond = {name: str(gradient) for name, gradient in gradients.items() if gradient.single > 1e-5}
    assert len(beyond) <= len(gradients) // 100, beyond
    assert all(gradients[name].exact <= limit for name in beyond), beyond
    assert mean(found["losses"][-10:]) < mean(found["losses"][:10])


def test_heads_that_do_not_divide_are_an_error_that_teaches() -> None:
    run = autopar(
        "plan", str(MODEL), "--cluster", "cpu:2", "--mesh", "tp=2", "--fix", "heads=tp", check=False
    )
    assert run.returncode == 5
    assert "9" in run.stderr
    assert "heads" in run.stderr
    assert "try an axis of size 3" in run.stderr


@pytest.fixture(scope="module")
def expected_tokens() -> list[list[int]]:
    """Transformers' own greedy tokens in fp32."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(MODEL)
    rows = []
    for prompt in PROMPTS:
        ids = words(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False
            )
        rows.append(made[0, ids.shape[1] :].tolist())
    return rows


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_generated_tokens_are_those_of_transformers(expected_tokens: list[list[int]], processes: int) -> None:
    run = autopar("generate", str(MODEL), *PROMPTS, "--processes", str(processes), "--json")
    found = [json.loads(line)["tokens"] for line in run.stdout.splitlines()]
    assert found == expected_tokens


def test_pages_for_this_machine_and_for_64_gpus() -> None:
    for model, cluster in ((str(MODEL), "cpu:4"), ("llama-3.1-8b", "h100:8x8")):
        page = autopar("plan", model, "--cluster", cluster, "--batch", "128", "--seq", "1024").stdout
        for word in ("mesh", "axes", "stages", "memory", "step", "rejected", "optimizer"):
            assert word in page
