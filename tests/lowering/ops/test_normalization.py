"""Normalizations and their gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from support.comparisons.compare import assert_equal, check
from support.comparisons.gradients import check_gradients
from support.comparisons.single_op import run_op

SUMS = {torch.float16: (1e-2, 2e-2), torch.bfloat16: (5e-2, 0.15), torch.float32: (1e-4, 1e-4)}
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def statistics(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(4, dtype=dtype), torch.rand(4, dtype=dtype) + 0.5]


def test_half_input_with_float_parameters() -> None:
    def function(x, w, b, mean, var):
        norms = F.batch_norm(x, mean, var, w, b, True), F.batch_norm(x, mean, var, w, b, False)
        return *norms, F.layer_norm(x, (6,), w.new_ones(6).to(x)), F.group_norm(x, 2, w, b)

    x = torch.randn(3, 4, 5, 6).bfloat16()
    check_gradients(function, x, torch.randn(4), torch.randn(4), constants=statistics(), tolerance=SUMS[torch.bfloat16])


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_channels_last(training: bool) -> None:
    def function(x, w, b, mean, var):
        return F.batch_norm(x, mean, var, w, b, training).relu(), F.group_norm(x, 2, w, b), F.layer_norm(x, (5, 6))

    x = torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last)
    check_gradients(function, x, torch.randn(4), torch.randn(4), constants=statistics(), tolerance=SUMS[torch.float32])


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_layer_group_and_rms_norm(dtype: torch.dtype) -> None:
    def function(x, w, b, w2, b2, w3, b3):
        return (
            F.layer_norm(x, (6,), w, b),
            F.layer_norm(x, (5, 6), w2, b2, 1e-3),
            F.layer_norm(x, (6,), w),
            F.layer_norm(x, (6,)),
            F.group_norm(x, 2, w3, b3),
            F.group_norm(x, 4),
            F.rms_norm(x, (6,), w),
            F.rms_norm(x, (5, 6), eps=1e-3),
        )

    shapes = [(3, 4, 5, 6), (6,), (6,), (5, 6), (5, 6), (4,), (4,)]
    check_gradients(function, *[torch.randn(shape, dtype=dtype) for shape in shapes], tolerance=SUMS.get(dtype))


def test_large_mean_keeps_its_variance() -> None:
    def function(x):
        return F.layer_norm(x, (64,)), F.group_norm(x, 2), F.batch_norm(x, None, None, training=True)

    check(function, torch.randn(4, 4, 64) + 1000, tolerance=(1e-2, 1e-2))


def test_empty_and_nan() -> None:
    def function(x, mean, var):
        return F.batch_norm(x, mean, var), F.layer_norm(x, (6,)), F.group_norm(x, 2)

    check(function, torch.randn(0, 4, 6), *statistics())
    x = torch.randn(2, 4, 6)
    x[0, 1, 2], x[1, 2, 3] = float("nan"), float("inf")
    check(function, x, *statistics())


def test_fused_rms_norm_backward() -> None:
    x, weight, grad = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True), torch.randn(3, 4)
    out, rstd = torch.ops.aten._fused_rms_norm(x, [4], weight, 1e-3)
    expected = torch.autograd.grad(out, (x, weight), grad)
    op = torch.ops.aten._fused_rms_norm_backward.default
    grads = run_op(op, grad, x.detach(), [4], rstd.detach(), weight.detach(), [True, True], expected=expected)
    assert_equal(grads, expected)
