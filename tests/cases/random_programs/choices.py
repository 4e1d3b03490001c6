"""Where random decisions come from: a seed, or hypothesis, which can then shrink them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


class Choices(Protocol):
    def integer(self, low: int, high: int) -> int:
        """A number from low to high, both included; simpler is lower."""
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
    """One of the options; simpler ones stand first."""
    return options[choices.integer(0, len(options) - 1)]


def chance(choices: Choices, percent: int) -> bool:
    """True in `percent` of 100 cases; False is simpler."""
    return choices.integer(0, 99) >= 100 - percent
