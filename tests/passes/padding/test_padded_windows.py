"""Tests of convolutions, pooling, resizing and strided views with rounded sizes. The padding contains NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from support.comparisons.compare import assert_equal
from support.comparisons.rounded_sizes import SIZES, assert_one_program, compiled, counts, features, poisoned
from support.releases import fails_in_oldest

pytestmark = pytest.mark.usefixtures("quick_xla")


def kernel(t: torch.Tensor) -> torch.Tensor:
    return t[:6].reshape(2, 4, 3)


def image(y: torch.Tensor) -> torch.Tensor:
    return y[:, None, :, None] * y[:, None, None, :]


WINDOWS: list[Callable[..., Any]] = [
    lambda x, y, n, t: F.conv1d(x.transpose(1, 2), kernel(t), t[0, :2], padding=1),
    lambda x, y, n, t: F.conv1d(x.transpose(1, 2), kernel(t), stride=2, padding=2, dilation=2).cumsum(2),
    lambda x, y, n, t: F.conv1d(F.pad(x.transpose(1, 2), (2, 0)), kernel(t)),
    lambda x, y, n, t: F.conv_transpose1d(x.transpose(1, 2), kernel(t).transpose(0, 1), stride=2, padding=1).sum(2),
    lambda x, y, n, t: F.conv2d(y[:, None, :, None] + y[:, None, None, :], t[:4, :2].reshape(2, 1, 2, 2)).sum((2, 3)),
    lambda x, y, n, t: F.max_pool2d(y[:, None, :, None] - 9, (3, 1), (2, 1), (1, 0)).cumsum(2),
    lambda x, y, n, t: F.max_pool1d(y[:, None], 2, return_indices=True)[1],
    lambda x, y, n, t: F.max_pool2d(y[:, None, :, None] * y[:, None, None, :], 3, 2, 1, return_indices=True)[1],
    lambda x, y, n, t: F.pad(y, (-2, 1), value=3.0).cumsum(1) + F.pad(y, (2, -3)).cumsum(1),
    lambda x, y, n, t: F.pad(x, (0, 0, -1, -2, -1, 2)).sum((0, 1)),
    lambda x, y, n, t: F.avg_pool1d(y[:, None], 3, 2, 1),
    lambda x, y, n, t: F.avg_pool1d(y[:, None], 2, count_include_pad=False).sum(2),
    lambda x, y, n, t: F.avg_pool2d(x[:, None], 2, divisor_override=3),
    lambda x, y, n, t: F.max_pool2d((x + torch.zeros(4))[:, None], (2, 2)).sum(2),
    lambda x, y, n, t: F.adaptive_avg_pool1d(y[:, None], 1),
    lambda x, y, n, t: F.interpolate(y[:, None], scale_factor=2).cumsum(2),
    lambda x, y, n, t: y.unfold(1, 3, 2).sum(1),
    lambda x, y, n, t: F.pad(y, (2, 3), mode="reflect").cumsum(1),
    lambda x, y, n, t: F.pad(x, (1, 2, 3, -1), mode="reflect").cumsum(1),
    lambda x, y, n, t: F.pad(y, (-1, 3), mode="replicate").cumsum(1),
    lambda x, y, n, t: F.pad(x[:, None], (1, 1, 2, 0), mode="replicate").sum(2),
]

# Resized images.
RESIZED: list[Callable[..., Any]] = [
    lambda x, y, n, t: F.interpolate(image(y), size=(7, 5), mode="bilinear"),
    lambda x, y, n, t: F.interpolate(image(y), size=(7, 5), mode="bilinear", align_corners=True),
    lambda x, y, n, t: F.interpolate(image(y), size=(4, 9), mode="bicubic"),
    lambda x, y, n, t: F.interpolate(y[:, None], size=6).cumsum(2),
    lambda x, y, n, t: F.interpolate(y[:, None], scale_factor=2, mode="linear").cumsum(2),
    lambda x, y, n, t: F.interpolate(y[:, None], size=x.shape[0] + 3, mode="linear").cumsum(2),
]

# Strided views.
STRIDED: list[Callable[..., Any]] = [
    lambda x, y, n, t: (y + 1).as_strided((y.shape[0], (y.shape[1] - 4) // 2 + 1, 4), (y.shape[1], 2, 1)).sum(1),
    lambda x, y, n, t: (y + 1).as_strided((y.shape[0], 3, y.shape[1]), (y.shape[1], 0, 1)).sum((0, 2)),
    lambda x, y, n, t: (y + 1).as_strided((y.shape[1], 1, y.shape[0]), (1, 7, y.shape[1])).cumsum(0),
    lambda x, y, n, t: torch.view_as_real(torch.stft(y, 8, 2, window=torch.hann_window(8), return_complex=True)).sum(2),
]


@pytest.mark.quick
@fails_in_oldest("with strided windows, its graphs are either for even or for odd sizes")
def test_windows_ignore_padding() -> None:
    assert_one_program(WINDOWS, features)


@fails_in_oldest("with strided windows, its graphs are either for even or for odd sizes")
def test_gradients_of_windows() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        hidden = F.conv1d(x.transpose(1, 2), kernel(t), t[0, :2], padding=1, stride=2)
        pooled = [F.max_pool2d(hidden[..., None], (3, 1), (2, 1), (1, 0)), F.avg_pool1d(hidden, 2), hidden * y[:, None, ::2]]
        pooled.append(F.interpolate(hidden, scale_factor=2))
        return sum(item.exp().sum() for item in pooled)

    run, before = compiled(function), counts()
    with poisoned():
        for sizes in SIZES[:2]:
            x, y, _, t = features(*sizes)
            for found, expected in zip(*(_gradients(each, x, y, t) for each in (run, function)), strict=True):
                assert_equal(found, expected)
    assert counts() == (before[0] + 2, before[1])


def _gradients(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = [item.double().requires_grad_() for item in inputs]
    return torch.autograd.grad(function(*leaves), leaves)


def test_gradients_of_windows_that_are_cut_or_overlap() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        images = y[:, None, :, None] * y[:, None, None, :]
        causal = F.conv1d(F.pad(x.transpose(1, 2), (4, 0)), kernel(t), dilation=2)
        chomped = F.conv1d(x.transpose(1, 2), kernel(t), padding=2)[:, :, :-2]
        overlapping = y.unfold(1, 4, 2) * t[0]
        apart = y.unfold(1, 2, 3).exp()
        return sum(item.exp().sum() for item in (F.max_pool2d(images, 3, 2, 1), causal, chomped, overlapping, apart))

    run, before = compiled(function), counts()
    with poisoned():
        for sizes in SIZES[:2]:
            x, y, _, t = features(*sizes)
            for found, expected in zip(*(_gradients(each, x, y, t) for each in (run, function)), strict=True):
                assert_equal(found, expected)
    assert counts() == (before[0] + 2, before[1])


def test_resizing_uses_true_sizes() -> None:
    assert_one_program(RESIZED, features)


def test_strided_views_use_true_sizes() -> None:
    assert_one_program(STRIDED, features)


def test_gradients_of_resizing_and_padding() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        found = [
            F.interpolate(image(y), size=(7, 5), mode="bilinear"),
            F.interpolate(y[:, None], size=6, mode="linear", align_corners=True),
        ]
        found += [F.pad(x, (1, 2, 3, -1), mode="reflect") * t[0, 0], F.pad(y, (-1, 3), mode="replicate")]
        return sum(item.exp().sum() for item in found)

    run, before = compiled(function), counts()
    with poisoned():
        for sizes in SIZES[:2]:
            x, y, _, t = features(*sizes)
            for found, expected in zip(*(_gradients(each, x, y, t) for each in (run, function)), strict=True):
                assert_equal(found, expected)
    assert counts() == (before[0] + 2, before[1])


# Arguments that change between calls. The padding rules need constants, so these programs have exact sizes.
CHANGING_ARGUMENTS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "reflect": lambda x, w: F.pad(x, (w, 1), mode="reflect"),
    "reflect, both": lambda x, w: F.pad(x, (w, w), mode="reflect"),
    "reflect, at the end": lambda x, w: F.pad(x, (0, w), mode="reflect"),
    "reflect, wider and narrower": lambda x, w: F.pad(x, (w, 1 - w), mode="reflect"),
    "reflect, images": lambda x, w: F.pad(x[:, :, None] * x[..., None], (w, 2, 1, w), mode="reflect"),
    "reflect, another dimension": lambda x, w: F.pad(x[..., None].expand(2, 3, -1, 5), (w, w, 1, 2), mode="reflect"),
    "replicate": lambda x, w: F.pad(x, (1, w), mode="replicate"),
    "replicate, cut at the end": lambda x, w: F.pad(x, (w, -1), mode="replicate"),
    "replicate, volumes": lambda x, w: F.pad(
        (x[:, :, None] * x[..., None])[..., None].expand(-1, -1, -1, -1, 4), (w, 1, 1, w, 0, 1), mode="replicate"
    ),
    "variance": lambda x, w: x.var(-1, correction=w - 2),
    "norm": lambda x, w: torch.linalg.vector_norm(x, w, -1),
}


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("name", CHANGING_ARGUMENTS)
def test_changing_arguments(name: str) -> None:
    run, before = compiled(CHANGING_ARGUMENTS[name]), counts()
    for size, width in ((7, 2), (11, 3), (9, 2)):
        found, expected = (torch.linspace(0.5, 2.5, 6 * size).view(2, 3, size).requires_grad_() for _ in range(2))
        for function, x in ((run, found), (CHANGING_ARGUMENTS[name], expected)):
            result = function(x, width)
            (result * torch.linspace(1, 2, result.numel()).view(result.shape)).sum().backward()
        torch.testing.assert_close(run(found, width), CHANGING_ARGUMENTS[name](expected, width))
        torch.testing.assert_close(found.grad, expected.grad)
    assert counts() == (before[0] + 6, before[1]), "each of the three sizes has a forward and a backward program"


@pytest.mark.parametrize("function", [lambda x: F.max_pool2d(x, 3, 1, 1), lambda x: F.avg_pool2d(x, 3, 1, 1)], ids=["max", "mean"])
def test_pooling_of_one_image(function: Callable[..., torch.Tensor]) -> None:
    """An image without a batch dimension, of changing height and width."""
    call = torch.compile(function, backend="dynaxla", dynamic=True, options={"sizes": "buckets", "compile": "now"})
    for height, width in ((5, 8), (6, 9), (9, 11)):
        x = -torch.ones(2, height, width)
        assert_equal(call(x), function(x))
