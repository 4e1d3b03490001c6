"""Tests of passes/jaxpr/partitionable.py: a program for XLA's partitioner has no branches per platform, and computes the same values."""

from __future__ import annotations

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from dynaxla.lowering.cpu import exponential, vectorized_reductions
from dynaxla.lowering.cpu.materialize import in_memory
from dynaxla.passes.jaxpr.partitionable import partitionable


def _program(x: jax.Array) -> dict[str, jax.Array]:
    with jax.named_scope("at[model.py:3]"):
        total = vectorized_reductions.reduce_sum(in_memory(exponential.exp(x)), (1,))
    return {"total": total, "product": x @ x.T}


def test_platform_branches_are_removed_and_source_lines_kept() -> None:
    x = np.linspace(-1, 1, 8 * 256, dtype=np.float32).reshape(8, 256)
    general = jax.jit(partitionable(_program)).trace(x)
    assert {equation.primitive.name for equation in general.jaxpr.eqns} <= {"exp", "reduce_sum", "transpose", "dot_general"}
    assert "at[model.py:3]" in {str(equation.source_info.name_stack) for equation in general.jaxpr.eqns}
    assert "cond" in str(jax.make_jaxpr(_program)(x)), "the original program has branches"
    found, expected = general.lower().compile()(x), jax.jit(_program)(x)
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5)


def test_branches_on_values_are_kept() -> None:
    def program(x: jax.Array) -> jax.Array:
        return lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)

    for x in (np.ones(3, np.float32), -np.ones(3, np.float32)):
        np.testing.assert_array_equal(jax.jit(partitionable(program))(x), jax.jit(program)(x))


def test_merged_dimensions_stay_separate() -> None:
    """Products of operands with dimensions merged in one way, in two ways, or not merged, with other ops between the products."""
    x, y, z = (np.random.default_rng(0).standard_normal(shape).astype(np.float32) for shape in ((2, 3, 4, 1, 5), (6, 5, 7), (3, 2, 5, 7)))

    def program(x: jax.Array, y: jax.Array, z: jax.Array) -> list[jax.Array]:
        left = x.reshape(6, 4, 5)
        product = jnp.tanh(lax.dot_general(left, y, (((2,), (1,)), ((0,), (0,)))) * 2)
        other = lax.dot_general(left, z.reshape(6, 5, 7), (((2,), (1,)), ((0,), (0,))))
        both = lax.dot_general(left.reshape(24, 5), product.reshape(24, 7), (((0,), (0,)), ((), ())))
        return [product, other + product, both, product.transpose(2, 0, 1).sum(1), left.reshape(24, 5).sum(0), product.reshape(2, 3, 4, 7)]

    expected = program(x, y, z)
    for free in ((), (0,)):
        found = jax.jit(partitionable(program, free))(x, y, z)
        assert found[0].shape == ((2, 3, 4, 7) if free else (6, 4, 7))
        for actual, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(np.reshape(actual, wanted.shape), wanted, rtol=1e-4, atol=1e-4)


def test_much_larger_operand_of_product_keeps_its_shape() -> None:
    """The contracted dimension of x is merged from two. A small weight is reshaped to match x; a weight 100 times as large as x is not."""
    draw = np.random.default_rng(0).standard_normal
    for columns in (2, 800):
        x, weight = draw((8, 4, 3)).astype(np.float32), draw((12, columns)).astype(np.float32)
        program = jax.jit(partitionable(lambda x, weight: x.reshape(8, 12) @ weight))
        (reshape,) = [item for item in program.trace(x, weight).jaxpr.eqns if item.primitive.name == "reshape"]
        assert reshape.invars[0].aval.size == (weight.size if columns == 2 else x.size)
        np.testing.assert_allclose(program(x, weight), x.reshape(8, 12) @ weight, rtol=1e-4, atol=1e-5)
