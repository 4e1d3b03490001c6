"""Tests of buffers/lost_writes.py: torch runs graphs with writes to views that AOTAutograd gets wrong; all others are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from dynaxla.errors import UnsupportedTensor
from dynaxla.observe import coverage

Make = Callable[[], torch.Tensor]


def line() -> torch.Tensor:
    return torch.arange(1.0, 13.0)


def table() -> torch.Tensor:
    return torch.arange(12.0).reshape(3, 4)


def transposed_table() -> torch.Tensor:
    return table().t()


def gapped() -> torch.Tensor:
    return torch.arange(24.0)[::2]


def rows(x: torch.Tensor) -> torch.Tensor:
    """An index for `scatter_`."""
    return torch.zeros(1, x.shape[1], dtype=torch.int64, device=x.device)


def strided_before(x: torch.Tensor) -> torch.Tensor:
    view = x.as_strided((2,), (2,))
    x.add_(1)
    return view * 2


def scattered(x: torch.Tensor) -> torch.Tensor:
    view = x.as_strided((4,), (1,))
    x.scatter_(0, rows(x), 5.0)
    return view * 2


def foreach(x: torch.Tensor) -> None:
    torch._foreach_add_([x.sin(), x.unfold(0, 2, 3)], 1)


# Functions that torch runs: functionalization would change their results.
LOST: dict[str, tuple[Make, Callable[[torch.Tensor], Any]]] = {
    "gaps": (line, lambda x: x.unfold(0, 2, 3).mul_(2)),
    "a remainder": (line, lambda x: x.unfold(0, 5, 5).fill_(9)),
    "overlapping windows": (line, lambda x: x.unfold(0, 2, 1).fill_(9)),
    "one window, which torch refuses": (line, lambda x: x.unfold(0, 12, 5).mul_(2)),
    "a view of windows": (table, lambda x: x.unfold(1, 1, 2)[1:].transpose(0, 1).add_(3)),
    "windows of a view": (transposed_table, lambda x: x[1:].unfold(0, 1, 2).zero_()),
    "by index": (line, lambda x: x.unfold(0, 2, 3).__setitem__(1, 7.0)),
    "several": (line, foreach),
    "repeated": (line, lambda x: x[:1].expand(3).fill_(2)),
    "a repeated row": (line, lambda x: x.expand(3, 12)[0].add_(2)),
    "broadcast": (line, lambda x: torch.broadcast_to(x, (2, 12)).fill_(-1)),
    "overlapping as_strided": (line, lambda x: x.as_strided((3, 2), (1, 1)).fill_(9)),
    "as_strided before a write": (gapped, strided_before),
    "as_strided after a write": (gapped, lambda x: x.add_(1).as_strided((3,), (2,)) * 2),
    "as_strided of a transposed tensor": (transposed_table, scattered),
    "a computed tensor": (line, lambda x: (y := x * 2, y.unfold(0, 2, 3).zero_())[0]),
}

# Functions that are compiled.
COMPILED: dict[str, tuple[Make, Callable[[torch.Tensor], Any]]] = {
    "tiles": (line, lambda x: x.unfold(0, 3, 3).add_(torch.arange(3.0))),
    "one window": (line, lambda x: x.unfold(0, 12, 15).mul_(2)),
    "gaps are read": (line, lambda x: (x.add_(1), x.unfold(0, 2, 3) * 2)[1]),
    "gaps of a written tensor": (line, lambda x: (y := x.unfold(0, 2, 3), x.add_(1), y * 2)[2]),
    "repeated and read": (line, lambda x: (y := x.expand(3, 12), x.add_(1), y.sin())[2]),
    "expanded to itself": (table, lambda x: x.expand(3, -1).add_(1)),
    "a new dimension": (table, lambda x: x.expand(1, 3, 4)[0, 1].add_(1)),
    "a copy of a repeated tensor": (line, lambda x: x.expand(2, 12).clone().add_(1)),
    "as_strided": (line, lambda x: x.as_strided((3, 2), (4, 1), 1).add_(2)),
    "as_strided, and a write": (table, lambda x: (y := x.as_strided((2,), (3,)), x.add_(1), y * 2)[2]),
    "a diagonal": (table, lambda x: x.diagonal(1).fill_(7)),
}


def _fallbacks() -> int:
    return coverage.snapshot().get("a graph", {}).get("fallback", 0)


def _check(make: Make, function: Callable[[torch.Tensor], Any], **options: Any) -> None:
    mine, theirs = make(), make()
    found, expected = torch.compile(function, backend="dynaxla", fullgraph=True, **options)(mine), function(theirs)
    torch.testing.assert_close((found, mine), (expected, theirs), rtol=0, atol=0)


@pytest.mark.parametrize("name", LOST)
def test_torch_runs_lost_writes(name: str) -> None:
    before = _fallbacks()
    _check(*LOST[name])
    assert _fallbacks() == before + 1


@pytest.mark.parametrize("name", COMPILED)
def test_other_writes_are_compiled(name: str) -> None:
    before = _fallbacks()
    _check(*COMPILED[name])
    assert _fallbacks() == before


@pytest.mark.parametrize("inference", [False, True])
def test_without_gradients(inference: bool) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        before = _fallbacks()
        _check(line, lambda x: x.expand_as(torch.empty(3, 12))[0].add_(1))
        _check(*COMPILED["tiles"])
        assert _fallbacks() == before + 1


def test_gradients() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.unfold(0, 2, 3).mul_(x[0])
        return (y * y).sum()

    gradients = []
    for run in (function, torch.compile(function, backend="dynaxla", fullgraph=True)):
        x = line().requires_grad_()
        run(x).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


def test_gradients_of_windows_are_compiled() -> None:
    before = _fallbacks()
    for size, step in ((2, 1), (2, 3)):
        x = line().requires_grad_()
        torch.compile(lambda x: (x.unfold(0, size, step) ** 2).sum(), backend="dynaxla", fullgraph=True)(x).backward()  # noqa: B023
        expected = line().requires_grad_()
        (expected.unfold(0, size, step) ** 2).sum().backward()
        torch.testing.assert_close(x.grad, expected.grad)
    assert _fallbacks() == before


def test_dynamic_sizes() -> None:
    before = _fallbacks()
    for make, function, lost in ((*LOST["gaps"], 1), (*LOST["repeated"], 1), (*COMPILED["tiles"], 0), (*COMPILED["as_strided"], 0)):
        _check(make, function, dynamic=True)
        before += lost
        assert _fallbacks() == before


def test_fallback_error_refuses_lost_writes() -> None:
    x = line()
    compiled = torch.compile(LOST["gaps"][1], backend="dynaxla", options={"fallback": "error"})
    with pytest.raises(UnsupportedTensor, match=r"mul_.Tensor to a view that aten.unfold made with windows of size 2 at every 3 positions"):
        compiled(x)
    assert x.equal(line())


def test_comparing_symbolic_sizes_adds_nothing_to_the_graph() -> None:
    """The strides of four dimensions are products of sizes that no op of the program computes."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        view = x.as_strided((4, 4), (1, 2), 91)
        x.fmod_(2)
        return x, view

    _check(lambda: torch.arange(500.0).reshape(5, 5, 4, 5), function, dynamic=True)


@pytest.mark.parametrize("function", [F.silu, F.mish])
def test_ops_with_kernels_are_not_decomposed(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """In the backward pass, eager mode rounds only the result. Each op of a decomposition would be rounded."""
    x, grad = (torch.randn(1000, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    (expected,) = torch.autograd.grad(function(x), x, grad)
    (found,) = torch.autograd.grad(torch.compile(function, backend="dynaxla")(x), x, grad)
    assert (found != expected).float().mean() < 0.01
