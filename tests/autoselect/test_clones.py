"""Copies of inputs lie in memory as the originals do."""

from __future__ import annotations

import torch

from dynaxla.autoselect.clones import by_storage, clones, content, in_float64, positions_on_same_storages


def test_strides_sharing_and_gradients_are_those_of_the_originals() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    leaf = torch.ones(3, 2, requires_grad=True)
    args = [base.t()[1:], base[1:, ::2], 7, leaf, base.expand(2, 4, 6), torch.empty(0, 3), None]
    made = clones(args)
    for one, other in zip(made, args, strict=True):
        if not isinstance(other, torch.Tensor):
            assert one is other
            continue
        assert torch.equal(one, other)
        assert (one.stride(), one.storage_offset(), one.requires_grad) == (other.stride(), other.storage_offset(), other.requires_grad)
        assert one.is_leaf
        assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr() or not other.numel()
    assert [len(places) for places in by_storage(made).values()] == [3, 1, 1]
    made[0].zero_()
    assert not made[1][:, 1:].any()  # it has the same memory, but for the first column
    assert base.any()


def test_what_is_not_wanted_is_the_original_but_for_what_shares_memory_with_it() -> None:
    base, other = torch.zeros(4), torch.zeros(4)
    args = [base[:2], other, base[1:]]
    assert positions_on_same_storages(args, {0}) == {0, 2}
    made = clones(args, {0})
    assert made[1] is other
    assert made[0] is not args[0]
    assert made[2] is not args[2]
    assert positions_on_same_storages(made, {2}) == {0, 2}


def test_content_is_all_of_a_storage() -> None:
    base = torch.tensor([float("nan"), 1.0, 2.0])
    (copy,) = clones([base[:1]])
    assert torch.equal(content(copy), content(base))
    base[2] = 3
    assert not torch.equal(content(copy), content(base))


def test_wider_copies_share_nothing() -> None:
    half, count = torch.ones(2, dtype=torch.bfloat16, requires_grad=True), torch.tensor(3)
    wide, same = in_float64([half, count])
    assert (wide.dtype, wide.requires_grad, wide.is_leaf) == (torch.float64, True, True)
    same.add_(1)
    assert count == 3
