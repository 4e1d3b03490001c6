"""The ops whose lowerings the generic properties test: a new lowering is one row, in the module of its kind."""

from __future__ import annotations

import importlib
import pkgutil

from lowering.table.oldest import as_in_this_torch

# Every module here but those that say what a row is, and what the oldest torch does otherwise.
KINDS = [
    importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__) if found.name not in ("rows", "oldest")
]
ROWS = as_in_this_torch([row for kind in KINDS for row in kind.ROWS])

# By test file: the ops without a row.
ELSEWHERE = [(test, name) for kind in KINDS for test, names in kind.ELSEWHERE.items() for name in names.split()]
