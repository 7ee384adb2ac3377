"""On two ranks: every step forward and backward, and cross-entropy over a split vocabulary, against whole tensors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar import Mesh, collectives
from autopar.runtime.groups import end_rank, join_mesh, leave, wait_for_all
from tests.runtime.processes import write_result

SIZE = 2


def whole(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def steps(group: str, rank: int, place: Tensor) -> dict[str, bool]:
    """Each step from this rank's input to its output; the gradient that comes back for a known gradient of the output."""
    x, g = whole(0, 4, 6), whole(1, 4, 6)
    addends = [whole(2 + r, 4, 6) for r in range(SIZE)]  # partial sums, or gradients that arrive as sums
    total = addends[0] + addends[1]
    piece = lambda tensor, dim: tensor.chunk(SIZE, dim)[rank]  # noqa: E731
    cases: dict[str, tuple[Any, Tensor, Tensor, Tensor, Tensor]] = {
        # name: function, input, expected output, gradient of the output, expected gradient of the input
        "copy": (lambda t: collectives.copy(t, group), x, x, addends[rank], total),
        "all_reduce": (lambda t: collectives.all_reduce(t, group, False), addends[rank], total, g, g),
        "all_reduce sums": (
            lambda t: collectives.all_reduce(t, group, True),
            addends[rank],
            total,
            addends[rank],
            total,
        ),
    }
    for dim in (0, 1):
        cases |= {
            f"all_gather {dim}": (
                lambda t, d=dim: collectives.all_gather(t, d, group, SIZE, place, False), piece(x, dim), x, g, piece(g, dim)
            ),
            f"all_gather sums {dim}": (
                lambda t, d=dim: collectives.all_gather(t, d, group, SIZE, place, True),
                piece(x, dim), x, addends[rank], piece(total, dim),
            ),
            f"reduce_scatter {dim}": (
                lambda t, d=dim: collectives.reduce_scatter(t, d, group, SIZE), addends[rank], piece(total, dim), piece(g, dim), g
            ),
            f"slice {dim}": (
                lambda t, d=dim: collectives.slice_own(t, d, group, SIZE, place), x, piece(x, dim), piece(g, dim), g
            ),
            f"all_to_all {dim}": (
                lambda t, d=dim: collectives.all_to_all(t, d, 1 - d, group, SIZE),
                piece(x, dim), piece(x, 1 - dim), piece(g, 1 - dim), piece(g, dim),
            ),
        }  # fmt: skip
    results = {}
    for name, (function, value, expected, gradient, expected_gradient) in cases.items():
        leaf = value.clone().requires_grad_()
        output = function(leaf)
        output.backward(gradient)
        assert leaf.grad is not None
        results[name] = close(output, expected) and close(leaf.grad, expected_gradient)
    return results


def losses(group: str, rank: int, place: Tensor) -> dict[str, bool]:
    """Cross-entropy with tokens or vocabulary split equals torch's, smoothed or not, with labels ignored unevenly."""
    logits = whole(5, 4, 3, 10) * 5
    labels = torch.randint(0, 10, (4, 3), generator=torch.Generator().manual_seed(6))
    labels[0], labels[3, 1] = -100, -100
    results = {}
    for smoothing in (0.0, 0.1):
        leaf = logits.clone().requires_grad_()
        expected = torch.nn.functional.cross_entropy(
            leaf.flatten(0, 1), labels.flatten(), label_smoothing=smoothing
        )
        expected.backward()
        assert leaf.grad is not None
        for split in ("tokens", "vocabulary"):
            dim = 0 if split == "tokens" else 2
            mine = logits.chunk(SIZE, dim)[rank].clone().requires_grad_()
            if split == "tokens":
                arguments: tuple[Any, ...] = ([group], [], 1, None)
                taken = labels.chunk(SIZE, 0)[rank]
            else:
                arguments, taken = ([], [group], SIZE, place), labels
            share, count = collectives.split_cross_entropy(mine, taken, -100, "mean", smoothing, *arguments)
            loss = collectives.all_reduce(share, group, False) if split == "tokens" else share
            loss.backward()
            assert mine.grad is not None
            right = (
                close(loss, expected)
                and close(mine.grad, leaf.grad.chunk(SIZE, dim)[rank])
                and int(count) == 8
            )
            results[f"cross-entropy, {split}, smoothing {smoothing}"] = right
    return results


def embeddings(rank: int, place: Tensor) -> dict[str, bool]:
    weight, ids = whole(7, 10, 4), torch.tensor([[0, 4, 5], [9, 2, 5]])
    results = {}
    for padding in (-1, 5):
        leaf = weight.clone().requires_grad_()
        expected = torch.nn.functional.embedding(ids, leaf, padding_idx=padding if padding >= 0 else None)
        gradient = whole(8, 2, 3, 4)
        expected.backward(gradient)
        assert leaf.grad is not None
        mine = weight.chunk(SIZE)[rank].clone().requires_grad_()
        share = collectives.vocab_embedding(mine, ids, place, padding)
        total = share.detach().clone()
        dist.all_reduce(total)
        share.backward(gradient)
        assert mine.grad is not None
        results[f"embedding, padding {padding}"] = close(total, expected) and close(
            mine.grad, leaf.grad.chunk(SIZE)[rank]
        )
    return results


def attention(rank: int, place: Tensor) -> dict[str, bool]:
    query, key, value = whole(9, 2, 4, 6, 8), whole(10, 2, 2, 6, 8), whole(11, 2, 2, 6, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    found = collectives.causal_attention(query.chunk(SIZE, 2)[rank], key, value, SIZE, place, enable_gqa=True)
    return {"causal attention of a slice of the queries": close(found, expected.chunk(SIZE, 2)[rank])}


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    groups = join_mesh(Mesh.parse("tp=2"))
    arguments = (groups.name("tp"), groups.coordinate["tp"], groups.coordinate_tensor("tp"))
    write_result(
        {**steps(*arguments), **losses(*arguments), **embeddings(*arguments[1:]), **attention(*arguments[1:])}
    )
    wait_for_all()
    leave()
    end_rank()
