"""Batch norm whose statistics cross ranks: what a lowered block calls where the batch or the space is split.

In:  this rank's piece of the input [batch, channels, ...], the names of the groups that split it.
Out: its piece of the result, and statistics of the whole batch, the same on every rank of the groups.

Mean, then the sum of squared differences from it, each summed over the groups: two reductions forward (the sum of
squares alone would cancel), one backward. With batch n over all ranks, y = w (x - m) r + b with r = (v + eps)^-1/2,

    dx = w r (g - mean(g) - x' mean(g x'))        x' = (x - m) r     (Ioffe and Szegedy 2015, section 3)

and the gradients of w and b are n times these two means: they come out whole, so nobody adds them up again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from autopar.collectives import sum_over


class _BatchNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        groups: list[str],
        ways: int,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        exact = x.dtype if x.dtype == torch.float64 else torch.float32
        over = [dim for dim in range(x.dim()) if dim != 1]
        per_channel = [1 if dim != 1 else -1 for dim in range(x.dim())]
        count = ways * x.numel() // x.shape[1]
        wide = x.to(exact)
        mean = sum_over(wide.sum(over), groups) / count
        centred = wide - mean.view(per_channel)
        variance = sum_over(centred.square().sum(over), groups) / count
        scale = (variance + eps).rsqrt()
        result = centred * scale.view(per_channel)
        if weight is not None:
            result = result * weight.to(exact).view(per_channel)
        if bias is not None:
            result = result + bias.to(exact).view(per_channel)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.groups, ctx.count, ctx.has_bias = groups, count, bias is not None
        ctx.mark_non_differentiable(mean, variance)
        return result.to(x.dtype), mean, variance

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Any, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        over = [dim for dim in range(x.dim()) if dim != 1]
        per_channel = [1 if dim != 1 else -1 for dim in range(x.dim())]
        wide = gradient.to(mean.dtype)
        normal = (x.to(mean.dtype) - mean.view(per_channel)) * scale.view(per_channel)
        both = sum_over(torch.stack([wide.sum(over), (wide * normal).sum(over)]), ctx.groups)
        slope = scale if weight is None else scale * weight.to(mean.dtype)
        means = both / ctx.count
        own = wide - means[0].view(per_channel) - normal * means[1].view(per_channel)
        return (
            (own * slope.view(per_channel)).to(x.dtype),
            None if weight is None else both[1].to(weight.dtype),
            both[0].to(mean.dtype if weight is None else weight.dtype) if ctx.has_bias else None,
            None,
            None,
            None,
        )


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    groups: list[str],
    ways: int,
) -> tuple[Tensor, ...]:
    """As `aten._native_batch_norm_legit_functional` in training: (result, mean, 1 / deviation, new running mean, new
    running variance), without the last two where there are no running statistics. `ways`: ranks that split x."""
    result, mean, variance = _BatchNorm.apply(x, weight, bias, groups, ways, eps)  # type: ignore[no-untyped-call]
    deviation = (variance + eps).rsqrt()
    if running_mean is None or running_var is None:
        return result, mean, deviation
    count = ways * x.numel() // x.shape[1]
    unbiased = variance * (count / (count - 1))
    new_mean = (1 - momentum) * running_mean + momentum * mean.to(running_mean.dtype)
    new_variance = (1 - momentum) * running_var + momentum * unbiased.to(running_var.dtype)
    return result, mean, deviation, new_mean, new_variance
