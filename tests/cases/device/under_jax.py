"""Torch functions in JAX functions and the reverse, plain and compiled, with jit, grad, vmap and combinations of these.

The functions are a torch function, a torch function that calls a JAX function, and the latter in a JAX function.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import dynaxla
from dynaxla import as_jax, as_torch, to_jax, to_torch
from dynaxla.errors import UnsupportedOp, UnsupportedTensor
from dynaxla.observe import metrics

X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)


def plain(x: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.silu(x @ x.t()) * 2.5).sum(dim=1) + x.detach().sum()


cubed = to_torch(lambda x: x**3 + 1)


def with_jax(x: torch.Tensor) -> torch.Tensor:
    return plain(x) * cubed(x).sum(dim=1)


def reference(function: Callable[..., Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the value, and the gradient of its sum, from torch on the CPU."""
    x = torch.from_numpy(X.copy()).requires_grad_()
    value = function(x)
    (gradient,) = torch.autograd.grad(value.sum(), x)
    return value.detach().numpy(), gradient.numpy()


def check_functions_and_transformations() -> None:
    functions: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "torch": (plain, plain),
        "jax in torch": (with_jax, with_jax),
        "jax in torch in jax": (with_jax, lambda x: with_jax(x * 2) / 3),
    }
    for (name, (function, reference_function)), compiles in itertools.product(functions.items(), (False, True)):
        in_torch = torch.compile(function, backend="dynaxla", fullgraph=True) if compiles else function
        in_jax = to_jax(in_torch, device="jax")
        called = (lambda x, f=in_jax: f(x * 2) / 3) if name == "jax in torch in jax" else in_jax
        value, gradient = reference(reference_function)

        def total(x: Any, called: Any = called) -> Any:
            return called(x).sum()

        batch = jnp.stack([X, X])
        for title, actual, expected in (
            ("jit", jax.jit(called)(X), value),
            ("grad", jax.grad(total)(X), gradient),
            ("vmap", jax.vmap(called)(batch)[1], value),
            ("jit of grad", jax.jit(jax.grad(total))(X), gradient),
            ("vmap of grad", jax.vmap(jax.grad(total))(batch)[1], gradient),
            ("plain", called(X), value),
        ):
            np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-4, err_msg=f"{name}, compiled={compiles}, {title}")


def check_compiled_function_is_part_of_one_program() -> None:
    compiled = torch.compile(plain, backend="dynaxla", fullgraph=True)
    before = metrics.counter_value("UncachedCompile")
    text = jax.jit(to_jax(compiled, device="jax")).lower(X).as_text()
    assert "callback" not in text
    assert metrics.counter_value("UncachedCompile") == before


def check_gradients_are_those_of_autograd() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            constant = x * 2
        return (x.detach() * x + constant * x + torch.relu(x * 0)).sum()

    np.testing.assert_allclose(jax.grad(to_jax(function, device="jax"))(X), 3 * X)
    cube = to_jax(lambda x: (x**3).sum(), device="jax")
    np.testing.assert_allclose(jax.grad(lambda x: jax.grad(cube)(x).sum())(X), 6 * X, rtol=1e-5)
    complex_numbers = to_jax(lambda z: (z * z.conj()).real.sum() + z.imag.sum(), device="jax")
    z = X + 1j * X[::-1]
    np.testing.assert_allclose(jax.grad(complex_numbers)(z), jax.grad(lambda z: (z * z.conj()).real.sum() + z.imag.sum())(z), rtol=1e-5)


def check_as_torch_and_as_jax() -> None:
    def function(x: Any) -> Any:
        return as_jax(plain(as_torch(x)))

    value, _ = reference(plain)
    np.testing.assert_allclose(jax.jit(function)(X), value, rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(function)(jnp.stack([X, X]))[0], value, rtol=1e-5)
    for differentiated in (jax.grad(lambda x: function(x).sum()), jax.grad(jax.jit(lambda x: function(x).sum()))):
        with pytest.raises(UnsupportedTensor, match=r"to_jax\(torch_function"):
            differentiated(X)


def check_views_writes_and_new_tensors() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[1:].mul_(2)
        y.t()[0] += torch.arange(3, device="jax", dtype=torch.float32)
        return torch.cat([y, torch.ones(1, 4, device="jax")])

    expected = np.concatenate([X * np.array([[1], [2], [2]], np.float32), np.ones((1, 4), np.float32)])
    expected[:3, 0] += np.arange(3)
    for called in (function, torch.compile(function, backend="dynaxla")):
        np.testing.assert_allclose(jax.jit(to_jax(called, device="jax"))(X), expected, rtol=1e-6)
        np.testing.assert_allclose(function(torch.from_numpy(X).to("jax")).cpu(), expected, rtol=1e-6)  # no tracer is left


def check_errors() -> None:
    leaked: list[torch.Tensor] = []
    jax.jit(to_jax(lambda x: leaked.append(x) or x * 2, device="jax"))(X)
    compiled = torch.compile(plain, backend="dynaxla")
    for use in (lambda x: x + 1, compiled):
        with pytest.raises(UnsupportedTensor, match="used outside of the JAX function"):
            use(leaked[0])
    for read in (torch.Tensor.cpu, lambda x: x.sum().item(), lambda x: bool((x > 0).all())):
        with pytest.raises(UnsupportedTensor, match="holds a tracer"):
            jax.jit(to_jax(lambda x, read=read: read(x) and x, device="jax"))(X)
    for function in (
        torch.rand_like,
        lambda x: x + torch.rand(4, device="jax"),
        torch.compile(torch.nn.functional.dropout, backend="dynaxla"),
    ):
        with pytest.raises(UnsupportedOp, match="draws random numbers"):
            jax.jit(to_jax(function, device="jax"))(X)
    with pytest.raises(TypeError, match="not a tensor"):
        to_jax(lambda x: 3, device="jax")(X)
    with pytest.raises(UnsupportedTensor, match="64-bit types are off"):
        to_jax(lambda x: x.argmax(), device="jax")(X)
    with jax.enable_x64(True):
        assert to_jax(lambda x: x.argmax(), device="jax")(X).dtype == np.int64
    with pytest.raises(UnsupportedTensor, match="a result is on cpu"):
        to_jax(lambda x: torch.ones(2), device="jax")(X)
    with dynaxla.device.lazy():  # ops on tracers are not recorded
        np.testing.assert_allclose(jax.jit(to_jax(plain, device="jax"))(X), reference(plain)[0], rtol=1e-5)


def check_jax_functions_of_device_tensors() -> None:
    for called in (cubed, torch.compile(cubed, backend="dynaxla", fullgraph=True)):
        x = torch.from_numpy(X.copy()).to("jax").requires_grad_()
        result = called(x)
        assert result.device.type == "jax"
        result.sum().backward()
        np.testing.assert_allclose(x.grad.cpu(), 3 * X**2, rtol=1e-5)
    with dynaxla.device.lazy():
        lazily = cubed(torch.from_numpy(X).to("jax") + 1) * 2
    np.testing.assert_allclose(lazily.cpu(), ((X + 1) ** 3 + 1) * 2, rtol=1e-5)


def check_arrays_are_shared() -> None:
    array = jnp.asarray(X) + 0
    tensor = as_torch(array, "jax")
    assert as_jax(tensor) is array
    tensor.mul_(2)
    np.testing.assert_array_equal(array, X)  # arrays are immutable
    np.testing.assert_array_equal(as_jax(tensor), 2 * X)
    np.testing.assert_array_equal(as_jax(tensor.t()[1:]), 2 * X.T[1:])
    np.testing.assert_array_equal(as_jax(torch.from_numpy(X[:2] + 1j).to("jax").conj()), X[:2] - 1j)
    with pytest.raises(RuntimeError, match="detach"):
        as_jax(tensor.detach().requires_grad_())
    copies = metrics.counter_value("host_copies")
    assert (as_torch(array, "jax") + 1).device.type == "jax"
    assert metrics.counter_value("host_copies") == copies
