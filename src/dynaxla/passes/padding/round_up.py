"""Rounds sizes up, so that one executable serves many sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ...lowering.size_functions import size_function


def rounded(size: int) -> int:
    """Returns the least number >= size that is a power of two or halfway between two powers of two."""
    if size <= 2:
        return size
    power = 1 << (size - 1).bit_length()
    return power // 4 * 3 if size <= power // 4 * 3 else power


class Rounding:
    """Rounds the values of a graph's symbols as far as the graph's guards allow: the rounded values must satisfy them, too.

    Args:
        environment: the shape environment of the symbols.
        symbols: the symbols to round.
    """

    def __init__(self, environment: ShapeEnv, symbols: Collection[Any]) -> None:
        self._environment, self._symbols = environment, frozenset(symbols)
        self._found: tuple[Any, list[Callable[[Mapping[Any, int]], int]]] | None = None

    def __call__(self, values: Mapping[Any, int]) -> dict[Any, int] | None:
        """Returns the values of all symbols of the graph, with the rounded ones rounded up; None if the guards do not allow that."""
        tops = {symbol: self._top(symbol) for symbol in self._symbols}
        found = {}
        for symbol, value in values.items():
            if symbol not in self._symbols:
                found[symbol] = value
                continue
            top = tops[symbol]
            found[symbol] = rounded(value) if top is None else max(value, min(rounded(value), top))
        return found if all(holds(found) for holds in self._assumed()) else None

    def _top(self, symbol: Any) -> int | None:
        """Returns the greatest value that a symbol may have; None if there is no limit."""
        known = self._environment.var_to_range.get(symbol)
        return int(known.upper) if known is not None and known.upper.is_Integer else None

    def _assumed(self) -> list[Callable[[Mapping[Any, int]], int]]:
        """Returns the guards that depend on rounded symbols, as functions of the symbols' values. All others hold as before."""
        environment = self._environment
        state = len(environment.guards), len(environment.replacements)
        if self._found is None or self._found[0] != state:
            expressions = [environment.replace(guard.expr) for guard in environment.guards]
            assumed = dict.fromkeys(item for item in expressions if not self._symbols.isdisjoint(item.free_symbols))
            self._found = state, [size_function(item) for item in assumed]
        return self._found[1]
