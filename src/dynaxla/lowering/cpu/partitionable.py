"""What XLA's partitioner can cut into parts: a traced program with its general branches instead of those for a single CPU.

Lowerings choose by `lax.platform_dependent` what one CPU computes fastest: sums folded into vector registers, exponentials of arithmetic on
bits, values written to memory by calls. The partitioner sees slices and barriers in these, and copies whole arrays from device to device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .evaluation import Evaluation, bind

# No platform's name, so that each choice is the general one.
_NONE = "none"


class _General(Evaluation[Any]):
    def lift(self, array: Any) -> Any:
        return array

    def lower(self, value: Any) -> Any:
        return value

    def in_memory(self, value: Any) -> Any:
        return value

    def apply(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        return bind(equation, operands)

    def _apply(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        name = str(equation.source_info.name_stack)
        with jax.named_scope(name) if name else contextlib.nullcontext():  # it has the user's line
            return super()._apply(equation, operands)


def partitionable(program: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of arrays, of its general branches. It must be traced, by `jax.jit` for example."""
    return _General(_NONE).of(program)
