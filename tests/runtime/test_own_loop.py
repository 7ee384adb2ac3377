"""A loop of one's own: `train_step` with torch's optimizers equals the unsharded model; blocks through torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar import api
from autopar.compiled import Compiled
from autopar.errors import UsageError
from autopar.runtime.simulate import simulate
from tests.runtime.composition import compile_layout, model_and_batch
from tests.runtime.processes import run_on

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3
Parameters = Iterable[nn.Parameter]
# Not the default eps: where a gradient is nothing but rounding, a normalised step is as long as any other.
OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, eps=1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2, eps=1e-3),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-2, eps=1e-3, momentum=0.5),
}
LAYOUTS = ["dp=2,tp=2,zero=3,mbs=2", "dp=2,pp=2,schedule=1f1b,zero=1,mbs=2"]

compiled_layout = cache(compile_layout)  # not started: ranks run copies


@cache
def unsharded(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and parameters at the end."""
    model, batch = model_and_batch("llama")
    optimizer, losses = OPTIMIZERS[name](model.parameters()), []
    for _ in range(STEPS):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {key: value.detach() for key, value in model.named_parameters()}


def train(run: Compiled, name: str, batch: dict[str, Tensor]) -> tuple[list[float], dict[str, Any]]:
    """The same on one rank: any torch optimizer over this rank's shares."""
    run.optimizer = OPTIMIZERS[name](run.parameters.values())
    losses = [run.train_step(batch).loss for _ in range(STEPS)]
    store = run.trainer.store
    return losses, {
        key: store.whole_parameter(key, lambda entry: entry.parameter.detach()) for key in run.parameter_names
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torchs_optimizers_on_shares(name: str, layout: str) -> None:
    run, batch = compiled_layout("llama", layout)
    losses, wanted = unsharded(name)
    ranks = simulate(4, lambda _: train(run.on_rank(), name, batch), timeout_s=120)
    assert {key for _, found in ranks for key in found} == set(wanted)
    for found, parameters in ranks:
        assert found == pytest.approx(losses, rel=1e-5)
        for key, value in parameters.items():
            assert torch.allclose(value, wanted[key], rtol=1e-4, atol=1e-5), key


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    ["dp=2,zero=1,mbs=2", "dp=2,zero=1,mbs=2,recompute=full", "dp=2,zero=3,mbs=4,recompute=selective"],
)
def test_blocks_through_torch_compile(layout: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    compile_layout("llama", layout)[0].plan.save(file)
    for rank in run_on(2, "own_loop_worker.py", str(file), timeout=400):
        assert rank["compiled"] == 3, "every unique block once, for all layers"
        assert rank["loss"] < 1e-5
        assert max(rank["norm"], rank["gradient"], rank["parameter"]) < 1e-4


def test_selective_recompute_of_compiled_blocks_is_refused() -> None:
    model, batch = model_and_batch("llama")
    words = ["recompute=selective", "dp=1", "tp=1", "cp=1", "pp=1"]
    run = api.compile(model, "cpu:1", batch, space="all", fix=words, compiled=True)
    with pytest.raises(UsageError, match="cannot be recomputed selectively"):
        run.start()
