"""Which code is trusted not to change while a process runs: the standard library, torch, JAX, NumPy and dynaxla.

Trusted functions and classes are known by their identity, which a monkeypatch changes. All other code is looked into, wherever it is
installed: notebooks, scripts, timm, transformers.
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

_PACKAGES = ("torch", "functorch", "torchgen", "jax", "jaxlib", "numpy", "ml_dtypes", "opt_einsum")
_OWN = str(Path(__file__).parents[1])
_STANDARD = tuple({sysconfig.get_paths()[name] + "/" for name in ("stdlib", "platstdlib")})
_INSTALLED = ("/site-packages/", "/dist-packages/")
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made at run time, as all classes of Python code are


# What the globals of a named tuple's constructor hold: this name, the builtins, and the constructor of tuples.
_OF_NAMEDTUPLE = 3


@functools.cache
def _folders() -> tuple[str, ...]:
    """Where the trusted packages lie."""
    found = [_OWN]
    for name in _PACKAGES:
        module = sys.modules.get(name)
        spec = None if module is not None else importlib.util.find_spec(name)
        file = getattr(module, "__file__", None) or getattr(spec, "origin", None)
        if file is not None:
            found.append(str(Path(file).parent))
    return tuple(f"{folder}/" for folder in found)


@functools.lru_cache(4096)
def is_trusted_file(file: str) -> bool:
    """Whether a source file belongs to the standard library, torch, JAX, NumPy or dynaxla."""
    if file.startswith(_folders()) or file.startswith("<frozen "):
        return True
    return file.startswith(_STANDARD) and not any(part in file for part in _INSTALLED)


def is_installed_file(file: str) -> bool:
    """Whether code comes from an installed package: not trusted, but not what a user edits in a notebook either."""
    return any(part in file for part in _INSTALLED)


def is_trusted_namespace(values: Mapping[str, Any]) -> bool:
    """Whether a module's globals are those of a trusted module. What has no file is trusted only if Python itself brings it."""
    name, file = values.get("__name__"), values.get("__file__")
    if not isinstance(name, str):
        return False
    if name.startswith("namedtuple_") and values.get("_tuple_new") is tuple.__new__ and len(values) <= _OF_NAMEDTUPLE:
        return True  # the constructor that `collections.namedtuple` writes
    if isinstance(file, str):
        return is_trusted_file(file)
    module = sys.modules.get(name)
    if module is None or vars(module) is not values:
        return False
    root = name.partition(".")[0]
    return name != "__main__" and (root in sys.stdlib_module_names or root in _PACKAGES)


def module_of(kind: type) -> str:
    """Name of the module that defines a class; "" where the class has none.

    A metaclass that defines `__module__` for its classes, as Cython's does, has the descriptor in place of a name of its own.
    """
    name = getattr(kind, "__module__", "")
    return name if isinstance(name, str) else ""


def is_trusted_module(module: types.ModuleType) -> bool:
    """Whether a module is of one of those, also where it is an object of a class of its own."""
    kind = type(module)
    if kind is not types.ModuleType and module_of(kind).partition(".")[0] in _PACKAGES and is_trusted_class(kind):
        return True  # such as torch.ops.aten
    return is_trusted_namespace(vars(module))


def is_trusted_function(function: types.FunctionType) -> bool:
    """By the globals that it runs in: `functools.wraps` copies names, and generated code has no file."""
    return is_trusted_namespace(function.__globals__)


def is_trusted_class(kind: type) -> bool:
    """Whether a class is written in C or defined in a trusted module."""
    if not kind.__flags__ & _HEAP_TYPE:
        return True
    module = sys.modules.get(module_of(kind))
    if module is None or module is builtins or not isinstance(module, types.ModuleType):
        return False  # code that runs without a module's name says that its classes are of `builtins`
    return is_trusted_namespace(vars(module))


def is_own(value: Any) -> bool:
    """Whether it is a compiled step, such as the one under whose name the function can find itself."""
    return module_of(type(value)).startswith("dynaxla.training")
