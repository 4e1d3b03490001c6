"""Lowerings of orthogonal polynomials, where both the point and the degree are tensors: Chebyshev, Hermite, Laguerre, Legendre.

JAX has no functions for orthogonal polynomials. A call of torch's kernel (see fallback.py) would not fuse with neighbouring ops, and is not
possible on a TPU.

Each polynomial is 1 at degree 0 and has a closed form at degree 1; higher degrees follow by a recurrence of three terms. A negative degree
gives 0. A fractional degree is truncated.

Source: NIST Digital Library of Mathematical Functions, sections 18.5 and 18.9; the special cases are those of ATen native/Math.h.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from jax import Array, lax

from ...torch_ops import aten
from ..promotion import Promotion, convert, full_like, number
from ..registry import lower_table

_INT64 = np.dtype(np.int64)

# Returns the value of the polynomial of degree k + 1, from x, k, and the values for the degrees k and k - 1.
Recurrence = Callable[[Array, Array, Array, Array], Array]


def _twice(x: Array) -> Array:
    return lax.add(x, x)


def _degree(n: Array) -> Array:
    """Returns the degree as int64: truncated, and -1 if int64 cannot hold it (also for NaN and infinities)."""
    is_representable = lax.lt(lax.abs(n), number(2.0**63, n.dtype))
    return convert(lax.select(is_representable, n, full_like(n, -1)), _INT64)


def _by_recurrence(x: Array, n: Array, mask: Array, first: Array, recurrence: Recurrence) -> Array:
    """Returns the polynomial of degree n by the recurrence, where `mask` is True.

    The loop ends when each element with `mask` has reached its degree n, or is NaN.

    Args:
        x: The points.
        n: The degrees, int64.
        mask: True for the elements to compute. Elsewhere the result is arbitrary.
        first: The polynomial of degree 1 at x.
        recurrence: Returns the polynomial of the next degree at x.
    """

    def active(k: Array, last: Array) -> Array:
        is_below = lax.bitwise_and(mask, lax.lt(lax.broadcast(k, n.shape), n))
        return lax.bitwise_and(is_below, lax.eq(last, last))

    def unfinished(state: tuple[Array, Array, Array]) -> Array:
        return lax.reduce_or(active(state[0], state[2]), range(x.ndim))

    def step(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        k, previous, last = state
        is_active = active(k, last)
        following = recurrence(x, lax.broadcast(lax.convert_element_type(k, x.dtype), x.shape), last, previous)
        return lax.add(k, np.int64(1)), lax.select(is_active, last, previous), lax.select(is_active, following, last)

    one = full_like(x, 1)
    last = lax.while_loop(unfinished, step, (lax.full((), 1, _INT64), one, first))[2]
    out = lax.select(lax.eq(n, number(0, _INT64)), one, last)
    return lax.select(lax.lt(n, number(0, _INT64)), full_like(x, 0), out)


def _chebyshev_recurrence(x: Array, k: Array, last: Array, previous: Array) -> Array:
    return lax.sub(lax.mul(_twice(x), last), previous)


def _divide_or(numerator: Array, denominator: Array, fallback: Array) -> Array:
    """Returns numerator / denominator, and `fallback` where the denominator is zero."""
    return lax.select(lax.eq(denominator, number(0, denominator.dtype)), fallback, lax.div(numerator, denominator))


def _alternating(n: Array, value: Array) -> Array:
    """Returns value for even n, -value for odd n."""
    return lax.select(lax.eq(lax.bitwise_and(n, number(1, _INT64)), number(0, _INT64)), value, lax.neg(value))


def _chebyshev(kind: str, shifted: bool, min_trigonometric_degree: int) -> Callable[[Array, Array], Array]:
    """Returns the function of x and n that evaluates Chebyshev polynomials.

    Args:
        kind: "t", "u", "v" or "w": the first to the fourth kind.
        shifted: True for the polynomials on the interval from 0 to 1.
        min_trigonometric_degree: The lowest degree for which the trigonometric form is used between the ends of the interval.
    """

    def evaluate(x: Array, n: Array) -> Array:
        n = _degree(n)
        x = lax.sub(_twice(x), number(1, x.dtype)) if shifted else x
        one, degree = full_like(x, 1), lax.convert_element_type(n, x.dtype)
        angle = lax.acos(x)
        half_angle = lax.mul(angle, number(0.5, x.dtype))
        middle_angle = lax.mul(lax.add(degree, number(0.5, x.dtype)), angle)
        next_degree, odd_number = lax.add(degree, one), lax.add(_twice(degree), one)
        # first: the polynomial of degree 1. at_1, at_minus_1: the values at x = 1 and -1. trigonometric: the values between these ends,
        # with ATen's limits where the denominator is zero.
        if kind == "t":
            first, at_1, at_minus_1 = x, one, _alternating(n, one)
            trigonometric = lax.cos(lax.mul(degree, angle))
        elif kind == "u":
            first, at_1, at_minus_1 = _twice(x), next_degree, _alternating(n, next_degree)
            limit = lax.div(lax.mul(next_degree, lax.cos(lax.mul(next_degree, angle))), x)
            trigonometric = _divide_or(lax.sin(lax.mul(next_degree, angle)), lax.sin(angle), limit)
        elif kind == "v":
            first, at_1, at_minus_1 = lax.sub(_twice(x), one), one, _alternating(n, odd_number)
            trigonometric = lax.select(lax.eq(lax.sin(half_angle), one), at_minus_1, lax.div(lax.cos(middle_angle), lax.cos(half_angle)))
        else:
            first, at_1, at_minus_1 = lax.add(_twice(x), one), odd_number, _alternating(n, one)
            limit = lax.select(lax.gt(x, number(0, x.dtype)), at_1, at_minus_1) if not shifted else at_minus_1
            trigonometric = lax.select(lax.eq(lax.cos(half_angle), one), limit, lax.div(lax.sin(middle_angle), lax.sin(half_angle)))
        is_end = lax.eq(lax.abs(x), one)
        is_trigonometric = lax.bitwise_and(lax.ge(n, number(min_trigonometric_degree, _INT64)), lax.lt(lax.abs(x), one))
        has_closed_form = lax.bitwise_or(is_end, is_trigonometric)
        out = _by_recurrence(x, n, lax.bitwise_not(has_closed_form), first, _chebyshev_recurrence)
        closed_form = lax.select(is_trigonometric, trigonometric, lax.select(lax.gt(x, number(0, x.dtype)), at_1, at_minus_1))
        return lax.select(lax.bitwise_and(has_closed_form, lax.ge(n, number(0, _INT64))), closed_form, out)

    return evaluate


def _hermite_h(x: Array, n: Array) -> Array:
    """The physicists' Hermite polynomials."""

    def recurrence(x: Array, k: Array, last: Array, previous: Array) -> Array:
        return lax.sub(lax.mul(_twice(x), last), lax.mul(_twice(k), previous))

    return _hermite(x, n, _twice(x), recurrence)


def _hermite_he(x: Array, n: Array) -> Array:
    """The probabilists' Hermite polynomials."""

    def recurrence(x: Array, k: Array, last: Array, previous: Array) -> Array:
        return lax.sub(lax.mul(x, last), lax.mul(k, previous))

    return _hermite(x, n, x, recurrence)


def _hermite(x: Array, n: Array, first: Array, recurrence: Recurrence) -> Array:
    """Returns the Hermite polynomial of degree n; NaN above the highest degree that ATen computes."""
    n = _degree(n)
    too_high = lax.gt(n, number(128 if x.dtype == np.float32 else 512, _INT64))
    out = _by_recurrence(x, n, lax.bitwise_not(too_high), first, recurrence)
    return lax.select(too_high, full_like(x, math.nan), out)


def _laguerre_l(x: Array, n: Array) -> Array:
    n, first = _degree(n), lax.sub(full_like(x, 1), x)
    at_zero = lax.eq(x, number(0, x.dtype))

    def recurrence(x: Array, k: Array, last: Array, previous: Array) -> Array:
        numerator = lax.sub(lax.mul(lax.add(_twice(k), first), last), lax.mul(k, previous))
        return lax.div(numerator, lax.add(k, number(1, k.dtype)))

    out = _by_recurrence(x, n, lax.bitwise_not(at_zero), first, recurrence)
    return lax.select(lax.bitwise_and(at_zero, lax.ge(n, number(0, _INT64))), full_like(x, 1), out)


def _legendre_p(x: Array, n: Array) -> Array:
    n, one = _degree(n), full_like(x, 1)
    at_end = lax.eq(lax.abs(x), one)

    def recurrence(x: Array, k: Array, last: Array, previous: Array) -> Array:
        numerator = lax.sub(lax.mul(lax.mul(lax.add(_twice(k), one), x), last), lax.mul(k, previous))
        return lax.div(numerator, lax.add(k, one))

    out = _by_recurrence(x, n, lax.bitwise_not(at_end), x, recurrence)
    end = lax.select(lax.gt(x, number(0, x.dtype)), one, _alternating(n, one))
    return lax.select(lax.bitwise_and(at_end, lax.ge(n, number(0, _INT64))), end, out)


def _register(name: str, function: Callable[[Array, Array], Array]) -> None:
    packet = getattr(aten, f"special_{name}")
    lower_table({getattr(packet, overload): function for overload in ("default", "x_scalar", "n_scalar")}, promote=Promotion.INT_TO_FLOAT)


for _kind, _min_degree, _shifted_min_degree in (("t", 7, 7), ("u", 9, 7), ("v", 9, 7), ("w", 9, 5)):
    _register(f"chebyshev_polynomial_{_kind}", _chebyshev(_kind, False, _min_degree))
    _register(f"shifted_chebyshev_polynomial_{_kind}", _chebyshev(_kind, True, _shifted_min_degree))
_register("hermite_polynomial_h", _hermite_h)
_register("hermite_polynomial_he", _hermite_he)
_register("laguerre_polynomial_l", _laguerre_l)
_register("legendre_polynomial_p", _legendre_p)
