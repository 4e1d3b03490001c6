"""Mutable containers (dicts, lists, closure cells, attributes, globals) with their entries at the time of a walk (object_walker.py)."""

from __future__ import annotations

import contextvars
import logging
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from .fingerprints import NO_FINGERPRINT, PLAIN, fingerprint

# A place for a value: the path of a container, and a key of the container, such as ("globals of __main__", "learning_rate").
Place = tuple[str, Any]

# The value of an entry that a container does not have.
ABSENT: Any = type("Absent", (), {"__repr__": lambda _: "absent"})()


class Attributes:
    """Some attributes of an object, such as slots, or a function's code and defaults."""

    def __init__(self, owner: Any, names: Collection[str]) -> None:
        self.owner, self.names = owner, names


class Namespace:
    """The globals that code reads, of one module.

    Attributes:
        values: all globals of the module.
        names: the names of the globals that code reads. A walk adds these names.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.values: dict[str, Any] = values
        self.names: set[str] = set()


class ClassDict:
    """A class's own namespace (methods, class attributes) and its bases.

    Args:
        kind: the class.
        is_relevant: returns True for the name and the value of an attribute that is compared.
    """

    def __init__(self, kind: type, is_relevant: Callable[[str, Any], bool]) -> None:
        self.kind, self.is_relevant = kind, is_relevant


class MappingProxy:
    """The entries of a read-only view of a dict (`MappingProxyType`)."""

    def __init__(self, proxy: types.MappingProxyType[Any, Any]) -> None:
        self.proxy = proxy


class LoggerSettings:
    """The settings of a logger that decide if a message is logged, including settings that the logger inherits."""

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger


BASES = "__bases__"


@dataclass
class Container:
    """A mutable container, with its entries at the time of a walk.

    Attributes:
        target: the object with the entries: a dict, list, deque, set, closure cell, ContextVar or tensor (whose entry is its `grad`), or an
            `Attributes`, `Namespace`, `ClassDict`, `MappingProxy` or `LoggerSettings`.
        items: the entries at the time of the walk, by key.
        is_relevant: returns True for a key whose entry is compared; None: all entries are compared.
    """

    target: Any
    items: dict[Any, Any]
    is_relevant: Callable[[Any], bool] | None = None

    def is_unchanged(self, input_keys: Collection[Any] = ()) -> bool:
        """True if the entries are the same objects as at the walk.

        Args:
            input_keys: keys of numbers that are inputs of a program. These entries may be other numbers of the same types.
        """
        now = self.now()
        return _are_same(now, self.items) and all(
            value is before or (key in input_keys and types_of(value) == types_of(before))
            for (key, value), before in zip(now.items(), self.items.values(), strict=True)
        )

    def changes(self) -> dict[Any, Any]:
        """Returns the current values of changed entries by key; `ABSENT` for removed entries."""
        now = self.now()
        changed = {key: ABSENT for key in reversed(self.items) if key not in now}
        return changed | {key: value for key, value in now.items() if self.items.get(key, ABSENT) is not value}

    def is_reordered(self) -> bool:
        """True if `changes`, applied to the entries at the walk, would give the current entries of a dict in another order."""
        if not isinstance(self.target, dict) or self.is_relevant is not None:
            return False
        now = self.now()
        return not _are_same(now, [*(key for key in self.items if key in now), *(key for key in now if key not in self.items)])

    def now(self) -> dict[Any, Any]:
        """Returns the current entries whose keys are compared."""
        items = entries(self.target)
        return items if self.is_relevant is None else {key: value for key, value in items.items() if self.is_relevant(key)}

    def get(self, key: Any) -> Any:
        """Returns the current value of an entry; `ABSENT` if there is none."""
        return entries(self.target).get(key, ABSENT) if type(self.target) is not dict else self.target.get(key, ABSENT)

    def put(self, key: Any, value: Any) -> None:
        """Sets an entry. A value of `ABSENT` removes the entry."""
        # No method of a user's subclass runs, because the recorded run has called it: the entries are its results.
        target = self.target
        if isinstance(target, (Attributes, ClassDict)):
            owner = target.owner if isinstance(target, Attributes) else target.kind
            kind: Any = type if isinstance(owner, type) else object
            if value is ABSENT:
                kind.__delattr__(owner, key)
            else:
                kind.__setattr__(owner, key, value)
        elif isinstance(target, Namespace):
            if value is ABSENT:
                del target.values[key]
            else:
                target.values[key] = value
        elif isinstance(target, contextvars.ContextVar):
            target.set(None if value is ABSENT else value)  # Python cannot unset a ContextVar
        elif isinstance(target, types.CellType):
            target.cell_contents = value
        elif isinstance(target, torch.Tensor):
            target.grad = None if value is ABSENT else value
        elif isinstance(target, set):
            (set.discard if value is ABSENT else set.add)(target, key)
        elif value is ABSENT:
            _builtin_kind(target).__delitem__(target, key)
        elif isinstance(target, (list, deque)) and key == len(target):
            _builtin_kind(target).append(target, value)
        else:
            _builtin_kind(target).__setitem__(target, key, value)

    def restore(self) -> None:
        """Restores the entries that the container had at the walk."""
        if self.is_unchanged():
            return
        target = self.target
        if isinstance(target, (list, deque)):
            kind = _builtin_kind(target)
            kind.clear(target)
            kind.extend(target, self.items.values())
        elif isinstance(target, set):
            set.clear(target)
            set.update(target, self.items)
        else:
            for key in self.changes():
                self.put(key, self.items.get(key, ABSENT))
            if isinstance(target, dict) and self.is_relevant is None and not _are_same(self.now(), self.items):
                kind = _builtin_kind(target)  # same entries in another order
                kind.clear(target)
                for key, value in self.items.items():
                    kind.__setitem__(target, key, value)


def _builtin_kind(target: Any) -> Any:
    """Returns the class of Python that implements a dict, list or deque, which may be an object of a user's subclass."""
    return next(kind for kind in (OrderedDict, dict, list, deque) if isinstance(target, kind))


def types_of(value: Any) -> Any:
    """Returns the type of a number, or the types of a tuple's numbers."""
    return tuple(map(type, value)) if type(value) is tuple else type(value)


def _are_same(now: Collection[Any], before: Collection[Any]) -> bool:
    """True if two collections of keys have the same objects, or equal plain values, in the same order.

    The keys are not compared by `==`, because a key may be a tensor.
    """
    return len(now) == len(before) and all(key is old_key or _are_equal(key, old_key) for key, old_key in zip(now, before, strict=True))


def _are_equal(first: Any, second: Any) -> bool:
    return type(first) is type(second) and (found := fingerprint(first)) is not NO_FINGERPRINT and found == fingerprint(second)


def entries(target: Any) -> dict[Any, Any]:
    """Returns the current entries of a container."""
    if isinstance(target, OrderedDict):
        return dict(OrderedDict.items(target))
    if isinstance(target, dict):
        return dict(dict.items(target))
    if isinstance(target, list):
        return dict(enumerate(list.__iter__(target)))
    if isinstance(target, deque):
        return dict(enumerate(deque.__iter__(target)))
    if isinstance(target, set):
        return dict.fromkeys(set.__iter__(target))
    if isinstance(target, contextvars.ContextVar):
        return {"": value} if (value := target.get(ABSENT)) is not ABSENT else {}
    if isinstance(target, types.CellType):
        try:
            return {"": target.cell_contents}
        except ValueError:
            return {}
    if isinstance(target, torch.Tensor):
        return {"grad": target.grad} if target.is_leaf else {}
    if isinstance(target, Namespace):
        return {name: target.values[name] for name in target.names if name in target.values}
    if isinstance(target, ClassDict):
        items = {name: value for name, value in vars(target.kind).items() if target.is_relevant(name, value)}
        return items | {BASES: target.kind.__bases__}
    if isinstance(target, MappingProxy):
        return dict(target.proxy.items())
    if isinstance(target, LoggerSettings):
        logger = target.logger
        return {
            "level": logger.level, "disabled": logger.disabled, "effective level": logger.getEffectiveLevel(),
            "manager.disable": logger.manager.disable, "handlers": len(logger.handlers),
        }  # fmt: skip
    return {name: getattr(target.owner, name) for name in target.names if hasattr(target.owner, name)}


def key_text(key: Any, index: int) -> str:
    """Returns the text of a key in a path. `index` is the key's position in its container."""
    return repr(key) if isinstance(key, PLAIN) else f"{type(key).__name__} {index}"
