"""Lowerings of ops that create sequences: inclusive ranges, window functions of signal processing, sample frequencies of an FFT."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jax import Array, lax

from ...torch_ops import aten
from ..context import Context
from ..dtypes import DType
from ..promotion import convert, full_like, number
from ..registry import Lowering, lowers, registry
from .creation import arange

_FLOAT64 = np.dtype(np.float64)


@lowers(aten.range.step)
def range_step(start: Any, end: Any, step: Any = 1, *, dtype: DType | None = None, ctx: Context) -> Array:
    """start, start + step, and so on up to and including end: the deprecated torch.range.

    Shape:  [(end - start) // step + 1].
    Dtype:  `dtype` if given, else the default float.
    """
    return arange(start, end, step, ctx=ctx)


@lowers(aten.range.default)
def range_(start: Any, end: Any, *, dtype: DType | None = None, ctx: Context) -> Array:
    """start, start + 1, and so on up to and including end: the deprecated torch.range.

    Dtype:  `dtype` if given, else the default float.
    """
    return arange(start, end, ctx=ctx)


def _window(length: int, periodic: bool, ctx: Context, window_function: Callable[[Array], Array]) -> Array:
    """Returns a window of `length` values in the dtype of the current node's result.

    `window_function` maps positions from 0 to 1 to the window's values, in float64. A periodic window is the window of length + 1 without
    its last value.
    """
    if length <= 1:
        return lax.full((length,), number(1, ctx.output.jax_dtype))
    intervals = length if periodic else length - 1
    return convert(window_function(lax.mul(lax.iota(_FLOAT64, length), number(1 / intervals, _FLOAT64))), ctx.output.jax_dtype)


def _cosines(*coefficients: float) -> Callable[[Array], Array]:
    """Returns the function of a position that sums coefficient * cos(2 pi * index * position) over all coefficients."""

    def window_function(position: Array) -> Array:
        total = full_like(position, coefficients[0])
        for index, coefficient in enumerate(coefficients[1:], 1):
            total = lax.add(
                total, lax.mul(lax.cos(lax.mul(position, number(2 * math.pi * index, _FLOAT64))), number(coefficient, _FLOAT64))
            )
        return total

    return window_function


def bartlett_window(length: int, periodic: bool = True, *, ctx: Context) -> Array:
    """1 - |2 x - 1| for x from 0 to 1: a triangle.

    Shape:  [length].
    """
    one = number(1, _FLOAT64)
    return _window(length, periodic, ctx, lambda position: lax.sub(one, lax.abs(lax.sub(lax.add(position, position), one))))


def blackman_window(length: int, periodic: bool = True, *, ctx: Context) -> Array:
    """0.42 - 0.5 cos(2 pi x) + 0.08 cos(4 pi x) for x from 0 to 1.

    Shape:  [length].
    """
    return _window(length, periodic, ctx, _cosines(0.42, -0.5, 0.08))


def hamming_window(length: int, periodic: bool = True, alpha: float = 0.54, beta: float = 0.46, *, ctx: Context) -> Array:
    """alpha - beta cos(2 pi x) for x from 0 to 1.

    Shape:  [length].
    """
    return _window(length, periodic, ctx, _cosines(alpha, -beta))


def kaiser_window(length: int, periodic: bool = True, beta: float = 12.0, *, ctx: Context) -> Array:
    """I0(beta sqrt(1 - x**2)) / I0(beta) for x from -1 to 1.

    Shape:  [length].
    """

    def window_function(position: Array) -> Array:
        x = lax.sub(lax.add(position, position), number(1, _FLOAT64))
        argument = lax.mul(lax.sqrt(lax.sub(number(1, _FLOAT64), lax.square(x))), number(abs(beta), _FLOAT64))
        largest = full_like(argument, abs(beta))
        return lax.mul(lax.div(lax.bessel_i0e(argument), lax.bessel_i0e(largest)), lax.exp(lax.sub(argument, largest)))

    return _window(length, periodic, ctx, window_function)


def _with_dtype(function: Lowering) -> Lowering:
    return lambda *args, dtype=None, ctx: function(*args, ctx=ctx)


# ATen has one overload for each number of arguments.
for _function in (bartlett_window, blackman_window, hamming_window, kaiser_window):
    _packet = getattr(torch.ops.aten, _function.__name__, None)
    for _overload in _packet.overloads() if _packet is not None else ():
        _op = getattr(_packet, _overload)
        if not _op._schema.is_mutable:
            registry.register(_op, _with_dtype(_function), source=_function)


def _frequency_step(n: int, d: float) -> Any:
    """Returns the distance between two adjacent frequencies, which is infinite if n * d is 0."""
    with np.errstate(divide="ignore"):
        return np.divide(1.0, n * d)


@lowers(aten.fft_fftfreq.default)
def fftfreq(n: int, d: float = 1.0, *, dtype: DType | None = None, ctx: Context) -> Array:
    """The sample frequencies of an FFT: first the nonnegative ones, then the negative ones. `d` is the time between two samples.

    Shape:  [n].
    Dtype:  `dtype` if given, else the default float.
    """
    index = lax.iota(np.dtype(np.int64), n)
    index = lax.select(lax.ge(index, full_like(index, (n + 1) // 2)), lax.sub(index, full_like(index, n)), index)
    return convert(lax.mul(convert(index, _FLOAT64), _frequency_step(n, d)), ctx.output.jax_dtype)


@lowers(aten.fft_rfftfreq.default)
def rfftfreq(n: int, d: float = 1.0, *, dtype: DType | None = None, ctx: Context) -> Array:
    """The sample frequencies of a real FFT: from 0 to the largest one. `d`: as for `fftfreq`.

    Shape:  [n // 2 + 1].
    Dtype:  `dtype` if given, else the default float.
    """
    index = lax.iota(_FLOAT64, n // 2 + 1)
    return convert(lax.mul(index, _frequency_step(n, d)), ctx.output.jax_dtype)
