"""The *walk*, a traversal that makes an `ObjectGraph`: entries of containers, attributes, methods, and the globals that code reads.

Trusted modules, classes and functions (trusted_code.py) do not change, so the walk follows them only as far as users may patch them.
"""

from __future__ import annotations

import collections
import contextvars
import gc
import logging
import os
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from ..errors import CaptureError
from .code_names import ExecutedCode, codes, names_of, reads_by_name
from .dispatch import has_own_dispatch
from .fingerprints import (
    BUFFER_TYPES,
    NO_FINGERPRINT,
    buffer_contents,
    builtin_value,
    fingerprint,
    hides_state,
    is_compared_by_identity,
    parts_of,
)
from .object_graph import ObjectGraph
from .reference_checks import Identities
from .slots import Attributes, ClassDict, Container, LoggerSettings, MappingProxy, Namespace, key_text
from .trusted_code import (
    HEAP_TYPE,
    is_installed_file,
    is_trusted_class,
    is_trusted_function,
    is_trusted_module,
    is_trusted_namespace,
    module_of,
)

# Class attributes on which the results of methods do not depend.
_IGNORED_CLASS_ATTRIBUTES = frozenset(
    [
        "__dict__",
        "__weakref__",
        "__doc__",
        "__module__",
        "__annotations__",
        "__abstractmethods__",
        "_abc_impl",
        "__orig_bases__",
        "__parameters__",
        "__match_args__",
        "__dataclass_fields__",
        "__dataclass_params__",
        "__static_attributes__",
        "__firstlineno__",
        "__annotate__",
        "__annotations_cache__",
        "__slotnames__",
    ]
)
# Attributes of a logger that `logging` changes at queries, or that refer to other loggers, locks and files.
_LOGGING_INTERNALS = frozenset(("_cache", "manager", "root", "parent", "handlers", "filters"))
_GLOBAL_HOOKS = {
    **{name: value for name, value in vars(torch_module).items() if name.startswith("_global_") and isinstance(value, dict)},
    **{name: value for name, value in vars(torch_optimizer).items() if name.startswith("_global_") and isinstance(value, dict)},
}
# The classes of most tensors. Each walk without a base visits them, so that it need not visit them for each tensor.
_TENSOR_CLASSES = (torch.Tensor, torch.nn.Parameter)
NameSet = frozenset[str]
_NO_NAMES: NameSet = frozenset()


def walk(
    roots: Mapping[str, Any], base: ObjectGraph | None = None, executed: ExecutedCode | None = None, max_values: int | None = None
) -> ObjectGraph:
    """Returns all objects that can be reached from named roots, except for the objects in `base`.

    Args:
        roots: the objects to start from, by name.
        base: the result of an earlier walk.
        executed: the code that earlier calls of the function executed. The walk follows only attributes and globals that this code may
            have read. None: the walk follows all attributes and globals.
        max_values: the maximum number of visited values; None: no limit.

    Raises: CaptureError for more than `max_values` values.
    """
    if base is not None and base.reads_by_name and executed is not None:
        executed = replace(executed, names=None)
    graph = ObjectGraph(base, roots)
    visitor = Visitor(graph, executed, max_values)
    visitor.run(roots)
    if visitor.reads_by_name and executed is not None and executed.names is not None:
        if base is None:
            return walk(roots, None, replace(executed, names=None), max_values)
        # Such a function may read attributes of objects in `base`, which the walk of `base` did not follow. So the call is refused.
        graph.incomparable["args"] = "function that reads attributes by name"
    graph.reads_by_name = visitor.reads_by_name
    graph.compares_offsets = executed is not None and executed.reads_offsets
    graph.metadata = graph.current_metadata()
    graph.sharing = graph.sharing_now()
    graph.identities = Identities(graph)
    return graph


class Visitor:
    """Adds all objects that can be reached to an `ObjectGraph`, which has the roots and the base. For the other arguments, see `walk`.

    Attributes:
        reads_by_name: True if the walk has visited an object such as an attrgetter, which reads attributes that no code names.
    """

    def __init__(self, graph: ObjectGraph, executed: ExecutedCode | None, max_values: int | None = None) -> None:
        self._graph = graph
        self._executed = executed
        self._max_values = max_values
        self._count = 0
        self.reads_by_name = False
        self._queue: deque[tuple[str, Any, NameSet]] = deque()
        self._names = graph.names
        if graph.base is not None:
            self._names |= graph.base.names
        self._modules: dict[int, tuple[str, types.ModuleType]] = {}
        self._pending_keys: list[tuple[str, Any]] = []
        self._weak_references: list[tuple[str, Any]] = []
        self._namespaces: dict[int, Container] = {}
        self._read_modules: set[tuple[int, int, bool]] = set()
        self._alive_names: list[Any] = []

    def run(self, roots: Mapping[str, Any]) -> None:
        """Visits all objects that can be reached from the roots. Raises: CaptureError for more than `max_values` values."""
        self._queue.extend((name, value, _NO_NAMES) for name, value in roots.items())
        if self._graph.base is None:
            self._queue.extend((f"torch.{name}", value, _NO_NAMES) for name, value in _GLOBAL_HOOKS.items())
            self._queue.extend((_class_path(kind), kind, _NO_NAMES) for kind in _TENSOR_CLASSES)
            if self._executed is not None:
                self._add_executed_namespaces(self._executed)
        self._visit_queue()
        # Keys of containers come last. So a key that is also an entry of another container has the path of that entry: the keys of an
        # optimizer's state, for example, are parameters, and get their paths from their modules.
        while self._pending_keys:
            keys, self._pending_keys = self._pending_keys, []
            self._queue.extend((path, key, _NO_NAMES) for path, key in keys)
            self._visit_queue()
        # Any function may get a module as an argument. So each module is searched for the names that any code uses, until there are no new
        # names or modules.
        count = -1
        while count < len(self._names) + len(self._modules):
            count = len(self._names) + len(self._modules)
            names = frozenset(self._names)
            for path, module in list(self._modules.values()):
                self._add_module(path, module, names, by_trusted=False)
            self._visit_queue()
        for path, reference in self._weak_references:
            target = reference()
            if (
                target is None
                or fingerprint(target) is not NO_FINGERPRINT
                or self._graph.path_of(target) is not None
                or is_compared_by_identity(target)
            ):
                self._graph.parts[path] = {"()": target}
                self._graph.weak_references[path] = reference, target
            else:
                self._graph.incomparable[path] = f"{type(reference).__name__} to an object that nothing else refers to"

    def _visit_queue(self) -> None:
        while self._queue:
            path, value, names = self._queue.popleft()
            self._count += 1
            if self._max_values is not None and self._count > self._max_values:
                hint = "pass the values that the step needs from it as arguments"
                raise CaptureError(f"the step can reach more than {self._max_values} values; value {self._count} is at {path}", hint=hint)
            self._visit(path, value, names)

    def _visit(self, path: str, value: Any, names: NameSet) -> None:
        """Adds a value to the graph, and queues the objects that the value refers to.

        Args:
            path: the value's path.
            value: the value.
            names: the names used by the code that reads the value. Of a module, only the globals with these names are visited.
        """
        graph = self._graph
        if isinstance(value, types.ModuleType):
            self._modules.setdefault(id(value), (path, value))
            self._add_module(path, value, names, by_trusted=False)
        elif (
            fingerprint(value) is not NO_FINGERPRINT
            or is_compared_by_identity(value)
            or (isinstance(value, type) and not value.__flags__ & HEAP_TYPE)
        ):
            self.reads_by_name = self.reads_by_name or reads_by_name(value, path)
        elif graph.path_of(value) is not None:
            graph.aliased_ids.add(id(value))
        else:
            while graph.has_path(path):
                path += "'"
            graph.paths[id(value)] = path
            graph.objects[path] = value
            for suffix, item in self._referents(path, value):
                self._queue.append((path + suffix if suffix[:1] in (".", "[", "(") else suffix, item, names))

    def _may_be_read(self, name: Any) -> bool:
        """True if the function's code may read an attribute of this name."""
        return self._executed is None or self._executed.reads(name)

    def _add_container(self, path: str, target: Any, is_relevant: Callable[[Any], bool] | None = None) -> dict[Any, Any]:
        """Adds a mutable container to the graph, and returns its entries. `is_relevant`: see `Container`."""
        container = Container(target, {}, is_relevant)
        container.items = container.now()
        self._graph.containers[path] = container
        return container.items

    def _referents(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Adds a value to the graph, and yields the objects that the value refers to.

        Each object comes with a suffix for the value's path (".name", "[key]", "()"), or with a complete path.
        """
        if isinstance(value, torch.Tensor):
            yield from self._tensor(path, value)
        elif isinstance(value, types.FunctionType):
            yield from self._function(path, value)
        elif isinstance(value, type):
            yield from self._class(path, value)
        elif isinstance(value, BUFFER_TYPES):
            values = buffer_contents(value)
            if values is None:
                self._graph.incomparable[path] = type(value).__qualname__
            else:
                self._graph.buffers_at_walk[path] = value, values
            if type(value) not in BUFFER_TYPES:
                yield from self._state(path, value)
        elif isinstance(value, weakref.ref):
            self._weak_references.append((path, value))
        elif isinstance(value, (types.MappingProxyType, logging.Logger)):
            container = Container(LoggerSettings(value) if isinstance(value, logging.Logger) else MappingProxy(value), {})
            container.items = self._graph.parts[path] = container.now()
            self._graph.derived_containers[path] = container
            for index, (key, item) in enumerate(container.items.items()):
                yield f"[{key_text(key, index)}]", item
            if isinstance(value, logging.Logger):
                attributes = self._add_container(
                    f"{path} attributes", vars(value), lambda name: name not in _LOGGING_INTERNALS and self._may_be_read(name)
                )
                for name, item in attributes.items():
                    yield f".{name}", item
        elif (parts := parts_of(value)) is not None:
            self._graph.parts[path] = parts
            for name, item in parts.items():
                yield f".{name}", item
            if isinstance(getattr(value, "__dict__", None), dict):
                yield from self._state(path, value)
        else:
            yield from self._container_entries(path, value)
            yield from self._instance(path, value)

    def _container_entries(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, contextvars.ContextVar):
            for item in self._add_container(path, value).values():
                yield "()", item
        elif isinstance(value, (dict, list, deque, set)):
            for index, (key, item) in enumerate(self._add_container(path, value).items()):
                yield f"[{key_text(key, index)}]", item
                if not isinstance(value, set) and type(key) not in (str, int):
                    self._pending_keys.append((f"{path}[{key_text(key, index)}] key", key))
            if isinstance(value, collections.defaultdict):
                attributes = self._add_container(f"{path} default_factory", Attributes(value, ("default_factory",)))
                yield ".default_factory", attributes["default_factory"]
        elif isinstance(value, (tuple, frozenset)):
            for index, item in enumerate(tuple.__iter__(value) if isinstance(value, tuple) else value):
                yield f"[{index}]", item

    def _instance(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        kind = type(value)
        if not kind.__flags__ & HEAP_TYPE and kind in _BUILTIN_CLASSES:
            return
        if hides_state(value):
            self._graph.incomparable[path] = kind.__qualname__
            if isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):
                yield ".__wrapped__", wrapped
            return
        if plain := builtin_value(value):
            self._graph.parts[path] = plain
        yield from self._state(path, value)
        if isinstance(value, torch.optim.Optimizer):
            self._graph.optimizers[path] = value

    def _state(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Yields an object's attributes and its class, as `_referents` does."""
        try:
            state = object.__getattribute__(value, "__dict__")
        except AttributeError:
            state = None
        if type(state) is dict:
            self._graph.paths[id(state)] = f"{path}.__dict__"
            self._graph.objects[f"{path}.__dict__"] = state
            suffix = " attributes" if path in self._graph.containers else ""
            is_relevant = None if self._executed is None else self._may_be_read
            if isinstance(value, types.SimpleNamespace) and is_relevant is not None:  # its `==` and `repr` read all attributes

                def is_relevant(name: Any) -> bool:
                    return self._may_be_read(name) or fingerprint(state.get(name)) is not NO_FINGERPRINT

            for name, item in self._add_container(path + suffix, state, is_relevant).items():
                yield f".{name}", item
        slots = [
            name
            for part in type(value).__mro__
            if "__slots__" in vars(part)
            for name, item in vars(part).items()
            if isinstance(item, types.MemberDescriptorType) and self._may_be_read(name)
        ]
        if slots:
            for name, item in self._add_container(f"{path} slots", Attributes(value, slots)).items():
                yield f".{name}", item
        yield _class_path(type(value)), type(value)

    def _tensor(self, path: str, value: torch.Tensor) -> Iterator[tuple[str, Any]]:
        self._graph.tensors[path] = value
        if value.is_leaf:
            gradient = self._add_container(f"{path}.grad", value)["grad"]
            if gradient is not None:
                self._graph.gradients.add(f"{path}.grad")
                yield ".grad", gradient
        if parts := parts_of_tensor(value):
            for name, part in self._add_container(f"{path} parts", Attributes(value, parts)).items():
                if path in self._graph.gradients and isinstance(part, torch.Tensor):
                    self._graph.gradients.add(f"{path}.{name}")
                yield f".{name}", part
        if path in self._graph.gradients:
            return
        for item in gc.get_referents(value):  # among them the dicts of the tensor's attributes and hooks
            if type(item) is dict and item is value.__dict__ and not item:
                self._graph.empty_attribute_dicts.append(item)  # no container, because torch creates and drops such a dict by itself
            elif type(item) is dict and item is value.__dict__:
                is_relevant = None if self._executed is None else self._may_be_read
                for name, attribute in self._add_container(f"{path} attributes", item, is_relevant).items():
                    yield f".{name}", attribute
            elif isinstance(item, dict):
                yield ".hooks", item
        if type(value) not in _TENSOR_CLASSES:
            yield _class_path(type(value)), type(value)

    def _class(self, path: str, kind: type) -> Iterator[tuple[str, Any]]:
        """Yields a class's methods, class attributes, bases and metaclass.

        Of a trusted class: only methods and attributes that users may patch or set.
        """
        trusted = is_trusted_class(kind)

        def is_relevant(name: str, value: Any) -> bool:
            if name in _IGNORED_CLASS_ATTRIBUTES or not self._may_be_read(name) or isinstance(value, types.MemberDescriptorType):
                return False
            is_method = callable(value) or isinstance(value, (staticmethod, classmethod, property))
            return not trusted or is_method or self._has_readable_value(name, value)

        for name, value in self._add_container(path, ClassDict(kind, is_relevant)).items():
            if name != "__bases__" and not (trusted and _is_trusted_method(value)):
                yield f".{name}", value
        for base in kind.__mro__[1:]:
            yield _class_path(base), base
        if type(kind) is not type:
            yield _class_path(type(kind)), type(kind)

    def _function(self, path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        code = function.__code__
        self._graph.codes.update(codes(code))
        settings = self._add_container(f"{path} defaults", Attributes(function, ("__code__", "__defaults__", "__kwdefaults__")))
        for name, item in self._add_container(f"{path} attributes", function.__dict__, self._may_be_read).items():
            yield f".{name}", item
        if self._executed is not None and code not in self._executed.codes:
            return
        for name in ("__defaults__", "__kwdefaults__"):
            yield f".{name}", settings.get(name)
        names = names_of(code)
        self._names |= names.all
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) in self._graph.paths:
                continue
            self._graph.paths[id(cell)] = f"{path} {name}"
            self._graph.objects[f"{path} {name}"] = cell
            for item in self._add_container(f"{path} {name}", cell).values():
                self._queue.append((name, item, names.all))
        if self._executed is None and not is_installed_file(code.co_filename) and not is_trusted_function(function):
            self._add_globals(function.__globals__, getattr(function, "__builtins__", {}), names.globals, names.all)
            self._add_imports(names.imports, names.all)

    # Modules.

    def _add_executed_namespaces(self, executed: ExecutedCode) -> None:
        for values, read, names in executed.namespaces:
            if not str(values.get("__name__")).startswith("dynaxla."):
                self._add_globals(values, values.get("__builtins__", {}), read, names)
                if not is_trusted_namespace(values):
                    self._names |= names
        self._add_imports(executed.imports, executed.names or frozenset())

    def _add_imports(self, imports: Any, names: NameSet) -> None:
        for name in imports:
            if (module := sys.modules.get(name)) is not None:
                self._queue.append((f"import {name}", module, names))

    def _add_globals(self, values: dict[str, Any], builtins: Any, read: Any, names: NameSet) -> None:
        """Adds globals and builtins that code reads.

        Args:
            values: the globals of the code's module.
            builtins: the builtins of the code: a module or a dict.
            read: the names of the globals that the code reads.
            names: all names that the code uses.
        """
        by_trusted = is_trusted_namespace(values)
        builtin_values = vars(builtins) if isinstance(builtins, types.ModuleType) else builtins
        for name in read:
            if name in values:
                self._add_global(values, name, name, names, by_trusted, by_trusted)
            else:
                self._namespace_of(values).target.names.add(name)
                if name in builtin_values:
                    self._add_global(builtin_values, name, name, names, True, by_trusted)

    def _add_module(self, path: str, module: types.ModuleType, names: NameSet, by_trusted: bool) -> None:
        """Adds the globals of a module that have one of these names. `by_trusted`: True if the code that uses the names is trusted."""
        key = id(module), id(names), by_trusted
        if key in self._read_modules:
            return
        self._read_modules.add(key)
        self._alive_names.append(names)  # so that no other set gets the same id
        values, trusted = vars(module), is_trusted_module(module)
        read = names & values.keys()
        if not trusted and not by_trusted:
            if self._executed is not None and self._executed.names is None:  # reflection: the code may read any global
                read = read | {name for name, value in values.items() if fingerprint(value) is not NO_FINGERPRINT}
            if not names.isdisjoint(("getattr", "hasattr")):
                self._namespace_of(values).target.names.update(names - values.keys())
        for name in sorted(read):
            self._add_global(values, name, f"{path}.{name}", names, trusted, by_trusted)

    def _add_global(self, values: dict[str, Any], name: str, path: str, names: NameSet, trusted: bool, by_trusted: bool) -> None:
        """Adds a global variable of a module.

        Args:
            values: the module's globals.
            name: the name of the variable.
            path: the path of the variable's value.
            names: the names used by the code that reads the variable.
            trusted: True if the module is trusted. Of its variables, only modules, callables and `os.environ` are added, and for untrusted
                code also variables that `_has_readable_value` accepts.
            by_trusted: True if the code that reads the variable is trusted.
        """
        value = values[name]
        if trusted and isinstance(vars(type(value)).get("__getattribute__"), types.FunctionType) and is_trusted_class(type(value)):
            self._add_to_namespace(values, name, value)  # reading an attribute of the value may warn: `torch.distributed.reduce_op`
        elif isinstance(value, types.ModuleType):
            self._add_to_namespace(values, name, value)
            if by_trusted:
                self._add_module(path, value, names, True)
            else:
                self._queue.append((path, value, names))
        elif not trusted or callable(value) or value is os.environ or (not by_trusted and self._has_readable_value(name, value)):
            self._add_to_namespace(values, name, value)
            if not (by_trusted and isinstance(value, type) and is_trusted_class(value)):
                self._queue.append((path, value, names))

    def _has_readable_value(self, name: str, value: Any) -> bool:
        """True if a value has a fingerprint; in a walk of executed code only, also if its name is public, such as `environ` of `os`."""
        return fingerprint(value) is not NO_FINGERPRINT or (self._executed is not None and name[:1] != "_" and value is not sys.modules)

    def _add_to_namespace(self, values: dict[str, Any], name: str, value: Any) -> None:
        container = self._namespace_of(values)
        container.target.names.add(name)
        container.items[name] = value

    def _namespace_of(self, values: dict[str, Any]) -> Container:
        """Returns the container of a module's globals."""
        container = self._namespaces.get(id(values))
        if container is None:
            path = f"globals of {values.get('__name__')}"
            while path in self._graph.containers or (self._graph.base is not None and path in self._graph.base.containers):
                path += "'"
            container = self._namespaces[id(values)] = self._graph.containers[path] = Container(Namespace(values), {})
        return container


_BUILTIN_CLASSES = frozenset(
    (dict, list, tuple, set, frozenset, deque, collections.OrderedDict, collections.defaultdict, slice, contextvars.ContextVar)
)


def parts_of_tensor(tensor: torch.Tensor) -> list[str]:
    """Returns the names of the inner tensors, and of the `_spec`, of a wrapper tensor such as a DTensor; [] for other tensors."""
    if not has_own_dispatch(type(tensor)) or not hasattr(tensor, "__tensor_flatten__"):
        return []
    names, *_ = tensor.__tensor_flatten__()
    return [*(name for name in names if isinstance(getattr(tensor, name), torch.Tensor)), *("_spec",) * hasattr(tensor, "_spec")]


def _class_path(kind: type) -> str:
    return f"class {module_of(kind)}.{kind.__qualname__}"


def _is_trusted_method(value: Any) -> bool:
    """True for a method of a trusted class that needs no visit: a trusted function, a class, or an object that is no Python function."""
    for name in ("__func__", "fget"):
        value = getattr(value, name, None) or value
    return isinstance(value, type) or not isinstance(value, types.FunctionType) or is_compared_by_identity(value)
