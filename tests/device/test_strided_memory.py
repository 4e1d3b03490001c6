"""Tests of reads and writes of a strided tensor in an array's memory."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

from dynaxla.device.strided_memory import StridedView, has_internal_overlap, read, unwritten_aval, write
from dynaxla.lowering import dtypes
from dynaxla.runtime import clients

F32, I16, C64 = torch.float32, torch.int16, torch.complex64

# A tensor in a storage of 24 float32 numbers (dtype, shape, strides, offset), and True if two of its elements share memory.
VIEWS = {
    "whole storage": (StridedView(F32, (24,), (1,)), False),
    "transposed": (StridedView(F32, (4, 6), (1, 4)), False),
    "columns": (StridedView(F32, (4, 2), (6, 1), 3), False),
    "up to the last element": (StridedView(F32, (3, 2), (9, 3), 2), False),
    "interleaved rows": (StridedView(F32, (2, 3), (10, 4), 1), False),
    "crossing rows": (StridedView(F32, (2, 3), (2, 5), 1), False),
    "expanded": (StridedView(F32, (3, 4), (0, 2)), True),
    "windows": (StridedView(F32, (5, 3), (2, 1)), True),
    "one element": (StridedView(F32, (), (), 23), False),
    "no elements": (StridedView(F32, (0, 3), (3, 1), 5), False),
    "negative": (StridedView(F32, (2,), (5,), 1, False, True), False),
    "int16 on float32": (StridedView(I16, (5,), (3,), 1), False),
    "complex64 on float32": (StridedView(C64, (3,), (2,), 1, True), False),
    "bytes": (StridedView(torch.uint8, (7,), (1,), 2), False),
}


def _host(view: StridedView, memory: torch.Tensor) -> torch.Tensor:
    tensor = torch.as_strided(memory.view(view.dtype), view.shape, view.stride, view.offset)
    tensor = tensor.conj() if view.conj else tensor
    return torch._neg_view(tensor) if view.neg else tensor


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.resolve_conj().resolve_neg().numpy().astype(dtypes.to_jax(tensor.dtype))


@pytest.mark.parametrize("name", VIEWS)
def test_reading_and_writing(name: str) -> None:
    view, shared = VIEWS[name]
    memory = torch.arange(24.0)
    assert has_internal_overlap(view) == shared
    with jax.enable_x64(True), jax.default_device(clients.cpu_device()):
        array = jax.numpy.asarray(memory.numpy()).reshape(4, 6)
        value = _host(view, memory)
        np.testing.assert_array_equal(jax.jit(read, static_argnums=1)(array, view), _numpy(value))
        if shared:
            return
        new = torch.arange(1, value.numel() + 1).reshape(value.shape).to(view.dtype) * (1j if view.dtype.is_complex else 1)
        after = jax.jit(write, static_argnums=1)(array, view, _numpy(new))
    value.copy_(new)
    np.testing.assert_array_equal(np.asarray(after).reshape(-1).view(np.uint8), memory.view(torch.uint8).numpy())


def test_write_keeps_trailing_bytes() -> None:
    """A storage of seven bytes has three elements of int16. The last byte must not change."""
    with jax.default_device(clients.cpu_device()):
        after = write(jax.numpy.zeros(7, np.uint8).at[6].set(9), StridedView(I16, (2,), (1,), 1), np.array([1, 2], np.int16))
    assert np.asarray(after).tolist() == [0, 0, 1, 0, 2, 0, 9]


def test_fills() -> None:
    assert StridedView(F32, (4, 6), (1, 4)).fills(96)
    assert not StridedView(F32, (4, 6), (1, 4)).fills(100)
    assert not StridedView(F32, (24,), (0,)).fills(96)


def test_zeros_have_the_dtype_of_the_view() -> None:
    assert unwritten_aval(12, F32) == jax.ShapeDtypeStruct((3,), np.float32)
    assert unwritten_aval(13, F32) == jax.ShapeDtypeStruct((13,), np.uint8)
