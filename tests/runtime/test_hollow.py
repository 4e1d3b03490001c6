"""Tensors whose memory comes later."""

from __future__ import annotations

import pytest
import torch

from dynaxla.runtime import hollow, private


@pytest.mark.parametrize("swaps", [True, False], ids=["swapped", "copied"])
def test_memory_comes_later(swaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hollow, "_SWAPS", swaps and hollow._SWAPS)
    tensor, reference = hollow.make((2, 3), (1, 2), torch.float32, torch.device("cpu"), 24)
    view = tensor.t()[1:]
    result = torch.arange(6.0).view(3, 2).t()
    hollow.fill(reference, result, (1, 2), 24, {})
    assert tensor.tolist() == [[0, 2, 4], [1, 3, 5]]
    assert view.tolist() == [[2, 3], [4, 5]]
    tensor.add_(1)
    assert view[0].tolist() == [3, 4]


@pytest.mark.parametrize("swaps", [True, False], ids=["swapped", "copied"])
def test_memory_of_others_is_copied(swaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hollow, "_SWAPS", swaps and hollow._SWAPS)
    result = torch.arange(4.0)
    taken: dict[int, torch.UntypedStorage | None] = {}
    made = [hollow.make((4,), (1,), torch.float32, torch.device("cpu"), 16) for _ in range(2)]
    for _, reference in made:
        hollow.fill(reference, result, (1,), 16, taken)
    made[0][0].zero_()
    assert made[1][0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("swaps", [True, False], ids=["swapped", "copied"])
def test_what_could_not_be_computed_is_no_number(swaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hollow, "_SWAPS", swaps and hollow._SWAPS)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        tensor, reference = hollow.make((3,), (1,), dtype, torch.device("cpu"), 3 * dtype.itemsize)
        hollow.spoil(reference, 3 * dtype.itemsize)
        assert tensor.isnan().all()


def test_other_strides_are_copied() -> None:
    tensor, reference = hollow.make((2, 3), (3, 1), torch.float32, torch.device("cpu"), 24)
    hollow.fill(reference, torch.arange(6.0).view(3, 2).t(), (3, 1), 24, {})
    assert tensor.tolist() == [[0, 2, 4], [1, 3, 5]]


def test_what_has_no_bytes_may_grow() -> None:
    tensor, _ = hollow.make((0,), (1,), torch.float32, torch.device("cpu"), 0)
    torch.mul(torch.ones(3), 2, out=tensor)
    assert tensor.tolist() == [2, 2, 2]


@pytest.mark.skipif(not private.SWAPS_MEMORY, reason="this torch cannot exchange storages' memory: there is some from the start")
def test_its_address_is_not_told() -> None:
    tensor, reference = hollow.make((3,), (1,), torch.float32, torch.device("cpu"), 12)
    with pytest.raises(RuntimeError, match="data pointer"):
        tensor[1:].data_ptr()
    hollow.fill(reference, torch.ones(3), (1,), 12, {})
    assert tensor[1:].data_ptr()


def test_a_storage_that_nobody_has_is_left_alone() -> None:
    tensor, reference = hollow.make((3,), (1,), torch.float32, torch.device("cpu"), 12)
    del tensor
    assert reference.expired()
    hollow.fill(reference, torch.ones(3), (1,), 12, {})
    hollow.spoil(reference, 12)
