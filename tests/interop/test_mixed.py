"""`to_jax` and `to_torch` in each other, under JAX's transforms, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import dynaxla
from dynaxla import to_torch

X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
cubed = to_torch(lambda x: x**3 + 1)


def plain(x: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.silu(x @ x.t()) * 2.5).sum(dim=1)


def with_jax(x: torch.Tensor) -> torch.Tensor:
    return plain(x) * cubed(x).sum(dim=1)


@pytest.mark.parametrize("function", [plain, with_jax])
def test_torch_in_jax_and_back(function: Callable[..., Any]) -> None:
    x = torch.from_numpy(X.copy()).requires_grad_()
    expected = function(x)
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    in_jax = dynaxla.to_jax(function)
    for found, right in (
        (jax.jit(in_jax)(X), expected.detach()),
        (jax.vmap(in_jax)(jnp.stack([X, X]))[1], expected.detach()),
        (jax.grad(lambda x: in_jax(x).sum())(X), gradient),
        (jax.jit(jax.grad(lambda x: in_jax(x).sum()))(X), gradient),
    ):
        np.testing.assert_allclose(found, right, rtol=2e-4, atol=2e-4)
    again = to_torch(in_jax)
    for called in (again, torch.compile(lambda x: again(x), backend="dynaxla", fullgraph=True)):
        result = called(x)
        torch.testing.assert_close(result, expected, rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(torch.autograd.grad(result.sum(), x)[0], gradient, rtol=2e-4, atol=2e-4)
