"""ATen's convolution ops for particular backends."""

from __future__ import annotations

import pytest
import torch

from dynaxla.errors import UnsupportedOp
from support.comparisons.compare import assert_equal
from support.comparisons.single_op import check_op, run_op

aten = torch.ops.aten


def test_convolutions_in_half_types() -> None:
    """The other kernels add in bfloat16."""
    x, weight, bias = torch.randn(2, 3, 6, 5).bfloat16(), torch.randn(4, 3, 2, 3).bfloat16(), torch.randn(4).bfloat16()
    check_op(aten._convolution.default, x, weight, bias, [2, 1], [1, 0], [1, 1], False, [0, 0], 1, False, False, True, True)


@pytest.mark.parametrize("dims", [2, 3])
def test_depthwise(dims: int) -> None:
    """_conv_depthwise2d and conv_depthwise3d have kernels for GPUs alone."""
    x, weight, bias = torch.randn(2, 3, *(6, 5, 4)[:dims]), torch.randn(6, 1, *(2, 3, 2)[:dims]), torch.randn(6)
    settings = [1, 2, 1][:dims], [1, 0, 1][:dims], [2, 1, 1][:dims]
    expected = aten.convolution(x, weight, bias, *settings, False, [0], 3)
    op = {2: aten._conv_depthwise2d.default, 3: aten.conv_depthwise3d.default}[dims]
    assert_equal(run_op(op, x, weight, list(weight.shape[2:]), bias, *settings, expected=expected), expected)


def test_input_without_a_batch_raises() -> None:
    with pytest.raises(UnsupportedOp, match="batch dimension"):
        check_op(aten.slow_conv_dilated2d.default, torch.randn(3, 4, 5), torch.randn(4, 3, 2, 2), [2, 2], None)


def test_time_batch_channels() -> None:
    check_op(aten.conv_tbc.default, torch.randn(0, 2, 3), torch.randn(1, 3, 4), torch.randn(4), 2)
