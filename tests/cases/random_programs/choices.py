"""Sources of random decisions: a seed, or hypothesis, which can shrink them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


class Choices(Protocol):
    def integer(self, low: int, high: int) -> int:
        """Returns a number from low to high, both included. Lower numbers are simpler."""
        ...


class SeededChoices:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)


class HypothesisChoices:
    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))


def pick(choices: Choices, options: Sequence[T]) -> T:
    """Returns one of the options. The first options are the simplest."""
    return options[choices.integer(0, len(options) - 1)]


def chance(choices: Choices, percent: int) -> bool:
    """Returns True with a probability in percent. False is simpler."""
    return choices.integer(0, 99) >= 100 - percent
