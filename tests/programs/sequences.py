"""Tables, graphs, recurrence, and mixing along a sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.programs.registry import (
    BATCH,
    CLASSES,
    LENGTH,
    WIDTH,
    Program,
    classes,
    program,
    rows,
    tokens,
)


class DLRM(nn.Module):
    """Embedding tables (bags too) and dense features, their pairwise products, a click or none."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(32, 8) for _ in range(3))
        self.bag = nn.EmbeddingBag(64, 8, mode="sum")
        self.mean = nn.EmbeddingBag(64, 8, mode="mean")
        self.bottom = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(8 + 15, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, dense: Tensor, sparse: Tensor, bags: Tensor, clicked: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        rows = [table(sparse[:, index]) for index, table in enumerate(self.tables)]
        together = torch.stack([bottom, *rows, self.bag(bags), self.mean(bags)], 1)
        products = torch.bmm(together, together.transpose(1, 2))
        upper, across = torch.triu_indices(6, 6, 1)
        logits = self.top(torch.cat([bottom, products[:, upper, across]], 1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(logits, clicked)


@program
def dlrm() -> Program:
    inputs = {
        "dense": rows(WIDTH),
        "sparse": torch.randint(0, 32, (BATCH, 3)),
        "bags": torch.randint(0, 64, (BATCH, 5)),
        "clicked": (torch.rand(BATCH) > 0.5).double(),
    }
    return DLRM(), inputs


class GraphLayer(nn.Module):
    """Messages along the edges of each graph of a batch, added up at their ends, with degrees and edge weights by a
    softmax over the edges that meet."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.own = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.score, self.out = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, CLASSES)

    def forward(self, nodes: Tensor, ends: Tensor, labels: Tensor) -> Tensor:
        batch, count, width = nodes.shape
        source, target = ends[:, 0], ends[:, 1]  # [batch, edges]

        def at(index: Tensor) -> Tensor:
            return nodes.gather(1, index.unsqueeze(-1).expand(-1, -1, width))

        message = self.message(torch.cat([at(source), at(target)], -1)).relu()
        weight = self.score(message).squeeze(-1).exp()
        total = torch.zeros(batch, count, dtype=nodes.dtype).scatter_add(1, target, weight)
        weight = weight / total.gather(1, target)
        into = target.unsqueeze(-1).expand(-1, -1, width)
        added = torch.zeros_like(nodes).scatter_add(1, into, message * weight.unsqueeze(-1))
        largest = torch.full_like(nodes, -1.0).scatter_reduce(1, into, message, "amax")
        hidden = (self.own(nodes) + added + largest).relu()
        return functional.cross_entropy(self.out(hidden).transpose(1, 2), labels)


@program
def graph_batch() -> Program:
    ends = torch.randint(0, 6, (BATCH, 2, 10))
    return GraphLayer(), {
        "nodes": rows(6, WIDTH),
        "ends": ends,
        "labels": torch.randint(0, CLASSES, (BATCH, 6)),
    }


class OneGraph(nn.Module):
    """PyTorch Geometric's way: one graph whose nodes are rows, edges as two lists, `index_add`."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.own, self.out = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, nodes: Tensor, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        degree = torch.zeros(nodes.shape[0], dtype=nodes.dtype).index_add(
            0, target, torch.ones_like(target, dtype=nodes.dtype)
        )
        message = self.message(nodes)[source] / degree.clamp(min=1)[target].unsqueeze(-1)
        hidden = (self.own(nodes).index_add(0, target, message)).relu()
        return functional.cross_entropy(self.out(hidden), labels)


@program
def one_graph() -> Program:
    inputs = {
        "nodes": torch.randn(12, WIDTH, dtype=torch.float64),
        "source": torch.randint(0, 12, (12,)),
        "target": torch.randint(0, 12, (12,)),
        "labels": torch.randint(0, CLASSES, (12,)),
    }
    return OneGraph(), inputs


class Recurrent(nn.Module):
    """A recurrent layer over embedded tokens, and its last state."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(32, WIDTH), layer
        self.head = nn.Linear(WIDTH * (2 if layer.bidirectional else 1), CLASSES)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        embedded = self.embed(ids)
        if not self.layer.batch_first:
            embedded = embedded.transpose(0, 1)
        out, _ = self.layer(embedded)
        last = out[:, -1] if self.layer.batch_first else out[-1]
        return functional.cross_entropy(self.head(last), labels)


@program
def lstm() -> Program:
    layer = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, bidirectional=True)
    return Recurrent(layer), {"ids": tokens(), "labels": classes()}


@program
def gru() -> Program:
    return Recurrent(nn.GRU(WIDTH, WIDTH)), {"ids": tokens(), "labels": classes()}


@program
def rnn() -> Program:
    return Recurrent(nn.RNN(WIDTH, WIDTH, batch_first=True)), {"ids": tokens(), "labels": classes()}


class UnrolledCells(nn.Module):
    """Cells in a Python loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.second = nn.LSTMCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.third, self.head = nn.RNNCell(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = memory = x.new_zeros(x.shape[0], WIDTH)
        other = third = hidden
        for step in range(x.shape[1]):
            hidden, memory = self.cell(x[:, step], (hidden, memory))
            other = self.second(hidden, other)
            third = self.third(other, third)
        return functional.cross_entropy(self.head(third), labels)


@program
def unrolled_cells() -> Program:
    return UnrolledCells(), {"x": rows(LENGTH, WIDTH), "labels": classes()}


class MaskedScatter(nn.Module):
    """Features of another kind put into the places that a token marks, as image features into text."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project, self.head = (
            nn.Embedding(32, WIDTH),
            nn.Linear(8, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, ids: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        places = (ids == 0).unsqueeze(-1)
        embedded = self.embed(ids)
        merged = embedded.masked_scatter(places.expand_as(embedded), self.project(features))
        return functional.cross_entropy(self.head(merged.tanh()).transpose(1, 2), labels)


@program
def masked_scatter() -> Program:
    ids = torch.randint(1, 32, (BATCH, LENGTH))
    ids[:, 2:4] = 0
    return MaskedScatter(), {"ids": ids, "features": rows(2, 8), "labels": tokens(CLASSES)}


class Fourier(nn.Module):
    """FNet's mixing, and a global filter as of a Fourier neural operator."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(LENGTH // 2 + 1, WIDTH, 2) * 0.1)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        mixed = torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real
        hidden = self.norm(x + mixed)
        spectrum = torch.fft.rfft(hidden, dim=1, norm="ortho") * torch.view_as_complex(self.filter)
        hidden = hidden + torch.fft.irfft(spectrum, n=x.shape[1], dim=1, norm="ortho")
        return functional.cross_entropy(self.head(hidden.mean(1)), labels)


@program
def fourier() -> Program:
    return Fourier(), {"x": rows(LENGTH, WIDTH), "labels": classes()}


class Scan(nn.Module):
    """A gated linear recurrence by cumulative sums, and one step by step (Mamba's slow path)."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.gate, self.head = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, padding=3, groups=WIDTH)
        self.decay = nn.Parameter(torch.rand(WIDTH, 4))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.conv(self.inside(x).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        log_decay = functional.logsigmoid(self.gate(x)).cumsum(1)
        linear = log_decay.exp() * (hidden * torch.exp(-log_decay)).cumsum(1)
        delta = functional.softplus(hidden)
        discrete = torch.exp(delta.unsqueeze(-1) * -self.decay)
        state, outputs = torch.zeros(x.shape[0], WIDTH, 4, dtype=x.dtype), []
        for step in range(x.shape[1]):
            state = discrete[:, step] * state + (delta * linear)[:, step].unsqueeze(-1)
            outputs.append(state.sum(-1))
        return functional.cross_entropy(self.head(torch.stack(outputs, 1).mean(1)), labels)


@program
def scan() -> Program:
    return Scan(), {"x": rows(LENGTH, WIDTH), "labels": classes()}


class SparseGather(nn.Module):
    """The best tokens by a score are processed and put back, the others go past (mixture of depths)."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.inside, self.head = (
            nn.Linear(WIDTH, 1),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores = self.router(x).squeeze(-1)
        best, places = scores.topk(LENGTH // 2, dim=1)
        order = places.sort(dim=1).values.unsqueeze(-1).expand(-1, -1, WIDTH)
        chosen = x.gather(1, order)
        worked = self.inside(chosen) * best.sigmoid().unsqueeze(-1)
        hidden = x.scatter(1, order, worked)
        rolled = torch.roll(hidden, 1, dims=1).flip(2)
        windows = functional.pad(rolled, (0, 0, 1, 1)).unfold(1, 3, 1).amax(-1)
        return functional.cross_entropy(self.head(windows.mean(1)), labels)


@program
def sparse_gather() -> Program:
    return SparseGather(), {"x": rows(LENGTH, WIDTH), "labels": classes()}


class Perceiver(nn.Module):
    """A few learned vectors look at a long input by cross attention, then at each other."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(4, WIDTH))
        self.cross = nn.MultiheadAttention(WIDTH, 4, kdim=8, vdim=8, batch_first=True)
        self.inner = nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        query = self.vectors.expand(x.shape[0], -1, -1)
        hidden, _ = self.cross(query, x, x, need_weights=False)
        return functional.cross_entropy(self.head(self.inner(query + hidden).mean(1)), labels)


@program
def perceiver() -> Program:
    return Perceiver(), {"x": rows(LENGTH, 8), "labels": classes()}
