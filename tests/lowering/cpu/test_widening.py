"""Half-type operands are widened to float32 on the CPU."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from dynaxla.lowering.cpu.widening import widened


@pytest.mark.parametrize(
    ("dtype", "platform", "vectors", "expected"),
    [
        ("bfloat16", "cpu", False, "float32"),
        ("float16", "cpu", False, "float32"),
        ("bfloat16", "cuda", False, "bfloat16"),
        ("bfloat16", "cpu", True, "bfloat16"),
        ("float32", "cpu", False, "float32"),
        ("int8", "cpu", False, "int8"),
    ],
)
def test_halves_are_widened_on_the_cpu(dtype: str, platform: str, vectors: bool, expected: str) -> None:
    x = jnp.ones((2, 3), dtype)
    assert [str(result.dtype) for result in widened(x, x, platform, vectors)] == [expected, expected]
