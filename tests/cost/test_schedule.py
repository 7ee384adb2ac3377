"""Pipeline schedules: orders that are complete and never stall, closed forms and bounds against the simulator, cuts
against brute force, and what the papers say of bubbles and memory."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.schedule import (
    FOLDED,
    SCHEDULES,
    Action,
    Timeline,
    bound_s,
    cut,
    cut_bound_s,
    in_flight,
    order,
    placement,
    simulate,
    step_s,
)
from autopar.errors import InfeasibleError, UsageError

SPLIT = ("zb-h1", *FOLDED)
seconds = st.floats(0.1, 4.0)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """A schedule, stages, chunks and micro-batches."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    chunks = 2 if name in FOLDED else draw(st.integers(1, 4)) if name == "interleaved" else 1
    return name, draw(st.integers(1, 6)), chunks, draw(st.integers(1, 20))


def run(
    name: str,
    stages: int,
    chunks: int,
    micro_batches: int,
    f: float = 1,
    b: float = 1,
    w: float = 1,
    send: float = 0,
    overlap: float = 0,
) -> Timeline:
    """Simulate stages that are alike; seconds are those of all the chunks of a rank."""
    virtual = stages * chunks
    costs = ([cost / chunks] * virtual for cost in (f, b, w))
    return simulate(order(name, stages, chunks, micro_batches), *costs, send, overlap=overlap)


# Orders


@settings(max_examples=120, deadline=None)
@given(pipelines())
def test_every_order_runs_each_forward_and_each_backward_once_on_the_rank_that_holds_it(case) -> None:
    name, stages, chunks, micro_batches = case
    ranks = placement(name, stages, chunks)
    done = Counter()
    for rank, actions in enumerate(order(*case)):
        for action in actions:
            assert ranks[action.chunk] == rank
            for part in "IW" if action.kind == "B" else action.kind:
                done[part, action.chunk, action.micro_batch] += 1

    expected = itertools.product("FIW", range(stages * chunks), range(micro_batches))

    assert done == Counter(expected)


@settings(max_examples=150, deadline=None)
@given(pipelines(), st.integers(0, 2**32 - 1))
def test_a_timeline_keeps_every_dependency_and_runs_one_action_at_a_time(case, seed) -> None:
    name, stages, chunks, _ = case
    virtual = stages * chunks
    random = np.random.default_rng(seed)
    f, b, w = random.random((3, virtual)) + 0.1
    send = random.random(virtual - 1)
    timeline = simulate(order(*case), f, b, w, send if virtual > 1 else 0.0)
    cost = {"F": f, "I": b, "W": w, "B": b + w}
    hop = send * (np.diff(placement(name, stages, chunks)) != 0)
    start, end = {}, {}
    for log in timeline.events:
        for (_, before, _), (after, _, _) in itertools.pairwise(log):
            assert after >= before
        for begin, finish, (kind, v, k, _) in log:
            assert finish - begin == pytest.approx(cost[kind][v])
            for part in "IW" if kind == "B" else kind:
                start[part, v, k], end[part, v, k] = begin, finish

    for (part, v, k), begin in start.items():
        if part == "F" and v > 0:
            assert begin >= end["F", v - 1, k] + hop[v - 1]
        if part == "I":
            assert begin >= end["F", v, k]
            if v < virtual - 1:
                assert begin >= end["I", v + 1, k] + hop[v]
        if part == "W":
            assert begin >= min(end["I", v, k], start["I", v, k])


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("micro_batches", [8, 13])
@pytest.mark.parametrize(
    ("name", "peer"), [("zbv", "ScheduleZBVZeroBubble"), ("dualpipev", "ScheduleDualPipeV")]
)
def test_v_orders_are_those_of_torch(name, peer, stages, micro_batches) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    kinds = {schedules.F: "F", schedules.I: "I", schedules.W: "W", schedules.FULL_BACKWARD: "B"}

    class Peer:
        pp_group_size, num_stages, _n_microbatches = stages, 2 * stages, micro_batches

    for rank, actions in enumerate(order(name, stages, 2, micro_batches)):
        theirs = getattr(schedules, peer)._calculate_single_rank_operations(Peer(), rank)
        flat = [part for action in theirs if action for part in (action.sub_actions or (action,))]

        assert [action[:3] for action in actions] == [
            (kinds[part.computation_type], part.stage_index, part.microbatch_index) for part in flat
        ]


def test_an_order_that_cannot_go_on_is_refused() -> None:
    stuck = [[Action("B", 0, 0), Action("F", 0, 0)], [Action("F", 1, 0), Action("B", 1, 0)]]

    with pytest.raises(UsageError, match="rank 0 waits for ever"):
        simulate(stuck, [1, 1], [1, 1], [1, 1])


def test_chunks_that_a_schedule_cannot_have_are_refused() -> None:
    with pytest.raises(UsageError, match="zbv has 2"):
        order("zbv", 4, 1, 8)


# Closed forms and bounds


@settings(max_examples=250, deadline=None)
@given(pipelines(), seconds, seconds, seconds, st.sampled_from([0.0, 0.05, 0.5, 2.0]))
def test_the_closed_form_is_never_above_the_simulator(case, f, b, w, send) -> None:
    assert step_s(*case, f, b, w, send) <= run(*case, f, b, w, send).makespan_s * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(pipelines(), seconds, seconds, seconds)
def test_the_closed_form_is_the_simulator_where_hops_take_no_time(case, f, b, w) -> None:
    name, stages, _, micro_batches = case
    loose = 0.03 if name == "zbv" and micro_batches < 2 * stages - 1 else 1e-9

    assert step_s(*case, f, b, w) == pytest.approx(run(*case, f, b, w).makespan_s, rel=loose)


@settings(max_examples=200, deadline=None)
@given(pipelines(), seconds, seconds, seconds, st.floats(0.0, 0.3))
def test_the_closed_form_is_near_the_simulator_with_hops_shorter_than_a_forward(case, f, b, w, share) -> None:
    name, stages, chunks, micro_batches = case
    send = share * min(f, b, w) / chunks
    loose = 0.06 if name in FOLDED and micro_batches < 2 * stages else 0.03 if name in FOLDED else 1e-9

    assert step_s(*case, f, b, w, send) == pytest.approx(run(*case, f, b, w, send).makespan_s, rel=loose)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6), st.integers(1, 20), seconds, seconds, seconds, st.floats(0.0, 1.0))
def test_the_closed_form_is_never_above_the_simulator_with_overlap(p, m, f, b, w, overlap) -> None:
    simulated = run("dualpipev", p, 2, m, f, b, w, 0.0, overlap).makespan_s

    assert step_s("dualpipev", p, 2, m, f, b, w, overlap=overlap) <= simulated * (1 + 1e-9)


def test_the_closed_form_takes_arrays_of_anything() -> None:
    stages, micro_batches, f = np.array([[2], [4]]), np.array([4, 8, 16]), np.array([1.0, 2.0, 3.0])

    table = step_s("1f1b", stages, 1, micro_batches, f, 1.0, 1.0, 0.1)

    assert table == pytest.approx(
        np.array(
            [
                [run("1f1b", p, 1, m, g, 1, 1, 0.1).makespan_s for m, g in zip((4, 8, 16), f, strict=True)]
                for p in (2, 4)
            ]
        )
    )


@settings(max_examples=150, deadline=None)
@given(pipelines(), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.1, 1.0]))
def test_the_bound_is_never_above_the_simulator_for_stages_that_differ(case, seed, hop) -> None:
    name, stages, chunks, micro_batches = case
    virtual = stages * chunks
    random = np.random.default_rng(seed)
    costs = random.random((3, virtual)) * 2.0 ** random.integers(-2, 3, (3, 1))
    send = hop * random.random(virtual - 1) if virtual > 1 else 0.0
    simulated = simulate(order(*case), *costs, send).makespan_s

    for split in (True,) if name in SPLIT else (True, False):
        bound = bound_s(stages, chunks, micro_batches, *costs, send, folded=name in FOLDED, split=split)

        assert bound <= simulated * (1 + 1e-9)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_the_bound_is_reached_by_stages_that_are_alike(name) -> None:
    chunks = 3 if name == "interleaved" else 1
    cost = np.full(4 * chunks, 1 / chunks)

    assert bound_s(4, chunks, 8, cost, cost, cost, split=False) == pytest.approx(
        run(name, 4, chunks, 8).makespan_s
    )


def test_bounds_of_many_costs_at_once() -> None:
    costs = np.random.default_rng(0).random((3, 5, 8))

    together = bound_s(4, 2, 6, *costs, 0.1)

    assert together == pytest.approx([float(bound_s(4, 2, 6, *costs[:, case], 0.1)) for case in range(5)])


# Memory


@settings(max_examples=200, deadline=None)
@given(pipelines())
def test_activations_in_flight_are_those_of_the_simulator(case) -> None:
    name, stages, chunks, micro_batches = case
    peaks = run(*case).peak_in_flight

    assert list(in_flight(name, stages, chunks, micro_batches, np.arange(stages))) == list(peaks)
    assert in_flight(*case) == max(peaks)


# What the papers say


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_1f1b_and_gpipe(name) -> None:
    assert run(name, 4, 1, 12).bubble == pytest.approx(3 / (12 + 3))


def test_interleaving_divides_the_bubble_by_the_chunks() -> None:
    work = 12 * 3.0

    plain, interleaved = (
        run("1f1b", 4, 1, 12).makespan_s - work,
        run("interleaved", 4, 3, 12).makespan_s - work,
    )

    assert interleaved == pytest.approx(plain / 3)


def test_interleaving_keeps_its_bubble_where_stages_do_not_divide_the_micro_batches() -> None:
    assert run("interleaved", 4, 2, 11).makespan_s == pytest.approx(11 * 3 + 3 * 3 / 2)


def test_splitting_the_backward_takes_two_thirds_off_the_bubble_in_the_memory_of_1f1b() -> None:
    split, plain = run("zb-h1", 4, 1, 12), run("1f1b", 4, 1, 12)

    assert split.makespan_s - 36 == pytest.approx((plain.makespan_s - 36) / 3)
    assert max(split.peak_in_flight) == max(plain.peak_in_flight) == 4


@pytest.mark.parametrize(("name", "alive"), [("zbv", 8), ("dualpipev", 9)])
def test_v_schedules_leave_only_the_way_to_the_last_rank_and_balance_memory(name, alive) -> None:
    timeline = run(name, 4, 2, 12)

    assert timeline.makespan_s == pytest.approx(36 + 3 / 2)
    assert list(timeline.peak_in_flight) == [alive] * 4


def test_overlap_hides_forwards_behind_backwards() -> None:
    assert run("dualpipev", 4, 2, 16, overlap=0.5).makespan_s < 0.9 * run("dualpipev", 4, 2, 16).makespan_s


def test_the_simulator_is_fast() -> None:
    actions = order("interleaved", 16, 8, 128)
    cost = np.ones(128)
    began = time.process_time()

    simulate(actions, cost, cost, cost, 0.1)

    assert time.process_time() - began < 1.0  # 0.1 s on an idle core


# Cuts


def loads(
    layers: np.ndarray, counts: tuple[int, ...], stages: int, ranks: np.ndarray, extras: tuple[float, float]
) -> np.ndarray:
    ends = np.cumsum(counts)
    virtual = np.array([layers[end - n : end].sum() for end, n in zip(ends, counts, strict=True)])
    virtual[0] += extras[0]
    virtual[-1] += extras[1]
    return np.bincount(ranks, virtual, stages)


def brute_force(
    layers: np.ndarray, stages: int, chunks: int, ranks: np.ndarray, extras: tuple[float, float]
) -> float:
    places = itertools.combinations(range(1, len(layers)), stages * chunks - 1)
    cuts = (np.diff([0, *ends, len(layers)]) for ends in places)
    return min(loads(layers, tuple(counts), stages, ranks, extras).max() for counts in cuts)


@st.composite
def models(draw: st.DrawFn, chunks: int) -> tuple[list[tuple[float, int]], int, tuple[float, float]]:
    stages = draw(st.integers(1, 6 // chunks))
    runs = draw(st.lists(st.tuples(seconds, st.integers(1, 5)), min_size=1, max_size=3))
    runs.append((draw(seconds), max(0, stages * chunks - sum(count for _, count in runs))))
    return runs, stages, draw(st.sampled_from([(0.0, 0.0), (0.3, 1.2), (2.5, 6.0)]))


@settings(max_examples=100, deadline=None)
@given(models(1))
def test_a_cut_without_chunks_is_the_best(model) -> None:
    runs, stages, extras = model
    layers, ranks = np.repeat(*zip(*runs, strict=True)), placement("1f1b", stages, 1)

    counts = cut(runs, stages, first_extra=extras[0], last_extra=extras[1])

    assert sum(counts) == len(layers)
    assert loads(layers, counts, stages, ranks, extras).max() == pytest.approx(
        brute_force(layers, stages, 1, ranks, extras)
    )


@settings(max_examples=60, deadline=None)
@given(models(2), st.sampled_from(["interleaved", "zbv"]))
def test_a_cut_into_chunks_is_near_the_best_and_its_bound_below(model, schedule) -> None:
    runs, stages, extras = model
    layers, ranks = np.repeat(*zip(*runs, strict=True)), placement(schedule, stages, 2)
    best = brute_force(layers, stages, 2, ranks, extras)

    counts = cut(runs, stages, 2, schedule=schedule, first_extra=extras[0], last_extra=extras[1])

    assert loads(layers, counts, stages, ranks, extras).max() <= 1.34 * best
    assert cut_bound_s(runs, stages, first_extra=extras[0], last_extra=extras[1]) <= best * (1 + 1e-9)


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("layers", [24, 29, 37])
def test_like_layers_in_chunks_are_cut_as_well_as_whole_layers_allow(chunks, layers) -> None:
    counts = cut([(1.0, layers)], 4, chunks, schedule="interleaved", last_extra=1.0)

    heaviest = loads(np.ones(layers), counts, 4, placement("interleaved", 4, chunks), (0.0, 1.0)).max()

    assert heaviest == -(-(layers + 1) // 4)


def test_what_a_cut_leaves_open_is_spread_evenly() -> None:
    assert cut([(1.0, 10)], 4) == (2, 3, 2, 3)


def test_a_cut_keeps_within_each_ranks_memory() -> None:
    runs, memory = [(1.0, 4), (0.1, 20)], [1.0, 2.0]

    counts = cut(runs, 4, memory=memory, limits=[14.0, 14.0, 14.0, 6.0])
    held = np.repeat(memory, [4, 20])

    assert (
        max(np.diff(np.concatenate([[0.0], held.cumsum()])[[0, *np.cumsum(counts)]]) / [14, 14, 14, 6]) <= 1
    )
    with pytest.raises(InfeasibleError):
        cut(runs, 4, memory=memory, limits=[10.0] * 4)


def test_too_few_layers_are_refused() -> None:
    with pytest.raises(UsageError, match="7 layers for 8 virtual stages"):
        cut([(1.0, 7)], 4, 2)
