"""The list of programs, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
PROGRAMS: dict[str, Callable[[Compile], list[Any]]] = {}


def program(function: Callable[[Compile], list[Any]]) -> Callable[[Compile], list[Any]]:
    """Adds a program: it takes a function that compiles a step, calls the step a few times, and returns comparable values."""
    PROGRAMS[function.__name__] = function
    return function


def plain(values: Iterable[Any]) -> list[Any]:
    """Returns the values, with tensors as lists."""
    return [value.detach().tolist() if isinstance(value, torch.Tensor) else value for value in values]
