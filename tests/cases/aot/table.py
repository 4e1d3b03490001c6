"""The table of cases."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Make = Callable[[], tuple[Any, ...]]
Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Case:
    """A function and its arguments.

    Attributes:
        make: Returns new arguments for each call: tensors, modules, nested containers of these.
        dynamic: As for torch.compile.
        around: A context for the calls and their backward passes.
        config: Settings of torch._dynamo.
        order: The number of times that the function is differentiated.
        random: True if the function draws random numbers. Then values are not compared.
    """

    name: str
    function: Callable[..., Any]
    make: Make
    dynamic: bool | None = None
    fullgraph: bool = True
    around: Context = contextlib.nullcontext
    config: dict[str, Any] = field(default_factory=dict)
    order: int = 1
    random: bool = False


CASES: dict[str, Case] = {}


def case(make: Make, name: str = "", **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds the decorated function to the table. A function can be added several times, with other arguments and a name for each."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        module = function.__module__.rpartition(".")[2]
        full_name = f"{module}: {function.__name__.replace('_', ' ').strip()}{f', {name}' if name else ''}"
        assert full_name not in CASES, f"two cases are called {full_name!r}"
        CASES[full_name] = Case(full_name, function, make, **settings)
        return function

    return add


def t(*shape: int, grad: bool = False) -> torch.Tensor:
    """Returns random numbers; with grad, a leaf."""
    return torch.randn(shape, requires_grad=grad)


def result(*shape: int) -> torch.Tensor:
    """Returns a tensor that requires grad and may be written to: it is computed from a leaf, which is its attribute `leaf`."""
    leaf = torch.randn(*shape, requires_grad=True)
    computed = leaf * 1.5
    computed.leaf = leaf
    return computed
