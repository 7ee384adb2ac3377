"""Products of linear layers in fp8: what a block of a plan with precision fp8 calls in place of `aten.linear`.

Forward and both products of the backward go through `torch.nn.functional.scaled_mm`; everything else keeps its dtype.
Scales are dynamic, found from the values at hand (Micikevicius et al. 2022, "FP8 formats for deep learning"):

    scale = max |x| / largest         q = x / scale, in fp8          x y' = scale_x scale_y q_x q_y'

    scaling   one scale per              forward   gradients
    tensor    tensor                     e4m3      e5m2
    row       row of the left factor,    e4m3      e4m3
              column of the right one

A rank of a split layer scales its own piece by its own largest value: finer than one scale for all, and nothing is
sent. In a product of pieces whose sums are reduced, each rank's addend is scaled back before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional
from torch.nn.functional import ScalingType

MULTIPLE = 16  # of every dim of a product, by the kernels of GPUs


@dataclass(frozen=True)
class Recipe:
    """`dim` along which values share no scale but their own row's (None: one for all), and the two dtypes."""

    kind: ScalingType
    by_row: bool
    forward: torch.dtype
    gradient: torch.dtype


RECIPES: Mapping[str, Recipe] = {
    "tensor": Recipe(ScalingType.TensorWise, False, torch.float8_e4m3fn, torch.float8_e5m2),
    "row": Recipe(ScalingType.RowWise, True, torch.float8_e4m3fn, torch.float8_e4m3fn),
}


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, scaling: str = "tensor") -> Tensor:
    """`torch.nn.functional.linear` of x [..., k] and weight [n, k]: [..., n], with the product in fp8.

    Where tokens, k or n are no multiple of 16 it is the plain one.
    """
    tokens = x.numel() // x.shape[-1] if x.shape[-1] else 0
    if not tokens or any(size % MULTIPLE for size in (tokens, *weight.shape)):
        return functional.linear(x, weight, bias)
    result: Tensor = _Linear.apply(x, weight, scaling)  # type: ignore[no-untyped-call]
    return result if bias is None else result + bias


def fp8_mm(x: Tensor, weight: Tensor, scaling: str = "tensor") -> Tensor:
    """`torch.mm` of x [m, k] and weight [k, n], with the product in fp8."""
    return fp8_linear(x, weight.t(), None, scaling)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scaling: str) -> Tensor:
        recipe = RECIPES[scaling]
        flat = x.reshape(-1, x.shape[-1])
        left, right = quantized(flat, recipe.forward, recipe), quantized(weight, recipe.forward, recipe)
        ctx.recipe, ctx.shape, ctx.dtype = recipe, x.shape, x.dtype
        # One scale for all serves the backward too, and fp8 takes half the memory of bf16. The weight is kept as it
        # came: a store that gathers parameters keeps a note in its place.
        kept = (flat,) if recipe.by_row else left
        ctx.save_for_backward(weight, *kept)
        return _product(left, right, recipe).to(x.dtype).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        recipe: Recipe = ctx.recipe
        weight, *kept = ctx.saved_tensors
        flat = gradient.reshape(-1, weight.shape[0])
        whole = None if recipe.by_row else quantized(flat, recipe.gradient, recipe)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:  # [m, n] [n, k]
            left = whole or quantized(flat, recipe.gradient, recipe)
            right = quantized(weight.t(), recipe.forward, recipe)
            of_x = _product(left, right, recipe).to(ctx.dtype).view(ctx.shape)
        if ctx.needs_input_grad[1]:  # [n, m] [m, k]
            left = _transposed(whole) if whole else quantized(flat.t(), recipe.gradient, recipe)
            right = (
                quantized(kept[0].t(), recipe.forward, recipe)
                if recipe.by_row
                else _transposed((kept[0], kept[1]))
            )
            of_weight = _product(left, right, recipe).to(weight.dtype)
        return of_x, of_weight, None


def quantized(value: Tensor, dtype: torch.dtype, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """A matrix [m, k] in fp8 and its scales, of shape [] or [m, 1]. What is not finite stays so."""
    wide = value.float()
    largest = wide.abs().amax(1, keepdim=True) if recipe.by_row else wide.abs().amax()
    limit = torch.finfo(dtype).max
    scale = (largest / limit).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scale).clamp(-limit, limit).to(dtype).contiguous(), scale


def _product(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], recipe: Recipe) -> Tensor:
    """[m, k] and [n, k] with their scales: [m, n] in bfloat16."""
    return functional.scaled_mm(
        left[0],
        right[0].t(),
        left[1],
        recipe.kind,
        right[1].t() if recipe.by_row else right[1],
        recipe.kind,
        output_dtype=torch.bfloat16,
    )


def _transposed(of: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return of[0].t().contiguous(), of[1]
