"""Tests of guards/slots.py: the entries of mutable containers, and changes of these entries."""

from __future__ import annotations

import collections
import contextvars
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynaxla.guards.slots import ABSENT, BASES, Attributes, ClassDict, Container, MappingProxy, Namespace, entries, key_text

pytestmark = pytest.mark.quick


class Thing:
    factor = 2

    def __init__(self) -> None:
        self.a, self.b = 1, 2


def cell(value: Any) -> types.CellType:
    return types.CellType(value)


def namespace() -> Namespace:
    result = Namespace({"a": 1, "unread": 2})
    result.names |= {"a", "missing"}
    return result


def variable() -> contextvars.ContextVar[int]:
    result: contextvars.ContextVar[int] = contextvars.ContextVar("x")
    result.set(1)
    return result


def leaf() -> torch.Tensor:
    x = torch.ones(2, requires_grad=True)
    x.grad = torch.zeros(2)
    return x


CONTAINERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    # A function that creates the container, a change that counts, and one that does not count.
    "dict": (lambda: {"a": 1}, lambda x: x.update(a=2), lambda x: x.update(a=1)),
    "dict, new key": (lambda: {"a": 1}, lambda x: x.update(b=1), lambda x: x.pop("b", None)),
    "order": (lambda: {"a": 1, "b": 2}, lambda x: x.update(a=x.pop("a")), lambda x: None),
    "ordered": (lambda: collections.OrderedDict(a=1, b=2), lambda x: x.move_to_end("a"), lambda x: x.move_to_end("b")),
    "list": (lambda: [1, 2], lambda x: x.append(3), lambda x: x.__setitem__(0, 1)),
    "deque": (lambda: collections.deque([1, 2]), lambda x: x.rotate(1), lambda x: x.rotate(2)),
    "set": (lambda: {1}, lambda x: x.add(2), lambda x: x.add(1)),
    "cell": (lambda: cell(1), lambda x: setattr(x, "cell_contents", 2), lambda x: setattr(x, "cell_contents", 1)),
    "variable": (variable, lambda x: x.set(2), lambda x: x.set(1)),
    "gradient": (leaf, lambda x: setattr(x, "grad", torch.ones(2)), lambda x: x.grad.add_(1)),
    "attributes": (
        lambda: Attributes(Thing(), ("a", "missing")),
        lambda x: setattr(x.owner, "missing", 1),
        lambda x: setattr(x.owner, "b", 3),
    ),
    "globals": (namespace, lambda x: x.values.update(missing=1), lambda x: x.values.update(unread=3)),
    "class": (
        lambda: ClassDict(type("Made", (Thing,), {"a": 1, "note": 1}), lambda name, _: name == "a"),
        lambda x: setattr(x.kind, "a", 2),
        lambda x: setattr(x.kind, "note", 2),
    ),
    "view": (
        lambda: MappingProxy(types.MappingProxyType(vars(Thing))),
        lambda x: setattr(Thing, "factor", 3),
        lambda x: setattr(Thing, "factor", 2),
    ),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_changes_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Thing, "factor", 2)
    make, change, other = CONTAINERS[name]
    target = make()
    container = Container(target, entries(target))
    other(target)
    assert container.is_unchanged()
    change(target)
    assert not container.is_unchanged()


def test_numbers_that_are_inputs() -> None:
    """A learning rate may be another float, not another kind of number."""
    groups = {"lr": 0.1, "momentum": 0.9}
    container = Container(groups, entries(groups))
    groups["lr"] = 0.2
    assert container.is_unchanged(input_keys={"lr"})
    assert not container.is_unchanged(input_keys={"momentum"})
    groups["lr"] = 1
    assert not container.is_unchanged(input_keys={"lr"})


def test_missing_values_have_no_entries() -> None:
    assert entries(types.CellType()) == {}
    assert entries(contextvars.ContextVar("empty")) == {}
    assert entries(torch.ones(2, requires_grad=True) * 2) == {}
    assert repr(ABSENT) == "absent"


def test_entries_of_a_class_have_its_bases() -> None:
    assert entries(ClassDict(Thing, lambda name, _: name == "factor")) == {"factor": 2, BASES: (object,)}


def test_keys_in_paths() -> None:
    assert [key_text(key, 3) for key in ("lr", 1, torch.float32)] == ["'lr'", "1", "torch.float32"]
    assert key_text(torch.ones(2), 3) == "Tensor 3"


def refuse(*_: Any) -> None:
    raise AssertionError("a method of the subclass runs")


def overridden(kind: type, *args: Any) -> Any:
    """Returns an object of a subclass with methods that must not run."""
    names = ["__setitem__", "__delitem__", "__setattr__", "__delattr__", "add", "discard", "append", "extend", "clear", "update"]
    subclass = type("Overridden", (kind,), {})
    result = subclass(*args)
    for name in names:
        setattr(subclass, name, refuse)
    return result


PUTS: list[tuple[Callable[[], Any], Any, Any, Any]] = [
    # A function that creates the container, a key, its new value, and the key of an entry to remove.
    (lambda: overridden(dict, {"a": 1, "b": 2}), "b", 3, "a"),
    (lambda: overridden(collections.OrderedDict, [("a", 1), ("b", 2)]), "b", 3, "a"),
    (lambda: overridden(collections.defaultdict, int, {"a": 1, "b": 2}), "b", 3, "a"),
    (lambda: overridden(list, [1, 2]), 0, 3, 1),
    (lambda: overridden(collections.deque, [1, 2]), 0, 3, 1),
    (lambda: overridden(set, [1, 2]), 3, None, 1),
    (lambda: Attributes(overridden(Thing), ("a", "b")), "a", 3, "b"),
]


@pytest.mark.parametrize("index", range(len(PUTS)))
def test_changes_call_no_methods_of_subclasses(index: int) -> None:
    """The recorded run has called these methods. A replay only has to store the results."""
    make, key, value, removed = PUTS[index]
    target = make()
    container = Container(target, entries(target))
    container.put(key, value)
    container.put(removed, ABSENT)
    assert entries(target) == {**{other: old for other, old in container.items.items() if other != removed}, key: value}
    container.restore()
    assert container.is_unchanged()
