"""Discrete Fourier transforms, by XLA's FFT."""

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

# XLA transforms at most three dimensions at once, which must be the last dimensions.
_MAX_FFT_DIMS = 3


def _transform(x: Array, dims: Sequence[int], lengths: Sequence[int], fft_type: str) -> Array:
    """Returns XLA's transform of x over `dims`.

    Args:
        x: the array.
        dims: at most _MAX_FFT_DIMS dimensions.
        lengths: the sizes of these dimensions; for RFFT and IRFFT, their sizes in the real array.
        fft_type: FFT, IFFT, RFFT or IRFFT.
    """
    order = [dim for dim in range(x.ndim) if dim not in dims] + list(dims)
    return lax.transpose(lax.fft(lax.transpose(x, order), fft_type, tuple(lengths)), np.argsort(order))


def _times(x: Array, factor: float) -> Array:
    return x if factor == 1 else lax.mul(x, full_like(x, factor))


def _normalize(x: Array, normalization: int, elements: int) -> Array:
    """Returns the result of a transform, normalized.

    Args:
        x: the result without normalization.
        normalization: ATen's fft_norm_mode: 0 leaves x unchanged, 1 divides it by the square root of `elements`, 2 by `elements`.
        elements: number of transformed elements.
    """
    return _times(x, {0: 1.0, 1: 1 / math.sqrt(elements), 2: 1 / elements}[normalization])


def _unnormalized_transform(x: Array, dims: Sequence[int], forward: bool) -> Array:
    """Returns the complex transform over `dims` without normalization; the inverse transform if `forward` is False."""
    for first in range(0, len(dims), _MAX_FFT_DIMS):
        group = dims[first : first + _MAX_FFT_DIMS]
        lengths = [x.shape[dim] for dim in group]
        x = _transform(x, group, lengths, "FFT" if forward else "IFFT")
        # XLA's inverse transform divides by the number of elements: this multiplication undoes the division.
        x = x if forward else _times(x, math.prod(lengths))
    return x


def _element_count(x: Array, dims: Sequence[int]) -> int:
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
    return _normalize(_unnormalized_transform(x, dims, forward), normalization, _element_count(x, dims))


@lowers(aten._fft_r2c.default)
def fft_r2c(x: Array, dim: Sequence[int], normalization: int, onesided: bool, *, ctx: Context) -> Array:
    """The discrete Fourier transform of real numbers over some dimensions.

    Shape:  that of x; with `onesided`, the last of `dim` keeps size // 2 + 1 elements. The omitted elements are conjugates of
            kept elements.
    Dtype:  the complex dtype of x.
    """
    if x.size == 0:
        return lax.full(ctx.output.shape, 0, ctx.output.jax_dtype)
    dims = wrap_all(dim, x.ndim)
    last, size = dims[-1], x.shape[dims[-1]]
    out = _transform(x, [last], [size], "RFFT")
    if not onesided:
        omitted = slice_dim(out, last, 1, (size + 1) // 2)
        out = lax.concatenate([out, lax.rev(lax.conj(omitted), [last])], last)
    return _normalize(_unnormalized_transform(out, dims[:-1], forward=True), normalization, _element_count(x, dims))


@lowers(aten._fft_c2r.default)
def fft_c2r(x: Array, dim: Sequence[int], normalization: int, last_dim_size: int, *, ctx: Context) -> Array:
    """The inverse of the onesided transform of real numbers.

    Shape:  that of x, but the last of `dim` grows from last_dim_size // 2 + 1 to `last_dim_size` elements.
    Dtype:  the real dtype of x.
    Raises: UnsupportedOp if x has another size along that dimension.
    """
    if x.size == 0:
        return lax.full(ctx.output.shape, 0, ctx.output.jax_dtype)
    dims = wrap_all(dim, x.ndim)
    last = dims[-1]
    if x.shape[last] != last_dim_size // 2 + 1:
        raise UnsupportedOp(
            f"_fft_c2r needs {last_dim_size // 2 + 1} elements for a result of {last_dim_size}, and its operand has {x.shape[last]}"
        )
    # XLA's inverse transform divides by the number of elements: the factor `last_dim_size` undoes the division.
    out = _times(_transform(_unnormalized_transform(x, dims[:-1], forward=False), [last], [last_dim_size], "IRFFT"), last_dim_size)
    return _normalize(out, normalization, _element_count(out, dims))
