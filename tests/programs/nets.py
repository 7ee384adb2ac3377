"""Convolution nets of many kinds, and what they are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.programs.registry import (
    BATCH,
    CLASSES,
    WIDTH,
    Classifier,
    Program,
    classes,
    program,
    rows,
)


class ResNetBlock(nn.Module):
    """torchvision's basic block: convolution, batch norm, in-place relu, a projected shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(outside), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.down = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + self.down(x))


def images(size: int = 16) -> dict[str, Any]:
    return {"x": rows(3, size, size), "labels": classes()}


@program
def resnet() -> Program:
    stem = [nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return Classifier(nn.Sequential(*stem, ResNetBlock(8, 8, 1), ResNetBlock(8, WIDTH, 2)), WIDTH), images()


class FrozenStatistics(Classifier):
    """A net that is fine-tuned with the statistics of its batch norms left as they are."""

    def train(self, mode: bool = True) -> FrozenStatistics:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


@program
def resnet_with_frozen_statistics() -> Program:
    model = FrozenStatistics(nn.Sequential(nn.Conv2d(3, 8, 3), ResNetBlock(8, WIDTH, 2)), WIDTH)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean, module.running_var = (
                torch.randn(module.num_features),
                torch.rand(module.num_features) + 0.5,
            )
    return model, images()


@program
def mobilenet() -> Program:
    """Expansion, depthwise convolution, squeeze and excitation left out, projection."""
    block = nn.Sequential(
        nn.Conv2d(8, 32, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6(inplace=True),
        nn.Conv2d(32, 32, 3, 1, 1, groups=32, bias=False), nn.BatchNorm2d(32), nn.Hardswish(),
        nn.Conv2d(32, WIDTH, 1, bias=False), nn.BatchNorm2d(WIDTH),
    )  # fmt: skip
    return Classifier(
        nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), block, nn.AdaptiveAvgPool2d(1)), WIDTH
    ), images()


class UNet(nn.Module):
    """Down, across and up again by a transposed convolution, with skips; a label per pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())
        self.across = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1, groups=2), nn.ReLU())
        self.up1, self.join1 = nn.ConvTranspose2d(32, 16, 2, stride=2), nn.Conv2d(32, 16, 3, padding=1)
        self.up0, self.join0 = nn.Conv2d(16, 8, 1), nn.Conv2d(16, 8, 3, padding=1)
        self.out = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        first = self.inside(x)
        second = self.down(first)
        bottom = self.across(second)
        hidden = self.join1(torch.cat([self.up1(bottom), second], 1)).relu()
        wide = functional.interpolate(self.up0(hidden), scale_factor=2, mode="bilinear", align_corners=False)
        logits = self.out(self.join0(torch.cat([wide, first], 1)).relu())
        return functional.cross_entropy(logits, labels)


@program
def unet() -> Program:
    labels = torch.randint(0, CLASSES, (BATCH, 16, 16))
    labels[0, :5] = -100  # pixels without a label, unevenly
    return UNet(), {"x": rows(3, 16, 16), "labels": labels}


@program
def norms() -> Program:
    """Group, instance and layer norm over channels, nearest resizing, pooling of both kinds, pixel shuffle."""
    body = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.AvgPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1), nn.InstanceNorm2d(16, affine=True), nn.PReLU(16),
        nn.Upsample(scale_factor=2), nn.Conv2d(16, 32, 1), nn.PixelShuffle(2), nn.AdaptiveMaxPool2d(2),
        nn.Conv2d(8, WIDTH, 1), nn.GroupNorm(1, WIDTH), nn.Dropout2d(0.0),
    )  # fmt: skip
    return Classifier(body, WIDTH), images()


@program
def conv1d_audio() -> Program:
    """A wave encoder: strided and dilated 1-D convolutions, a grouped positional one, weight norm."""
    body = nn.Sequential(
        nn.Conv1d(1, 8, 10, 5), nn.GroupNorm(8, 8), nn.GELU(), nn.Conv1d(8, WIDTH, 3, 2, dilation=2), nn.GELU(),
        nn.utils.parametrizations.weight_norm(nn.Conv1d(WIDTH, WIDTH, 4, padding="same", groups=4), dim=2),
        nn.BatchNorm1d(WIDTH), nn.GELU(),
    )  # fmt: skip
    return Classifier(body, WIDTH), {"x": rows(1, 128), "labels": classes()}


class DiffusionStep(nn.Module):
    """Noise at a given time is added and predicted: sinusoids of the time, scale and shift, attention over pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))
        self.inside, self.out = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 3, 3, padding=1)
        self.norm, self.attention_norm = nn.GroupNorm(4, WIDTH), nn.GroupNorm(4, WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, images: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        kept = torch.cos(time * 1.57).view(-1, 1, 1, 1)
        noisy = kept * images + (1 - kept**2).sqrt() * noise
        angles = time[:, None] * torch.exp(torch.arange(4, dtype=time.dtype) * -0.7)
        scale, shift = self.time(torch.cat([angles.sin(), angles.cos()], -1)).chunk(2, -1)
        hidden = self.inside(noisy)
        hidden = self.norm(hidden) * (1 + scale[..., None, None]) + shift[..., None, None]
        batch, width, height, across = hidden.shape
        pixels = self.attention_norm(hidden).view(batch, width, height * across).transpose(1, 2)
        heads = [part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(pixels).chunk(3, -1)]
        mixed = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        hidden = hidden + self.project(mixed).transpose(1, 2).view(batch, width, height, across)
        return functional.mse_loss(self.out(functional.silu(hidden)), noise)


@program
def diffusion() -> Program:
    time = torch.rand(BATCH, dtype=torch.float64)
    return DiffusionStep(), {"images": rows(3, 8, 8), "noise": rows(3, 8, 8), "time": time}
