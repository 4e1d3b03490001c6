"""Special functions at poles and limits, and common divisors of the smallest integer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.comparisons.compare import check
from support.comparisons.operands import FLOATS, check_each, make, specials

pytestmark = pytest.mark.optimized


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_functions(dtype: torch.dtype) -> None:
    names = "lgamma digamma erfinv i0"
    special = "i0e i1 i1e ndtri log_ndtr ndtr entr erfcx"
    functions: list[Callable[..., Any]] = [getattr(torch, name) for name in names.split()]
    functions += [getattr(torch.special, name) for name in special.split()]
    check_each(functions, torch.cat([make(dtype, 40), torch.tensor([0.0, -0.0, 1.0, -1.0, math.nan], dtype=dtype)]))
    check_each([torch.lgamma, torch.digamma], torch.tensor([math.inf, -2.0, -7.0, 0.5], dtype=dtype))
    positive = make(dtype, 30, low=0.1)
    functions = [lambda x, n=n: torch.polygamma(n, x) for n in (0, 1, 2, 3)]
    functions += [lambda x: torch.mvlgamma(x + 3, 3), lambda x: torch.special.gammainc(x, x.flip(0)), torch.erfinv]
    functions += [
        lambda x: torch.special.gammaincc(x, x.flip(0)),
        lambda x: torch.special.zeta(x + 1.5, x),
        lambda x: torch.special.zeta(3, x),
    ]
    check_each(functions, positive, tolerance={torch.float32: (1e-4, 1e-5), torch.float64: (1e-8, 1e-8)}.get(dtype))
    negative = make(torch.float64, 30, low=-4.4, high=-0.1)
    check(lambda x: [torch.polygamma(n, x) for n in (1, 2, 3)], negative, tolerance=(1e-8, 1e-8))


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_poles_and_limits(dtype: torch.dtype) -> None:
    """Arguments for which JAX's functions fail: poles, the last number before a limit, large numbers, one infinite operand of two."""
    q = torch.tensor([-1e-10, -1e-3, -0.5, -1.25, -5.25, -9.3, -100.3, -2.0, 0.0, 1e-9], dtype=dtype)
    check(lambda q: [torch.special.zeta(n, q) for n in (1, 2, 3, 11)], q)
    check(lambda q: [torch.polygamma(n, q) for n in (1, 2, 3, 10)], q[1:-1])
    check(torch.special.erfcx, torch.tensor([9.2, 9.4, 26.6, -5.0, math.inf, -math.inf], dtype=dtype))
    x = torch.tensor([5.0, 8.0, -10.0, -1e4, -1e18, math.inf, -math.inf], dtype=dtype)
    check(torch.special.log_ndtr, x, tolerance=(1e-4, 0.0) if dtype == torch.float32 else (1e-10, 0.0))
    check_each([torch.digamma, torch.erfinv], torch.tensor([0.0, -0.0, -1.0, -40.0, -1e10, 1.0, 1.5, -2.0, math.inf], dtype=dtype))
    x = specials(dtype)
    check_each([torch.hypot, torch.logaddexp, torch.logaddexp2, torch.xlogy, torch.heaviside], x[:, None], x)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16], ids=str)
def test_divisors_of_the_smallest_integer(dtype: torch.dtype) -> None:
    x = torch.tensor([torch.iinfo(dtype).min, 0, 1, 6, 100, -1, torch.iinfo(dtype).max], dtype=dtype)
    check_each([torch.gcd, torch.lcm], x[:, None], x)
