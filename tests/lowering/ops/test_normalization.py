"""Normalizations, forward and backward."""

from __future__ import annotations

import pytest
import torch
from compare import check
from gradients import check_gradients
from torch.nn import functional as F

SUMS = {torch.float16: (1e-2, 2e-2), torch.bfloat16: (5e-2, 0.15), torch.float32: (1e-4, 1e-4)}
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def statistics(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(4, dtype=dtype), torch.rand(4, dtype=dtype) + 0.5]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_batch_norm(training: bool, dtype: torch.dtype) -> None:
    def function(x, w, b, mean, var):
        return F.batch_norm(x, mean, var, w, b, training, 0.2, 1e-3)

    parameters = [torch.randn(4, dtype=dtype), torch.randn(4, dtype=dtype)]
    check_gradients(function, torch.randn(3, 4, 5, 6).to(dtype), *parameters, constants=statistics(dtype), tolerance=SUMS.get(dtype))


@pytest.mark.parametrize("shape", [(8, 4), (3, 4, 5), (2, 4, 3, 2, 3)], ids=str)
def test_batch_norm_ranks(shape: tuple[int, ...]) -> None:
    def function(x, mean, var):
        return (
            F.batch_norm(x, mean, var),
            F.batch_norm(x, mean, var, training=True),
            F.batch_norm(x, None, None, training=True),
            F.instance_norm(x) if x.dim() > 2 else x,
        )

    check_gradients(function, torch.randn(shape), constants=statistics(), tolerance=SUMS[torch.float32])


def test_half_input_with_float_parameters() -> None:
    def function(x, w, b, mean, var):
        return F.batch_norm(x, mean, var, w, b, True), F.batch_norm(x, mean, var, w, b, False), F.layer_norm(x, (6,), w.new_ones(6).to(x))

    x = torch.randn(3, 4, 5, 6).bfloat16()
    check_gradients(function, x, torch.randn(4), torch.randn(4), constants=statistics(), tolerance=SUMS[torch.bfloat16])


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_channels_last(training: bool) -> None:
    def function(x, w, b, mean, var):
        return F.batch_norm(x, mean, var, w, b, training).relu(), F.group_norm(x, 2, w, b), F.layer_norm(x, (5, 6))

    x = torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last)
    check_gradients(function, x, torch.randn(4), torch.randn(4), constants=statistics(), tolerance=SUMS[torch.float32])


def test_module_without_gradients() -> None:
    module = torch.nn.BatchNorm2d(4).eval()
    with torch.no_grad():
        check(module.forward, torch.randn(3, 4, 5, 6))


def test_saved_statistics() -> None:
    aten = torch.ops.aten

    def function(x, w, b, mean, var):
        return (
            aten._native_batch_norm_legit_no_training(x, w, b, mean, var, 0.1, 1e-5),
            aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5),
            aten._native_batch_norm_legit_functional(x, w, b, mean, var, True, 0.1, 1e-5),
            aten._native_batch_norm_legit_functional(x, w, b, mean, var, False, 0.1, 1e-5),
            aten.native_layer_norm(x, (5, 6), None, None, 1e-5),
            aten.native_group_norm(x, w, b, 3, 4, 30, 2, 1e-5),
        )

    args = [torch.randn(4), torch.randn(4), *statistics()]
    check(function, torch.randn(3, 4, 5, 6), *args, tolerance=SUMS[torch.float32])


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


def test_rms_norm_op() -> None:
    def function(x, w):
        return torch.ops.aten._fused_rms_norm(x, [6], w, None), torch.ops.aten._fused_rms_norm(x, [4, 6], None, 1e-3)

    check(function, torch.randn(3, 4, 6), torch.randn(6))


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


@pytest.mark.parametrize("shape", [(1, 4, 1, 1), (4, 1, 1), (1, 4), (2, 2)], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_batch_norm_reads_as_many_weights_as_there_are_channels(shape: tuple[int, ...], training: bool) -> None:
    """In whatever shape: eager mode's forward kernels do. (Such weights in the backward pass, and running statistics, eager refuses, and
    torch's own tracing before us.)"""

    def function(x, w, b, mean, var):
        return F.batch_norm(x, mean, var, w, b, training), F.batch_norm(x, None, None, w, None, True), F.batch_norm(x, mean, var, None, b)

    x = torch.randn(2, 4, 3, 3)
    for given in (x, x.to(memory_format=torch.channels_last)):
        check(function, given, torch.randn(shape), torch.randn(shape), *statistics())
