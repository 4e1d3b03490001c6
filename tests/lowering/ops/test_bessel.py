"""Bessel and Airy functions, compared with eager mode over their whole range: the intervals of the approximations, and beyond."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from support.comparisons.compare import check

pytestmark = pytest.mark.optimized

# The functions' names in torch.special.
NAMES = [f"{kind}{order}" for kind in ("bessel_j", "bessel_y", "modified_bessel_i", "modified_bessel_k") for order in (0, 1)]
NAMES += ["scaled_modified_bessel_k0", "scaled_modified_bessel_k1", "spherical_bessel_j0", "airy_ai", "i0e", "i1", "i1e"]
BOUNDARIES = [
    0.0,
    -0.0,
    0.5,
    1e-5,
    2.0,
    2.09,
    -2.09,
    5.0,
    -5.0,
    8.0,
    -8.0,
    8.33,
    30.0,
    -30.0,
    103.892,
    104.0,
    math.inf,
    -math.inf,
    math.nan,
]


def every(*args: torch.Tensor) -> list[Any]:
    return [getattr(torch.special, name)(*args) for name in NAMES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_range(dtype: torch.dtype) -> None:
    powers = torch.logspace(-30, 4, 100, dtype=torch.float64)
    x = torch.cat([torch.linspace(-20, 20, 801, dtype=torch.float64), powers, torch.tensor(BOUNDARIES, dtype=torch.float64)])
    check(every, x.to(dtype), calls=1, tolerance=(2e-6, 1e-5) if dtype == torch.float32 else (1e-12, 1e-12))


def test_large_arguments() -> None:
    """The phase is rounded as in eager mode, also for large arguments."""
    x = -torch.logspace(1, 4, 50, dtype=torch.float64)
    check(lambda x: [torch.special.airy_ai(x), torch.special.bessel_j0(x * 1e4), torch.special.bessel_y1(x * -1e6)], x, calls=1)
