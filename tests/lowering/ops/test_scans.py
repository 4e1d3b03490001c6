"""Cumulative sums, products and extrema."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.comparisons.compare import check
from support.comparisons.gradients import check_gradients

nan, inf = float("nan"), float("inf")


def sums(x: torch.Tensor) -> Any:
    return (
        x.cumsum(0),
        x.cumsum(-2),
        x.cumprod(1),
        x.cumsum(1, dtype=torch.complex128 if x.is_complex() else torch.float64),
        x[0, 0, 0].cumsum(0),
        x[:0].cumprod(0),
    )


def extrema(x: torch.Tensor) -> Any:
    return x.cummax(1), x.cummin(0), x.cummax(-1), x[0, 0, 0].cummin(0), x[:0].cummax(0)


@pytest.mark.optimized
def test_sums_of_one_constant() -> None:
    """XLA's simplifier aborts the process for a cumulative sum of a converted, gathered constant."""
    check(
        lambda index: [
            torch.zeros(1, dtype=torch.bool)[index].cumsum(0),
            torch.ones(1).take(index).double().cumsum(0),
            torch.zeros((), dtype=torch.bool).as_strided([2, 3], [0, 0]).cumsum(1),
        ],
        torch.zeros(4, dtype=torch.int64),
    )


def test_gradients() -> None:
    check_gradients(lambda x: (sums(x), extrema(x), x.logcumsumexp(1), x[0, 0, 0].logcumsumexp(0)), torch.randn(4, 5, 3).mT)


@pytest.mark.quick
def test_integer_results_are_int64() -> None:
    check(
        lambda *xs: [(x.cumsum(0), x.cumprod(0), x.sum(), x.prod()) for x in xs],
        *(torch.full((6,), 100, dtype=dtype) for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32)),
        torch.ones(300, dtype=torch.bool),
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_dtypes(dtype: torch.dtype) -> None:
    x = torch.randint(0, 2, (4, 3, 5)).to(dtype) if not dtype.is_floating_point and not dtype.is_complex else torch.randn(4, 3, 5).to(dtype)
    check(lambda x: (sums(x), () if dtype.is_complex else extrema(x), x.logcumsumexp(1) if dtype.is_floating_point else x), x, calls=1)


@pytest.mark.optimized
def test_indices_with_ties_and_nan() -> None:
    x = torch.tensor([[1.0, 1.0, nan, 5.0, nan, 2.0], [3.0, -inf, 3.0, inf, inf, -inf], [0.0, -0.0, 0.0, -1.0, -1.0, 7.0]])
    check(lambda x: (x.cummax(1), x.cummin(1), x.cummax(0), x.cummin(0), x.cumsum(1), x.cumprod(1), x.logcumsumexp(1)), x, calls=1)


@pytest.mark.optimized
def test_long_sums() -> None:
    """Half types are added in float32: sums in the half type would stop growing after a few hundred elements."""
    check(lambda x: (x.cumsum(0), x.bfloat16().cumsum(0), x.half().cumsum(0)), torch.rand(5000), calls=1)


@pytest.mark.optimized
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_logarithms(dtype: torch.dtype) -> None:
    """Imaginary parts exceed pi, because the logarithms' branches add up."""
    x = torch.complex(torch.randn(3, 20, 2).double(), torch.randn(3, 20, 2).double() * 3).to(dtype)
    special = torch.tensor([complex(-inf, 2), 1 + 2j, complex(-inf, 1), 2 - 3j, complex(inf, 1), complex(inf, 2), complex(1, nan), 1j])
    check(
        lambda x, special: (x.logcumsumexp(1), x.mT.logcumsumexp(-1), special[:5].logcumsumexp(0), special[5:].logcumsumexp(0)),
        x,
        special,
        calls=1,
    )
    check_gradients(lambda x: x.logcumsumexp(0), x[0])
