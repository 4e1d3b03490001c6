"""Tests of interop/sharing.py: tensors and arrays share memory through `as_jax` and `as_torch`."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from dynaxla import as_jax, as_torch
from dynaxla.errors import UnsupportedTensor

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.bool, torch.uint8,
    torch.int8, torch.int32, torch.uint32,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 4), (0, 3)], ids=str)
def test_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.empty(shape).uniform_(0, 3).to(dtype)
    array = as_jax(tensor)
    assert array.shape == shape
    back = as_torch(array)
    assert (back.dtype, back.shape, back.device) == (tensor.dtype, tensor.shape, tensor.device)
    assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    if tensor.numel():
        assert back.data_ptr() == tensor.data_ptr() == array.unsafe_buffer_pointer()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.complex128], ids=str)
def test_wide_types(dtype: torch.dtype) -> None:
    tensor = torch.tensor([2**40 + 1]).to(dtype)
    with jax.enable_x64(False), pytest.raises(UnsupportedTensor, match="64-bit types are off"):
        as_jax(tensor)
    with jax.enable_x64(True):
        assert torch.equal(as_torch(as_jax(tensor)), tensor)


def test_write_to_the_tensor_is_visible_in_the_array() -> None:
    tensor = torch.ones(4)
    array = as_jax(tensor)
    tensor.mul_(3)
    assert np.asarray(array).tolist() == [3] * 4


def test_each_keeps_the_memory_alive() -> None:
    tensor = torch.arange(1000.0)
    array = as_jax(tensor)
    del tensor
    assert float(array.sum()) == 499500
    new_array = jnp.arange(1000.0)
    shared = as_torch(new_array)
    del new_array
    gc.collect()
    assert shared.sum().item() == 499500


def test_reasons_why_memory_is_not_shared() -> None:
    base = torch.ones(8, 4)
    for tensor, reason in (
        (base.t(), "not contiguous"),
        (torch.ones(9)[1:], "multiple of 64 bytes"),
        (base.to(torch.complex64).conj(), "other values"),
        (base.to_sparse(), "layout"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.empty(2, dtype=torch.bits8), "dtype"),
    ):
        with pytest.raises(UnsupportedTensor, match=reason):
            as_jax(tensor)
    with pytest.raises(RuntimeError, match="detach"):
        as_jax(base.clone().requires_grad_())
    with pytest.raises(TypeError, match="torch tensor"):
        as_jax(3)
    with pytest.raises(TypeError, match=r"jax\.Array"):
        as_torch(np.ones(3))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedTensor, match="key_data"):
        as_torch(jax.random.key(0))
    with pytest.raises(UnsupportedTensor, match="int4"):
        as_torch(jnp.ones(3, "int4"))
    with pytest.raises(UnsupportedTensor, match="copies it"):
        as_torch(jnp.ones(3), "cuda")
    with pytest.raises(UnsupportedTensor, match="not on cpu:1"):
        as_torch(jnp.ones(3), "cpu:1")
    with pytest.raises(UnsupportedTensor, match=r"device\.enable"):
        jax.jit(lambda x: as_jax(as_torch(x)))(jnp.ones(3))
    deleted = jnp.ones(3) + 1
    deleted.delete()
    with pytest.raises(UnsupportedTensor, match="deleted"):
        as_torch(deleted)
