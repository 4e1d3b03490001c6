"""Operands of elementwise ops, and a check of many functions in one compiled program."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from support.comparisons.compare import check

INTEGERS = [torch.uint8, torch.int8, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64]
REAL = [torch.bool, *INTEGERS, *FLOATS]
ALL = [*REAL, *COMPLEX]


def make(dtype: torch.dtype, *shape: int, low: float = -9, high: float = 9) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    if dtype.is_complex:
        return torch.complex(*(torch.empty(shape, dtype=torch.float64).uniform_(low, high) for _ in range(2))).to(dtype)
    if not dtype.is_signed:
        low = max(low, 0)
    x = torch.empty(shape, dtype=torch.float64).uniform_(low, high)
    return x.to(dtype) if dtype.is_floating_point else x.round().to(dtype)


def specials(dtype: torch.dtype) -> torch.Tensor:
    """Returns special values: zeros of both signs, infinities, NaN, halves, limits of the dtype."""
    if dtype.is_floating_point:
        limits = torch.finfo(dtype)
        exact = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, 1.0, -1.0, 3.0, 1e-3, math.inf, -math.inf, math.nan, limits.max, limits.min]
        return torch.tensor([*exact, *torch.linspace(-8, 8, 29).tolist()], dtype=dtype)
    if dtype == torch.bool:
        return torch.tensor([True, False])
    limits = torch.iinfo(dtype)
    return torch.tensor([0, 1, 2, 3, 7, 100, limits.max, limits.max - 1, limits.min, limits.min + 1], dtype=dtype)


def works(function: Callable[..., Any], *args: Any) -> bool:
    """True if eager mode supports the function for these arguments."""
    try:
        function(*args)
    except (RuntimeError, TypeError, IndexError):
        return False
    return True


def check_each(functions: list[Callable[..., Any]], *args: Any, **options: Any) -> None:
    """Checks all functions that eager mode supports for these arguments, in one program."""
    supported = [function for function in functions if works(function, *args)]
    assert supported, "eager mode supports none of the functions"
    check(lambda *xs: [function(*xs) for function in supported], *args, **options)
