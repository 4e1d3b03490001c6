"""Fused kernels, forward-mode derivatives of GLU, and the gradient of weight normalization."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils.parametrizations import weight_norm

from support.comparisons.compare import assert_equal, check
from support.comparisons.gradients import check_gradients
from support.comparisons.single_op import check_op, run_op

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_masked_scale(dtype: torch.dtype) -> None:
    x, mask = torch.randn(3, 4).to(dtype), torch.tensor([0, 1, 1, 0], dtype=torch.uint8).expand(3, 4)
    expected = x * mask * 1.25
    assert_equal(run_op(aten._masked_scale.default, x, mask, 1.25, expected=expected), expected)


def test_masked_softmax() -> None:
    x = torch.randn(2, 2, 3, 3)
    full, rows, padding = torch.rand(x.shape) > 0.6, torch.tensor([[1, 1, 1], [0, 0, 1], [0, 0, 0]]) > 0, torch.rand(2, 3) > 0.5
    check_op(aten._masked_softmax.default, x, full, 3, 2)
    check_op(aten._masked_softmax.default, x.double(), full, 1)
    check_op(aten._masked_softmax.default, x, rows, None, 0)
    check_op(aten._masked_softmax.default, x, padding, 3, 1)
    check_op(aten._masked_softmax.default, x[0, 0], rows)
    output = aten._masked_softmax(x, full, 3, 2)
    check_op(aten._masked_softmax_backward.default, torch.randn_like(x), output, full, 3)
    check_gradients(lambda x, mask: aten._masked_softmax(x, mask, 2), x, constants=[full])


def test_glu_in_forward_mode() -> None:
    check(lambda x, dx: torch.func.jvp(lambda x: torch.nn.functional.glu(x, 0), (x,), (dx,)), torch.randn(4, 3), torch.randn(4, 3))


@pytest.mark.parametrize("dim", [0, 1])
def test_weight_norm(dim: int) -> None:
    layer = weight_norm(torch.nn.Linear(4, 3), dim=dim)
    parameters = dict(layer.named_parameters())

    def function(x, *values):
        return torch.func.functional_call(layer, dict(zip(parameters, values, strict=True)), x)

    check_gradients(function, torch.randn(2, 4), *(value.detach() for value in parameters.values()))
