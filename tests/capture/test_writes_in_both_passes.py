"""Writes of an `autograd.Function` in its forward and its backward pass: to inputs, to views of them, and to what the function keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynaxla.errors import UnsupportedTensor
from dynaxla.observe import coverage

# TorchDynamo makes an instance where it traces such a function, and behind a graph break looks at results' gradients (torch 2.15).
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

Tensor = torch.Tensor
# What a pass does to the tensor `b`; in the backward pass, with the gradient, in the forward pass with a sum of the input.
Write = Callable[[Tensor, Tensor], Any]

FORWARD: dict[str, Write] = {
    "nothing": lambda b, _: None,
    "a number": lambda b, _: b.add_(1),
    "what is computed": lambda b, value: b.add_(value),
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
    "its own": lambda b, _: b.copy_(b.flip(0)),
}


def function_of(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Callable[..., Any] = type("Function", (torch.autograd.Function,), members).apply  # type: ignore[attr-defined]
    return function


def writer(first: Write, second: Write) -> Callable[[Tensor, Tensor], Tensor]:
    def forward(ctx: Any, x: Tensor, b: Tensor) -> Tensor:
        first(b, x.sum())
        ctx.b = b
        return x * 2

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        second(ctx.b, grad.sum())
        return grad * 2, None

    apply = function_of(forward, backward)
    return lambda x, b: apply(x, b).sin()


def keeper(kept: Callable[[Tensor], Tensor], result: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """A function that keeps a tensor of its own, and changes it in the backward pass."""

    def forward(ctx: Any, x: Tensor, b: Tensor) -> Tensor:
        y = x * 2
        ctx.whole, ctx.kept = y, kept(y)
        return result(y)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.kept.mul_(2)
        return grad * ctx.whole, None

    return function_of(forward, backward)


def then_plainly(x: Tensor, b: Tensor) -> Tensor:
    result = writer(FORWARD["nothing"], BACKWARD["a number"])(x, b)
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
    first = writer(FORWARD["a number"], FORWARD["nothing"])
    return writer(FORWARD["nothing"], BACKWARD["a number"])(first(x, b), b)


def scratch(x: Tensor, b: Tensor) -> Tensor:
    """Writes to tensors that its backward pass has made."""

    def forward(ctx: Any, x: Tensor, b: Tensor) -> Tensor:
        b.add_(1)
        ctx.save_for_backward(x.clone().mul_(2))
        return x * 2

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        made = torch.zeros_like(kept).add_(kept)
        made[0] = 3
        return grad.clone().mul_(made), None

    return function_of(forward, backward)(x, b).sin()


OTHERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a plain write behind it": then_plainly,
    "a hook": with_hook,
    "two functions": two_functions,
    "a value of its own": keeper(lambda y: y, torch.sin),
    "its result": keeper(lambda y: y, lambda y: y),
    "a view of its own value": keeper(lambda y: y[1:], torch.sin),
    "a constant": keeper(torch.ones_like, torch.sin),
    "a view of the input is returned": lambda x, b: (writer(FORWARD["nothing"], BACKWARD["a number"])(x, b), b[1:]),
    "a view of the input is returned, the gradient": lambda x, b: (writer(FORWARD["nothing"], BACKWARD["the gradient"])(x, b), b[1:]),
}
COMPILED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "scratch": scratch,
    "the input is returned": lambda x, b: (writer(FORWARD["nothing"], BACKWARD["the gradient"])(x, b), b),
    **{f"{name} behind nothing": writer(FORWARD["nothing"], write) for name, write in BACKWARD.items()},
}


def history(function: Callable[[Tensor, Tensor], Any]) -> list[tuple[Tensor, ...]]:
    """All values after each pass."""
    x, b = torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.tensor([1.0, 2.0, 3.0])
    found: list[tuple[Tensor, ...]] = []

    def note(*results: Tensor) -> None:
        found.append(tuple(item.detach().clone() for item in (x, b, *results, torch.zeros(()) if x.grad is None else x.grad)))

    results = function(x, b)
    results = results if isinstance(results, tuple) else (results,)
    note(*results)
    for _ in range(2):
        results[0].sum().backward(retain_graph=True)
        note(*results)
    again = function(x, b)
    note(*results, *(again if isinstance(again, tuple) else (again,)))
    results[0].sum().backward()
    note(*results)
    return found


def _fallbacks() -> int:
    return coverage.snapshot().get("a graph", {}).get("fallback", 0)


@pytest.mark.sample(usual=12)
@pytest.mark.parametrize("second", BACKWARD)
@pytest.mark.parametrize("first", [name for name in FORWARD if name != "nothing"])
def test_writes_in_both_passes(first: str, second: str) -> None:
    function = writer(FORWARD[first], BACKWARD[second])
    torch.testing.assert_close(history(torch.compile(function, backend="dynaxla")), history(function))


@pytest.mark.sample(usual=6)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", OTHERS)
def test_other_writes_in_the_backward_pass(name: str, dynamic: bool | None) -> None:
    torch.testing.assert_close(history(torch.compile(OTHERS[name], backend="dynaxla", dynamic=dynamic)), history(OTHERS[name]))


@pytest.mark.sample(usual=3)
@pytest.mark.parametrize("name", COMPILED)
def test_writes_of_one_pass_are_compiled(name: str) -> None:
    before = _fallbacks()
    torch.testing.assert_close(history(torch.compile(COMPILED[name], backend="dynaxla")), history(COMPILED[name]))
    assert _fallbacks() == before


def test_without_the_fallback_it_is_refused() -> None:
    x, b = torch.ones(3, requires_grad=True), torch.ones(3)
    compiled = torch.compile(writer(FORWARD["a number"], BACKWARD["a number"]), backend="dynaxla", options={"fallback": "error"})
    with pytest.raises(
        UnsupportedTensor, match=r"its backward pass writes with aten.add_.Tensor to memory that its forward pass created or wrote to"
    ):
        compiled(x, b)
    assert b.equal(torch.ones(3))
