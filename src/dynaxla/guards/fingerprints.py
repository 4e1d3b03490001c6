"""Fingerprints of Python objects whose contents never change: numbers of every kind, strings, code objects, dates, dtypes.

All other objects are compared in one of these ways:

- immutable containers, such as slices, by their parts (`parts_of`)
- arrays by their bytes (`buffer_contents`)
- mutable containers by their entries (slots.py)
- trusted functions, C functions of modules, and similar objects by identity (`is_compared_by_identity`)

An object with state in C that Python cannot inspect (`hides_state`) cannot be compared.
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

# Classes of plain values. In a path such a value is text. In a template (training/recordings.py) it stands for itself.
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum, range)
# The result of `fingerprint` for an object without a fingerprint.
NO_FINGERPRINT: Any = type("NoFingerprint", (), {"__repr__": lambda _: "no fingerprint"})()

# Classes of objects that are compared by identity alone.
_BY_IDENTITY = (
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.GenericAlias,
    types.UnionType,
    torch.Generator,  # its state is not compared: each random draw changes it
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    torch._ops.HigherOrderOperator,
    np.ufunc,
    type(np.reshape),
    type(inspect.Attribute.name),  # the descriptor of a named tuple's field
)
# Classes written in C whose instances take more memory than their declared fields, but have no state that a walk would miss.
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
    """The identity of an object, as a hashable fingerprint: equal only for the same object.

    It keeps the object alive, so that no later object gets the same id.
    """

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"<{type(self.value).__qualname__}>"


_identities: weakref.WeakValueDictionary[int, Identity] = weakref.WeakValueDictionary()


def identity_of(value: Any) -> Identity:
    """Returns the `Identity` of an object. Each call returns the same instance, as long as a fact or key refers to it."""
    found = _identities.get(id(value))
    if found is None or found.value is not value:
        found = _identities[id(value)] = Identity(value)
    return found


def _itself(value: Any) -> Any:
    return value


def _range(value: range) -> Any:
    return tuple(map(fingerprint, (value.start, value.stop, value.step)))


def _reduced(value: Any) -> Any:
    return _fingerprints_of(value.__reduce__()[:2])


def _fingerprints_of(values: Any) -> Any:
    """Returns the fingerprint of nested tuples and dicts, with a fingerprint for each item; `NO_FINGERPRINT` if an item has none."""
    if isinstance(values, tuple):
        found = tuple(map(_fingerprints_of, values))
        return NO_FINGERPRINT if any(item is NO_FINGERPRINT for item in found) else found
    if isinstance(values, dict):
        return _fingerprints_of(tuple(values.items()))
    if isinstance(values, (type, types.BuiltinFunctionType)):
        return identity_of(values)
    if isinstance(values, types.FunctionType) and is_trusted_function(values):
        return identity_of(values)
    return fingerprint(values)


def _scalar(value: np.generic) -> Any:
    return NO_FINGERPRINT if value.dtype.hasobject else (repr(value.dtype), value.tobytes())


def is_process_group_class(cls: type) -> bool:
    """True if a class is `torch.distributed.ProcessGroup` or a subclass of it."""
    return torch.distributed.is_available() and issubclass(cls, torch.distributed.ProcessGroup)


def _placement(spec: Any) -> Any:
    """Returns the mesh, placements and tensor metadata of a DTensorSpec."""
    return identity_of(spec.mesh), repr(spec.placements), repr(spec.tensor_meta)


# Classes of objects that describe processes and their connections, and never change. They are compared by identity.
_PROCESS_CLASSES = frozenset(["torch.distributed.device_mesh.DeviceMesh"])

_FINGERPRINTS: dict[type, Callable[[Any], Any]] = {
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


def fingerprint(value: Any) -> Any:
    """Returns a hashable value: equal for equal objects, different for different objects. `NO_FINGERPRINT` for an object without one."""
    cls: Any = type(value)
    find = _finder(cls)
    found = NO_FINGERPRINT if find is None else find(value)
    return NO_FINGERPRINT if found is NO_FINGERPRINT else (cls, found)


@functools.lru_cache(4096)
def _finder(cls: Any) -> Callable[[Any], Any] | None:
    """Returns the function that computes the fingerprints of a class's instances; None for a class without fingerprints."""
    if cls in _FINGERPRINTS or not is_trusted_class(cls):
        return _FINGERPRINTS.get(cls)
    if issubclass(cls, np.generic):
        return None if issubclass(cls, np.void) else _scalar  # a record may be written: it is a view of an array
    if issubclass(cls, np.dtype):
        return repr
    if issubclass(cls, pathlib.PurePath):
        return str
    module = module_of(cls)
    name = f"{module}.{cls.__qualname__}"
    if name in _PROCESS_CLASSES or module == private.PROCESSES or is_process_group_class(cls):
        return identity_of
    if module == "torch.distributed.tensor.placement_types":
        return repr
    if name == "torch.distributed.tensor._dtensor_spec.DTensorSpec":
        return _placement
    return _reduced if issubclass(cls, _DESCRIBED_BY_REDUCE) else None


def is_pybind11_record(owner: Any) -> bool:
    """True if an object is pybind11's own record of a function. pybind11 stores it as the `__self__` of each function that it wraps."""
    return module_of(type(owner)).startswith("pybind11") or type(owner).__name__ == "PyCapsule"


def is_compared_by_identity(value: Any) -> bool:
    """True for an object that does not change, or whose changes do not matter: its identity is compared, not its contents."""
    if isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
        owner = value.__self__
        return (
            owner is None
            or isinstance(owner, types.ModuleType)
            or is_pybind11_record(owner)
            or (isinstance(owner, type) and is_trusted_class(owner))
        )
    if isinstance(value, types.FunctionType):
        # The closure of a trusted function may have a user's function, if the trusted function is the result of a decorator.
        return not value.__closure__ and "__wrapped__" not in value.__dict__ and is_trusted_function(value)
    if isinstance(value, _BY_IDENTITY) or is_own(value) or type(value) in self_guarding or type(value).__name__ in _COMPILED_FUNCTIONS:
        return True
    if (kernel := private.custom_op_function(value)) is not None:
        return isinstance(kernel, types.FunctionType) and is_trusted_function(kernel)
    wrapped = getattr(value, "__wrapped__", None)
    # JAX's arrays are immutable. A jitted function can be trusted if the function in it can.
    if module_of(type(value)).partition(".")[0] in ("jax", "jaxlib"):
        return wrapped is None or (isinstance(wrapped, types.FunctionType) and is_trusted_function(wrapped))
    return type(value) is CACHED_FUNCTION and is_compared_by_identity(wrapped)


_COMPILED_FUNCTIONS = ("nb_func", "nb_method", "cython_function_or_method", "fused_cython_function")
# The class of functions that `functools.lru_cache` returns.
CACHED_FUNCTION = type(functools.lru_cache(lambda: None))


@functools.lru_cache(4096)
def _hides_state(cls: Any) -> bool:
    """True if instances of a class may have state in C that Python cannot inspect.

    Such state is assumed if the class, or a base that is not in `_VISIBLE_STATE`, adds more memory to an instance than its declared fields
    take; and for threads, exceptions, weak references, NumPy's records, and classes without a constructor.
    """
    if issubclass(cls, (threading.Thread, BaseException, weakref.ref, np.void)):
        return True
    if cls.__flags__ & _DISALLOWS_INSTANCES:
        return True
    for base_class in cls.__mro__:
        if base_class in _VISIBLE_STATE:
            continue
        fields = vars(base_class)
        declared = sum(isinstance(item, types.MemberDescriptorType) for item in fields.values())
        declared += ("__weakref__" in fields) + ("__dict__" in fields)
        parent = base_class.__base__ or object
        if base_class.__basicsize__ - parent.__basicsize__ > 8 * declared:
            return True
    return False


# Py_TPFLAGS_DISALLOW_INSTANTIATION: Python code cannot create instances of the class, for example of built-in iterators.
_DISALLOWS_INSTANCES = 1 << 7


def hides_state(value: Any) -> bool:
    """True if a value may have state that Python cannot inspect."""
    cls: Any = type(value)
    return _hides_state(cls)


@dataclasses.dataclass(frozen=True)
class BufferContents:
    """The contents of an array or buffer.

    Attributes:
        metadata: the class and further metadata, such as dtype, shape and strides.
        data: the bytes; None for an array of more than `MAX_COMPARED_BYTES`; b"" if only the metadata is compared.
    """

    metadata: Any
    data: bytes | None


def buffer_contents(value: Any, with_data: bool = True) -> BufferContents | None:
    """Returns the contents of an instance of `BUFFER_TYPES`; None for an array of objects and for a released memoryview.

    Args:
        value: the array or buffer.
        with_data: False to return only the metadata, with b"" as `data`.
    """
    if isinstance(value, np.ndarray):
        metadata: Any = (type(value), repr(value.dtype), value.dtype, value.shape, value.strides, value.flags.writeable)
        if value.dtype.hasobject:
            return None
    elif isinstance(value, array.array):
        metadata = (type(value), value.typecode, len(value))
    elif isinstance(value, memoryview):
        try:
            metadata = (memoryview, value.format, value.shape, value.strides)
        except ValueError:
            return None
    else:
        metadata = (type(value),)
    if not with_data:
        return BufferContents(metadata, b"")
    if size_of(value) > MAX_COMPARED_BYTES:
        return BufferContents(metadata, None)
    return BufferContents(metadata, bytes(value) if isinstance(value, bytearray) else value.tobytes())


# The maximum size in bytes of an array whose values are compared.
MAX_COMPARED_BYTES = 1 << 24


def size_of(value: Any) -> int:
    """Returns the size of an instance of `BUFFER_TYPES`, in bytes."""
    return int(value.nbytes) if hasattr(value, "nbytes") else len(value) * int(getattr(value, "itemsize", 1))


# Classes of mutable objects whose values are in a buffer.
BUFFER_TYPES = (np.ndarray, array.array, bytearray, memoryview)


def restore_contents(value: Any, contents: BufferContents) -> bool:
    """Restores the contents of an array or buffer, unless `contents` has no data. Returns True if the contents had changed."""
    if contents.data is None or buffer_contents(value) == contents:
        return False
    if isinstance(value, bytearray):
        value[:] = contents.data
    elif isinstance(value, array.array):
        value[:] = array.array(value.typecode, contents.data)
    elif isinstance(value, np.ndarray):
        _restore_array(value, contents)
    elif not value.readonly:
        target = np.asarray(value)
        np.copyto(target, np.frombuffer(contents.data, target.dtype).reshape(target.shape))
    return True


def _restore_array(target: np.ndarray[Any, Any], contents: BufferContents) -> None:
    """Restores an array's metadata and values.

    NumPy refuses to make a view of a read-only array writeable. The values of such a view are restored together with its base array.
    """
    _, _, dtype, shape, strides, writeable = contents.metadata
    if not target.flags.writeable:
        with contextlib.suppress(ValueError):
            target.flags.writeable = True
    for name, value in {"dtype": dtype, "shape": shape, "strides": strides}.items():
        if getattr(target, name) != value:
            setattr(target, name, value)
    if target.flags.writeable:
        np.copyto(target, np.frombuffer(contents.data or b"", dtype).reshape(shape))
        target.flags.writeable = writeable


def parts_of(value: Any) -> dict[str, Any] | None:
    """Returns the objects that an immutable object of one of these classes refers to, by name; None for an object of another class.

    The classes are methods, `functools.partial`, descriptors, slices, `super` objects, and views of dicts.
    """
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


def builtin_value(value: Any) -> dict[str, Any]:
    """Returns the plain value of an instance of a subclass of int, float, complex, str or bytes, by that base's name: {"int": 3}."""
    return {base.__name__: base(*base.__getnewargs__(value)) for base in _BASES if isinstance(value, base)}
