"""Elementwise mathematical functions, and activations."""

import torch

from lowering.table.rows import FLOATS, INTEGERS, NO_ORDER, REAL, Keywords, Op, aten, either, number_and, of, prims, same, two

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
    *(
        Op(op.default, of(), (torch.float32, torch.int64), low=0.1, high=0.9)
        for op in (
            aten.special_i0e, aten.special_i1, aten.special_i1e, aten.special_erfcx, aten.special_ndtri, aten.special_log_ndtr,
        )
    ),
    Op(aten.acosh.default, of(), (*FLOATS, torch.complex64, torch.int64), low=1.1),
    Op(aten.sinc.default, of(), (*FLOATS, torch.complex64, torch.int64)),
    Op(aten.frac.default, of(), FLOATS),
    Op(aten.round.decimals, of(Keywords(decimals=1)), FLOATS),
    *(Op(op, of(), REAL) for op in (aten.floor.default, aten.ceil.default, aten.trunc.default, aten.round.default)),
    Op(aten.atan2.default, two, (*FLOATS, *INTEGERS)),
    Op(aten.hypot.default, two, (torch.float32, torch.float64), low=0.1),
    Op(aten.logaddexp.default, two, FLOATS),
    Op(aten.logaddexp2.default, two, FLOATS),
    Op(aten.xlogy.Tensor, two, (*FLOATS, *INTEGERS), low=1),
    Op(aten.xlogy.Scalar_Other, of(2.5), (torch.float32, torch.int64)),
    Op(aten.xlogy.Scalar_Self, number_and(2.5), (torch.float32, torch.int64), low=1),
    Op(aten.copysign.Tensor, two, (*FLOATS, *INTEGERS), without=NO_ORDER),
    Op(aten.copysign.Scalar, either((-1,), (0.0,)), (torch.float32, torch.int64)),
    Op(aten.heaviside.default, two, (*REAL, torch.bool), gradient=False),
    Op(aten.polygamma.default, number_and(0, 1, 3), (torch.float32, torch.float64), low=0.1),
    # torch has no derivative with respect to the first operand. XLA takes long to compile these functions.
    *(
        Op(op.default, same(2), (torch.float32,), low=1.1, gradient=False, without=["changing sizes"])
        for op in (aten.igamma, aten.igammac, aten.special_zeta)
    ),
    Op(aten.special_zeta.self_scalar, number_and(2.5), (torch.float32,), low=0.1),
    Op(aten.special_zeta.other_scalar, of(2.5), (torch.float32,), low=1.1, gradient=False),
    # Bessel and Airy functions, for which torch has no derivatives
    *(
        Op(op.default, of(), (torch.float32, torch.int64, torch.bool), low=0.5, high=9, gradient=False)
        for op in (
            aten.special_bessel_j0, aten.special_bessel_j1, aten.special_bessel_y0, aten.special_bessel_y1, aten.special_airy_ai,
            aten.special_modified_bessel_i0, aten.special_modified_bessel_i1, aten.special_modified_bessel_k0,
            aten.special_modified_bessel_k1, aten.special_scaled_modified_bessel_k0, aten.special_scaled_modified_bessel_k1,
            aten.special_spherical_bessel_j0,
        )
    ),
    # Derivatives of samples with respect to the distribution's parameters, for which torch has no shape propagation
    Op(aten._standard_gamma_grad.default, same(2), (torch.float64,), low=0.1, high=9, gradient=False, without=["changing sizes"]),
    Op(aten._dirichlet_grad.default, lambda make, n: [
        (make(n, 3) / 9, make(n, 3), make(n, 3) + 9)
    ], (torch.float64,), low=0.1, high=8.9, gradient=False, without=["changing sizes"]),
    # Prims: their operands have one dtype and one shape, and they have no gradients.
    *(Op(op.default, of(), (torch.float32,), gradient=False) for op in (prims.ceil, prims.floor, prims.round, prims.trunc)),
    *(
        Op(op.default, of(), (torch.float32,), low=0.1, high=0.9, gradient=False)
        for op in (
            prims.acos, prims.asin, prims.asinh, prims.atan, prims.atanh, prims.bessel_i0, prims.bessel_i0e, prims.bessel_i1,
            prims.bessel_i1e, prims.bessel_j0, prims.bessel_j1, prims.cos, prims.cosh, prims.digamma, prims.erf, prims.erf_inv,
            prims.erfc, prims.erfcx, prims.exp, prims.exp2, prims.expm1, prims.lgamma, prims.log, prims.log10, prims.log1p,
            prims.log2, prims.ndtri, prims.rsqrt, prims.sin, prims.sinh, prims.spherical_bessel_j0, prims.sqrt, prims.tan,
            prims.tanh,
        )
    ),
    *(
        Op(op.default, same(count), (torch.float32,), low=1.1, gradient=False)
        for op, count in ((prims.acosh, 1), (prims.atan2, 2), (prims.igamma, 2), (prims.igammac, 2), (prims.zeta, 2))
    ),
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

# The ops without a row, by the file that tests them.
ELSEWHERE: dict[str, str] = {}
