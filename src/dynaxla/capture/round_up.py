"""Sizes rounded up, so that one executable serves many."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch.fx.experimental.symbolic_shapes import ShapeEnv


def rounded(size: int) -> int:
    """The least power of two, or number halfway between two of them, that is not less than `size`."""
    if size <= 2:
        return size
    power = 1 << (size - 1).bit_length()
    return power // 4 * 3 if size <= power // 4 * 3 else power


class Rounding:
    """Rounds the values of a graph's symbols as far as the graph allows: what was assumed of sizes while it was traced must hold for the
    rounded ones, too.

    environment: the symbols'. symbols: those that are rounded.
    """

    def __init__(self, environment: ShapeEnv, symbols: Collection[Any]) -> None:
        self._environment, self._symbols = environment, frozenset(symbols)

    def __call__(self, values: Mapping[Any, int]) -> dict[Any, int] | None:
        """values: of all symbols of the graph. Returns: the rounded ones among them; None if the graph does not allow these."""
        tops = {symbol: self._top(symbol) for symbol in self._symbols}
        found = {}
        for symbol, value in values.items():
            if symbol not in self._symbols:
                found[symbol] = value
                continue
            top = tops[symbol]
            found[symbol] = rounded(value) if top is None else max(value, min(rounded(value), top))
        return found if all(self._holds(guard.expr, found) for guard in self._environment.guards) else None

    def _top(self, symbol: Any) -> int | None:
        """The greatest value that a symbol may have; None if there is none."""
        known = self._environment.var_to_range.get(symbol)
        return int(known.upper) if known is not None and known.upper.is_Integer else None

    def _holds(self, guard: Any, values: Mapping[Any, int]) -> bool:
        """Whether something that was assumed is known to hold. What is not about rounded symbols holds as it did."""
        expression = self._environment.replace(guard)
        if self._symbols.isdisjoint(expression.free_symbols):
            return True
        return bool(expression.xreplace(values) == True)  # noqa: E712 (a symbolic truth is no bool)
