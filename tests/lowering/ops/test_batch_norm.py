"""Batch norms and their gradients."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from dynaxla.lowering import Interpreter
from dynaxla.lowering.function import Function
from support.comparisons.compare import check
from support.comparisons.gradients import check_gradients

SUMS = {torch.float16: (1e-2, 2e-2), torch.bfloat16: (5e-2, 0.15), torch.float32: (1e-4, 1e-4)}
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def statistics(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(4, dtype=dtype), torch.rand(4, dtype=dtype) + 0.5]


@pytest.mark.sample(usual=4)
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


def test_module_without_gradients() -> None:
    module = torch.nn.BatchNorm2d(4).eval()
    with torch.no_grad():
        check(module.forward, torch.randn(3, 4, 5, 6))


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("shape", [(1, 4, 1, 1), (4, 1, 1), (1, 4), (2, 2)], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_batch_norm_accepts_weights_of_any_shape(shape: tuple[int, ...], training: bool) -> None:
    """Eager mode's forward kernels read one weight per channel, whatever the weights' shape.

    Eager mode refuses such weights in the backward pass, and such running statistics. So does torch's tracing, before a backend.
    """

    def function(x, w, b, mean, var):
        return F.batch_norm(x, mean, var, w, b, training), F.batch_norm(x, None, None, w, None, True), F.batch_norm(x, mean, var, None, b)

    x = torch.randn(2, 4, 3, 3)
    for images in (x, x.to(memory_format=torch.channels_last)):
        check(function, images, torch.randn(shape), torch.randn(shape), *statistics())


def test_mean_is_subtracted_first_on_cuda() -> None:
    """As in eager mode. Numbers far from zero then lose no precision."""
    x, weight, bias = 1000 + torch.rand(3, 4, 5), torch.randn(4), torch.randn(4)
    mean, variance = x.mean((0, 2)), x.var((0, 2))

    def normalize(*tensors: torch.Tensor) -> torch.Tensor:
        x, mean, variance, weight, bias = tensors
        return torch.ops.aten._native_batch_norm_legit_no_training(x, weight, bias, mean, variance, 0.1, 1e-5)[0]

    inputs = (x, mean, variance, weight, bias)
    module = make_fx(lambda *tensors: (normalize(*tensors),), tracing_mode="fake")(*inputs)
    with jax.enable_x64(True):
        (result,) = jax.jit(lambda *arrays: Function(Interpreter(module, "cuda"))(arrays).outputs)(*(tensor.numpy() for tensor in inputs))
    expected = normalize(*(tensor.double() for tensor in inputs))
    torch.testing.assert_close(torch.from_numpy(np.array(result)).double(), expected, atol=1e-6, rtol=1e-6)
