"""Sharded training gives the unsharded loss and every gradient, for each model family, mesh and way of running."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autopar import api, prepared
from autopar.runtime.simulate import simulate
from tests.runtime.equality_worker import Case, remember_captures
from tests.runtime.processes import run_on
from tests.tiny import MODELS

TWO = ["dp=2", "fsdp=2", "tp=2"]
FOUR = ["dp=4", "fsdp=4", "tp=4", "dp=2,tp=2", "fsdp=2,tp=2", "dp=2,fsdp=2"]


def cases(meshes: list[str]) -> list[str]:
    """What the planner chooses on each mesh, and Megatron's placement wherever there is a tp axis."""
    planned = [f"{kind}/{mesh}/planned" for kind in MODELS for mesh in meshes]
    return planned + [
        f"{kind}/{mesh}/megatron" for kind in MODELS for mesh in meshes if mesh.endswith("tp=2")
    ]


TWO_CASES = [
    *cases(TWO),
    *(f"{kind}/tp=2/sequence" for kind in ("llama", "qwen3", "bert", "t5")),
    *(f"{kind}/{mesh}/planned" for kind in ("convnet", "classifier") for mesh in ("dp=2", "tp=2")),
    "llama/dp=2/micro",
    "t5/fsdp=2/micro",
    "llama/tp=2/recompute",
    "bert/fsdp=2/recompute",
]
FOUR_CASES = [
    *cases(FOUR),
    *(f"{kind}/tp=4/sequence" for kind in MODELS),
    "gpt2/dp=2,tp=2/micro",
    "llama/fsdp=2,tp=2/recompute",
]


# On gloo processes; all others, which differ in nothing but what carries the tensors, on simulated ranks.
TWO_PROCESSES = [
    "llama/dp=2/planned",
    "gpt2/fsdp=2/planned",
    "bert/tp=2/planned",
    "qwen3/tp=2/megatron",
    "t5/tp=2/sequence",
    "vit/tp=2/megatron",
    "convnet/dp=2/planned",
    "t5/fsdp=2/micro",
    "llama/tp=2/recompute",
]
FOUR_PROCESSES = [
    "llama/dp=2,tp=2/megatron",
    "gpt2/fsdp=2,tp=2/planned",
    "bert/dp=2,fsdp=2/planned",
]


@pytest.fixture(scope="module")
def on_two() -> dict[str, dict[str, float]]:
    return run_on(2, "equality_worker.py", *TWO_PROCESSES)[0]


@pytest.fixture(scope="module")
def on_four() -> dict[str, dict[str, float]]:
    return run_on(4, "equality_worker.py", *FOUR_PROCESSES, timeout=280)[0]


@pytest.fixture(scope="module")
def captured_once() -> Iterator[None]:
    capture = prepared.capture
    remember_captures()
    yield
    prepared.capture = capture


@pytest.mark.parametrize("case", TWO_PROCESSES)
def test_two_processes_equal_one(on_two: dict[str, dict[str, float]], case: str) -> None:
    check(on_two[case])


@pytest.mark.slow  # two processes, and four of compositions, are in the quick suite
@pytest.mark.parametrize("case", FOUR_PROCESSES)
def test_four_processes_equal_one(on_four: dict[str, dict[str, float]], case: str) -> None:
    check(on_four[case])


@pytest.mark.usefixtures("captured_once")
@pytest.mark.parametrize("case", [*TWO_CASES, *FOUR_CASES])
def test_simulated_ranks_equal_one(case: str) -> None:
    made = Case(*case.split("/"), api.plan)
    for errors in simulate(made.devices, lambda _: made.errors(made.run.on_rank())):
        check(errors)


def check(errors: dict[str, float]) -> None:
    assert errors["loss"] < 1e-5, errors
    assert errors["gradient"] < 1e-5, errors
    assert errors["norm"] < 1e-5, errors
