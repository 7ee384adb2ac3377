"""Pipelines over pools of unlike devices: the cut against brute force, the plan against each pool by itself."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.cluster import load_cluster
from autopar.cost.software import default_software
from autopar.errors import InfeasibleError
from autopar.passes.decisions import parse_decisions
from autopar.passes.layout_mixed import cut_by_speed, search_any, search_mixed
from autopar.passes.layout_search import search_layouts
from autopar.passes.layout_space import Space
from autopar.transformer_shape import TransformerShape

SHAPE = TransformerShape("13b", 40, 5120, 40, 13824, 32000)
SOFTWARE = default_software()


def space(cluster: str, batch: int = 256, fix: tuple[str, ...] = ()) -> Space:
    return Space(SHAPE.workload(4096), load_cluster(cluster), batch, parse_decisions(fix))


@pytest.mark.parametrize("seed", range(40))
def test_cut_is_the_best_of_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    stages, depth = int(random.integers(1, 5)), int(random.integers(1, 9))
    seconds, extra = random.uniform(0.5, 3.0, stages), random.uniform(0.0, 2.0, stages)
    room = list(random.uniform(0.0, 6.0, stages))
    every = [
        cuts for cuts in itertools.product(*(range(int(most) + 1) for most in room)) if sum(cuts) == depth
    ]
    found = cut_by_speed(depth, seconds, extra, room)
    if not every:
        assert found is None
        return
    assert found is not None
    assert sum(found) == depth
    assert all(cut <= most for cut, most in zip(found, room, strict=True))
    best = min(float((extra + seconds * np.array(cuts)).max()) for cuts in every)
    assert float((extra + seconds * np.array(found)).max()) == pytest.approx(best)


def test_fast_pools_get_more_layers_and_both_together_are_faster_than_either() -> None:
    found, cluster, note = search_any(space("h100:4x8+a100:4x8"), SOFTWARE)
    assert cluster.mixed
    assert "h100" in str(note)
    cuts = found.best.layout.cuts
    half = len(cuts) // 2
    assert sum(cuts) == SHAPE.layers
    assert sum(cuts[:half]) > 1.5 * sum(cuts[half:])
    for alone in ("h100:4x8", "a100:4x8"):
        assert found.best.step_s < search_layouts(space(alone), SOFTWARE).best.step_s
    assert found.bound_s <= found.best.step_s <= 1.2 * found.bound_s  # the bound lets no stage wait


def test_a_pool_that_only_slows_the_others_down_is_left_idle() -> None:
    _, cluster, note = search_any(space("h100:8x8+v100:1x8"), SOFTWARE)
    assert not cluster.mixed or cluster.device_count == 72
    assert note


def test_pools_that_no_stage_divides() -> None:
    assert search_mixed(space("h100:1x7+a100:1x8", fix=("tp=2",)), SOFTWARE) is None


def test_a_model_that_no_pool_holds_is_refused() -> None:
    big = TransformerShape("1t", 128, 25600, 160, 102400, 51200, gated=False).workload(2048)
    with pytest.raises(InfeasibleError, match="GiB"):
        search_any(Space(big, load_cluster("v100:1x8+a100:1x8"), 64), SOFTWARE)
