"""Shape of a published row's model: its columns first, then its notes, then what its family's configs say.

In:  the row's cells, the family's values (model_families.toml), the layout, the sequence length, the row's options.
Out: a TransformerShape; what the row doesn't say is named in `assumed`.
"""

from __future__ import annotations

import re
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from published_cells import Cells, RowError

from autopar.layout import Layout
from autopar.transformer_shape import TransformerShape


class ShapeReader(Cells):
    """Cells that know the model they tell of."""

    def _shape(self, family: dict[str, Any], layout: Layout, seq: int, options: set[str]) -> TransformerShape:
        known = {f.name for f in fields(TransformerShape)}
        value = {key: item for key, item in family.items() if key in known}
        family_ffn = (family.get("ffn", 0), family.get("expert_ffn", 0))
        for cell in ("layers", "hidden", "heads", "kv_heads", "experts", "topk", "vocab"):
            said = self.whole(cell)
            if said:
                value[cell] = said
            elif cell in family and cell not in ("kv_heads",) and cell in self.cells:
                self.assume(cell, family[cell], "the family's")
        if not self.whole("layers"):
            found = re.search(r"(?<!\d)(\d+)[ -]?l(?:ayers?)?\b", self.cells["model"].lower())
            if found:
                value["layers"] = int(found[1])
        self._missing_sizes(value, layout)
        self._widths(value, family, family_ffn)
        if not self.whole("vocab"):
            self._vocabulary(value, layout)
        elif self.golden:
            value["vocab"] = _padded(value["vocab"], layout.tp)
        self._words(value, seq, options, family)
        if value.get("positions"):
            value["positions"] = max(seq, value["positions"]) if not self.golden else seq
        if {"lora", "adapter"} & options:
            value["frozen"] = True
            value["lora_rank"] = 16
            self.assume("lora_rank", 16)
        heads = value["heads"]
        if value.get("kv_lora"):
            value.pop("kv_heads", None)
        elif value["hidden"] % heads and not value.get("head_dim"):
            value["head_dim"] = 128
            self.assume("head_dim", 128, f"{heads} heads don't divide hidden {value['hidden']}")
        if value.get("kv_heads", heads) > heads:
            raise RowError(f"kv_heads {value['kv_heads']} is above heads {heads}")
        if value.get("experts") and value.get("topk", 0) > value["experts"]:
            raise RowError(f"topk {value['topk']} is above experts {value['experts']}")
        shape = TransformerShape(name=self.cells["model"], **value)
        params = (self.number("params_B") or 0) * 1e9
        if shape.tied and params and not self.golden and not shape.frozen:
            loose = replace(shape, tied=False)
            off, off_loose = (abs(s.workload(seq).parameters / params - 1) for s in (shape, loose))
            if off_loose < 0.02 < off:
                shape = loose
                self.assume("tied", 0, "from the parameter count")
        if layout.pp * layout.vpp > max(shape.layers + 2, 1):
            raise RowError(f"{shape.layers} layers can't fill pp {layout.pp} * vpp {layout.vpp}")
        return self._mixers(shape, family.get("latent", 0))

    def _missing_sizes(self, value: dict[str, Any], layout: Layout) -> None:
        """layers, hidden and heads where a row holds some of them and its number of parameters."""
        if not value.get("hidden"):
            raise RowError("model sizes not stated, and no published config of that name known")
        hidden = value["hidden"]
        if not value.get("layers"):
            params = (self.number("params_B") or 0) * 1e9
            per_layer = self._layer_parameters(value)
            layers = round((params - value.get("vocab", 51200) * hidden) / per_layer)
            if layers < 1:
                raise RowError("number of layers not stated")
            value["layers"] = layers
            self.assume("layers", layers, "from the parameter count")
        if not value.get("heads"):
            fits = [n for n in range(1, hidden // 32 + 1) if hidden % n == 0 and n % layout.tp == 0]
            if not fits:
                raise RowError("number of heads not stated")
            value["heads"] = min(fits, key=lambda n: abs(n - hidden / 128))
            self.assume("heads", value["heads"], "nearest to a head size of 128")

    def _layer_parameters(self, value: dict[str, Any]) -> float:
        hidden = value["hidden"]
        ffn = self.whole("ffn") or value.get("ffn") or 4 * hidden
        return 4.0 * hidden * hidden + (3 if value.get("gated", True) else 2) * hidden * ffn

    def _widths(self, value: dict[str, Any], family: dict[str, Any], family_ffn: tuple[int, int]) -> None:
        """ffn and expert_ffn. A row has one width; for experts the notes or the family say whose it is."""
        said, hidden = self.whole("ffn"), value["hidden"]
        value.setdefault("gated", family.get("gated", self._gated(value, said)))
        default = 4 * hidden if not value["gated"] else -(-8 * hidden // 3 // 256) * 256
        if not value.get("experts"):
            for key in ("topk", "expert_ffn", "shared_ffn", "dense_layers"):
                value.pop(key, None)
            value["ffn"] = said or value.get("ffn") or default
            if not said:
                self.assume("ffn", value["ffn"])
            return
        expert = self._note_number("moe-ffn-hidden-size")
        shared = self._note_number("moe-shared-expert-intermediate-size")
        if self.golden:
            expert = expert or said or family_ffn[1]
            value["ffn"] = said or default
        elif said and said != family_ffn[0]:
            expert = expert or said
            value["ffn"] = family_ffn[0] or said
        else:
            expert = expert or family_ffn[1] or said or default
            value["ffn"] = family_ffn[0] or expert
        if not (said or self._note_number("moe-ffn-hidden-size")):
            self.assume("expert_ffn", expert, "the family's")
        value["expert_ffn"] = expert
        value["topk"] = value.get("topk") or 1
        if shared or self.golden:
            value["shared_ffn"] = shared
        elif value.get("shared_ffn"):
            self.assume("shared_ffn", value["shared_ffn"], "the family's")
        found = self.says(r"moe-layer-freq=\(\[0\]\*(\d+)\+\[1\]\*(\d+)\)")
        if found:
            value["dense_layers"] = int(found[1])
        elif self.golden:
            value["dense_layers"] = 0
        if value.get("dense_layers"):
            value["dense_layers"] = min(value["dense_layers"], value["layers"])

    def _gated(self, value: dict[str, Any], ffn: int) -> bool:
        """Two matmuls or three in the mlp of a model of no known family: what meets the stated parameters better."""
        if not ffn or self.families_known:
            return True
        params = (self.number("params_B") or 0) * 1e9
        if not params:
            return ffn != 4 * value["hidden"] or bool(value.get("experts"))
        hidden, experts = value["hidden"], max(value.get("experts", 0), 1)
        kv = 2 * value.get("kv_heads", value["heads"]) / value["heads"]
        rest = value["layers"] * (2 + kv) * hidden * hidden + 2 * value.get("vocab", 51200) * hidden
        each = value["layers"] * experts * hidden * ffn
        gated = abs(rest + 3 * each - params) <= abs(rest + 2 * each - params)
        self.assume("gated", int(gated), "from the parameter count")
        return gated

    def _vocabulary(self, value: dict[str, Any], layout: Layout) -> None:
        """Vocabulary where the row holds none; Megatron pads it to a multiple of 128 * tp."""
        vocab = value.get("vocab") or 51200
        if self.golden:  # the test cases' tokenizers: GPT-2's BPE, Nemotron's of 256k in release tests
            release = "release" in self.cells["model"].lower()
            if vocab in (51200, 32000, 32768) or value.get("kv_lora"):
                vocab = 256000 if release else 50257
            vocab = _padded(
                vocab, layout.tp, 3232 if value.get("kv_lora") and value["hidden"] >= 1024 else 128
            )
        value["vocab"] = vocab
        if not any(entry.startswith("vocab:") for entry in self.assumed):
            self.assume("vocab", vocab)

    def _words(self, value: dict[str, Any], seq: int, options: set[str], family: dict[str, Any]) -> None:
        """What test-case names, arguments in the notes and options say of the model's maths."""
        model = self.cells["model"].lower()
        if self.golden:
            scans = bool(value.get("scan_state")) or bool(self.says(r"hybrid_stack_spec|hybrid/"))
            swiglu = bool(self.says(r"\bswiglu\b"))
            modern = ("release" in model and "bert" not in model) or scans
            modern = modern or (swiglu and (seq > 1024 or bool(value.get("kv_lora"))))
            value["gated"] = swiglu
            value["tied"] = not self.says("untie-embeddings") and "untie" not in model
            if value.get("experts"):
                value["bias"] = False
            if modern:
                value |= {"bias": False, "dropout": False, "rotary": True, "positions": 0}
                value["norm"] = "rms" if swiglu or scans else "layer"
            if re.search(r"rope|rotary", model):
                value |= {"rotary": True, "positions": 0}
            if self.says("multi-latent-attention") and not value.get("kv_lora"):
                value |= {"q_lora": 1536, "kv_lora": 512, "head_dim": 128, "rope_dim": 64, "v_dim": 128}
                self.assume("latent dims", "q 1536, kv 512, rope 64", "as DeepSeek-V3's")
            if self._note_number("kv-channels") and not value.get("kv_lora"):
                value["head_dim"] = self._note_number("kv-channels")
            value["mtp"] = self._note_number("mtp-num-layers")
            if scans and not value.get("scan_layers"):
                value |= {
                    "scan_state": 128,
                    "scan_head_dim": 64,
                    "scan_groups": 8,
                    "scan_heads": 2 * value["hidden"] // 64,
                }
        if self.says(r"w/o mtp|without mtp|no mtp"):
            value["mtp"] = 0
        scans = value.get("scan_state") and value.get("experts")
        split = value.get("scan_layers", 0) + value.get("attention_layers", 0)
        if scans and (not split or value["layers"] != family.get("layers")):
            layers = value["layers"]  # Nemotron-3 Nano's proportions
            value["attention_layers"] = max(1, round(layers * 6 / 52))
            value["scan_layers"] = round(layers * 23 / 52)
            self.assume("mixers", f"{value['scan_layers']} scans, {value['attention_layers']} attention")
        old = self.framework in ("megatron", "megatron-deepspeed") and self.year < 2022.8
        if "unfused-attention" in options or old or "spec=local" in self.text:
            value["unfused_attention"] = True
        if re.search(r"\bt5", re.sub(r"[_/]", "-", model)):
            value["layers"] *= 2
            self.assume(
                "layers", value["layers"], "encoder and decoder as one stack, cross attention left out"
            )

    def _mixers(self, shape: TransformerShape, latent: int) -> TransformerShape:
        """Say what TransformerShape has no word for in the words it has, at the same parameters and operations.

        Experts behind a projection to `latent` (Nemotron-3 Super): as narrower experts and a wider shared one.
        Layers with a scan or attention and experts too (Qwen3-Next): as twice as many layers of one part each.
        """
        if latent and shape.experts:
            shape = replace(
                shape,
                expert_ffn=shape.expert_ffn * latent // shape.hidden,
                shared_ffn=shape.shared_ffn + latent,
                dispatch=latent,
            )
            self.assume("latent experts", latent, "folded into expert_ffn and shared_ffn")
        if shape.scan_layers and shape.scan_layers + shape.attention_layers == shape.layers:
            shape = replace(shape, layers=2 * shape.layers)
            self.assume("layers", shape.layers, "mixers and experts counted apart")
        return shape


def _padded(vocab: int, tp: int, multiple: int = 128) -> int:
    return -(-vocab // (multiple * tp)) * multiple * tp
