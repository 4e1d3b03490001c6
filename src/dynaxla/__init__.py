"""dynaxla: XLA as a compiler for PyTorch. `torch.compile(model, backend="dynaxla")`.

The names below are imported at their first use: importing torch and JAX takes seconds, and `dynaxla --help` needs neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .artifact.model import ExportedModel as ExportedModel
    from .artifact.model import load_artifact as load_artifact
    from .backend import dynaxla as dynaxla
    from .backend import dynaxla_auto as dynaxla_auto
    from .backend import dynaxla_retrace as dynaxla_retrace
    from .device import enable_device as enable_device
    from .device import lazy as lazy
    from .device import set_mode as set_mode
    from .device import sync as sync
    from .errors import ArgumentError as ArgumentError
    from .errors import ArtifactError as ArtifactError
    from .errors import CaptureError as CaptureError
    from .errors import CollectiveFailed as CollectiveFailed
    from .errors import CollectiveMismatch as CollectiveMismatch
    from .errors import CompilationError as CompilationError
    from .errors import DeviceMismatch as DeviceMismatch
    from .errors import DynaxlaError as DynaxlaError
    from .errors import ExecutionError as ExecutionError
    from .errors import ForkError as ForkError
    from .errors import LoweringError as LoweringError
    from .errors import OptionError as OptionError
    from .errors import OutOfMemory as OutOfMemory
    from .errors import UnsupportedOp as UnsupportedOp
    from .errors import UnsupportedTensor as UnsupportedTensor
    from .errors import UnsupportedVersion as UnsupportedVersion
    from .explained import Explanation as Explanation
    from .explained import explain as explain
    from .interop import as_jax as as_jax
    from .interop import as_torch as as_torch
    from .interop import to_jax as to_jax
    from .interop import to_torch as to_torch
    from .interop.export import export as export
    from .lowering import lowers as lowers
    from .observe import metrics as metrics
    from .runtime.background import finish_compilations as finish_compilations
    from .runtime.late_checks import finish_checks as finish_checks
    from .sharding import Mesh as Mesh
    from .sharding import mark_sharding as mark_sharding
    from .sharding import shard_module as shard_module
    from .training import compile_step as compile_step

__version__ = "0.1.0"

# Imported at once, since it must see every fork; it needs neither torch nor JAX.
importlib.import_module(".forks", __name__)

# The public names by module. A test compares them with the imports above.
_PUBLIC = {
    "backend": ("dynaxla", "dynaxla_auto", "dynaxla_retrace"),
    "device": ("enable_device", "lazy", "set_mode", "sync"),
    "errors": (
        "ArgumentError", "ArtifactError", "CaptureError", "CollectiveFailed", "CollectiveMismatch", "CompilationError", "DeviceMismatch",
        "DynaxlaError", "ExecutionError", "ForkError", "LoweringError", "OptionError", "OutOfMemory", "UnsupportedOp", "UnsupportedTensor",
        "UnsupportedVersion",
    ),
    "explained": ("Explanation", "explain"),
    "artifact.model": ("ExportedModel", "load_artifact"),
    "interop": ("as_jax", "as_torch", "to_jax", "to_torch"),
    "interop.export": ("export",),
    "lowering": ("lowers",),
    "observe": ("metrics",),
    "runtime.background": ("finish_compilations",),
    "runtime.late_checks": ("finish_checks",),
    "sharding": ("Mesh", "mark_sharding", "shard_module"),
    "training": ("compile_step",),
}  # fmt: skip
__all__ = [name for names in _PUBLIC.values() for name in names]
# Modules that need no torch. Their names are imported without those of the other modules.
_ALONE = ("errors", "artifact.model")
# Subpackages that are attributes of dynaxla without an import of their own, e.g. dynaxla.observe.metrics.
_REACHED = ("buffers", "capture", "config", "engine", "observe", "runtime", "tuning")


def __getattr__(name: str) -> Any:
    """Import a public name or a module at its first use. Afterwards it is an ordinary attribute."""
    if name in _REACHED or name in _PUBLIC or name in __all__:
        alone = [module for module in _ALONE if name in _PUBLIC[module]]
        for module in alone or _PUBLIC:
            names = _PUBLIC[module]
            loaded = importlib.import_module(f".{module}", __name__)
            globals().update({public: getattr(loaded, public) for public in names})
        if name in _REACHED:
            globals()[name] = importlib.import_module(f".{name}", __name__)
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_PUBLIC, *_REACHED, *(name for name in globals() if name.startswith("__"))})
