"""Mathematical functions, element by element, and activations."""

import torch
from lowering.table.rows import FLOATS, INTEGERS, NO_ORDER, REAL, Op, aten, of, two

ROWS: list[Op] = [
    # Functions
    *(
        Op(op, of(), (*FLOATS, torch.complex64, *INTEGERS), low=0.1, high=0.9)
        for op in (
            aten.sqrt.default, aten.rsqrt.default, aten.exp.default, aten.exp2.default, aten.expm1.default, aten.log.default,
            aten.log1p.default, aten.log2.default, aten.log10.default, aten.sin.default, aten.cos.default, aten.tan.default,
            aten.asin.default, aten.acos.default, aten.atan.default, aten.sinh.default, aten.cosh.default, aten.tanh.default,
            aten.asinh.default, aten.atanh.default, aten.sigmoid.default,
        )
    ),
    *(
        Op(op, of(), (*FLOATS, *INTEGERS), low=0.1, high=0.9)
        for op in (aten.erf.default, aten.erfc.default, aten.erfinv.default, aten.lgamma.default, aten.digamma.default, aten.i0.default)
    ),
    *(Op(op, of(), REAL) for op in (aten.floor.default, aten.ceil.default, aten.trunc.default, aten.round.default)),
    Op(aten.atan2.default, two, (*FLOATS, *INTEGERS)),
    Op(aten.hypot.default, two, (torch.float32, torch.float64), low=0.1),
    Op(aten.logaddexp.default, two, FLOATS),
    Op(aten.xlogy.Tensor, two, (*FLOATS, *INTEGERS), low=1),
    Op(aten.copysign.Tensor, two, (*FLOATS, *INTEGERS), without=NO_ORDER),
    # Activations
    *(
        Op(op, of(), FLOATS)
        for op in (
            aten.relu.default, aten.gelu.default, aten.silu.default, aten.mish.default, aten.hardswish.default, aten.hardsigmoid.default,
            aten.hardtanh.default, aten.elu.default, aten.leaky_relu.default, aten.softplus.default, aten.hardshrink.default,
            aten.softshrink.default,
        )
    ),
    Op(aten.threshold.default, of(0.5, -2.0)),
    Op(aten._softmax.default, lambda make, n: [(make(n, 3), dim, False) for dim in (0, -1)], FLOATS),
    Op(aten._log_softmax.default, lambda make, n: [(make(n, 3), dim, False) for dim in (0, -1)], FLOATS),
]  # fmt: skip

# By test file: the ops without a row, and why.
ELSEWHERE: dict[str, str] = {}
