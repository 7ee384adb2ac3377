"""Ways of writing a forward: in place, nested inputs, einsum, vmap, custom ops and functions, stopped gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.programs.registry import (
    BATCH,
    CLASSES,
    LENGTH,
    WIDTH,
    Classifier,
    Program,
    classes,
    program,
    rows,
    tokens,
)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden.mul_(0.5).add_(0.1)
        hidden[:, 0] = 1.0
        hidden[:, -1, :4] += 2.0
        out = torch.zeros_like(x)
        out += self.down(hidden)
        out[out > 3] = 3.0
        return ((out - target) ** 2).mean()


@program
def in_place() -> Program:
    return InPlace(), {"x": rows(LENGTH, WIDTH), "target": rows(LENGTH, WIDTH)}


class RunningStatistics(nn.Module):
    """Standardises by running statistics that forward itself updates, across the batch."""

    mean: Tensor
    square: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("square", torch.ones(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.steps += 1
        self.mean.mul_(0.9).add_(0.1 * x.mean(0).detach())
        self.square.lerp_(x.detach().square().mean(0), 0.1)
        scaled = (x - self.mean) / (self.square - self.mean**2 + 1e-3).abs().sqrt()
        return functional.cross_entropy(self.linear(scaled), labels)


@program
def running_statistics() -> Program:
    return RunningStatistics(), {"x": rows(WIDTH), "labels": classes()}


class NestedInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.sparse = nn.Linear(WIDTH, WIDTH), nn.Embedding(32, WIDTH)

    def forward(self, features: dict[str, Tensor], pair: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        left, right = pair
        hidden = self.dense(features["dense"]) + self.sparse(features["ids"]).sum(1)
        return {"loss": functional.mse_loss(hidden * left, right)}


@program
def nested_inputs() -> Program:
    features = {"dense": rows(WIDTH), "ids": tokens()}
    return NestedInputs(), {"features": features, "pair": (rows(WIDTH), rows(WIDTH))}


class OptionalInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, labels: Tensor | None = None, scale: float = 1.0
    ) -> tuple[Tensor, ...]:
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
        logits = self.linear(x.mean(1)) * scale
        if labels is None:
            return (logits,)
        return functional.cross_entropy(logits, labels), logits


@program
def optional_inputs() -> Program:
    mask = torch.rand(BATCH, LENGTH) > 0.3
    inputs = {"x": rows(LENGTH, WIDTH), "mask": mask, "labels": classes(), "scale": 2.0}
    return OptionalInputs(), inputs


@program
def optional_inputs_left_out() -> Program:
    return OptionalInputs(), {"x": rows(LENGTH, WIDTH), "mask": None, "labels": classes()}


class Einsum(nn.Module):
    """Attention written with einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, 4, WIDTH, 8) * 0.2)
        self.out = nn.Parameter(torch.randn(4, 8, WIDTH) * 0.2)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        query, key, value = torch.einsum("bsd,nhde->nbhse", x, self.qkv)
        weights = torch.einsum("bhqe,bhke->bhqk", query, key).softmax(-1)
        mixed = torch.einsum("bhqk,bhke->bqhe", weights, value)
        return functional.mse_loss(torch.einsum("bqhe,hed->bqd", mixed, self.out), target)


@program
def einsum() -> Program:
    return Einsum(), {"x": rows(LENGTH, WIDTH), "target": rows(LENGTH, WIDTH)}


class Vmap(nn.Module):
    """A function of one example, mapped over the batch; and one over an ensemble of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.Parameter(torch.randn(2, WIDTH, CLASSES) * 0.2)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, gate: Tensor, labels: Tensor) -> Tensor:
        def one(features: Tensor, weights: Tensor) -> Tensor:
            return torch.tanh(features @ weights).mean(0)

        hidden = torch.func.vmap(one)(self.mix(x), gate)
        logits = torch.func.vmap(lambda member: hidden @ member)(self.members)
        return functional.cross_entropy(logits.mean(0), labels)


@program
def vmap() -> Program:
    return Vmap(), {"x": rows(LENGTH, WIDTH), "gate": rows(WIDTH, WIDTH), "labels": classes()}


@program
def weight_norm() -> Program:
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 32))
    body = nn.Sequential(
        linear, nn.GELU(), nn.utils.parametrizations.weight_norm(nn.Linear(32, WIDTH), dim=1)
    )
    return Classifier(body, WIDTH), {"x": rows(WIDTH), "labels": classes()}


class ComplexRotary(nn.Module):
    """Llama's first rotary: positions as complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, 32, bias=False), nn.Linear(WIDTH, 32, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        frequencies = 1.0 / 100.0 ** (torch.arange(0, 8, 2, dtype=torch.float64) / 8)
        angles = torch.outer(torch.arange(x.shape[1], dtype=torch.float64), frequencies)
        turn = torch.polar(torch.ones_like(angles), angles).view(1, x.shape[1], 1, 4)

        def turned(states: Tensor) -> Tensor:
            pairs = torch.view_as_complex(states.view(*x.shape[:2], 4, 4, 2))
            return torch.view_as_real(pairs * turn).flatten(3)

        scores = torch.einsum("bqhd,bkhd->bhqk", turned(self.q(x)), turned(self.k(x)))
        return functional.mse_loss(scores.mean(1), target)


@program
def complex_rotary() -> Program:
    return ComplexRotary(), {"x": rows(LENGTH, WIDTH), "target": rows(LENGTH, LENGTH)}


class LoopOverHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 3 * 4) for _ in range(4))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        mixed = []
        for head in self.heads:
            query, key, value = head(x).chunk(3, dim=-1)
            scores = query @ key.transpose(1, 2) / 2.0
            later = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
            mixed.append(scores.masked_fill(later, float("-inf")).softmax(-1) @ value)
        return functional.mse_loss(self.out(torch.cat(mixed, -1)), target)


@program
def loop_over_heads() -> Program:
    return LoopOverHeads(), {"x": rows(LENGTH, WIDTH), "target": rows(LENGTH, WIDTH)}


@torch.library.custom_op("autopar_tests::swish", mutates_args=())
def swish(x: Tensor, slope: Tensor) -> Tensor:
    return x * torch.sigmoid(slope * x)


@swish.register_fake
def _swish_shape(x: Tensor, slope: Tensor) -> Tensor:
    return torch.empty_like(x)


def _swish_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, slope = ctx.saved_tensors
    gate = torch.sigmoid(slope * x)
    inner = gradient * x * gate * (1 - gate)
    return gradient * gate + inner * slope, (inner * x).sum_to_size(slope.shape)


swish.register_autograd(
    _swish_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


class CustomOp(nn.Module):
    """An op of torch.library with a backward of its own, without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, CLASSES)
        self.slope = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.ops.autopar_tests.swish(self.up(x), self.slope)
        return functional.cross_entropy(self.down(hidden), labels)


@program
def custom_op() -> Program:
    return CustomOp(), {"x": rows(WIDTH), "labels": classes()}


class StraightThrough(torch.autograd.Function):
    """Rounds forward, and lets the gradient through as if it had not: the gradient is not that of the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: float) -> Tensor:
        return (x / step).round() * step

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Quantised(nn.Module):
    """An `autograd.Function` on a weight and on activations."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        weight = StraightThrough.apply(self.up.weight, 0.1)
        hidden = functional.relu(functional.linear(x, weight, self.up.bias))
        return functional.cross_entropy(self.down(StraightThrough.apply(hidden, 0.25)), labels)


@program
def autograd_function() -> Program:
    return Quantised(), {"x": rows(WIDTH), "labels": classes()}


class Focal(torch.autograd.Function):
    """A loss with a gradient written by hand, and two results of which one has none."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, power: float) -> tuple[Tensor, Tensor]:
        chance = logits.softmax(-1)
        ctx.save_for_backward(chance, labels)
        own = chance.gather(1, labels[:, None]).squeeze(1)
        hits = logits.argmax(-1) == labels
        ctx.mark_non_differentiable(hits)
        return -own.log().mean() * power, hits

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        chance, labels = ctx.saved_tensors
        slope = chance.scatter_add(1, labels[:, None], -torch.ones_like(chance[:, :1]))
        return gradient * slope / len(labels), None, None


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = StraightThrough.apply(self.linear(x), 0.1)
        loss, hits = Focal.apply(logits, labels, 1.0)
        return StraightThrough.apply(loss + 0.0 * hits.sum(), 1e-3)


@program
def autograd_function_as_loss() -> Program:
    return OwnLoss(), {"x": rows(WIDTH), "labels": classes()}


class StoppedGradients(nn.Module):
    """A frozen part, a part under `no_grad`, a detached target, a part that is checkpointed, a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.plain = torch.rand(WIDTH, dtype=torch.float64)  # neither a parameter nor a buffer
        self.teacher, self.student = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.again = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode(False):
            hidden = self.frozen(x).tanh() * self.plain
        with torch.no_grad():
            target = self.teacher(hidden).softmax(-1)
        hidden = self.student(hidden)
        with torch.no_grad():  # what does nothing hands `hidden` itself out, and its gradient flows on below
            scale = hidden.to(hidden.dtype).contiguous().abs().mean()
        hidden = hidden / scale
        found = self.student(checkpoint(self.again, hidden, use_reentrant=False)).log_softmax(-1)
        centre = found.mean(0).detach() + found.data.amax(0)
        likeness = functional.kl_div(found - centre, target, reduction="batchmean")
        return likeness + self.teacher.weight.square().mean()


@program
def stopped_gradients() -> Program:
    return StoppedGradients(), {"x": rows(WIDTH)}


class MovingCodes(nn.Module):
    """A quantiser as of a VQ-VAE: codes that follow the data under `no_grad`, the nearest one straight through."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.register_buffer("codes", torch.randn(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inside(x)
        with torch.no_grad():
            nearest = torch.cdist(hidden, self.codes).argmin(-1)
            chosen = functional.one_hot(nearest, 6).to(hidden.dtype)
            moved = torch.einsum("bn,bd->nd", chosen, hidden) / chosen.sum(0).clamp(min=1).unsqueeze(-1)
            self.codes.mul_(0.9).add_(0.1 * moved)
        found = self.codes[nearest]
        through = hidden + (found - hidden).detach()
        return functional.mse_loss(self.outside(through), x) + 0.25 * (hidden - found).square().mean()


@program
def moving_codes() -> Program:
    return MovingCodes(), {"x": rows(WIDTH)}
