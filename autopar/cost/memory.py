"""Memory: bytes one rank holds at the peak of a training step, by kind.

In:  a Problem at the micro-batch's size with a placement; how many parameter elements a rank stores.
Out: {"weights": ..., "gradients": ..., "optimizer": ..., "activations": ..., ...}.

What autograd keeps for the backward (the operands of products, the q, k, v and output of attention, the inputs of
norms and other nonlinear ops) is read off the Problem, each value once, at the size of the piece the op takes. The
bytes per parameter are those of mixed-precision AdamW (Rajbhandari et al. 2020, "ZeRO", section 3.1), with fp32
gradients:

    fp32   weight 4 + gradient 4 + moments 8
    bf16   fp32 master 4 + gradient 4 + moments 8 + a bf16 copy 2 (with fsdp only of what is gathered)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.cost.compute import LINEAR, fused_values, kind_of
from autopar.mesh import Mesh
from autopar.problem import Choice, Op, Problem
from autopar.sharding import Sharding

# Ops whose gradient needs their result and not their operand.
KEEPS_RESULT = frozenset(
    f"aten.{name}"
    for name in ("exp", "rsqrt", "sqrt", "tanh", "sigmoid", "relu", "reciprocal", "softmax", "_softmax")
)
PRODUCTS = frozenset(f"aten.{name}" for name in ("mul", "div", "true_divide"))
# The kinds of memory: what a rank stores of the parameters, and what scales with the micro-batch.
STORED = ("weights", "gradients", "optimizer")
BUFFERS, ACTIVATIONS, LOGITS, WORKSPACE = (
    "gather and reduce buffers",
    "activations",
    "logits and loss",
    "workspace",
)
SCALING = (ACTIVATIONS, LOGITS, WORKSPACE)
FRAGMENTS, RESERVED = "fragmentation", "reserved"
GRADIENT_BYTES = 4
FRAGMENTATION = (
    0.04  # of what comes and goes within a step; assumed, beside the floor in a device's `reserved_bytes`
)
BUCKET_BYTES = (
    25 * 2**20
)  # gradients in flight of data-parallel reduction, torch's DistributedDataParallel default


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one rank. `kept`: by block, what all its calls keep; `inputs`: what all its calls
    keep when the block is recomputed; `one`: what one call keeps; `logits`: the loss's own; `workspace`: the largest
    values in flight."""

    kept: Mapping[str, float]
    inputs: Mapping[str, float]
    one: Mapping[str, float]
    logits: float
    workspace: float

    def peak(self, recomputed: Iterable[str]) -> float:
        """Bytes kept until the backward begins, and on top one call's of a block that is recomputed."""
        again = set(recomputed)
        held = sum(self.inputs[block] if block in again else kept for block, kept in self.kept.items())
        return held + max((self.one[block] for block in again), default=0.0)


def activations(
    problem: Problem,
    mesh: Mesh,
    choices: Mapping[str, Choice],
    shardings: Mapping[str, Sharding],
    item_bytes: Mapping[str, int],
    fused: bool,
) -> Activations:
    """What one micro-batch's forward keeps on a rank."""
    sizes = mesh.sizes
    maker = {name: op for op in problem.ops for name in op.results}
    inside = fused_values(problem) if fused else frozenset()
    kept: dict[str, dict[tuple[str, float], float]] = defaultdict(dict)
    near_loss = _makes_logits(problem, maker)
    logits = workspace = 0.0

    def local(name: str, sharding: Sharding) -> float:
        info = problem.values[name].info
        ways = math.prod(sizes[axis] for axes in sharding.dims for axis in axes)
        return math.prod(info.shape) * item_bytes[info.dtype] / ways

    def keep(block: str, name: str, sharding: Sharding) -> None:
        """Keep a value; a view's memory is its operand's, and what a fused kernel makes it makes again."""
        root = name
        while root in maker and maker[root].free:
            root = maker[root].operands[0]
        if root in inside:
            for operand in maker[root].operands:
                keep(block, operand, shardings[operand])
            return
        if not problem.values[root].state:
            size = local(name, sharding)
            kept[block][root, size] = size

    for op in problem.ops:
        block = op.name.split("/", 1)[0]
        made = [name for name in op.results if name in problem.values]
        if op.free or not any(problem.values[name].gradient for name in made):
            continue
        uses = _uses(op, problem, choices, mesh)
        sizes_made = [local(name, shardings[name]) for name in made if name not in inside]
        if kind_of(op) == "cross_entropy":
            info = problem.values[op.operands[0]].info
            elements = local(op.operands[0], uses[0]) / item_bytes[info.dtype]
            logits += elements * (
                2 * item_bytes[info.dtype] + 4
            )  # the logits, their gradient, a softmax in fp32
            continue
        if op.operands and op.name not in near_loss:
            workspace = max(workspace, *sizes_made, 0.0)
        for name, use in _kept_of(op, problem, uses, shardings):
            keep(block, name, use)
    blocks = {op.name.split("/", 1)[0]: op.times for op in problem.ops}
    totals = {block: sum(kept[block].values()) for block in blocks}
    shared = {
        block: sum(size for (root, _), size in kept[block].items() if not problem.values[root].gradient)
        for block in blocks
    }
    entering: dict[str, float] = dict.fromkeys(blocks, 0.0)
    for name, value in problem.values.items():
        if name not in maker and not value.state and value.gradient:
            entering[name.split("/", 1)[0]] += local(name, shardings[name])
    return Activations(
        kept={
            block: (totals[block] - shared[block]) * times + shared[block] for block, times in blocks.items()
        },
        inputs={block: entering[block] * times for block, times in blocks.items()},
        one=totals,
        logits=logits,
        workspace=3 * workspace,
    )


def _uses(op: Op, problem: Problem, choices: Mapping[str, Choice], mesh: Mesh) -> list[Sharding]:
    """The sharding in which the op takes each operand."""
    if op.rule is None:
        return [Sharding.whole(len(problem.values[name].info.shape)) for name in op.operands]
    return [use.sharding for use in op.rule.shard(choices[op.name], mesh.sizes).uses]


def _makes_logits(problem: Problem, maker: Mapping[str, Op]) -> set[str]:
    """The ops between the last product and the loss, that product included: their results are counted as logits."""
    found: set[str] = set()
    for op in problem.ops:
        name = op.operands[0] if kind_of(op) == "cross_entropy" else ""
        while name in maker:
            found.add(maker[name].name)
            name = maker[name].operands[0] if kind_of(maker[name]) in ("free", "pointwise") else ""
    return found


def _kept_of(
    op: Op, problem: Problem, uses: list[Sharding], shardings: Mapping[str, Sharding]
) -> Iterable[tuple[str, Sharding]]:
    """What the backward of one op needs, as torch's derivatives.yaml has it."""
    gradients = [problem.values[name].gradient for name in op.operands]
    results = [(name, shardings[name]) for name in op.results if name in problem.values]
    operands = list(zip(op.operands, uses, strict=True))
    kind = kind_of(op)
    if kind == "attention":
        return [*operands, *results]
    if kind == "embedding":
        return operands[1:]
    if kind == "matmul" or op.kind in PRODUCTS:
        return [
            operand
            for index, operand in enumerate(operands)
            if any(flows for other, flows in enumerate(gradients) if other != index)
        ]
    if op.kind in LINEAR:
        return []
    return results if op.kind in KEEPS_RESULT else operands


def static_bytes(
    stored: float, frozen_bytes: float, largest_call: float, precision: str, fsdp: int
) -> dict[str, float]:
    """Bytes that do not depend on the batch.

    `stored`: elements of trainable parameters a rank holds, already divided over tp but not over fsdp;
    `largest_call`: those of the largest single call of a block. Under fsdp two calls' parameters are gathered at a
    time (one in use, one on its way), and one call's gradient is whole before it is reduced.
    """
    copy = 2 if precision == "bf16" else 4
    own = stored / fsdp
    weights = 4 * own + (2 * own if precision == "bf16" and fsdp == 1 else 0.0)
    buffers = 2 * largest_call * copy + largest_call * GRADIENT_BYTES if fsdp > 1 else float(2 * BUCKET_BYTES)
    return {
        "weights": weights + frozen_bytes,
        "gradients": GRADIENT_BYTES * own,
        "optimizer": 8 * own,
        BUFFERS: min(buffers, stored * (copy + GRADIENT_BYTES)),
    }
