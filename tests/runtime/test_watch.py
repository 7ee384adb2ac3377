"""What the watch says of ranks it heard of, without processes; and device time told by events."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.errors import HangError
from autopar.mesh import Mesh
from autopar.runtime.observe import COMPUTE, DATA, OPTIMIZER, Collective, Observer, Place, ranks_text
from autopar.runtime.watch import State, Watch

REDUCE = Collective("all_reduce", "tp", (0, 1, 2, 3), (torch.float32, torch.Size([4, 8])))


def observer(world: int = 4, device: str = "cpu") -> Observer:
    groups = SimpleNamespace(mesh=Mesh.of({"tp": world}), rank=0, device=torch.device(device))
    model = SimpleNamespace(groups=groups, functions={}, observer=None)
    return Observer(model, torch.optim.SGD([torch.zeros(1, requires_grad=True)]))


def watch(seen: Observer, timeout_s: float = 300.0, say: Callable[[str], None] = print, **more: Any) -> Watch:
    return Watch(seen, timeout_s=timeout_s, say=say, **more)


def state(rank: int, place: Place, waiting: Collective | None = None, at: str = "") -> State:
    return State(rank, 1, place.step, str(place), str(waiting or ""), 41.0, at, "far away", 7, "", {})


FORWARD = Place(
    step=12, kind=COMPUTE, part="forward", path="model.layers.4", block="layer", node="all_reduce_1"
)


def test_the_rank_that_is_not_there_comes_first() -> None:
    seen = observer()
    seen.place = Place(step=12, kind=COMPUTE, part="forward", path="model.layers.4", waiting=REDUCE)
    told = watch(seen)
    for rank in (1, 2):
        told._hear(state(rank, seen.place, REDUCE))
    told._hear(state(3, FORWARD, at="loader.py:88 in read"))
    assert told.judge() == (
        "rank 3 (process 7 on far) is still in forward of model.layers.4 (block layer), node all_reduce_1 of step 12 "
        "since 41 s (loader.py:88 in read); ranks 0 to 2 wait in all_reduce over tp (ranks 0 to 3) of float32[4, 8], "
        "in forward of model.layers.4 of step 12"
    )


def test_ranks_in_different_collectives_are_all_told() -> None:
    seen = observer(2)
    seen.place = Place(step=3, note="reducing gradients", waiting=REDUCE)
    told = watch(seen)
    told._hear(state(1, FORWARD, Collective("all_gather", "tp", (0, 1))))
    text = told.judge()
    assert text.startswith("every rank waits, and not for the same: ")
    assert "rank 0 waits in all_reduce over tp" in text
    assert "rank 1 waits in all_gather over tp" in text


def test_a_rank_that_never_told_anything_is_named() -> None:
    seen = observer(3)
    seen.place = Place(waiting=REDUCE)
    told = watch(seen)
    told._hear(state(1, FORWARD, REDUCE))
    assert "rank 2 told nothing yet" in told.judge()


def test_a_store_that_does_not_answer_is_told() -> None:
    seen = observer(2)
    seen.place = Place(waiting=REDUCE)
    told = watch(seen)
    told._told -= 100
    assert "the store of the process group does not answer" in told.judge()


def test_a_silent_rank_is_told_as_such() -> None:
    seen = observer(2)
    seen.place = Place(waiting=REDUCE)
    told = watch(seen)
    told._hear(state(1, FORWARD))
    told._heard[1] = (1, time.monotonic() - 60)
    assert "rank 1 (process 7 on far) does not answer since 60 s" in told.judge()


def ended(seen: Observer, timeout_s: float, say: Callable[[str], None] = print) -> list[HangError]:
    """Let a watch run for a while, alone."""
    found: list[HangError] = []
    told = watch(seen, timeout_s, say, end=lambda error, rank: found.append(error))
    told.start()
    time.sleep(timeout_s * 1.5)
    told.stop()
    return found


def test_data_that_never_comes_is_a_hang() -> None:
    seen = observer(1)
    with seen.doing(DATA, "reading shard 3"):
        (error,) = ended(seen, 0.4)
    assert "is still in reading shard 3 of step 0" in str(error)
    assert error.exit_code == 8


def test_long_compute_is_only_said() -> None:
    seen, lines = observer(1), []
    with seen.doing(COMPUTE):
        assert ended(seen, 0.4, lines.append) == []
    assert "no progress since" in lines[0]
    assert "test_watch.py" in lines[0]


def test_no_hang_is_seen_in_a_run_that_goes_on() -> None:
    seen, found = observer(1), []
    told = watch(seen, 1.6, found.append, end=lambda error, rank: found.append(error))
    told.start()
    for step in range(8):
        seen.at_step(step)
        with seen.doing(DATA):
            time.sleep(0.25)
    told.stop()
    assert found == []


@pytest.mark.parametrize(
    ("ranks", "text"), [((1,), "rank 1"), ((0, 1), "ranks 0, 1"), ((2, 3, 4), "ranks 2 to 4"), ((0, 2, 4), "ranks 0, 2, 4")]
)  # fmt: skip
def test_ranks_read_as_words(ranks: tuple[int, ...], text: str) -> None:
    assert ranks_text(ranks) == text


class Event:
    """As torch.cuda.Event, at a time that the test sets."""

    def __init__(self, at_s: float, over: bool = True) -> None:
        self.at_s, self.over = at_s, over

    def query(self) -> bool:
        return self.over

    def elapsed_time(self, end: Event) -> float:
        return (end.at_s - self.at_s) * 1e3


def test_device_time_is_taken_off_compute_once_it_is_over() -> None:
    seen = observer(device="cuda")
    seen.take_seconds()
    seen.seconds[COMPUTE] = 1.0
    seen._events = [
        ("communication tp", REDUCE, Event(0.0), Event(0.2)),
        (OPTIMIZER, None, Event(0.5), Event(0.8, over=False)),
    ]
    found = seen.take_seconds()
    assert found["communication tp"] == pytest.approx(0.2)
    assert found[COMPUTE] == pytest.approx(0.8)
    assert OPTIMIZER not in found
    seen._events[0][3].over = True
    seen.seconds[COMPUTE] = 1.0
    assert seen.take_seconds()[OPTIMIZER] == pytest.approx(0.3)


def test_on_a_device_the_first_collective_that_is_not_over_is_waited_for() -> None:
    seen = observer(device="cuda")
    other = Collective("all_gather", "fsdp", (0, 1))
    seen._events = [
        ("communication fsdp", other, Event(0.0), Event(0.1)),
        ("communication tp", REDUCE, Event(0.1), Event(0.2, over=False)),
        ("communication fsdp", other, Event(0.2), Event(0.3, over=False)),
    ]
    assert seen.waits_for() == REDUCE
