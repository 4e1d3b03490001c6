"""Tests of passes/jaxpr/transposes.py: deferred transposes change no result, and cancel out."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from jax import Array, lax
from jax import numpy as jnp

from dynaxla.passes.jaxpr.transposes import defer_transposes


def nhwc(x: Array) -> Array:
    return lax.transpose(x, (0, 2, 3, 1))


def nchw(x: Array) -> Array:
    return lax.transpose(x, (0, 3, 1, 2))


CONVOLUTION = {"window_strides": (1, 1), "padding": ((1, 1), (1, 0))}

FUNCTIONS: dict[str, Callable[[Array, Array], object]] = {
    "elementwise": lambda x, y: lax.max(nchw(jnp.sin(nhwc(x))), 0.0) + x,
    "where": lambda x, y: jnp.where(nchw(nhwc(x) > 0), x, nchw(nhwc(y)) * 2),
    "clamp": lambda x, y: lax.clamp(0.1, nchw(nhwc(x)), 0.5),
    "two orders": lambda x, y: nchw(nhwc(x) * 2) + lax.transpose(lax.transpose(y, (3, 1, 0, 2)) + 1, (2, 1, 3, 0)),
    "broadcast": lambda x, y: nchw(nhwc(x)) * x[0, :, 0, 0][None, :, None, None] + lax.broadcast_in_dim(y[:, 0, :, 0], x.shape, (0, 2)),
    "broadcast transposed": lambda x, y: nchw(nhwc(x)) + lax.transpose(lax.broadcast_in_dim(y[0, 0].T, (5, 2, 4, 3), (0, 2)), (1, 3, 2, 0)),
    "sum": lambda x, y: (nchw(nhwc(x)).sum((0, 2)), nchw(nhwc(x)).max(1), nchw(nhwc(x)).sum()),
    "sum, then more": lambda x, y: nchw(nhwc(x)).sum(3) * lax.transpose(x[..., 0], (0, 2, 1)).transpose(0, 2, 1),
    "window": lambda x, y: lax.reduce_window(nchw(nhwc(x)), -np.inf, lax.max, (1, 1, 2, 3), (1, 1, 2, 1), ((0, 0), (0, 0), (1, 0), (0, 2))),
    "pad": lambda x, y: lax.pad(nchw(nhwc(x)), 0.5, ((0, 0, 0), (1, 0, 0), (0, 2, 1), (-1, 0, 0))),
    "slice": lambda x, y: lax.slice(nchw(nhwc(x)), (0, 1, 0, 1), (2, 3, 4, 5), (1, 1, 2, 3)),
    "concatenate": lambda x, y: lax.concatenate([nchw(nhwc(x)), y], 1),
    "reverse": lambda x, y: lax.rev(nchw(nhwc(x)), (1, 3)),
    "cumsum": lambda x, y: lax.cumsum(nchw(nhwc(x)), 1, reverse=True),
    "convolution": lambda x, y: lax.conv_general_dilated(nchw(nhwc(x)), nchw(nhwc(y)), **CONVOLUTION),
    "convolution, swapped": lambda x, y: lax.conv_general_dilated(
        nchw(nhwc(x)), y, dimension_numbers=lax.ConvDimensionNumbers((1, 0, 2, 3), (1, 0, 2, 3), (1, 0, 2, 3)), **CONVOLUTION
    ),
    # Reshapes of arrays whose transpose is deferred: heads next to the batch, tokens and images, dimensions of size 1.
    "reshapes": lambda x, y: (
        nhwc(x).reshape(8, 5, 3) * 2,
        nhwc(x).reshape(2, 20, 3).transpose(0, 2, 1).reshape(x.shape) + x,
        nchw(x).reshape(10, 3, 4),
        nchw(x).reshape(2, 5, 12) + 1,
        nchw(x).reshape(2, 5, 3, 2, 2),
        nchw(x).reshape(30, 4),
        jnp.stack([nhwc(x), nhwc(y)], 1).sum(1),
        nhwc(x)[:, None].squeeze(1),
        nhwc(x)[:, :, :1].squeeze(2) + 1,
    ),
    "reshapes in another order": lambda x, y: (
        jnp.reshape(nhwc(x), (6, 20), order="F"),
        lax.reshape(nchw(x), (2, 5, 12), dimensions=(0, 1, 3, 2)) + 1,
    ),
    "broadcast, then reshape": lambda x, y: (
        lax.broadcast_in_dim(nhwc(x), (2, 4, 2, 5, 2, 3), (0, 1, 3, 5)).reshape(2, 8, 10, 3) * 2,
        lax.broadcast_in_dim(nchw(x), (7, 2, 5, 3, 4), (1, 2, 3, 4)).reshape(14, 5, 3, 4),
        lax.broadcast_in_dim(nchw(x), (2, 5, 3, 4, 3), (0, 1, 2, 3)).reshape(2, 5, 3, 12) - 1,
        lax.broadcast_in_dim(x[0, :, 0, 0], (2, 3, 4), (1,)).reshape(6, 4),
    ),
    "indices along a dimension": lambda x, y: (
        nchw(nhwc(x))[:, :, np.array([2, 0, 0, 1])] + 1,
        nchw(nhwc(x))[np.array([[1, 0], [0, 0]])] * 2,
        nhwc(x)[:, jnp.argsort(y[0, 0, :, 0]), :] - 1,
        jnp.take(nchw(nhwc(x)), np.array([4, 1]), axis=3, mode="fill"),
        jnp.take(nhwc(x), 1, axis=2),
        nchw(nhwc(x))[np.array([1, 0]), np.array([2, 0])],
        jnp.take_along_axis(nchw(nhwc(x)), np.zeros((2, 1, 4, 5), np.int32), axis=1),
    ),
    "ops that need the order": lambda x, y: (nchw(nhwc(x)).reshape(2, -1), jnp.dot(nchw(nhwc(x)), y[0, 0].T), lax.sort(nchw(nhwc(x)))),
    "control flow": lambda x, y: (
        lax.fori_loop(0, 3, lambda _, value: value * 2, nchw(nhwc(x))) + lax.cond(x[0, 0, 0, 0] > 0, jnp.sin, jnp.cos, nchw(nhwc(y)))
    ),
    "inner jit": lambda x, y: jax.nn.relu(nchw(nhwc(x))) + jax.jit(lambda z: (z * 2).sum(1, keepdims=True))(nchw(nhwc(y))),
    "platforms": lambda x, y: lax.platform_dependent(nchw(nhwc(x)), cpu=jnp.sin, default=jnp.cos) * 2,
    "no ops": lambda x, y: (x, nchw(nhwc(x)), 3.0),
    "gelu": lambda x, y: jax.nn.gelu(nchw(nhwc(x)), approximate=False),
}


@pytest.mark.sample(usual=5)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_same_results(name: str) -> None:
    function = FUNCTIONS[name]
    function.__name__ = "function"
    generator = np.random.default_rng(0)
    x, y = (jnp.asarray(generator.standard_normal((2, 3, 4, 5)), jnp.float32) for _ in range(2))
    if name.startswith("convolution"):
        y = y[:, :, :3, :3]
    expected, actual = jax.jit(function)(x, y), jax.jit(defer_transposes(function, "cpu")[0])(x, y)
    assert jax.tree.structure(expected) == jax.tree.structure(actual)
    for wanted, found in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        assert (jnp.shape(wanted), jnp.result_type(wanted)) == (jnp.shape(found), jnp.result_type(found))
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def count_transposes(function: Callable[..., object], *arrays: Array) -> int:
    return jax.jit(defer_transposes(function, "cpu")[0]).trace(*arrays).lower().as_text().count("stablehlo.transpose")


def test_pairs_of_transposes_cancel_out() -> None:
    x, weight, scale = jnp.ones((2, 3, 4, 5)), jnp.eye(3), jnp.ones(3)
    assert count_transposes(FUNCTIONS["elementwise"], x, x) == 0

    def network(x: Array, weight: Array, scale: Array) -> Array:
        for _ in range(4):
            x = lax.max(nchw(jnp.dot(nhwc(x), weight)) * lax.broadcast_in_dim(scale, x.shape, (1,)) + 1.0, 0.0)
        return x.mean((2, 3))

    assert count_transposes(network, x, weight, scale) == 1  # the input's

    def tokens(x: Array, weight: Array) -> Array:
        """Reshapes tokens to images between products. Both have the same order in memory."""
        for _ in range(3):
            image = lax.transpose(x, (0, 2, 1)).reshape(2, 3, 4, 5)
            repeated = lax.broadcast_in_dim(nchw(nhwc(image) * 2), (2, 3, 4, 1, 5, 1), (0, 1, 2, 4)).reshape(image.shape)
            x = jnp.dot(lax.transpose(repeated.reshape(2, 3, 20), (0, 2, 1)), weight)
        return x

    assert count_transposes(tokens, jnp.ones((2, 20, 3)), weight) == 0


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_convolutional_network(memory_format: torch.memory_format) -> None:
    """The output has eager mode's values and memory format."""
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(3, 2, 1),
        torch.nn.Conv2d(8, 8, 1),
        torch.nn.Hardswish(),
        torch.nn.Conv2d(8, 8, 3, groups=8),
        torch.nn.AvgPool2d(2),
        torch.nn.ConvTranspose2d(8, 4, 2, stride=2),
    ).eval()
    x = torch.randn(2, 3, 16, 16).to(memory_format=memory_format)
    with torch.no_grad():
        actual, expected = torch.compile(net, backend="dynaxla", fullgraph=True)(x), net(x)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert actual.stride() == expected.stride()


@pytest.mark.parametrize("training", [False, True])
def test_channels_last_inputs_without_convolutions_are_not_transposed(training: bool, tmp_path: Path) -> None:
    net = torch.nn.Sequential(
        torch.nn.BatchNorm2d(8),
        torch.nn.Upsample(scale_factor=2),
        torch.nn.GELU(),
        torch.nn.AvgPool2d(2),
    ).train(training)
    x = torch.randn(2, 8, 6, 4).to(memory_format=torch.channels_last).requires_grad_(training)
    other = x.detach().clone().requires_grad_(training)
    copied = copy.deepcopy(net)
    actual = torch.compile(net, backend="dynaxla", fullgraph=True, options={"dump": tmp_path})(x)
    expected = copied(other)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert actual.stride() == expected.stride()
    if training:
        grad = torch.randn(2, 8, 6, 4).to(memory_format=torch.channels_last)
        actual.backward(grad)
        expected.backward(grad)
        assert x.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(x.grad, other.grad, rtol=1e-4, atol=1e-5)
        assert x.grad.stride() == other.grad.stride()
    programs = [program.read_text() for program in tmp_path.glob("*.hlo.txt")]
    assert len(programs) == 1 + training
    for program in programs:
        assert not re.findall(r"= f32\[[\d,]{5,}\]\S* (transpose|copy)\(", program)
