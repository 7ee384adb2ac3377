"""Time of a layout: seconds of one training step by kind, on the slowest rank; arrays over a Grid.

Per rank: its layers and ends (`layer_time.py`) times the micro-batches; then what the pipeline's fill and drain, the
gradient reduction and the optimizer add that nothing hides.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar.cluster import Cluster
from autopar.cost.grid import Array, Grid, strides
from autopar.cost.held import Held
from autopar.cost.kept import saved_of_run
from autopar.cost.layer_time import Ends, LayerTime, LayerTimes
from autopar.cost.rates import Data, Rates
from autopar.cost.schedule import step_s
from autopar.cost.software import Software
from autopar.cost.traffic import Groups, Replicas, slowed
from autopar.layout import OFFLOAD, ORDERS, SCHEDULES
from autopar.workload import Layer, Workload

# The kinds of time, in the order of a page.
FORWARD, BACKWARD, AGAIN = "forward", "backward", "recompute"
TENSOR, CONTEXT, EXPERT = "tensor communication", "context communication", "expert communication"
PIPELINE, BUBBLE = "pipeline communication", "pipeline bubble"
DATA, HOST, OPTIMIZER, OTHER = "data communication", "host transfers", "optimizer", "other"
TIMES = (FORWARD, BACKWARD, AGAIN, TENSOR, CONTEXT, EXPERT, PIPELINE, BUBBLE, DATA, HOST, OPTIMIZER, OTHER)
# Adam reads the gradient, the master and two moments in fp32, and writes the last three and a 16-bit copy.
STATE_BYTES = 12
_FEWER = 3  # layers that an end of a pipeline may hold less than others
OPTIMIZER_BYTES = 4 * 4 + 3 * 4 + 2 + 4


class LayoutTime:
    """Prices the layouts of a grid. `micro_batches`: per data rank and step. `data`: constants of devices other than
    those of calibration.toml."""

    def __init__(
        self,
        workload: Workload,
        grid: Grid,
        held: Held,
        cluster: Cluster,
        software: Software,
        micro_batches: Array,
        data: Data | None = None,
    ) -> None:
        self.workload, self.grid, self.held, self.cluster = workload, grid, held, cluster
        self.software, self.micro_batches = software, micro_batches
        self.rates = Rates.of(cluster.device, software, data)
        self.links = slowed(cluster.links, self.rates.within, self.rates.across)
        self.half = np.where(grid.precision == 0, 4.0, 2.0)
        few, self._index = grid.compact
        self._times = LayerTimes(workload, few, self.links, self.rates, software)

    def layer(self, layer: Layer) -> LayerTime:
        """One layer of a kind, for one micro-batch."""
        return self._times.layer(layer).spread(self._index)

    def mean_layer(self) -> LayerTime:
        """The mean over all layers of the model."""
        return self._times.mean().spread(self._index)

    def ends(self) -> Ends:
        """Embedding, head and loss, for one micro-batch."""
        return self._times.ends().spread(self._index)

    def send_s(self) -> Array:
        """One hop of the pipeline: a micro-batch's hidden state to the rank of the next stage."""
        g = self.grid
        size = g.mbs * self.workload.seq / g.cp * self.workload.hidden * self.half / g.tp
        return np.where(g.pp > 1, Groups(self.links, g.pp, strides(g)[1]).send(size), 0.0)

    def kinds(self) -> dict[str, Array]:
        """Seconds of the step by kind."""
        g, soft, m = self.grid, self.software, self.micro_batches
        depth = float(self.workload.depth)
        one, ends = self.mean_layer(), self.ends()
        alone = g.pp == 1
        most = self.held.layers
        load = np.maximum(np.where(g.pp > 2, most * one.total, 0.0), self._ends_load(one, ends, most))
        inside = m * most
        times = {
            FORWARD: inside * one.f + np.where(alone, m * (ends.first_f + ends.last_f), 0.0),
            BACKWARD: inside * (one.b + one.w + one.hidden)
            + np.where(alone, m * (ends.first_b + ends.last_b), 0.0),
            AGAIN: inside * one.again,
            TENSOR: inside * one.tensor,
            CONTEXT: inside * one.context,
            EXPERT: inside * one.expert,
            PIPELINE: np.where(alone, 0.0, 2.0 * self.send_s() * soft.pp_exposed * m * g.vpp),
        }
        uneven = m * load - inside * one.total
        times[BUBBLE] = np.where(alone, 0.0, uneven + self._ramp(one, depth / g.pp))
        times[DATA] = self._data(one, depth / g.pp)
        times[HOST] = self._host(one, most)
        own = self.held.split(g.zero, 1) * self.held.trained
        times[OPTIMIZER] = self.rates.stream_s(own * OPTIMIZER_BYTES, 20)
        nodes = np.maximum(1.0, g.dp * g.tp * g.cp * g.pp / self.cluster.devices_per_node)
        share = soft.step_share + soft.straggle * np.log2(nodes)
        times[OTHER] = soft.step_s + share * sum(times.values())
        return times

    def _ends_load(self, one: LayerTime, ends: Ends, most: Array) -> Array:
        """Seconds of a micro-batch on the slower of the first and the last stage. Where the depth doesn't divide, the
        layers that are missing are missing there, where it helps most (Megatron-LM's uneven stages)."""
        spare = most * self.grid.pp - float(self.workload.depth)
        load = np.inf
        for fewer in range(_FEWER + 1):
            at_last = np.minimum(np.minimum(spare, most), fewer)
            at_first = np.minimum(np.minimum(spare - at_last, most), _FEWER)
            last = (most - at_last) * one.total + ends.last_f + ends.last_b
            first = (most - at_first) * one.total + ends.first_f + ends.first_b
            load = np.minimum(load, np.maximum(first, last))
        return np.asarray(load)

    def _ramp(self, one: LayerTime, layers: Array) -> Array:
        """What each rank of a pipeline waits while it fills and drains, beyond its own work, sends included: the
        schedule's own closed form for stages that are alike (`schedule.step_s`)."""
        g, m = self.grid, self.micro_batches
        send = self.send_s()
        blocking = g.vpp * send * self.software.pp_exposed
        f = layers * (one.f + (one.tensor + one.context + one.expert) / 2) + blocking
        w = layers * one.w
        b = layers * one.total + 2 * blocking - f - w
        out = 0.0 * m
        for code, name in enumerate(SCHEDULES):
            rows = np.flatnonzero((g.schedule == code) & (g.pp > 1))
            if len(rows):
                count, own = m[rows], (f[rows], b[rows], w[rows])
                whole = step_s(name, g.pp[rows], g.vpp[rows], count, *own, send[rows])
                out[rows] = whole - count * sum(own)
        return out

    def _host(self, one: LayerTime, layers: Array) -> Array:
        """Transfers to and from host memory that nothing hides. Optimizer state (fp32 master and two moments) goes in
        and out once per step, both ways at once, beside nothing; activations go out behind the forward of their
        micro-batch and come in behind its backward (Ren et al. 2021, "ZeRO-Offload"; Rhu et al. 2016, "vDNN")."""
        g = self.grid
        gbps = self.cluster.device.host_gbps
        if gbps is None or not np.any(g.offload > 0):
            return 0.0 * self.micro_batches
        states, activations = (
            np.isin(g.offload, [OFFLOAD.index(word), OFFLOAD.index("all")])
            for word in ("optimizer", "activations")
        )
        own = self.held.split(g.zero, 1) * self.held.trained
        kept = sum(
            count * saved_of_run(layer, self.workload, g, self.software)
            for layer, count in self.workload.layers
        ) / max(1, self.workload.depth)
        away = self.software.offloaded * kept / (gbps * 1e9)
        back = one.b + one.w + one.again
        waits = np.maximum(0.0, away - one.f) + np.maximum(0.0, away - back)
        once = states * own * STATE_BYTES / (gbps * 1e9)
        total: Array = once + activations * self.micro_batches * layers * waits
        return total

    def _data(self, one: LayerTime, layers: Array) -> Array:
        """Data-parallel traffic that nothing hides: reduction of gradients, gathering of parameters.

        ZeRO-0 all-reduces once per step; 1 scatters gradients and gathers parameters once per step; 2 scatters the
        gradients of every micro-batch; 3 gathers for each of its forwards and backwards besides.
        """
        g, soft, own = self.grid, self.software, self.held
        grad, copy, trained = np.minimum(soft.reduce_bytes, 2 * self.half), self.half, own.trained
        far = g.tp * np.maximum(1, g.ep * g.etp // g.tp)
        dense_all, dense_shard = self._replicas(own.ranks, g.tp), self._replicas(own.shard, g.tp)
        expert_all, expert_shard = (
            self._replicas(own.expert_ranks, far),
            self._replicas(own.expert_shard, far),
        )

        def both(kind: str, item: Any) -> Array:
            """A collective of the dense and of the expert parameters over the ranks that shard them."""
            return dense_shard.seconds(kind, own.dense * item) + expert_shard.seconds(
                kind, own.experts * item
            )

        reduce = dense_all.seconds("all_reduce", own.dense * grad * trained) + expert_all.seconds(
            "all_reduce", own.experts * grad * trained
        )
        scatter = both("reduce_scatter", grad * trained)
        copies = Groups(self.links, own.ranks // own.shard, g.tp * own.shard)
        across = copies.seconds("all_reduce", own.dense * grad * trained / own.shard)
        gather = both("all_gather", copy * trained)
        backward = layers * (one.b + one.w + one.again)
        forward = layers * one.f

        def exposed(traffic: Array, window: Array) -> Array:
            left: Array = np.maximum(traffic - window, soft.dp_exposed * traffic)
            return left

        replicated = exposed(reduce, soft.dp_window * backward)
        once = exposed(scatter + across, soft.dp_window * backward) + exposed(
            gather, soft.gather_window * forward
        )
        once = once + soft.gather_rank_s * np.where(own.shard > 1, own.shard, 0)
        twice = self.micro_batches * exposed(scatter, soft.dp_window * backward)
        twice = (
            twice + exposed(across, soft.dp_window * backward) + exposed(gather, soft.gather_window * forward)
        )
        twice = twice + soft.gather_rank_s * np.where(own.shard > 1, own.shard, 0)
        gathers = both("all_gather", copy)
        open_f = exposed(gathers, soft.fsdp_window * forward)
        open_b = exposed(gathers + scatter, soft.fsdp_window * backward)
        hidden = 2 * gathers + scatter - open_f - open_b
        each = self.micro_batches * (open_f + open_b + soft.contention * hidden)
        each = each + exposed(across, soft.dp_window * backward)
        # what keeps parameters whole under a pipeline reduces once per step too (torchtitan, Llama 3 section 3.3.2)
        again = (g.zero == 2) & ~((g.pp > 1) & soft.keeps_gathered)
        some = np.where(again, np.maximum(once, twice), once)
        return np.where(g.zero == 0, replicated, np.where(g.zero == 3, each, some))

    def _replicas(self, size: Array, stride: Array) -> Replicas:
        """The groups of `size` data ranks, `stride` apart; with dp outermost those of other stages lie between."""
        g = self.grid
        inside = np.minimum(size, np.maximum(1, g.tp * g.cp // stride))
        outer = g.order == ORDERS.index("dp-outer")
        return Replicas(self.links, size, stride, np.where(outer, inside, size), strides(g)[0])
