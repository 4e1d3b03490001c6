"""Tests of interop/torch_graphs.py: graphs of torch functions for given shapes, their gradients, and 64-bit values in 32-bit JAX."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp

from dynaxla.interop.torch_graphs import GraphOperand, TorchCall, _join_64_bit, _split_64_bit

CPU = torch.device("cpu")
VECTOR = GraphOperand((3,), torch.float32, True)


def test_results_that_are_copies_of_operands() -> None:
    def function(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        x, y = tensors
        return [y.clone(), x + y, x.detach().clone()]

    assert TorchCall(function, [VECTOR, VECTOR], CPU, True).copied_operands == [1, None, 0]


def test_line_of_a_random_op() -> None:
    call = TorchCall(lambda tensors: [torch.rand_like(tensors[0])], [VECTOR], CPU, True)
    assert call.draws_random
    assert "test_torch_graphs.py" in call.drawing_line
    key = jnp.uint32([1, 2])
    assert call([key, jnp.ones(3)])[0].shape == (3,)
    assert not TorchCall(lambda tensors: [tensors[0] + 1], [VECTOR], CPU, True).draws_random


def test_gradient_of_some_operands() -> None:
    """The graph has no gradients of other operands, as of tensors without requires_grad."""
    call = TorchCall(lambda tensors: [tensors[0] * tensors[1].exp()], [VECTOR, VECTOR], CPU, True)
    x, y = jnp.float32([1, 2, 3]), jnp.zeros(3)
    np.testing.assert_allclose(jax.grad(lambda x: call([x, y])[0].sum())(x), [1, 1, 1])
    np.testing.assert_allclose(jax.grad(lambda y: call([x, y])[0].sum())(y), x)
    linear = call.derivative((False, True)).linear
    assert len(linear.transpose([*call.derivative((False, True)).forward([x, y])[1:]], [x])) == 1


def test_results_without_gradient() -> None:
    call = TorchCall(lambda tensors: [tensors[0].detach() + 1, tensors[0].argmax()], [VECTOR], CPU, True)
    np.testing.assert_array_equal(jax.grad(lambda x: call([x])[0].sum())(jnp.ones(3)), 0)


@pytest.mark.parametrize("dtype", ["int64", "float64", "complex128", "uint64", "float32", "complex64", "bool"])
def test_64_bit_values_are_split_and_joined(dtype: str) -> None:
    values = np.array([2**40 + 1, 3]).astype(dtype) * np.array([1]).astype(dtype)
    if values.dtype.kind in "fc":
        values = values / 3
    with jax.enable_x64(True):
        array = jnp.asarray(values)
        split_array = _split_64_bit(array)
        assert split_array.dtype.itemsize <= 4 or dtype == "complex64"
        found = _join_64_bit(split_array, np.dtype(dtype))
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found), values)
