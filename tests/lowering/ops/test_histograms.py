"""Histograms: uniform and explicit edges, elements on an edge, out of range and nan, weights, density, several dimensions, and histc."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.comparisons.compare import check

SPECIAL = torch.tensor([0.0, 1.0, 1.5, 2.0, 4.0, 3.999, -0.5, 4.5, math.nan, math.inf, -math.inf, 2.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_histogram(dtype: torch.dtype) -> None:
    edges = torch.tensor([-1.0, 0.0, 0.1, 1.5, 4.0], dtype=dtype)
    x = torch.randn(6, 50).to(dtype).mT
    check(
        lambda special, x, weight, edges: (
            (torch.histogram(special, 4, range=(0.0, 4.0)), torch.histogram(special, edges), torch.histogram(special, 3, range=(2.0, 2.0))),
            (torch.histogram(x, 7), torch.histogram(x, 1), torch.histogram(x, 5, density=True), torch.histogram(x[1, 1], 3)),
            (torch.histogram(x, 6, weight=weight), torch.histogram(x, edges, weight=weight, density=True), torch.histogram(x[:0], 3)),
            (x.histc(9), special.histc(4, 0, 4), x[:0].histc(4), x[0, :1].histc(4)),
        ),
        SPECIAL.to(dtype),
        x,
        torch.rand(50, 6, dtype=dtype),
        edges,
        calls=1,
    )


@pytest.mark.parametrize(("low", "high", "bins"), [(0, 49, 7), (-3, 7, 30), (0, 100, 49), (0.1, 0.7, 6)])
def test_elements_on_the_edges_of_bins(low: float, high: float, bins: int) -> None:
    """A division by the width with other rounding would put some elements into the bin before."""
    edges = torch.linspace(low, high, bins + 1)[1:]
    check(lambda x: x.histc(bins, low, high), torch.cat([edges, torch.nextafter(edges, -edges), torch.nextafter(edges, 2 * edges)]))


def test_several_dimensions() -> None:
    check(
        lambda x, weight, a, b, c: (
            (torch.histogramdd(x, 3), torch.histogramdd(x, [2, 3, 4], range=[0.0, 1.0, -1.0, 1.0, -2.0, 2.0], density=True)),
            torch.histogramdd(x, [a, b, c], weight=weight),
        ),
        torch.randn(4, 10, 3),
        torch.rand(4, 10),
        torch.tensor([-2.0, 0.5, 0.6]),
        torch.tensor([-1.0, 0.0, 1.0, 3.0]),
        torch.tensor([0.0, 2.0]),
        calls=1,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype: torch.dtype) -> None:
    """The bin of an element follows from a division that is rounded to the half type."""
    check(lambda x: (x.histc(50, -2, 2), x.histc(7)), torch.randn(200).to(dtype), calls=1)


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: x.histc(4), torch.tensor([1.0, math.nan])),
        (lambda x: x.histc(4), torch.tensor([1.0, math.inf])),
        (lambda x: torch.histogram(x, 3), torch.tensor([1.0, -math.inf])),
    ],
)
def test_ranges_that_are_not_finite_raise(function: Callable[..., Any], x: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"torch\.hist"):
        function(x)
    with pytest.raises(RuntimeError, match=r"torch\.hist"):
        torch.compile(function, backend="dynaxla", fullgraph=True)(x)
