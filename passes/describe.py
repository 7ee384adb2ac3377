"""Describe: the Workload of a captured training Program, for any model, read off its Problem.

In:  a Program with named axes and its Problem (and, if there is one, a placement for some tp).
Out: runs of equal layers with their products, attention, fused groups of pointwise ops, and what the backward keeps,
     per token: every size is a whole value's divided by batch times sequence, so a convolution over 56 x 56 positions
     of a sample without a sequence axis is 3136 rows per "token".

    op layers/linear = aten.linear(x, w) : b s k, n k -> b s n  {n: ffn}  ->  Matmul("mlp.up", 4096, 14336, "column")

What a layer keeps follows `cost.memory.activations`, with two differences: a view keeps all of the value that it is a
view of, as autograd does, and ops that a product lies between are never one kernel. A bias that is added to a product
is part of the product. What stands outside of layers (embedding, last norm, head, loss) is the Workload's own fields;
outside products other than the head, such as a patch convolution, become layers that run once.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from autopar.cost.compute import kind_of
from autopar.passes.describe_block import BlockView
from autopar.passes.describe_experts import written_out
from autopar.passes.describe_facts import Facts
from autopar.problem import Op, Problem, Solution
from autopar.program import Program
from autopar.workload import Attention, Layer, Workload


def describe(program: Program, problem: Problem, *, solution: Solution | None = None) -> Workload:
    """The Workload of a training Program at the sequence length it was captured with.

    `solution`: a placement with a mesh axis `tp`; it then says how every op splits, else the logical axes do.
    """
    program, problem, solution = written_out(program, problem, solution)
    facts = Facts.of(program, problem, solution)
    head = _find_head(facts)
    # A parameter belongs to the first call that reads it; a call that shares all it reads with another is a variant.
    owned: set[str] = set()
    runs: list[tuple[Layer, int]] = []
    built: dict[tuple[str, tuple[str, ...], bool], Layer] = {}
    loose: list[str] = []  # parameters of what stands outside of layers
    tables: list[str] = []
    for position, call in enumerate(program.calls):
        block = program.blocks[call.block]
        own = [
            (node, name)
            for node, name in zip(block.state, call.state, strict=True)
            if name not in owned and program.state[name].kind == "parameter"
        ]
        owned.update(name for _, name in own)
        fresh = dict(own)
        if not call.path:
            read = {operands for op in facts.ops[call.block] for operands in _tables(op)}
            tables += [name for node, name in own if f"{call.block}/{node}" in read]
            fresh = {node: name for node, name in fresh.items() if f"{call.block}/{node}" not in read}
            if head is not None and head.block == call.block and position == head.position:
                fresh = {node: name for node, name in fresh.items() if name != head.weight}
            if not facts.has_products(call.block, head.op if head is not None else None):
                loose += fresh.values()
                facts.note_outside(call.block)
                continue
        inside = head.op if head is not None and head.block == call.block else None
        key = (call.block, tuple(sorted(fresh)), bool(call.path))
        if key not in built:
            layer = BlockView(facts, call, frozenset(fresh), inside).layer()
            twins = sum(
                other[0] == call.block for other in built
            )  # of this block, with other parameters of its own
            built[key] = replace(layer, name=f"{layer.name} #{twins + 1}") if twins else layer
        layer = built[key]
        if runs and runs[-1][0] is layer:
            runs[-1] = (layer, runs[-1][1] + 1)
        else:
            runs.append((layer, 1))
    parameters = {name: info for name, info in program.state.items() if info.kind == "parameter"}
    unread = [name for name in parameters if name not in owned]
    total = sum(math.prod(info.shape) for info in parameters.values())
    frozen = sum(math.prod(info.shape) for info in parameters.values() if not info.trainable)
    size = {name: math.prod(info.shape) for name, info in parameters.items()}
    tied = head is not None and head.weight in tables
    attention = [op for layer, _ in runs for op in layer.ops if isinstance(op, Attention)]
    widths = Counter(layer.hidden for layer, count in runs for _ in range(count))
    return Workload(
        name=program.name,
        layers=tuple(runs),
        hidden=head.k if head is not None else widths.most_common(1)[0][0] if widths else 0,
        seq=facts.seq,
        vocab=head.n if head is not None else 0,
        embedding=sum(size[name] for name in tables),
        head=size[head.weight] if head is not None and not tied else 0,
        tied=tied,
        heads=max((op.heads for op in attention), default=0),
        kv_heads=min((op.kv_heads for op in attention), default=0),
        final_parameters=sum(size[name] for name in (*loose, *unread)),
        frozen=frozen / total if total else 0.0,
        notes=tuple(dict.fromkeys((*program.notes, *facts.notes))),
    )


@dataclass(frozen=True)
class _Head:
    """The product that makes the logits of a language model's loss."""

    op: str
    block: str
    position: int
    weight: str  # the state that it reads
    k: int
    n: int


def _find_head(facts: Facts) -> _Head | None:
    """The product that makes the logits of a loss over a vocabulary, one row per token."""
    if not any(op.rule is not None and kind_of(op) == "embedding" for op in facts.problem.ops):
        return None
    program = facts.program
    for position, call in reversed(list(enumerate(program.calls))):
        if call.path:
            continue
        for op in reversed(facts.ops[call.block]):
            if kind_of(op) != "cross_entropy":
                continue
            name = op.operands[0]
            while name in facts.maker and kind_of(facts.maker[name]) in ("free", "pointwise"):
                name = facts.maker[name].operands[0]
            product = facts.product(facts.maker[name]) if name in facts.maker else None
            if product is None or product.weight is None or facts.seq == 1:
                continue
            if abs(product.share - 1.0) > 2.0 / facts.seq or product.n <= 1:
                continue
            block = program.blocks[call.block]
            state = dict(zip(block.state, call.state, strict=True))
            weight = state[product.weight.split("/", 1)[1]]
            return _Head(product.op.name, call.block, position, weight, product.k, product.n)
    return None


def _tables(op: Op) -> tuple[str, ...]:
    return op.operands[:1] if kind_of(op) == "embedding" else ()
