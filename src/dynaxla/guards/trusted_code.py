"""Trusted code: the standard library, dynaxla, torch, JAX, NumPy, and a few packages that torch and JAX need.

The code in these packages does not change while a process runs. So trusted functions and classes are compared by identity: a monkeypatch
puts another object in their place. All other code is inspected, wherever it is installed: notebooks, scripts, timm, transformers.
"""

from __future__ import annotations

import builtins
import functools
import importlib.util
import sys
import sysconfig
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "functorch", "torchgen", "jax", "jaxlib", "numpy", "ml_dtypes", "opt_einsum", "typing_extensions")
_OWN_FOLDER = str(Path(__file__).parents[1])
_STANDARD_LIBRARY = tuple({sysconfig.get_paths()[name] + "/" for name in ("stdlib", "platstdlib")})
_INSTALLED = ("/site-packages/", "/dist-packages/")
# The flag of classes that are created at run time, as all classes of Python code are (Py_TPFLAGS_HEAPTYPE).
HEAP_TYPE = 1 << 9

# The number of globals of a named tuple's constructor: `__name__`, `__builtins__` and `_tuple_new`.
_NAMEDTUPLE_GLOBALS = 3


@functools.cache
def _folders() -> tuple[str, ...]:
    """Returns the folders of the trusted packages, and the files of trusted packages that consist of one module."""
    found = [f"{_OWN_FOLDER}/"]
    for name in _PACKAGES:
        module = sys.modules.get(name)
        spec = None if module is not None else importlib.util.find_spec(name)
        file = getattr(module, "__file__", None) or getattr(spec, "origin", None)
        if file is not None:
            found.append(f"{Path(file).parent}/" if Path(file).stem == "__init__" else file)
    return tuple(found)


@functools.lru_cache(4096)
def is_trusted_file(file: str) -> bool:
    """True if a source file belongs to the standard library or to a trusted package."""
    if file.startswith(_folders()) or file.startswith("<frozen "):
        return True
    return file.startswith(_STANDARD_LIBRARY) and not any(part in file for part in _INSTALLED)


def is_installed_file(file: str) -> bool:
    """True if a source file belongs to an installed package, trusted or not. Users do not edit such a file in a notebook."""
    return any(part in file for part in _INSTALLED)


def is_trusted_namespace(values: Mapping[str, Any]) -> bool:
    """True if globals belong to a trusted module. A module without a file must be built in, or belong to a trusted package."""
    name, file = values.get("__name__"), values.get("__file__")
    if not isinstance(name, str):
        return False
    if name.startswith("namedtuple_") and values.get("_tuple_new") is tuple.__new__ and len(values) <= _NAMEDTUPLE_GLOBALS:
        return True  # the constructor that `collections.namedtuple` writes
    if isinstance(file, str):
        return is_trusted_file(file)
    module = sys.modules.get(name)
    if module is None or vars(module) is not values:
        return False
    root = name.partition(".")[0]
    return name != "__main__" and (root in sys.stdlib_module_names or root in _PACKAGES)


def module_of(kind: type) -> str:
    """Returns the name of the module that defines a class; "" if the class has none.

    A metaclass that defines `__module__` for its classes, as Cython's does, has a descriptor instead of its own module's name.
    """
    name = getattr(kind, "__module__", "")
    return name if isinstance(name, str) else ""


def is_trusted_module(module: types.ModuleType) -> bool:
    """True if a module is trusted. The module may be an instance of a subclass of ModuleType."""
    kind = type(module)
    if kind is not types.ModuleType and module_of(kind).partition(".")[0] in _PACKAGES and is_trusted_class(kind):
        return True  # such as torch.ops.aten
    return is_trusted_namespace(vars(module))


def is_trusted_function(function: types.FunctionType) -> bool:
    """True if a function's globals are trusted.

    The function's `__module__` and file are no evidence: `functools.wraps` copies `__module__`, and code may have no file.
    """
    return is_trusted_namespace(function.__globals__)


def is_trusted_class(kind: type) -> bool:
    """True if a class is written in C, or defined in a trusted module."""
    if not kind.__flags__ & HEAP_TYPE:
        return True
    module = sys.modules.get(module_of(kind))
    if module is None or module is builtins or not isinstance(module, types.ModuleType):
        return False  # a class of code that runs without a `__name__` has the module `builtins`
    return is_trusted_namespace(vars(module))


def is_own(value: Any) -> bool:
    """True for an instance of a class in guards/ or training/. A step may reach such objects: its name refers to the compiled step."""
    return module_of(type(value)).startswith(("dynaxla.guards", "dynaxla.training"))
