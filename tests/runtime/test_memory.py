"""The bytes that a plan predicts are those that its tensors take: measured on CPU processes over whole steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.processes import run_on

# model / mesh / recompute / micro-batches / precision / what is fixed
QUICK_ON_TWO = [
    "llama/dp=2/none/1/fp32/planned",
    "llama/dp=2/none/4/fp32/planned",
    "llama/fsdp=2/full/1/fp32/planned",
    "llama/fsdp=2/none/2/bf16/planned",
    "llama/tp=2/full/1/fp32/sequence",
    "gpt2/tp=2/none/1/fp32/megatron",
]
QUICK_ON_FOUR = ["llama/fsdp=2,tp=2/full/1/fp32/sequence"]
REST_ON_TWO = [
    "llama/dp=2/full/1/fp32/planned",
    "llama/dp=2/none/2/bf16/planned",
    "llama/dp=2/full/2/bf16/planned",
    "llama/fsdp=2/none/1/fp32/planned",
    "llama/fsdp=2/full/2/bf16/planned",
    "llama/tp=2/none/1/fp32/megatron",
    "gpt2/dp=2/none/1/fp32/planned",
    "gpt2/fsdp=2/full/1/fp32/planned",
]
REST_ON_FOUR = ["llama/dp=2,tp=2/none/1/fp32/megatron", "llama/dp=2,fsdp=2/none/1/fp32/planned"]


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, Any]]:
    return run_on(2, "memory_worker.py", *QUICK_ON_TWO)


@pytest.fixture(scope="module")
def on_four() -> list[dict[str, Any]]:
    return run_on(4, "memory_worker.py", *QUICK_ON_FOUR)


@pytest.mark.parametrize("case", QUICK_ON_TWO)
def test_two_processes_take_what_was_predicted(on_two: list[dict[str, Any]], case: str) -> None:
    check(on_two, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", QUICK_ON_FOUR)
def test_four_processes_take_what_was_predicted(on_four: list[dict[str, Any]], case: str) -> None:
    check(on_four, case)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "cases"), [(2, REST_ON_TWO), (4, REST_ON_FOUR)])
def test_the_other_layouts_take_what_was_predicted(processes: int, cases: list[str]) -> None:
    ranks = run_on(processes, "memory_worker.py", *cases)
    for case in cases:
        check(ranks, case)


def check(ranks: list[dict[str, Any]], case: str) -> None:
    """Every rank's; the prediction is of any."""
    for rank in ranks:
        found = rank[case]
        assert found["predicted"] == pytest.approx(max(found["phases"].values()), rel=0.05), found
