"""Attention with every loop split, by its own lowering on simulated ranks, against attention on whole tensors.

Each case is a choice of the op's rule. Operands are cut as the rule says, the lowered op runs on the pieces, and what
the pieces make together, forward and for the gradient of every operand, is compared with a plain softmax.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from autopar import Mesh, attention_blocks, collectives, functional
from autopar.attention_ring import Places
from autopar.errors import ShardingError
from autopar.passes.lower import RankBlock
from autopar.passes.lowerings import LOWERINGS
from autopar.problem import Op
from autopar.rules import PAIR, Rule, Sharded, rule_for
from autopar.rules.selftest import assemble, coordinates, example_call
from autopar.runtime.groups import join_mesh
from autopar.runtime.model import bind
from autopar.runtime.simulate import simulate
from autopar.sharding import Sharding
from tests.runtime.processes import run_on

BATCH, ROWS, WIDTH, WIDTH_OUT = 4, 8, 6, 4
EVEN_LOAD = "q~k~zigzag"


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """What attention means, written out: a softmax over all scores."""
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])
    if causal:
        scores = scores.masked_fill(distance < 0, -torch.inf)
    if window is not None:
        scores = scores.masked_fill(distance.abs() >= window, -torch.inf)
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1) if sinks.dim() == 1 else sinks
        scores = torch.cat([scores, column.expand(*scores.shape[:-1], 1)], -1)
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)
    return weights[..., : key.shape[2]] @ value


# ---- the op on pieces, as a block would hold it ----------------------------------------------------------------------


class Builder:
    """A block of the one op, as far as a lowering sees it."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.graph = mesh, Graph()
        self.coordinates = {
            axis: self.graph.placeholder(f"coordinate_{axis}") for axis, size in mesh.axes if size > 1
        }

    def coordinate(self, axis: str) -> Node:
        return self.coordinates[axis]

    def place(self, axes: Sequence[str]) -> tuple[Node, int]:
        place, ways = self.coordinates[axes[0]], self.mesh.sizes[axes[0]]
        for axis in axes[1:]:
            place = self.graph.call_function(
                collectives.place_of, (place, self.mesh.sizes[axis], self.coordinates[axis])
            )
            ways *= self.mesh.sizes[axis]
        return place, ways

    def is_loss(self, node: Node) -> bool:
        return False

    def count_labels(self, count: Node) -> None:
        raise AssertionError


def local_block(rule: Rule, sharded: Sharded, mesh: Mesh, args: Sequence[Any], kwargs: Any) -> RankBlock:
    build = Builder(mesh)
    source = Graph()
    names = [f"operand{index}" if isinstance(arg, Tensor) else None for index, arg in enumerate(args)]
    node = source.call_function(
        functional.attention, tuple(name and source.placeholder(name) for name in names), kwargs
    )
    operands = [build.graph.placeholder(name) for name in names if name]
    op = Op("block/op", "autopar.attention", tuple(n for n in names if n), ("op",), rule, 1, False, {})
    needed = any(factor in rule.special or PAIR in factor for factor in sharded.by_factor)
    if needed:
        assert rule.lowering is not None
        result = LOWERINGS[rule.lowering](build, node, op, sharded, operands)
    else:
        supply = iter(operands)
        result = build.graph.call_function(
            functional.attention, tuple(name and next(supply) for name in names), kwargs
        )
    build.graph.output(result)
    module = GraphModule(torch.nn.Module(), build.graph)
    return RankBlock("block", module, tuple(build.coordinates), (), tuple(n for n in names if n), ("op",))


def errors(args: Sequence[Any], kwargs: Any, mesh_text: str, choice: Mapping[str, str | None]) -> list[float]:
    """How far the result, and the gradient of each operand, put together from all ranks, are from the whole op's."""
    mesh = Mesh.parse(mesh_text)
    rule = rule_for(example_call(functional.attention, args, "autopar.attention", kwargs))
    assert rule is not None
    sharded = rule.shard(choice, mesh.sizes)
    block = local_block(rule, sharded, mesh, args, kwargs)
    operands = [arg for arg in args if isinstance(arg, Tensor)]
    whole = [leaf(operand) for operand in operands]
    supply = iter(whole)
    expected = plain_attention(*(None if arg is None else next(supply) for arg in args), **kwargs)
    given = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(9))
    expected.backward(given)

    def on_rank(rank: int) -> list[Tensor | None]:
        groups = join_mesh(mesh)
        local = [
            leaf(groups.cut(operand, use.sharding))
            for operand, use in zip(operands, sharded.uses, strict=True)
        ]
        places = [groups.coordinate_tensor(axis) for axis in block.coordinates]
        result = bind(block, groups)(*places, *local)
        result.backward(groups.cut(given, sharded.results[0]))
        return [result.detach(), *(operand.grad for operand in local)]

    ranks = simulate(mesh.device_count, on_rank, timeout_s=60)
    laid = [sharded.results[0], *(Sharding(use.sharding.dims, use.grad_sums) for use in sharded.uses)]
    wanted = [expected.detach(), *(operand.grad for operand in whole)]
    found = []
    for index, (target, sharding) in enumerate(zip(wanted, laid, strict=True)):
        if target is None:
            continue
        pieces = {at: ranks[number][index] for number, at in enumerate(coordinates(mesh))}
        for together in assemble(pieces, target.shape, sharding, mesh):  # type: ignore[arg-type]
            found.append(float((together - target).abs().max()))
    return found


def leaf(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return copy.requires_grad_() if copy.is_floating_point() else copy


# ---- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Sizes and flags of one attention."""

    heads: int = 4
    kv_heads: int = 2
    keys: int = ROWS
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    mask: str = ""
    sinks: str = ""

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        draw = torch.Generator().manual_seed(3)

        def x(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, dtype=torch.float64)

        masks = {
            "": lambda: None,
            "bool": lambda: x(BATCH, 1, ROWS, self.keys) > -0.5,
            "keys": lambda: x(BATCH, 1, 1, self.keys) > -1.0,
            "bias": lambda: x(1, self.heads, ROWS, self.keys),
            "bias of keys": lambda: x(1, self.heads, 1, self.keys),
            "nothing": lambda: torch.zeros(1, 1, ROWS, self.keys, dtype=torch.bool),
        }
        sinks = {
            "": lambda: None,
            "heads": lambda: x(self.heads),
            "rows": lambda: x(BATCH, self.heads, ROWS, 1),
        }
        args = [
            x(BATCH, self.heads, ROWS, WIDTH),
            x(BATCH, self.kv_heads, self.keys, WIDTH),
            x(BATCH, self.kv_heads, self.keys, WIDTH_OUT),
            masks[self.mask](),
            sinks[self.sinks](),
        ]
        flags = {"causal": self.causal, "window": self.window, "softcap": self.softcap}
        return args, {name: value for name, value in flags.items() if value}


CASES = {
    "causal": Case(),
    "full": Case(causal=False),
    "heads equal": Case(kv_heads=4),
    "one head of keys": Case(kv_heads=1),
    "window": Case(window=3),
    "window of one": Case(window=1),
    "window both ways": Case(window=3, causal=False),
    "softcap": Case(softcap=1.5),
    "sinks": Case(sinks="heads"),
    "window, sinks": Case(window=3, sinks="heads", kv_heads=4),
    "sinks of rows": Case(sinks="rows"),
    "mask": Case(mask="bool", causal=False),
    "causal mask": Case(mask="bool"),
    "mask of keys": Case(mask="keys", causal=False),
    "bias": Case(mask="bias"),
    "bias, softcap, window": Case(mask="bias", softcap=2.0, window=4),
    "bias of keys": Case(mask="bias of keys", causal=False),
    "nothing to see": Case(mask="nothing", causal=False),
    "nothing but sinks": Case(mask="nothing", causal=False, sinks="heads"),
    "cross": Case(keys=12, causal=False),
    "cross, mask of keys": Case(keys=4, causal=False, mask="keys"),
}
CHOICES: list[tuple[str, dict[str, str]]] = [
    ("cp=2", {"cp": "q"}),
    ("cp=4", {"cp": "q"}),
    ("cp=2", {"cp": "q~k"}),
    ("cp=4", {"cp": "q~k"}),
    ("tp=2", {"tp": "heads"}),
    ("tp=2", {"tp": "kv.rep"}),
    ("tp=4", {"tp": "kv.rep"}),
    ("cp=2,tp=2", {"cp": "q~k", "tp": "heads"}),
    ("cp=2,tp=2", {"cp": "q~k", "tp": "kv.rep"}),
    ("cp=2,tp=2", {"cp": "q", "tp": "kv.rep"}),
    ("cp=2,tp=2", {"cp": "heads", "tp": "kv.rep"}),
    ("cp=2,tp=2", {"cp": "kv.rep", "tp": "heads"}),
    ("cp=2,tp=2", {"cp": "q", "tp": "q"}),
    ("cp=2,tp=2", {"cp": "q~k", "tp": "q"}),
    ("cp=2", {"cp": EVEN_LOAD}),
    ("cp=4", {"cp": EVEN_LOAD}),
    ("cp=2,tp=2", {"cp": EVEN_LOAD, "tp": "kv.rep"}),
    ("cp=2,tp=2", {"cp": EVEN_LOAD, "tp": "q"}),
    ("cp=2,tp=2", {"cp": "q", "tp": EVEN_LOAD}),
    ("cp=2,tp=2", {"cp": "q", "tp": "q~k"}),
    ("dp=2,cp=2", {"dp": "b", "cp": "q~k"}),
]


def cases() -> list[Any]:
    found = []
    for name, (mesh, choice) in itertools.product(CASES, CHOICES):
        case = CASES[name]
        grouped = 1 < case.kv_heads < case.heads
        if "kv.rep" in choice.values() and not grouped:
            continue
        if EVEN_LOAD in choice.values() and not (case.causal and case.window is None):
            continue  # in order, the load is even
        if "heads" in choice.values():
            choice = {axis: ("kv" if grouped else "h") if f == "heads" else f for axis, f in choice.items()}
        shown = ",".join(f"{axis}->{factor}" for axis, factor in choice.items())
        found.append(pytest.param(name, mesh, choice, id=f"{name}: {mesh}: {shown}"))
    return found


@pytest.mark.parametrize(("name", "mesh", "choice"), cases())
def test_pieces_of_attention_make_the_whole(name: str, mesh: str, choice: dict[str, str]) -> None:
    args, kwargs = CASES[name].arguments()

    assert max(errors(args, kwargs, mesh, choice)) < 1e-12


@pytest.mark.parametrize("heads", [6, 12])
def test_heads_that_end_in_the_middle_of_a_group(heads: int) -> None:
    """3 heads of keys over 2 ranks: the second head of keys serves heads of both."""
    args, kwargs = Case(heads=heads, kv_heads=3, mask="bias").arguments()

    assert max(errors(args, kwargs, "tp=2", {"tp": "kv.rep"})) < 1e-12


@pytest.mark.parametrize("name", ["causal", "window", "bias, softcap, window", "sinks", "cross"])
@pytest.mark.parametrize(("mesh", "choice"), [("cp=2", {"cp": "q~k"}), ("cp=2", {"cp": "q"})])
def test_tiles_smaller_than_a_piece(
    name: str, mesh: str, choice: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_blocks, "TILE", 3)
    args, kwargs = CASES[name].arguments()

    assert max(errors(args, kwargs, mesh, choice)) < 1e-12


@pytest.mark.parametrize("name", ["causal", "causal mask", "sinks of rows"])
def test_an_even_load_with_small_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_blocks, "TILE", 1)
    args, kwargs = CASES[name].arguments()

    assert max(errors(args, kwargs, "cp=2", {"cp": EVEN_LOAD})) < 1e-12


def test_an_even_load_on_an_odd_number_of_ranks() -> None:
    """The rank in the middle sends both of its pieces to one other."""
    draw = torch.Generator().manual_seed(2)
    args = [torch.randn(2, heads, 12, 4, generator=draw, dtype=torch.float64) for heads in (4, 2, 2)]

    assert max(errors(args, {"causal": True}, "cp=3", {"cp": EVEN_LOAD})) < 1e-12


def test_an_even_load_is_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores computed by each rank of four: in order 1, 3, 5 and 7 sixteenths, in zigzag a quarter each."""
    monkeypatch.setattr(attention_blocks, "TILE", 1)
    options = attention_blocks.Options(causal=True)

    def computed(rank: int, zigzag: bool) -> int:
        places = Places(((rank, 4, True),), "cp", rank, 4, zigzag)
        tiles = attention_blocks._tiles
        return sum(1 for holder in range(4) for _ in tiles(options, places.rows(64), places.keys(holder, 64)))

    in_order = [computed(rank, False) for rank in range(4)]
    assert sum(in_order) == sum(computed(rank, True) for rank in range(4)) == 256 * 257 // 2
    assert max(in_order) / sum(in_order) > 0.43
    assert len({computed(rank, True) for rank in range(4)}) == 1


def test_pieces_that_cannot_be_halved_keep_their_order() -> None:
    args = [torch.randn(1, 2, 6, 4) for _ in range(3)]
    rule = rule_for(example_call(functional.attention, args, "autopar.attention", {"causal": True}))
    assert rule is not None
    with pytest.raises(ShardingError, match="size 6, not divisible by 4"):
        rule.shard({"cp": EVEN_LOAD}, {"cp": 2})


@pytest.mark.timeout(150)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_ring_of_processes(ranks: int) -> None:
    """What simulated ranks do, gloo does too, also compiled."""
    results = run_on(ranks, "attention_worker.py", timeout=140)

    for found in results:
        assert max(found.values()) < 1e-12, found
