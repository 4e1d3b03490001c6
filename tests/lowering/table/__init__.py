"""The ops whose lowerings the generic properties test: a new lowering is one row, in the module of its kind."""

from __future__ import annotations

import importlib
import pkgutil

# Every module here but the one that says what a row is.
KINDS = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__) if found.name != "rows"]
ROWS = [row for kind in KINDS for row in kind.ROWS]

# By test file: the ops without a row.
ELSEWHERE = [(test, name) for kind in KINDS for test, names in kind.ELSEWHERE.items() for name in names.split()]
