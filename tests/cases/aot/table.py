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
    """A function, and its arguments.

    Attributes: name; function; make (new arguments for every call: tensors, modules, nested containers of them); dynamic (as for
    torch.compile); fullgraph; around (a context for the calls and their backward passes); config (of torch._dynamo); order (how many
    times it is differentiated); random (whether values are drawn, so that only what does not depend on them is compared).
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
    """Enter the decorated function in the table. It may be entered several times, with other arguments and a name for each."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        module = function.__module__.rpartition(".")[2]
        full = f"{module}: {function.__name__.replace('_', ' ').strip()}{f', {name}' if name else ''}"
        assert full not in CASES, f"two cases are called {full!r}"
        CASES[full] = Case(full, function, make, **settings)
        return function

    return enter


def t(*shape: int, grad: bool = False) -> torch.Tensor:
    """Random numbers; with grad, a leaf."""
    return torch.randn(shape, requires_grad=grad)


def result(*shape: int) -> torch.Tensor:
    """A tensor that requires grad and may be written to: computed from a leaf, which the judge finds at it."""
    leaf = torch.randn(*shape, requires_grad=True)
    computed = leaf * 1.5
    computed.leaf = leaf
    return computed
