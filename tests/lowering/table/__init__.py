"""The table of ops that test_every_op.py tests. A new lowering is one row, in the module for its kind."""

from __future__ import annotations

import importlib
import pkgutil

from lowering.table.oldest import as_in_this_torch

# The modules with rows: all but `rows`, which defines a row, and `oldest`, which changes rows for the oldest torch.
KINDS = [
    importlib.import_module(f"{__name__}.{module.name}")
    for module in pkgutil.iter_modules(__path__)
    if module.name not in ("rows", "oldest")
]
ROWS = as_in_this_torch([row for kind in KINDS for row in kind.ROWS])

# Pairs of a test file and an op without a row, which the file tests.
ELSEWHERE = [(test, name) for kind in KINDS for test, names in kind.ELSEWHERE.items() for name in names.split()]
