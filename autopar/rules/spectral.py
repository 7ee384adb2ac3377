"""Fourier transforms and linear algebra of matrices: the dims they work along are whole, all others split.

fft_rfft(x, n, dim=1)      a b! c -> a b_2! c
linalg_solve(A, B)         l m! n!, l n! k -> l m! k
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from autopar.rules.call import OpCall, RuleFunction, dim_at, dims_at, names, text_of, tokens, whole_dims
from autopar.rules.rule import Rule

FIRST = ((0,),)


def along_one(call: OpCall) -> Rule | None:
    """fft_fft, ifft, rfft, irfft, hfft, ihfft(x, n, dim, norm)."""
    return whole_dims(
        call, [dim_at(call.arg(2, "dim", -1), len(call.shapes[0]))], sums=FIRST, flops_per_point=10.0
    )


def along_some(call: OpCall, *, default: tuple[int, ...] | None) -> Rule | None:
    """fft_fft2, fft_fftn, ...(x, sizes, dims, norm)."""
    rank = len(call.shapes[0])
    dims = call.arg(2, "dim", default)
    if dims is None and call.arg(1, "s") is not None:
        dims = range(-len(call.arg(1, "s")), 0)
    return whole_dims(
        call, dims_at(None if dims is None else tuple(dims), rank), sums=FIRST, flops_per_point=10.0
    )


def shifted(call: OpCall) -> Rule | None:
    """fft_fftshift, fft_ifftshift(x, dims)."""
    return whole_dims(call, dims_at(call.arg(1, "dim"), len(call.shapes[0])), sums=FIRST)


def matrices(call: OpCall) -> Rule | None:
    """inverse, cholesky, determinants and the like of the last two dims; results keep the leading dims."""
    lead = names(len(call.shapes[0]) - 2)
    fresh = iter(range(100))
    results = []
    for shape in call.result_shapes:
        own = [f"z{next(fresh)}!" for _ in shape[len(lead) :]]
        results.append(tokens(shape, [*lead, *own]))
    return call.parse(text_of([tokens(call.shapes[0], [*lead, "m!", "n!"])], results))


def solved(call: OpCall) -> Rule | None:
    """linalg_solve(A, B), linalg_solve_triangular(A, B, upper, left): columns of B split, and leading dims."""
    left = call.arg(3, "left", True) if call.name.endswith("triangular") else call.arg(2, "left", True)
    if len(call.shapes[0]) < 2 or len(call.shapes[0]) != len(call.shapes[1]):
        return None  # a vector, or matrices that broadcast
    text = "... m! n!, ... n! k -> ... m! k" if left else "... m! n!, ... k n! -> ... k m!"
    return call.parse(text, sums=((1,),))


RULES: Mapping[str, RuleFunction] = {
    **{f"aten.fft_{name}": along_one for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")},
    **{
        f"aten.fft_{name}2": partial(along_some, default=(-2, -1)) for name in ("fft", "ifft", "rfft", "irfft")
    },
    **{f"aten.fft_{name}n": partial(along_some, default=None) for name in ("fft", "ifft", "rfft", "irfft")},
    "aten.fft_fftshift": shifted,
    "aten.fft_ifftshift": shifted,
    **{
        f"aten.{name}": matrices
        for name in ("linalg_inv", "inverse", "linalg_cholesky", "cholesky", "linalg_det", "det", "logdet",
                     "linalg_matrix_exp", "matrix_exp", "linalg_qr", "linalg_svdvals", "linalg_eigvalsh", "linalg_pinv")
    },
    "aten.linalg_solve": solved,
    "aten.linalg_solve_triangular": solved,
}  # fmt: skip
