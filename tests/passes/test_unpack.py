"""Unpack: packed parameters become pieces wherever that is exact, and stay whole everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from autopar.passes.capture import capture
from autopar.program import Program
from tests.packed import PACKED, packed
from tests.passes.test_capture import same

B, S, H = 2, 6, 8


def pieces(program: Program) -> dict[str, list[str]]:
    """Parameter -> the names of its pieces, in order, without the parameter's own."""
    found: dict[str, list[str]] = {}
    for name, info in program.state.items():
        if info.piece is not None:
            assert name == info.piece.name
            found.setdefault(info.piece.parameter, []).append(name.removeprefix(info.piece.parameter))
    return found


LAYERS = {
    "gpt2": {"transformer.h.2.attn.c_attn.weight": ["[:, 0:64]", "[:, 64:128]", "[:, 128:192]"]},
    "phi3": {
        "model.layers.2.self_attn.qkv_proj.weight": ["[0:64]", "[64:96]", "[96:128]"],
        "model.layers.2.mlp.gate_up_proj.weight": ["[0:96]", "[96:192]"],
    },
    "glm": {"model.layers.2.mlp.gate_up_proj.weight": ["[0:96]", "[96:192]"]},
    "gpt_bigcode": {"transformer.h.2.attn.c_attn.weight": ["[0:64]", "[64:80]", "[80:96]"]},
    "mpt": {"transformer.blocks.2.attn.Wqkv.weight": ["[0:64]", "[64:128]", "[128:192]"]},
    "modernbert": {
        "model.layers.2.attn.Wqkv.weight": ["[0:64]", "[64:128]", "[128:192]"],
        "model.layers.2.mlp.Wi.weight": ["[0:96]", "[96:192]"],
    },
    "mamba": {"backbone.layers.2.mixer.in_proj.weight": ["[0:128]", "[128:256]"]},
    "mamba2": {
        "backbone.layers.2.mixer.in_proj.weight": [
            "[0:128]", "[128:256]", "[256:288]", "[288:320]", "[320:328]",
        ],
        "backbone.layers.2.mixer.conv1d.weight": ["[0:128]", "[128:160]", "[160:192]"],
    },
    "in_proj": {"layers.2.in_proj_bias": ["[0:64]", "[64:128]", "[128:192]"]},
    "experts": {"layers.2.gate_up_proj": ["[:, 0:48]", "[:, 48:96]"]},
}  # fmt: skip


@pytest.mark.parametrize("kind", PACKED)
def test_models(kind: str) -> None:
    model, inputs = packed(kind)
    program = same(model, inputs)
    found = pieces(program)
    for name, expected in LAYERS[kind].items():
        assert found[name] == expected
    assert program.parameter_count == sum(parameter.numel() for parameter in model.parameters())
    assert any(times > 1 for times in program.multiplicity.values()), "layers are still one block"


# ---- forms of packing --------------------------------------------------------------------------------------


class Form(nn.Module):
    """A packed linear layer and what is done with its output."""

    def __init__(self, width: int, use: Callable[..., Tensor], **more: nn.Module | Tensor) -> None:
        super().__init__()
        self.proj = nn.Linear(H, width)
        self.use = use
        for name, item in more.items():
            if isinstance(item, nn.Module):
                self.add_module(name, item)
            else:
                self.register_buffer(name, item)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.tanh(q) * k.exp() + v * v


def chunk(m: Any, x: Tensor) -> Tensor:
    return product(*m.proj(x).chunk(3, dim=-1))


def uneven(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.proj(x).split([12, 4, 8], dim=-1)
    return q.sum(-1) + k.prod(-1) * v.mean(-1)


def slices(m: Any, x: Tensor) -> Tensor:
    y = m.proj(x)
    return product(y[..., :8], y[..., 8:16], y[..., -8:])


def narrowed(m: Any, x: Tensor) -> Tensor:
    y = m.proj(x)
    return product(y.narrow(-1, 0, 8), y.narrow(-1, 8, 8), y.narrow(-1, 16, 8))


def unbound(m: Any, x: Tensor) -> Tensor:
    return product(*m.proj(x).view(B, S, 3, 2, 4).unbind(2)).flatten(2)


def permuted(m: Any, x: Tensor) -> Tensor:
    y = m.proj(x).reshape(B, S, 3, 2, 4).permute(2, 0, 3, 1, 4)
    return product(y[0], y[1], y[2]).transpose(1, 2).flatten(2)


def activated(m: Any, x: Tensor) -> Tensor:
    y = functional.gelu(m.proj(x) * m.scale + m.shift).transpose(1, 2)
    return product(*y.chunk(3, dim=1))


def joined(m: Any, x: Tensor) -> Tensor:
    """Packed again, and through a depthwise convolution, before it is cut."""
    y = torch.cat([m.proj(x)[..., 8:], m.proj(x)[..., :8]], dim=-1)
    y = functional.silu(m.conv(y.transpose(1, 2))[..., :S]).transpose(1, 2)
    return product(*y.split(8, dim=-1))


def of_weight(m: Any, x: Tensor) -> Tensor:
    """Slices of the parameter itself, transposed."""
    weight = m.proj.weight.t()
    return product(*(x @ weight[:, at : at + 8] + m.proj.bias[at : at + 8] for at in (0, 8, 16)))


def nested(m: Any, x: Tensor) -> Tensor:
    """A cut of a cut, and a rotation of one head whose halves are read beside the whole."""
    qk, v = m.proj(x).split([16, 8], dim=-1)
    q, k = qk.chunk(2, dim=-1)
    k = k.view(B, S, 1, 8)
    rotated = k * 0.8 + torch.cat([-k[..., 4:], k[..., :4]], dim=-1) * 0.6
    return product(q, rotated.flatten(2), v)


THREE = ["[0:8]", "[8:16]", "[16:24]"]


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (chunk, THREE),
        (uneven, ["[0:12]", "[12:16]", "[16:24]"]),
        (slices, THREE),
        (narrowed, THREE),
        (unbound, THREE),
        (permuted, THREE),
        (of_weight, THREE),
        (nested, THREE),
    ],
)
def test_forms(use: Callable[..., Tensor], expected: list[str]) -> None:
    found = pieces(same(Form(24, use), {"x": torch.randn(B, S, H)}, output="output0"))
    assert found == {"proj.weight": expected, "proj.bias": expected}


def test_buffers_on_the_way_are_sliced() -> None:
    model = Form(24, activated, scale=torch.randn(24), shift=torch.randn(1))
    found = pieces(same(model, {"x": torch.randn(B, S, H)}, output="output0"))
    assert found == {"proj.weight": THREE, "proj.bias": THREE}


def test_depthwise_convolutions_and_cat_on_the_way() -> None:
    model = Form(24, joined, conv=nn.Conv1d(24, 24, 3, padding=2, groups=24))
    found = pieces(same(model, {"x": torch.randn(B, S, H)}, output="output0"))
    assert found["conv.weight"] == THREE
    assert found["proj.weight"] == THREE


def both_dims(m: Any, x: Tensor) -> Tensor:
    weight = m.proj.weight
    return functional.linear(x[..., :4], weight[:12, :4]) * functional.linear(
        x, weight[12:], m.proj.bias[:12]
    )


def test_a_slice_of_a_piece_along_another_dim_stays_a_slice() -> None:
    program = same(Form(24, both_dims), {"x": torch.randn(B, S, H)}, output="output0")
    assert pieces(program) == {"proj.weight": ["[0:12]", "[12:24]"]}
    assert "aten.slice(%proj_weight_0_12_, 1, 0, 4)" in str(program)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Conv2d(4, 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return product(*self.qkv(x).chunk(3, dim=1))


def test_pointwise_convolutions() -> None:
    found = pieces(same(Convolution(), {"x": torch.randn(B, 4, 5, 5)}, output="output0"))
    assert found == {"qkv.weight": THREE, "qkv.bias": THREE}


def test_weight_norm_of_a_packed_weight() -> None:
    model = Form(24, chunk)
    nn.utils.parametrizations.weight_norm(model.proj)
    found = pieces(same(model, {"x": torch.randn(B, S, H)}, output="output0"))
    assert found["proj.parametrizations.weight.original1"] == THREE


# ---- what stays whole --------------------------------------------------------------------------------------


def interleaved(m: Any, x: Tensor) -> Tensor:
    """(h 3 hd), as in BLOOM and GPT-NeoX."""
    return product(*m.proj(x).view(B, S, 2, 3, 4).unbind(3)).flatten(2)


def partly(m: Any, x: Tensor) -> Tensor:
    y = m.proj(x)
    return y[..., :8] * y[..., 8:16]


def also_whole(m: Any, x: Tensor) -> Tensor:
    y = m.proj(x)
    return product(*y.chunk(3, dim=-1)) * y.sum(-1, keepdim=True)


def overlapping(m: Any, x: Tensor) -> Tensor:
    y = m.proj(x)
    return y[..., :16] * y[..., 8:]


def two_ways(m: Any, x: Tensor) -> Tensor:
    return product(*m.proj(x).chunk(3, dim=-1)).sum(-1) + m.proj(x + 1).chunk(2, dim=-1)[0].mean(-1) + 1


def stepped(m: Any, x: Tensor) -> Tensor:
    y = m.proj(x)
    return y[..., ::2] * y[..., 1::2]


def normed(m: Any, x: Tensor) -> Tensor:
    """A norm over the packed dim mixes the pieces."""
    return product(*functional.layer_norm(m.proj(x), [24]).chunk(3, dim=-1))


def many(m: Any, x: Tensor) -> Tensor:
    return torch.stack([part.exp() for part in m.proj(x).unbind(-1)]).sum(0)


@pytest.mark.parametrize(
    "use", [interleaved, partly, also_whole, overlapping, two_ways, stepped, normed, many]
)
def test_whole(use: Callable[..., Tensor]) -> None:
    assert not pieces(same(Form(24, use), {"x": torch.randn(B, S, H)}, output="output0"))


class Tied(nn.Module):
    """A weight that one module cuts and another reads whole."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(H, 24), nn.Linear(H, 24)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return product(*self.one(x).chunk(3, dim=-1)).sum(-1) + self.other(x).sum(-1)


def test_a_tied_weight_that_is_read_whole_elsewhere() -> None:
    found = pieces(same(Tied(), {"x": torch.randn(B, S, H)}, output="output0"))
    assert "one.weight" not in found


class Layer(nn.Module):
    """Returns also what nobody uses, made of a third of a packed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(H, 3 * H)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, unused = self.proj(x).chunk(3, dim=-1)
        return x + torch.tanh(q) * k, unused


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Module], depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(depth))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x, _ = layer(x)
        return {"loss": x.square().mean()}


def test_a_piece_that_nothing_reads_keeps_the_parameter_whole() -> None:
    assert not pieces(capture(Stack(Layer, 4), {"x": torch.randn(B, S, H)}))


# ---- any packing -------------------------------------------------------------------------------------------


STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "scale": lambda y: 2 * y + 1,
    "heads": lambda y: y.unflatten(-1, (-1, 2)).flatten(-2),
    "swap": lambda y: y.transpose(0, 1).transpose(0, 1),
    "flat": lambda y: y.reshape(-1, y.shape[-1]).view(B, S, -1),
    "cast": lambda y: y.double().float(),
    "unsqueeze": lambda y: y.unsqueeze(1).squeeze(1),
}


class Random(nn.Module):
    def __init__(self, sizes: list[int], steps: list[str], after: list[str], bias: bool, form: str) -> None:
        super().__init__()
        self.sizes, self.steps, self.after, self.form = sizes, steps, after, form
        self.proj = nn.Linear(H, sum(sizes), bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.proj(x)
        for step in self.steps:
            y = STEPS[step](y)
        if self.form == "split":
            parts = list(y.split(self.sizes, dim=-1))
        else:
            ends = [sum(self.sizes[: at + 1]) for at in range(len(self.sizes))]
            parts = [y[..., end - size : end] for size, end in zip(self.sizes, ends, strict=True)]
        for step in self.after:
            parts = [STEPS[step](part) for part in parts]
        return sum((part.sum(-1) * (at + 1) for at, part in enumerate(parts)), torch.zeros(()))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(1, 5).map(lambda size: 2 * size), min_size=2, max_size=5),
    steps=st.lists(st.sampled_from(sorted(STEPS)), max_size=4),
    after=st.lists(st.sampled_from(sorted(STEPS)), max_size=2),
    bias=st.booleans(),
    form=st.sampled_from(["split", "slices"]),
)
def test_any_packing(sizes: list[int], steps: list[str], after: list[str], bias: bool, form: str) -> None:
    """Values and gradients are those of the module, and the pieces those that were cut."""
    program = same(Random(sizes, steps, after, bias, form), {"x": torch.randn(B, S, H)}, output="output0")
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    expected = [f"[{end - size}:{end}]" for size, end in zip(sizes, ends, strict=True)]
    assert pieces(program)["proj.weight"] == expected
