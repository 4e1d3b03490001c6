"""Products of a few vectors with a matrix, by each implementation."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import lax

from dynaxla.lowering.cpu import gemv, onednn_support
from support import internals


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(("rows", "columns", "count"), [(1, 24, 32), (3, 16, 48), (5, 8, 16), (1, 7, 20)])
def test_product(rows: int, columns: int, count: int, dtype: str) -> None:
    generator = np.random.default_rng(0)
    with jax.enable_x64(True):
        x, y = (jax.numpy.asarray(generator.standard_normal(shape), dtype) for shape in ((2, rows, count), (2, columns, count)))
        expected = np.einsum("brn,bcn->brc", np.asarray(x, np.float64), np.asarray(y, np.float64))
        transposed = np.swapaxes(np.asarray(y), 1, 2)
        for result in jax.jit(lambda x, y, transposed: [product(x, y, True), product(x, transposed, False)])(x, y, transposed):
            assert result.dtype == ("float64" if dtype == "float64" else "float32")
            np.testing.assert_allclose(result, expected, rtol=0, atol=1e-12 if dtype == "float64" else 1e-4)


def product(x: jax.Array, y: jax.Array, is_over_last: bool) -> jax.Array:
    return gemv.product(x, y, is_over_last, True, lax.Precision.HIGHEST)


CHOICES = [
    ("bfloat16", 1, False, True, "_by_lanes"), ("bfloat16", 1, False, False, "_by_slices"),
    ("bfloat16", 2, False, True, "_by_lanes"), ("bfloat16", 2, False, False, None),
    ("bfloat16", 5, False, True, None), ("bfloat16", 2, True, False, "_by_slices"),
    ("float32", 1, False, True, None), ("float32", 1, False, False, None),
    ("float32", 1, True, True, "_by_lanes"), ("float32", 1, True, False, "_by_slices"),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "rows", "is_moved", "is_over_last", "function"), CHOICES)
def test_choice_of_the_function(
    dtype: str, rows: int, is_moved: bool, is_over_last: bool, function: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = internals.small_products(monkeypatch)
    x, y = jax.numpy.zeros((2, rows, 32), dtype), jax.numpy.zeros((2, 32, 32), dtype)
    gemv.product(x, y, is_over_last, is_moved, lax.Precision.HIGHEST)
    assert called == ([function] if function else [])


@pytest.mark.parametrize("is_over_last", [True, False])
@pytest.mark.parametrize(
    ("is_supported", "rows", "columns", "is_by_onednn"),
    [(True, 3, 2048, True), (False, 3, 2048, False), (True, 1, 2048, False), (True, 3, 64, False)],
)
def test_onednn_multiplies_large_bfloat16_operands_by_several_rows(
    is_supported: bool, rows: int, columns: int, is_by_onednn: bool, is_over_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = internals.large_products_of_half_types(monkeypatch, is_supported)
    x, y = jax.numpy.ones((4, rows, 64), "bfloat16"), jax.numpy.ones((4, columns, 64), "bfloat16")
    gemv.product(x, y if is_over_last else y.mT, is_over_last, False, lax.Precision.HIGHEST)
    assert calls == ["onednn"] * is_by_onednn


@pytest.mark.skipif(not onednn_support.supports(jax.numpy.dtype("bfloat16")), reason="oneDNN has no bfloat16 on this processor")
@pytest.mark.parametrize("is_over_last", [True, False])
def test_products_by_onednn(is_over_last: bool) -> None:
    generator = np.random.default_rng(0)
    x, y = (jax.numpy.asarray(generator.standard_normal(shape), "bfloat16") for shape in ((4, 3, 64), (4, 2048, 64)))
    expected = np.einsum("brn,bcn->brc", np.asarray(x, np.float64), np.asarray(y, np.float64))
    y = y if is_over_last else y.mT
    result = jax.jit(lambda x, y: gemv.product(x, y, is_over_last, False, lax.Precision.HIGHEST))(x, y)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-4)
