"""Tests of a program's seeds, which torch's generator draws: new ones in each call, equal ones after `torch.manual_seed`."""

from __future__ import annotations

import torch

from dynaxla.runtime.seeds import seed


def seeds(count: int) -> list[list[int]]:
    torch.manual_seed(5)
    tensors = [seed(torch.device("cpu")) for _ in range(count)]
    assert all(item.dtype == torch.int32 and item.shape == (2,) for item in tensors)
    return [item.tolist() for item in tensors]


def test_seeds_are_repeated_after_manual_seed() -> None:
    first = seeds(50)
    assert seeds(50) == first
    assert len({tuple(item) for item in first}) == 50
    assert min(map(min, first)) < 0 < max(map(max, first))


def test_seed_advances_the_generator() -> None:
    torch.manual_seed(5)
    seed(torch.device("cpu"))
    after = torch.rand(3)
    torch.manual_seed(5)
    assert not torch.equal(torch.rand(3), after)
