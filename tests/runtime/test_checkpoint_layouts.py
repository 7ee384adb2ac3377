"""A checkpoint under pipelines, ZeRO and experts: read and written again by other layouts, not a bit changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autopar.runtime.simulate import simulate
from tests.checkpoints import model_tensors, whole_tensors
from tests.runtime.composition import compile_layout, expected, optimizer

CHAINS = {
    "llama": (  # tied embeddings: on the first and the last stage
        "dp=2,tp=2,pp=2,schedule=1f1b,zero=1,mbs=1",
        "dp=4,zero=3,shard=2,mbs=2",
        "dp=2,pp=2,schedule=zb-h1,zero=2,mbs=1",
    ),
    "mixtral": (
        "dp=2,tp=2,pp=2,ep=2,etp=2,schedule=1f1b,zero=1,mbs=1",
        "dp=2,cp=2,ep=2,zero=3,mbs=4",
    ),
}


@pytest.mark.parametrize("kind", CHAINS)
def test_other_layouts_read_and_write_the_same_bits(kind: str, tmp_path: Path) -> None:
    stored = []
    for number, layout in enumerate(CHAINS[kind]):
        made, batch = compile_layout(kind, layout)

        def rank(_: int, made=made, batch=batch, number=number) -> None:  # type: ignore[no-untyped-def]
            run = made.on_rank().start(optimizer=optimizer)
            if number:
                run.load(tmp_path / str(number - 1))
            else:
                run.train_step(batch)
            run.save(tmp_path / str(number))

        simulate(made.plan.whole_mesh.device_count, rank, timeout_s=120)
        stored.append(tmp_path / str(number) / "step-00000001")
    trained = expected(kind, False)[2]
    first = whole_tensors(stored[0])
    for name, tensor in model_tensors(stored[0]).items():
        if name in trained:  # a step of the unsharded model
            torch.testing.assert_close(tensor, trained[name], rtol=1e-4, atol=1e-5)
    assert sum(name.startswith("optimizer/") for name in first) == 2 * len(
        [name for name in model_tensors(stored[0]) if name in trained]
    )
    for later in stored[1:]:
        found = whole_tensors(later)
        assert found.keys() == first.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in first.items())
