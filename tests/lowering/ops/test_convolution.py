"""Convolutions and their gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from support.comparisons.compare import check
from support.comparisons.gradients import check_gradients

# Another order of summation changes a few units in the last place of the largest terms.
SUMS = {torch.float16: (5e-3, 2e-2), torch.bfloat16: (4e-2, 0.1), torch.float32: (1e-4, 1e-4)}

TWO_DIMENSIONAL = {
    "plain": ((6, 4, 3, 3), {}),
    "strided": ((6, 4, 3, 2), {"stride": (2, 3), "padding": (1, 0)}),
    "dilated": ((6, 4, 3, 2), {"dilation": (2, 3), "padding": 2}),
    "grouped": ((6, 2, 3, 3), {"groups": 2, "padding": 1, "stride": 2}),
    "depthwise": ((4, 1, 3, 3), {"groups": 4, "padding": 1}),
    "depthwise with a multiplier": ((8, 1, 3, 2), {"groups": 4, "padding": 1, "dilation": 2, "stride": 2}),
    "pointwise": ((6, 4, 1, 1), {}),
    "pointwise strided": ((6, 4, 1, 1), {"stride": 3}),
    "patches": ((6, 4, 4, 4), {"stride": 4}),
    "same": ((6, 4, 5, 3), {"padding": "same", "dilation": (1, 2)}),
    "padding wider than the kernel": ((6, 4, 1, 2), {"padding": 3}),
    "unread remainder": ((6, 4, 2, 2), {"stride": 4}),
}


@pytest.mark.sample(usual=4)
@pytest.mark.parametrize("case", TWO_DIMENSIONAL)
def test_conv2d(case: str) -> None:
    shape, settings = TWO_DIMENSIONAL[case]

    def function(x, w, b):
        return F.conv2d(x, w, b, **settings), F.conv2d(x, w, **settings)

    check_gradients(function, torch.randn(2, 4, 11, 10), torch.randn(shape), torch.randn(shape[0]), tolerance=SUMS[torch.float32])


TRANSPOSED = {
    "plain": ((4, 6, 3, 3), {}),
    "strided": ((4, 6, 3, 2), {"stride": (2, 3), "padding": (1, 0), "output_padding": (1, 2)}),
    "grouped": ((4, 3, 3, 3), {"groups": 2, "padding": 1, "stride": 2, "dilation": (1, 2)}),
    "depthwise": ((4, 1, 2, 2), {"groups": 4, "stride": 2}),
    "padding wider than the kernel": ((4, 6, 1, 2), {"padding": 2}),
}


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("case", TRANSPOSED)
def test_conv_transpose2d(case: str) -> None:
    shape, settings = TRANSPOSED[case]

    def function(x, w, b):
        return F.conv_transpose2d(x, w, b, **settings), F.conv_transpose2d(x, w, **settings)

    bias = torch.randn(shape[1] * settings.get("groups", 1))
    check_gradients(function, torch.randn(2, 4, 7, 6), torch.randn(shape), bias, tolerance=SUMS[torch.float32])


def test_one_and_three_dimensions_and_unbatched() -> None:
    def function(x, w, x3, w3, wt, wt3, b):
        return (
            F.conv1d(x, w, b, stride=2, padding=1, dilation=2),
            F.conv1d(x[0], w, b),
            F.conv_transpose1d(x, wt, b, stride=2, output_padding=1),
            F.conv_transpose1d(x, wt, b, stride=2, output_padding=3, dilation=4),
            F.conv3d(x3, w3, b, stride=(1, 2, 1), padding=(0, 1, 2), groups=2),
            F.conv_transpose3d(x3, wt3, b, stride=2, padding=1),
        )

    args = [(2, 4, 9), (6, 4, 3), (2, 4, 5, 6, 4), (6, 2, 2, 3, 2), (4, 6, 3), (4, 6, 2, 2, 3), (6,)]
    check_gradients(function, *[torch.randn(shape) for shape in args], tolerance=SUMS[torch.float32])


DEPTHWISE_1D = {
    "plain": {},
    "causal": {"padding": 3},
    "strided": {"stride": 3, "padding": 2},
    "dilated": {"dilation": 2, "padding": 5},
    "all": {"stride": 2, "dilation": 3, "padding": 4},
}


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("case", DEPTHWISE_1D)
def test_depthwise_1d(case: str) -> None:
    """XLA computes them by elementwise products and sums, in blocks if they are long."""
    settings = {"groups": 6, **DEPTHWISE_1D[case]}

    def function(x, w, b):
        return F.conv1d(x, w, b, **settings), F.conv1d(x.sin(), w[..., :1], **settings), F.conv_transpose1d(x, w, b, **settings)

    for length, dtype, tolerance in ((17, torch.float32, (1e-4, 1e-4)), (30_000, torch.float64, (1e-9, 1e-9))):
        args = (torch.randn(shape, dtype=dtype) for shape in ((2, 6, length), (6, 1, 4), (6,)))
        check_gradients(function, *args, tolerance=tolerance)
    rows = torch.randn(2, 40, 6)
    check_gradients(lambda x, w, b: function(x.transpose(1, 2), w, b), rows, torch.randn(6, 1, 4), torch.randn(6), tolerance=(1e-4, 1e-4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int32], ids=str)
def test_dtypes_of_depthwise_1d(dtype: torch.dtype) -> None:
    x, w = (torch.randint(-3, 4, shape).to(dtype) for shape in [(2, 6, 9), (6, 1, 3)])
    check(lambda x, w: F.conv1d(x * 2, w, padding=1, groups=6) + 1, x, w)


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    def function(x, w, b, wt):
        return F.conv2d(x, w, b, padding=1, groups=2), F.conv_transpose2d(x, wt, b)

    args = [torch.randn(shape, dtype=dtype) for shape in [(2, 4, 6, 5), (6, 2, 3, 3), (6,), (4, 6, 2, 2)]]
    check_gradients(function, *args, tolerance=SUMS.get(dtype))


def test_integers() -> None:
    check(lambda x, w: F.conv2d(x, w, padding=1), torch.randint(-9, 9, (2, 3, 5, 5)), torch.randint(-9, 9, (4, 3, 3, 3)))


def test_channels_last() -> None:
    def function(x, w, b):
        return F.conv2d(x, w, b, padding=1, stride=2).relu(), F.conv2d(x, w, b)

    x, w = torch.randn(2, 4, 8, 6), torch.randn(6, 4, 3, 3)
    channels_last = torch.channels_last
    check_gradients(function, x.to(memory_format=channels_last), w, torch.randn(6), tolerance=SUMS[torch.float32])
    check_gradients(function, x, w.to(memory_format=channels_last), torch.randn(6), tolerance=SUMS[torch.float32])


def test_gradient_of_one_operand() -> None:
    w = torch.randn(6, 4, 3, 3)
    x = torch.randn(2, 4, 5, 5)
    check_gradients(lambda w, x, b: F.conv2d(x, w, b), w, constants=[x, torch.randn(6)], tolerance=SUMS[torch.float32])
    check_gradients(lambda x, w, b: F.conv2d(x, w, b), x, constants=[w, torch.randn(6)], tolerance=SUMS[torch.float32])
    check_gradients(lambda b, x, w: F.conv2d(x, w, b), torch.randn(6), constants=[x, w], tolerance=SUMS[torch.float32])


def test_empty_batch() -> None:
    def function(x, w, b):
        return F.conv2d(x, w, b), F.conv_transpose2d(x, w.transpose(0, 1), b)

    check_gradients(function, torch.randn(0, 4, 5, 5), torch.randn(6, 4, 3, 3), torch.randn(6))
