"""A pass over a traced program that makes bfloat16 faster on the CPU: fewer roundings, and faster ones.

XLA:CPU computes each op on bfloat16 in float32 and rounds its result. With 512-bit vectors its rounding takes three times as long as the
same rounding written as bit arithmetic, with shorter vectors half as long. Some roundings are redundant, such as that of the maximum of
rounded values. The pass keeps bfloat16 results as float32 arrays, and rounds them only where a consumer's result depends on it. All values
are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from ...lowering.cpu.materialize import in_memory
from ...runtime import machine
from .evaluation import Evaluation, bind


def round_rarely(program: Callable[..., Any], platform: str) -> Callable[..., Any]:
    """Returns the same function for one platform, with fewer roundings. It must be traced, by `jax.jit` for example."""
    return _RoundingEvaluation(platform).of(program)


class _Half:
    """A bfloat16 value that is held in float32.

    Attributes:
        exact: float32 array; rounded to bfloat16, it is the value.
        is_rounded: True if `exact` is rounded already.
    """

    def __init__(self, exact: Array, is_rounded: bool = False) -> None:
        self.exact = exact
        self.is_rounded = is_rounded

    def rounded(self) -> Array:
        """Returns the value in float32, rounded to bfloat16's precision."""
        if self.is_rounded:
            return self.exact
        if not machine.has_wide_vectors():
            return lax.reduce_precision(self.exact, exponent_bits=8, mantissa_bits=7)
        return lax.bitcast_convert_type(lax.bitwise_and(_rounded_bits(self.exact), _full(self.exact, 0xFFFF0000)), np.float32)

    def narrow(self) -> Array:
        """Returns the value in bfloat16."""
        if not machine.has_wide_vectors():
            # Without the explicit rounding, XLA drops the conversion where a consumer converts the result back to float32.
            return lax.convert_element_type(self.rounded(), jnp.bfloat16)
        bits = lax.bitcast_convert_type(self.exact, np.uint32) if self.is_rounded else _rounded_bits(self.exact)
        high = lax.convert_element_type(lax.shift_right_logical(bits, _full(self.exact, 16)), np.uint16)
        return lax.bitcast_convert_type(high, jnp.bfloat16)


def _rounded_bits(x: Array) -> Array:
    """Returns the bits of x, float32, with the upper 16 bits rounded to nearest even. The lower 16 bits are undefined.

    Adding 0x7FFF plus the lowest kept bit carries into the upper half exactly where rounding goes up. NaNs are replaced by a fixed NaN,
    since the carry could make them infinite.
    """
    bits = lax.bitcast_convert_type(x, np.uint32)
    even = lax.bitwise_and(lax.shift_right_logical(bits, _full(x, 16)), _full(x, 1))
    return lax.select(lax.ne(x, x), _full(x, 0x7FC00000), lax.add(bits, lax.add(even, _full(x, 0x7FFF))))


def _full(x: Array, value: int) -> Array:
    return lax.full(x.shape, value, np.uint32)


class _RoundingEvaluation(Evaluation[Any]):
    """The pass. Its values are arrays or _Half."""

    title = "bfloat16_rounding"

    def lift(self, array: Any) -> Any:
        return array

    def lower(self, value: Any) -> Any:
        return value.narrow() if isinstance(value, _Half) else value

    def in_memory(self, value: Any) -> Any:
        return in_memory(self.lower(value))

    def apply(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        results = self._results(equation, operands)
        # An array with several uses is, or should be, in memory, where bfloat16 takes half the space.
        return [self.lower(result) if uses > 1 else result for result, uses in zip(results, self.uses, strict=True)]

    def _results(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        name, out = equation.primitive.name, equation.outvars[0].aval
        halves = [var.aval.dtype == jnp.bfloat16 for var in equation.invars if hasattr(var.aval, "dtype")]
        if len(halves) == len(operands) and len(getattr(out, "shape", ())):
            if name == "convert_element_type":
                return [_converted(equation, operands[0], halves[0])]
            if name in _MOVES and isinstance(operands[0], _Half):
                return [_Half(bind(equation, [operands[0].exact])[0], operands[0].is_rounded)]
            if any(halves) and name in _MONOTONE:
                is_rounded = not any(isinstance(x, _Half) and not x.is_rounded for x in operands)
                return [_Half(_bound(equation, operands, halves, _exact), is_rounded)]
            if any(halves) and name in _ARITHMETIC:
                return [_Half(_bound(equation, operands, halves, _rounded))]
            if any(halves) and name in _COMPARISONS:
                return bind(equation, [_rounded(x) for x in operands])
        return bind(equation, [self.lower(x) for x in operands])


def _bound(equation: Any, operands: Sequence[Any], halves: Sequence[bool], wide: Callable[[Any], Any]) -> Any:
    return bind(equation, [wide(x) if half else x for x, half in zip(operands, halves, strict=True)])[0]


def _converted(equation: Any, x: Any, half: bool) -> Any:
    dtype = equation.params["new_dtype"]
    if half and dtype == np.float32:
        return _rounded(x)
    if dtype == jnp.bfloat16 and equation.invars[0].aval.dtype == np.float32:
        return _Half(x)
    return bind(equation, [x.narrow() if isinstance(x, _Half) else x])[0]


def _exact(value: Any) -> Any:
    return value.exact if isinstance(value, _Half) else lax.convert_element_type(value, np.float32)


def _rounded(value: Any) -> Any:
    return value.rounded() if isinstance(value, _Half) else lax.convert_element_type(value, np.float32)


# Ops whose result is one of their operands, up to sign: rounding commutes with them.
_MONOTONE = frozenset(["abs", "clamp", "copy", "max", "min", "neg", "select_n"])
_ARITHMETIC = frozenset(["add", "div", "mul", "square", "sub"])
_COMPARISONS = frozenset(["eq", "ge", "gt", "le", "lt", "ne"])
# Ops that only move elements.
_MOVES = frozenset(["broadcast_in_dim", "reshape", "squeeze", "transpose"])
