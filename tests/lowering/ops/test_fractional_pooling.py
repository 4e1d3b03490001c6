"""Fractional max pooling with explicit random samples."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from support.comparisons.compare import check
from support.comparisons.gradients import check_gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_and_three_dimensions(dtype: torch.dtype) -> None:
    check_gradients(
        lambda x, y, two, three: (
            functional.fractional_max_pool2d(x, (2, 3), (4, 3), return_indices=True, _random_samples=two),
            functional.fractional_max_pool2d(x[0], 2, (1, 8), _random_samples=two[:1]),
            functional.fractional_max_pool3d(y, (1, 2, 2), (2, 3, 1), return_indices=True, _random_samples=three),
        ),
        torch.randn(2, 3, 9, 11, dtype=dtype).mT,
        torch.randn(2, 2, 4, 6, 5, dtype=dtype),
        constants=[torch.rand(2, 3, 2, dtype=dtype), torch.rand(2, 2, 3, dtype=dtype)],
    )


def test_unused_samples() -> None:
    """torch's own function makes such samples for an input without a batch."""
    check(
        lambda x, s: functional.fractional_max_pool3d(x, 2, (2, 3, 2), return_indices=True, _random_samples=s),
        torch.randn(4, 5, 6, 5),
        torch.rand(4, 4, 3),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype: torch.dtype) -> None:
    """The positions of the windows are computed in the half type."""
    check(
        lambda x, samples: functional.fractional_max_pool2d(x, 2, (29, 31), return_indices=True, _random_samples=samples),
        torch.randn(1, 4, 60, 64).to(dtype),
        torch.rand(1, 4, 2).to(dtype),
        calls=1,
    )


def test_nan_and_infinity() -> None:
    x = torch.randint(0, 3, (1, 1, 6, 6)).float()
    x[0, 0, 1, 1] = x[0, 0, 2, 1] = math.nan
    x[0, 0, 4:, 4:] = -math.inf
    check(lambda x, s: functional.fractional_max_pool2d(x, 2, 4, return_indices=True, _random_samples=s), x, torch.rand(1, 1, 2), calls=1)
