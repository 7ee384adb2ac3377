"""Towers whose rows are the patches of all images: one attention for images of one size, split by the data axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from autopar.mesh import Mesh
from autopar.passes.axes import name_axes
from autopar.passes.candidates import of_choice
from autopar.passes.capture import capture
from autopar.passes.problem import build_problem
from autopar.program import Program, op_name
from tests.passes.test_capture import same
from tests.runtime.attention_models import asked, compare, gradients_of

WIDTH, HEADS, CLASSES = 16, 2, 5


@dataclass(frozen=True)
class How:
    """How a tower writes it. `turned`: heads and rows change places before the pieces are put together; `order`: in
    which the pieces are put together; `masked`: each image's patches have a bias."""

    turned: bool = True
    causal: bool = False
    order: tuple[int, ...] = ()
    masked: bool = False


class Tower(nn.Module):
    """One layer of attention within each image, then a class for each image."""

    def __init__(self, patches: Sequence[int], how: How) -> None:
        super().__init__()
        self.patches, self.how = list(patches), how
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        qkv = self.qkv(pixel_values).view(-1, 3, HEADS, WIDTH // HEADS).permute(1, 2, 0, 3).unsqueeze(1)
        cut = [part.split(self.patches, dim=2) for part in qkv]
        parts = []
        for query, key, value in zip(*cut, strict=True):
            bias = torch.arange(key.shape[2], dtype=query.dtype)[None] if self.how.masked else None
            mixed = scaled_dot_product_attention(query, key, value, bias, is_causal=self.how.causal)
            parts.append(mixed.transpose(1, 2) if self.how.turned else mixed)
        parts = [parts[index] for index in self.how.order or range(len(parts))]
        mixed = torch.cat(parts, 1) if self.how.turned else torch.cat(parts, 2).transpose(1, 2)
        x = pixel_values + self.out(mixed.reshape(-1, WIDTH))
        means = x.view(len(self.patches), -1, WIDTH).mean(1)
        return {"loss": cross_entropy(self.head(means), labels)}


def build(patches: Sequence[int], how: How = How()) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    count = len(patches)
    return Tower(patches, how).double(), {
        "pixel_values": torch.randn(sum(patches), WIDTH, dtype=torch.float64),
        "labels": torch.arange(count) % CLASSES,
    }


def attentions(program: Program) -> list[tuple[int, ...]]:
    """The shape of every attention's result."""
    nodes = [node for block in program.blocks.values() for node in block.op_nodes]
    return [tuple(node.meta["val"].shape) for node in nodes if op_name(node) == "autopar.attention"]


@pytest.mark.parametrize("how", [How(), How(turned=False), How(causal=True)], ids=str)
@pytest.mark.parametrize("images", [2, 5])
def test_equal_images_are_a_batch(how: How, images: int) -> None:
    assert attentions(same(*build([6] * images, how))) == [(images, HEADS, 6, WIDTH // HEADS)]


def test_as_many_ops_for_many_images_as_for_two() -> None:
    few, many = (capture(*build([4] * images)) for images in (2, 16))

    def count(program: Program) -> int:
        return sum(len(list(block.op_nodes)) for block in program.blocks.values())

    assert count(few) == count(many)


@pytest.mark.parametrize(
    ("patches", "how"),
    [
        ([4, 8], How()),  # sizes differ
        ([6, 6, 6], How(order=(2, 0, 1))),  # another order
        ([6, 6], How(order=(0, 0))),  # one twice
        ([6, 6], How(masked=True)),
    ],
    ids=str,
)
def test_what_is_no_batch_stays(patches: list[int], how: How) -> None:
    assert {shape[0] for shape in attentions(same(*build(patches, how)))} == {1}


@pytest.mark.parametrize("mesh", ["dp=2", "dp=4"])
def test_rows_of_images_are_split_by_the_data_axes(mesh: str) -> None:
    model, inputs = build([6] * 4)
    on = Mesh.parse(mesh)
    program, axes = name_axes(capture(model, inputs))
    problem = build_problem(program, axes)
    (op,) = (op for op in problem.ops if op.kind == "autopar.attention")
    problem = asked(problem, on, lambda each: {"dp": "b"} if each is op else None)
    assert op.rule is not None
    assert str(of_choice(op.rule, (("dp", "b"),)).results[0]) == "[_@dp, _, _, _]"
    loss = model(**inputs)["loss"]
    loss.backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    compare(gradients_of(program, problem, on, model, inputs), (float(loss.detach()), wanted), 1e-10)
