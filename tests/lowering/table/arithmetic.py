"""Elementwise arithmetic."""

import torch

from lowering.table.rows import (
    EVERY,
    FLOATS,
    INTEGERS,
    NO_ORDER,
    NUMERIC,
    REAL,
    Keywords,
    Make,
    Op,
    aten,
    either,
    number_and,
    of,
    prims,
    same,
    three,
    two,
    with_numbers,
)

ROUNDED = [Keywords(rounding_mode=mode) for mode in ("floor", "trunc", None)]


def exponents(make: Make, n: int) -> torch.Tensor:
    """Integer exponents; one number if the operand has rank 0."""
    return torch.tensor([3, -2, 0]) if make(n, 3).dim() else torch.tensor(3)


ROWS: list[Op] = [
    Op(aten.add.Tensor, two, EVERY),
    Op(aten.add.Scalar, with_numbers, NUMERIC),
    Op(aten.sub.Tensor, two, NUMERIC),
    Op(aten.sub.Scalar, of(2), NUMERIC),
    Op(aten.rsub.Tensor, two, NUMERIC),
    Op(aten.rsub.Scalar, of(2, 3), (torch.float32, torch.int64)),
    Op(aten.mul.Tensor, two, EVERY),
    Op(aten.mul.Scalar, with_numbers, EVERY),
    Op(aten.div.Tensor, two, NUMERIC, low=1),
    Op(aten.true_divide.Tensor, two, (torch.float32, torch.int64), low=1),
    Op(aten.div.Scalar, of(3), NUMERIC),
    Op(aten.floor_divide.default, two, REAL, low=1, gradient=False, without=NO_ORDER),
    Op(aten.floor_divide.Scalar, of(3), REAL, gradient=False),
    Op(aten.div.Tensor_mode, lambda make, n: [(make(n, 3), make(3), mode) for mode in ROUNDED], REAL, low=1, without=NO_ORDER),
    Op(aten.div.Scalar_mode, either(*((3, mode) for mode in ROUNDED)), REAL),
    Op(aten.fmod.Tensor, two, REAL, low=1),
    Op(aten.fmod.Scalar, of(2), REAL),
    Op(aten.remainder.Scalar, of(2), REAL),
    Op(aten.remainder.Scalar_Tensor, number_and(5), REAL, low=1, gradient=False),
    Op(aten.remainder.Tensor, two, REAL, low=1),
    Op(aten.addcmul.default, three, NUMERIC),
    Op(aten.addcdiv.default, three, (*FLOATS, torch.complex64), low=1),
    Op(aten.lerp.Tensor, three, (*FLOATS, torch.complex64)),
    Op(aten.lerp.Scalar, lambda make, n: [(make(n, 3), make(3), weight) for weight in (0.3, 0.8)], (*FLOATS, torch.complex64)),
    Op(aten.pow.Tensor_Tensor, two, FLOATS, low=0.5),
    Op(aten.pow.Tensor_Scalar, either((2,), (3,), (0.5,)), FLOATS, low=0.5),
    Op(aten.pow.Scalar, lambda make, n: [(2.5, make(n, 3))], FLOATS, without=NO_ORDER),
    Op(aten.float_power.Tensor_Tensor, two, (torch.float32, torch.int64), low=0.5),
    Op(aten.float_power.Tensor_Scalar, of(3), (torch.float32, torch.int64)),
    Op(aten.float_power.Scalar, number_and(2.5), (torch.float32, torch.int64), without=NO_ORDER),
    Op(aten.positive.default, of(), (torch.float32, torch.int64)),
    Op(aten.neg.default, of(), NUMERIC),
    Op(aten.abs.default, of(), NUMERIC),
    Op(aten.sign.default, of(), (*REAL, torch.bool)),
    Op(aten.sgn.default, of(), EVERY),
    Op(aten.angle.default, of(), (torch.float32, torch.int64, torch.complex64)),
    Op(aten.reciprocal.default, of(), NUMERIC, low=1),
    Op(aten.clamp.default, either((-1, 1), (None, 1), (0, None)), REAL),
    Op(aten.maximum.default, two, (*REAL, torch.bool)),
    Op(aten.minimum.default, two, (*REAL, torch.bool)),
    Op(aten.fmax.default, two, (*REAL, torch.bool)),
    Op(aten.fmin.default, two, (*REAL, torch.bool)),
    Op(aten.gcd.default, two, INTEGERS, high=99, gradient=False),
    Op(aten.lcm.default, two, INTEGERS, high=9, gradient=False),
    Op(aten.nextafter.default, two, (torch.float32, torch.float64, torch.bfloat16), gradient=False),
    Op(aten.ldexp.Tensor, lambda make, n: [(make(n, 3), exponents(make, n))], FLOATS),
    Op(aten.frexp.Tensor, of()),
    # Prims: their operands have one dtype and one shape, and they have no gradients.
    *(
        Op(op.default, same(1), (torch.float32,), gradient=False)
        for op in (prims.abs, prims.cbrt, prims.frexp, prims.neg, prims.reciprocal, prims.sign)
    ),
    *(
        Op(op.default, same(2), (torch.float32, torch.int64), low=1, gradient=False)
        for op in (
            prims.add, prims.sub, prims.mul, prims.div, prims.fmod, prims.remainder, prims.maximum, prims.minimum, prims.fmax, prims.fmin,
        )
    ),
    *(Op(op.default, same(2), (torch.float32,), low=1, gradient=False) for op in (prims.hypot, prims.nextafter, prims.pow)),
    Op(prims.gcd.default, same(2), (torch.int64,), high=99, gradient=False),
    Op(prims.fma.default, same(3), FLOATS),
]  # fmt: skip

# The ops without a row, by the file that tests them.
ELSEWHERE: dict[str, str] = {}
