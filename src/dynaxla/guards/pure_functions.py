"""Allowlist of C functions that only compute, by module and class. Other C functions may have effects, or read state outside Python."""

from __future__ import annotations

import array
import collections
import contextvars
import datetime
import decimal
import functools
import re
import sys
import types
from importlib.machinery import BuiltinImporter, ExtensionFileLoader
from typing import Any

import numpy as np
import torch

from ..runtime import private
from .fingerprints import CACHED_FUNCTION, is_pybind11_record
from .trusted_code import module_of

# All functions of these modules only compute, except for the functions listed with the module.
_PURE_MODULES: dict[str, frozenset[str]] = {
    "builtins": frozenset(("print", "open", "input", "exec", "eval", "globals", "__import__", "breakpoint", "exit", "quit")),
    "math": frozenset(),
    "cmath": frozenset(),
    "_operator": frozenset(),
    "_functools": frozenset(),
    "functools": frozenset(),
    "itertools": frozenset(),
    "_collections": frozenset(),
    "collections": frozenset(),
    "_collections_abc": frozenset(),
    "_bisect": frozenset(),
    "_heapq": frozenset(),
    "_struct": frozenset(),
    "_abc": frozenset(),
    "_weakref": frozenset(),
    "_sre": frozenset(),
    "_string": frozenset(),
    "_statistics": frozenset(),
    "_typing": frozenset(),
    "unicodedata": frozenset(),
    "binascii": frozenset(),
    "_json": frozenset(),
    "_opcode": frozenset(),
    "_copy": frozenset(),
    "_warnings": frozenset(),  # showing a warning writes to a file, and that write is reported separately
}
# torch uses these functions to generate Python functions from source text at their first use.
_CODE_GENERATORS = frozenset(("exec", "eval", "globals", "__import__"))
_PURE_SYS_FUNCTIONS = frozenset(("getrefcount", "getsizeof", "intern", "exc_info", "exception", "_getframe", "is_finalizing"))
# Functions whose results identify an object or a thread. Trusted code uses these functions for lookups that do not show in results. User
# code may look up another value with them in a later call.
_IDENTIFYING = frozenset(("builtins.id", "_thread.get_ident"))
# Modules and classes that torch's own Python code uses without a visible effect: locks, names of threads, clocks for profilers.
_WITHIN_TORCH = frozenset(
    ("_thread", "time", "_contextvars", "atexit", "gc", "sys", "_weakref", "_imp", "posix", "_warnings_filters", "decimal")
)
_WITHIN_TORCH_CLASSES = ("_thread.", "_contextvars.", "contextvars.", "_weakrefset.", "_abc.")
# torch's C functions with effects outside tensors: on files, generators, threads, other processes. Functions that change settings are not
# listed, because torch's settings are compared before and after a run.
_TORCH_WITH_EFFECTS = re.compile(
    r"seed|rng|random|_file|file_|save|load|import_ir|num_threads|num_interop|distributed|_rpc|profiler|kineto|_jit_|crash|"
    r"_initExtension|share|_fd|filename|warn_always|record_memory|memory_snapshot|empty_?cache|IPC|ipc|monitor|register|_library|add_docstr|"
    r"swap_tensor"
)
# Functions that only compute, although their names match `_TORCH_WITH_EFFECTS`.
_TORCH_EXCEPTIONS = frozenset(
    (
        "_is_default_generator",
        "_register_hook",
        "bernoulli",
        "_jit_get_operation",
        "_get_operation_overload",
        "_profiler_enabled",
        "_is_autograd_profiler_enabled",
        "_record_function_with_args_enter",
        "_record_function_with_args_exit",
        "random_",
        "register_hook",
        "register_prehook",
        "_shape_as_tensor",
        "_register_post_accumulate_grad_hooks",
    )
)
_NUMPY_WITH_EFFECTS = frozenset(
    ("fromfile", "tofile", "dump", "save", "load", "seterr", "seterrobj", "_seterrobj", "setbufsize", "set_string_function")
)
# Methods of these classes only compute, or change state that a walk sees.
_PURE_CLASSES: tuple[type, ...] = (
    str,
    int,
    float,
    complex,
    bytes,
    bytearray,
    tuple,
    list,
    dict,
    set,
    frozenset,
    range,
    slice,
    memoryview,
    collections.deque,
    collections.OrderedDict,
    collections.defaultdict,
    types.MappingProxyType,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
    type((lambda: (yield))()),
    types.FunctionType,
    types.MethodType,
    types.CodeType,
    types.GenericAlias,
    property,
    array.array,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    contextvars.ContextVar,  # a walk sees its value
    contextvars.Token,
    re.Pattern,
    re.Match,
    BaseException,
    functools.partial,
    CACHED_FUNCTION,
    np.ndarray,
    np.generic,
    np.dtype,
    np.ufunc,
    torch.Tensor,
    torch.Tensor.__base__,
    torch.Size,
    torch.dtype,
    torch.device,
    torch.UntypedStorage,
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
)
# Methods of a process group that call a collective. A recording records the op of the collective, so these methods hide no effect.
_COLLECTIVES = frozenset(
    (
        *("allgather", "all_gather_single", "_allgather_base", "allreduce", "allreduce_coalesced", "broadcast"),
        *("_reduce_scatter_base", "reduce_scatter_single", "wait"),
    )
)
# Queries of a process group.
_GROUP_QUERIES = frozenset(("rank", "size", "name", "__eq__", "__hash__", "_get_backend_name", "_resolve_process_group"))
_METHODS_WITH_EFFECTS = frozenset(
    ("tofile", "dump", "share_memory_", "_share_memory_", "_share_fd_cpu_", "_share_filename_cpu_", "from_file", "_write_file")
)
# Class methods that only compute. datetime.now and date.today are not listed, because they read a clock.
_CLASS_METHODS = frozenset(
    (
        "__new__",
        "fromkeys",
        "maketrans",
        "from_bytes",
        "fromhex",
        "mro",
        "__subclasses__",
        "__subclasshook__",
        "__init_subclass__",
        "__prepare__",
        "__instancecheck__",
        "__subclasscheck__",
        "__class_getitem__",
        "__dir__",
        "__sizeof__",
        "_make_subclass",
        "_make_wrapper_subclass",
        "_make_dtensor",
        "from_iterable",
    )
)


def effect_of(function: Any, within_torch: bool, within_trusted: bool = False) -> str:
    """Returns the name of a C function that may do more than compute; "" if it only computes.

    Args:
        function: the function as `sys.setprofile` reports it.
        within_torch: True if torch's own Python code calls the function.
        within_trusted: True if trusted code (trusted_code.py) calls the function, such as the standard library's.
    """
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", "?")
    if owner is None or isinstance(owner, types.ModuleType) or is_pybind11_record(owner):
        module = getattr(function, "__module__", None) or getattr(owner, "__name__", "")
        module = str(module)
        if f"{module}.{name}" in _IDENTIFYING:
            return "" if within_torch or within_trusted else f"{module}.{name}"
        if _is_group_query(module, name, within_torch) or _computes(module, name, within_torch):
            return ""
        return f"{module}.{name}"
    if isinstance(owner, type):
        if name in _CLASS_METHODS or name.startswith("__"):
            return ""
        if name == "apply" and issubclass(owner, torch.autograd.Function):
            return ""  # its forward and backward functions are observed separately
        if module_of(owner).startswith("torch") and _torch_computes(name):
            return ""
        return f"{module_of(owner)}.{owner.__qualname__}.{name}"
    kind = type(owner)
    module = module_of(kind)
    full_name = f"{module}.{kind.__qualname__}.{name}"
    if isinstance(owner, _PURE_CLASSES) or (module.partition(".")[0] == "numpy" and ".random" not in module):
        return full_name if name in _METHODS_WITH_EFFECTS else ""
    if within_torch and f"{module}.".startswith(_WITHIN_TORCH_CLASSES):
        return ""
    if isinstance(owner, torch.Generator):
        return full_name
    if _is_group_query(module, name, within_torch):
        return ""
    if module.startswith(("torch", "functorch")) and not hasattr(kind, "write_record") and "distributed" not in module:
        return "" if _torch_computes(name) else full_name
    return "" if name in _OBJECT_METHODS else full_name


_OBJECT_METHODS = frozenset(name for name in dir(object) if callable(getattr(object, name)))


def constructor_effect_of(kind: type) -> str:
    """Returns the name of a C class whose constructor may do more than compute; "" for other classes."""
    module = module_of(kind)
    spec = getattr(sys.modules.get(module), "__spec__", None)
    if spec is None or not (spec.loader is BuiltinImporter or isinstance(spec.loader, ExtensionFileLoader)):
        return ""
    computes = module in _PURE_MODULES or module.partition(".")[0] in ("torch", "numpy", "array", "types", "datetime")
    return "" if computes or issubclass(kind, BaseException) else f"{module}.{kind.__qualname__}()"


def _is_group_query(module: str, name: str, within_torch: bool) -> bool:
    """True if a function queries DTensor placements or a process group, or calls a collective that can be recorded.

    Users may call `wait` of a collective directly. For other functions, the result is True only if torch's own Python code calls them.
    """
    if module == private.PROCESSES:
        is_query = name in _GROUP_QUERIES or name in _COLLECTIVES or name.startswith("_get_") or name.endswith("_name")
        return name == "wait" or (within_torch and is_query)
    return within_torch and module == private.PLACEMENTS


def _computes(module: str, name: str, within_torch: bool) -> bool:
    if module in _PURE_MODULES:
        return name not in _PURE_MODULES[module] or (within_torch and name in _CODE_GENERATORS)
    if module == "sys":
        return name in _PURE_SYS_FUNCTIONS or within_torch
    if module.partition(".")[0] in ("torch", "functorch") or module in ("", "_VariableFunctions"):
        return "distributed" not in module and _torch_computes(name)
    if module.partition(".")[0] == "numpy":
        return ".random" not in module and name not in _NUMPY_WITH_EFFECTS
    return within_torch and module in _WITHIN_TORCH


def _torch_computes(name: str) -> bool:
    return (
        name in _TORCH_EXCEPTIONS
        or "saved_tensor" in name
        or _TORCH_WITH_EFFECTS.search(name) is None
        or name.startswith(("rand", "_random", "bernoulli", "_fused", "_foreach"))
    )
