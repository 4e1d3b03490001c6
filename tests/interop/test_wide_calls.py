"""Tests of interop/wide_calls.py: 64-bit values inside programs of JAX with 32 bits, under each of JAX's transforms."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import Array, lax
from jax import numpy as jnp

from dynaxla.interop.wide_calls import Derivative, WideCall, narrowed

W, INDICES = jnp.arange(12.0, dtype=jnp.float32).reshape(4, 3), jnp.array([1, 2, 0], jnp.int32)


def wide(w: Array, indices: Array) -> list[Array]:
    """Sums that need 64 bits, a sort, a cumsum and an argmax. JAX lowers these with another trace."""
    rows = w.at[lax.convert_element_type(indices, np.int64)].get()
    large = jnp.cumsum(lax.convert_element_type(indices, np.int64) * np.int64(2**35)) // np.int64(2**35)
    exact = jnp.cumsum(lax.convert_element_type(rows, np.float64) + np.float64(1e-12), 0)
    ordered = lax.sort((exact, lax.broadcasted_iota(np.int64, exact.shape, 0)), dimension=0, num_keys=1)[0]
    total = ordered.sum() + large.sum() + ((exact.sum() + 2.0**40) - 2.0**40)
    return [lax.convert_element_type(total, np.float32), lax.convert_element_type(jnp.argmax(rows, axis=-1), np.int32)]


call = WideCall(wide)


def total(w: Array, indices: Array = INDICES) -> Array:
    return call([w, indices])[0]


GRADIENT = np.float32([[2, 2, 2], [6, 6, 6], [4, 4, 4], [0, 0, 0]])


def test_64_bit_values_in_a_32_bit_program() -> None:
    assert not jax.config.jax_enable_x64
    for run in (call, jax.jit(lambda operands: call(operands))):
        result, indices = run([W, INDICES])
        assert (result.dtype, indices.dtype) == (jnp.float32, jnp.int32)
        np.testing.assert_allclose(result, 169)
        assert indices.tolist() == [2, 2, 2]


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_transforms(jit: object) -> None:
    assert callable(jit)
    np.testing.assert_allclose(jit(jax.grad(total))(W), GRADIENT)
    np.testing.assert_allclose(jit(jax.grad(jax.checkpoint(total)))(W), GRADIENT)
    np.testing.assert_allclose(jit(lambda w: jax.jvp(total, (w,), (w,))[1])(W), (GRADIENT * W).sum())
    two = jnp.stack([W, 2 * W])
    np.testing.assert_allclose(jit(jax.vmap(jax.grad(total)))(two), np.stack([GRADIENT, GRADIENT]))
    rows = jnp.stack([INDICES, INDICES])
    np.testing.assert_allclose(jit(jax.grad(lambda w: jax.vmap(total, (None, 0))(w, rows).sum()))(W), 2 * GRADIENT)
    scanned = jit(jax.grad(lambda w: lax.scan(lambda c, row: (c + total(w, row), None), jnp.float32(0), rows)[0]))
    np.testing.assert_allclose(scanned(W), 2 * GRADIENT)


def test_second_derivative() -> None:
    np.testing.assert_allclose(jax.hessian(lambda w: total(w) ** 2)(W), 2 * np.multiply.outer(GRADIENT, GRADIENT))


def test_custom_derivative() -> None:
    class Tripled(WideCall):
        def derivative(self, wanted: tuple[bool, ...]) -> Derivative:
            def five_times(x: Array, t: Array) -> list[Array]:
                return [5 * x * t]

            linear = WideCall(lambda x, t: [3 * x * t], lambda x, t: [3 * x * t], lambda: WideCall(five_times, five_times))
            return Derivative(WideCall(lambda x: [x, x]), linear, [0])

    def same(x: Array) -> Array:
        return Tripled(lambda x: [x])([x])[0]

    x = jnp.float32([1, 2])
    np.testing.assert_array_equal(jax.grad(lambda x: same(x).sum())(x), 3 * x)
    np.testing.assert_array_equal(jax.vmap(jax.grad(same))(x), 3 * x)
    np.testing.assert_array_equal(jax.grad(lambda x: jax.vmap(same)(x).sum())(x), 3 * x)
    for second in (jax.hessian(lambda x: same(x).sum()), jax.hessian(lambda x: jax.vmap(same)(x).sum())):
        np.testing.assert_array_equal(second(x), 5 * np.eye(2))


def test_traces_are_cached() -> None:
    traced = []

    def run(x: Array) -> list[Array]:
        traced.append(x.shape)
        return [x + 1]

    counted = WideCall(run)
    for size in (1, 2, 1, 2, 2):
        counted([jnp.zeros(size)])
    assert traced == [(1,), (2,)]


def test_oldest_traces_are_dropped() -> None:
    traced = []

    def run(x: Array) -> list[Array]:
        traced.append(x.shape)
        return [x + 1]

    counted = WideCall(run)
    for size in (*range(1, 101), 100, 1):
        jax.eval_shape(lambda x: counted([x]), jax.ShapeDtypeStruct((size,), np.float32))  # the lambda has no trace in JAX's own cache
    assert traced == [(size,) for size in (*range(1, 101), 1)], "the cache of one call is smaller than 100 traces"


def test_narrow_dtypes() -> None:
    assert narrowed(np.dtype("int64")) == np.int32
    assert narrowed(np.dtype("complex128")) == np.complex64
    assert narrowed(np.dtype("float16")) == np.float16
