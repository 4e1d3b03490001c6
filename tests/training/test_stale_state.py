"""Unusual kinds of state that a step reads: a change between two calls is noticed, or the step stays in eager mode."""

from __future__ import annotations

import argparse
import collections
import functools
import logging
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dynaxla

NAME = "factor"
read = getattr
UNNAMED = "zeta"  # no code of a step has this name
ONE = torch.ones(1)


class Slots:
    __slots__ = ("one", "other")


class AnyFactor:
    def __init__(self, factor: float = 1.0) -> None:
        self.zeta = factor


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


def factors() -> types.SimpleNamespace:
    return types.SimpleNamespace(zeta=1.0)


def set_on_class(kind: type, value: Any) -> type:
    kind.dynaxla_test = value
    return kind


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
    "an attribute of a logger": (
        lambda: with_attribute(logging.getLogger("dynaxla_test_stale")),
        lambda logger: len(logger.one),
        lambda logger: setattr(logger, "one", ""),
    ),
    "an attribute that a global function reads": (AnyFactor, lambda state: read(state, UNNAMED), lambda state: setattr(state, "zeta", 5.0)),
    "an attribute that a partial reads": (
        lambda: functools.partial(getattr, AnyFactor()),
        lambda state: state(UNNAMED),
        lambda state: setattr(state.args[0], "zeta", 5.0),
    ),
    "equal namespaces": (
        lambda: (factors(), factors()),
        lambda state: state[0] == state[1],
        lambda state: setattr(state[0], "zeta", 5.0),
    ),
    "the text of a namespace": (factors, lambda state: len(repr(state)), lambda state: setattr(state, "zeta", 55.0)),
    "equal namespaces of argparse": (
        lambda: (argparse.Namespace(zeta=1.0), argparse.Namespace(zeta=1.0)),
        lambda state: state[0] == state[1],
        lambda state: setattr(state[0], "zeta", 5.0),
    ),
    "an attribute of a class of torch": (
        lambda: set_on_class(torch.nn.Linear, 2.0),
        lambda state: state(1, 1).dynaxla_test,
        lambda state: set_on_class(state, 3.0),
    ),
    "a new attribute of a class of torch": (
        lambda: torch.nn.Linear(1, 1),
        lambda state: hasattr(state, "dynaxla_test"),
        lambda state: set_on_class(type(state), 3.0),
    ),
    "an attribute of the class of tensors": (
        lambda: set_on_class(torch.Tensor, 2.0),
        lambda _: ONE.dynaxla_test,
        lambda state: set_on_class(state, 3.0),
    ),
    "a new method of the class of tensors": (
        lambda: torch.Tensor,
        lambda _: float(hasattr(ONE, "dynaxla_test") and ONE.dynaxla_test()),
        lambda state: set_on_class(state, lambda _: 3.0),
    ),
}


@pytest.fixture(autouse=True)
def clean_up() -> Iterator[None]:
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)
    globals().pop("_NEW", None)
    for kind in (torch.nn.Linear, torch.Tensor):
        if "dynaxla_test" in vars(kind):
            del kind.dynaxla_test
    logging.getLogger("dynaxla_test_stale").setLevel(logging.NOTSET)


@pytest.mark.parametrize("name", STATE)
def test_changes_between_calls_are_noticed(name: str) -> None:
    make, number_of, change = STATE[name]
    state = make()

    @dynaxla.compile_step
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * number_of(state)

    x = torch.ones(3)
    before = float(number_of(state))
    for _ in range(4):
        assert step(x).tolist() == [before] * 3
    change(state)
    assert float(number_of(state)) != before
    for _ in range(3):
        assert step(x).tolist() == [float(number_of(state))] * 3


def test_attributes_of_arguments_that_a_global_function_reads() -> None:
    def step(x: torch.Tensor, settings: AnyFactor) -> torch.Tensor:
        return x * read(settings, UNNAMED)

    compiled, x = dynaxla.compile_step(step), torch.ones(3)
    for factor in (2.0, 2.0, 2.0, 2.0, 3.0, 3.0):
        assert compiled(x, AnyFactor(factor)).tolist() == [factor] * 3


def test_writes_to_loggers_are_repeated() -> None:
    logger = logging.getLogger("dynaxla_test_stale")

    @dynaxla.compile_step
    def step(x: torch.Tensor) -> torch.Tensor:
        logger.disabled = True
        return x * 2

    for _ in range(7):
        logger.disabled = False
        assert step(torch.ones(3)).tolist() == [2.0] * 3
        assert logger.disabled
    logger.disabled = False
