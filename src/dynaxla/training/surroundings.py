"""What a function can read besides its arguments: closures, globals, modules, optimizers, and all that hangs on them.

A walk gives *places* (an entry of a dict or a list, a closure's cell) with what stands there. Comparing two walks shows what the function
has changed; comparing a walk with an earlier one shows whether a program recorded then still fits.
"""

from __future__ import annotations

import dis
import enum
import functools
import logging
import operator
import sys
import sysconfig
import threading
import types
import weakref
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import CaptureError
from .scalars import Place

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum, range)
_OPAQUE = (
    types.ModuleType,
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.GetSetDescriptorType,
    types.CodeType,
    types.FrameType,
    logging.Logger,
    threading.Thread,
    weakref.ref,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
ABSENT: Any = type("Absent", (), {"__repr__": lambda _: "absent"})()


@dataclass
class Holder:
    """Something whose entries can change. Attributes: target (it); items (what it held when it was walked, by key)."""

    target: Any
    items: dict[Any, Any]

    def is_unchanged(self, free: Collection[Any] = ()) -> bool:
        """free: keys of floats that may be others now."""
        now = self.now()
        return now.keys() == self.items.keys() and all(
            value is self.items[key] or (key in free and isinstance(value, float)) for key, value in now.items()
        )

    def changes(self) -> dict[Any, Any]:
        """New values by key; `ABSENT` for what is gone."""
        now = self.now()
        changed = {key: ABSENT for key in reversed(self.items) if key not in now}
        return changed | {key: value for key, value in now.items() if self.items.get(key, ABSENT) is not value}

    def now(self) -> dict[Any, Any]:
        return _entries(self.target, self.items)

    def put(self, key: Any, value: Any) -> None:
        """value: `ABSENT` takes the entry away."""
        target = self.target
        if isinstance(target, _Attributes):
            if value is ABSENT:
                delattr(target.owner, key)
            else:
                setattr(target.owner, key, value)
        elif isinstance(target, types.CellType):
            target.cell_contents = value
        elif isinstance(target, torch.Tensor):
            target.grad = None if value is ABSENT else value
        elif value is ABSENT:
            del target[key]
        elif isinstance(target, (list, deque)) and key == len(target):
            target.append(value)
        elif isinstance(target, set):
            target.add(key)
        else:
            target[key] = value

    def restore(self) -> None:
        """Give it back the entries that it had."""
        if self.is_unchanged():
            return
        if isinstance(self.target, (list, deque)):
            self.target.clear()
            self.target.extend(self.items.values())
        elif isinstance(self.target, set):
            self.target.clear()
            self.target.update(self.items)
        else:
            for key in self.changes():
                self.put(key, self.items.get(key, ABSENT))


class _Attributes:
    """Chosen attributes of a Python module or class."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner


def _entries(target: Any, known: Mapping[Any, Any]) -> dict[Any, Any]:
    if isinstance(target, dict):
        return dict(target)
    if isinstance(target, (list, deque)):
        return dict(enumerate(target))
    if isinstance(target, set):
        return dict.fromkeys(target)
    if isinstance(target, types.CellType):
        try:
            return {"": target.cell_contents}
        except ValueError:
            return {}
    if isinstance(target, torch.Tensor):
        return {"grad": target.grad} if target.is_leaf else {}
    return {key: getattr(target.owner, key) for key in known if hasattr(target.owner, key)}


class _Watch:
    """What holders held when they were walked, gathered so that thousands can be compared at once.

    inputs: places whose entries may become other floats.
    """

    def __init__(self, holders: Mapping[str, Holder], inputs: Collection[Place]) -> None:
        self.inputs = inputs
        watched = {path for path, _ in inputs}
        self._gradients = [holder for holder in holders.values() if isinstance(holder.target, torch.Tensor) and holder.items]
        mappings = [holder for path, holder in holders.items() if isinstance(holder.target, dict) and path not in watched]
        self._mappings = [holder.target for holder in mappings]
        self._lengths = [len(holder.items) for holder in mappings]
        self._filled = [holder.target for holder in mappings if holder.items]
        self._keys = [key for holder in mappings for key in holder.items]
        self._values = [value for holder in mappings for value in holder.items.values()]
        self._others = [
            (holder, [key for place, key in inputs if place == path])
            for path, holder in holders.items()
            if path in watched or not isinstance(holder.target, (dict, torch.Tensor))
        ]

    def is_unchanged(self) -> bool:
        """Of all but gradients."""
        return (
            list(map(len, self._mappings)) == self._lengths
            and all(map(operator.is_, chain.from_iterable(self._filled), self._keys))
            and all(map(operator.is_, chain.from_iterable(map(operator.methodcaller("values"), self._filled)), self._values))
            and all(holder.is_unchanged(free) for holder, free in self._others)
        )

    def has_gradients(self) -> bool:
        """Whether the gradients are the same objects. Leaves must be leaves still."""
        return all(holder.target.grad is holder.items["grad"] for holder in self._gradients)


@dataclass
class Walk:
    """Everything that can be reached.

    Attributes: base (an earlier walk; what that has found is not found again); roots; holders (what can change), tensors, optimizers,
    objects, by path; paths (of objects, by id); metas (what the tensors were like); arrays (NumPy's, with what they held); repeated (the
    ids of tensors that are found in several places); is_outdated.
    """

    base: Walk | None = None
    roots: Mapping[str, Any] = field(default_factory=dict)
    holders: dict[str, Holder] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    paths: dict[int, str] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    metas: list[tuple[Any, ...]] = field(default_factory=list)
    arrays: dict[str, tuple[np.ndarray[Any, Any], Any]] = field(default_factory=dict)
    repeated: set[int] = field(default_factory=set)
    is_outdated: bool = False
    _watch: _Watch | None = None

    def path_of(self, value: Any) -> str | None:
        found = self.paths.get(id(value))
        return found if found is not None or self.base is None else self.base.path_of(value)

    def knows(self, path: str) -> bool:
        return path in self.objects or (self.base is not None and self.base.knows(path))

    def object_at(self, path: str) -> Any:
        return self.objects[path] if path in self.objects or self.base is None else self.base.object_at(path)

    def tensor_at(self, path: str) -> torch.Tensor:
        return self.tensors[path] if path in self.tensors or self.base is None else self.base.tensor_at(path)

    def number_at(self, place: Place) -> float:
        path, key = place
        return float(self.holders[path].target[key])

    def is_unchanged(self, inputs: Collection[Place] = frozenset()) -> bool:
        """Whether everything stands where it stood. inputs: places of floats that may be others now."""
        if self.is_outdated:
            return False
        if self._watch is None or self._watch.inputs != inputs:
            self._watch = _Watch(self.holders, inputs)
        return (
            self._watch.is_unchanged()
            and list(map(meta, self.tensors.values())) == self.metas
            and self._watch.has_gradients()
            and all(_contents(array) == contents for array, contents in self.arrays.values())
        )

    def restore(self) -> None:
        for holder in self.holders.values():
            holder.restore()

    def release_gradients(self, places: Iterable[str], keep: Collection[str]) -> dict[str, tuple[str, tuple[Any, ...]]]:
        """Let go of gradients that are about to be replaced, so that their memory is free before: of those that are found nowhere else,
        share no memory, and are not among the paths to `keep`. The walk is outdated then, until `accept_gradients`.

        Returns: of each released one's place, its own path, and what it was like.
        """
        released = {}
        sharing = Counter(map(storage_of, self.tensors.values()))
        for place in places:
            holder = self.holders.get(place)
            gradient = holder.items["grad"] if holder is not None else None
            path = self.paths.get(id(gradient), "")
            below = self.holders.get(f"{path}.grad")
            if holder is None or gradient is None or below is None or gradient.grad is not None:
                continue
            if path in keep or id(gradient) in self.repeated or sharing[storage_of(gradient)] > 1:
                continue
            self.is_outdated = True
            released[place] = path, meta(gradient)
            holder.put("grad", None)
            below.target = holder.items["grad"] = self.objects[path] = self.tensors[path] = None
            del self.paths[id(gradient)]
        return released

    def accept_gradients(self, released: Mapping[str, tuple[str, tuple[Any, ...]]]) -> None:
        """Those that now stand in the places of released ones. If they are like those, the walk holds again."""
        replaced = 0
        taken = {storage_of(tensor) for tensor in self.tensors.values() if tensor is not None}
        for place, (path, expected) in released.items():
            holder = self.holders[place]
            gradient = holder.target.grad
            if gradient is None or storage_of(gradient) in taken or meta(gradient) != expected:
                continue
            taken.add(storage_of(gradient))
            self.holders[f"{path}.grad"].target = holder.items["grad"] = self.objects[path] = self.tensors[path] = gradient
            self.paths[id(gradient)] = path
            replaced += 1
        self.is_outdated = self.is_outdated and replaced < len(released)

    def facts(self, inputs: Collection[tuple[str, Any]] = ()) -> dict[str, Any]:
        """What a recording depends on, comparable with that of another walk. inputs: entries (path, key) whose values do not matter."""
        found: dict[str, Any] = {name: self._fact(value) for name, value in self.roots.items()}
        for path, holder in self.holders.items():
            items = holder.items.items()
            found[path] = [(self._key(key), "input" if (path, key) in inputs else self._fact(value)) for key, value in items]
        found |= {f"array {path}": contents for path, (_, contents) in self.arrays.items()}
        storages = self.base._storages() if self.base is not None else {}
        for path, tensor in self.tensors.items():
            storage = storages.setdefault(storage_of(tensor), path)
            found[f"tensor {path}"] = (*meta(tensor), storage, tensor.storage_offset() if storage != path else 0)
        return found

    def _storages(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for path, tensor in self.tensors.items():
            found.setdefault(storage_of(tensor), path)
        return found

    def _fact(self, value: Any) -> Any:
        if isinstance(value, PLAIN):
            return type(value), repr(value) if isinstance(value, (float, complex)) else value
        if isinstance(value, (tuple, frozenset)):
            return type(value), tuple(map(self._fact, value))
        return type(value), self.path_of(value) or id(value)

    def _key(self, key: Any) -> Any:
        return key if isinstance(key, PLAIN) else self.path_of(key) or id(key)


def _contents(array: np.ndarray[Any, Any]) -> Any:
    return array.dtype.str, array.shape, hash(array.tobytes())


def storage_of(tensor: torch.Tensor) -> int:
    """What tensors in one memory have in common."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def meta(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What of a tensor a recording depends on, besides its memory."""
    strides = tensor.stride() if tensor.layout == torch.strided else ()
    return type(tensor), tensor.shape, strides, tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_leaf


def walk(roots: Mapping[str, Any], base: Walk | None = None) -> Walk:
    """Everything that can be reached from named roots, and not from `base`."""
    found = Walk(base, roots)
    waiting: deque[tuple[str, Any, tuple[str, ...]]] = deque((name, value, ()) for name, value in roots.items())
    while waiting:
        path, value, names = waiting.popleft()
        if isinstance(value, (types.ModuleType, type)):
            if not _is_of_library(_file(value)):
                items = {name: getattr(value, name) for name in names if hasattr(value, name)}
                found.holders.setdefault(f"{path}.*", Holder(_Attributes(value), items))
                waiting.extend((f"{path}.{name}", item, ()) for name, item in items.items())
        elif not isinstance(value, (*PLAIN, *_OPAQUE)) and not _is_own(value):
            if found.path_of(value) is not None:
                found.repeated.add(id(value))
                continue
            while found.knows(path):
                path += "'"
            found.paths[id(value)] = path
            found.objects[path] = value
            waiting.extend(_visit(path, value, found))
    found.metas = list(map(meta, found.tensors.values()))
    return found


def _is_own(value: Any) -> bool:
    """Whether it is a compiled step, such as the one under whose name the function can find itself."""
    return (_file(type(value)) or "").startswith(str(Path(__file__).parent))


def _file(value: Any) -> str | None:
    """Where a module, or the module of a class, comes from."""
    module = sys.modules.get(value.__module__) if isinstance(value, type) else value
    return getattr(module, "__file__", None)


def _visit(path: str, value: Any, found: Walk) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Note what `value` is, and give what it leads to."""

    def hold(suffix: str, target: Any, items: dict[Any, Any]) -> None:
        found.holders[path + suffix] = Holder(target, items)

    if isinstance(value, torch.Tensor):
        found.tensors[path] = value
        if value.is_leaf:
            hold(".grad", value, {"grad": value.grad})
            if value.grad is not None:
                yield f"{path}.grad", value.grad, ()
        return
    if isinstance(value, (dict, list, deque, set)):
        items = _entries(value, {})
        hold("", value, items)
        for index, (key, item) in enumerate(items.items()):
            shown = repr(key) if isinstance(key, PLAIN) else f"{type(key).__name__} {index}"
            yield f"{path}[{shown}]", item, ()
        return
    if isinstance(value, (tuple, frozenset)):
        for index, item in enumerate(value):
            yield f"{path}[{index}]", item, ()
        return
    if isinstance(value, np.ndarray):
        found.arrays[path] = value, _contents(value)
        return
    if isinstance(value, Iterator):
        raise CaptureError(
            f"a step can reach {path}, an iterator, which each recording would move on", hint="give it to the step item by item"
        )
    if isinstance(value, functools.partial):
        yield f"{path}.func", value.func, ()
        yield f"{path}.args", value.args, ()
        yield f"{path}.keywords", value.keywords, ()
        return
    if isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__, ()
        yield path, value.__func__, ()
        return
    if isinstance(value, types.FunctionType):
        yield from _function(path, value, hold)
        return
    state = getattr(value, "__dict__", None)
    if isinstance(state, dict):
        found.paths[id(state)] = f"{path}.__dict__"
        found.objects[f"{path}.__dict__"] = state
        hold("", state, dict(state))
        for key, item in state.items():
            yield f"{path}.{key}", item, ()
    if isinstance(value, torch.optim.Optimizer):
        found.optimizers[path] = value
    slots = [name for kind in type(value).__mro__ for name in _slots(kind) if hasattr(value, name)]
    if slots:
        items = {name: getattr(value, name) for name in slots}
        hold(" slots", _Attributes(value), items)
        for name, item in items.items():
            yield f"{path}.{name}", item, ()
    for kind in type(value).__mro__:
        if not _is_of_library(_file(kind)):
            yield from _class(f"{path}.{kind.__name__}", kind, hold)


def _slots(kind: type) -> Sequence[str]:
    slots = vars(kind).get("__slots__", ()) if not _is_of_library(_file(kind)) else ()
    return [slots] if isinstance(slots, str) else [name for name in slots if not name.startswith("__")]


def _class(path: str, kind: type, hold: Any) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """What methods read, and what objects have in common."""
    shared = {}
    for name, value in vars(kind).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(function, types.FunctionType):
            yield f"{path}.{name}", function, ()
        elif not name.startswith("__") and not hasattr(value, "__get__"):
            shared[name] = value
            yield f"{path}.{name}", value, ()
    hold(f" {kind.__name__}", _Attributes(kind), shared)


def _function(path: str, function: types.FunctionType, hold: Any) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    names = tuple(_names(function.__code__))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        items = _entries(cell, {})
        hold(f" {name}", cell, items)
        for item in items.values():
            yield name, item, names
    defaults = {"__defaults__": function.__defaults__, "__kwdefaults__": function.__kwdefaults__}
    hold(" defaults", _Attributes(function), defaults)
    for name, item in defaults.items():
        yield f"{path}.{name}", item, ()
    if _is_of_library(function.__code__.co_filename):
        return
    read = {name: function.__globals__[name] for name in _globals_read(function.__code__) if name in function.__globals__}
    if read:
        hold(" globals", _Attributes(_Namespace(function.__globals__)), read)
    for name, item in read.items():
        yield name, item, names


class _Namespace:
    """A dict as an object with attributes."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__ = values


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _names(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes that a function reads."""
    for part in _codes(code):
        yield from part.co_names


def _globals_read(code: types.CodeType) -> list[str]:
    instructions = (instruction for part in _codes(code) for instruction in dis.get_instructions(part))
    return list(dict.fromkeys(item.argval for item in instructions if item.opname in ("LOAD_GLOBAL", "LOAD_NAME")))


_PACKAGE = str(Path(__file__).parents[1])


def _is_of_library(file: str | None) -> bool:
    return file is None or file.startswith(_PACKAGE) or file.startswith(_LIBRARIES) or file.startswith("<frozen") or "site-packages" in file
