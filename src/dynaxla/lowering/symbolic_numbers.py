"""Numbers that depend on symbolic sizes. An exported program computes them at run time.

A symbolic size is a JAX symbolic dimension. Lowerings may use it in shapes, and `promotion.number` converts it to an array. A float that is
computed from symbolic sizes is a `SymbolicFloat`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from jax import core, export, lax
from jax.errors import InconclusiveDimensionOperation


class SymbolicFloat:
    """A Python float that depends on symbolic sizes.

    For `isinstance`, an instance is a float. Comparisons and conversions raise InconclusiveDimensionOperation.

    Attributes:
        array: The value, float64[].
    """

    __array_ufunc__ = None  # makes NumPy leave arithmetic with this class to the methods below

    def __init__(self, array: jax.Array) -> None:
        self.array = array

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return float

    def _inconclusive(self, *_: Any) -> Any:
        raise InconclusiveDimensionOperation("a number that depends on symbolic sizes is needed while the program is compiled")

    __float__ = __int__ = __index__ = __complex__ = __bool__ = __hash__ = __round__ = __trunc__ = __floor__ = __ceil__ = _inconclusive
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _inconclusive
    __repr__ = object.__repr__


def _arithmetic(function: Callable[..., jax.Array], reflected: bool) -> Callable[..., Any]:
    """Returns a method of SymbolicFloat that applies `function`; with `reflected`, to the operands in reverse order."""

    def method(self: SymbolicFloat, *others: Any) -> Any:
        operands = [self.array, *map(_float64, others)]
        return SymbolicFloat(function(*(reversed(operands) if reflected else operands)))

    return method


for _name, _function in {"add": lax.add, "sub": lax.sub, "mul": lax.mul, "truediv": lax.div, "pow": lax.pow}.items():
    setattr(SymbolicFloat, f"__{_name}__", _arithmetic(_function, False))
    setattr(SymbolicFloat, f"__r{_name}__", _arithmetic(_function, True))
for _name, _function in {"neg": lax.neg, "abs": lax.abs, "pos": lambda x: x}.items():
    setattr(SymbolicFloat, f"__{_name}__", _arithmetic(_function, False))


def is_symbolic(value: Any) -> bool:
    """True if a number depends on symbolic sizes."""
    return type(value) is SymbolicFloat or export.is_symbolic_dim(value)


def as_array(value: Any) -> jax.Array:
    """Returns a symbolic number as a float64 or an int64 array of rank 0."""
    return value.array if type(value) is SymbolicFloat else jax.numpy.asarray(value)


def _float64(value: Any) -> jax.Array:
    return lax.convert_element_type(as_array(value), np.dtype(np.float64))


def _sym_float(value: Any) -> Any:
    return SymbolicFloat(_float64(value)) if is_symbolic(value) else torch.sym_float(value)


def _sym_sqrt(value: Any) -> Any:
    return SymbolicFloat(lax.sqrt(_float64(value))) if is_symbolic(value) else torch._sym_sqrt(value)


def _true_division(left: Any, right: Any) -> Any:
    return SymbolicFloat(lax.div(_float64(left), _float64(right))) if is_symbolic(left) or is_symbolic(right) else left / right


def _sym_max(left: Any, right: Any) -> Any:
    return core.max_dim(left, right) if _has_symbolic_size(left, right) else torch.sym_max(left, right)


def _sym_min(left: Any, right: Any) -> Any:
    return core.min_dim(left, right) if _has_symbolic_size(left, right) else torch.sym_min(left, right)


def _has_symbolic_size(*values: Any) -> bool:
    return any(map(export.is_symbolic_dim, values))


# By function on sizes in graphs: a replacement that accepts symbolic sizes.
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.sym_float: _sym_float,
    torch._sym_sqrt: _sym_sqrt,
    torch.sym_max: _sym_max,
    torch.sym_min: _sym_min,
    operator.truediv: _true_division,
}
