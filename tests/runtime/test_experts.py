"""Layers of experts under every choice of their op: loss and all gradients are those of Transformers' own loop."""

from __future__ import annotations

import pytest

from autopar.mesh import Mesh
from autopar.problem import Choice
from tests.runtime.expert_cases import MODELS, choices, compare, expected
from tests.runtime.processes import run_on

MESHES = ["tp=2", "ep=2", "ep=2,tp=2", "dp=2,ep=2", "fsdp=2,ep=2", "fsdp=2,tp=2", "ep=4", "cp=2", "ep=2,cp=2"]


def cases(name: str, meshes: list[str]) -> list[tuple[str, Choice]]:
    return [(mesh, choice) for mesh in meshes for choice in choices(name, Mesh.parse(mesh))]


@pytest.mark.parametrize("mesh", MESHES)
def test_every_choice_equals_the_unsharded_model(mesh: str) -> None:
    found = choices("mixtral", Mesh.parse(mesh))

    assert found
    for choice in found:
        compare("mixtral", mesh, choice)


@pytest.mark.parametrize("load", ["skewed", "single"])
@pytest.mark.parametrize("mesh", ["tp=2", "ep=2", "ep=2,tp=2", "ep=4"])
def test_uneven_loads(mesh: str, load: str) -> None:
    for choice in choices("mixtral", Mesh.parse(mesh)):
        compare("mixtral", mesh, choice, load)


def test_experts_without_a_token_are_among_the_loads() -> None:
    unused = (
        expected("mixtral", "single").gradients["model.layers.0.mlp.experts.down_proj"].flatten(1).norm(dim=1)
    )

    assert [float(norm) == 0.0 for norm in unused] == [False, False, True, True]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "mixtral"])
def test_every_kind_of_experts(name: str) -> None:
    """Shared experts beside them, routers of all kinds, biases, auxiliary losses."""
    for mesh, choice in cases(name, ["tp=2", "ep=2"]):
        compare(name, mesh, choice)
    compare(name, "ep=2,tp=2", None)
    compare(name, "dp=2,ep=2", None, "skewed")
    compare(name, "fsdp=2,ep=2", None)


CASES = ["mixtral/ep=2/random", "gpt_oss/ep=2/random", "deepseek_v3/tp=2/random", "mixtral/ep=2/single"]


def test_processes_equal_the_unsharded_model() -> None:
    results = run_on(2, "expert_worker.py", *CASES, timeout=240)

    for case, error in results[0].items():
        assert error < 1e-5, case


@pytest.mark.slow
def test_a_compiled_exchange_follows_every_routing() -> None:
    """The numbers of rows that ranks send each other are data: one compiled graph runs with all of them."""
    assert max(run_on(2, "expert_compile_worker.py", timeout=280)) < 1e-9
