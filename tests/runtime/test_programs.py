"""Small programs of many kinds, sharded: loss, every gradient and every buffer as the module itself has them.

On each mesh once as the planner places them (cheapest: of a small program little is split), and under random legal
placements, which split whatever may be split.
"""

from __future__ import annotations

import pytest

from tests.programs import PROGRAMS
from tests.runtime.program_case import compare

MESHES = ["dp=2", "fsdp=2", "tp=2", "dp=2,tp=2"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_sharded_is_the_program(name: str) -> None:
    for mesh in MESHES:
        compare(name, mesh, "planned")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", PROGRAMS)
def test_any_legal_placement_gives_the_same(name: str) -> None:
    for seed, mesh in enumerate(MESHES):
        compare(name, mesh, str(seed))
