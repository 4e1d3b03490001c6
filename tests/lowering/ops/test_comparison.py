"""Comparisons, clamps and selections: tensors of every dtype with numbers of every kind, nan and infinities."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.comparisons.operands import ALL, COMPLEX, FLOATS, REAL, check_each, make, specials
from support.releases import IS_OLDEST


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_comparisons_with_numbers(dtype: torch.dtype) -> None:
    ops = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
    x = make(dtype, 20, low=-2, high=2)
    check_each([lambda x, op=op, n=n: op(x, n) for op in ops for n in (0, 1, True, 0.1, -1, 1.5, math.inf, math.nan, 300)], x)
    check_each([lambda x, n=n: torch.ops.aten.eq.Scalar(x, n) for n in (0, 1, 0.5)], x)


# A clamp to an upper bound of nan alone. torch 2.11 ignores this bound.
NAN_UPPER_BOUND = () if IS_OLDEST else ((None, math.nan),)


@pytest.mark.sample(usual=2)
@pytest.mark.optimized
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_clamp(dtype: torch.dtype) -> None:
    functions: list[Callable[..., Any]] = [
        lambda x, low, high: torch.clamp(x, low, high),
        lambda x, low, high: torch.clamp(x, min=low),
        lambda x, low, high: torch.clamp(x, max=high),
        lambda x, low, high: torch.clamp(x, high, low),
    ]
    for bounds in ((1, 5), (None, 2), (2, None), (0.5, 2.5), (5, 1), (-math.inf, 3.0), (math.nan, 1.0), *NAN_UPPER_BOUND):
        functions.append(lambda x, low, high, bounds=bounds: torch.clamp(x, *bounds))
    check_each(functions, torch.cat([specials(dtype), make(dtype, 30)]), make(dtype, 1), make(dtype, 2, 1))


@pytest.mark.sample(usual=3)
@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_where_and_masked_fill(dtype: torch.dtype) -> None:
    value: Any = 2 if not (dtype.is_floating_point or dtype.is_complex) else -0.1
    check_each(
        [
            lambda mask, x, y: torch.where(mask, x, y),
            lambda mask, x, y: torch.where(mask, x, value),
            lambda mask, x, y: torch.where(mask, 1.5, x),
            lambda mask, x, y: torch.where(mask, x.sum(), y),
            lambda mask, x, y: torch.where(mask, 1, 0.5),
            lambda mask, x, y: torch.where(mask[0, 0], x, y),
            lambda mask, x, y: x.masked_fill(mask, value),
            lambda mask, x, y: x.masked_fill(mask, True),
            lambda mask, x, y: x.masked_fill(mask, y[0]),
            lambda mask, x, y: y.masked_fill(mask, value),
            lambda mask, x, y: x.clone().masked_fill_(mask[0], value),
            lambda mask, x, y: x.masked_fill(mask, -math.inf),
        ],
        torch.rand(4, 5) < 0.5,
        make(dtype, 4, 5),
        make(dtype, 5),
    )


@pytest.mark.optimized
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX], ids=str)
def test_nan_to_num(dtype: torch.dtype) -> None:
    functions = [torch.nan_to_num, lambda x: torch.nan_to_num(x, 1.5, 2.5), lambda x: torch.nan_to_num(x, neginf=-7.0)]
    x = specials(dtype) if dtype.is_floating_point else torch.complex(*[specials(torch.float32)] * 2).to(dtype)
    check_each([*functions, torch.isnan, torch.isinf, torch.isfinite, torch.sgn], x)
