"""Transposes that are put off change no result, and cancel out."""

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


def last(x: Array) -> Array:
    return lax.transpose(x, (0, 2, 3, 1))


def first(x: Array) -> Array:
    return lax.transpose(x, (0, 3, 1, 2))


CONVOLUTION = {"window_strides": (1, 1), "padding": ((1, 1), (1, 0))}

FUNCTIONS: dict[str, Callable[[Array, Array], object]] = {
    "elementwise": lambda x, y: lax.max(first(jnp.sin(last(x))), 0.0) + x,
    "where": lambda x, y: jnp.where(first(last(x) > 0), x, first(last(y)) * 2),
    "clamp": lambda x, y: lax.clamp(0.1, first(last(x)), 0.5),
    "two orders": lambda x, y: first(last(x) * 2) + lax.transpose(lax.transpose(y, (3, 1, 0, 2)) + 1, (2, 1, 3, 0)),
    "broadcast": lambda x, y: first(last(x)) * x[0, :, 0, 0][None, :, None, None] + lax.broadcast_in_dim(y[:, 0, :, 0], x.shape, (0, 2)),
    "broadcast transposed": lambda x, y: (
        first(last(x)) + lax.transpose(lax.broadcast_in_dim(y[0, 0].T, (5, 2, 4, 3), (0, 2)), (1, 3, 2, 0))
    ),
    "sum": lambda x, y: (first(last(x)).sum((0, 2)), first(last(x)).max(1), first(last(x)).sum()),
    "sum, then more": lambda x, y: first(last(x)).sum(3) * lax.transpose(x[..., 0], (0, 2, 1)).transpose(0, 2, 1),
    "window": lambda x, y: lax.reduce_window(
        first(last(x)), -np.inf, lax.max, (1, 1, 2, 3), (1, 1, 2, 1), ((0, 0), (0, 0), (1, 0), (0, 2))
    ),
    "pad": lambda x, y: lax.pad(first(last(x)), 0.5, ((0, 0, 0), (1, 0, 0), (0, 2, 1), (-1, 0, 0))),
    "slice": lambda x, y: lax.slice(first(last(x)), (0, 1, 0, 1), (2, 3, 4, 5), (1, 1, 2, 3)),
    "concatenate": lambda x, y: lax.concatenate([first(last(x)), y], 1),
    "reverse": lambda x, y: lax.rev(first(last(x)), (1, 3)),
    "cumsum": lambda x, y: lax.cumsum(first(last(x)), 1, reverse=True),
    "convolution": lambda x, y: lax.conv_general_dilated(first(last(x)), first(last(y)), **CONVOLUTION),
    "convolution, swapped": lambda x, y: lax.conv_general_dilated(
        first(last(x)), y, dimension_numbers=lax.ConvDimensionNumbers((1, 0, 2, 3), (1, 0, 2, 3), (1, 0, 2, 3)), **CONVOLUTION
    ),
    # Of arrays that wait for a transpose: heads beside the batch, tokens and pictures, dimensions of one number.
    "reshapes": lambda x, y: (
        last(x).reshape(8, 5, 3) * 2,
        last(x).reshape(2, 20, 3).transpose(0, 2, 1).reshape(x.shape) + x,
        first(x).reshape(10, 3, 4),
        first(x).reshape(2, 5, 12) + 1,
        first(x).reshape(2, 5, 3, 2, 2),
        first(x).reshape(30, 4),
        jnp.stack([last(x), last(y)], 1).sum(1),
        last(x)[:, None].squeeze(1),
        last(x)[:, :, :1].squeeze(2) + 1,
    ),
    "reshapes in another order": lambda x, y: (
        jnp.reshape(last(x), (6, 20), order="F"),
        lax.reshape(first(x), (2, 5, 12), dimensions=(0, 1, 3, 2)) + 1,
    ),
    "windows spread": lambda x, y: (
        lax.broadcast_in_dim(last(x), (2, 4, 2, 5, 2, 3), (0, 1, 3, 5)).reshape(2, 8, 10, 3) * 2,
        lax.broadcast_in_dim(first(x), (7, 2, 5, 3, 4), (1, 2, 3, 4)).reshape(14, 5, 3, 4),
        lax.broadcast_in_dim(first(x), (2, 5, 3, 4, 3), (0, 1, 2, 3)).reshape(2, 5, 3, 12) - 1,
        lax.broadcast_in_dim(x[0, :, 0, 0], (2, 3, 4), (1,)).reshape(6, 4),
    ),
    "places along a dimension": lambda x, y: (
        first(last(x))[:, :, np.array([2, 0, 0, 1])] + 1,
        first(last(x))[np.array([[1, 0], [0, 0]])] * 2,
        last(x)[:, jnp.argsort(y[0, 0, :, 0]), :] - 1,
        jnp.take(first(last(x)), np.array([4, 1]), axis=3, mode="fill"),
        jnp.take(last(x), 1, axis=2),
        first(last(x))[np.array([1, 0]), np.array([2, 0])],
        jnp.take_along_axis(first(last(x)), np.zeros((2, 1, 4, 5), np.int32), axis=1),
    ),
    "what needs its order": lambda x, y: (first(last(x)).reshape(2, -1), jnp.dot(first(last(x)), y[0, 0].T), lax.sort(first(last(x)))),
    "control flow": lambda x, y: (
        lax.fori_loop(0, 3, lambda _, value: value * 2, first(last(x))) + lax.cond(x[0, 0, 0, 0] > 0, jnp.sin, jnp.cos, first(last(y)))
    ),
    "inner jit": lambda x, y: jax.nn.relu(first(last(x))) + jax.jit(lambda z: (z * 2).sum(1, keepdims=True))(first(last(y))),
    "platforms": lambda x, y: lax.platform_dependent(first(last(x)), cpu=jnp.sin, default=jnp.cos) * 2,
    "nothing": lambda x, y: (x, first(last(x)), 3.0),
    "gelu": lambda x, y: jax.nn.gelu(first(last(x)), approximate=False),
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
    for one, two in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        assert (jnp.shape(one), jnp.result_type(one)) == (jnp.shape(two), jnp.result_type(two))
        np.testing.assert_allclose(two, one, rtol=1e-5, atol=1e-6)


def transposes(function: Callable[..., object], *arrays: Array) -> int:
    return jax.jit(defer_transposes(function, "cpu")[0]).trace(*arrays).lower().as_text().count("stablehlo.transpose")


def test_pairs_cancel_out() -> None:
    x, weight, scale = jnp.ones((2, 3, 4, 5)), jnp.eye(3), jnp.ones(3)
    assert transposes(FUNCTIONS["elementwise"], x, x) == 0

    def network(x: Array, weight: Array, scale: Array) -> Array:
        for _ in range(4):
            x = lax.max(first(jnp.dot(last(x), weight)) * lax.broadcast_in_dim(scale, x.shape, (1,)) + 1.0, 0.0)
        return x.mean((2, 3))

    assert transposes(network, x, weight, scale) == 1  # of what comes in

    def tokens(x: Array, weight: Array) -> Array:
        """Between products of tokens, pictures; in memory they are the same."""
        for _ in range(3):
            picture = lax.transpose(x, (0, 2, 1)).reshape(2, 3, 4, 5)
            spread = lax.broadcast_in_dim(first(last(picture) * 2), (2, 3, 4, 1, 5, 1), (0, 1, 2, 4)).reshape(picture.shape)
            x = jnp.dot(lax.transpose(spread.reshape(2, 3, 20), (0, 2, 1)), weight)
        return x

    assert transposes(tokens, jnp.ones((2, 20, 3)), weight) == 0


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_networks(memory_format: torch.memory_format) -> None:
    """A channels-last network's activations are never transposed."""
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
def test_inputs_in_another_order(training: bool, tmp_path: Path) -> None:
    """Without a convolution, too, a graph computes in the order in which its inputs lie."""
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
