"""Sorting, turning and taking apart dimensions of rounded sizes, with NaN and numbers out of range in the padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rounded_sizes import assert_one_program, features

pytestmark = pytest.mark.usefixtures("quick_xla")

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
]

TURNS: list[Callable[..., Any]] = [
    lambda x, y, n, t: y.flip(1),
    lambda x, y, n, t: x.flip(0, 1, 2).cumsum(1),
    lambda x, y, n, t: n.roll(1, 1),
    lambda x, y, n, t: x.roll((-2, 1, 17), (0, 2, 1)),
    lambda x, y, n, t: y.fliplr() - y.roll(-1, 1),
    lambda x, y, n, t: y.chunk(2, 1)[0].sum(1),
    lambda x, y, n, t: y.chunk(2, 1)[1].sum(1),
    lambda x, y, n, t: y.unsqueeze(1).expand(-1, x.shape[1], -1).diagonal(0, 1, 2).cumsum(1),
    lambda x, y, n, t: (y.unsqueeze(1) + y.unsqueeze(2)).diagonal(2, 1, 2).sum(1),
]


def own_values(functions: list[Callable[..., Any]]) -> list[Callable[..., Any]]:
    """The functions between values of their own, so that no result is a view of an input."""
    return [lambda *given, own=function: own(*(item * 1 for item in given)) + 0 for function in functions]


def test_what_does_not_count_is_behind_what_does() -> None:
    assert_one_program(own_values(ORDERS), features)


def test_turns_are_around_the_true_end() -> None:
    assert_one_program(own_values(TURNS), features)
