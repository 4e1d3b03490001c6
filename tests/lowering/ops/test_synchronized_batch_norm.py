"""Ops of SyncBatchNorm, which have kernels for GPUs alone: two halves of a batch give the result of the whole batch."""

from __future__ import annotations

import pytest
import torch

from support.comparisons.compare import assert_equal
from support.comparisons.single_op import check_op, run_op

aten = torch.ops.aten
EPS = 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_two_halves_make_one_batch(dtype: torch.dtype) -> None:
    x, grad = (torch.randn(5, 3, 4, dtype=dtype) for _ in range(2))
    weight, bias = torch.rand(2, 3, dtype=dtype)
    out, mean, invstd = aten.native_batch_norm(x, weight, bias, None, None, True, 0.1, EPS)
    halves, counts = (x[:2], x[2:]), torch.tensor([8, 12], dtype=dtype)
    statistics = [run_op(aten.batch_norm_stats.default, half, EPS, expected=(mean, invstd)) for half in halves]
    means, invstds = (torch.stack(parts) for parts in zip(*statistics, strict=True))
    op = aten.batch_norm_gather_stats_with_counts.default
    combined = run_op(op, x, means, invstds, None, None, 0.1, EPS, counts, expected=(mean, invstd))
    assert_equal(combined, (mean, invstd))
    combined_evenly = run_op(
        aten.batch_norm_gather_stats.default, x, means[:1], invstds[:1], None, None, 0.1, EPS, 8, expected=(mean, invstd)
    )
    assert_equal(combined_evenly, statistics[0])
    assert_equal(run_op(aten.batch_norm_elemt.default, x, weight, bias, mean, invstd, EPS, expected=out), out)

    grad_x, grad_weight, grad_bias = aten.native_batch_norm_backward(
        grad, x, weight, None, None, mean, invstd, True, EPS, [True, True, True]
    )
    centered = (grad * (x - mean[:, None])).sum((0, 2))
    expected = (grad.sum((0, 2)), centered, grad_weight, grad_bias)
    arguments = grad, x, mean, invstd, weight
    reduced = run_op(aten.batch_norm_backward_reduce.default, *arguments, True, True, True, expected=expected)
    assert_equal(reduced, expected)
    int_counts = counts.to(torch.int32)
    result = run_op(aten.batch_norm_backward_elemt.default, *arguments, reduced[0], reduced[1], int_counts, expected=grad_x)
    assert_equal(result, grad_x)


def test_statistics_for_an_update() -> None:
    check_op(aten.batch_norm_update_stats.default, torch.randn(5, 3, 4), None, None, 0.1)
