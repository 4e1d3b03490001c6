"""Ops that return sizes, strides and storage offsets as numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.comparisons.compare import check
from support.comparisons.single_op import run_op

aten = torch.ops.aten

X = torch.zeros(40)[3:].as_strided((4, 3), (2, 9))


@pytest.mark.parametrize(
    ("op", "args", "expected"),
    [
        (aten.sym_size.int, [0], 4),
        (aten.sym_size.int, [-1], 3),
        (aten.sym_numel.default, [], 12),
        (aten.sym_stride.int, [0], 2),
        (aten.sym_stride.int, [-1], 9),
        (aten.sym_storage_offset.default, [], 3),
    ],
)
def test_numbers_of_a_view(op: torch._ops.OpOverload, args: list[int], expected: int) -> None:
    """Equal to eager mode's, although an array has neither strides nor an offset."""
    assert op(X, *args) == expected
    assert run_op(op, X, *args) == expected


def test_dynamic_sizes() -> None:
    def function(x: torch.Tensor) -> Any:
        return x * x.shape[0], x + x.numel() + x.stride(0), torch.full((x.shape[1],), x.shape[0])

    for size in (4, 6):
        check(function, torch.randn(size, 3), dynamic=True)
