"""Tests of writes of an `autograd.Function` in its forward and backward pass: to inputs, to views of inputs, and to saved tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynaxla.errors import UnsupportedTensor
from dynaxla.observe import coverage

# TorchDynamo instantiates such a function when tracing it, and reads `.grad` of results after a graph break (torch 2.15).
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

Tensor = torch.Tensor
# A pass's write to the tensor `b`. The second argument is the sum of the input (forward pass) or of the gradient (backward pass).
Write = Callable[[Tensor, Tensor], Any]

FORWARD: dict[str, Write] = {
    "nothing": lambda b, _: None,
    "a number": lambda b, _: b.add_(1),
    "the sum": lambda b, value: b.add_(value),
    "several": lambda b, _: (b.add_(1), b.mul_(2)),
    "a view": lambda b, _: b[:2].add_(1),
    "a counter": lambda b, _: b[0].add_(1),
}
BACKWARD: dict[str, Write] = {
    "a number": lambda b, _: b.add_(10),
    "a constant": lambda b, _: b.fill_(7),
    "the gradient": lambda b, value: b.add_(value),
    "a view": lambda b, _: b[1:].mul_(10),
    "a view, the gradient": lambda b, value: b[1:].add_(value),
    "its own values": lambda b, _: b.copy_(b.flip(0)),
}


def function_of(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Callable[..., Any] = type("Function", (torch.autograd.Function,), members).apply  # type: ignore[attr-defined]
    return function


def function_with_writes(first: Write, second: Write) -> Callable[[Tensor, Tensor], Tensor]:
    def forward(ctx: Any, x: Tensor, b: Tensor) -> Tensor:
        first(b, x.sum())
        ctx.b = b
        return x * 2

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        second(ctx.b, grad.sum())
        return grad * 2, None

    apply = function_of(forward, backward)
    return lambda x, b: apply(x, b).sin()


def function_with_saved_tensor(saved: Callable[[Tensor], Tensor], result: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a function that saves a tensor of its own, and changes it in the backward pass."""

    def forward(ctx: Any, x: Tensor, b: Tensor) -> Tensor:
        y = x * 2
        ctx.whole, ctx.kept = y, saved(y)
        return result(y)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.kept.mul_(2)
        return grad * ctx.whole, None

    return function_of(forward, backward)


def followed_by_plain_write(x: Tensor, b: Tensor) -> Tensor:
    result = function_with_writes(FORWARD["nothing"], BACKWARD["a number"])(x, b)
    b.mul_(2)
    return result


def with_hook(x: Tensor, b: Tensor) -> Tensor:
    y = x * 2

    def hook(grad: Tensor) -> Tensor:
        b.add_(1)
        return grad * 2

    y.register_hook(hook)
    b.mul_(3)
    return y.sin()


def two_functions(x: Tensor, b: Tensor) -> Tensor:
    first = function_with_writes(FORWARD["a number"], FORWARD["nothing"])
    return function_with_writes(FORWARD["nothing"], BACKWARD["a number"])(first(x, b), b)


def scratch(x: Tensor, b: Tensor) -> Tensor:
    """A function that writes to tensors that its backward pass has created."""

    def forward(ctx: Any, x: Tensor, b: Tensor) -> Tensor:
        b.add_(1)
        ctx.save_for_backward(x.clone().mul_(2))
        return x * 2

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (saved,) = ctx.saved_tensors
        values = torch.zeros_like(saved).add_(saved)
        values[0] = 3
        return grad.clone().mul_(values), None

    return function_of(forward, backward)(x, b).sin()


OTHERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a plain write after the function": followed_by_plain_write,
    "a hook": with_hook,
    "two functions": two_functions,
    "a value of its own": function_with_saved_tensor(lambda y: y, torch.sin),
    "its result": function_with_saved_tensor(lambda y: y, lambda y: y),
    "a view of its own value": function_with_saved_tensor(lambda y: y[1:], torch.sin),
    "a constant": function_with_saved_tensor(torch.ones_like, torch.sin),
    "a view of the input is returned": lambda x, b: (function_with_writes(FORWARD["nothing"], BACKWARD["a number"])(x, b), b[1:]),
    "a view of the input is returned, the gradient": lambda x, b: (
        function_with_writes(FORWARD["nothing"], BACKWARD["the gradient"])(x, b),
        b[1:],
    ),
}
COMPILED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "scratch": scratch,
    "the input is returned": lambda x, b: (function_with_writes(FORWARD["nothing"], BACKWARD["the gradient"])(x, b), b),
    **{f"{name}, backward only": function_with_writes(FORWARD["nothing"], write) for name, write in BACKWARD.items()},
}


def history(function: Callable[[Tensor, Tensor], Any]) -> list[tuple[Tensor, ...]]:
    """Returns copies of all values after each pass."""
    x, b = torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.tensor([1.0, 2.0, 3.0])
    values: list[tuple[Tensor, ...]] = []

    def record(*results: Tensor) -> None:
        values.append(tuple(item.detach().clone() for item in (x, b, *results, torch.zeros(()) if x.grad is None else x.grad)))

    results = function(x, b)
    results = results if isinstance(results, tuple) else (results,)
    record(*results)
    for _ in range(2):
        results[0].sum().backward(retain_graph=True)
        record(*results)
    second_results = function(x, b)
    record(*results, *(second_results if isinstance(second_results, tuple) else (second_results,)))
    results[0].sum().backward()
    record(*results)
    return values


def _fallbacks() -> int:
    return coverage.snapshot().get("a graph", {}).get("fallback", 0)


@pytest.mark.sample(usual=12)
@pytest.mark.parametrize("second", BACKWARD)
@pytest.mark.parametrize("first", [name for name in FORWARD if name != "nothing"])
def test_writes_in_both_passes(first: str, second: str) -> None:
    function = function_with_writes(FORWARD[first], BACKWARD[second])
    torch.testing.assert_close(history(torch.compile(function, backend="dynaxla")), history(function))


@pytest.mark.sample(usual=6)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", OTHERS)
def test_other_writes_in_the_backward_pass(name: str, dynamic: bool | None) -> None:
    torch.testing.assert_close(history(torch.compile(OTHERS[name], backend="dynaxla", dynamic=dynamic)), history(OTHERS[name]))


@pytest.mark.sample(usual=3)
@pytest.mark.parametrize("name", COMPILED)
def test_writes_of_one_pass_need_no_fallback(name: str) -> None:
    before = _fallbacks()
    torch.testing.assert_close(history(torch.compile(COMPILED[name], backend="dynaxla")), history(COMPILED[name]))
    assert _fallbacks() == before


def test_writes_in_both_passes_without_fallback_are_refused() -> None:
    x, b = torch.ones(3, requires_grad=True), torch.ones(3)
    compiled = torch.compile(
        function_with_writes(FORWARD["a number"], BACKWARD["a number"]), backend="dynaxla", options={"fallback": "error"}
    )
    with pytest.raises(
        UnsupportedTensor, match=r"its backward pass writes with aten.add_.Tensor to memory that its forward pass created or wrote to"
    ):
        compiled(x, b)
    assert b.equal(torch.ones(3))
