"""Sources of random choices: a seed, or hypothesis."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


class Choices(Protocol):
    def among(self, items: Sequence[T]) -> T: ...

    def integer(self, first: int, last: int) -> int: ...


class SeededChoices:
    """Choices that depend only on the seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def among(self, items: Sequence[T]) -> T:
        return items[self._random.randrange(len(items))]

    def integer(self, first: int, last: int) -> int:
        return self._random.randint(first, last)


class HypothesisChoices:
    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self._draw = draw

    def among(self, items: Sequence[T]) -> T:
        return items[self._draw(st.integers(0, len(items) - 1))]

    def integer(self, first: int, last: int) -> int:
        return int(self._draw(st.integers(first, last)))
