"""What a program is, and the programs by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
PROGRAMS: dict[str, Callable[[Compile], list[Any]]] = {}


def program(function: Callable[[Compile], list[Any]]) -> Callable[[Compile], list[Any]]:
    """Note a program: given what compiles a step, it calls that a few times, and gives what can be compared."""
    PROGRAMS[function.__name__] = function
    return function


def plain(values: Iterable[Any]) -> list[Any]:
    """Tensors among them as lists."""
    return [value.detach().tolist() if isinstance(value, torch.Tensor) else value for value in values]
