"""Gradients of tensors that are read in slices: equal to eager mode's, and without sums if the slices do not overlap."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from support import internals
from support.comparisons.compare import check
from support.comparisons.gradients import check_gradients


def loop(x: torch.Tensor) -> torch.Tensor:
    state = torch.zeros(x.shape[-1], dtype=x.dtype)
    for step in range(x.shape[0]):
        state = torch.tanh(state * 0.5 + x[step].sum(0))
    return state


# A function that reads a tensor of shape (4, 6, 12) in slices, and whether the gradient is computed without a sum.
SLICES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "halves": (lambda x: F.silu(x[..., :6]) * x[..., 6:], True),
    "chunks, twice": (lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], True),
    "three, unequal": (lambda x: x[..., :2].sum(-1, keepdim=True) * x[..., 2:7].sum(-1, keepdim=True) * x[..., 7:], True),
    "in reverse order": (lambda x: x[:, 4:] * x[:, 2:4] * x[:, :2], True),
    "gaps": (lambda x: x[..., 1:4] * x[..., 8:11], True),
    "single elements": (lambda x: x[0] * x[1] + x[2] * x[-1], True),
    "a loop": (loop, True),
    "expanded": (lambda x: x[0].sum() * x[1:].mean(), True),
    "also read whole": (lambda x: x[..., :6] * x[..., 6:] + x.sum(), False),
    "overlapping": (lambda x: x[..., :8] * x[..., 4:], False),
    "equal slices": (lambda x: x[1] * x[1:2].squeeze(0), False),
    "strided": (lambda x: x[..., ::2] * x[..., 1::2], False),
    "in several dimensions": (lambda x: x[:2, :3] * x[2:, 3:], True),
    "empty slice": (lambda x: x[..., :0].sum() + x[..., 0:6].sum() * x[..., 6:], True),
}


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", SLICES)
def test_gradient_matches_eager_mode(name: str, dtype: torch.dtype) -> None:
    check_gradients(SLICES[name][0], torch.randn(4, 6, 12, dtype=dtype), tolerance=(1e-5, 1e-5) if dtype == torch.float32 else (2e-2, 2e-2))


@pytest.mark.sample(usual=3)
@pytest.mark.parametrize("name", SLICES)
def test_slices_that_do_not_overlap_are_not_summed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, is_joined = SLICES[name]
    joined_chains = internals.sums_of_slices(monkeypatch)
    x = torch.randn(4, 6, 12, requires_grad=True)
    torch.compile(function, backend="dynaxla", options={"cache": ""})(x).sum().backward()
    assert joined_chains
    assert any(joined_chains) is is_joined


def test_concatenation_that_a_sum_broadcasts() -> None:
    check(lambda a, b: torch.cat([a], 0) + torch.cat([torch.zeros(1, 4), b], 0), torch.randn(1, 4), torch.randn(2, 4), calls=1)


def test_random_slices() -> None:
    """Slices and single elements of random dimensions."""
    for seed in range(12):
        generator = random.Random(seed)
        slices = []
        for _ in range(generator.randint(2, 5)):
            dim = generator.choice([0, 1, 1, 1])
            start = generator.randrange(6)
            slices.append((dim, start, generator.randint(start + 1, 6), generator.random() < 0.3))

        def function(x: torch.Tensor, slices: list[tuple[int, int, int, bool]] = slices) -> torch.Tensor:
            total = x.new_zeros(())
            for number, (dim, start, end, is_single) in enumerate(slices):
                part = x.select(dim, start) if is_single else x.narrow(dim, start, end - start)
                total = total + (part.sin() * (number + 1)).sum()
            return total

        check_gradients(function, torch.randn(6, 6, 3, dtype=torch.float64), tolerance=(1e-12, 1e-12))
