"""Convolutions by the names of their kernels."""

from __future__ import annotations

import pytest
import torch
from gradients import check_gradients
from single_op import check_op

from dynaxla.errors import UnsupportedOp

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_convolutions(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(2, 3, 6, 5).to(dtype), torch.randn(4, 3, 2, 3).to(dtype), torch.randn(4).to(dtype)
    settings = [False, False, True, True]
    check_op(aten._convolution.default, x, weight, bias, [2, 1], [1, 0], [1, 1], False, [0, 0], 1, *settings)
    if dtype == torch.bfloat16:  # the other kernels add in bfloat16
        return
    check_op(aten._slow_conv2d_forward.default, x, weight, [2, 3], bias, [1, 2], [1, 1])
    check_op(aten.slow_conv_dilated2d.default, x, weight, [2, 3], bias, [1, 2], [1, 1], [2, 1])
    check_op(aten.slow_conv_transpose2d.default, x, torch.randn(3, 4, 2, 3).to(dtype), [2, 3], bias, [2, 2], [1, 0], [1, 0], [1, 1])


def test_more_dimensions_and_gradients() -> None:
    x, weight = torch.randn(2, 3, 4, 5, 4), torch.randn(4, 3, 2, 3, 2)
    check_op(aten.slow_conv3d_forward.default, x, weight, [2, 3, 2], None, [1, 1, 2], [0, 1, 0])
    check_op(aten.slow_conv_dilated3d.default, x, weight, [2, 3, 2], None)
    check_op(aten.slow_conv_transpose3d.default, x, weight.transpose(0, 1).contiguous(), [2, 3, 2], None)
    flat, kernel = torch.randn(2, 3, 4, 5), torch.randn(4, 3, 2, 2)
    grad = torch.randn(2, 4, 3, 4)
    check_op(aten._slow_conv2d_backward.output_mask, grad, flat, kernel, [2, 2], [1, 1], [0, 0], [True, True, True])
    with pytest.raises(UnsupportedOp, match="batch dimension"):
        check_op(aten.slow_conv_dilated2d.default, flat[0], kernel, [2, 2], None)


def test_time_batch_channels() -> None:
    check_gradients(lambda x, w, b: torch.conv_tbc(x, w, b, 1), torch.randn(6, 2, 3), torch.randn(3, 3, 4), torch.randn(4))
    check_op(aten.conv_tbc.default, torch.randn(0, 2, 3), torch.randn(1, 3, 4), torch.randn(4), 2)
