"""Softmax and log-softmax."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from support.comparisons.compare import check
from support.comparisons.gradients import check_gradients

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_softmax(dtype: torch.dtype) -> None:
    def function(x):
        return (
            F.softmax(x, -1),
            F.softmax(x, 1),
            F.log_softmax(x, 0),
            F.log_softmax(x.transpose(0, 2), -1),
            F.softmax(x[0, 0, 0], 0),
            F.log_softmax(x[0, 0, 0], -1),
            F.softmax(x, 1, dtype=torch.float64),
            F.softmin(x, 1),
        )

    check_gradients(function, torch.randn(3, 4, 5).to(dtype) * 3)


@pytest.mark.optimized
def test_infinities_and_empty_operands() -> None:
    inf = float("inf")
    x = torch.tensor([[-inf, -inf, -inf], [-inf, 1, 2], [inf, 1, 2], [float("nan"), 1, 2], [1e30, -1e30, 0]])

    def function(x):
        return F.softmax(x, 1), F.log_softmax(x, 1), torch.ops.aten._safe_softmax(x, 1), F.softmax(x[:0], 0), F.softmax(x[:, :0], 1)

    check(function, x)


@pytest.mark.sample(usual=1)
@pytest.mark.optimized
@pytest.mark.parametrize("count", [33, 40, 100, 4099])
@pytest.mark.parametrize("rows", [1, 40])
def test_long_rows(rows: int, count: int) -> None:
    """Vectorized reductions of rows, with special values at positions that are reduced together."""
    x = torch.randn(rows + 7, count) * 20
    for row, special in enumerate([(math.nan, 1e30), (1e30, math.nan), (math.nan, math.inf), (math.inf, 1.0), (-math.inf, -math.inf)]):
        x[row, 0], x[row, count - 1] = special
    x[5] = -math.inf
    x[6] = math.nan

    def function(x):
        return F.softmax(x, 1), F.log_softmax(x, 1), F.softmax(x.T, 0), torch.ops.aten._safe_softmax(x, 1)

    check(function, x)
    check_gradients(lambda x: (F.softmax(x, 1), F.log_softmax(x, 1)), x[7:])


@pytest.mark.optimized
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_scaled_scores(name: str, dtype: torch.dtype) -> None:
    """Rounds the scaled scores before the maximum is subtracted: one fused multiply-add would give infinite or no weights, and so NaN."""
    scores = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0), dtype=dtype) * (1e10 if dtype == torch.float32 else 1e19)
    check(lambda x: getattr(x * 0.3535, name)(-1), scores)
