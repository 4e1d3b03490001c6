"""Reductions, scans and order statistics."""

import torch
from lowering.table.rows import EVERY, FLOATS, REAL, Op, along_each_dim, aten, either, of

ROWS: list[Op] = [
    # Reductions
    Op(aten.sum.default, of(), EVERY),
    Op(aten.sum.dim_IntList, either(([0],), ([-1], True), ([0, 1],)), EVERY),
    Op(aten.mean.dim, either(([0],), ([-1], True), ([0, 1],)), (*FLOATS, torch.complex64)),
    Op(aten.prod.dim_int, either((0,), (-1, True)), EVERY),
    Op(aten.amax.default, either(([0],), ([-1], True)), (*REAL, torch.bool)),
    Op(aten.amin.default, either(([0],), ([-1], True)), (*REAL, torch.bool)),
    Op(aten.max.dim, along_each_dim, (*REAL, torch.bool)),
    Op(aten.min.dim, along_each_dim, (*REAL, torch.bool)),
    Op(aten.argmax.default, along_each_dim, REAL, gradient=False),
    Op(aten.argmin.default, along_each_dim, REAL, gradient=False),
    Op(aten.any.dim, along_each_dim, EVERY, gradient=False),
    Op(aten.all.dim, along_each_dim, EVERY, gradient=False),
    Op(aten.var.correction, either(([0],), ([-1],), ([0, 1],)), FLOATS),
    Op(aten.logsumexp.default, either(([0],), ([-1], True)), FLOATS),
    Op(aten.linalg_vector_norm.default, either((), (1,), (2, [0])), FLOATS),
    Op(aten.count_nonzero.default, of(), EVERY, gradient=False),
    # Scans
    Op(aten.cumsum.default, along_each_dim, EVERY),
    Op(aten.cumprod.default, along_each_dim, EVERY),
    Op(aten.cummax.default, along_each_dim, (*REAL, torch.bool)),
    Op(aten.cummin.default, along_each_dim, (*REAL, torch.bool)),
    Op(aten.logcumsumexp.default, along_each_dim, FLOATS),
]  # fmt: skip

# By test file: the ops without a row, and why.
ELSEWHERE: dict[str, str] = {}
