"""Gradients of tensors that are read in slices: eager mode's, and made without sums where slices have no place in common."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from support import internals
from support.comparisons.gradients import check_gradients


def loop(x: torch.Tensor) -> torch.Tensor:
    state = torch.zeros(x.shape[-1], dtype=x.dtype)
    for step in range(x.shape[0]):
        state = torch.tanh(state * 0.5 + x[step].sum(0))
    return state


# How a tensor of shape (4, 6, 12) is read, and whether its gradient is made without a sum.
READ: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "halves": (lambda x: F.silu(x[..., :6]) * x[..., 6:], True),
    "chunks, twice": (lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], True),
    "three, unequal": (lambda x: x[..., :2].sum(-1, keepdim=True) * x[..., 2:7].sum(-1, keepdim=True) * x[..., 7:], True),
    "in another order": (lambda x: x[:, 4:] * x[:, 2:4] * x[:, :2], True),
    "gaps": (lambda x: x[..., 1:4] * x[..., 8:11], True),
    "one of each": (lambda x: x[0] * x[1] + x[2] * x[-1], True),
    "a loop": (loop, True),
    "expanded": (lambda x: x[0].sum() * x[1:].mean(), True),
    "read once more": (lambda x: x[..., :6] * x[..., 6:] + x.sum(), False),
    "places in common": (lambda x: x[..., :8] * x[..., 4:], False),
    "the same one": (lambda x: x[1] * x[1:2].squeeze(0), False),
    "every other": (lambda x: x[..., ::2] * x[..., 1::2], False),
    "of several dimensions": (lambda x: x[:2, :3] * x[2:, 3:], True),
    "nothing": (lambda x: x[..., :0].sum() + x[..., 0:6].sum() * x[..., 6:], True),
}


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", READ)
def test_as_in_eager_mode(name: str, dtype: torch.dtype) -> None:
    check_gradients(READ[name][0], torch.randn(4, 6, 12, dtype=dtype), tolerance=(1e-5, 1e-5) if dtype == torch.float32 else (2e-2, 2e-2))


@pytest.mark.sample(usual=3)
@pytest.mark.parametrize("name", READ)
def test_which_are_sums(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, joined = READ[name]
    found = internals.sums_of_slices(monkeypatch)
    x = torch.randn(4, 6, 12, requires_grad=True)
    torch.compile(function, backend="dynaxla", options={"cache": ""})(x).sum().backward()
    assert found
    assert any(found) is joined


def test_random_reads() -> None:
    """Slices and single places of random dimensions; some of their sums are read by others, too."""
    for seed in range(12):
        draw = random.Random(seed)
        reads = []
        for _ in range(draw.randint(2, 5)):
            dim = draw.choice([0, 1, 1, 1])
            start = draw.randrange(6)
            reads.append((dim, start, draw.randint(start + 1, 6), draw.random() < 0.3))

        def function(x: torch.Tensor, reads: list[tuple[int, int, int, bool]] = reads) -> torch.Tensor:
            total = x.new_zeros(())
            for number, (dim, start, end, single) in enumerate(reads):
                part = x.select(dim, start) if single else x.narrow(dim, start, end - start)
                total = total + (part.sin() * (number + 1)).sum()
            return total

        check_gradients(function, torch.randn(6, 6, 3, dtype=torch.float64), tolerance=(1e-12, 1e-12))
