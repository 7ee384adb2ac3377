"""Examples of families of ops that differ in little but the name, and what makes the tensors of an example.

Each function gives the examples of its family by op name, without `aten.`; `rule_examples.py` puts them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

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


def unary() -> dict[str, list[Example]]:
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


def binary() -> dict[str, list[Example]]:
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


def where_examples() -> list[Example]:
    return [
        of(bools(4, 6), x(4, 6), x(6)),
        of(bools(4, 1), x(4, 6), 0.0),
        of(bools(4, 6), x(4, 6), -1.0),
        of(bools(4, 6), 0, x(4, 6)),
        of(bools(4, 6), 1.0, 0.0),
        of(bools(4, 6), x(4, 6), torch.tensor(2.0, dtype=torch.float64)),
    ]


def spectra() -> dict[str, list[Example]]:
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


def matrices() -> dict[str, list[Example]]:
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


def recurrent() -> dict[str, list[Example]]:
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


def resized() -> dict[str, list[Example]]:
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
