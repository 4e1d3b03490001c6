"""The lowerings, one module per kind of op. Importing a module registers its lowerings."""

from importlib import import_module
from pkgutil import iter_modules


def load() -> None:
    """Import all modules."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
