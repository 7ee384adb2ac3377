"""Every step between shardings, forward and backward, and the ops with a lowering of their own."""

from __future__ import annotations

from tests.runtime.processes import run_on


def test_collectives_and_special_lowerings() -> None:
    for result in run_on(2, "collectives_worker.py", timeout=120):
        assert [name for name, right in result.items() if not right] == []
        assert len(result) == 20
