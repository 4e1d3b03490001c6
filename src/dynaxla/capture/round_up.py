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
        self._found: tuple[Any, list[Any]] | None = None

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
        return found if all(bool(expression.xreplace(found) == True) for expression in self._assumed()) else None  # noqa: E712 (it is no bool)

    def _top(self, symbol: Any) -> int | None:
        """The greatest value that a symbol may have; None if there is none."""
        known = self._environment.var_to_range.get(symbol)
        return int(known.upper) if known is not None and known.upper.is_Integer else None

    def _assumed(self) -> list[Any]:
        """What was assumed of rounded symbols. What is not about these holds as it did."""
        environment = self._environment
        state = len(environment.guards), len(environment.replacements)
        if self._found is None or self._found[0] != state:
            expressions = [environment.replace(guard.expr) for guard in environment.guards]
            self._found = state, [item for item in expressions if not self._symbols.isdisjoint(item.free_symbols)]
        return self._found[1]
