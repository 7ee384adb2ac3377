"""A ring under causality: in order or in zigzag, as the prices say."""

from __future__ import annotations

import pytest
from hand_problems import parse_problem

from autopar.cluster import load_cluster
from autopar.cost.prices import Prices
from autopar.mesh import Mesh
from autopar.passes.candidates import candidates
from autopar.passes.pricing import Pricer
from autopar.rules.attention import EVEN_LOAD, ROWS_AND_KEYS

HEADS, WIDTH, RANKS = 32, 128, 4
MESH = Mesh.parse(f"cp={RANKS}")


def priced(seq: int, cluster: str) -> tuple[Pricer, dict[str, float], dict[str, float]]:
    """Choice -> seconds, forward and backward, and bytes sent."""
    shape = f"1, {HEADS}, {seq}, {WIDTH}"
    problem = parse_problem(
        f"""
        value a/q: bfloat16[{shape}] gradient source
        value a/k: bfloat16[{shape}] gradient source
        value a/v: bfloat16[{shape}] gradient source
        value a/o: bfloat16[{shape}] gradient
        op a/o = autopar.attention(a/q, a/k, a/v) -> a/o x1: b h q d!, b h k! d!, b h k! d! -> b h q d! {{b: batch, h: heads, q: sequence}} options special=frozenset('q'), lowering='causal_attention', pairs={(ROWS_AND_KEYS, EVEN_LOAD)}, flops_per_point=2.0
        """,
        outputs=["a/o"],
        batch=1,
    )
    pricer = Pricer(problem, MESH, Prices.of(load_cluster(cluster), MESH, "bf16", problem))
    (op,) = problem.ops
    found = {str(each.as_choice["cp"]): each for each in candidates(op, problem, MESH)}
    seconds = {choice: sum(pricer.op_s(op, each)) for choice, each in found.items()}
    return pricer, seconds, {choice: pricer.sent_inside(op, each) for choice, each in found.items()}


@pytest.mark.parametrize("cluster", ["h100:1x4", "h100:4x1"])
def test_long_sequences_are_balanced_and_short_ones_keep_their_order(cluster: str) -> None:
    _, short, _ = priced(512, cluster)
    _, long, _ = priced(1 << 17, cluster)

    assert short["q~k"] < short["q~k~zigzag"]
    assert long["q~k~zigzag"] < long["q~k"]


def test_with_all_compute_counted_once_a_balanced_ring_takes_half() -> None:
    """At a million tokens what is sent does not count."""
    _, seconds, _ = priced(1 << 20, "h100:1x4")

    assert seconds["q~k~zigzag"] / seconds["q~k"] == pytest.approx(0.5, rel=0.02)


def test_bytes_of_the_exchange() -> None:
    """Queries, keys, values and the result once there, their gradients once back."""
    seq = 1024
    _, _, sent = priced(seq, "h100:1x4")

    piece = 2 * HEADS * WIDTH * seq / RANKS
    assert sent["q~k~zigzag"] - sent["q~k"] == 2 * 4 * piece


def test_pieces_that_cannot_be_halved_are_no_candidates() -> None:
    _, seconds, _ = priced(516, "h100:1x4")

    assert "q~k" in seconds
    assert "q~k~zigzag" not in seconds
