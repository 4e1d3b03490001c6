"""Distances between rows."""

from __future__ import annotations

import pytest
import torch

from support.comparisons.compare import check
from support.comparisons.gradients import check_gradients


@pytest.mark.sample(usual=3)
@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, float("inf")])
def test_distances(p: float) -> None:
    x, y = torch.randn(2, 5, 3), torch.randn(2, 4, 3)
    y[0, 0] = x[0, 0]  # a distance of zero
    check_gradients(lambda x, y: (torch.cdist(x, y, p), torch.cdist(x[0], y, p), torch.pdist(x[0], p)), x, y)


def test_empty_inputs() -> None:
    check(
        lambda x: (torch.cdist(x[:0], x), torch.cdist(x[:, :0], x[:, :0]), torch.pdist(x[:1]), torch.pdist(x[:0])),
        torch.randn(3, 2),
        calls=1,
    )
