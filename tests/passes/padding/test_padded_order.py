"""Tests of sorts, flips, rolls, chunks and as_strided with rounded sizes. The padding contains NaN and invalid indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.comparisons.compare import assert_equal
from support.comparisons.rounded_sizes import assert_one_program, features

pytestmark = [pytest.mark.usefixtures("quick_xla"), pytest.mark.quick]

NAN = float("nan")

# The arguments of each function are the results of `features`: x and y are floats, with the shapes (batch, length, 4) and (batch, length).
# n contains integers below 7, with the shape (batch, length). t is a table of floats, with the shape (7, 4).
ORDERS: list[Callable[..., Any]] = [
    lambda x, y, n, t: y.sort(1).values,
    lambda x, y, n, t: torch.sort(n, dim=1, stable=True).indices,
    lambda x, y, n, t: torch.argsort(n, dim=1, descending=True, stable=True),
    lambda x, y, n, t: torch.argsort(y.masked_fill(n == 3, NAN), dim=0, stable=True),
    lambda x, y, n, t: torch.sort(y.masked_fill(n == 3, -torch.inf), stable=True, dim=1, descending=True).indices,
    lambda x, y, n, t: (y - 9).topk(3, 1).indices,
    lambda x, y, n, t: y.topk(2, 1, largest=False).values,
    lambda x, y, n, t: torch.sort(n > 3, dim=1, stable=True).indices,
    lambda x, y, n, t: y.kthvalue(4, 1).values,
    lambda x, y, n, t: y.cummax(1).indices,
    lambda x, y, n, t: y.cummin(0).values,
    lambda x, y, n, t: y.logcumsumexp(1),
]

FLIPS_ROLLS_AND_VIEWS: list[Callable[..., Any]] = [
    lambda x, y, n, t: y.flip(1),
    lambda x, y, n, t: x.flip(0, 1, 2).cumsum(1),
    lambda x, y, n, t: n.roll(1, 1),
    lambda x, y, n, t: y[1].roll(3),
    lambda x, y, n, t: x.roll((-2, 1, 17), (0, 2, 1)),
    lambda x, y, n, t: y.fliplr() - y.roll(-1, 1),
    lambda x, y, n, t: y.chunk(2, 1)[0].sum(1),
    lambda x, y, n, t: y.chunk(2, 1)[1].sum(1),
    lambda x, y, n, t: x.as_strided((x.shape[1] - 2, 1, x.shape[0]), (x.shape[2], 7, x.shape[1] * x.shape[2])).cumsum(0),
    lambda x, y, n, t: y.t().contiguous().as_strided((y.shape[0], y.shape[1]), (1, y.shape[0])).cumsum(1),
    lambda x, y, n, t: y.as_strided((y.shape[0] - 1, y.shape[1] - 3), (y.shape[1], 1), y.shape[1] + 3).cumsum(1),
    lambda x, y, n, t: y.as_strided((y.shape[1],), (1,), (y.shape[0] - 1) * y.shape[1]).cumsum(0),
    lambda x, y, n, t: x.as_strided((2, x.shape[0]), (1, x.shape[1] * x.shape[2]), x.shape[1] * x.shape[2] - 2).cumsum(1),
    lambda x, y, n, t: t[:1, :2].repeat(y.shape[0], y.shape[1]).cumsum(0),
    lambda x, y, n, t: y[:, None].repeat(1, y.shape[0], 1).cumsum(1),
]


def without_views(functions: list[Callable[..., Any]]) -> list[Callable[..., Any]]:
    """Returns functions that copy their arguments and their result, so that no result is a view of an input."""
    return [lambda *given, function=function: function(*(item * 1 for item in given)) + 0 for function in functions]


def test_padding_sorts_after_the_valid_elements() -> None:
    assert_one_program(without_views(ORDERS), features)


def test_flips_rolls_and_strided_views_use_the_true_sizes() -> None:
    assert_one_program(without_views(FLIPS_ROLLS_AND_VIEWS), features)


def test_static_views_of_shared_memory_are_rebuilt_at_constant_offsets() -> None:
    """AOTAutograd rebuilds each view from the whole storage with as_strided, at an offset that is a constant of the graph."""

    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory = memory = torch.arange(16)
            self.register_buffer("part", memory.as_strided((2, 1), (1, 1), 2))
            self.register_buffer("whole", memory.as_strided((4, 2, 2), (4, 2, 1), 0))

        def forward(self, x: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.part.index_add_(-1, torch.tensor([0]), added)
            return x.index_fill(1, torch.tensor([2]), -1), self.whole.index_select(-3, torch.tensor([2, 3, 3, 2]))

    tested, reference = Shared(), Shared()
    compiled = torch.compile(tested, backend="dynaxla", fullgraph=True, dynamic=True, options={"sizes": "buckets"})
    for _ in range(2):
        x = torch.arange(6).reshape(2, 3)
        results, expected = [
            function(x, module.memory.as_strided((2, 1), (1, 1), 0)) for function, module in ((compiled, tested), (reference, reference))
        ]
        assert_equal(results, expected)
        assert torch.equal(tested.whole, reference.whole)
