"""Max pooling and unpooling."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from support.comparisons.compare import check
from support.comparisons.gradients import check_gradients

MAXIMA = {
    "overlapping": lambda x: F.max_pool2d(x, 3, 2, 1),
    "overlapping, with indices": lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
    "tiles": lambda x: F.max_pool2d(x, 2),
    "mixed": lambda x: F.max_pool2d(x, (3, 2), (2, 3), (1, 0), (2, 1), ceil_mode=True, return_indices=True),
    "gaps": lambda x: F.max_pool2d(x, 2, 5, return_indices=True),
    "large window": lambda x: F.max_pool2d(x, 7, 2, 3, return_indices=True),
    "three dimensions": lambda x: F.max_pool3d(x, 3, 2, 1, ceil_mode=True, return_indices=True),
    "one dimension": lambda x: F.max_pool1d(x[0], 3, 2, 1, return_indices=True),
    "unbatched": lambda x: F.max_pool2d(x[0], 2, return_indices=True),
    "adaptive": lambda x: F.adaptive_max_pool2d(x, (5, 20), return_indices=True),
    "adaptive 1d": lambda x: F.adaptive_max_pool1d(x[0], 4, return_indices=True),
    "adaptive 3d": lambda x: F.adaptive_max_pool3d(x, (2, 5, 4), return_indices=True),
}


@pytest.mark.sample(usual=3)
@pytest.mark.parametrize("case", MAXIMA)
def test_max_pool(case: str) -> None:
    check_gradients(MAXIMA[case], torch.randn(2, 3, 13, 14))


def with_ties_and_nans() -> torch.Tensor:
    x = torch.randint(0, 3, (2, 3, 13, 14)).float()
    x[0][torch.rand(3, 13, 14) < 0.1] = float("nan")
    x[1][torch.rand(3, 13, 14) < 0.7] = -float("inf")
    x[1, 0] = -float("inf")
    return x


@pytest.mark.optimized
@pytest.mark.parametrize("case", [case for case in MAXIMA if "indices" in case or case not in ("overlapping", "tiles")])
def test_ties_nans_and_infinities(case: str) -> None:
    check(MAXIMA[case], with_ties_and_nans(), calls=1)


@pytest.mark.sample(usual=8)
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "after a convolution", "after a cat", "unbatched", "reduced"])
@pytest.mark.parametrize("settings", [(3, 2, 1), (2, 2), ((3, 2), (2, 3), (1, 0), (2, 1), True), (3, 3, 1, 1, True), (5, 1, 2)], ids=str)
def test_values_without_indices(layout: str, settings: tuple) -> None:
    """In every memory order of the activations."""
    weight = torch.randn(4, 3, 3, 3)
    before = {
        "after a convolution": lambda x: F.conv2d(x, weight, padding=1).relu(),
        "after a cat": lambda x: torch.cat([F.conv2d(x, weight, padding=1), x], 1),
        "unbatched": lambda x: x[0],
        "reduced": lambda x: x.unsqueeze(-1).amax(-1),
    }.get(layout, lambda x: x)
    x = torch.randn(2, 3, 13, 14)
    x = x.to(memory_format=torch.channels_last) if layout == "channels last" else x
    check(lambda x: F.max_pool2d(before(x), *settings), x, calls=1)


@pytest.mark.optimized
def test_values_without_indices_keep_nans() -> None:
    check(lambda x: (F.max_pool2d(x, 3, 2, 1), F.max_pool2d(x, 5, 3)), with_ties_and_nans(), calls=1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_max_pool_dtypes(dtype: torch.dtype) -> None:
    def function(x):
        return F.max_pool2d(x, 3, 2, 1, return_indices=True), F.max_pool2d(x, 2), F.max_pool3d(x, 2)

    check(function, (torch.randn(2, 3, 7, 8) * 20).to(dtype), calls=1)


def test_unpooling() -> None:
    x, indices = F.max_pool2d(torch.randn(2, 3, 6, 8).double(), 2, return_indices=True)
    y, indices_3d = F.max_pool3d(torch.randn(2, 4, 6, 8), 2, return_indices=True)
    check_gradients(
        lambda x, y, indices, indices_3d: (
            (F.max_unpool2d(x, indices, 2), F.max_unpool2d(x[0], indices[0], 2, output_size=(7, 9)), F.max_unpool3d(y, indices_3d, 2)),
            F.max_unpool1d(x[0], indices[0] % 8, 2),
        ),
        x,
        y,
        constants=[indices, indices_3d],
    )


def test_unpooling_keeps_the_layout() -> None:
    """Eager mode's result is channels_last if the input is, although torch's fake implementation says otherwise."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        unpooled = F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)
        return unpooled, unpooled.relu()

    check(function, torch.randn(2, 3, 6, 8).to(memory_format=torch.channels_last))


def test_channels_last() -> None:
    def function(x):
        return F.max_pool2d(x, 3, 2, 1)

    check_gradients(function, torch.randn(2, 3, 7, 8).to(memory_format=torch.channels_last))
