"""Sorting, turning and taking apart dimensions of rounded sizes, with NaN and numbers out of range in the padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.comparisons.compare import assert_equal
from support.comparisons.rounded_sizes import assert_one_program, features

pytestmark = [pytest.mark.usefixtures("quick_xla"), pytest.mark.quick]

NAN = float("nan")

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

TURNS: list[Callable[..., Any]] = [
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


def own_values(functions: list[Callable[..., Any]]) -> list[Callable[..., Any]]:
    """The functions between values of their own, so that no result is a view of an input."""
    return [lambda *given, own=function: own(*(item * 1 for item in given)) + 0 for function in functions]


def test_what_does_not_count_is_behind_what_does() -> None:
    assert_one_program(own_values(ORDERS), features)


def test_turns_are_around_the_true_end() -> None:
    assert_one_program(own_values(TURNS), features)


def test_views_of_one_memory_of_which_none_has_dynamic_sizes() -> None:
    """AOTAutograd makes them of the whole, at places that are numbers of the graph."""

    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory = memory = torch.arange(16)
            self.register_buffer("part", memory.as_strided((2, 1), (1, 1), 2))
            self.register_buffer("whole", memory.as_strided((4, 2, 2), (4, 2, 1), 0))

        def forward(self, x: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.part.index_add_(-1, torch.tensor([0]), added)
            return x.index_fill(1, torch.tensor([2]), -1), self.whole.index_select(-3, torch.tensor([2, 3, 3, 2]))

    mine, theirs = Shared(), Shared()
    call = torch.compile(mine, backend="dynaxla", fullgraph=True, dynamic=True, options={"sizes": "buckets"})
    for _ in range(2):
        x = torch.arange(6).reshape(2, 3)
        results, expected = [run(x, of.memory.as_strided((2, 1), (1, 1), 0)) for run, of in ((call, mine), (theirs, theirs))]
        assert_equal(results, expected)
        assert torch.equal(mine.whole, theirs.whole)
