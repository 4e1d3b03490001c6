"""Unusual kinds of state that a step reads: a change between two calls is noticed, or the step stays in eager mode."""

from __future__ import annotations

import collections
import logging
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dynaxla

NAME = "factor"


class Slots:
    __slots__ = ("one", "other")


def function() -> None:
    """Its attributes are the state. It is never called."""


def module(**values: float) -> types.ModuleType:
    settings = types.ModuleType("settings")
    vars(settings).update(values)
    return settings


def move_attribute(target: Any) -> None:
    target.other = target.one
    del target.one


def rename_key(key: Any) -> Callable[[dict[Any, Any]], None]:
    return lambda target: target.__setitem__(key, target.pop(next(iter(target))))


def with_attribute(target: Any) -> Any:
    target.one = "value"
    return target


# The state, a number that the step reads from it, and a change that changes the number.
STATE: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], Any]]] = {
    "a slot": (lambda: with_attribute(Slots()), lambda state: hasattr(state, "one"), move_attribute),
    "an attribute of a function": (lambda: with_attribute(function), lambda state: len(state.one), lambda state: setattr(state, "one", "")),
    "the key of a subclass of dict": (lambda: collections.Counter(a=1), lambda state: "a" in state, rename_key("b")),
    "the key of a defaultdict": (lambda: collections.defaultdict(int, a=1), lambda state: "a" in state, rename_key("b")),
    "a key that is a tuple": (lambda: {(1, 2): 1}, lambda state: (1, 2) in state, rename_key((3, 4))),
    "a variable of a module": (lambda: module(factor=1), lambda state: getattr(state, NAME), lambda state: setattr(state, NAME, 5)),
    "a new variable of a module": (module, lambda state: getattr(state, "factor", 1), lambda state: setattr(state, "factor", 5)),
    "a global": (lambda: None, lambda _: globals().get("_NEW", 1), lambda _: globals().update(_NEW=5)),
    "os.getenv": (lambda: None, lambda _: float(os.getenv("DYNAXLA_TEST_STALE", "1")), lambda _: os.environ.update(DYNAXLA_TEST_STALE="5")),
    "os.environ": (lambda: None, lambda _: "DYNAXLA_TEST_NEW" in os.environ, lambda _: os.environ.update(DYNAXLA_TEST_NEW="5")),
    "the level of a logger": (
        lambda: logging.getLogger("dynaxla_test_stale"),
        lambda logger: logger.isEnabledFor(logging.INFO),
        lambda logger: logger.setLevel(logging.DEBUG),
    ),
}


@pytest.fixture(autouse=True)
def clean_up() -> Iterator[None]:
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)
    globals().pop("_NEW", None)
    logging.getLogger("dynaxla_test_stale").setLevel(logging.NOTSET)


@pytest.mark.parametrize("name", STATE)
def test_changes_between_calls_are_noticed(name: str) -> None:
    make, read, change = STATE[name]
    state = make()

    @dynaxla.compile_step
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * read(state)

    x = torch.ones(3)
    before = float(read(state))
    for _ in range(4):
        assert step(x).tolist() == [before] * 3
    change(state)
    assert float(read(state)) != before
    for _ in range(3):
        assert step(x).tolist() == [float(read(state))] * 3
