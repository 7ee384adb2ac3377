"""Learning-rate schedules: what a step's learning rates are multiplied by, as a function of the step alone.

    Schedule("cosine", steps=1000, warmup=100, floor=0.1)
    step    0      99     100    550    999
    factor  0.01   1.0    1.0    0.55   0.1

A run that is resumed needs nothing but its step. torch's schedulers (`torch.optim.lr_scheduler`) have states, and most
compute a rate from the last one; the tests compare each schedule here with theirs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from autopar.errors import UsageError

SCHEDULES = ("constant", "linear", "cosine", "wsd")


@dataclass(frozen=True)
class Schedule:
    """`name`, one of SCHEDULES, after `warmup` steps in which the rate rises linearly:

    constant  the rate itself
    linear    falls in a line to `floor` (a part of the rate) at `steps`
    cosine    falls along half a cosine to `floor` at `steps` (Loshchilov and Hutter 2017, without restarts)
    wsd       warm up, stay, decay: the rate itself until the last `decay` steps, then in a line to `floor`
              (Hu et al. 2024, MiniCPM; Hägele et al. 2024). `decay`: a tenth of `steps` if not given

    `steps`: of the whole run; only `constant` goes without. Raises UsageError for what does not fit together.
    """

    name: str = "constant"
    steps: int | None = None
    warmup: int = 0
    floor: float = 0.0
    decay: int | None = None

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise UsageError(
                f"there is no schedule {self.name!r}", where="schedule", hint=f"one of {', '.join(SCHEDULES)}"
            )
        if self.steps is None and self.name != "constant":
            raise UsageError(
                f"the schedule {self.name!r} ends, and no number of steps is given",
                where="schedule",
                hint="steps=1000",
            )
        if self.warmup < 0 or not 0.0 <= self.floor <= 1.0:
            raise UsageError(
                f"a schedule with warmup {self.warmup} and floor {self.floor}",
                where="schedule",
                hint="warmup=0 or more steps; floor, the part of the rate that is left, from 0 to 1",
            )
        if self.decay is not None and (self.name != "wsd" or self.decay < 1):
            raise UsageError(
                f"decay={self.decay} of the schedule {self.name!r}",
                where="schedule",
                hint="decay=1 or more steps, of the schedule wsd only",
            )
        if self.steps is not None and self.warmup + (self._decay if self.name == "wsd" else 0) > self.steps:
            raise UsageError(
                f"{self.warmup} steps of warm-up"
                + (f" and {self._decay} of decay" if self.name == "wsd" else "")
                + f" are more than the run's {self.steps}",
                where="schedule",
                hint="a shorter warm-up, or more steps",
            )

    @property
    def _decay(self) -> int:
        assert self.steps is not None
        return self.decay if self.decay is not None else max(1, self.steps // 10)

    def factor(self, step: int) -> float:
        """What the learning rates of step `step`, counted from 0, are multiplied by. Steps after the last have its."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.name == "constant":
            return 1.0
        assert self.steps is not None
        length = self._decay if self.name == "wsd" else self.steps - self.warmup
        passed = min(max(step - (self.steps - length), 0) / length, 1.0) if length else 1.0
        left = 0.5 * (1 + math.cos(math.pi * passed)) if self.name == "cosine" else 1 - passed
        return self.floor + (1 - self.floor) * left

    def apply(self, optimizer: Optimizer, step: int) -> None:
        """Set the learning rates of step `step`, counted from 0: each group's own times the factor.

        A group's own rate is what it has when it is first seen here; it is then in the group as `initial_lr`, where
        torch's schedulers keep it too.
        """
        factor = self.factor(step)
        for group in optimizer.param_groups:
            rate = group["lr"]
            if isinstance(rate, Tensor):
                initial = group.setdefault("initial_lr", rate.clone())
                rate.copy_(initial * factor)
            else:
                group["lr"] = group.setdefault("initial_lr", rate) * factor
