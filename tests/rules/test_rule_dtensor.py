"""DTensor as a second opinion: given operands that lie as our rule says, does it give our result?

One fake process group of two ranks; nothing is sent. For every example and every choice on one axis of size 2:

    same           DTensor took the operands as they lie and gives our result
    redistributes  DTensor has no such form of the op and moves the operands first: it allows less than we do
    differs        DTensor took the operands as they lie and says something else about the result
    no rule        DTensor has no rule for the op

Everything but `same` is listed with its reason. That our answer is right where they are not the same is shown
by the numeric self-test, not here. Attention is left out: DTensor has no rule for the CPU kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from rule_examples import EXAMPLES, OPS, Example, op_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from autopar.mesh import Mesh
from autopar.rules import Rule, rule_for
from autopar.rules.call import leaves, map_leaves
from autopar.rules.selftest import Choice, cut, example_call, legal_choices

MESH = Mesh((("x", 2),))

SUMS = "DTensor does not pass partial sums through this op"
MEAN = "DTensor calls it an average of pieces where we scale the pieces and sum"
FREE = "we allow a dim that only the result has to be born split; DTensor leaves it whole"
REGISTRY = "DTensor has no rule"
EXCEPTIONS: dict[str, tuple[set[str], str]] = {
    **dict.fromkeys(
        (
            "aten.clone",
            "aten.deg2rad",
            "aten.rad2deg",
            "aten._conj",
            "aten.fft_hfft",
            "aten.fft_ihfft",
            "aten.fft_fft2",
            "aten.fft_ifft2",
            "aten.fft_fftn",
            "aten.fft_ifftn",
            "aten.lerp",
            "aten.masked_fill",
            "aten.where",
            "aten.addcmul",
            "aten.addcdiv",
            "aten.repeat_interleave",
            "aten.select_scatter",
            "aten.einsum",
            "aten.matmul",
            "aten.cumsum",
            "aten.embedding",
            "aten.gather",
            "aten.take_along_dim",
            "aten.scatter_add",
        ),
        ({"same", "redistributes"}, SUMS),
    ),
    "aten.slice_scatter": (
        {"same", "redistributes"},
        f"{SUMS}, nor a split of a dim that is replaced as a whole",
    ),
    **dict.fromkeys(
        (
            "aten.tril",
            "aten.triu",
            "aten.diagonal",
            "aten.diag_embed",
            "aten.trace",
            "aten.linalg_svdvals",
            "aten.linalg_eigvalsh",
            "aten.linalg_qr",
        ),
        ({"redistributes"}, "DTensor gathers everything"),
    ),
    **dict.fromkeys(
        (
            "aten.pixel_shuffle",
            "aten.pixel_unshuffle",
            "aten.grid_sampler_2d",
            "aten.grid_sampler_3d",
            "aten.grid_sampler",
            "aten.linalg_solve",
            "aten.linalg_solve_triangular",
            "aten.instance_norm",
        ),
        ({"same", "redistributes"}, "DTensor keeps the batch, or it and one more dim"),
    ),
    **dict.fromkeys(
        ("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d"),
        ({"same", "differs"}, "as conv2d"),
    ),
    "aten._native_batch_norm_legit_functional": (
        {"same", "differs", "redistributes"},
        "DTensor calls the statistics of split channels whole",
    ),
    "aten._native_batch_norm_legit_no_training": (
        {"differs", "redistributes"},
        "DTensor calls the empty results split as the input is",
    ),
    **dict.fromkeys(
        ("aten.gru", "aten.rnn_tanh", "aten.rnn_relu"), ({"same", "no rule"}, "no rule for a batch in dim 1")
    ),
    "aten.mean": ({"same", "differs", "redistributes"}, f"{MEAN}; {SUMS}"),
    **dict.fromkeys(
        (
            "aten.mse_loss",
            "aten.l1_loss",
            "aten.huber_loss",
            "aten.kl_div",
            "aten.binary_cross_entropy_with_logits",
            "aten.binary_cross_entropy",
        ),
        ({"same", "differs"}, MEAN),
    ),
    **dict.fromkeys(("aten.smooth_l1_loss", "aten.soft_margin_loss"), ({"differs"}, MEAN)),
    **dict.fromkeys(("aten.expand", "aten.expand_as", "aten.broadcast_tensors"), ({"same", "differs"}, FREE)),
    "aten.broadcast_to": ({"same", "differs"}, FREE),
    **dict.fromkeys(("aten.new_full", "aten.new_ones", "aten.new_empty"), ({"same", "differs"}, FREE)),
    "aten.new_zeros": ({"differs"}, f"{FREE}, or like the tensor that is not read"),
    **dict.fromkeys(
        ("aten.conv1d", "aten.conv2d", "aten.convolution"),
        (
            {"same", "differs"},
            "DTensor's rule looks at the input alone and calls a split of the weight whole",
        ),
    ),
    "aten.conv3d": ({"same", "differs"}, "as conv2d"),
    **dict.fromkeys(
        (
            "aten.lift_fresh_copy",
            "aten.copy",
            "aten.unfold",
            "aten._unsafe_index",
            "aten.scatter_reduce",
            "aten.searchsorted",
            "aten.im2col",
            "aten.col2im",
            "aten.cdist",
            "aten.bilinear",
            "aten.embedding_bag",
            *(f"aten.{kind}_pad{space}d" for kind in ("reflection", "replication") for space in (1, 2, 3)),
        ),
        ({"no rule"}, REGISTRY),
    ),
    "aten.pad": ({"same", "no rule"}, f"{REGISTRY} for reflection"),
}
LEFT_OUT = {*OPS, "aten.scaled_dot_product_attention", "aten._grouped_mm"}  # not aten, no CPU rule, bf16 only


@pytest.fixture(scope="module")
def device_mesh() -> Iterator[DeviceMesh]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def outcome(name: str, example: Example, rule: Rule, choice: Choice, device_mesh: DeviceMesh) -> str | None:
    """What DTensor does with the choice; None if the op has no tensor to ask about."""
    sharded = rule.shard(choice, MESH.sizes)
    operands = [
        leaf for leaf in leaves([list(example.args), dict(example.kwargs)]) if isinstance(leaf, torch.Tensor)
    ]
    if not operands:
        return None
    distributed = iter(
        [
            DTensor.from_local(
                cut(operand, use.sharding, MESH)[(0,)].contiguous(),
                device_mesh,
                use.sharding.to_placements(MESH),
                run_check=False,
                shape=operand.shape,
                stride=operand.contiguous().stride(),
            )
            for operand, use in zip(operands, sharded.uses, strict=True)
        ]
    )
    args, kwargs = map_leaves(
        (example.args, dict(example.kwargs)),
        lambda leaf: next(distributed) if isinstance(leaf, torch.Tensor) else leaf,
    )
    try:
        with CommDebugMode() as sent, torch.no_grad():
            results = list(leaves([op_of(name)(*args, **kwargs)]))
    except NotImplementedError:
        return "no rule"
    if [result.placements for result in results] == [
        sharding.to_placements(MESH) for sharding in sharded.results
    ]:
        return "same"
    return "redistributes" if sent.get_total_counts() else "differs"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in LEFT_OUT])
def test_dtensor_agrees(name: str, device_mesh: DeviceMesh) -> None:
    outcomes = set()
    for example in EXAMPLES[name]:
        rule = rule_for(example_call(op_of(name), example.args, name, example.kwargs))
        assert rule is not None
        for choice in legal_choices(rule, MESH):
            counted = {factor for _, factor in rule.count_args}  # DTensor runs the op with the whole's number
            if choice["x"] not in rule.special | counted:
                outcomes.add(outcome(name, example, rule, choice, device_mesh))

    assert outcomes - {None} <= EXCEPTIONS.get(name, ({"same"}, ""))[0]
    if name in EXCEPTIONS:  # none is listed that is no longer one
        assert outcomes == EXCEPTIONS[name][0]
