"""Tests of passing memory between torch and XLA, with the fast private entry points and the public ones."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

from dynaxla.runtime import clients, transfer
from support.comparisons.compare import assert_equal, check

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.fixture
def device(way: str) -> jax.Device:
    return clients.cpu_device()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_trip_shares_memory(dtype: torch.dtype, way: str, device: jax.Device) -> None:
    if way == "public" and dtype.itemsize == 1 and dtype.is_floating_point:
        pytest.skip("the public DLPack functions of torch do not take float8")
    tensor = torch.tensor([0, 1, 1, 0] * 16).to(dtype)
    array = transfer.import_tensor(tensor, device)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    exported = transfer.export_array(array)
    assert exported.data_ptr() == tensor.data_ptr()
    assert exported.dtype == dtype
    tensor.view(torch.uint8).fill_(0)
    assert exported.view(torch.uint8).sum() == 0


@pytest.mark.usefixtures("way")
def test_compiled_call_with_views_and_writes() -> None:
    check(lambda x, y: ((x * y).t(), x.view(-1), x.add_(1)), torch.randn(4, 5), torch.randn(4, 5))


def test_import_of_misaligned_memory_is_a_copy(device: jax.Device, way: str) -> None:
    tensor = torch.arange(17.0)[1:]
    array = transfer.import_tensor(tensor, device)
    assert array.unsafe_buffer_pointer() != tensor.data_ptr()
    assert np.array_equal(np.asarray(array), tensor.numpy())


@pytest.mark.usefixtures("way")
def test_reinterpret_and_view_as() -> None:
    """Offsets are relative to the tensor, which may have its own offset in the storage. Results do not require gradients."""
    base = torch.arange(12.0)
    part = base[2:].requires_grad_()
    for view in (transfer.reinterpret(part, (2, 3), (1, 2), 1), transfer.view_as(part, torch.float32, (2, 3), (1, 2), 1)):
        assert view.tolist() == [[3, 5, 7], [4, 6, 8]]
        assert view.data_ptr() == base.data_ptr() + 12
        assert not view.requires_grad
    wider = transfer.view_as(part, torch.float64, (2,), (1,), 1)
    assert wider.view(torch.float32).tolist() == [4, 5, 6, 7]
    assert wider.data_ptr() == base.data_ptr() + 16
    with pytest.raises(RuntimeError, match="starts 4 bytes after the start of an element"):
        transfer.view_as(base[1:], torch.float64, (2,), (1,), 0)


def test_import_of_a_parameter(device: jax.Device) -> None:
    assert np.asarray(transfer.import_tensor(torch.ones(16, requires_grad=True), device)).tolist() == [1] * 16


def test_compiled_call_changes_no_settings(tmp_path: object) -> None:
    """Compiling and running changes no setting of JAX or torch."""
    before = (jax.config.jax_enable_x64, dict(jax.config.values), torch.get_default_dtype(), torch.get_num_threads())
    dynamo_before = torch._dynamo.config.get_config_copy()
    compiled = torch.compile(lambda x: x * 2, backend="dynaxla")
    assert_equal(compiled(torch.ones(3, dtype=torch.float64)), torch.full((3,), 2.0, dtype=torch.float64))
    after = (jax.config.jax_enable_x64, dict(jax.config.values), torch.get_default_dtype(), torch.get_num_threads())
    assert before == after
    assert torch._dynamo.config.get_config_copy() == dynamo_before
    assert jax.numpy.ones(3).dtype == np.float32
