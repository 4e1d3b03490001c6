"""Conversions between jagged and padded tensors."""

from __future__ import annotations

import pytest
import torch

from support.comparisons.single_op import check_op, run_op

aten = torch.ops.aten
OFFSETS = torch.tensor([0, 3, 3, 7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_to_padded(dtype: torch.dtype) -> None:
    values = torch.randn(7, 2).to(dtype)
    check_op(aten._jagged_to_padded_dense_forward.default, values, [OFFSETS], [4], 9.0)
    check_op(aten._jagged_to_padded_dense_forward.default, values[:, 0], [OFFSETS], [3])
    check_op(aten._jagged_to_padded_dense_forward.default, values[:0], [torch.tensor([0, 0])], [3], 1.5)


def test_from_padded() -> None:
    dense = torch.randn(3, 5, 2)
    check_op(aten._padded_dense_to_jagged_forward.default, dense, [OFFSETS], 7)
    check_op(aten._padded_dense_to_jagged_forward.default, dense.bfloat16()[:, :4], [OFFSETS], 7)
    with pytest.raises(RuntimeError, match="longer than the padded input"):
        run_op(aten._padded_dense_to_jagged_forward.default, dense[:, :3], [OFFSETS], 7)
