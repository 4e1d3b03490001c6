"""Embedding tables and embedding bags."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from support.comparisons.compare import check
from support.comparisons.gradients import check_gradients

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding(dtype: torch.dtype) -> None:
    tokens = torch.randint(0, 7, (3, 5))
    for settings in ({}, {"padding_idx": 2}, {"padding_idx": -1, "scale_grad_by_freq": True}):
        check_gradients(lambda w, t, settings=settings: F.embedding(t, w, **settings), torch.randn(7, 4).to(dtype), constants=[tokens])


def test_embedding_with_limited_norm() -> None:
    check(lambda t, w: F.embedding(t, w, max_norm=1.0), torch.randint(0, 7, (3, 5)), torch.randn(7, 4), calls=1)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(mode: str) -> None:
    tokens, offsets = torch.randint(0, 7, (9,)), torch.tensor([0, 3, 3, 7])
    check_gradients(
        lambda w, t, s: (
            F.embedding_bag(t, w, s, mode=mode),
            F.embedding_bag(t, w, s, mode=mode, padding_idx=1),
            F.embedding_bag(t, w, F.pad(s, (0, 1), value=9), mode=mode, include_last_offset=True),
            F.embedding_bag(t.view(3, 3), w, mode=mode),
        ),
        torch.randn(7, 4),
        constants=[tokens, offsets],
    )


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag_with_indices_after_the_last_offset(mode: str) -> None:
    check(
        lambda table: F.embedding_bag(torch.arange(4), table, torch.tensor([0, 2, 3]), mode=mode, include_last_offset=True),
        torch.randn(6, 3),
        calls=1,
    )


def test_embedding_bag_with_weights() -> None:
    tokens, offsets = torch.randint(0, 7, (9,)), torch.tensor([0, 3, 3, 7])
    check_gradients(
        lambda w, p, t, s: [F.embedding_bag(t, w, s, mode="sum", per_sample_weights=p, padding_idx=pad) for pad in (None, 1)],
        torch.randn(7, 4),
        torch.rand(9),
        constants=[tokens, offsets],
    )


def test_embedding_bag_scales_by_frequency() -> None:
    """As in `embedding`. Eager mode on the CPU divides by the counts of other rows (torch 2.13), so it is no reference."""
    weight = torch.zeros(6, 1, requires_grad=True)
    tokens, offsets = torch.tensor([0, 1, 1, 2, 5, 5, 5]), torch.tensor([0, 3])
    function = torch.compile(lambda w: F.embedding_bag(tokens, w, offsets, mode="sum", scale_grad_by_freq=True), backend="dynaxla")
    function(weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [1, 1, 1, 0, 0, 1]
