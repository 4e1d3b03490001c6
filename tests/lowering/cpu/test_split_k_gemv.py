"""Products of a few vectors with many, whose sums are split along the contracted dimension."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
from jax import lax

from dynaxla.lowering.cpu import gemv, split_k_gemv
from support import internals

# Includes single rows that are summed in one part, in several parts, and without parts.
PRODUCTS = [
    ("float32", 2, 32), ("float32", 3, 48), ("float32", 4, 320), ("float32", 1, 768), ("bfloat16", 1, 288), ("float16", 1, 512),
    ("bfloat16", 1, 464),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "rows", "count"), PRODUCTS)
def test_product(dtype: str, rows: int, count: int) -> None:
    generator = np.random.default_rng(0)
    x, y = (generator.standard_normal(shape, dtype=np.float32) for shape in ((2, rows, count), (2, 5, count)))
    y[1, 2] = np.inf
    y[0, 4, 3] = np.nan
    vectors, matrix = jax.numpy.asarray(x, dtype), jax.numpy.asarray(y, dtype)
    result = jax.jit(split_k_gemv.product)(vectors, matrix)
    assert result.dtype == np.float32
    expected = np.einsum("brn,bcn->brc", *(np.asarray(array, np.float64) for array in (vectors, matrix)))
    assert np.isfinite(expected).sum() == 8 * rows
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-4)


# (batch, rows, columns, count): less than a block, several blocks and a shorter one, and several batches in a block.
BLOCKS = [(2, 3, 16, 64), (3, 2, 37, 48), (6, 4, 7, 320), (1, 3, 33, 64), (5, 2, 17, 64)]


@pytest.mark.parametrize(("batch", "rows", "columns", "count"), BLOCKS)
def test_product_in_blocks(batch: int, rows: int, columns: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    internals.length_of_split_k_blocks(monkeypatch, 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    generator = np.random.default_rng(0)
    x, y = (generator.standard_normal((batch, size, count), dtype=np.float32) for size in (rows, columns))
    y[-1, -1] = np.nan
    result = jax.jit(split_k_gemv.product)(x, y)
    expected = np.einsum("brn,bcn->brc", x.astype(np.float64), y)
    assert np.isnan(expected).sum() == rows
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-4)


def test_blocks_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    x, y = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((1, 3, 64), (1, 1 << 16, 64)))
    analysis = jax.jit(split_k_gemv.product).lower(x, y).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < y.size * 4 // 8


PREFERRED = [
    ("float32", 3, 64, True), ("float32", 4, 64, True), ("float32", 5, 64, False), ("float32", 5, 80, True),
    ("float32", 1, 64, False), ("float32", 2, 36, False), ("float64", 3, 64, False), ("float32", 9, 768, False),
    ("bfloat16", 1, 768, True), ("float16", 1, 256, True), ("bfloat16", 2, 768, False), ("bfloat16", 1, 248, False),
    ("bfloat16", 1, 266, False), ("int16", 1, 768, False), ("float32", 1, 768, True), ("float32", 1, 1040, True),
    ("float32", 1, 240, False), ("float32", 1, 464, False), ("float32", 1, 776, False), ("bfloat16", 1, 464, True),
    ("float64", 1, 768, False),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "rows", "count", "preferred"), PREFERRED)
def test_preferred(dtype: str, rows: int, count: int, preferred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    internals.processor(monkeypatch, intel=False)
    assert split_k_gemv.is_preferred(rows, count, jax.numpy.dtype(dtype)) == preferred


def test_single_float32_rows_are_xlas_on_intel(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.processor(monkeypatch, intel=True)
    rows = [(3, "float32"), (1, "float32"), (1, "bfloat16")]
    assert [split_k_gemv.is_preferred(count, 64 if count > 1 else 768, jax.numpy.dtype(dtype)) for count, dtype in rows] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("is_over_last", [True, False])
@pytest.mark.parametrize("is_moved", [True, False])
def test_split_k_is_chosen_if_the_last_dimension_is_contracted(is_over_last: bool, is_moved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = internals.small_products(monkeypatch)
    x, y = jax.numpy.zeros((2, 3, 64), "float32"), jax.numpy.zeros((2, 64, 64), "float32")
    gemv.product(x, y, is_over_last, is_moved, lax.Precision.HIGHEST)
    assert ("product" in calls) == is_over_last
