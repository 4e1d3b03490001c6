"""dynaxla: XLA as a compiler for PyTorch. `torch.compile(model, backend="dynaxla")`.

`__init__.pyi` lists the public names. Type checkers read it, and so does this module. A name is imported at its first use, because an
import of torch and JAX takes seconds, and `dynaxla --help` needs neither.
"""

from __future__ import annotations

import importlib
import os
import sys

__version__ = "0.1.0"

# `forks` is imported immediately, because it must register its handlers before the process forks. It needs neither torch nor JAX.
importlib.import_module(".forks", __name__)


def _modules_of_public_names() -> dict[str, str]:
    """Returns the module of each public name. A line of the stub is "from MODULE import NAME as NAME"."""
    stub = __spec__.loader.get_data(os.path.join(__path__[0], "__init__.pyi")).decode()
    imports = [line.split() for line in stub.splitlines() if line.startswith("from ")]
    return {name: module for _, module, _, name, *_ in imports}


_PUBLIC = _modules_of_public_names()
__all__ = list(_PUBLIC)
# Public names that do not need torch. Each is imported alone. The first use of any other public name imports all public names.
_WITHOUT_TORCH = ("errors", "load")
# Modules that become attributes of dynaxla at their first use, e.g. dynaxla.observe.metrics. They are not public.
_LAZY_MODULES = ("buffers", "capture", "config", "engine", "observe", "runtime", "tuning")
# New names by old name. dynaxla 0.2 has only the new names.
_RENAMED = {
    "dynaxla": "backend.dynaxla",
    "dynaxla_auto": "backend.dynaxla_auto",
    "dynaxla_retrace": "backend.dynaxla_retrace",
    "enable_device": "device.enable",
    "lazy": "device.lazy",
    "set_mode": "device.set_mode",
    "sync": "device.sync",
    "Mesh": "sharding.Mesh",
    "mark_sharding": "sharding.mark_sharding",
    "shard_module": "sharding.shard_module",
    "finish_checks": "synchronize",
    "finish_compilations": "synchronize",
    "load_artifact": "load",
    "ExportedModel": "artifact.model.ExportedModel",
    "Explanation": "explained.Explanation",
    "ArgumentError": "errors.ArgumentError",
    "ArtifactError": "errors.ArtifactError",
    "CaptureError": "errors.CaptureError",
    "CollectiveFailed": "errors.CollectiveFailed",
    "CollectiveMismatch": "errors.CollectiveMismatch",
    "CompilationError": "errors.CompilationError",
    "DeviceMismatch": "errors.DeviceMismatch",
    "DynaxlaError": "errors.DynaxlaError",
    "ExecutionError": "errors.ExecutionError",
    "ForkError": "errors.ForkError",
    "LoweringError": "errors.LoweringError",
    "OptionError": "errors.OptionError",
    "OutOfMemory": "errors.OutOfMemory",
    "UnsupportedOp": "errors.UnsupportedOp",
    "UnsupportedTensor": "errors.UnsupportedTensor",
    "UnsupportedVersion": "errors.UnsupportedVersion",
}


def __getattr__(name: str) -> object:
    """Imports public names at the first use of one of them, and makes them attributes. An old name gives the object of the new one.

    Warns: DeprecationWarning: The name is an old one.
    """
    if name in _PUBLIC:
        if name not in _WITHOUT_TORCH:
            importlib.import_module(".runtime.quiet_jax", __name__)  # before anything else imports JAX
        for public_name in (name,) if name in _WITHOUT_TORCH else _PUBLIC:
            globals()[public_name] = _import_name(_PUBLIC[public_name], public_name)
        return globals()[name]
    if name in _LAZY_MODULES:
        __getattr__("metrics")  # imports all public names, and quiet_jax before JAX
        return importlib.import_module(f".{name}", __name__)
    if name in _RENAMED:
        import warnings

        text = f"dynaxla.{name} is now dynaxla.{_RENAMED[name]}; dynaxla 0.2 removes the old name"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        module, _, new_name = _RENAMED[name].rpartition(".")
        return _import_name(f".{module}", new_name) if module else getattr(sys.modules[__name__], new_name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _import_name(module: str, name: str) -> object:
    """Imports a name from a module. From the module ".", it imports a module of this package."""
    if module == ".":
        return importlib.import_module(f".{name}", __name__)
    return getattr(importlib.import_module(module, __name__), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
