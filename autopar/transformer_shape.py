"""The numbers of a transformer's config, and the Workload they make; torch-free.

    TransformerShape(name="llama", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336,
                     vocab=128256).workload(seq=8192).parameters  ->  8030261248

A captured Program makes the same kind of Workload (see `passes/describe.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.workload import Attention, Layer, Matmul, Saved, Stream, Workload

_Kind = tuple[str, str, bool]  # mixer, feed-forward, whether attention is windowed


@dataclass(frozen=True)
class TransformerShape:
    """The numbers of a decoder or encoder as configs and papers give them.

    `ffn`: width of the dense mlp; `gated`: three matmuls instead of two; `expert_ffn`, `shared_ffn`: widths of one
    routed expert and of all shared experts together; `dense_layers`: leading layers without experts; `moe_every`:
    1 where every later layer has experts; `q_lora`, `kv_lora`, `rope_dim`, `head_dim` (without rope), `v_dim`: latent
    attention (kv_lora > 0); `window`, `window_every`: all but each `window_every`-th layer see `window` keys;
    `scan_layers`: layers with a state-space mixer instead of attention, `mlp_layers`: with an mlp or experts only
    (hybrids whose layers hold one mixer each); `mtp`: extra one-layer prediction heads; `positions`: rows of a learned
    position table; `norm`: "rms" or "layer"; `unfused_attention`: scores are kept in memory.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = True
    bias: bool = False
    tied: bool = False
    norm: str = "rms"
    dropout: bool = False
    causal: bool = True
    rotary: bool = True
    positions: int = 0
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    moe_every: int = 1
    q_lora: int = 0
    kv_lora: int = 0
    rope_dim: int = 0
    v_dim: int = 0
    window: int = 0
    window_every: int = 0
    scan_layers: int = 0
    attention_layers: int = 0
    scan_state: int = 0
    scan_heads: int = 0
    scan_head_dim: int = 0
    scan_groups: int = 0
    mtp: int = 0
    unfused_attention: bool = False
    frozen: bool = False
    lora_rank: int = 0
    dispatch: int = 0

    def workload(self, seq: int) -> Workload:
        """The Workload of this shape at `seq` tokens per sequence, as fused kernels run it and keep it."""
        kinds = self._kinds()
        runs: list[tuple[Layer, int]] = []
        built: dict[_Kind, Layer] = {}
        for key in kinds:
            layer = built.setdefault(key, self._layer(*key))
            if runs and runs[-1][0] is layer:
                runs[-1] = (layer, runs[-1][1] + 1)
            else:
                runs.append((layer, 1))
        table = (self.vocab + self.positions) * self.hidden
        return Workload(
            name=self.name,
            layers=tuple(runs),
            hidden=self.hidden,
            seq=seq,
            vocab=self.vocab,
            embedding=table,
            head=0 if self.tied else self.vocab * self.hidden,
            tied=self.tied,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            final_parameters=self.hidden * (2 if self.norm == "layer" else 1),
            frozen=self.frozen_share(),
            losses=1 + self.mtp,
        )

    def frozen_share(self) -> float:
        """Share of the parameters that are not trained: all but the adapters (LoRA on the four attention products and
        the mlp's, rank `lora_rank`)."""
        if not self.frozen:
            return 0.0
        per_layer = 4 * 2 * self.hidden + (3 if self.gated else 2) * (self.hidden + self.ffn)
        adapters = self.layers * self.lora_rank * per_layer
        whole = replace(self, frozen=False).workload(1).parameters
        return 1.0 - min(1.0, adapters / whole)

    def _kinds(self) -> list[_Kind]:
        """(mixer, feed-forward, windowed) of each layer in order."""
        kinds: list[_Kind] = []
        if self.scan_layers:  # hybrids hold one mixer per layer; a period keeps the order's grain
            rest = self.layers - self.scan_layers - self.attention_layers
            kinds += [("scan", "none", False)] * self.scan_layers
            kinds += [("attention", "none", False)] * self.attention_layers
            kinds += [("none", "moe" if self.experts else "mlp", False)] * rest
            return _spread(kinds)
        for index in range(self.layers + self.mtp):
            moe = self.experts > 0 and index >= self.dense_layers
            moe = moe and (index - self.dense_layers) % self.moe_every == self.moe_every - 1
            wide = self.window_every > 0 and index % self.window_every == self.window_every - 1
            kinds.append(("attention", "moe" if moe else "mlp", bool(self.window) and not wide))
        return kinds

    def _layer(self, mixer: str, feed: str, windowed: bool) -> Layer:
        ops: list[Matmul | Attention | Stream] = []
        saved: list[Saved] = []
        parameters: list[tuple[str, int, str]] = []
        h = self.hidden
        regions = 0
        if mixer == "attention":
            self._norm("norm1", ops, saved, parameters)
            self._attention(ops, saved, windowed)
            self._residual("residual1", ops, saved)
            regions += 1
        elif mixer == "scan":
            self._norm("norm1", ops, saved, parameters)
            self._scan(ops, saved, parameters)
            self._residual("residual1", ops, saved)
            regions += 1
        if feed != "none":
            self._norm("norm2", ops, saved, parameters)
            if feed == "moe":
                self._experts(ops, saved)
            else:
                self._mlp("mlp", self.ffn, ops, saved)
            self._residual("residual2", ops, saved)
            regions += 1
        name = "+".join(word for word in (mixer, feed) if word != "none") + (" window" if windowed else "")
        return Layer(name, h, tuple(ops), tuple(saved), tuple(parameters), regions, self.dispatch)

    def _norm(self, name: str, ops: list, saved: list, parameters: list) -> None:  # type: ignore[type-arg]
        h = self.hidden
        ops.append(Stream(name, "norm", 2 * h, 3 * h, "sequence"))
        saved.append(Saved(f"{name} input", h, "sequence"))
        saved.append(
            Saved(f"{name} output", h, "sequence", selective=not self.unfused_attention, operand=True)
        )
        parameters.append((name, h * (2 if self.norm == "layer" else 1), "none"))

    def _residual(self, name: str, ops: list, saved: list) -> None:  # type: ignore[type-arg]
        h = self.hidden
        ops.append(Stream(name, "dropout" if self.dropout else "residual", 3 * h, 1.0 * h, "sequence"))
        if self.dropout:
            saved.append(Saved(f"{name} mask", h, "sequence", item=1.0))

    def _matmul(self, name: str, k: int, n: int, split: str, ways: int = 0, **more: object) -> Matmul:
        return Matmul(name, k, n, split, ways, bias=self.bias, trained=not self.frozen, **more)  # type: ignore[arg-type]

    def _attention(self, ops: list, saved: list, windowed: bool) -> None:  # type: ignore[type-arg]
        h, heads, kv = self.hidden, self.heads, self.kv_heads or self.heads
        qk = self.head_dim or h // heads
        v = self.v_dim or qk
        if self.kv_lora:
            nope, qk = qk, qk + self.rope_dim
            if self.q_lora:
                ops.append(self._matmul("q_down", h, self.q_lora, "none"))
                ops.append(Stream("q_norm", "norm", 2 * self.q_lora, 3 * self.q_lora, "sequence"))
                ops.append(self._matmul("q_up", self.q_lora, heads * qk, "column", heads))
                saved.append(Saved("q latent", 2 * self.q_lora, "sequence"))
            else:
                ops.append(self._matmul("q", h, heads * qk, "column", heads))
            ops.append(self._matmul("kv_down", h, self.kv_lora + self.rope_dim, "none"))
            ops.append(Stream("kv_norm", "norm", 2 * self.kv_lora, 3 * self.kv_lora, "sequence"))
            ops.append(self._matmul("kv_up", self.kv_lora, heads * (nope + v), "column", heads))
            saved.append(Saved("kv latent", 2 * self.kv_lora, "sequence"))
            kv = heads
        else:
            ops.append(self._matmul("qkv", h, heads * qk + kv * (qk + v), "column", heads))
        if self.rotary:
            ops.append(Stream("rotary", "rotary", 2 * (heads + kv) * qk, 2 * (heads + kv) * qk, "inner"))
        ops.append(Attention("attention", heads, kv, qk, v, self.causal, self.window if windowed else 0))
        ops.append(self._matmul("out", heads * v, h, "row", heads))
        saved.append(Saved("q, k, v", heads * qk + kv * (qk + v), "inner", matmul=True))
        saved.append(Saved("attention output", heads * v, "inner", operand=self.unfused_attention))
        if (
            self.unfused_attention
        ):  # softmax in 2 bytes, dropout's mask and result (Korthikanti et al. 2022, 5 a s / h)
            per_key = 2.0 + (3.0 if self.dropout else 0.0)
            saved.append(Saved("scores", heads, "inner", item=per_key, selective=True, square=True))
        else:
            saved.append(Saved("softmax sums", heads, "inner", item=4.0))
            # fused kernels put the batch outside, products the sequence: both forms are kept
            saved.append(
                Saved("attention output, transposed", heads * v, "inner", selective=True, operand=True)
            )

    def _mlp(self, name: str, ffn: int, ops: list, saved: list) -> None:  # type: ignore[type-arg]
        wide = 2 * ffn if self.gated else ffn
        ops.append(self._matmul(f"{name}_up", self.hidden, wide, "column"))
        ops.append(Stream(f"{name}_act", "activation", wide + ffn, 2 * wide + ffn, "inner"))
        ops.append(self._matmul(f"{name}_down", ffn, self.hidden, "row"))
        saved.append(Saved(f"{name} up", wide, "inner", matmul=True))
        saved.append(
            Saved(f"{name} activation", ffn, "inner", selective=not self.unfused_attention, operand=True)
        )

    def _experts(self, ops: list, saved: list) -> None:  # type: ignore[type-arg]
        h, f, k = self.hidden, self.expert_ffn or self.ffn, float(self.topk)
        wide = 2 * f if self.gated else f
        ops.append(Matmul("router", h, self.experts, "none", trained=not self.frozen))
        ops.append(Stream("route", "router", 4.0 * self.experts, 4.0 * self.experts, "sequence", kernels=6))
        ops.append(Stream("dispatch", "permute", 2 * h, 2 * h, "none", share=k, kernels=3))
        ops.append(self._matmul("expert_up", h, wide, "column", 0, share=k, experts=self.experts))
        ops.append(Stream("expert_act", "activation", wide + f, 2 * wide + f, "inner", share=k))
        if self.bias:  # a bias per expert keeps the activation from being one fused kernel (gpt-oss)
            ops.append(
                Stream(
                    "expert_bias", "activation", 4 * (wide + f), 8 * (wide + f), "inner", share=k, kernels=6
                )
            )
        ops.append(self._matmul("expert_down", f, h, "row", 0, share=k, experts=self.experts))
        ops.append(Stream("combine", "permute", 2 * h, 2 * h, "none", share=k, kernels=3))
        saved.append(Saved("router", 2.0 * self.experts, "sequence", item=4.0))
        rows = self.dispatch or h
        saved.append(Saved("expert input", rows, "none", share=k, expert=True, operand=True))
        saved.append(Saved("expert up", wide, "inner", share=k, expert=True, matmul=True))
        saved.append(
            Saved("expert activation", f, "inner", selective=True, share=k, expert=True, operand=True)
        )
        # kept too, as each is weighted by its probability
        saved.append(Saved("expert output", rows, "none", share=k, expert=True))
        if self.shared_ffn:
            self._mlp("shared", self.shared_ffn, ops, saved)

    def _scan(self, ops: list, saved: list, parameters: list) -> None:  # type: ignore[type-arg]
        """A Mamba-2 mixer (Dao and Gu 2024, section 7): one input product, a short convolution, the chunked scan, a
        gated norm, one output product. The scan's products over chunks of 128 are counted as reads and writes;
        how many was fitted to step times of Nemotron-3 (bench/calibrate.py)."""
        inner = self.scan_heads * self.scan_head_dim
        state = self.scan_groups * self.scan_state
        ops.append(
            self._matmul(
                "in", self.hidden, 2 * inner + 2 * state + self.scan_heads, "column", self.scan_heads
            )
        )
        ops.append(Stream("conv", "scan", 2.0 * (inner + 2 * state), 3.0 * (inner + 2 * state), "inner"))
        ops.append(Stream("scan", "scan", 16.0 * inner, 40.0 * inner, "inner", kernels=6))
        ops.append(Stream("gate", "norm", 3.0 * inner, 5.0 * inner, "inner"))
        ops.append(self._matmul("out", inner, self.hidden, "row", self.scan_heads))
        saved.append(Saved("in", 2.0 * inner + 2 * state, "inner"))
        saved.append(Saved("conv", 1.0 * (inner + 2 * state), "inner"))
        saved.append(Saved("scan", 2.0 * inner, "inner"))
        parameters.append(("scan", 4 * (inner + 2 * state) + 3 * self.scan_heads + inner, "inner"))


def _spread(kinds: list[_Kind]) -> list[_Kind]:
    """The kinds evenly interleaved, each in proportion to its count."""
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    done = dict.fromkeys(counts, 0)
    order = []
    for index in range(1, len(kinds) + 1):
        kind = max(counts, key=lambda kind: counts[kind] * index / len(kinds) - done[kind])
        done[kind] += 1
        order.append(kind)
    return order
