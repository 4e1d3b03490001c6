"""Reductions over segments given by lengths or offsets, and their gradients: gaps, empty segments, ties, zeros and nan."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from support.comparisons.compare import check
from support.comparisons.gradients import check_gradients

REDUCTIONS = ["sum", "mean", "prod", "max", "min"]


def reduced(x: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    return [torch.segment_reduce(x, reduce, **options) for reduce in REDUCTIONS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lengths_and_offsets(dtype: torch.dtype) -> None:
    lengths = torch.tensor([3, 0, 2, 1])
    rows = torch.tensor([[2, 4, 0], [1, 0, 5]])
    check_gradients(
        lambda x, y, lengths, rows: (
            reduced(x, lengths=lengths),
            reduced(x, lengths=lengths, initial=2),
            reduced(x, offsets=torch.tensor([1, 1, 4, 5], dtype=torch.int32)),
            reduced(y, lengths=rows, axis=1),
            reduced(y, lengths=rows, axis=1, unsafe=True, initial=0.5),
        ),
        torch.randn(4, 6, dtype=dtype).mT,
        torch.randn(2, 6, 3, dtype=dtype),
        constants=[lengths, rows],
    )


@pytest.mark.optimized
def test_ties_zeros_and_nan() -> None:
    x = torch.tensor([2.0, 2.0, 1.0, 0.0, 0.0, 3.0, math.nan, 1.0, 0.0, 4.0, 5.0, math.nan, math.nan])
    for cotangent in (1.5, -1.5):
        # For min and max, eager mode leaves undefined which numbers next to a nan get a gradient.
        check_gradients(
            lambda x, lengths, cotangent=cotangent: [out * cotangent for out in reduced(x, lengths=lengths)],
            x,
            constants=[torch.tensor([3, 2, 3, 3, 2])],
        )


def test_half_types_and_empty_operands() -> None:
    check(
        lambda x, n: (reduced(x, lengths=n), reduced(x[:0], lengths=n[2:], initial=3), reduced(x[:0, None], lengths=n[2:])),
        torch.randn(6).bfloat16(),
        torch.tensor([4, 2, 0]),
        calls=1,
    )


@pytest.mark.parametrize("lengths", [[3, 1], [7, -1], [9, 1]])
def test_invalid_lengths_raise(lengths: list[int]) -> None:
    compiled = torch.compile(lambda x, n: torch.segment_reduce(x, "sum", lengths=n), backend="dynaxla", fullgraph=True)
    x, n = torch.ones(6), torch.tensor(lengths)
    for function in (compiled, lambda x, n: torch.segment_reduce(x, "sum", lengths=n)):
        with pytest.raises(RuntimeError, match="lengths"):
            function(x, n)
