"""Sorting, selection by rank, and search.

Eager mode leaves the indices of equal elements undefined except for stable sorts, so other ops are tested with distinct elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.comparisons.compare import check
from support.comparisons.gradients import check_gradients
from support.releases import IS_OLDEST

nan, inf = float("nan"), float("inf")

SPECIAL = torch.tensor(
    [
        [1.0, nan, -inf, 3.0, 0.5],
        [nan, 2.0, nan, 1.0, nan],
        [nan, nan, nan, nan, nan],
        [inf, 5.0, -1.0, -inf, 4.0],
        [9.0, 8.0, 7.0, 6.0, 5.0],
    ]
)


def distinct(*shape: int) -> torch.Tensor:
    return torch.randperm(torch.Size(shape).numel()).reshape(shape)


RANKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sort": lambda x: (x.sort(), x.sort(dim=0, descending=True), x.sort(dim=1, stable=True), x.argsort(1), x[0, 0, 0].sort(), x.msort()),
    "topk": lambda x: (x.topk(2), x.topk(3, 0), x.topk(1, 1, largest=False), x.topk(3, -2), x.topk(0), x[0, 0, 0].topk(1)),
    "kthvalue": lambda x: (x.kthvalue(2), x.kthvalue(3, 0, keepdim=True), x[0, 0, 0].kthvalue(1)),
    "median": lambda x: (x.median(), x.median(1), x.median(0, keepdim=True), x[0, 0, 0].median(0), x.nanmedian(), x.nanmedian(-1)),
    "mode": lambda x: (x.mode(), x.mode(1, keepdim=True), x[0, 0, 0].mode(0)),
}


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("case", RANKS)
def test_gradients(case: str) -> None:
    check_gradients(RANKS[case], distinct(4, 5, 3).mT / 7)


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    check(lambda x: [case(x) for case in RANKS.values()], distinct(4, 5, 3).to(dtype), calls=1)


def test_bools() -> None:
    check(
        lambda x: (x.sort(dim=1, stable=True), x.sort(dim=0, descending=True, stable=True), x.argsort(dim=1, stable=True)),
        torch.rand(5, 6) > 0.5,
        calls=1,
    )


def test_stable() -> None:
    x = torch.randint(0, 3, (50,)).float()
    x[x == 0] *= torch.randint(0, 2, (int((x == 0).sum()),)) * 2.0 - 1  # zeros of both signs are equal
    check(
        lambda x: (x.sort(stable=True)[1], x.sort(descending=True, stable=True)[1], x.int().argsort(stable=True, descending=True)),
        x,
        calls=1,
    )


@pytest.mark.optimized
def test_nan_is_the_largest() -> None:
    check(
        lambda x: (
            (
                x.sort(dim=1, stable=True),
                x.sort(dim=1, descending=True, stable=True),
                x.topk(5)[0],
                x.topk(4, largest=False)[0],
                (-x).topk(5)[0],
            ),
            (x.kthvalue(2)[0], x.median(1)[0], x.nanmedian(1)[0], x.median(), x.nanmedian(), x.median(1)[1][:2]),
            () if IS_OLDEST else x.quantile(0.3, 1),  # torch 2.11 inspects whether all values are nan, so TorchDynamo cannot trace it
        ),
        SPECIAL,
        calls=1,
    )


def test_mode() -> None:
    x = torch.tensor([[3, 1, 3, 1, 2, 2], [5, 5, 0, 0, 5, 0], [7, 7, 7, 7, 7, 7], [1, 2, 3, 4, 5, 5]])
    check(lambda x: (x.mode(), x.mode(0), x.float().mode(1), x[:, :1].mode(1)), x)


def test_empty_operands() -> None:
    check(
        lambda x: (x.sort(), x.sort(0), x.topk(2), x.topk(0, 0), x.median(1), x.median(), x.mode(1), x.kthvalue(1, 1)),
        torch.zeros(0, 3),
        calls=1,
    )


@pytest.mark.parametrize("length", [1, 7, 33, 100])
def test_search(length: int) -> None:
    """A short sequence is compared with each value; a long one is searched by bisection."""
    steps = torch.randint(-9, 9, (length,)).sort()[0]
    rows = torch.randint(-9, 9, (3, length)).float().sort()[0]
    values = torch.randint(-10, 10, (3, 5)).float()
    values[0, :3] = torch.tensor([nan, inf, -inf])
    check(
        lambda s, r, w: (
            torch.searchsorted(s.float(), w),
            torch.searchsorted(r, w, right=True, out_int32=True),
            torch.searchsorted(r, w, side="left"),
            torch.searchsorted(s, 2),
            torch.bucketize(w, s.float()),
            torch.bucketize(w.nan_to_num(), s.float(), right=True),
            torch.bucketize(1.5, s.float()),
            torch.searchsorted(s.flip(0), s[:1], sorter=s.flip(0).argsort(stable=True)),
            torch.searchsorted(s[:0], s),
        ),
        steps,
        rows,
        values,
        calls=1,
    )


def test_search_in_a_sequence_with_nan() -> None:
    """A NaN is the last element of a sorted sequence."""
    sequence, values = torch.tensor([1.0, 2.0, 3.0, torch.nan]), torch.tensor([0.0, 1.0, 2.5, 4.0, torch.nan])
    check(lambda x, y: (torch.searchsorted(x, y), torch.searchsorted(x, y, right=True)), sequence, values, calls=1)
