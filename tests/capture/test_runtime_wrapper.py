"""Tests that inference graphs are called without AOTAutograd's runtime wrapper unless they need it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from support import internals


@pytest.fixture
def callers(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The names of the functions on the stack of each call of a program."""
    return internals.callers_of_programs(monkeypatch)


def check(function: Callable[..., Any], *args: Any, **settings: Any) -> None:
    """Compares results, mutations, aliases and gradient mode with eager mode."""
    mine, theirs = ([arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args] for _ in range(2))
    compiled = torch.compile(function, backend="dynaxla", fullgraph=True, **settings)
    for _ in range(2):
        results, expected = compiled(*mine), function(*theirs)
        torch.testing.assert_close(results, expected)
        torch.testing.assert_close(mine, theirs)
        shared, wanted_shared = (len(storages(pytree.tree_leaves(items))) for items in (results, expected))
        assert shared == wanted_shared
        for result, wanted in zip(pytree.tree_leaves(results), pytree.tree_leaves(expected), strict=True):
            assert result.requires_grad == wanted.requires_grad
            assert (result.untyped_storage().data_ptr() in storages(mine)) == (wanted.untyped_storage().data_ptr() in storages(theirs))
    assert torch.is_grad_enabled()


def storages(tensors: list[Any]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)}


x, y = torch.randn(3, 4), torch.randn(3, 4)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x + y,
        lambda x, y: (x.sin(), [y.cos() @ x.t()], {"a": x.sum()}),
        lambda x, y: (x + y).view(4, 3),
        lambda x, y: (x, y * 2),  # TorchDynamo returns x itself
        lambda x, y: (z := x + y, z[0], z.t()),
        lambda x, y: x.mul_(2) + y,
        lambda x, y: (y.sub_(x.sum()), x.add_(y))[1] * 2,
    ],
)
def test_graph_is_called_without_the_wrapper(function: Callable[..., Any], callers: list[set[str]]) -> None:
    check(function, x, y)
    assert callers
    assert not any("runtime_wrapper" in names for names in callers)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: (x.t(), x + y),
        lambda x, y: x.mul_(2),
    ],
    ids=["view of an input", "the written input"],
)
def test_graph_is_called_with_the_wrapper(function: Callable[..., Any], callers: list[set[str]]) -> None:
    check(function, x, y)
    assert callers
    assert all("runtime_wrapper" in names for names in callers)


def test_same_tensor_for_two_inputs() -> None:
    compiled = torch.compile(lambda x, y: x * 2 + y, backend="dynaxla", fullgraph=True)
    torch.testing.assert_close(compiled(x, x), x * 3)
    torch.testing.assert_close(compiled(x, y), x * 2 + y)


def test_dynamic_sizes() -> None:
    compiled = torch.compile(lambda x: (x * 2, x.shape[0] + x.sum()), backend="dynaxla", dynamic=True)
    for rows in (3, 5, 7):
        tensor = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(tensor), (tensor * 2, rows + tensor.sum()))


def test_graph_depends_on_gradient_mode(callers: list[set[str]]) -> None:
    net = torch.nn.Linear(4, 4)
    compiled = torch.compile(net, backend="dynaxla", fullgraph=True)
    with torch.no_grad():
        assert not compiled(x).requires_grad
    assert not any("runtime_wrapper" in names for names in callers)
    compiled(x).sum().backward()
    assert net.weight.grad is not None
    with torch.inference_mode():
        assert compiled(x).is_inference()


def test_late_write_increments_the_version_once() -> None:
    mine, theirs = torch.zeros(512, 64), torch.zeros(512, 64)
    index, row = torch.tensor([3]), torch.ones(1, 64)

    def step(cache: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, index, row)
        return row * 2

    compiled = torch.compile(step, backend="dynaxla", fullgraph=True)
    for _ in range(2):
        compiled(mine), step(theirs)
    assert torch.equal(mine, theirs)
    assert mine._version == theirs._version == 2
