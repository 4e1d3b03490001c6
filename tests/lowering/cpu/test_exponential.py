"""exp in float32 on the CPU, by a polynomial and bit operations: compared with float64 over the whole range and at its ends."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import numpy as np
import pytest
import torch

from dynaxla.lowering.cpu.exponential import exp as exp_of_arrays
from dynaxla.lowering.cpu.exponential import exp_nonpositive

# The largest float32 whose exponential is finite, and the smallest whose exponential is a normal number.
HIGHEST, LOWEST = 88.72283172607422, -87.33654022216797


def exp(x: torch.Tensor) -> torch.Tensor:
    return torch.compile(torch.exp, backend="dynaxla")(x)


def test_accuracy() -> None:
    x = torch.linspace(LOWEST, HIGHEST, 1_000_003)
    expected = x.double().exp()
    ulps = ((exp(x).double() - expected) / expected).abs().max() / torch.finfo(torch.float32).eps
    assert ulps < 1


def test_ends_of_the_range() -> None:
    x = torch.tensor([HIGHEST, 88.7229, 1e30, math.inf, -87.4, -104.0, -1e30, -math.inf, 0.0, -0.0, 1e-30, math.nan])
    actual = exp(x)
    torch.testing.assert_close(actual[0], x[0].double().exp().float(), rtol=1e-6, atol=0)
    assert actual[1:4].tolist() == [math.inf] * 3
    assert actual[4:8].tolist() == [0.0] * 4  # the first is denormal in eager mode; XLA's programs flush such numbers
    assert actual[8:11].tolist() == [1.0] * 3
    assert actual[11].isnan()


def test_nonpositive() -> None:
    x = np.append(np.linspace(LOWEST, 0, 1_000_003, dtype=np.float32), np.float32([-0.0, -1e-30, -87.4, -104, -1e30, -math.inf, math.nan]))
    actual = np.asarray(jax.jit(exp_nonpositive)(x))
    expected = np.exp(x[:-7].astype(np.float64))
    assert np.max(np.abs(actual[:-7] - expected) / expected) < np.finfo(np.float32).eps
    np.testing.assert_array_equal(actual[-7:], np.float32([1, 1, 0, 0, 0, 0, math.nan]))


@pytest.mark.parametrize("function", [exp_of_arrays, exp_nonpositive])
def test_derivatives(function: Callable[[jax.Array], jax.Array]) -> None:
    """JAX's own derivative of bit operations is zero."""
    x = np.float32([-3, -0.5, 0])
    for derivative in (jax.grad(function), jax.grad(jax.grad(function)), lambda x: jax.jvp(function, (x,), (np.float32(1),))[1]):
        np.testing.assert_allclose(jax.jit(jax.vmap(derivative))(x), np.exp(x), rtol=1e-6)
