"""Example instances for every op in RULES: real arguments, small float64 tensors with dims of 2, 4, 6 and 12.

`EXAMPLES[name]` is a list of Example; `OPS` says how to call the ops that are not `torch.ops.aten.<name>`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.models.bloom.modeling_bloom import GeLUFunction
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import SqrtBoundDerivative

from autopar import expert_functions, functional, index_functions
from autopar.rules import elementwise


@dataclass(frozen=True)
class Example:
    """Positional and keyword arguments; `gradients=False` where the op has no gradient or a random one;
    `values=False` where the values are undefined (empty)."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    gradients: bool = True
    values: bool = True


_generator = torch.Generator().manual_seed(0)


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_generator, dtype=torch.float64) * 0.8 + 0.1


def ids(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=_generator)


def bools(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_generator) > 0.5


def of(*args: Any, gradients: bool = True, values: bool = True, **kwargs: Any) -> Example:
    return Example(args, kwargs, gradients, values)


def _unary() -> dict[str, list[Example]]:
    plain = {name: [of(positive(4, 6))] for name in (*elementwise.UNARY, *elementwise.LINEAR)}
    integers = {"bitwise_not": [of(ids(9, 4, 6))]}
    special = {
        "acosh": [of(positive(4, 6) + 1)],
        "arccos": [of(positive(4, 6))],
        "clip": [of(x(4, 6), -0.5, 0.5)],
        "clamp": [of(x(4, 6), -0.5, 0.5), of(x(4, 6), x(6))],
        "clamp_max": [of(x(4, 6), 0.2)],
        "clamp_min": [of(x(4, 6), 0.2)],
        "fill": [of(x(4, 6), 2.0)],
        "threshold": [of(x(4, 6), 0.1, 20.0)],
        "gelu": [of(x(4, 6)), of(x(4, 6), approximate="tanh")],
        "_to_copy": [
            of(x(4, 6), dtype=torch.float32),
            of(x(4, 6) * 9, dtype=torch.int64),
            of(ids(9, 4, 6), dtype=torch.bool),
        ],
        "clone": [of(x(4, 6)), of(x(4, 6), memory_format=torch.contiguous_format), of(ids(9, 4))],
    }
    return {**plain, **integers, **special}


def _binary() -> dict[str, list[Example]]:
    integer = {name for name in elementwise.BINARY if name.startswith(("__", "bitwise"))}
    table: dict[str, list[Example]] = {}
    for name in elementwise.BINARY:
        if name in integer:
            table[name] = [of(ids(5, 4, 6), ids(5, 6)), of(ids(5, 4, 6), 3)]
        else:
            table[name] = [of(positive(4, 6), positive(4, 6)), of(positive(4, 1, 6), positive(2, 1))]
    for name in ("eq", "ge", "gt", "le", "lt", "ne", "remainder", "fmod", "pow"):
        table[name].append(of(x(4, 6), 2))
    table["pow"] += [of(2.0, x(4, 6)), of(x(4, 1, 6), 2)]
    table["__and__"].append(of(bools(4, 6), bools(6)))
    table["heaviside"] = [of(x(4, 6), x(6), gradients=False)]
    table["floor_divide"] = [of(ids(9, 4, 6), 2), of(positive(4, 6), positive(6), gradients=False)]
    return table


def _where() -> list[Example]:
    return [
        of(bools(4, 6), x(4, 6), x(6)),
        of(bools(4, 1), x(4, 6), 0.0),
        of(bools(4, 6), x(4, 6), -1.0),
        of(bools(4, 6), 0, x(4, 6)),
        of(bools(4, 6), 1.0, 0.0),
        of(bools(4, 6), x(4, 6), torch.tensor(2.0, dtype=torch.float64)),
    ]


def _spectra() -> dict[str, list[Example]]:
    half = torch.fft.rfft(x(4, 6, 2), dim=1)
    return {
        **{f"fft_{name}": [of(torch.complex(x(4, 6), x(4, 6)), None, 1)] for name in ("fft", "ifft", "hfft")},
        **{
            f"fft_{name}": [of(x(4, 6, 2), None, 1), of(x(4, 6), None, 0, "ortho")]
            for name in ("rfft", "ihfft")
        },
        "fft_irfft": [of(half, 6, 1)],
        **{
            f"fft_{name}": [of(x(4, 2, 6), None, [-2, -1])]
            for name in ("fft2", "ifft2", "rfft2", "rfftn", "fftn")
        },
        "fft_ifftn": [of(x(4, 2, 6), None, [1], "ortho"), of(x(4, 6))],
        "fft_irfft2": [of(torch.complex(x(4, 2, 4), x(4, 2, 4)), [2, 6])],
        "fft_irfftn": [of(torch.complex(x(4, 2, 4), x(4, 2, 4)), [2, 6])],
        **{f"fft_{name}": [of(x(4, 6), [1]), of(x(4, 6))] for name in ("fftshift", "ifftshift")},
    }


def _matrices() -> dict[str, list[Example]]:
    square = x(4, 3, 3) + 3 * torch.eye(3, dtype=torch.float64)
    symmetric = square @ square.mT
    names = ("linalg_inv", "inverse", "linalg_det", "det", "linalg_matrix_exp", "matrix_exp", "linalg_pinv")
    return {
        **{name: [of(square)] for name in names},
        "logdet": [of(symmetric)],
        "linalg_svdvals": [of(square), of(x(4, 2, 3))],
        **{
            name: [of(symmetric, gradients=False)]
            for name in ("linalg_cholesky", "cholesky", "linalg_eigvalsh")
        },
        "linalg_qr": [of(square, gradients=False), of(x(2, 4, 3), gradients=False)],
        "linalg_solve": [of(square, x(4, 3, 6)), of(square, x(4, 6, 3), left=False)],
        "linalg_solve_triangular": [
            of(square.triu(), x(4, 3, 6), upper=True),
            of(square.tril(), x(4, 6, 3), upper=False, left=False),
        ],
    }


def _recurrent() -> dict[str, list[Example]]:
    def weights(gates: int) -> list[torch.Tensor]:
        return [x(gates * 3, 2), x(gates * 3, 3), x(gates * 3), x(gates * 3)]

    def layer(gates: int, states: Any, first: bool) -> Example:
        return of(
            x(4, 6, 2) if first else x(6, 4, 2), states, weights(gates), True, 1, 0.0, True, False, first
        )

    table = {"lstm": [layer(4, [x(1, 4, 3), x(1, 4, 3)], first) for first in (True, False)]}
    table["lstm_cell"] = [of(x(4, 2), [x(4, 3), x(4, 3)], *weights(4))]
    for name, gates in (("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)):
        table[name] = [layer(gates, x(1, 4, 3), first) for first in (True, False)]
        table[f"{name}_cell"] = [of(x(4, 2), x(4, 3), *weights(gates))]
    return table


def _resized() -> dict[str, list[Example]]:
    table = {}
    for space in (1, 2, 3):
        shape = (4, 2, *(4, 2, 2)[:space])
        sizes = [2 * size for size in shape[2:]]
        linear = {1: "upsample_linear1d", 2: "upsample_bilinear2d", 3: "upsample_trilinear3d"}[space]
        for name in (f"upsample_nearest{space}d", f"_upsample_nearest_exact{space}d"):
            table[name] = [of(x(*shape), sizes)]
        table[linear] = [of(x(*shape), sizes, False)]
        for mode in ("reflection", "replication"):
            table[f"{mode}_pad{space}d"] = [of(x(*shape), [1] * (2 * space))]
        table[f"adaptive_max_pool{space}d"] = [of(x(*shape), [2] * space)]
        table[f"max_pool{space}d_with_indices"] = [of(x(*shape), [2] * space)]
        if space > 1:
            table[f"conv_transpose{space}d"] = [of(x(*shape), x(2, 4, *[2] * space), x(4), [2] * space)]
    for name in ("upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
        table[name] = [of(x(4, 2, 4, 4), [8, 8], False)]
    return table


EXAMPLES: dict[str, list[Example]] = {
    **{f"aten.{name}": examples for name, examples in {**_unary(), **_binary()}.items()},
    "aten.add": [
        of(x(4, 6), x(4, 6)),
        of(x(4, 6), x(6), alpha=2),
        of(x(4, 6), 1.0),
        of(x(4, 6), ids(5, 4, 6)),
        of(x(), x(4)),
    ],
    "aten.sub": [of(x(4, 6), x(4, 6), alpha=0.5), of(x(4, 1, 6), x(2, 1)), of(x(4, 6), 1)],
    "aten.rsub": [of(x(4, 6), x(4, 6)), of(x(4, 6), 1.0)],
    "aten.mul": [
        of(x(4, 6), x(4, 6)),
        of(x(4, 6), 2.0),
        of(x(4, 6), x(6)),
        of(x(4, 6), bools(4, 6)),
        of(x(), x(4)),
    ],
    "aten.div": [
        of(x(4, 6), positive(4, 6)),
        of(x(4, 6), 3.0),
        of(x(4, 6), positive(6), rounding_mode="floor"),
        of(x(4, 6), positive()),
        of(ids(9, 4, 6), 2),
    ],
    "aten.lerp": [of(x(4, 6), x(4, 6), 0.3), of(x(4, 6), x(4, 6), x(6))],
    "aten.masked_fill": [
        of(x(4, 6), bools(6), 0),
        of(x(4, 6), bools(4, 6), -3.0),
        of(bools(4, 6), bools(4, 1), True),
    ],
    "aten.where": _where(),
    "transformers.SqrtBoundDerivative": [of(positive(4, 6))],
    "transformers.GeLUFunction": [of(x(4, 6))],
    "aten.subtract": [of(x(4, 6), x(4, 6))],
    "aten.multiply": [of(x(4, 6), x(6))],
    "aten.divide": [of(x(4, 6), positive(6))],
    "aten.feature_dropout": [of(x(4, 6, 2), 0.1, False)],
    "aten.alpha_dropout": [of(x(4, 6), 0.1, False)],
    "aten._conj": [of(torch.complex(x(4, 6), x(4, 6)), gradients=False)],
    "aten.complex": [of(x(4, 6), x(4, 6), gradients=False)],
    "aten.broadcast_tensors": [of([x(4, 1), x(6)]), of([x(4, 6), x(4, 6)])],
    "aten.bucketize": [of(x(4, 6), x(3).sort().values)],
    "aten.isin": [of(ids(9, 4, 6), ids(9, 3))],
    "aten.searchsorted": [of(x(3).sort().values, x(4, 6)), of(x(4, 3).sort().values, x(4, 6))],
    "aten.addcmul": [of(x(4, 6), x(4, 6), x(6), value=0.5)],
    "aten.addcdiv": [of(x(4, 6), x(4, 6), positive(6), value=0.5)],
    "aten.dropout": [of(x(4, 6), 0.1, False), of(x(4, 6), 0.0, True)],
    "aten.polar": [of(positive(4, 6), x(4, 6), gradients=False)],
    "aten.to": [of(x(4, 6), torch.float32), of(x(4, 6), torch.int64), of(x(4, 6), ids(3, 12))],
    "aten.type_as": [of(x(4, 6), x(12)), of(x(4, 6), ids(4, 4, 6))],
    "aten.copy": [of(x(4, 6), x(4, 6), gradients=False), of(x(4, 6), x(6), gradients=False)],
    "aten.glu": [of(x(4, 12)), of(x(4, 6), 0)],
    "aten.prelu": [of(x(4, 6), x(6)), of(x(4, 6), x(1))],
    # ---- shapes
    "aten.view": [
        of(x(4, 12), [4, 2, 6]),
        of(x(4, 6, 2), [24, 2]),
        of(x(6, 4), [4, 6]),
        of(x(4, 12), [4, -1, 3]),
        of(x(4), [4, 1]),
    ],
    "aten.reshape": [of(x(4, 6).t(), [24]), of(x(2, 6, 4), [4, 12])],
    "aten._unsafe_view": [of(x(4, 12), [4, 2, 6])],
    "aten.view_as": [of(x(4, 6), x(4, 2, 3)), of(x(4, 6), x(24), gradients=False)],
    "aten.reshape_as": [of(x(4, 6).t(), x(3, 2, 4))],
    "aten.ravel": [of(x(4, 6))],
    **{f"aten.atleast_{count}d": [of(x(4))] for count in (1, 2, 3)},
    "aten.swapdims": [of(x(4, 6, 2), 0, 1)],
    "aten.mT": [of(x(4, 6, 2))],
    "aten.numpy_T": [of(x(4, 6))],
    "aten.moveaxis": [of(x(4, 6, 2), [0], [2])],
    "aten.pixel_shuffle": [of(x(4, 8, 2, 3), 2), of(x(4, 4, 2, 3), 2), of(x(2, 4, 6), 1)],
    "aten.pixel_unshuffle": [of(x(4, 2, 4, 6), 2), of(x(4, 1, 4, 6), 2)],
    "aten.channel_shuffle": [of(x(4, 6, 2, 2), 3)],
    "aten.im2col": [
        of(x(4, 6, 4, 4), [2, 2], [1, 1], [0, 0], [2, 2]),
        of(x(4, 1, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1]),
    ],
    "aten.col2im": [of(x(4, 8, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2])],
    "aten.tile": [of(x(4, 6), [2]), of(x(6), [4, 1])],
    "aten.flatten": [of(x(4, 6, 2), 0, 1), of(x(4, 6, 2), 1), of(x(4, 6))],
    "aten.unsqueeze": [of(x(4, 6), 1), of(x(4, 6), -1), of(ids(9, 4), 0)],
    "aten.squeeze": [of(x(4, 1, 6), 1), of(x(4, 6), 1), of(x(1, 4, 1, 2), [0, 2, 3])],
    "aten.unflatten": [of(x(4, 12), 1, [2, 6]), of(x(4, 12), -1, [-1, 3])],
    "aten.permute": [of(x(4, 6, 2), [2, 0, 1]), of(x(4, 6, 2), [0, -1, 1])],
    "aten.transpose": [of(x(4, 6, 2), 0, 1), of(x(4, 6, 2), -1, -2)],
    "aten.swapaxes": [of(x(4, 6, 2), 0, 1)],
    "aten.t": [of(x(4, 6)), of(x(4))],
    "aten.movedim": [of(x(4, 6, 2), 0, 2), of(x(4, 6, 2), [0, 1], [1, 2])],
    "aten.expand": [of(x(4, 1, 6), [4, 2, 6]), of(x(6), [4, -1]), of(x(1, 6), [2, 4, 6])],
    "aten.broadcast_to": [of(x(4, 1), [4, 6])],
    "aten.expand_as": [of(x(4, 1), x(4, 6)), of(x(6), x(4, 6))],
    "aten.repeat": [of(x(4, 6), [1, 2]), of(x(6), [4, 1]), of(x(4, 1), [1, 3])],
    "aten.repeat_interleave": [of(x(4, 6), 2, 1), of(x(4, 1), 2, 1), of(x(4, 6), 1, 0)],
    "aten.cat": [of([x(4, 6), x(4, 2)], 1), of([x(4, 6), x(2, 6), x(4, 6)]), of([x(4, 1), x(4, 1)], -1)],
    "aten.stack": [of([x(4, 6), x(4, 6)], 1), of([x(4, 6)], 0), of([x(4), x(4)], -1)],
    "aten.split": [of(x(4, 6), 2, 1), of(x(4, 6), 4), of(x(4, 6), 4, -1)],
    "aten.split_with_sizes": [of(x(4, 6), [1, 2, 3], 1)],
    "aten.chunk": [of(x(4, 6), 3, 1)],
    "aten.unsafe_split": [of(x(4, 6), 2, 1)],
    "aten.unsafe_chunk": [of(x(4, 6), 3, 1)],
    "aten.tensor_split": [of(x(4, 6), 3, 1), of(x(4, 6), [1, 4], 1)],
    "aten.concat": [of([x(4, 6), x(4, 2)], 1)],
    "aten.diagonal": [of(x(4, 6, 2)), of(x(2, 4, 6), 1, -2, -1)],
    "aten.diag_embed": [of(x(2, 4)), of(x(2, 4), 1, 0, 2)],
    "aten.rot90": [of(x(4, 6, 2), 1, [0, 1]), of(x(4, 6, 2), 2, [1, 2])],
    "aten.unbind": [of(x(4, 2), 1), of(x(2, 4))],
    "aten.select": [of(x(4, 6), 0, 2), of(x(4, 6, 2), -1, 0)],
    "aten.slice": [
        of(x(4, 6), 1, 0, 3),
        of(x(4, 6), 1, 0, 2**63 - 1),
        of(x(4, 6), 0, 1, None),
        of(x(4, 6), 1, 0, 6, 2),
        of(x(4, 6)),
    ],
    "aten.narrow": [of(x(4, 6), 1, 2, 3)],
    "aten.slice_scatter": [of(x(4, 6), x(4, 3), 1, 1, 4), of(x(4, 6), x(4, 6), 1, 0, 2**63 - 1)],
    "aten.select_scatter": [of(x(4, 6), x(4), 1, 2)],
    "aten.pad": [
        of(x(4, 6), [0, 1]),
        of(x(4, 6), [1, 2], "constant", -1.0),
        of(x(4, 6), [0, 0, 1, 0], "constant", 0),
        of(x(2, 4, 6), [1, 1], "reflect"),
    ],
    "aten.constant_pad_nd": [of(x(4, 6), [0, 1]), of(x(4, 6), [0, 0, 1, 1], 2.0)],
    "aten.roll": [of(x(4, 6), [1], [0]), of(x(4, 6), [2])],
    "aten.flip": [of(x(4, 6), [1]), of(x(4, 6), [0, -1])],
    "aten.tril": [of(x(2, 4, 6)), of(x(4, 6), 1)],
    "aten.triu": [of(x(2, 4, 6))],
    "aten.diff": [of(x(4, 6)), of(x(4, 6), 1, -1, x(4, 1)), of(ids(9, 4, 6), 1, 0)],
    "aten.unfold": [of(x(4, 6), 1, 2, 2)],
    "aten.view_as_complex": [of(x(4, 6, 2), gradients=False)],
    "aten.view_as_real": [of(torch.complex(x(4, 6), x(4, 6)), gradients=False)],
    # ---- creation
    **{f"aten.{name}": [of([4, 6])] for name in ("zeros", "ones")},
    "aten.full": [of([4, 6], 2.0), of([], 1.0)],
    "aten.empty": [of([4, 6], values=False)],
    "aten.full_like": [of(x(4, 6), 2.0)],
    "aten.zeros_like": [of(x(4, 6))],
    "aten.ones_like": [of(x(4, 6), dtype=torch.bool)],
    "aten.empty_like": [of(x(4, 6), values=False)],
    "aten.new_full": [of(x(12), [4, 6], 2.0)],
    "aten.new_zeros": [of(x(4, 6), [4, 6])],
    "aten.new_ones": [of(x(4, 6), []), of(x(4, 6), [12], dtype=torch.bool)],
    "aten.new_empty": [of(x(4), [6], values=False)],
    "aten.arange": [of(12), of(2, 12, 2)],
    "aten.linspace": [of(0.0, 1.0, 12)],
    "aten.eye": [of(4), of(4, 6)],
    "aten.logspace": [of(0.0, 1.0, 12)],
    "aten.tril_indices": [of(4, 6)],
    "aten.triu_indices": [of(4, 6, 1)],
    "aten.scalar_tensor": [of(2.0)],
    # ---- matmul
    "aten.linear": [of(x(2, 4, 12), x(6, 12)), of(x(4, 12), x(6, 12), x(6)), of(x(12), x(6, 12))],
    "aten.matmul": [
        of(x(4, 12), x(12, 6)),
        of(x(2, 4, 12), x(12, 6)),
        of(x(12), x(12)),
        of(x(12), x(2, 12, 6)),
        of(x(2, 4, 12), x(12)),
        of(x(2, 1, 4, 6), x(3, 6, 2)),
    ],
    "aten.mm": [of(x(4, 12), x(12, 6))],
    "aten.bmm": [of(x(2, 4, 12), x(2, 12, 6))],
    "aten.dot": [of(x(12), x(12))],
    "aten.mv": [of(x(4, 12), x(12))],
    "aten.addmm": [of(x(6), x(4, 12), x(12, 6)), of(x(4, 1), x(4, 12), x(12, 6), beta=0.5)],
    "aten.baddbmm": [
        of(x(2, 4, 6), x(2, 4, 12), x(2, 12, 6)),
        of(x(1, 4, 6), x(2, 4, 12), x(2, 12, 6), beta=0.5, alpha=2),
    ],
    "aten.addmv": [of(x(4), x(4, 12), x(12))],
    "aten.outer": [of(x(4), x(6))],
    "aten.ger": [of(x(4), x(6))],
    "aten.cdist": [of(x(2, 4, 3), x(2, 6, 3))],
    "aten.bilinear": [of(x(4, 2), x(4, 6), x(4, 2, 6), x(4)), of(x(4, 2), x(4, 6), x(4, 2, 6), None)],
    "aten.einsum": [
        of("bqhd,bkhd->bhqk", [x(2, 4, 2, 6), x(2, 3, 2, 6)]),
        of("...k,nk->...n", [x(2, 4, 6), x(4, 6)]),
        of("mk,kn", [x(4, 6), x(6, 2)]),
        of("i,j->ij", [x(4), x(6)]),
        of("bi,bj->b", [x(4, 2), x(4, 6)]),
    ],
    "aten.conv1d": [
        of(x(4, 6, 8), x(4, 6, 3), x(4)),
        of(x(4, 6, 8), x(4, 6, 3)),
        of(x(4, 6, 8), x(6, 1, 3), None, [1], [2], [1], 6),
    ],
    "aten.conv2d": [
        of(x(2, 3, 4, 4), x(6, 3, 2, 2), x(6), [2, 2]),
        of(x(2, 4, 4, 4), x(6, 4, 3, 3), None, [1, 1], [1, 1]),
        of(x(2, 4, 4, 4), x(8, 2, 3, 3), x(8), [1, 1], [1, 1], [1, 1], 2),
    ],
    "aten.conv_transpose1d": [
        of(x(4, 6, 3), x(6, 4, 2), None, [2]),
        of(x(4, 6, 3), x(6, 4, 2), x(4), [2]),
        of(x(4, 6, 3), x(6, 2, 2), None, [1], [0], [0], 3),
    ],
    "aten.conv3d": [of(x(2, 1, 3, 4, 4), x(4, 1, 2, 2, 2))],
    "aten.convolution": [
        of(x(2, 4, 6, 4), x(6, 4, 2, 2), x(6), [2, 2], [0, 0], [1, 1], False, [0, 0], 1),
        of(x(2, 4, 6, 4), x(4, 6, 2, 2), None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1),
    ],
    "aten._grouped_mm": [of(x(8, 16).float(), x(2, 16, 16).float(), torch.tensor([3, 8], dtype=torch.int32))],
    "transformers.grouped_mm_fallback": [of(x(8, 4), x(2, 4, 12), torch.tensor([3, 8], dtype=torch.int32))],
    # ---- reductions
    "aten.sum": [
        of(x(4, 6)),
        of(x(4, 6), [1]),
        of(x(4, 6), [0], True),
        of(x(4, 1, 6), [-1, 1]),
        of(ids(9, 4, 6), [1]),
        of(bools(4, 6)),
    ],
    "aten.mean": [of(x(4, 6)), of(x(4, 6), [-1], True), of(x(4, 6, 2), [0, 1])],
    "aten.count_nonzero": [of(ids(3, 4, 6)), of(ids(3, 4, 6), 1)],
    "aten.amax": [of(x(4, 6), [1]), of(x(4, 6), [0], True), of(x(4, 6))],
    "aten.amin": [of(x(4, 6), [1])],
    "aten.argmax": [of(x(4, 6), 1), of(x(4, 6))],
    "aten.argmin": [of(x(4, 6), 0, True)],
    "aten.any": [of(bools(4, 6), 1), of(bools(4, 6))],
    "aten.all": [of(bools(4, 6), -1, True)],
    "aten.prod": [of(x(4, 6), 1)],
    "aten.logsumexp": [of(x(4, 6), [1])],
    "aten.max": [of(x(4, 6), 1), of(x(4, 6), x(6)), of(x(4, 6))],
    "aten.min": [of(x(4, 6), 1, True), of(x(4, 6), x(4, 6))],
    "aten.var": [of(x(4, 6), [1], True), of(x(4, 6), [1], correction=0, keepdim=True), of(x(4, 6), False)],
    "aten.std": [of(x(4, 6), [1])],
    "aten.std_mean": [of(x(4, 6), [1], correction=0, keepdim=True)],
    "aten.var_mean": [of(x(4, 6), [1], correction=0, keepdim=True)],
    "aten.norm": [of(x(4, 6), 2, [1]), of(x(4, 6), 2)],
    "aten.linalg_vector_norm": [of(x(4, 6), 2, [-1], True)],
    "aten.cumsum": [of(x(4, 6), 1), of(bools(4, 6), -1)],
    **{f"aten.{name}": [of(x(4, 6), 1)] for name in ("cumprod", "cummax", "cummin", "logcumsumexp")},
    "aten.trace": [of(x(4, 4))],
    "aten.aminmax": [of(x(4, 6), dim=1)],
    "aten.median": [of(x(4, 6), 1), of(x(4, 6))],
    "aten.nanmedian": [of(x(4, 6), 1)],
    "aten.nanmean": [of(x(4, 6), 1)],
    "aten.cosine_similarity": [of(x(4, 6), x(4, 6)), of(x(2, 4, 6), x(2, 4, 6), -1)],
    "aten.pairwise_distance": [of(x(4, 6), x(4, 6)), of(x(4, 6), x(4, 6), 2.0, 1e-6, True)],
    "aten.one_hot": [of(ids(6, 4, 2), 6)],
    "aten.grid_sampler_2d": [of(x(4, 2, 6, 6), x(4, 2, 4, 2) * 0.3, 0, 0, False)],
    "aten.grid_sampler_3d": [of(x(4, 2, 3, 3, 3), x(4, 2, 2, 2, 3) * 0.3, 0, 0, False)],
    "aten.grid_sampler": [of(x(4, 2, 6, 6), x(4, 2, 4, 2) * 0.3, 0, 0, False)],
    "aten.softmax": [of(x(4, 6), -1), of(x(4, 6), 0, torch.float32)],
    "aten._softmax": [of(x(4, 6), 1, False)],
    "aten._safe_softmax": [of(x(4, 6), -1)],
    "aten.log_softmax": [of(x(4, 6), -1)],
    "aten._log_softmax": [of(x(4, 6), 1, False)],
    "aten.topk": [of(x(4, 6), 2), of(x(4, 6), 2, 0)],
    "aten.sort": [of(x(4, 6)), of(x(4, 6), 0, True), of(x(4, 6), stable=True, dim=0)],
    "aten.argsort": [of(x(4, 6)), of(x(4, 6), 0)],
    "aten.histc": [of(ids(4, 12).double(), 4, 0, 3, gradients=False), of(x(12), 4, gradients=False)],
    **{f"aten.{kind}_pool1d": [of(x(4, 6, 8), [2])] for kind in ("avg", "max", "adaptive_avg")},
    **{f"aten.{kind}_pool2d": [of(x(4, 6, 4, 4), [2, 2])] for kind in ("avg", "max", "adaptive_avg")},
    **{f"aten.{kind}_pool3d": [of(x(4, 2, 4, 2, 2), [2, 2, 2])] for kind in ("avg", "max", "adaptive_avg")},
    **{
        f"aten.{name}": examples
        for name, examples in {**_resized(), **_spectra(), **_matrices(), **_recurrent()}.items()
    },
    # ---- normalisation
    "aten.layer_norm": [
        of(x(2, 4, 6), [6], x(6), x(6)),
        of(x(2, 4, 6), [4, 6]),
        of(x(4, 6), [6], x(6), None, 1e-6),
    ],
    "aten.native_layer_norm": [of(x(2, 4, 6), [6], x(6), x(6), 1e-5)],
    "aten.rms_norm": [of(x(2, 4, 6), [6], x(6)), of(x(4, 6), [6])],
    "aten._fused_rms_norm": [of(x(2, 4, 6), [6], x(6), 1e-5)],
    "aten.group_norm": [
        of(x(4, 6, 2), 3, x(6), x(6)),
        of(x(4, 6, 2), 2),
        of(x(4, 6, 2), 6, x(6), x(6)),
        of(x(4, 6, 2), 1, x(6), x(6)),
    ],
    "aten.instance_norm": [of(x(4, 6, 4), x(6), x(6), None, None, True, 0.1, 1e-5, False)],
    "aten._weight_norm": [of(x(4, 6), x(4, 1)), of(x(4, 6), x(1, 6), 1), of(x(4, 2, 6), x(1, 1, 6), 2)],
    "aten._native_batch_norm_legit_functional": [
        of(x(4, 6, 4), x(6), x(6), x(6), positive(6), True, 0.1, 1e-5, gradients=False),
        of(x(4, 6), None, None, x(6), positive(6), False, 0.1, 1e-5, gradients=False),
    ],
    "aten._native_batch_norm_legit": [of(x(4, 6, 4), x(6), x(6), True, 0.1, 1e-5, gradients=False)],
    "aten._native_batch_norm_legit_no_training": [
        of(x(4, 6, 2), x(6), x(6), x(6), positive(6), 0.1, 1e-5, gradients=False)
    ],
    # ---- attention
    "aten.scaled_dot_product_attention": [
        of(x(2, 4, 6, 2), x(2, 4, 8, 2), x(2, 4, 8, 2)),
        of(x(2, 4, 6, 2), x(2, 4, 6, 2), x(2, 4, 6, 2), None, 0.0, True),
        of(x(2, 4, 6, 2), x(2, 2, 6, 2), x(2, 2, 6, 2), is_causal=True, enable_gqa=True),
        of(x(2, 4, 6, 2), x(2, 2, 6, 2), x(2, 2, 6, 4), x(2, 1, 6, 6), enable_gqa=True, scale=0.3),
        of(x(2, 4, 6, 2), x(2, 4, 6, 2), x(2, 4, 6, 2), bools(1, 4, 6, 6) | torch.eye(6, dtype=torch.bool)),
        of(x(4, 6, 2), x(4, 6, 2), x(4, 6, 2), x(6, 6)),
        of(x(2, 4, 6, 2), x(2, 1, 6, 2), x(2, 1, 6, 2), bools(2, 1, 6, 6) | torch.eye(6, dtype=torch.bool)),
        of(x(2, 4, 6, 2), x(2, 1, 6, 2), x(2, 1, 6, 2), None, 0.0, True, enable_gqa=True),
    ],
    "autopar.attention": [
        of(x(2, 4, 6, 2), x(2, 4, 8, 2), x(2, 4, 8, 2)),
        of(x(2, 4, 6, 2), x(2, 2, 6, 2), x(2, 2, 6, 4), causal=True),
        of(x(2, 4, 6, 2), x(2, 1, 6, 2), x(2, 1, 6, 2), causal=True, window=2),
        of(x(2, 4, 6, 2), x(2, 2, 6, 2), x(2, 2, 6, 2), x(2, 1, 6, 6), x(4), softcap=2.0),
        of(x(2, 4, 6, 2), x(2, 4, 6, 2), x(2, 4, 6, 2), None, x(2, 4, 6, 1), scale=0.3),
        of(x(2, 4, 6, 2), x(2, 2, 6, 2), x(2, 2, 6, 2), bools(2, 1, 1, 6), causal=True, window=4),
        of(x(2, 12, 6, 2), x(2, 6, 6, 2), x(2, 6, 6, 2), x(12, 6, 6), x(12), causal=True),
    ],
    # ---- look-ups
    "aten.embedding": [of(x(12, 6), ids(12, 4, 2)), of(x(12, 6), ids(12, 4), 3)],
    "aten.index": [
        of(x(4, 6), [ids(4, 12)]),
        of(x(4, 6), [None, ids(6, 4, 1)]),
        of(x(4, 6, 2), [ids(4, 2, 1), ids(6, 1, 4)]),
        of(x(4, 6, 2), [ids(4, 6), None, ids(2, 6)]),
    ],
    "aten._unsafe_index": [of(x(4, 6), [ids(4, 12)])],
    "aten.index_select": [of(x(4, 6), 1, ids(6, 4)), of(x(4, 6), 0, ids(4, 1))],
    "aten.gather": [of(x(4, 6), 1, ids(6, 4, 2)), of(x(4, 6), 1, ids(6, 2, 4))],
    "aten.take_along_dim": [of(x(4, 6), ids(6, 4, 2), 1)],
    "aten.scatter": [
        of(x(4, 6), 1, ids(6, 4, 1), 1.0),
        of(x(4, 6), 1, torch.arange(4).repeat(4, 1), x(4, 4)),
    ],
    "aten.scatter_add": [of(x(4, 6), 1, ids(6, 4, 2), x(4, 2))],
    "aten.scatter_reduce": [of(x(4, 6), 1, ids(6, 4, 2), x(4, 2), "amax")],
    "aten.index_put": [
        of(x(4, 6), [torch.tensor([2, 0])], x(2, 6)),
        of(x(4, 6), [ids(4, 3)], x(6), True),
        of(x(4, 6, 2), [torch.tensor([1, 2]), torch.tensor([3, 0])], x(2, 2)),
    ],
    "aten.index_add": [of(x(4, 6), 0, ids(4, 3), x(3, 6)), of(x(4, 6), 1, ids(6, 3), x(4, 3), alpha=2)],
    "aten.index_copy": [of(x(4, 6), 0, torch.tensor([2, 0]), x(2, 6))],
    "aten.index_reduce": [of(positive(4, 6), 0, ids(4, 3), positive(3, 6), "amax", gradients=False)],
    "aten.index_fill": [of(x(4, 6), 1, ids(6, 3), 2.0)],
    "autopar.index_sum": [of(x(12, 6), ids(4, 12), 0, 4), of(x(4, 6), ids(3, 6), 1, 3)],
    "aten.masked_scatter": [of(x(4, 6), bools(4, 6), x(24)), of(x(4, 6), bools(4, 1), x(4, 6))],
    "aten.embedding_bag": [of(x(12, 6), ids(12, 8), torch.tensor([0, 3, 4]), False, 1, gradients=False)],
    # ---- losses
    "autopar.experts": [
        of(
            x(4, 6, 4),
            ids(6, 4, 6, 2),
            x(4, 6, 2),
            x(6, 12, 4),
            x(6, 12, 4),
            x(6, 4, 12),
            None,
            None,
            None,
            [],
            "mul.Tensor(silu(gate), up)",
            "",
        ),
        of(
            x(4, 6),
            ids(4, 4, 1),
            x(4, 1),
            None,
            x(4, 12, 6),
            x(4, 6, 12),
            None,
            x(4, 12),
            x(4, 6),
            [],
            "square(relu(up))",
            "",
        ),
        of(
            x(4, 6),
            ids(4, 4, 2),
            x(4, 2),
            x(4, 12, 6),
            x(4, 12, 6),
            x(4, 6, 12),
            None,
            None,
            None,
            [x(6)],
            "mul.Tensor(silu(gate), up)",
            "a = mul.Tensor(out, extra0); softmax.int(a, -1)",
        ),
        of(x(4, 6), ids(4, 4, 2), x(4, 2), None, x(4, 12, 6), None, None, None, None, [], "", ""),
    ],
    "autopar.grouped_linear": [of(x(8, 4), x(2, 12, 4), torch.tensor([3, 8]))],
    "autopar.cross_entropy": [of(x(2, 4, 6), ids(6, 2, 4)), of(x(4, 6), ids(6, 4), -100, "none", 0.1)],
    "aten.cross_entropy_loss": [
        of(x(4, 6), ids(6, 4)),
        of(x(4, 6), ids(6, 4), None, 2),
        of(x(4, 6), ids(6, 4), None, 0),
        *(of(x(4, 6), x(4, 6).softmax(-1), None, reduction) for reduction in (0, 1, 2)),
    ],
    "aten.nll_loss": [of(x(4, 6), ids(6, 4)), of(x(4, 6), ids(6, 4), None, 2)],
    **{
        f"aten.{name}": [of(x(4, 6), x(4, 6)), of(x(4, 6), x(4, 6), 2), of(x(4, 6), x(4, 6), 0)]
        for name in ("mse_loss", "l1_loss", "huber_loss")
    },
    "aten.soft_margin_loss": [of(x(4, 6), x(4, 6), gradients=False)],
    "aten.kl_div": [of(x(4, 6), positive(4, 6)), of(x(4, 6), positive(4, 6), 2, log_target=True)],
    "aten.binary_cross_entropy_with_logits": [
        of(x(4, 6), positive(4, 6)),
        of(x(4, 6), positive(4, 6), None, positive(6), 2, gradients=False),
        of(x(4, 6), positive(4, 6), positive(4, 6), positive(6), 0, gradients=False),
    ],
    "aten.binary_cross_entropy": [
        of(positive(4, 6), positive(4, 6)),
        of(positive(4, 6), positive(4, 6), positive(6), 0, gradients=False),
    ],
    "aten.smooth_l1_loss": [of(x(4, 6), x(4, 6))],
}


def grouped_mm(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """A plain form of Transformers' `grouped_mm_fallback`."""
    starts = [0, *offsets.tolist()]
    return torch.cat([rows[a:b] @ w for a, b, w in zip(starts, starts[1:], weight, strict=False)])


OPS: dict[str, Callable[..., Any]] = {
    "autopar.attention": functional.attention,
    "autopar.cross_entropy": functional.cross_entropy,
    "autopar.experts": expert_functions.experts,
    "autopar.grouped_linear": torch.ops.autopar.grouped_linear,
    "autopar.index_sum": index_functions.index_sum,
    "transformers.SqrtBoundDerivative": SqrtBoundDerivative.apply,
    "transformers.GeLUFunction": GeLUFunction.apply,
    "transformers.grouped_mm_fallback": grouped_mm,
}


def op_of(name: str) -> Callable[..., Any]:
    if name in OPS:
        return OPS[name]
    space, op = name.split(".")
    packet: Callable[..., Any] = getattr(getattr(torch.ops, space), op)
    return packet
