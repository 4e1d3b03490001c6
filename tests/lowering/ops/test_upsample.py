"""Resampling of images, as single ops and in functions."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from support.comparisons.compare import check
from support.comparisons.gradients import check_gradients
from support.comparisons.single_op import check_op
from support.releases import is_here

aten = torch.ops.aten
SUMS = (1e-4, 2e-5)


METHODS = {
    "nearest": {"mode": "nearest"},
    "exact": {"mode": "nearest-exact"},
    "bilinear": {"mode": "bilinear"},
    "bilinear, corners": {"mode": "bilinear", "align_corners": True},
    "bicubic": {"mode": "bicubic"},
    "bicubic, corners": {"mode": "bicubic", "align_corners": True},
    "bilinear, antialiased": {"mode": "bilinear", "antialias": True},
    "bicubic, antialiased": {"mode": "bicubic", "antialias": True},
    "area": {"mode": "area"},
}


@pytest.mark.sample(usual=3)
@pytest.mark.parametrize("method", METHODS)
def test_interpolate(method: str) -> None:
    settings = METHODS[method]

    def function(x):
        results = [F.interpolate(x, size=(11, 5), **settings)]
        if "cubic" not in method:
            results.append(F.interpolate(x, scale_factor=2, **settings))
        if settings["mode"] in ("nearest", "bilinear"):
            results.append(F.interpolate(x, scale_factor=(0.6, 1.7), **settings))
            results.append(F.interpolate(x, scale_factor=(0.6, 1.7), recompute_scale_factor=True, **settings))
        return results

    check_gradients(function, torch.randn(2, 3, 7, 9), tolerance=SUMS)


def test_scales_that_keep_or_double_a_size() -> None:
    """ATen's two-dimensional kernels then ignore the scale. 1.2 * 4 and 2.2 * 4 round down to 4 and 8."""

    def function(x):
        return [
            F.interpolate(x, scale_factor=scale, mode=mode, antialias=mode != "nearest")
            for mode in ("nearest", "bilinear", "bicubic")
            for scale in ((1.2, 1.2), (2.2, 1.7), (0.6, 1.2))
        ]

    x = torch.randn(2, 3, 4, 4)
    check(function, x, tolerance=SUMS)
    check(lambda x: F.interpolate(x, scale_factor=(1.2, 2.2)), x.to(torch.uint8))
    check(lambda x: F.interpolate(x, scale_factor=1.2), x[0])


def test_one_and_three_dimensions() -> None:
    def function(x, volume):
        return (
            F.interpolate(x, scale_factor=1.7),
            F.interpolate(x, scale_factor=1.7, mode="linear"),
            F.interpolate(x, size=4, mode="nearest-exact"),
            F.interpolate(volume, size=(2, 7, 8)),
            F.interpolate(volume, size=(2, 7, 8), mode="trilinear", align_corners=True),
        )

    check_gradients(function, torch.randn(2, 3, 7), torch.randn(1, 2, 4, 5, 3), tolerance=SUMS)


def test_channels_last() -> None:
    def function(x):
        return [F.interpolate(x, scale_factor=2, mode=mode) for mode in ("nearest", "bilinear")]

    check(function, torch.randn(2, 4, 5, 6).to(memory_format=torch.channels_last), tolerance=SUMS)


TWO_DIMENSIONAL = {
    "upsample_nearest2d": [()],
    "_upsample_nearest_exact2d": [()],
    "upsample_bilinear2d": [(False,), (True,)],
    "upsample_bicubic2d": [(False,), (True,)],
    "_upsample_bilinear2d_aa": [(False,), (True,)],
    "_upsample_bicubic2d_aa": [(False,), (True,)],
    **({"_upsample_lanczos2d_aa": [(False,)]} if is_here("aten._upsample_lanczos2d_aa.default") else {}),
}


SIZES = [
    ((7, 9), (14, 18), ()),
    ((7, 9), (3, 25), ()),
    ((7, 9), (7, 9), ()),
    ((40, 33), (13, 100), ()),
    ((7, 9), (4, 15), (0.6, 1.7)),
    ((1, 4), (3, 1), ()),
]


@pytest.mark.sample(usual=7)
@pytest.mark.parametrize("name", TWO_DIMENSIONAL)
@pytest.mark.parametrize(("space", "out", "scales"), SIZES, ids=str)
def test_ops(name: str, space: tuple[int, int], out: tuple[int, int], scales: tuple[float, ...]) -> None:
    for align in TWO_DIMENSIONAL[name]:
        check_op(getattr(aten, name).default, torch.randn(2, 3, *space), out, *align, *scales, tolerance=SUMS)
        grad = torch.randn(2, 3, *out)
        check_op(getattr(aten, f"{name}_backward").default, grad, out, (2, 3, *space), *align, *scales, tolerance=SUMS)
