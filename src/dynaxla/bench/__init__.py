"""The benchmark `dynaxla bench`, also `python -m dynaxla.bench`. It repeats the experiment of PyTorch PR #87741 (TorchDynamo with XLA).

The package `benchmarks` in the source tree has more suites, engines and tables.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType


def from_source_tree(module: str) -> ModuleType | None:
    """Imports a module of `benchmarks`; returns None if dynaxla is installed without its source tree."""
    root = Path(__file__).parents[3]
    if not (root / "src" / "dynaxla").is_dir() or not (root / "benchmarks").is_dir():
        return None
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module(f"benchmarks.{module}")
