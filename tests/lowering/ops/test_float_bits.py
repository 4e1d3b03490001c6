"""Functions of the bits of floats: values equal to NumPy's and JAX's, and no float64 read as a signed integer.

XLA's compiler for TPUs refuses float64 as a signed integer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp

from commands.lower_everywhere.capture import of_function
from commands.lower_everywhere.lower import stablehlo
from dynaxla.lowering.ops import float_bits

_POSITIVE = [0.0, 5e-324, 3e-310, 2.0**-1022, 1.0, 1.5, 2.0 - 2**-52, 2.0, 1e300, np.finfo(np.float64).max, np.inf, np.nan]
VALUES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)])


def _equal(actual: Any, expected: Any) -> None:
    """Equal bits, except for those of nans."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    assert np.array_equal(np.isnan(actual), np.isnan(expected))
    assert np.array_equal(np.where(np.isnan(actual), 0, actual), np.where(np.isnan(expected), 0, expected))
    assert np.array_equal(np.signbit(actual)[~np.isnan(actual)], np.signbit(expected)[~np.isnan(expected)])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values(dtype: str) -> None:
    with jax.enable_x64(True), np.errstate(all="ignore"):
        x = np.array([*map(np.dtype(dtype).type, VALUES)])
        mantissa, exponent = jax.jit(float_bits.frexp)(x)
        expected = jax.jit(jnp.frexp)(x)
        _equal(mantissa, expected[0])
        assert exponent.tolist() == expected[1].tolist()
        left, right = (grid.ravel() for grid in np.meshgrid(x, x))
        _equal(jax.jit(float_bits.nextafter)(left, right), np.nextafter(left, right))
        _equal(jax.jit(float_bits.copysign)(left, right), np.copysign(left, right))
        assert jax.jit(float_bits.signbit)(x).tolist() == np.signbit(x).tolist()
        integer = np.dtype(f"int{8 * x.itemsize}")
        assert float_bits.bitcast(jnp.asarray(x), integer).tolist() == x.view(integer).tolist()
        exponents = jnp.arange(-100, 101, dtype="int32")
        assert float_bits.power_of_two(exponents, np.dtype(dtype)).tolist() == np.ldexp(np.ones(1, dtype), exponents).tolist()


_X = torch.ones(3, 3, dtype=torch.float64)
PROGRAMS: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "frexp": (torch.frexp, _X),
    "ldexp": (lambda x: torch.ldexp(x, torch.tensor(2)), _X),
    "copysign": (lambda x: torch.copysign(x, x + 1), _X),
    "copysign, a number": (lambda x: torch.copysign(x, -2.0), _X),
    "signbit": (torch.signbit, _X),
    "nextafter": (lambda x: torch.nextafter(x, x + 1), _X),
    "log2": (torch.log2, _X),
    "floor_divide": (lambda x: x // (x + 1), _X),
    "view": (lambda x: x.view(torch.int64) + 1, _X),
    "matrix_exp": (torch.matrix_exp, _X.float()),
    "multinomial": (lambda x: torch.multinomial(x, 5, replacement=True), _X.float()),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_float64_is_read_as_a_signed_integer(name: str) -> None:
    function, x = PROGRAMS[name]
    (graph,) = of_function(function, [x], "tpu")
    text = stablehlo(graph, "tpu")
    assert "f64" in text
    assert not re.findall(r"bitcast_convert .*f64>\) -> tensor<.*i64>", text.replace("ui64", "unsigned"))
    assert "next_after" not in text
