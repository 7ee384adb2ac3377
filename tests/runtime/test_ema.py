"""The average of the weights on shares, against torch's AveragedModel on the whole model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from autopar.errors import TrainingError, UsageError
from autopar.runtime.ema import Ema
from tests.runtime.training_case import Made, case, made, on_ranks, whole

STEPS = 3


@pytest.mark.parametrize("mesh", ["fsdp=2,tp=2", "dp=1"])
def test_the_average_is_torchs(mesh: str) -> None:
    model, batch = case("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(model)  # torch's average begins as a copy
    for _ in range(STEPS):
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    want = {name: value.detach() for name, value in average.module.named_parameters()}

    def train(run: Made) -> tuple[dict[str, Tensor], bool]:
        trainer = run.start()
        ema = Ema(trainer.store, 0.9)
        for _ in range(STEPS):
            trainer.step(batch)
            ema.update()
        before = whole(trainer)
        with ema.in_place():
            averaged = whole(trainer)
        after = whole(trainer)
        return averaged, all(torch.equal(before[name], after[name]) for name in before)

    for averaged, same in on_ranks(made("llama", mesh), train):
        assert same
        for name, value in want.items():
            torch.testing.assert_close(averaged[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_it_goes_on_from_its_tensors() -> None:
    store = made("llama", "dp=1").start().store
    first = Ema(store, 0.5)
    with torch.no_grad():
        for parameter in store.parameters.values():
            parameter.add_(1.0)
    first.update()
    second = Ema(store, 0.5)
    second.load({name: value.clone() for name, value in first.tensors().items()})
    first.update()
    second.update()
    for name, value in first.tensors().items():
        assert value.shape == store.parameters[name].shape
        assert torch.equal(value, second.tensors()[name])


def test_what_is_not_its_own_is_refused_and_changes_nothing() -> None:
    ema = Ema(made("llama", "dp=1").start().store, 0.5)
    saved = {name: value + 1 for name, value in ema.tensors().items()}
    before = {name: value.clone() for name, value in ema.tensors().items()}
    with pytest.raises(TrainingError, match=r"lm_head\.weight is missing"):
        ema.load({name: value for name, value in saved.items() if name != "lm_head.weight"})
    with pytest.raises(TrainingError, match=r"lm_head\.weight has shape \[2\]"):
        ema.load({**saved, "lm_head.weight": torch.zeros(2)})
    assert all(torch.equal(value, before[name]) for name, value in ema.tensors().items())


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_bad_decay(decay: float) -> None:
    with pytest.raises(UsageError):
        Ema(made("llama", "dp=1").start().store, decay)
