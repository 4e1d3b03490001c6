"""Fingerprints of Python objects by their contents: numbers of every kind, slices, code, dates.

An object without such a fingerprint is compared by its entries (slots.py) or by its identity, or it cannot be compared.
"""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import gc
import inspect
import logging
import operator
import pathlib
import re
import threading
import types
import typing
import uuid
import weakref
import zoneinfo
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..runtime import private
from ..runtime.guards import self_guarding
from .trusted_code import is_own, is_trusted_class, is_trusted_function, module_of

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum, range)
NO_CONTENT: Any = type("NoContent", (), {"__repr__": lambda _: "no content"})()

# Classes of objects that are compared by identity alone.
_BY_IDENTITY = (
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.GenericAlias,
    types.UnionType,
    logging.Logger,  # calls of its methods are observed where they happen
    torch.Generator,  # the identity, never the state
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    torch._ops.HigherOrderOperator,
    np.ufunc,
    type(np.reshape),
    type(inspect.Attribute.name),  # the descriptor of a named tuple's field
)
# Classes written in C whose instances have no state that a walk misses.
_VISIBLE_STATE = (
    object,
    type,
    dict,
    list,
    tuple,
    set,
    frozenset,
    int,
    float,
    complex,
    str,
    bytes,
    collections.OrderedDict,
    collections.deque,
    functools.partial,
    property,
    staticmethod,
    classmethod,
    super,
    types.ModuleType,
    types.SimpleNamespace,
    torch.Tensor,
    torch.Tensor.__base__,
    torch.Size,
    torch.Generator,
    np.ndarray,
    np.generic,
    # Written in C since Python 3.12. They never change, except for attributes that user code sets on them.
    typing.TypeVar,
    typing.ParamSpec,
    typing.TypeVarTuple,
)
# Classes whose instances are fully described by `__reduce__`: a constructor and its arguments.
_DESCRIBED_BY_REDUCE = (
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    decimal.Decimal,
    decimal.Context,
    operator.attrgetter,
    operator.itemgetter,
    operator.methodcaller,
    zoneinfo.ZoneInfo,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Identity:
    """A fact about one object, equal only for the same object. It keeps the object alive, so that no other object gets its id."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"<{type(self.value).__qualname__}>"


_known: weakref.WeakValueDictionary[int, Identity] = weakref.WeakValueDictionary()


def same(value: Any) -> Identity:
    """Returns the `Identity` of an object: the same one in every walk."""
    found = _known.get(id(value))
    if found is None or found.value is not value:
        found = _known[id(value)] = Identity(value)
    return found


def _itself(value: Any) -> Any:
    return value


def _range(value: range) -> Any:
    return tuple(map(content, (value.start, value.stop, value.step)))


def _reduced(value: Any) -> Any:
    return _all_contents(value.__reduce__()[:2])


def _all_contents(values: Any) -> Any:
    """Returns the contents of all items in nested tuples and dicts; `NO_CONTENT` if an item has none."""
    if isinstance(values, tuple):
        found = tuple(map(_all_contents, values))
        return NO_CONTENT if any(item is NO_CONTENT for item in found) else found
    if isinstance(values, dict):
        return _all_contents(tuple(values.items()))
    if isinstance(values, (type, types.BuiltinFunctionType)):
        return same(values)
    if isinstance(values, types.FunctionType) and is_trusted_function(values):
        return same(values)
    return content(values)


def _scalar(value: np.generic) -> Any:
    return NO_CONTENT if value.dtype.hasobject else (repr(value.dtype), value.tobytes())


def is_of_group(kind: type) -> bool:
    """True if a class is `torch.distributed.ProcessGroup` or a subclass of it."""
    return torch.distributed.is_available() and issubclass(kind, torch.distributed.ProcessGroup)


def _placement(spec: Any) -> Any:
    """Returns the mesh, placements and tensor metadata of a DTensorSpec."""
    return same(spec.mesh), repr(spec.placements), repr(spec.tensor_meta)


# Classes of objects that describe processes and their connections, and never change.
_PROCESS_CLASSES = frozenset(["torch.distributed.device_mesh.DeviceMesh"])

_CONTENTS: dict[type, Callable[[Any], Any]] = {
    **dict.fromkeys((type(None), bool, int, str, bytes, type(...), type(NotImplemented)), _itself),
    **dict.fromkeys((torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme, types.CodeType), _itself),
    float: float.__repr__,
    complex: lambda value: (repr(value.real), repr(value.imag)),
    range: _range,
    fractions.Fraction: lambda value: (value.numerator, value.denominator),
    uuid.UUID: lambda value: value.int,
    re.Pattern: lambda value: (type(value.pattern), value.pattern, value.flags),
    torch.finfo: lambda value: value.dtype,
    torch.iinfo: lambda value: value.dtype,
    np.finfo: lambda value: value.dtype,
    np.iinfo: lambda value: value.dtype,
}


def content(value: Any) -> Any:
    """Returns a hashable fingerprint: equal for equal objects, different for different objects. `NO_CONTENT` for an object without one."""
    kind: Any = type(value)
    find = _finder(kind)
    found = NO_CONTENT if find is None else find(value)
    return NO_CONTENT if found is NO_CONTENT else (kind, found)


@functools.lru_cache(4096)
def _finder(kind: Any) -> Callable[[Any], Any] | None:
    """Returns the function that computes the fingerprints of a class's instances; None for a class without fingerprints."""
    if kind in _CONTENTS or not is_trusted_class(kind):
        return _CONTENTS.get(kind)
    if issubclass(kind, np.generic):
        return _scalar
    if issubclass(kind, np.dtype):
        return repr
    if issubclass(kind, pathlib.PurePath):
        return str
    module = module_of(kind)
    name = f"{module}.{kind.__qualname__}"
    if name in _PROCESS_CLASSES or module == private.PROCESSES or is_of_group(kind):
        return same
    if module == "torch.distributed.tensor.placement_types":
        return repr
    if name == "torch.distributed.tensor._dtensor_spec.DTensorSpec":
        return _placement
    return _reduced if issubclass(kind, _DESCRIBED_BY_REDUCE) else None


def is_record(owner: Any) -> bool:
    """True if an object is the `__self__` that pybind11 gives its functions."""
    return module_of(type(owner)).startswith("pybind11") or type(owner).__name__ == "PyCapsule"


def is_known_by_identity(value: Any) -> bool:
    """True if an object is trusted not to change, so that comparing identities suffices."""
    if isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
        owner = value.__self__
        return (
            owner is None
            or isinstance(owner, types.ModuleType)
            or is_record(owner)
            or (isinstance(owner, type) and is_trusted_class(owner))
        )
    if isinstance(value, types.FunctionType):
        # A decorator of torch returns a function of torch, which calls the user's function.
        return not value.__closure__ and "__wrapped__" not in value.__dict__ and is_trusted_function(value)
    if isinstance(value, _BY_IDENTITY) or is_own(value) or type(value) in self_guarding or type(value).__name__ in _COMPILED_FUNCTIONS:
        return True
    if (made := private.custom_op_function(value)) is not None:
        return isinstance(made, types.FunctionType) and is_trusted_function(made)
    wrapped = getattr(value, "__wrapped__", None)
    if module_of(type(value)).partition(".")[0] in ("jax", "jaxlib"):  # arrays are immutable; a jitted function is its __wrapped__
        return wrapped is None or (isinstance(wrapped, types.FunctionType) and is_trusted_function(wrapped))
    return type(value) is _CACHED_FUNCTION and is_known_by_identity(wrapped)


_COMPILED_FUNCTIONS = ("nb_func", "nb_method", "cython_function_or_method", "fused_cython_function")
_CACHED_FUNCTION = type(functools.lru_cache(lambda: None))


@functools.lru_cache(4096)
def _hides_state(kind: Any) -> bool:
    """True if instances have state in C: the class or a base takes more memory than its declared fields, unless in `_VISIBLE_STATE`."""
    if issubclass(kind, (threading.Thread, BaseException, weakref.ref)):
        return True
    if kind.__flags__ & _DISALLOWS_INSTANCES:
        return True
    for part in kind.__mro__:
        if part in _VISIBLE_STATE:
            continue
        fields = vars(part)
        declared = sum(isinstance(item, types.MemberDescriptorType) for item in fields.values())
        declared += ("__weakref__" in fields) + ("__dict__" in fields)
        base = part.__base__ or object
        if part.__basicsize__ - base.__basicsize__ > 8 * declared:
            return True
    return False


_DISALLOWS_INSTANCES = 1 << 7  # Py_TPFLAGS_DISALLOW_INSTANTIATION: iterators, and other objects that only C code creates


def hides_state(value: Any) -> bool:
    """True if a value has state that Python cannot inspect."""
    kind: Any = type(value)
    return _hides_state(kind)


@dataclasses.dataclass(frozen=True)
class Values:
    """The contents of an array or buffer.

    Attributes:
        kind: the class and the metadata, such as dtype and shape.
        data: the bytes; None for an array that is too large to compare.
    """

    kind: Any
    data: bytes | None


def values_of(value: Any, with_data: bool = True) -> Values | None:
    """Returns the contents of an array, bytearray or memoryview; None for an array of objects and for a released memoryview.

    Args:
        value: the array.
        with_data: False for a result whose `data` is b"".
    """
    if isinstance(value, np.ndarray):
        kind: Any = (type(value), repr(value.dtype), value.dtype, value.shape, value.strides, value.flags.writeable)
        if value.dtype.hasobject:
            return None
    elif isinstance(value, array.array):
        kind = (type(value), value.typecode, len(value))
    elif isinstance(value, memoryview):
        try:
            kind = (memoryview, value.format, value.shape, value.strides)
        except ValueError:
            return None
    else:
        kind = (type(value),)
    if not with_data:
        return Values(kind, b"")
    if size_of(value) > LARGE:
        return Values(kind, None)
    return Values(kind, bytes(value) if isinstance(value, bytearray) else value.tobytes())


# The maximum size in bytes of an array that is compared.
LARGE = 1 << 24


def size_of(value: Any) -> int:
    """Returns the size of an array in bytes."""
    return int(value.nbytes) if hasattr(value, "nbytes") else len(value) * int(getattr(value, "itemsize", 1))


HOLDS_VALUES = (np.ndarray, array.array, bytearray, memoryview)


def restore_values(value: Any, values: Values) -> bool:
    """Restores the contents of an array, unless `values` has no data. Returns True if the contents had changed."""
    if values.data is None or values_of(value) == values:
        return False
    if isinstance(value, bytearray):
        value[:] = values.data
    elif isinstance(value, array.array):
        value[:] = array.array(value.typecode, values.data)
    elif isinstance(value, np.ndarray):
        _restore_array(value, values)
    elif not value.readonly:
        target = np.asarray(value)
        np.copyto(target, np.frombuffer(values.data, target.dtype).reshape(target.shape))
    return True


def _restore_array(array: np.ndarray[Any, Any], values: Values) -> None:
    """Restores an array's metadata and values.

    An array that cannot be made writable is a view of a read-only array. Its values are restored with the values of that array.
    """
    _, _, dtype, shape, strides, writeable = values.kind
    if not array.flags.writeable:
        with contextlib.suppress(ValueError):
            array.flags.writeable = True
    for name, value in {"dtype": dtype, "shape": shape, "strides": strides}.items():
        if getattr(array, name) != value:
            setattr(array, name, value)
    if array.flags.writeable:
        np.copyto(array, np.frombuffer(values.data or b"", dtype).reshape(shape))
        array.flags.writeable = writeable


def parts_of(value: Any) -> dict[str, Any] | None:
    """Returns the parts of an immutable object by name; None for an object without parts."""
    if isinstance(value, (types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)):
        if isinstance(value, types.MethodType):
            return {"__self__": value.__self__, "__func__": value.__func__}
        return {"__self__": value.__self__, "__name__": value.__name__}
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, property):
        return {"fget": value.fget, "fset": value.fset, "fdel": value.fdel}
    if isinstance(value, (staticmethod, classmethod)):
        return {"__func__": value.__func__}
    if isinstance(value, functools.cached_property):
        return {"func": value.func, "attrname": value.attrname}
    if type(value) is slice:
        return {"start": value.start, "stop": value.stop, "step": value.step}
    if type(value) is super:
        return {name: getattr(value, name) for name in ("__thisclass__", "__self__")}
    if isinstance(value, _VIEWS):
        return {"mapping": gc.get_referents(value)[0]}
    return None


_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))


_BASES: tuple[Any, ...] = (int, float, complex, str, bytes)


def plain_part(value: Any) -> dict[str, Any]:
    """Returns the plain value of an instance of a subclass of int, float, complex, str or bytes, by the name of that base class."""
    return {base.__name__: base(*base.__getnewargs__(value)) for base in _BASES if isinstance(value, base)}
