"""The levels of the suite: the tests that `make quick` and `make test` leave out."""

from __future__ import annotations

from typing import Any

import pytest

from support import levels


class Item:
    """The part of a pytest item that levels.py reads."""

    def __init__(self, nodeid: str, **markers: dict[str, int]) -> None:
        self.nodeid, self._markers = nodeid, markers

    def get_closest_marker(self, name: str) -> Any:
        return getattr(pytest.mark, name)(**self._markers[name]).mark if name in self._markers else None


def names(items: list[Any], level: str) -> list[str]:
    return [item.nodeid for item in levels.chosen(items, level)]


def test_markers_select_levels() -> None:
    items = [Item("a"), Item("b", quick={}), Item("c", thorough={}), Item("d", thorough={}, quick={}), Item("e", quick={"only": 1})]
    assert names(items, "quick") == ["b", "d", "e"]
    assert names(items, "usual") == ["a", "b"]
    assert names(items, "everything") == ["a", "b", "c", "d"]


def test_samples_are_drawn_for_each_test_separately() -> None:
    items = [Item(f"{test}[{number}]", quick={}, sample={"usual": 4, "quick": 1}) for test in "ab" for number in range(10)]
    for level, count in {"usual": 4, "quick": 1, "everything": 10}.items():
        found = names(items, level)
        assert [name[0] for name in found] == ["a"] * count + ["b"] * count
        assert found == names(items, level)
    assert set(names(items, "quick")) <= set(names(items, "usual"))
    few = [Item("a[0]", sample={"quick": 3}), Item("a[1]", sample={"quick": 3})]
    assert names(few, "usual") == ["a[0]", "a[1]"]  # without a count for this level, all parameters run
