"""Gradients of gamma and Dirichlet samples, in every branch of ATen's approximations."""

from __future__ import annotations

import pytest
import torch

from support.comparisons.compare import assert_equal
from support.comparisons.single_op import check_op, run_op

aten = torch.ops.aten
SIZES = torch.tensor([1e-3, 0.05, 0.3, 0.79, 0.8, 1.0, 2.5, 6.0, 7.9, 8.1, 20.0, 300.0], dtype=torch.float64)


@pytest.mark.optimized
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_standard_gamma(dtype: torch.dtype) -> None:
    alpha = SIZES.to(dtype)[:, None]
    near = torch.tensor([0.91, 0.99, 1.0, 1.05, 1.2], dtype=dtype) * alpha
    pairs = [operand.contiguous() for operand in torch.broadcast_tensors(alpha, SIZES.to(dtype))]
    check_op(aten._standard_gamma_grad.default, *pairs, tolerance=(2e-4, 1e-6) if dtype == torch.float32 else None)
    check_op(aten._standard_gamma_grad.default, alpha.expand_as(near).contiguous(), near)
    check_op(aten._standard_gamma_grad.default, torch.tensor(2.0), torch.tensor(float("nan")))


@pytest.mark.optimized
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_dirichlet(dtype: torch.dtype) -> None:
    x = torch.tensor([0.001, 0.2, 0.45, 0.5, 0.55, 0.8, 0.999], dtype=dtype)[:, None, None]
    alpha, beta = SIZES.to(dtype)[None, :, None], SIZES.to(dtype)[None, None]
    arguments = [value.contiguous() for value in torch.broadcast_tensors(x, alpha, alpha + beta)]
    # In float32, the error of ATen's series is up to 5%.
    expected = aten._dirichlet_grad(*(argument.double() for argument in arguments)).to(dtype)
    assert_equal(run_op(aten._dirichlet_grad.default, *arguments), expected)
