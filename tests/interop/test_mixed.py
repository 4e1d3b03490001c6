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
from support import internals

X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)


def in_torch(x: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.silu(x @ x.t()) * 2.5).sum(dim=1)


def in_jax(x: jax.Array) -> jax.Array:
    return (jax.nn.silu(x @ x.T) * 2.5).sum(axis=1)


both = to_torch(to_jax(lambda x: to_torch(in_jax)(x) * x.exp().sum(dim=1)))


def of_both(x: torch.Tensor) -> torch.Tensor:
    return in_torch(x) * x.exp().sum(dim=1)


# By kind: the function, and the torch function that is its reference.
JAX_SIDE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "to_jax": (to_jax(in_torch), in_torch),
    "compiled": (to_jax(torch.compile(in_torch, backend="dynaxla", fullgraph=True)), in_torch),
    "nested": (to_jax(both), of_both),
    "compiled, nested": (to_jax(torch.compile(lambda x: both(x), backend="dynaxla", fullgraph=True)), of_both),
}
TORCH_SIDE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "to_torch": (to_torch(in_jax), in_torch),
    "to_torch of to_jax": (to_torch(to_jax(in_torch)), in_torch),
    "nested": (both, of_both),
}


def reference(function: Callable[..., Any], dtype: type) -> tuple[torch.Tensor, torch.Tensor]:
    """The value, and the gradient of its sum."""
    x = torch.from_numpy(X.astype(dtype)).requires_grad_()
    value = function(x)
    return value.detach(), torch.autograd.grad(value.sum(), x)[0]


def close(found: Any, right: torch.Tensor, x64: bool) -> None:
    found = np.asarray(found.detach() if isinstance(found, torch.Tensor) else found)
    assert found.dtype == right.numpy().dtype
    np.testing.assert_allclose(found, right, **({"rtol": 1e-10, "atol": 1e-10} if x64 else {"rtol": 2e-4, "atol": 2e-4}))


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("x64", [False, True], ids=["32 bits", "64 bits"])
@pytest.mark.parametrize("kind", JAX_SIDE)
def test_jaxs_transforms(kind: str, x64: bool) -> None:
    function, expected = JAX_SIDE[kind]
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


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("x64", [False, True], ids=["32 bits", "64 bits"])
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("kind", TORCH_SIDE)
def test_torchs_transforms(kind: str, compiled: bool, x64: bool) -> None:
    """Called, differentiated by autograd and by torch.func, and mapped."""
    function, expected = TORCH_SIDE[kind]
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


def test_functions_that_nobody_else_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is made anew by each trace is garbage when the trace has ended."""
    internals.garbage_is_collected_after_traces(monkeypatch)
    f = to_jax(lambda x: to_torch(in_jax)(x) * x.exp().sum(dim=1))
    value, gradient = reference(of_both, np.float32)
    close(f(jnp.asarray(X)), value, False)
    close(jax.grad(lambda x: f(x).sum())(jnp.asarray(X)), gradient, False)
