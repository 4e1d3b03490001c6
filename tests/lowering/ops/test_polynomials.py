"""Orthogonal polynomials: every degree at every point, the ends of the intervals, and degrees that are not integers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from support.comparisons.compare import check

# The functions' names in torch.special.
NAMES = [f"{kind}chebyshev_polynomial_{letter}" for kind in ("", "shifted_") for letter in "tuvw"]
NAMES += ["hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p"]

# Not nan, for which ATen's loops return uninitialized memory.
POINTS = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 0.25, 0.999, 1.001, -1.001, 2.0, -3.7, 20.5, 1e-8, 1e8, 1e30, math.inf, -math.inf]
DEGREES = [-5.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.9, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 31.0, math.inf, -math.inf, math.nan, 1e30]


def every(x: Any, n: Any) -> list[torch.Tensor]:
    return [getattr(torch.special, name)(x, n) for name in NAMES]


@pytest.mark.optimized
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_points_and_degrees(dtype: torch.dtype) -> None:
    tolerance = (2e-5, 2e-5) if dtype == torch.float32 else (1e-9, 1e-10)
    check(every, torch.tensor(POINTS, dtype=dtype), torch.tensor(DEGREES, dtype=dtype)[:, None], calls=1, tolerance=tolerance)


@pytest.mark.optimized
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_high_degrees(dtype: torch.dtype) -> None:
    """Hermite polynomials are nan above some degree. A recurrence up to a degree above 2**53 would not terminate."""
    n = torch.tensor([127.0, 128, 129, 511, 512, 513], dtype=dtype)[:, None]
    x = torch.tensor([0.01, -0.5, 1.5], dtype=dtype)
    check(lambda x, n: (torch.special.hermite_polynomial_h(x, n), torch.special.hermite_polynomial_he(x, n)), x, n, calls=1)
    check(lambda x: torch.special.chebyshev_polynomial_t(x, 2.0**60).abs() <= 1, torch.tensor([0.3, -0.2]), calls=1)


def test_operands() -> None:
    """Numbers with tensors, integers, bools, rank 0, strides, empty tensors."""
    function = torch.special.laguerre_polynomial_l
    x, n = torch.randn(3, 4, dtype=torch.float64).mT, torch.arange(12).reshape(4, 3)
    check(
        lambda x, n: (
            (function(x, 3), function(0.5, n), function(x[0, 0], n), function(x, n[1, 1]), function(n, n), function(x[:0], n[:0])),
            (function(n > 3, n), [getattr(torch.special, name)(n, 2) for name in NAMES]),
        ),
        x,
        n,
        calls=1,
    )
