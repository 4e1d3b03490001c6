"""Discrete Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jax import Array, lax

from ...errors import UnsupportedOp
from ...torch_ops import aten
from ..context import Context
from ..dimensions import slice_dim, wrap_all
from ..promotion import full_like
from ..registry import lowers

# XLA transforms up to three dimensions at once, and they must be the last ones.
_AT_ONCE = 3


def _transform(x: Array, dims: Sequence[int], lengths: Sequence[int], kind: str) -> Array:
    """XLA's transform of `kind` over `dims`. lengths: their sizes; for RFFT and IRFFT those of the real array."""
    order = [dim for dim in range(x.ndim) if dim not in dims] + list(dims)
    return lax.transpose(lax.fft(lax.transpose(x, order), kind, tuple(lengths)), np.argsort(order))


def _times(x: Array, factor: float) -> Array:
    return x if factor == 1 else lax.mul(x, full_like(x, factor))


def _scaled(x: Array, normalization: int, elements: int) -> Array:
    """x, the sums of a transform, normalized by ATen's fft_norm_mode: 0 leaves them as they are, 1 divides them by the square root of
    `elements`, 2 by `elements`.
    """
    return _times(x, {0: 1.0, 1: 1 / math.sqrt(elements), 2: 1 / elements}[normalization])


def _sums(x: Array, dims: Sequence[int], forward: bool) -> Array:
    """The complex transform without normalization."""
    for first in range(0, len(dims), _AT_ONCE):
        some = dims[first : first + _AT_ONCE]
        lengths = [x.shape[dim] for dim in some]
        x = _transform(x, some, lengths, "FFT" if forward else "IFFT")
        # XLA's inverse divides by the number of elements.
        x = x if forward else _times(x, math.prod(lengths))
    return x


def _count(x: Array, dims: Sequence[int]) -> int:
    return math.prod(x.shape[dim] for dim in dims)


@lowers(aten._fft_c2c.default)
def fft_c2c(x: Array, dim: Sequence[int], normalization: int, forward: bool) -> Array:
    """The discrete Fourier transform of complex numbers over some dimensions; its inverse if `forward` is False.

    Shape:  that of x.
    Dtype:  that of x.
    """
    if x.size == 0:
        return x
    dims = wrap_all(dim, x.ndim)
    return _scaled(_sums(x, dims, forward), normalization, _count(x, dims))


@lowers(aten._fft_r2c.default)
def fft_r2c(x: Array, dim: Sequence[int], normalization: int, onesided: bool, *, ctx: Context) -> Array:
    """The discrete Fourier transform of real numbers over some dimensions.

    Shape:  that of x; with `onesided`, the last of `dim` keeps size // 2 + 1 elements: the omitted ones are conjugates of these.
    Dtype:  the complex dtype of x.
    """
    if x.size == 0:
        return lax.full(ctx.output.shape, 0, ctx.output.jax_dtype)
    dims = wrap_all(dim, x.ndim)
    last, size = dims[-1], x.shape[dims[-1]]
    out = _transform(x, [last], [size], "RFFT")
    if not onesided:
        rest = slice_dim(out, last, 1, (size + 1) // 2)
        out = lax.concatenate([out, lax.rev(lax.conj(rest), [last])], last)
    return _scaled(_sums(out, dims[:-1], forward=True), normalization, _count(x, dims))


@lowers(aten._fft_c2r.default)
def fft_c2r(x: Array, dim: Sequence[int], normalization: int, last_dim_size: int, *, ctx: Context) -> Array:
    """The inverse of the onesided transform of real numbers.

    Shape:  that of x, but the last of `dim` grows from last_dim_size // 2 + 1 to `last_dim_size` elements.
    Dtype:  the real dtype of x.
    """
    if x.size == 0:
        return lax.full(ctx.output.shape, 0, ctx.output.jax_dtype)
    dims = wrap_all(dim, x.ndim)
    last = dims[-1]
    if x.shape[last] != last_dim_size // 2 + 1:
        raise UnsupportedOp(f"_fft_c2r from {x.shape[last]} to {last_dim_size} elements")
    # XLA's inverse divides by the number of elements.
    out = _times(_transform(_sums(x, dims[:-1], forward=False), [last], [last_dim_size], "IRFFT"), last_dim_size)
    return _scaled(out, normalization, _count(out, dims))
