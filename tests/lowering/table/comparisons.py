"""Comparisons, logic, bits, and choices by a condition."""

import torch
from lowering.table.rows import EVERY, INTEGERS, REAL, Op, aten, of, two

ROWS: list[Op] = [
    *(
        Op(op, two, EVERY, gradient=False)
        for op in (aten.eq.Tensor, aten.ne.Tensor, aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default)
    ),
    *(Op(op, two, (*REAL, torch.bool), gradient=False) for op in (aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor)),
    *(
        Op(op, two, (*INTEGERS, torch.bool), gradient=False)
        for op in (aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor)
    ),
    Op(aten.logical_not.default, of(), EVERY, gradient=False),
    Op(aten.bitwise_not.default, of(), (*INTEGERS, torch.bool), gradient=False),
    *(Op(op, of(), EVERY, gradient=False) for op in (aten.isnan.default, aten.isinf.default, aten.isfinite.default)),
    Op(aten.where.self, lambda make, n: [(make(n, 3) != 0, make(n, 3), make(3))], EVERY),
    Op(aten.masked_fill.Scalar, lambda make, n: [(make(n, 3), make(n, 3) == 0, 1)], EVERY),
]  # fmt: skip

# By test file: the ops without a row, and why.
ELSEWHERE: dict[str, str] = {}
