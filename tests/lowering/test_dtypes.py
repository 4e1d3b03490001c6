"""Conversions between PyTorch's and JAX's dtypes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dynaxla.lowering import dtypes

pytestmark = pytest.mark.quick

NUMPY_DTYPES = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip
OTHER_DTYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=str)
def test_to_jax_returns_numpys_dtype(dtype: torch.dtype) -> None:
    assert dtypes.to_jax(dtype) == torch.empty(0, dtype=dtype).numpy().dtype


@pytest.mark.parametrize("dtype", [*NUMPY_DTYPES, *OTHER_DTYPES], ids=str)
def test_kinds_and_sizes_match_torch(dtype: torch.dtype) -> None:
    jax_dtype = dtypes.to_jax(dtype)
    assert dtypes.to_torch(jax_dtype) is dtype
    assert jax_dtype.itemsize == dtype.itemsize
    assert dtypes.is_float(jax_dtype) == dtype.is_floating_point
    assert dtypes.is_complex(jax_dtype) == dtype.is_complex
    assert dtypes.is_bool(jax_dtype) == (dtype is torch.bool)
    assert [dtypes.is_integer(jax_dtype), dtypes.is_bool(jax_dtype), dtypes.is_inexact(jax_dtype)].count(True) == 1


def test_dtypes_that_jax_lacks() -> None:
    assert not dtypes.is_supported(torch.complex32)
    assert not dtypes.is_supported(torch.qint8)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_dtypes_of_sums_and_real_parts_match_torch(dtype: torch.dtype) -> None:
    x = torch.ones(2, dtype=dtype)
    assert dtypes.to_torch(dtypes.widen_integers(dtypes.to_jax(dtype))) is x.sum().dtype
    assert dtypes.to_torch(dtypes.real(dtypes.to_jax(dtype))) is x.real.dtype


def test_accumulators() -> None:
    assert dtypes.accumulator(dtypes.to_jax(torch.bfloat16)) == dtypes.accumulator(np.dtype("float16")) == np.float32
    assert dtypes.accumulator(np.dtype("float64")) == np.float64
    assert dtypes.accumulator(np.dtype("int8")) == np.int8


def test_descriptions() -> None:
    assert dtypes.describe(torch.float32, (8, 1024)) == "f32[8, 1024]"
    assert [dtypes.describe(dtype, ()) for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.complex64)] == [
        "bool[]", "u8[]", "bf16[]", "c64[]"
    ]  # fmt: skip
