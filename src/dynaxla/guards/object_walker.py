"""The traversal of a walk: from objects to the entries of containers, to attributes and methods, and to the state that functions read."""

from __future__ import annotations

import collections
import contextvars
import gc
import operator
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
from .code_names import ExecutedCode, codes, names_of
from .dispatch import has_own_dispatch
from .fingerprints import HOLDS_VALUES, NO_CONTENT, content, hides_state, is_known_by_identity, parts_of, plain_part, values_of
from .object_graph import ObjectGraph
from .reference_checks import Identities
from .slots import Attributes, ClassDict, Holder, Namespace, View, shown
from .trusted_code import is_installed_file, is_trusted_class, is_trusted_function, is_trusted_module, is_trusted_namespace, module_of

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
# Attributes of classes that do not influence their methods.
_NOT_READ = frozenset(
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
_HOOKS = {
    **{name: value for name, value in vars(torch_module).items() if name.startswith("_global_") and isinstance(value, dict)},
    **{name: value for name, value in vars(torch_optimizer).items() if name.startswith("_global_") and isinstance(value, dict)},
}
Names = frozenset[str]
_NONE: Names = frozenset()


def walk(
    roots: Mapping[str, Any], base: ObjectGraph | None = None, touched: ExecutedCode | None = None, most: int | None = None
) -> ObjectGraph:
    """Returns everything that can be reached from named roots, and not from `base`.

    Args:
        touched: the code that runs of the function have executed. If given, only values that this code can name count, and `incomparable`
            holds only objects that it may have read; else `incomparable` holds all objects that cannot be compared.
        most: the number of values to visit; None: as many as there are.

    Raises: CaptureError for more than `most` values.
    """
    found = ObjectGraph(base, roots)
    visitor = Visitor(found, touched, most)
    visitor.run(roots)
    if visitor.reads_by_name and touched is not None and touched.names is not None:
        if base is None:
            return walk(roots, None, replace(touched, names=None), most)
        found.incomparable["args"] = "attrgetter"  # it may read attributes in the base, which was walked without it
    found.metas = found.metas_now()
    found.sharing = found.sharing_now()
    found.identities = Identities(found)
    return found


class Visitor:
    """Fills a walk.

    Args:
        found: the walk, which has the roots and the base.
        touched: the names that the function's code reads; None: everything that can be reached counts.
        most: the number of values to visit; None: as many as there are.

    Attributes:
        reads_by_name: True if the walk has met an object that reads attributes which no code names, such as an attrgetter.
    """

    def __init__(self, found: ObjectGraph, touched: ExecutedCode | None, most: int | None = None) -> None:
        self._found = found
        self._touched = touched
        self._most = most
        self._count = 0
        self.reads_by_name = False
        self._waiting: deque[tuple[str, Any, Names]] = deque()
        self._names = found.names
        if found.base is not None:
            self._names |= found.base.names
        self._modules: dict[int, tuple[str, types.ModuleType]] = {}
        self._keys: list[tuple[str, Any]] = []
        self._weak: list[tuple[str, Any]] = []
        self._spaces: dict[int, Holder] = {}
        self._chains: set[tuple[int, int, bool]] = set()
        self._kept: list[Any] = []

    def run(self, roots: Mapping[str, Any]) -> None:
        """Visits everything that can be reached from the roots. Raises: CaptureError for more than `most` values."""
        self._waiting.extend((name, value, _NONE) for name, value in roots.items())
        if self._found.base is None:
            self._waiting.extend((f"torch.{name}", value, _NONE) for name, value in _HOOKS.items())
            if self._touched is not None:
                self._touched_namespaces(self._touched)
        self._drain()
        while self._keys:  # last, so that a key that is also found elsewhere (parameters in an optimizer's state) gets its path there
            keys, self._keys = self._keys, []
            self._waiting.extend((path, key, _NONE) for path, key in keys)
            self._drain()
        count = -1
        while count < len(self._names) + len(self._modules):  # a module may be passed to any function
            count = len(self._names) + len(self._modules)
            names = frozenset(self._names)
            for path, module in list(self._modules.values()):
                self._module(path, module, names, by_trusted=False)
            self._drain()
        for path, reference in self._weak:
            target = reference()
            if (
                target is None
                or content(target) is not NO_CONTENT
                or self._found.path_of(target) is not None
                or is_known_by_identity(target)
            ):
                self._found.parts[path] = {"()": target}
                self._found.references[path] = reference, target
            else:
                self._found.incomparable[path] = f"{type(reference).__name__} to an object that nothing else refers to"

    def _drain(self) -> None:
        while self._waiting:
            path, value, names = self._waiting.popleft()
            self._count += 1
            if self._most is not None and self._count > self._most:
                hint = "pass the values that the step needs from it as arguments"
                raise CaptureError(f"the step can reach more than {self._most} values; the last one counted is {path}", hint=hint)
            self._visit(path, value, names)

    def _visit(self, path: str, value: Any, names: Names) -> None:
        found = self._found
        if isinstance(value, types.ModuleType):
            self._modules.setdefault(id(value), (path, value))
            self._module(path, value, names, by_trusted=False)
        elif (
            content(value) is not NO_CONTENT
            or is_known_by_identity(value)
            or (isinstance(value, type) and not value.__flags__ & _HEAP_TYPE)
        ):
            self.reads_by_name = self.reads_by_name or isinstance(value, (operator.attrgetter, operator.methodcaller))
        elif found.path_of(value) is not None:
            found.repeated.add(id(value))
        else:
            while found.knows(path):
                path += "'"
            found.paths[id(value)] = path
            found.objects[path] = value
            for suffix, item in self._inside(path, value):
                self._waiting.append((path + suffix if suffix[:1] in (".", "[", "(") else suffix, item, names))

    def _reads(self, name: Any) -> bool:
        return self._touched is None or self._touched.reads(name)

    def _hold(self, path: str, target: Any, counts: Callable[[Any], bool] | None = None) -> dict[Any, Any]:
        holder = Holder(target, {}, counts)
        holder.items = holder.now()
        self._found.holders[path] = holder
        return holder.items

    def _inside(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Adds a value to the walk, and yields the objects that it refers to, each with a suffix of the path or a path of its own."""
        if isinstance(value, torch.Tensor):
            yield from self._tensor(path, value)
        elif isinstance(value, types.FunctionType):
            yield from self._function(path, value)
        elif isinstance(value, type):
            yield from self._class(path, value)
        elif isinstance(value, HOLDS_VALUES):
            values = values_of(value)
            if values is None:
                self._found.incomparable[path] = type(value).__qualname__
            else:
                self._found.values[path] = value, values
            if type(value) not in HOLDS_VALUES:
                yield from self._state(path, value)
        elif isinstance(value, weakref.ref):
            self._weak.append((path, value))
        elif isinstance(value, types.MappingProxyType):
            holder = Holder(View(value), {})
            holder.items = self._found.parts[path] = holder.now()
            self._found.views[path] = holder
            for index, (key, item) in enumerate(holder.items.items()):
                yield f"[{shown(key, index)}]", item
        elif (parts := parts_of(value)) is not None:
            self._found.parts[path] = parts
            for name, item in parts.items():
                yield f".{name}", item
            if isinstance(getattr(value, "__dict__", None), dict):
                yield from self._state(path, value)
        else:
            yield from self._container(path, value)
            yield from self._instance(path, value)

    def _container(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, contextvars.ContextVar):
            for item in self._hold(path, value).values():
                yield "()", item
        elif isinstance(value, (dict, list, deque, set)):
            for index, (key, item) in enumerate(self._hold(path, value).items()):
                yield f"[{shown(key, index)}]", item
                if not isinstance(value, set) and type(key) not in (str, int):
                    self._keys.append((f"{path}[{shown(key, index)}] key", key))
            if isinstance(value, collections.defaultdict):
                yield ".default_factory", self._hold(f"{path} default_factory", Attributes(value, ("default_factory",)))["default_factory"]
        elif isinstance(value, (tuple, frozenset)):
            for index, item in enumerate(tuple.__iter__(value) if isinstance(value, tuple) else value):
                yield f"[{index}]", item

    def _instance(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        kind = type(value)
        if not kind.__flags__ & _HEAP_TYPE and kind in _BUILTIN:
            return
        if hides_state(value):
            self._found.incomparable[path] = kind.__qualname__
            if isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):
                yield ".__wrapped__", wrapped
            return
        if plain := plain_part(value):
            self._found.parts[path] = plain
        yield from self._state(path, value)
        if isinstance(value, torch.optim.Optimizer):
            self._found.optimizers[path] = value

    def _state(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Yields an object's attributes and its class."""
        try:
            state = object.__getattribute__(value, "__dict__")
        except AttributeError:
            state = None
        if type(state) is dict:
            self._found.paths[id(state)] = f"{path}.__dict__"
            self._found.objects[f"{path}.__dict__"] = state
            suffix = " attributes" if path in self._found.holders else ""
            for name, item in self._hold(path + suffix, state, None if self._touched is None else self._reads).items():
                yield f".{name}", item
        slots = [
            name
            for part in type(value).__mro__
            if "__slots__" in vars(part)
            for name, item in vars(part).items()
            if isinstance(item, types.MemberDescriptorType) and self._reads(name)
        ]
        if slots:
            for name, item in self._hold(f"{path} slots", Attributes(value, slots)).items():
                yield f".{name}", item
        yield _class_path(type(value)), type(value)

    def _tensor(self, path: str, value: torch.Tensor) -> Iterator[tuple[str, Any]]:
        self._found.tensors[path] = value
        if value.is_leaf:
            gradient = self._hold(f"{path}.grad", value)["grad"]
            if gradient is not None:
                self._found.gradients.add(f"{path}.grad")
                yield ".grad", gradient
        if parts := parts_of_tensor(value):
            for name, part in self._hold(f"{path} parts", Attributes(value, parts)).items():
                if path in self._found.gradients and isinstance(part, torch.Tensor):
                    self._found.gradients.add(f"{path}.{name}")
                yield f".{name}", part
        if path in self._found.gradients:
            return
        for item in gc.get_referents(value):  # the dicts of its attributes and hooks
            if type(item) is dict and item is value.__dict__ and not item:
                self._found.empty.append(item)  # torch creates and drops an empty one by itself
            elif type(item) is dict and item is value.__dict__:
                for name, attribute in self._hold(f"{path} attributes", item, None if self._touched is None else self._reads).items():
                    yield f".{name}", attribute
            elif isinstance(item, dict):
                yield ".hooks", item
        if not is_trusted_class(type(value)):
            yield _class_path(type(value)), type(value)

    def _class(self, path: str, kind: type) -> Iterator[tuple[str, Any]]:
        """Yields a class's methods, class attributes and bases. Of a trusted class, only methods, which could be patched."""
        trusted = is_trusted_class(kind)

        def counts(name: str, value: Any) -> bool:
            if trusted:
                return self._reads(name) and (callable(value) or isinstance(value, (staticmethod, classmethod, property)))
            return name not in _NOT_READ and self._reads(name) and not isinstance(value, types.MemberDescriptorType)

        for name, value in self._hold(path, ClassDict(kind, counts)).items():
            if name != "__bases__" and not (trusted and _is_trusted_method(value)):
                yield f".{name}", value
        for base in kind.__mro__[1:]:
            yield _class_path(base), base
        if type(kind) is not type:
            yield _class_path(type(kind)), type(kind)

    def _function(self, path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        code = function.__code__
        self._found.codes.update(codes(code))
        settings = self._hold(f"{path} defaults", Attributes(function, ("__code__", "__defaults__", "__kwdefaults__")))
        if self._touched is not None and code not in self._touched.codes:
            return
        for name in ("__defaults__", "__kwdefaults__"):
            yield f".{name}", settings.get(name)
        names = names_of(code)
        self._names |= names.all
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) in self._found.paths:
                continue
            self._found.paths[id(cell)] = f"{path} {name}"
            self._found.objects[f"{path} {name}"] = cell
            for item in self._hold(f"{path} {name}", cell).values():
                self._waiting.append((name, item, names.all))
        for name, item in self._hold(f"{path} attributes", function.__dict__, self._reads).items():
            yield f".{name}", item
        if self._touched is None and not is_installed_file(code.co_filename) and not is_trusted_function(function):
            self._globals(function.__globals__, getattr(function, "__builtins__", {}), names.read, names.all)
            self._imports(names.imports, names.all)

    # Modules.

    def _touched_namespaces(self, touched: ExecutedCode) -> None:
        for values, read, names in touched.namespaces:
            if not str(values.get("__name__")).startswith("dynaxla."):
                self._globals(values, values.get("__builtins__", {}), read, names)
                if not is_trusted_namespace(values):
                    self._names |= names
        self._imports(touched.imports, touched.names or frozenset())

    def _imports(self, imports: Any, names: Names) -> None:
        for name in imports:
            if (module := sys.modules.get(name)) is not None:
                self._waiting.append((f"import {name}", module, names))

    def _globals(self, values: dict[str, Any], builtins: Any, read: Any, names: Names) -> None:
        by_trusted = is_trusted_namespace(values)
        known = vars(builtins) if isinstance(builtins, types.ModuleType) else builtins
        for name in read:
            if name in values:
                self._note(values, name, name, names, by_trusted, by_trusted)
            else:
                self._space(values).target.names.add(name)
                if name in known:
                    self._note(known, name, name, names, True, by_trusted)

    def _module(self, path: str, module: types.ModuleType, names: Names, by_trusted: bool) -> None:
        """Notes the globals of a module that have one of these names. With `by_trusted`, trusted code names them."""
        chain = id(module), id(names), by_trusted
        if chain in self._chains:
            return
        self._chains.add(chain)
        self._kept.append(names)
        values, trusted = vars(module), is_trusted_module(module)
        for name in sorted(names & values.keys()):
            self._note(values, name, f"{path}.{name}", names, trusted, by_trusted)

    def _note(self, values: dict[str, Any], name: str, path: str, names: Names, trusted: bool, by_trusted: bool) -> None:
        """Notes a global.

        Args:
            values: the module's globals.
            name: the global's name.
            path: its path.
            names: the names that the code uses.
            trusted: True if the module is trusted: then only globals that could be patched count.
            by_trusted: True if the code that reads the global is trusted.
        """
        value = values[name]
        if trusted and isinstance(vars(type(value)).get("__getattribute__"), types.FunctionType) and is_trusted_class(type(value)):
            self._space_item(values, name, value)  # any access of its attributes may warn: `torch.distributed.reduce_op`
        elif isinstance(value, types.ModuleType):
            self._space_item(values, name, value)
            if by_trusted:
                self._module(path, value, names, True)
            else:
                self._waiting.append((path, value, names))
        elif not trusted or callable(value) or (not by_trusted and self._is_named(name, value)):
            self._space_item(values, name, value)
            if not (by_trusted and isinstance(value, type) and is_trusted_class(value)):
                self._waiting.append((path, value, names))

    def _is_named(self, name: str, value: Any) -> bool:
        """True if a value of a trusted module counts: one with a fingerprint, or a public one (`os.environ`) if `touched` is given."""
        return content(value) is not NO_CONTENT or (self._touched is not None and name[:1] != "_" and value is not sys.modules)

    def _space_item(self, values: dict[str, Any], name: str, value: Any) -> None:
        holder = self._space(values)
        holder.target.names.add(name)
        holder.items[name] = value

    def _space(self, values: dict[str, Any]) -> Holder:
        found = self._spaces.get(id(values))
        if found is None:
            path = f"globals of {values.get('__name__')}"
            while path in self._found.holders or (self._found.base is not None and path in self._found.base.holders):
                path += "'"
            found = self._spaces[id(values)] = self._found.holders[path] = Holder(Namespace(values), {})
        return found


_BUILTIN = frozenset(
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
    for name in ("__func__", "fget"):
        value = getattr(value, name, None) or value
    return isinstance(value, type) or not isinstance(value, types.FunctionType) or is_known_by_identity(value)
