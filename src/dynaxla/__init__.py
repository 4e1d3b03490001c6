"""dynaxla: XLA as a compiler for PyTorch. `torch.compile(model, backend="dynaxla")`.

The public names are the imports in `__init__.pyi`, which type checkers read, and so does this module. A name is imported at its first use:
importing torch and JAX takes seconds, and `dynaxla --help` needs neither.
"""

from __future__ import annotations

import importlib
import os
import sys

__version__ = "0.1.0"

# Imported at once, since it must see every fork; it needs neither torch nor JAX.
importlib.import_module(".forks", __name__)


def _listed() -> dict[str, str]:
    """Returns the module of each public name. A line of the stub is "from MODULE import NAME as NAME"."""
    stub = __spec__.loader.get_data(os.path.join(__path__[0], "__init__.pyi")).decode()
    words = [line.split() for line in stub.splitlines() if line.startswith("from ")]
    return {name: module for _, module, _, name, *_ in words}


_PUBLIC = _listed()
__all__ = list(_PUBLIC)
# Public names that need no torch. They are imported without the others.
_ALONE = ("errors", "load")
# Modules that are attributes of dynaxla without an import of their own, e.g. dynaxla.observe.metrics. They are not public.
_REACHED = ("buffers", "capture", "config", "engine", "observe", "runtime", "tuning")
# By old name: the new name. dynaxla 0.2 has the new names only.
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
    """Imports a public name at its first use, after which it is an ordinary attribute; or warns of an old name, and returns the new one."""
    if name in _PUBLIC:
        if name not in _ALONE:
            importlib.import_module(".runtime.quiet_jax", __name__)  # before anything else imports JAX
        for each in (name,) if name in _ALONE else _PUBLIC:
            globals()[each] = _imported(_PUBLIC[each], each)
        return globals()[name]
    if name in _REACHED:
        __getattr__("metrics")  # imports the modules inside, too
        return importlib.import_module(f".{name}", __name__)
    if name in _RENAMED:
        import warnings

        text = f"dynaxla.{name} is now dynaxla.{_RENAMED[name]}; dynaxla 0.2 removes the old name"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        module, _, new = _RENAMED[name].rpartition(".")
        return _imported(f".{module}", new) if module else getattr(sys.modules[__name__], new)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _imported(module: str, name: str) -> object:
    """Returns a name of a module, or, of the module ".", a module of this package."""
    if module == ".":
        return importlib.import_module(f".{name}", __name__)
    return getattr(importlib.import_module(module, __name__), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
