"""Tests of copies of inputs, which have the originals' strides and shared memory."""

from __future__ import annotations

import torch

from dynaxla.autoselect.clones import by_storage, clones, in_float64, positions_on_same_storages, storage_bytes


def test_copies_have_strides_sharing_and_requires_grad_of_the_originals() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    leaf = torch.ones(3, 2, requires_grad=True)
    args = [base.t()[1:], base[1:, ::2], 7, leaf, base.expand(2, 4, 6), torch.empty(0, 3), None]
    copies = clones(args)
    for copy, original in zip(copies, args, strict=True):
        if not isinstance(original, torch.Tensor):
            assert copy is original
            continue
        assert torch.equal(copy, original)
        assert (copy.stride(), copy.storage_offset(), copy.requires_grad) == (
            original.stride(),
            original.storage_offset(),
            original.requires_grad,
        )
        assert copy.is_leaf
        assert copy.untyped_storage().data_ptr() != original.untyped_storage().data_ptr() or not original.numel()
    assert [len(positions) for positions in by_storage(copies).values()] == [3, 1, 1]
    copies[0].zero_()
    assert not copies[1][:, 1:].any()  # Both share memory, except the first column.
    assert base.any()


def test_only_selected_inputs_and_those_sharing_their_memory_are_copied() -> None:
    base, other = torch.zeros(4), torch.zeros(4)
    args = [base[:2], other, base[1:]]
    assert positions_on_same_storages(args, {0}) == {0, 2}
    copies = clones(args, {0})
    assert copies[1] is other
    assert copies[0] is not args[0]
    assert copies[2] is not args[2]
    assert positions_on_same_storages(copies, {2}) == {0, 2}


def test_content_includes_the_whole_storage() -> None:
    base = torch.tensor([float("nan"), 1.0, 2.0])
    (copy,) = clones([base[:1]])
    assert torch.equal(storage_bytes(copy), storage_bytes(base))
    base[2] = 3
    assert not torch.equal(storage_bytes(copy), storage_bytes(base))


def test_float64_copies_share_no_memory() -> None:
    half, count = torch.ones(2, dtype=torch.bfloat16, requires_grad=True), torch.tensor(3)
    wide, count_copy = in_float64([half, count])
    assert (wide.dtype, wide.requires_grad, wide.is_leaf) == (torch.float64, True, True)
    count_copy.add_(1)
    assert count == 3
