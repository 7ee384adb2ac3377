"""Learning-rate schedules against torch's schedulers, step by step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from autopar.errors import UsageError
from autopar.runtime.schedules import SCHEDULES, Schedule

STEPS, WARMUP, LR = 40, 8, 0.3


def optimizer(lr: float | torch.Tensor = LR) -> torch.optim.Optimizer:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    return torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": 0.01}], lr=lr)


def torchs(name: str, of: torch.optim.Optimizer, floor: float) -> LRScheduler:
    rise = LinearLR(of, start_factor=1 / WARMUP, total_iters=WARMUP - 1)
    left = STEPS - WARMUP
    if name == "constant":
        return SequentialLR(of, [rise, ConstantLR(of, factor=1.0)], [WARMUP])
    if name == "linear":
        return SequentialLR(
            of, [rise, LinearLR(of, start_factor=1.0, end_factor=floor, total_iters=left)], [WARMUP]
        )
    if name == "cosine":  # its floor is a rate, not a part of one: of the first group here
        return SequentialLR(of, [rise, CosineAnnealingLR(of, T_max=left, eta_min=floor * LR)], [WARMUP])
    stay, fall = ConstantLR(of, factor=1.0), LinearLR(of, start_factor=1.0, end_factor=floor, total_iters=4)
    return SequentialLR(of, [rise, stay, fall], [WARMUP, STEPS - 4])


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_are_torchs(name: str, floor: float) -> None:
    ours, theirs = optimizer(), optimizer()
    schedule = Schedule(name, steps=STEPS, warmup=WARMUP, floor=floor)
    peer = torchs(name, theirs, floor)
    for step in range(STEPS):
        schedule.apply(ours, step)
        assert ours.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"], abs=1e-9), step
        theirs.step()
        peer.step()


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rate_depends_on_the_step_alone(name: str) -> None:
    schedule = Schedule(name, steps=STEPS, warmup=WARMUP)
    through, resumed = optimizer(), optimizer()
    for step in range(31):
        schedule.apply(through, step)
    schedule.apply(resumed, 30)
    assert [g["lr"] for g in through.param_groups] == [g["lr"] for g in resumed.param_groups]


def test_groups_keep_their_proportions() -> None:
    one = optimizer()
    Schedule("cosine", steps=STEPS).apply(one, STEPS // 2)
    assert [group["lr"] for group in one.param_groups] == pytest.approx([LR / 2, 0.005])


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    rate = torch.tensor(LR)
    one = optimizer(rate)
    for step in (STEPS // 2, 0, STEPS // 2):
        Schedule("cosine", steps=STEPS).apply(one, step)
    assert one.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(LR / 2)


def test_the_last_step_is_as_far_as_a_schedule_goes() -> None:
    for name in ("linear", "cosine", "wsd"):
        assert Schedule(name, steps=STEPS, floor=0.1).factor(10 * STEPS) == pytest.approx(0.1)
    assert Schedule("linear", steps=8, warmup=8).factor(7) == 1.0


@pytest.mark.parametrize(
    "options",
    [
        {"name": "cosin", "steps": 9},
        {"name": "cosine"},
        {"name": "linear", "steps": 9, "warmup": 10},
        {"name": "linear", "steps": 9, "warmup": -1},
        {"name": "linear", "steps": 9, "floor": 1.5},
        {"name": "linear", "steps": 9, "decay": 3},
        {"name": "wsd", "steps": 9, "decay": 0},
        {"name": "wsd", "steps": 9, "warmup": 5, "decay": 5},
    ],
)
def test_bad_schedules(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Schedule(**options)  # type: ignore[arg-type]
