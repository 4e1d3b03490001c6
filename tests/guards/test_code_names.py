"""Tests of guards/code_names.py: the names that code uses, and reflection."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynaxla.guards.code_names import ExecutedCode, codes, names_of

settings: Any = {}
net: Any = None


def test_names_and_globals() -> None:
    def function() -> Any:
        import json.decoder

        def inner() -> Any:
            return settings["rate"]

        return json, inner, net.body.weight, "first.second", "{0.shown:>3}", ("in a tuple",), "two words", ("tupled",)

    found = names_of(function.__code__)
    assert {"settings", "net", "body", "weight", "rate", "first", "second", "shown", "tupled"} <= found.all
    assert not {"two", "words", "two words"} & found.all
    assert (set(found.globals), found.imports, found.reflects) == ({"settings", "net"}, ("json.decoder",), False)
    assert len(list(codes(function.__code__))) == 2
    assert names_of(function.__code__) is found


def matches(x: Any) -> Any:
    match x:
        case ExecutedCode(names):
            return names


NAMED: dict[str, Callable[..., Any]] = {
    "a constant": lambda x: getattr(x, "rate"),  # noqa: B009  (the call under test)
    "with a default": lambda x: getattr(x, "rate", None),
    "hasattr": lambda x: hasattr(x, "rate"),
    "of an expression": lambda x: getattr(x.y[0], "rate"),  # noqa: B009  (the call under test)
}
REFLECTS: dict[str, Callable[..., Any]] = {
    "a variable": lambda x, name: getattr(x, name),
    "a computed name": lambda x, name: getattr(x, "rate_" + name),
    "one of two": lambda x, name: getattr(x, "rate" if name else "other"),
    "passed on": lambda x, name: map(getattr, x, name),
    "vars": lambda x: vars(x),
    "dict": lambda x: x.__dict__,
    "inner": lambda x: lambda: globals()["rate"],
    "match": matches,
    "format": lambda x, text: text.format(x),
}


@pytest.mark.parametrize("name", [*NAMED, *REFLECTS])
def test_reflection_is_detected(name: str) -> None:
    function = NAMED.get(name) or REFLECTS[name]
    found = names_of(function.__code__)
    assert found.reflects == (name in REFLECTS)
    assert found.reflects or "rate" in found.all


def test_executed_code() -> None:
    def own() -> Any:
        return settings.rate

    executed = ExecutedCode.of({own.__code__: [globals()], os.getenv.__code__: [vars(os)]})
    assert executed.trusted == {os.getenv.__code__}
    assert [executed.reads(name) for name in ("rate", "other", "__call__", 3)] == [True, False, True, True]
    spaces = {id(space): read for space, read, _ in executed.namespaces}
    assert spaces[id(globals())] == {"settings"}
    assert "environ" in spaces[id(vars(os))]
    assert ExecutedCode.of({REFLECTS["vars"].__code__: [globals()]}).reads("anything")
    assert not ExecutedCode.of({torch.nn.Module.__setattr__.__code__: [vars(torch.nn.modules.module)]}).reads("rate"), "torch is trusted"
