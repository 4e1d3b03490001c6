"""The levels of the test suite: `make quick`, `make test`, and `make test-all` with all parameters."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

import pytest

LEVELS = ("quick", "usual", "everything")
SEED = 0


def chosen(items: Sequence[pytest.Item], level: str) -> list[pytest.Item]:
    """Returns the tests of one of LEVELS, in their order.

    The markers `quick` and `thorough` set the level of a test. `sample` sets the number of its parameters that run at a level. These are
    drawn with SEED.
    """
    if level == "quick":
        selected = [item for item in items if item.get_closest_marker("quick")]
    else:
        # Tests with quick(only=True) change their process permanently.
        selected = [item for item in items if not ((quick := item.get_closest_marker("quick")) and quick.kwargs.get("only"))]
        if level == "everything":
            return selected
        selected = [item for item in selected if not item.get_closest_marker("thorough")]
    sampled: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in selected:
        if _count(item, level) is not None:
            sampled[item.nodeid.partition("[")[0]].append(item)
    left_out: set[int] = set()
    for group in sampled.values():
        order = random.Random(SEED).sample(range(len(group)), len(group))
        drawn = order[: _count(group[0], level)]
        left_out |= {id(item) for index, item in enumerate(group) if index not in drawn}
    return [item for item in selected if id(item) not in left_out]


def _count(item: pytest.Item, level: str) -> int | None:
    """Returns the number of a test's parameters that run; None for all."""
    marker = item.get_closest_marker("sample")
    return None if marker is None else marker.kwargs.get(level)
