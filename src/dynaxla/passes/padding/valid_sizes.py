"""Extents: descriptions of the valid positions of a padded dimension.

A graph runs with sizes rounded up. The valid positions of a dimension are then a product of prefixes. For example, a dimension of size
batch * length has the factors (batch, length), the slower-varying factor first. A position of this dimension has a coordinate for each
factor, and is valid if each coordinate is less than the factor's true value. All coordinates of a factor that is not rounded are valid.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from typing import Any

import sympy
import torch


class NoPaddingRule(Exception):
    """Raised where extents cannot describe the valid positions of a result. The message gives the reason.

    Attributes:
        factorization: the size of an input's dimension, and its factors: with these factors for this dimension, the rewrite may succeed.
            None if no factorization helps.
        equal_sizes: pairs of sizes. The valid positions can be described if the two sizes of each pair are equal.
    """

    def __init__(
        self, reason: str, factorization: tuple[Any, tuple[Any, ...]] | None = None, equal_sizes: Sequence[tuple[Any, Any]] = ()
    ) -> None:
        super().__init__(reason)
        self.factorization, self.equal_sizes = factorization, equal_sizes


@dataclass(frozen=True)
class Extent:
    """The valid positions of a dimension.

    Attributes:
        factors: sizes, as sympy expressions or ints, none of them 1.
        uniform: True if the tensor has the same values at all positions of this dimension, so that any prefix may be taken as valid. A
            uniform dimension has one factor.
    """

    factors: tuple[Any, ...]
    uniform: bool = False

    @staticmethod
    def of(size: Any) -> Extent:
        """Returns the extent of a dimension whose valid positions are one prefix. size: the prefix's length, an expression or an int."""
        return Extent(() if size == 1 else (size,))

    @property
    def non_uniform(self) -> Extent:
        """The same factors without `uniform`: only the true prefix is valid."""
        return Extent(self.factors) if self.uniform else self


# The valid positions of a tensor: an Extent for each dimension.
Extents = tuple[Extent, ...]


def size_of(size: int | torch.SymInt) -> Any:
    """Returns a size as an int if it is known, else as a sympy expression. Raises: NoPaddingRule if it is not an integer."""
    if isinstance(size, (torch.SymFloat, torch.SymBool, float)):
        raise NoPaddingRule("a number computed from sizes is not a whole number")
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    return int(expression) if expression.is_Integer else _canonical(expression)


@functools.lru_cache(maxsize=4096)
def _canonical(size: Any) -> Any:
    """Returns a size in a canonical form, so that equal sizes of different ops are equal expressions.

    - a // d + k, the form of a convolution's size, becomes (a + k * d) // d, the form of a slice with a step.
    - A division without remainder becomes its quotient.
    - The minimum of sizes that differ by constants becomes the least of these sizes.
    - s * t - s, the size of a flattened batch whose rows lack their last element, becomes s * (t - 1).
    """
    function_name = type(size).__name__  # torch's own sympy functions, such as FloorDiv
    if function_name in ("FloorDiv", "CleanDiv"):
        whole = quotient(*size.args)
        return size if whole is None else whole
    if function_name == "Min":
        least = min(size.args, key=lambda item: (item - size.args[0]).as_coeff_Add()[0])
        return least if all((item - least).is_number for item in size.args) else size
    if not size.is_Add:
        return size
    product = sympy.factor_terms(size)
    if product.is_Mul and any(item.is_Symbol for item in product.args):
        return product
    whole, (*divisions,) = size.as_coeff_Add()[0], size.as_coeff_Add()[1].as_ordered_terms()
    if len(divisions) != 1 or type(divisions[0]).__name__ != "FloorDiv" or not whole:
        return size
    dividend, divisor = divisions[0].args
    return type(divisions[0])(dividend + whole * divisor, divisor)


def sizes_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns `size_of` each dimension of a tensor."""
    return tuple(map(size_of, tensor.shape))


def symbols_in(size: Any) -> frozenset[Any]:
    """Returns the symbols in a result of `size_of`."""
    return frozenset() if isinstance(size, int) else frozenset(size.free_symbols)


def symbols_of(number: Any) -> Collection[Any]:
    """Returns the symbols in a symbolic number of torch; none for any other value."""
    return number.node.expr.free_symbols if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)) else ()


def common_extent(extents: Sequence[Extent]) -> Extent:
    """Returns the extent of dimensions that are broadcast together.

    Dimensions of size 1 and uniform dimensions match any extent.

    Raises: NoPaddingRule if the other extents have different factors.
    """
    padded_extents = {extent for extent in extents if extent.factors and not extent.uniform}
    if len(padded_extents) > 1:
        one, *several = sorted((extent.factors for extent in padded_extents), key=len)
        factorization = (one[0], several[-1]) if len(one) == 1 < len(several[-1]) else None
        equal_sizes = tuple(zip(one, several[0], strict=True)) if len(several) == 1 and len(one) == len(several[0]) else ()
        raise NoPaddingRule(
            f"operands are padded along different sizes: {' and '.join(sorted(str(extent.factors) for extent in padded_extents))}",
            factorization,
            equal_sizes,
        )
    return padded_extents.pop() if padded_extents else max(extents, key=lambda extent: bool(extent.factors))


def broadcast(operands: Sequence[Extents]) -> Extents:
    """Returns the extents of the result of a pointwise op on operands with these extents. Raises: NoPaddingRule."""
    rank = max(map(len, operands))
    padded = [(Extent(()),) * (rank - len(extents)) + extents for extents in operands]
    return tuple(common_extent(dims) for dims in zip(*padded, strict=True))


def with_extent(extents: Extents, dim: int, extent: Extent) -> Extents:
    """Returns the extents with another extent for one dimension."""
    return (*extents[:dim], extent, *extents[dim + 1 :])


def reshaped(extents: Extents, sizes: Sequence[Any], symbols: Set[Any]) -> Extents:
    """Returns the extents after a reshape to `sizes`.

    symbols: the rounded symbols.
    Raises: NoPaddingRule if the reshape splits a rounded size.
    """
    remaining = [factor for extent in extents for factor in extent.factors][::-1]
    if 0 in remaining:
        raise NoPaddingRule("a tensor without elements is reshaped")
    found = []
    for size in sizes:
        taken: list[Any] = []
        rest = size
        while rest != 1:
            if not remaining:
                raise NoPaddingRule("a reshape splits a padded dimension")
            factor = remaining.pop()
            if (after := quotient(rest, factor)) is not None:
                taken.append(factor)
                rest = after
            elif (other := quotient(factor, rest)) is not None and symbols.isdisjoint(symbols_in(factor)):
                taken.append(rest)
                remaining.append(other)
                rest = 1
            else:
                factorization = (factor, (rest, other)) if other is not None else None
                raise NoPaddingRule("a reshape splits a padded dimension", factorization)
        found.append(Extent(merge_fixed_factors(taken, symbols)))
    return tuple(found)


def merge_fixed_factors(factors: Sequence[Any], symbols: Set[Any]) -> tuple[Any, ...]:
    """Returns factors in which adjacent factors without rounded symbols are multiplied. symbols: the rounded symbols."""
    found: list[Any] = []
    for factor in factors:
        if found and symbols.isdisjoint([*symbols_in(found[-1]), *symbols_in(factor)]):
            found[-1] = found[-1] * factor
        else:
            found.append(factor)
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def quotient(size: Any, divisor: Any) -> Any:
    """Returns size / divisor if this quotient is an integer for all values of the symbols, else None."""
    if size == divisor:
        return 1
    if isinstance(size, int) and isinstance(divisor, int):
        return size // divisor if size % divisor == 0 else None
    numerator, denominator = sympy.fraction(sympy.together(sympy.cancel(sympy.sympify(size) / divisor)))
    if denominator != 1:
        return None
    return int(numerator) if numerator.is_Integer else numerator


@functools.lru_cache(maxsize=4096)
def is_nondecreasing(size: Any) -> bool:
    """True if a size is known never to decrease when its symbols increase: then its true value is at most its rounded value."""
    if isinstance(size, int) or size.is_Integer or size.is_Symbol:
        return True
    if isinstance(size, sympy.Add):
        return all(map(is_nondecreasing, size.args)) or _sum_is_nondecreasing(size)
    if isinstance(size, sympy.Mul):
        return all(is_nondecreasing(item) and (item.is_nonnegative or (item.is_Add and _has_no_negative_term(item))) for item in size.args)
    if isinstance(size, sympy.Pow):
        return bool(size.exp.is_Integer and size.exp > 0 and size.base.is_nonnegative) and is_nondecreasing(size.base)
    function_name = type(size).__name__  # torch's own sympy functions
    if function_name in ("FloorDiv", "CleanDiv"):
        return is_nondecreasing(size.args[0]) and bool(size.args[1].is_Integer) and bool(size.args[1] > 0)
    return function_name in ("Min", "Max") and all(map(is_nondecreasing, size.args))


def _sum_is_nondecreasing(size: Any) -> bool:
    """True if a sum of one symbol's multiples and quotients never decreases when the symbol increases, such as s - (s + 1) // 2.

    When s increases by one, (k * s + c) // d increases by at most k / d, rounded up.
    """
    if len(size.free_symbols) != 1:
        return False
    (symbol,) = size.free_symbols
    least = sympy.Integer(0)
    for term in size.args:
        factor, rest = term.as_coeff_Mul()
        if rest == symbol:
            least += factor
        elif factor < 0 and type(rest).__name__ in ("FloorDiv", "CleanDiv"):
            steps = sympy.diff(rest.args[0], symbol)
            if not (steps.is_Integer and steps >= 0 and rest.args[1].is_Integer and rest.args[1] > 0):
                return False
            least += factor * sympy.ceiling(steps / rest.args[1])
        elif not is_nondecreasing(term):
            return False
    return bool(least >= 0)


def _has_no_negative_term(size: Any) -> bool:
    """True if no term of a sum can be negative."""
    return all(item.is_nonnegative for item in size.args)
