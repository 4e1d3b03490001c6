"""Extents: descriptions of the valid positions of a padded dimension.

A graph runs with sizes rounded up. The valid positions of a dimension are then a product of prefixes. A dimension of batch * length has the
factors (batch, length), the slower first, and a position is valid if each of its coordinates is less than the true value of its factor.
All positions of a factor that is not rounded are valid.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from typing import Any

import sympy
import torch


class NoPaddingRule(Exception):
    """Raised where extents cannot describe the valid positions of a result. The message says why.

    Attributes:
        product: a size of an input, with the factors as which the caller may try again; None if that would not help.
        same: pairs of sizes. The result can be described if the two sizes of each pair are equal.
    """

    def __init__(self, why: str, product: tuple[Any, tuple[Any, ...]] | None = None, same: Sequence[tuple[Any, Any]] = ()) -> None:
        super().__init__(why)
        self.product, self.same = product, same


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
    def of(size: Any, uniform: bool = False) -> Extent:
        """Returns the extent of a dimension that is one prefix. size: an expression or a number."""
        return Extent(() if size == 1 else (size,), uniform)

    @property
    def resolved(self) -> Extent:
        return Extent(self.factors) if self.uniform else self


Extents = tuple[Extent, ...]


def size_of(size: int | torch.SymInt) -> Any:
    """Returns a size as an int if it is known, else as a sympy expression. Raises: NoPaddingRule if it is not an integer."""
    if isinstance(size, (torch.SymFloat, torch.SymBool, float)):
        raise NoPaddingRule("a number computed from sizes is not a whole number")
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    return int(expression) if expression.is_Integer else _settled(expression)


@functools.lru_cache(maxsize=4096)
def _settled(size: Any) -> Any:
    """Returns an expression in a canonical form.

    - a // d + k, as convolutions write it, becomes (a + k * d) // d, as slices with a step write it.
    - A division without remainder becomes its quotient.
    - The minimum of sizes that differ by constants becomes the least of them.
    - s * t - s, the size of a flattened batch without last elements, becomes s * (t - 1).
    """
    kind = type(size).__name__  # torch's own sympy functions
    if kind in ("FloorDiv", "CleanDiv"):
        whole = quotient(*size.args)
        return size if whole is None else whole
    if kind == "Min":
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
    return tuple(map(size_of, tensor.shape))


def symbols_in(size: Any) -> frozenset[Any]:
    return frozenset() if isinstance(size, int) else frozenset(size.free_symbols)


def symbols_of(number: Any) -> Collection[Any]:
    """Returns the symbols in a number of a graph; none if it is a plain number."""
    return number.node.expr.free_symbols if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)) else ()


def joined(extents: Sequence[Extent]) -> Extent:
    """Returns the extent of dimensions that are broadcast together.

    Raises: NoPaddingRule if the extents have different factors.
    """
    told = {extent for extent in extents if extent.factors and not extent.uniform}
    if len(told) > 1:
        one, *several = sorted((extent.factors for extent in told), key=len)
        product = (one[0], several[-1]) if len(one) == 1 < len(several[-1]) else None
        same = tuple(zip(one, *several, strict=True)) if [len(one)] == list(map(len, several)) else ()
        raise NoPaddingRule(
            f"operands are padded along different sizes: {' and '.join(sorted(str(extent.factors) for extent in told))}", product, same
        )
    return told.pop() if told else max(extents, key=lambda extent: bool(extent.factors))


def broadcast(operands: Sequence[Extents]) -> Extents:
    """Returns the extents of the result of a pointwise op on operands with these extents. Raises: NoPaddingRule."""
    rank = max(map(len, operands))
    padded = [(Extent(()),) * (rank - len(extents)) + extents for extents in operands]
    return tuple(joined(dims) for dims in zip(*padded, strict=True))


def replaced(extents: Extents, dim: int, extent: Extent) -> Extents:
    return (*extents[:dim], extent, *extents[dim + 1 :])


def reshaped(extents: Extents, sizes: Sequence[Any], symbols: Set[Any]) -> Extents:
    """Returns the extents after a reshape to `sizes`.

    symbols: the rounded symbols.
    Raises: NoPaddingRule if the reshape splits a rounded size.
    """
    left = [factor for extent in extents for factor in extent.factors][::-1]
    if 0 in left:
        raise NoPaddingRule("a tensor without elements is reshaped")
    found = []
    for size in sizes:
        taken: list[Any] = []
        rest = size
        while rest != 1:
            if not left:
                raise NoPaddingRule("a reshape splits a padded dimension")
            factor = left.pop()
            if (after := quotient(rest, factor)) is not None:
                taken.append(factor)
                rest = after
            elif (other := quotient(factor, rest)) is not None and symbols.isdisjoint(symbols_in(factor)):
                taken.append(rest)
                left.append(other)
                rest = 1
            else:
                product = (factor, (rest, other)) if other is not None else None
                raise NoPaddingRule("a reshape splits a padded dimension", product)
        found.append(Extent(merged(taken, symbols)))
    return tuple(found)


def merged(factors: Sequence[Any], symbols: Set[Any]) -> tuple[Any, ...]:
    """Returns factors with adjacent ones multiplied together where neither depends on a rounded symbol. symbols: the rounded symbols."""
    found: list[Any] = []
    for factor in factors:
        if found and symbols.isdisjoint([*symbols_in(found[-1]), *symbols_in(factor)]):
            found[-1] = found[-1] * factor
        else:
            found.append(factor)
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def quotient(size: Any, divisor: Any) -> Any:
    """Returns size / divisor if that is an integer for all values of the symbols, else None."""
    if size == divisor:
        return 1
    if isinstance(size, int) and isinstance(divisor, int):
        return size // divisor if size % divisor == 0 else None
    numerator, denominator = sympy.fraction(sympy.together(sympy.cancel(sympy.sympify(size) / divisor)))
    if denominator != 1:
        return None
    return int(numerator) if numerator.is_Integer else numerator


@functools.lru_cache(maxsize=4096)
def grows(size: Any) -> bool:
    """True if a size is known never to decrease when its symbols increase."""
    if isinstance(size, int) or size.is_Integer or size.is_Symbol:
        return True
    if isinstance(size, sympy.Add):
        return all(map(grows, size.args)) or _rest_grows(size)
    if isinstance(size, sympy.Mul):
        return all(grows(item) and (item.is_nonnegative or (item.is_Add and _is_positive(item))) for item in size.args)
    if isinstance(size, sympy.Pow):
        return bool(size.exp.is_Integer and size.exp > 0 and size.base.is_nonnegative) and grows(size.base)
    kind = type(size).__name__  # torch's own sympy functions
    if kind in ("FloorDiv", "CleanDiv"):
        return grows(size.args[0]) and bool(size.args[1].is_Integer) and bool(size.args[1] > 0)
    return kind in ("Min", "Max") and all(map(grows, size.args))


def _rest_grows(size: Any) -> bool:
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
        elif not grows(term):
            return False
    return bool(least >= 0)


def _is_positive(size: Any) -> bool:
    return all(item.is_nonnegative for item in size.args)
