"""Sampling of images at positions given by a tensor."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from support.comparisons.compare import check
from support.comparisons.gradients import check_gradients

SUMS = (1e-4, 1e-4)


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_grid_sample(mode: str, padding: str) -> None:
    def function(x, grid):
        # Cubic sampling reads sixteen pixels, and its gradient takes long to compile.
        return [F.grid_sample(x, grid, mode, padding, align_corners=align) for align in ((True, False) if mode != "bicubic" else (False,))]

    check_gradients(function, torch.randn(2, 3, 5, 6), torch.randn(2, 4, 7, 2) * 1.5, tolerance=SUMS)


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_volumes(padding: str) -> None:
    def function(x, grid):
        return [F.grid_sample(x, grid, mode, padding, align_corners=False) for mode in ("bilinear", "nearest")]

    check_gradients(function, torch.randn(2, 3, 5, 6, 4), torch.randn(2, 4, 3, 2, 3) * 1.5, tolerance=SUMS)


def test_affine_grid() -> None:
    def function(x, theta):
        return F.grid_sample(x, F.affine_grid(theta, (2, 3, 5, 4), align_corners=False), align_corners=False)

    check_gradients(function, torch.randn(2, 3, 5, 6), torch.randn(2, 2, 3), tolerance=SUMS)


def test_positions_that_are_not_finite() -> None:
    grid = torch.randn(1, 3, 3, 2)
    grid[0, 0, 0, 0], grid[0, 1, 1, 1], grid[0, 2, 2] = float("nan"), float("inf"), -float("inf")

    def function(x, grid):
        return [F.grid_sample(x, grid, "bilinear", padding, align_corners=False) for padding in ("zeros", "border", "reflection")]

    check(function, torch.randn(1, 2, 4, 5), grid)
