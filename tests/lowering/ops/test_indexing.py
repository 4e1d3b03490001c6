"""Reads by index, and ops that return indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from support.comparisons.compare import check
from support.comparisons.gradients import check_gradients

aten = torch.ops.aten

ROW, ROWS = torch.tensor([2, 0, -1]), torch.tensor([[0, 1, 2], [-2, 0, 1]], dtype=torch.int32)


READS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "one index": lambda x, i, j: (x[i], x[:, i], x[..., i], x[j], x[:, j]),
    "several": lambda x, i, j: (x[i, i], x[j, i], x[:, i, j], x[i[:, None], :, i[:2]], x[i, :, j], x[i, 1], x[i, None, :, 0]),
    "mixed with slices": lambda x, i, j: (x[1:, i, ::2], x[i, ..., j[0]], x[None, i, :, None]),
    "select": lambda x, i, j: (x.index_select(1, i % 3), x[0, 0, 0].index_select(0, i[1:2]), x.index_select(-1, i[:0])),
    "gather": lambda x, i, j: (
        x.gather(1, (i % 3)[:, None, None].expand(3, 2, 2)),
        x[0, 0].gather(0, i % 3),
        x.gather(0, j[None].long() % 2),
    ),
    "take": lambda x, i, j: (x.take(i), x.take(j.long()), torch.take_along_dim(x, i[:, None, None] % 3, 0)),
    "triangles": lambda x, i, j: (x.tril(), x.triu(1), x[0].tril(-2), x.triu(100), x.tril(-100)),
}


@pytest.mark.sample(usual=3)
@pytest.mark.parametrize("case", READS)
def test_reads(case: str) -> None:
    check_gradients(READS[case], torch.randn(4, 4, 4), constants=[ROW, ROWS])


def test_reads_of_other_dtypes() -> None:
    for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.complex64):
        x = torch.randn(4, 4, 4).to(dtype)
        check(lambda x, i, j: (x[i, :, j], x.gather(1, (i % 3)[None, :, None]), x.tril(), x.take(i)), x.transpose(0, 2), ROW, ROWS, calls=1)


def test_empty_indices() -> None:
    check(lambda x, i: (x[i], x[:, i], x[:0, i], x.index_select(0, i), x[0].gather(0, i[None])), torch.randn(3, 4), ROW[:0].long(), calls=1)


def test_ops_that_return_indices() -> None:
    check(
        lambda x: (
            torch.tril_indices(3, 4, -1),
            torch.triu_indices(4, 3, dtype=torch.int32),
            F.one_hot(x, 5),
            torch.repeat_interleave(x, x, output_size=6),
            torch.repeat_interleave(x, output_size=6),
        ),
        torch.tensor([1, 3, 2]),
    )
