"""Losses that look across the batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.programs.registry import (
    BATCH,
    LENGTH,
    WIDTH,
    Program,
    program,
    rows,
    tokens,
)


class Contrastive(nn.Module):
    """CLIP's loss: every image of the batch against every text of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(WIDTH, 8, bias=False), nn.Embedding(32, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        one = functional.normalize(self.image(image), dim=-1)
        other = self.text(ids).mean(1)
        other = other / other.norm(p=2, dim=-1, keepdim=True)
        logits = self.scale.exp() * one @ other.t()
        target = torch.arange(logits.shape[0])
        return (functional.cross_entropy(logits, target) + functional.cross_entropy(logits.t(), target)) / 2


@program
def contrastive() -> Program:
    return Contrastive(), {"image": rows(WIDTH), "ids": tokens()}


class Variational(nn.Module):
    """A VAE with the noise given: reconstruction summed over pixels, divergence, both averaged over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.latent = nn.Linear(WIDTH, 32), nn.Linear(32, 2 * 4)
        self.outside = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor, noise: Tensor) -> dict[str, Tensor]:
        mean, log_variance = self.latent(torch.relu(self.inside(x))).chunk(2, dim=-1)
        drawn = mean + torch.exp(0.5 * log_variance) * noise
        found = self.outside(drawn)
        reconstruction = functional.binary_cross_entropy_with_logits(found, torch.sigmoid(x), reduction="sum")
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        return {"loss": (reconstruction + divergence) / x.shape[0]}


@program
def variational() -> Program:
    return Variational(), {"x": rows(WIDTH), "noise": rows(4)}


class TiedAutoencoder(nn.Module):
    """The decoder is the encoder's weight, transposed; a penalty on activity across the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, 32)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        code = torch.sigmoid(self.encoder(x))
        found = functional.linear(code, self.encoder.weight.t(), self.bias)
        active = code.mean(0).clamp(1e-3, 1 - 1e-3)
        sparse = (0.1 * torch.log(0.1 / active) + 0.9 * torch.log(0.9 / (1 - active))).sum()
        return functional.smooth_l1_loss(found, x) + 0.01 * sparse + 1e-3 * self.encoder.weight.abs().sum()


@program
def tied_autoencoder() -> Program:
    return TiedAutoencoder(), {"x": rows(WIDTH)}


class Transcriber(nn.Module):
    """Frames to a row of symbols, by connectionist temporal classification; rows of unequal lengths, padded."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head = nn.Linear(WIDTH, 32), nn.Linear(32, 12)
        self.loss = nn.CTCLoss(blank=11)

    def forward(self, frames: Tensor, symbols: Tensor, frame_counts: Tensor, counts: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.inside(frames)))
        return self.loss(logits.log_softmax(-1).transpose(0, 1), symbols, frame_counts, counts)


@program
def transcriber() -> Program:
    return Transcriber(), {
        "frames": rows(2 * LENGTH, WIDTH),
        "symbols": torch.randint(0, 11, (BATCH, 5)),
        "frame_counts": torch.tensor([16, 12, 16, 9]),
        "counts": torch.tensor([5, 3, 1, 4]),
    }
