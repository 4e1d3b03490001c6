"""Rounds sizes up, so that one executable runs calls of many sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ...lowering.size_functions import size_function


def round_up_size(size: int) -> int:
    """Returns the smallest number >= size that is a power of two or the mean of two consecutive powers of two: 1, 2, 3, 4, 6, 8, 12, ..."""
    if size <= 2:
        return size
    power = 1 << (size - 1).bit_length()
    return power // 4 * 3 if size <= power // 4 * 3 else power


class Rounding:
    """Rounds up the values of symbolic sizes of a graph, if the rounded values satisfy the graph's guards.

    Args:
        environment: the shape environment of the graph.
        symbols: the symbols to round. The values of other symbols stay as they are.
    """

    def __init__(self, environment: ShapeEnv, symbols: Collection[Any]) -> None:
        self._environment, self._symbols = environment, frozenset(symbols)
        # The counts of guards and replacements in the environment, and the guards. If a count changes, `_guards` collects the guards again.
        self._cached_guards: tuple[tuple[int, int], list[Callable[[Mapping[Any, int]], int]]] | None = None

    def __call__(self, values: Mapping[Any, int]) -> dict[Any, int] | None:
        """Returns `values` with the symbols to round rounded up; None if the result does not satisfy a guard.

        Args:
            values: the value of each symbol of the graph in a call.
        """
        upper_bounds = {symbol: self._upper_bound(symbol) for symbol in self._symbols}
        rounded = {}
        for symbol, value in values.items():
            if symbol not in self._symbols:
                rounded[symbol] = value
                continue
            bound = upper_bounds[symbol]
            rounded[symbol] = round_up_size(value) if bound is None else max(value, min(round_up_size(value), bound))
        return rounded if all(holds(rounded) for holds in self._guards()) else None

    def _upper_bound(self, symbol: Any) -> int | None:
        """Returns the largest value that a symbol's range allows; None if the range has no upper bound."""
        known = self._environment.var_to_range.get(symbol)
        return int(known.upper) if known is not None and known.upper.is_Integer else None

    def _guards(self) -> list[Callable[[Mapping[Any, int]], int]]:
        """Returns the guards that depend on symbols to round, as functions of the symbols' values.

        The other guards hold in each call, since TorchDynamo has checked them and rounding does not change them.
        """
        environment = self._environment
        counts = len(environment.guards), len(environment.replacements)
        if self._cached_guards is None or self._cached_guards[0] != counts:
            expressions = [environment.replace(guard.expr) for guard in environment.guards]
            affected = dict.fromkeys(item for item in expressions if not self._symbols.isdisjoint(item.free_symbols))
            self._cached_guards = counts, [size_function(item) for item in affected]
        return self._cached_guards[1]
