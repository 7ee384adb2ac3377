"""Time of one layer: seconds of one layer for one micro-batch on one rank, and of the model's ends; arrays over a Grid.

Kernels by roofline (`rates.py`), traffic by hierarchical alpha-beta (`traffic.py`). A layer's time depends on few of a
layout's numbers, so a grid is priced at its distinct combinations of those (`Grid.compact`) and spread from there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from autopar.cluster import Link
from autopar.cost.grid import Array, Grid
from autopar.cost.layout_memory import recompute_share, sequence_ways
from autopar.cost.rates import Rates
from autopar.cost.software import Software
from autopar.cost.traffic import Groups
from autopar.layout import RECOMPUTE, SCHEDULES
from autopar.workload import Attention, Layer, Matmul, Stream, Workload, attention_flops

# DualPipe runs each all-to-all beside the products of the micro-batch that goes the other way (DeepSeek-V3 report,
# section 3.2.1).
# Launches per product in 8 bits: each operand's largest value, its cast and its cast transposed (Transformer Engine).
_LAUNCHES_8_BIT = 8.0
_DUALPIPE, _DUALPIPE_EXPOSED = SCHEDULES.index("dualpipev"), 0.1


@dataclass(frozen=True)
class LayerTime:
    """Seconds that one layer takes for one micro-batch on one rank, as arrays over the grid: `f` forward, `b` input
    gradients, `w` weight gradients, `again` what recompute runs twice, its traffic that nothing hides, and what
    `hidden` traffic takes from the kernels that run beside it."""

    f: Array
    b: Array
    w: Array
    again: Array
    tensor: Array
    context: Array
    expert: Array
    hidden: Array

    @property
    def traffic(self) -> Array:
        return self.tensor + self.context + self.expert

    @property
    def total(self) -> Array:
        return self.f + self.b + self.w + self.again + self.traffic + self.hidden

    def spread(self, index: Any) -> LayerTime:
        return LayerTime(*(getattr(self, field.name)[index] for field in fields(self)))


class Ends(NamedTuple):
    """Seconds of the embedding (first stage) and of head and loss (last stage), forward and backward."""

    first_f: Array
    first_b: Array
    last_f: Array
    last_b: Array

    def spread(self, index: Any) -> Ends:
        return Ends(*(part[index] for part in self))


class LayerTimes:
    """Prices layers for the layouts of a (compact) grid."""

    def __init__(
        self, workload: Workload, grid: Grid, links: tuple[Link, ...], rates: Rates, software: Software
    ) -> None:
        self.workload, self.grid, self.rates, self.software = workload, grid, rates, software
        self.seq = workload.seq
        self.tokens: Array = grid.mbs * self.seq / grid.cp  # of one micro-batch on one rank
        self.ways = sequence_ways(grid)
        self.half = np.where(grid.precision == 0, 4.0, 2.0)  # bytes of an activation element
        self.share = recompute_share(workload, grid)
        self.tensor_group = Groups(links, grid.tp, 1)
        self.context_group = Groups(links, grid.cp, grid.tp)
        self.inner_group = Groups(links, grid.etp, 1)
        self.links = links

    def mean(self) -> LayerTime:
        """The mean over all layers of the model."""
        counts: dict[int, tuple[Layer, int]] = {}
        for layer, count in self.workload.layers:
            counts[id(layer)] = layer, count + counts.get(id(layer), (layer, 0))[1]
        parts = [(self.layer(layer), count / self.workload.depth) for layer, count in counts.values()]
        return LayerTime(
            *(
                np.asanyarray(sum(getattr(part, field.name) * share for part, share in parts))
                for field in fields(LayerTime)
            )
        )

    def layer(self, layer: Layer) -> LayerTime:
        """One layer of a kind."""
        g, soft = self.grid, self.software
        zero = 0.0 * self.tokens
        f, b, w, cheap, products, context = zero, zero, zero, zero, zero, zero
        kernels = 0
        for op in layer.ops:
            if isinstance(op, Matmul):
                forward, gradient, weight = self._matmul(op)
                f, b, w = f + forward, b + gradient, w + weight
                products = products + forward
                kernels += 1
            elif isinstance(op, Attention):
                forward, backward = self._attention(op)
                f, b = f + forward, b + backward
                context = context + self._ring(op, forward, backward)
                if self.rates.unfused:  # what selective recompute is for (Korthikanti et al. 2022, section 5)
                    cheap = cheap + forward
                kernels += 6 if self.rates.unfused else 1
            else:
                forward, backward = self._stream(op)
                f, b = f + forward, b + backward
                if op.kind in ("norm", "activation") and not self.rates.unfused:
                    cheap = cheap + forward
                kernels += op.kernels
        host = kernels * self.rates.host_s + self._expert_launches(layer)
        wait = soft.expert_s if layer.experts else 0.0
        f = np.maximum(f, host) + wait
        b = np.maximum(b + w, 2 * host) - w + wait
        full = g.recompute == RECOMPUTE.index("full")
        some = g.recompute == RECOMPUTE.index("selective")
        again = self.share * np.where(full, f, np.where(some, cheap + soft.selective_matmul * products, 0.0))
        # full recompute repeats the forward half of a layer's traffic
        tensor = self._tensor(layer) * np.where(full, 1 + 0.5 * self.share, 1.0)
        expert = self._expert(layer) * np.where(full, 1 + 0.5 * self.share, 1.0)
        context = context * np.where(full, 1 + self.share / 3, 1.0)
        open_experts = np.where(
            g.schedule == _DUALPIPE, min(_DUALPIPE_EXPOSED, soft.ep_exposed), soft.ep_exposed
        )
        # the overlap of tensor parallelism with its products is made of copies inside a node
        within = self.links[0].size or np.inf
        open_tensor = np.where(g.tp > within, 1.0, soft.tp_exposed)
        hidden = (1 - open_tensor) * tensor + (1 - open_experts) * expert
        return LayerTime(
            f,
            b,
            w,
            again,
            open_tensor * tensor,
            context,
            open_experts * expert,
            soft.contention * hidden,
        )

    def _expert_launches(self, layer: Layer) -> Array:
        """Seconds of the host for the products of experts that are launched one by one; in 8 bits each with the
        quantization of its operands."""
        g = self.grid
        local = max(1, layer.experts) / np.minimum(g.ep, max(1, layer.experts))
        each = (
            self.software.expert_kernels
            * np.where(g.precision >= 2, _LAUNCHES_8_BIT, 1.0)
            * self.rates.host_s
        )
        return np.asarray(len(layer.expert_matmuls) * local * each)

    # ---- kernels -------------------------------------------------------------------------------------------------

    def _matmul(self, op: Matmul) -> tuple[Array, Array, Array]:
        """(forward, input gradient, weight gradient) seconds."""
        g = self.grid
        local: Any = 1.0
        precision = g.precision
        if op.experts:
            ep = np.minimum(g.ep, op.experts)
            local = op.experts / ep
            m = self.tokens * op.share * ep * g.etp / g.tp / op.experts  # rows that meet one expert
            n = op.n / (g.etp if op.split == "column" else 1)
            k = op.k / (g.etp if op.split == "row" else 1)
        else:
            m = self.tokens * op.share
            n = op.n / (g.tp if op.split == "column" else 1)
            k = op.k / (g.tp if op.split == "row" else 1)
            if op.split in ("none", "sequence"):
                m = m / self.ways
            if op.name == "router":
                precision = np.minimum(precision, 1)
        forward = self.rates.matmul_s(m, n, k, local, precision)
        gradient = self.rates.matmul_s(m, k, n, local, precision)
        if not op.trained:
            return forward, gradient, 0.0 * m
        weight = self.rates.matmul_s(k, n, m, local, precision, quantized=False)
        return forward, gradient, weight + self.software.accumulate_bytes * local * k * n / self.rates.memory

    def _attention(self, op: Attention) -> tuple[Array, Array]:
        g = self.grid
        flops = attention_flops(op, self.workload.seq) * self.tokens / g.tp
        moved = self.tokens * (op.heads + op.kv_heads) * (op.qk_dim + op.v_dim) / g.tp
        scores = self.tokens * self.seq * op.heads / g.tp
        keys = np.minimum(self.seq, op.window) if op.window else self.seq
        return self.rates.attention_s(
            flops, moved * self.half, scores * self.half, min(op.qk_dim, op.v_dim), keys
        )

    def _stream(self, op: Stream) -> tuple[Array, Array]:
        g = self.grid
        ways: Any = 1
        if op.share != 1.0:  # rows of experts are spread over all of tp
            ways = g.tp
        elif op.split == "sequence":
            ways = self.ways
        elif op.split in ("column", "row", "inner"):
            ways = g.tp
        points = self.tokens * op.share / ways
        item = self.half * op.item / 2
        if op.share != 1.0 or op.kind == "router":
            item = item / self.software.expert_stream
        elif op.kind == "scan":
            item = item / self.software.scan
        return (
            self.rates.stream_s(points * op.forward * item, op.kernels),
            self.rates.stream_s(points * op.backward * item, op.kernels),
        )

    # ---- traffic -------------------------------------------------------------------------------------------------

    def _tensor(self, layer: Layer) -> Array:
        """Tensor-parallel traffic of forward and backward: with the sequence split a gather and a scatter per region
        each way (the gather that weight gradients need again hides behind them), else an all-reduce each way
        (Korthikanti et al. 2022, sections 4.1 and 4.2)."""
        size = self.tokens * layer.hidden * self.half
        one = self.tensor_group.seconds
        split = one("all_gather", size) + one("reduce_scatter", size)
        whole = one("all_reduce", size)
        return 2.0 * layer.regions * np.where(self.grid.sp.astype(bool), split, whole)

    def _ring(self, op: Attention, forward: Array, backward: Array) -> Array:
        """Context-parallel traffic: keys and values pass once round forward, they and their gradients backward; hidden
        behind the attention itself as far as that lasts."""
        g = self.grid
        size = self.tokens * op.kv_heads * (op.qk_dim + op.v_dim) / g.tp * self.half * g.cp
        one = self.context_group.seconds("all_gather", size)
        hides = 1.0 - self.software.cp_exposed
        open_f: Array = np.maximum(one - hides * forward, 0.1 * one)
        open_b: Array = np.maximum(2 * one - hides * backward, 0.2 * one)
        return open_f + open_b

    def _expert(self, layer: Layer) -> Array:
        """Dispatch and combine, forward and backward; with experts split by etp their tokens are gathered first."""
        g = self.grid
        if not layer.experts:
            return 0.0 * self.tokens
        ep = np.minimum(g.ep, layer.experts)
        size = self.tokens * g.etp / g.tp * (layer.dispatch or layer.hidden) * self.half
        group = Groups(self.links, ep, g.etp)
        one = group.dispatch(size, layer.topk, self.software.distinct)
        inner = self.inner_group.seconds("all_gather", size) + self.inner_group.seconds(
            "reduce_scatter", size
        )
        return 4.0 * one + 2.0 * inner

    # ---- the ends ------------------------------------------------------------------------------------------------

    def ends(self) -> Ends:
        """Embedding, head and loss."""
        g, w, rates = self.grid, self.workload, self.rates
        rows = self.tokens * w.hidden * self.half / self.ways
        first_f, first_b = rates.stream_s(2 * rows, 2), rates.stream_s(3 * rows, 2)
        if not w.vocab:
            return Ends(first_f, first_b, 0 * rows, 0 * rows)
        columns = w.vocab / g.tp
        precision = np.minimum(g.precision, 1)  # the head stays in 16 bits
        head = rates.matmul_s(self.tokens, columns, w.hidden, 1.0, precision)
        back = rates.matmul_s(self.tokens, w.hidden, columns, 1.0, precision)
        if w.frozen == 0.0:
            back = back + rates.matmul_s(w.hidden, columns, self.tokens, 1.0, precision)
        loss = rates.stream_s(self.tokens * columns * 12.0, 4)  # three passes over fp32 logits each way
        return Ends(first_f, first_b, w.losses * (head + loss), w.losses * (back + loss))
