"""Backends of torch.compile, each wrong in one way, registered by name for a test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.backends import registry

Make = Callable[[Any, Sequence[Any]], Callable[..., Any]]


@contextmanager
def planted(**engines: Make) -> Iterator[None]:
    """Registers backends of torch.compile in this context."""
    for name, make in engines.items():
        torch._dynamo.register_backend(make, name=name)
    try:
        yield
    finally:
        for name in engines:
            del registry._BACKENDS[name], registry._COMPILER_FNS[name]


def _wrapped(change: Callable[[list[Any], tuple[Any, ...]], Any]) -> Make:
    """Returns a backend that replaces results by `change(results, arguments)`.

    It is much faster than eager mode, because the graph lacks the function `slow`.
    """

    def make(module: Any, _: Sequence[Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            return change(list(module(*args)), args)

        return call

    return make


def always(results: list[Any], _: Any) -> list[Any]:
    return [item * 1.01 for item in results]


def other_sizes(first: int) -> Callable[[list[Any], Any], list[Any]]:
    return lambda results, _: results if results[0].shape[0] == first else [item + 1 for item in results]


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 1.01


def in_backward(results: list[Any], _: Any) -> list[Any]:
    return [_Scaled.apply(item) for item in results]


def in_mutation(results: list[Any], args: tuple[Any, ...]) -> list[Any]:
    with torch.no_grad():
        for item in args:
            if isinstance(item, torch.Tensor) and item._version:
                item.add_(1e-2)
    return results


def writes_inputs(results: list[Any], args: tuple[Any, ...]) -> list[Any]:
    with torch.no_grad():
        args[0].view(-1)[0] += 1
    return results


def no_view(results: list[Any], _: Any) -> list[Any]:
    return [torch.empty_strided(item.shape, item.stride()).copy_(item) for item in results]


def transposed(results: list[Any], _: Any) -> list[Any]:
    return [item.t().contiguous().t() for item in results]


def wider(results: list[Any], _: Any) -> list[Any]:
    return [item.double() for item in results]


def fails(results: list[Any], _: Any) -> list[Any]:
    raise RuntimeError("no such luck")


def slow(results: list[Any], _: Any) -> list[Any]:
    time.sleep(0.002)
    return results


def cannot_compile(module: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    raise NotImplementedError("nothing of the kind")


ENGINES: dict[str, Make] = {
    **{f"planted_{change.__name__}": _wrapped(change) for change in (always, in_backward, in_mutation, writes_inputs, no_view, transposed)},
    **{f"planted_{change.__name__}": _wrapped(change) for change in (wider, fails, slow)},
    "planted_other_sizes": _wrapped(other_sizes(4)),
    "planted_right": _wrapped(lambda results, _: results),
    "planted_cannot_compile": cannot_compile,
}
