"""Circular padding, as `pad` or as concatenated slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from support.comparisons.compare import assert_equal
from support.forced_implementations import backend_with

SHAPE = (2, 3, 5, 6)


def pad_by_slices(x: torch.Tensor, dim: int, before: int, after: int) -> torch.Tensor:
    return torch.cat([x.narrow(dim, x.shape[dim] - before, before), x, x[(slice(None),) * (dim % 4) + (slice(after),)]], dim)


PADDED = {
    "images": lambda x: F.pad(x, (1, 2, 3, 1), mode="circular"),
    "as wide as the tensor": lambda x: F.pad(x, (6, 6, 0, 5), mode="circular"),
    "three dimensions": lambda x: F.pad(x[None], (0, 1, 2, 0, 1, 1), mode="circular"),
    "rows first": lambda x: pad_by_slices(pad_by_slices(x, 2, 1, 2), 3, 2, 1),
    "columns first": lambda x: pad_by_slices(pad_by_slices(x, -1, 1, 2), 0, 2, 1),
    "on one side": lambda x: torch.cat([torch.cat([x[..., -2:], x], -1), x.new_zeros(2, 3, 1, 8)], 2),
    "after": lambda x: (lambda y: torch.cat([y, y[:, :2]], 1) + 1)(x * 2),
    "intermediate result is used again": lambda x: (pad_by_slices(pad_by_slices(x, 2, 1, 1), 3, 1, 1), pad_by_slices(x, 2, 1, 1).sum(0)),
}
NOT_PADDED = {
    "other slices": lambda x: torch.cat([x[..., :2], x, x[..., :2]], 3),
    "slices from the middle": lambda x: torch.cat([x[..., -3:-1], x, x[..., 1:2]], 3),
    "steps": lambda x: torch.cat([x, x[:, :, :4:2]], 2),
    "along another dimension": lambda x: torch.cat([x, x[:, :1], x[:, :, :5]], 1),
    "slices of another tensor": lambda x: torch.cat([(x + 1)[..., -1:], x], 3),
    "the tensor itself comes first": lambda x: torch.cat([x, x[:, :1], x[:, :1]], 1),
    "one operand": lambda x: torch.cat([x], 1),
    "empty operands": lambda x: torch.cat([x.new_zeros(0), x[:0], x.new_zeros(0)], 3),
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
def test_other_concatenations_are_not_circular_padding(name: str, kernels: list[int]) -> None:
    x = torch.randn(SHAPE)
    assert_equal(compiled(NOT_PADDED[name], "torch")(x), NOT_PADDED[name](x))
    assert kernels == []


def test_implementation_depends_on_the_size(kernels: list[int]) -> None:
    images = PADDED["images"]
    for shape, count in ((SHAPE, 0), ((2, 8, 128, 128), 1)):
        x = torch.randn(shape)
        torch._dynamo.reset()
        assert_equal(torch.compile(images, backend="dynaxla")(x), images(x))
        assert len(kernels) == count
    x = torch.randn(2, 8, 128, 128).to(memory_format=torch.channels_last)
    assert_equal(torch.compile(images, backend="dynaxla")(x), images(x))
    assert len(kernels) == 1, "XLA copies whole rows of channels"
