"""Places whose entries can change: what stands there now, whether that is what stood there, and how it is put back."""

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
    found = Namespace({"a": 1, "unread": 2})
    found.names |= {"a", "missing"}
    return found


def variable() -> contextvars.ContextVar[int]:
    found: contextvars.ContextVar[int] = contextvars.ContextVar("x")
    found.set(1)
    return found


def leaf() -> torch.Tensor:
    x = torch.ones(2, requires_grad=True)
    x.grad = torch.zeros(2)
    return x


HOLDERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    # What makes it; a change that counts; what is no change, or one that does not count.
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


@pytest.mark.parametrize("name", HOLDERS)
def test_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Thing, "factor", 2)
    make, change, other = HOLDERS[name]
    target = make()
    holder = Container(target, entries(target))
    other(target)
    assert holder.is_unchanged()
    change(target)
    assert not holder.is_unchanged()


def test_numbers_that_are_free() -> None:
    """A learning rate may be another float, not another kind of number."""
    groups = {"lr": 0.1, "momentum": 0.9}
    holder = Container(groups, entries(groups))
    groups["lr"] = 0.2
    assert holder.is_unchanged(input_keys={"lr"})
    assert not holder.is_unchanged(input_keys={"momentum"})
    groups["lr"] = 1
    assert not holder.is_unchanged(input_keys={"lr"})


def test_what_is_not_there() -> None:
    assert entries(types.CellType()) == {}
    assert entries(contextvars.ContextVar("empty")) == {}
    assert entries(torch.ones(2, requires_grad=True) * 2) == {}
    assert repr(ABSENT) == "absent"


def test_a_class_holds_its_bases() -> None:
    assert entries(ClassDict(Thing, lambda name, _: name == "factor")) == {"factor": 2, BASES: (object,)}


def test_keys_in_paths() -> None:
    assert [key_text(key, 3) for key in ("lr", 1, torch.float32)] == ["'lr'", "1", "torch.float32"]
    assert key_text(torch.ones(2), 3) == "Tensor 3"
