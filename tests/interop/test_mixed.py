"""`to_jax` and `to_torch`, alone and in each other, under the transforms of JAX and of torch, compiled or not, with 32 and 64 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from dynaxla import to_jax, to_torch

X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)


def in_torch(x: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.silu(x @ x.t()) * 2.5).sum(dim=1)


def in_jax(x: jax.Array) -> jax.Array:
    return (jax.nn.silu(x @ x.T) * 2.5).sum(axis=1)


def reference(function: Callable[..., Any], dtype: type) -> tuple[torch.Tensor, torch.Tensor]:
    """The value, and the gradient of its sum."""
    x = torch.from_numpy(X.astype(dtype)).requires_grad_()
    value = function(x)
    return value.detach(), torch.autograd.grad(value.sum(), x)[0]


def close(found: Any, right: torch.Tensor, x64: bool) -> None:
    found = np.asarray(found.detach() if isinstance(found, torch.Tensor) else found)
    assert found.dtype == right.numpy().dtype
    np.testing.assert_allclose(found, right, **({"rtol": 1e-10, "atol": 1e-10} if x64 else {"rtol": 2e-4, "atol": 2e-4}))


@pytest.mark.parametrize("x64", [False, True], ids=["32 bits", "64 bits"])
def test_jaxs_transforms(x64: bool) -> None:
    function, expected = to_jax(in_torch), in_torch
    with jax.enable_x64(x64):
        dtype = np.float64 if x64 else np.float32
        value, gradient = reference(expected, dtype)
        x = jnp.asarray(X, dtype)
        total = jax.grad(lambda x: function(x).sum())
        close(function(x), value, x64)
        close(jax.jit(function)(x), value, x64)
        close(jax.vmap(function)(jnp.stack([x + 1, x]))[1], value, x64)
        close(total(x), gradient, x64)
        close(jax.jit(total)(x), gradient, x64)


@pytest.mark.parametrize("x64", [False, True], ids=["32 bits", "64 bits"])
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_torchs_transforms(compiled: bool, x64: bool) -> None:
    """Called, differentiated by autograd and by torch.func, and mapped."""
    function, expected = to_torch(in_jax), in_torch
    with jax.enable_x64(x64):
        dtype = np.float64 if x64 else np.float32
        value, gradient = reference(expected, dtype)
        x = torch.from_numpy(X.astype(dtype))

        def ran(called: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(called, backend="dynaxla", fullgraph=True) if compiled else called

        whole, required = ran(lambda x: function(x)), x.clone().requires_grad_()
        close(whole(x), value, x64)
        close(torch.autograd.grad(whole(required).sum(), required)[0], gradient, x64)
        close(ran(torch.func.grad(lambda x: function(x).sum()))(x), gradient, x64)
        close(ran(torch.func.vmap(function))(torch.stack([x + 1, x]))[1], value, x64)


cubed = to_torch(lambda x: x**3 + 1)


def with_jax(x: torch.Tensor) -> torch.Tensor:
    return in_torch(x) * cubed(x).sum(dim=1)


@pytest.mark.parametrize("function", [in_torch, with_jax])
def test_torch_in_jax_and_back(function: Callable[..., Any]) -> None:
    x = torch.from_numpy(X.copy()).requires_grad_()
    expected = function(x)
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    in_jax = to_jax(function)
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
