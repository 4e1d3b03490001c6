"""`to_jax` and `to_torch`, alone and nested, under the transforms of JAX and of torch, compiled or not, with 32 and 64 bits."""

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


nested_function = to_torch(to_jax(lambda x: to_torch(in_jax)(x) * x.exp().sum(dim=1)))


def nested_reference(x: torch.Tensor) -> torch.Tensor:
    return in_torch(x) * x.exp().sum(dim=1)


# By kind: the function, and the torch function that is its reference.
JAX_SIDE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "to_jax": (to_jax(in_torch), in_torch),
    "compiled": (to_jax(torch.compile(in_torch, backend="dynaxla", fullgraph=True)), in_torch),
    "nested": (to_jax(nested_function), nested_reference),
    "compiled, nested": (to_jax(torch.compile(lambda x: nested_function(x), backend="dynaxla", fullgraph=True)), nested_reference),
}
TORCH_SIDE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "to_torch": (to_torch(in_jax), in_torch),
    "to_torch of to_jax": (to_torch(to_jax(in_torch)), in_torch),
    "nested": (nested_function, nested_reference),
}


def reference(function: Callable[..., Any], dtype: type) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the value, and the gradient of its sum."""
    x = torch.from_numpy(X.astype(dtype)).requires_grad_()
    value = function(x)
    return value.detach(), torch.autograd.grad(value.sum(), x)[0]


def close(found: Any, expected: torch.Tensor, x64: bool) -> None:
    found = np.asarray(found.detach() if isinstance(found, torch.Tensor) else found)
    assert found.dtype == expected.numpy().dtype
    np.testing.assert_allclose(found, expected, **({"rtol": 1e-10, "atol": 1e-10} if x64 else {"rtol": 2e-4, "atol": 2e-4}))


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
    """Tests calls, gradients by autograd and by torch.func, and vmap."""
    function, expected = TORCH_SIDE[kind]
    with jax.enable_x64(x64):
        dtype = np.float64 if x64 else np.float32
        value, gradient = reference(expected, dtype)
        x = torch.from_numpy(X.astype(dtype))

        def compile_if_asked(function_to_run: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function_to_run, backend="dynaxla", fullgraph=True) if compiled else function_to_run

        run, required = compile_if_asked(lambda x: function(x)), x.clone().requires_grad_()
        close(run(x), value, x64)
        close(torch.autograd.grad(run(required).sum(), required)[0], gradient, x64)
        close(compile_if_asked(torch.func.grad(lambda x: function(x).sum()))(x), gradient, x64)
        close(compile_if_asked(torch.func.vmap(function))(torch.stack([x + 1, x]))[1], value, x64)


def test_functions_without_other_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that each trace creates is garbage after the trace."""
    internals.garbage_is_collected_after_traces(monkeypatch)
    f = to_jax(lambda x: to_torch(in_jax)(x) * x.exp().sum(dim=1))
    value, gradient = reference(nested_reference, np.float32)
    close(f(jnp.asarray(X)), value, False)
    close(jax.grad(lambda x: f(x).sum())(jnp.asarray(X)), gradient, False)


def test_sums_that_xlas_default_options_compute_wrongly() -> None:
    """With jaxlib 0.10.2 and AVX-512, calls outside `jax.jit` returned values of other memory: they had XLA's default options."""
    q, k = torch.randn(1, 2, 1, 8, 8), torch.randn(1, 64, 64)
    expected = (q * k.reshape(1, 1, 64, 8, 8)).sum(3)
    jax_function = to_jax(lambda q, k: (q * k.reshape(1, 1, 64, 8, 8)).sum(3))
    torch.testing.assert_close(torch.from_numpy(np.array(jax_function(q.numpy(), k.numpy()))), expected)
    torch_function = to_torch(lambda q, k: (q * k.reshape(1, 1, 64, 8, 8)).sum(3))
    torch.testing.assert_close(torch_function(q, k), expected)
