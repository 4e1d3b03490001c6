"""The ops whose lowerings the generic properties test: a new lowering is one row, in the module of its kind."""

from __future__ import annotations

from lowering.table import (
    activations,
    arithmetic,
    comparisons,
    foreach,
    functions,
    images,
    indices,
    optimizers,
    polynomials,
    products,
    reductions,
    shapes,
)

KINDS = (
    arithmetic,
    functions,
    activations,
    polynomials,
    comparisons,
    foreach,
    optimizers,
    reductions,
    shapes,
    indices,
    products,
    images,
)
ROWS = [row for kind in KINDS for row in kind.ROWS]

# By test file: the ops without a row.
ELSEWHERE = [(test, name) for kind in KINDS for test, names in kind.ELSEWHERE.items() for name in names.split()]
