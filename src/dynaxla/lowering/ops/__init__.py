"""The lowerings of ATen ops, one module per kind of op. The import of a module registers its lowerings."""

from importlib import import_module
from pkgutil import iter_modules


def load() -> None:
    """Imports all modules of this package, which registers their lowerings."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
