"""Circular padding, whatever it is written as."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from support.comparisons.compare import assert_equal
from support.forced_implementations import backend_with

SHAPE = (2, 3, 5, 6)


def by_hand(x: torch.Tensor, dim: int, before: int, behind: int) -> torch.Tensor:
    return torch.cat([x.narrow(dim, x.shape[dim] - before, before), x, x[(slice(None),) * (dim % 4) + (slice(behind),)]], dim)


PADDED = {
    "images": lambda x: F.pad(x, (1, 2, 3, 1), mode="circular"),
    "all of them": lambda x: F.pad(x, (6, 6, 0, 5), mode="circular"),
    "volumes": lambda x: F.pad(x[None], (0, 1, 2, 0, 1, 1), mode="circular"),
    "rows first": lambda x: by_hand(by_hand(x, 2, 1, 2), 3, 2, 1),
    "columns first": lambda x: by_hand(by_hand(x, -1, 1, 2), 0, 2, 1),
    "on one side": lambda x: torch.cat([torch.cat([x[..., -2:], x], -1), x.new_zeros(2, 3, 1, 8)], 2),
    "behind": lambda x: (lambda y: torch.cat([y, y[:, :2]], 1) + 1)(x * 2),
    "a part of it is used again": lambda x: (by_hand(by_hand(x, 2, 1, 1), 3, 1, 1), by_hand(x, 2, 1, 1).sum(0)),
}
NOT_PADDED = {
    "other places": lambda x: torch.cat([x[..., :2], x, x[..., :2]], 3),
    "in the middle": lambda x: torch.cat([x[..., -3:-1], x, x[..., 1:2]], 3),
    "steps": lambda x: torch.cat([x, x[:, :, :4:2]], 2),
    "along another dimension": lambda x: torch.cat([x, x[:, :1], x[:, :, :5]], 1),
    "others": lambda x: torch.cat([(x + 1)[..., -1:], x], 3),
    "it comes first": lambda x: torch.cat([x, x[:, :1], x[:, :1]], 1),
    "one": lambda x: torch.cat([x], 1),
    "none": lambda x: torch.cat([x.new_zeros(0), x[:0], x.new_zeros(0)], 3),
}


def compiled(function: Callable[..., Any], implementation: str) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend_with({"circular padding": implementation}), fullgraph=True)


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("implementation", ["torch", "xla"])
@pytest.mark.parametrize("name", PADDED)
def test_circular_padding(name: str, implementation: str, kernels: list[int]) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool):
        x = torch.randn(SHAPE).to(dtype) if dtype != torch.bool else torch.randn(SHAPE) > 0
        assert_equal(compiled(PADDED[name], implementation)(x), PADDED[name](x))
    assert (kernels != []) is (implementation == "torch")


@pytest.mark.parametrize("name", NOT_PADDED)
def test_what_only_looks_like_it(name: str, kernels: list[int]) -> None:
    x = torch.randn(SHAPE)
    assert_equal(compiled(NOT_PADDED[name], "torch")(x), NOT_PADDED[name](x))
    assert kernels == []


def test_the_implementation_is_chosen_by_size(kernels: list[int]) -> None:
    images = PADDED["images"]
    for shape, count in ((SHAPE, 0), ((2, 8, 128, 128), 1)):
        x = torch.randn(shape)
        torch._dynamo.reset()
        assert_equal(torch.compile(images, backend="dynaxla")(x), images(x))
        assert len(kernels) == count
    order = torch.randn(2, 8, 128, 128).to(memory_format=torch.channels_last)
    assert_equal(torch.compile(images, backend="dynaxla")(order), images(order))
    assert len(kernels) == 1, "rows of channels are copied at once"
