"""A pass over a traced program that makes bfloat16 faster on the CPU, by fewer and faster roundings.

XLA:CPU computes each op on bfloat16 in float32 and rounds the result. With 512-bit vectors, XLA's rounding takes three times as long as the
same rounding written as bit arithmetic. With shorter vectors, XLA's rounding takes half as long as the bit arithmetic. Some roundings are
redundant, such as the rounding of the maximum of rounded values. The pass keeps bfloat16 results as float32 arrays, and rounds such an
array only if a consumer's result depends on the rounding. All values are the same to the last bit.
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
    """Returns the same function for one platform, with fewer roundings. The returned function must be traced, for example by `jax.jit`."""
    return _RoundingEvaluation(platform).transform(program)


class _Float32Bfloat16:
    """A bfloat16 value in a float32 array.

    Attributes:
        exact: a float32 array. Its elements, rounded to bfloat16, are the value.
        is_rounded: True if the elements of `exact` are bfloat16 numbers.
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
        return lax.bitcast_convert_type(lax.bitwise_and(_rounded_bits(self.exact), _full_uint32(self.exact, 0xFFFF0000)), np.float32)

    def narrow(self) -> Array:
        """Returns the value in bfloat16."""
        if not machine.has_wide_vectors():
            # The rounding must be explicit: if a consumer converts back to float32, XLA drops both conversions.
            return lax.convert_element_type(self.rounded(), jnp.bfloat16)
        bits = lax.bitcast_convert_type(self.exact, np.uint32) if self.is_rounded else _rounded_bits(self.exact)
        high = lax.convert_element_type(lax.shift_right_logical(bits, _full_uint32(self.exact, 16)), np.uint16)
        return lax.bitcast_convert_type(high, jnp.bfloat16)


def _rounded_bits(x: Array) -> Array:
    """Returns the bits of a float32 x, of which the upper 16 bits are rounded to nearest even. The lower 16 bits are undefined.

    The bits of x plus 0x7FFF plus the lowest of the upper bits carry into the upper bits exactly if x is rounded up. A fixed NaN replaces
    each NaN, since the carry could turn a NaN into an infinity.
    """
    bits = lax.bitcast_convert_type(x, np.uint32)
    even = lax.bitwise_and(lax.shift_right_logical(bits, _full_uint32(x, 16)), _full_uint32(x, 1))
    return lax.select(lax.ne(x, x), _full_uint32(x, 0x7FC00000), lax.add(bits, lax.add(even, _full_uint32(x, 0x7FFF))))


def _full_uint32(x: Array, value: int) -> Array:
    return lax.full(x.shape, value, np.uint32)


class _RoundingEvaluation(Evaluation[Any]):
    """The pass. A value is an array or, for bfloat16, possibly a _Float32Bfloat16."""

    title = "bfloat16_rounding"

    def wrap(self, array: Any) -> Any:
        return array

    def unwrap(self, value: Any) -> Any:
        return value.narrow() if isinstance(value, _Float32Bfloat16) else value

    def in_memory(self, value: Any) -> Any:
        return in_memory(self.unwrap(value))

    def apply(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        results = self._results(equation, operands)
        # A result with several uses becomes a bfloat16 array: XLA writes it to memory, where bfloat16 takes half the space.
        return [self.unwrap(result) if uses > 1 else result for result, uses in zip(results, self.uses, strict=True)]

    def _results(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        name, out = equation.primitive.name, equation.outvars[0].aval
        are_bfloat16 = [var.aval.dtype == jnp.bfloat16 for var in equation.invars if hasattr(var.aval, "dtype")]
        if len(are_bfloat16) == len(operands) and len(getattr(out, "shape", ())):
            if name == "convert_element_type":
                return [_convert(equation, operands[0], are_bfloat16[0])]
            if name in _ELEMENT_MOVING_OPS and isinstance(operands[0], _Float32Bfloat16):
                return [_Float32Bfloat16(bind(equation, [operands[0].exact])[0], operands[0].is_rounded)]
            if any(are_bfloat16) and name in _SELECTING_OPS:
                is_rounded = not any(isinstance(x, _Float32Bfloat16) and not x.is_rounded for x in operands)
                return [_Float32Bfloat16(_bind_as_float32(equation, operands, are_bfloat16, _exact), is_rounded)]
            if any(are_bfloat16) and name in _ROUNDING_OPS:
                return [_Float32Bfloat16(_bind_as_float32(equation, operands, are_bfloat16, _rounded))]
            if any(are_bfloat16) and name in _COMPARISONS:
                return bind(equation, [_rounded(x) for x in operands])
        return bind(equation, [self.unwrap(x) for x in operands])


def _bind_as_float32(equation: Any, operands: Sequence[Any], are_bfloat16: Sequence[bool], to_float32: Callable[[Any], Any]) -> Any:
    return bind(equation, [to_float32(x) if is_bfloat16 else x for x, is_bfloat16 in zip(operands, are_bfloat16, strict=True)])[0]


def _convert(equation: Any, x: Any, is_bfloat16: bool) -> Any:
    dtype = equation.params["new_dtype"]
    if is_bfloat16 and dtype == np.float32:
        return _rounded(x)
    if dtype == jnp.bfloat16 and equation.invars[0].aval.dtype == np.float32:
        return _Float32Bfloat16(x)
    return bind(equation, [x.narrow() if isinstance(x, _Float32Bfloat16) else x])[0]


def _exact(value: Any) -> Any:
    return value.exact if isinstance(value, _Float32Bfloat16) else lax.convert_element_type(value, np.float32)


def _rounded(value: Any) -> Any:
    return value.rounded() if isinstance(value, _Float32Bfloat16) else lax.convert_element_type(value, np.float32)


# Ops whose result is one of the operands, up to sign. Rounding commutes with these ops.
_SELECTING_OPS = frozenset(["abs", "clamp", "copy", "max", "min", "neg", "select_n"])
# Ops whose result must be rounded.
_ROUNDING_OPS = frozenset(["add", "div", "mul", "square", "sub"])
_COMPARISONS = frozenset(["eq", "ge", "gt", "le", "lt", "ne"])
# Ops that only move elements.
_ELEMENT_MOVING_OPS = frozenset(["broadcast_in_dim", "reshape", "squeeze", "transpose"])
