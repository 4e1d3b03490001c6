"""Comparisons, logic, bits, and selections by a condition."""

import torch

from lowering.table.rows import EVERY, FLOATS, INTEGERS, REAL, Op, aten, either, number_and, of, prims, same, two

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
    *(
        Op(op.Scalar, either((0,), (1.5,)), (torch.float32, torch.int64, torch.bool), gradient=False)
        for op in (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge)
    ),
    *(Op(op.Scalar, of(3), (torch.int64,), gradient=False) for op in (aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor)),
    *(Op(op.Scalar_Tensor, number_and(3), (torch.int64,), gradient=False) for op in (aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor)),
    *(
        Op(op, two, INTEGERS, low=0, high=9, gradient=False)
        for op in (aten.bitwise_left_shift.Tensor, aten.bitwise_right_shift.Tensor, aten.__lshift__.Tensor, aten.__rshift__.Tensor)
    ),
    *(
        Op(op, of(2), (torch.int64,), high=99, gradient=False)
        for op in (
            aten.bitwise_left_shift.Tensor_Scalar, aten.bitwise_right_shift.Tensor_Scalar, aten.__lshift__.Scalar, aten.__rshift__.Scalar,
        )
    ),
    *(
        Op(op.Scalar_Tensor, number_and(77), (torch.int64,), low=0, high=9, gradient=False)
        for op in (aten.bitwise_left_shift, aten.bitwise_right_shift)
    ),
    Op(aten.logical_not.default, of(), EVERY, gradient=False),
    Op(aten.bitwise_not.default, of(), (*INTEGERS, torch.bool), gradient=False),
    *(Op(op, of(), EVERY, gradient=False) for op in (aten.isnan.default, aten.isinf.default, aten.isfinite.default)),
    *(Op(op.default, of(), (*REAL, torch.bool), gradient=False) for op in (aten.isposinf, aten.isneginf, aten.signbit)),
    Op(aten.nan_to_num.default, either((), (1.5, 2.5, -7.0)), (*FLOATS, torch.int64, torch.complex64)),
    Op(aten.clamp.Tensor, lambda make, n: [(make(n, 3), make(3), make(n, 1)), (make(n, 3), None, make(3))], REAL),
    Op(aten.clamp_min.Tensor, two, REAL),
    Op(aten.clamp_max.Tensor, two, REAL),
    Op(aten.clamp_min.default, either((1,), (0.5,)), REAL),
    Op(aten.clamp_max.default, either((1,), (0.5,)), REAL),
    Op(aten.where.self, lambda make, n: [(make(n, 3) != 0, make(n, 3), make(3))], EVERY),
    Op(aten.masked_fill.Scalar, lambda make, n: [(make(n, 3), make(n, 3) == 0, 1)], EVERY),
    Op(aten.masked_fill.Tensor, lambda make, n: [(make(n, 3), make(n, 3) == 0, make())], EVERY),
    # Prims: their operands have one dtype and one shape, and they have no gradients.
    *(
        Op(op.default, same(2), (torch.float32, torch.int64), gradient=False)
        for op in (prims.eq, prims.ne, prims.lt, prims.le, prims.gt, prims.ge)
    ),
    *(
        Op(op.default, same(2), (torch.int64,), low=0, high=9, gradient=False)
        for op in (prims.bitwise_and, prims.bitwise_or, prims.bitwise_xor, prims.shift_left, prims.shift_right_arithmetic)
    ),
    Op(prims.bitwise_not.default, of(), (torch.int64,), gradient=False),
    Op(prims.isfinite.default, of(), (torch.float32,), gradient=False),
    Op(prims.where.default, lambda make, n: [(make(n, 3) != 0, make(n, 3), make(n, 3))], (torch.float32, torch.int64), gradient=False),
]  # fmt: skip

# The ops without a row, by the file that tests them.
ELSEWHERE: dict[str, str] = {
    # torch's shape propagation returns the operand's dtype, its kernel bool.
    "lowering/ops/test_prims.py": "prims.signbit.default",
}
