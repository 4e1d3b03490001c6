"""Average pooling, with fixed and adaptive windows."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from support.comparisons.compare import check
from support.comparisons.gradients import check_gradients

AVERAGES = {
    "overlapping": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "ceil_mode": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "padding not counted": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "divisor": lambda x: F.avg_pool2d(x, (3, 2), 2, (1, 0), divisor_override=5),
    "tiles": lambda x: F.avg_pool2d(x, 2),
    "tiles, rounded up": lambda x: F.avg_pool2d(x, 5, 5, ceil_mode=True),
    "gaps": lambda x: F.avg_pool2d(x, 2, 3),
    "one dimension": lambda x: F.avg_pool1d(x[0], 3, 2, 1),
    "three dimensions": lambda x: F.avg_pool3d(x, (2, 3, 3), 2, 1),
    "three dimensions, padding not counted": lambda x: F.avg_pool3d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "unbatched": lambda x: F.avg_pool2d(x[0], 2),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, (5, 20)),
    "adaptive, even in one dimension": lambda x: F.adaptive_avg_pool2d(x, (13, 7)),
    "adaptive to one": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive, unbatched": lambda x: F.adaptive_avg_pool2d(x[0], (4, 3)),
    "adaptive 1d": lambda x: F.adaptive_avg_pool1d(x[0], 5),
    "adaptive 3d": lambda x: F.adaptive_avg_pool3d(x, (2, 5, 4)),
}


@pytest.mark.sample(usual=3)
@pytest.mark.parametrize("case", AVERAGES)
def test_avg_pool(case: str) -> None:
    check_gradients(AVERAGES[case], torch.randn(2, 3, 13, 14))


def test_integer_averages_are_truncated() -> None:
    check(lambda x: F.avg_pool2d(x, 3, 2, 1), torch.randint(-20, 20, (2, 3, 7, 8)))


def test_infinities_stay_in_their_windows() -> None:
    x = torch.randn(1, 1, 7, 8)
    x[0, 0, 3, 4] = float("inf")
    check(lambda x: (F.adaptive_avg_pool2d(x, (3, 5)), F.avg_pool2d(x, 3, 2, 1)), x)


def test_channels_last() -> None:
    def function(x):
        return F.avg_pool2d(x, 3, 2, 1), F.adaptive_avg_pool2d(x, (2, 3))

    check_gradients(function, torch.randn(2, 3, 7, 8).to(memory_format=torch.channels_last))
