"""oneDNN calls in an XLA program: the results of each call, also for operands in other memory orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import Array
from torch.nn import functional as F

from dynaxla.lowering.cpu import onednn, onednn_support
from dynaxla.runtime import clients, programs

needs_onednn = pytest.mark.skipif(not onednn_support.is_available(), reason="this XLA:CPU has no oneDNN")


def run(function: Callable[..., Array], *arrays: np.ndarray) -> np.ndarray:
    """Runs a function on our own client, which lets XLA call oneDNN."""
    device = clients.cpu_device()
    with jax.default_device(device):
        lowered = jax.jit(function).lower(*(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays))
        (result,) = programs.compile_lowered(lowered, device, {}).call([jax.device_put(array, device) for array in arrays])
    return np.asarray(result)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def test_supported_dtypes() -> None:
    assert onednn_support.supports(np.dtype(np.float32)) == onednn_support.is_available()
    assert not onednn_support.supports(np.dtype(np.float64))
    assert not onednn_support.supports(np.dtype(np.int32))


@needs_onednn
@pytest.mark.parametrize(("transpose_x", "transpose_y"), [(False, False), (True, False), (False, True), (True, True)])
def test_matmul(transpose_x: bool, transpose_y: bool) -> None:
    x, y, bias = random(2, 3, 4), random(2, 4, 5), random(5)
    operands = [array.swapaxes(1, 2).copy() if is_transposed else array for array, is_transposed in ((x, transpose_x), (y, transpose_y))]
    result = run(lambda x, y, bias: onednn.matmul(x, y, transpose_x, transpose_y, jnp.float32, bias, "tanh"), *operands, bias)
    np.testing.assert_allclose(result, np.tanh(x @ y + bias), rtol=1e-4, atol=1e-5)


@needs_onednn
def test_memory_orders_change_no_result() -> None:
    """XLA makes the memory orders. The shapes of operands and results do not change."""
    x, y = random(3, 4), random(4, 5)
    result = run(lambda x, y: onednn.matmul(x, y, False, False, jnp.float32, orders=((1, 0), (0, 1), (1, 0))), x, y)
    np.testing.assert_allclose(result, x @ y, rtol=1e-4, atol=1e-5)


@needs_onednn
def test_every_activation_keeps_nans() -> None:
    x, weight = np.array([[np.nan, 1.0], [0.5, -2.0]], np.float32), np.eye(2, dtype=np.float32)
    functions: dict[str, Any] = {
        "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "sigmoid": torch.sigmoid, "tanh": torch.tanh,
    }  # fmt: skip
    assert functions.keys() == onednn.ACTIVATIONS.keys()
    for name, function in functions.items():
        result = run(lambda x, y, name=name: onednn.matmul(x, y, False, False, jnp.float32, None, name), x, weight)
        np.testing.assert_allclose(result, function(torch.from_numpy(x @ weight)).numpy(), rtol=1e-3, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize("is_swapped", [False, True])
def test_convolution(is_swapped: bool) -> None:
    x, weight, bias = random(2, 4, 6, 7), random(6, 2, 3, 2), random(6)
    settings: dict[str, Any] = {"stride": (2, 1), "dilation": (1, 2)}
    expected = F.conv2d(torch.from_numpy(x), torch.from_numpy(weight), torch.from_numpy(bias), padding=(1, 0), groups=2, **settings)
    if is_swapped:  # a weight with inputs and outputs exchanged has no groups here
        expected = F.conv2d(torch.from_numpy(x[:, :2]), torch.from_numpy(weight), torch.from_numpy(bias), padding=(1, 0), **settings)
        x, weight = x[:, :2], weight.swapaxes(0, 1)
    shape = tuple(expected.permute(0, 2, 3, 1).shape)

    def function(x: Array, weight: Array, bias: Array) -> Array:
        groups = 1 if is_swapped else 2
        return onednn.convolution(
            x, weight, shape, (2, 1), ((1, 1), (0, 0)), (1, 2), groups, jnp.float32, bias, transposed_weight=is_swapped
        )

    result = run(function, x.transpose(0, 2, 3, 1).copy(), weight.copy(), bias)
    np.testing.assert_allclose(result, expected.permute(0, 2, 3, 1).numpy(), rtol=1e-4, atol=1e-4)


@needs_onednn
def test_layer_norm() -> None:
    x, weight, bias = random(3, 7) * 3 + 2, random(7), random(7)
    result = run(lambda x, weight, bias: onednn.layer_norm(x, weight, bias, 0.1), x, weight, bias)
    expected = F.layer_norm(torch.from_numpy(x), (7,), torch.from_numpy(weight), torch.from_numpy(bias), 0.1)
    np.testing.assert_allclose(result, expected.numpy(), rtol=1e-4, atol=1e-5)
