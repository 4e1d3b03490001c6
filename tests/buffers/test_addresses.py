"""Tests of buffers/addresses.py: addresses and alignment of tensors, and arrays that alias their memory."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from dynaxla.buffers.addresses import address_snapshot, element_distance, import_alias, is_aligned, lies_within, tensor_snapshot
from dynaxla.runtime import clients, private


@pytest.mark.parametrize("entry_points", [contextlib.nullcontext, private.force_public], ids=["fast", "public"])
def test_alias_reads_updates(entry_points: type[contextlib.AbstractContextManager[None]]) -> None:
    with entry_points():
        device = clients.cpu_device()
        tensor = torch.arange(12.0).view(3, 4)
        array = import_alias(tensor, (3, 4), (4, 1), device)
        transposed = import_alias(tensor, (4, 3), (1, 4), device)
        tensor.mul_(2)
        assert np.array_equal(np.asarray(array), tensor.numpy())
        assert np.array_equal(np.asarray(transposed), tensor.t().numpy())
        assert transposed.unsafe_buffer_pointer() == tensor.data_ptr()
        parameter = torch.nn.Parameter(torch.arange(16.0))
        assert import_alias(parameter, (16,), (1,), device).unsafe_buffer_pointer() == parameter.data_ptr()


def test_alias_does_not_keep_memory_alive() -> None:
    tensor = torch.arange(16.0)
    reference = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())
    array = import_alias(tensor, (16,), (1,), clients.cpu_device())
    del tensor
    assert reference.expired()
    del array


def test_address_snapshot() -> None:
    one, other = torch.zeros(4), torch.zeros(4)
    before = address_snapshot([one, other])
    one.add_(1)
    assert address_snapshot([one, other.view(2, 2)]) == before
    assert address_snapshot([other, one]) != before
    assert address_snapshot([one[1:], other]) != before


def test_tensor_snapshot() -> None:
    one = torch.zeros(4)
    before = tensor_snapshot([one])
    assert tensor_snapshot([one]) == before
    assert tensor_snapshot([one.view(4)]) != before, "another tensor in the same place"
    one.add_(1)
    assert tensor_snapshot([one]) != before
    with torch.inference_mode():
        inference_tensor = torch.zeros(4)
    assert tensor_snapshot([inference_tensor]) == tensor_snapshot([inference_tensor])


def test_alignment() -> None:
    memory = torch.zeros(64)
    assert is_aligned(memory)
    assert is_aligned(memory[16:])
    assert not is_aligned(memory[4:])


def test_distances_within_a_tensor() -> None:
    memory = torch.arange(24.0)
    block = memory[2:14].view(3, 4)
    assert element_distance(block, block[1, 2:]) == 6
    assert element_distance(block[1], block) == -4
    assert lies_within(block[1:, ::2], block)
    assert not lies_within(memory[13:15], block)
    assert not lies_within(memory.clone(), memory)
