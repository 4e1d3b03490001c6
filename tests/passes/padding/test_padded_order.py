"""Sorting, turning and taking apart dimensions of rounded sizes, with NaN and numbers out of range in the padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_equal
from rounded_sizes import SIZES, assert_one_program, compiled, counts, features, poisoned

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
    lambda x, y, n, t: torch.stack(y.aminmax(dim=1)),
    lambda x, y, n, t: torch.stack((n + 3).aminmax()),
    lambda x, y, n, t: y.cummax(1).indices,
    lambda x, y, n, t: y.cummin(0).values,
    lambda x, y, n, t: y.logcumsumexp(1),
    lambda x, y, n, t: torch.bucketize(y, torch.arange(3.0)),
    lambda x, y, n, t: torch.searchsorted(torch.arange(3.0), y, right=True),
    lambda x, y, n, t: y.median(1).values,
    lambda x, y, n, t: x.median(1, keepdim=True).indices,
    lambda x, y, n, t: y.masked_fill(n == 3, NAN).median(0).indices,
    lambda x, y, n, t: torch.stack([x.median(), y.masked_fill(n == 3, NAN).median()]),
    lambda x, y, n, t: n.median() + n.median(1).values,
    lambda x, y, n, t: y.masked_fill(n > 2, NAN).nanmedian(1).values,
    lambda x, y, n, t: y.masked_fill(n > 2, NAN).nanmedian() + y.masked_fill(n > 3, torch.inf).nanmedian(0).values,
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
    lambda x, y, n, t: y.unsqueeze(1).expand(-1, x.shape[1], -1).diagonal(0, 1, 2).cumsum(1),
    lambda x, y, n, t: (y.unsqueeze(1) + y.unsqueeze(2)).diagonal(2, 1, 2).sum(1),
    lambda x, y, n, t: torch.diag_embed(y).sum(2),
    lambda x, y, n, t: (y.unsqueeze(1) + y.unsqueeze(2)).diagonal_scatter(y[:, 1:], 1, 1, 2).cumsum(1),
    lambda x, y, n, t: (y.t() @ y).diagonal_scatter(y[0, :-2] * 0, -2).cumsum(0),
    lambda x, y, n, t: torch.diag_embed(x, -2, 0, 2).cumsum(0),
    lambda x, y, n, t: y.diag_embed(1, 2, 0).amax(0),
    lambda x, y, n, t: torch.stack([y.trace(), (y.t() @ y).trace()]),
    lambda x, y, n, t: n.trace(),
    lambda x, y, n, t: y.rot90().cumsum(0),
    lambda x, y, n, t: x.rot90(2, (1, 2)).cumsum(1),
    lambda x, y, n, t: x.rot90(-1, (2, 1)).cumsum(2),
    lambda x, y, n, t: x.rot90(3, (0, 1)) - x.rot90(-1, (0, 1)),
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


def test_gradients_of_what_lies_on_diagonals() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        square = y.t() @ y
        ends = torch.diag_embed(y[:, 1:], 1).exp().sum() + (square.diagonal(-1).exp() * y[0, 1:]).sum()
        return ends + x.rot90(1, (0, 1)).cumsum(0).exp().sum() + (x.median(1).values * y[:, :4]).sum() + y.median()

    run, before = compiled(function), counts()
    with poisoned():
        for sizes in SIZES[:2]:
            leaves = [item.double().requires_grad_() for item in features(*sizes)[:2]]
            found, expected = (torch.autograd.grad(each(*leaves), leaves) for each in (run, function))
            for mine, theirs in zip(found, expected, strict=True):
                assert_equal(mine, theirs)
    assert counts() == (before[0] + 2, before[1])


@pytest.mark.parametrize("median", [torch.median, torch.nanmedian])
def test_a_median_of_nothing(median: Callable[..., Any]) -> None:
    run, nothing = compiled(median), torch.empty(0, 5)
    assert_equal(run(nothing), median(nothing))


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
