"""Arithmetic: numbers with numbers, element by element."""

import torch
from lowering.table.rows import EVERY, FLOATS, NO_ORDER, NUMERIC, REAL, Op, aten, either, of, three, two, with_numbers

ROWS: list[Op] = [
    Op(aten.add.Tensor, two, EVERY),
    Op(aten.add.Scalar, with_numbers, NUMERIC),
    Op(aten.sub.Tensor, two, NUMERIC),
    Op(aten.sub.Scalar, of(2), NUMERIC),
    Op(aten.rsub.Tensor, two, NUMERIC),
    Op(aten.mul.Tensor, two, EVERY),
    Op(aten.mul.Scalar, with_numbers, EVERY),
    Op(aten.div.Tensor, two, NUMERIC, low=1),
    Op(aten.div.Scalar, of(3), NUMERIC),
    Op(aten.floor_divide.default, two, REAL, low=1, gradient=False, without=NO_ORDER),
    Op(aten.fmod.Tensor, two, REAL, low=1),
    Op(aten.remainder.Tensor, two, REAL, low=1),
    Op(aten.addcmul.default, three, NUMERIC),
    Op(aten.addcdiv.default, three, (*FLOATS, torch.complex64), low=1),
    Op(aten.lerp.Tensor, three, (*FLOATS, torch.complex64)),
    Op(aten.pow.Tensor_Tensor, two, FLOATS, low=0.5),
    Op(aten.pow.Tensor_Scalar, either((2,), (3,), (0.5,)), FLOATS, low=0.5),
    Op(aten.pow.Scalar, lambda make, n: [(2.5, make(n, 3))], FLOATS, without=NO_ORDER),
    Op(aten.neg.default, of(), NUMERIC),
    Op(aten.abs.default, of(), NUMERIC),
    Op(aten.sign.default, of(), (*REAL, torch.bool)),
    Op(aten.reciprocal.default, of(), NUMERIC, low=1),
    Op(aten.clamp.default, either((-1, 1), (None, 1), (0, None)), REAL),
    Op(aten.maximum.default, two, (*REAL, torch.bool)),
    Op(aten.minimum.default, two, (*REAL, torch.bool)),
    Op(aten.fmax.default, two, (*REAL, torch.bool)),
    Op(aten.fmin.default, two, (*REAL, torch.bool)),
]  # fmt: skip

# By test file: the ops without a row, and why.
ELSEWHERE: dict[str, str] = {}
