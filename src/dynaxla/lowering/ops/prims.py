"""Lowerings of PyTorch's prims, the ops that its reference decompositions leave in a graph.

The operands of an elementwise prim share one dtype and shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jax import Array, lax
from torch._inductor import inductor_prims as inductor_prims  # defines prims.fma, which TorchDynamo traces for the addcmul_ of optimizers

from ...torch_ops import MissingOp, aten, prims
from .. import dtypes
from ..context import Context
from ..cpu.vectorized_reductions import reduce_max, reduce_min
from ..dtypes import DType
from ..promotion import Promotion, convert, number
from ..registry import Lowering, lower_table, lowers, registry
from . import bessel as bessel
from . import comparison as comparison
from . import creation, elementwise, float_bits, linalg_eigen, random, reductions, shape
from . import special as special


@lowers(prims.convert_element_type.default)
def convert_element_type(x: Array, dtype: DType) -> Array:
    """x cast to `dtype`, as ATen's copies do."""
    return convert(x, dtype)


@lowers(prims.device_put.default)
def device_put(x: Array, device: torch.device, non_blocking: bool = False) -> Array:
    return x


@lowers(prims.iota.default)
def iota(length: int, *, start: int, step: int, dtype: DType, requires_grad: bool = False, ctx: Context) -> Array:
    """The `length` numbers start, start + step, and so on."""
    return creation.arange(start, None, step, ctx=ctx)


@lowers(prims.full.default)
def full(shape: list[int], value: complex, *, dtype: DType, requires_grad: bool = False) -> Array:
    return lax.full(shape, number(value, dtype))


@lowers(prims.full_like.default)
def full_like(x: Array, value: complex, *, dtype: DType, requires_grad: bool = False) -> Array:
    return lax.full(x.shape, number(value, dtype))


@lowers(prims.empty.default)
def empty(shape: list[int], *, dtype: DType, requires_grad: bool = False) -> Array:
    """Zeros, so that a program gives the same results at every call."""
    return lax.full(shape, number(0, dtype))


@lowers(prims.empty_strided.default, prims.empty_permuted.default)
def empty_strided(shape: list[int], layout: list[int], *, dtype: DType, requires_grad: bool = False) -> Array:
    """Zeros, so that a program gives the same results at every call. The layout is ignored: JAX arrays have no strides."""
    return lax.full(shape, number(0, dtype))


@lowers(prims.scalar_tensor.default)
def scalar_tensor(value: complex, *, dtype: DType | None = None, ctx: Context) -> Array:
    return lax.full((), number(value, ctx.output.jax_dtype))


@lowers(prims.broadcast_in_dim.default)
def broadcast_in_dim(x: Array, shape: list[int], broadcast_dimensions: list[int]) -> Array:
    """x broadcast to `shape`. Dimension i of x becomes dimension `broadcast_dimensions[i]` of the result."""
    return lax.broadcast_in_dim(x, tuple(shape), tuple(broadcast_dimensions))


@lowers(prims.transpose.default)
def transpose(x: Array, permutation: list[int]) -> Array:
    return lax.transpose(x, permutation)


@lowers(prims.div.default)
def div(x: Array, y: Array) -> Array:
    """x / y. Integer division rounds towards zero.

    Dtype:  that of x.
    """
    return lax.div(x, y)


@lowers(prims.normal.default)
def normal(shape: list[int], *, mean: float, std: float, dtype: DType, requires_grad: bool = False, ctx: Context) -> Array:
    """Random numbers from the normal distribution."""
    return random.normal(mean, std, ctx=ctx)


@lowers(prims.uniform.default)
def uniform(shape: list[int], *, low: float, high: float, dtype: DType, stride: list[int], ctx: Context) -> Array:
    """Random numbers from the uniform distribution on [low, high)."""
    return random.uniform(lax.full(shape, number(0, dtype)), low, high, ctx=ctx)


# Reductions. Unlike ATen's reductions, the prims reduce no dimension if the list of dimensions is empty, and do not widen integers.

Reduce = Callable[[Array, Sequence[int]], Array]


def _reduction(reduce: Reduce) -> Lowering:
    def lowering(x: Array, dims: Sequence[int] | None, *, output_dtype: DType | None = None) -> Array:
        """Reduces x over `dims`, or over all dimensions for None. A rank-0 x may be reduced over dimension 0."""
        out = output_dtype or x.dtype
        return convert(reduce(convert(x, dtypes.accumulator(out)), tuple(range(x.ndim) if dims is None or x.ndim == 0 else dims)), out)

    return lowering


def _sum(x: Array, dims: Sequence[int]) -> Array:
    return lax.reduce_or(x, dims) if dtypes.is_bool(x.dtype) else lax.reduce_sum(x, dims)


def _product(x: Array, dims: Sequence[int]) -> Array:
    return lax.reduce_and(x, dims) if dtypes.is_bool(x.dtype) else lax.reduce_prod(x, dims)


@lowers(prims.var.default)
def var(x: Array, dims: Sequence[int] | None, correction: float | None = 1, *, output_dtype: DType | None = None, ctx: Context) -> Array:
    """The variance over `dims`, or over all dimensions for None. For an empty list, each element is a sample of its own.

    Dtype:  `output_dtype` if given, else the real dtype of x.
    """
    if dims is not None and not len(dims):
        x, dims = lax.reshape(x, (*x.shape, 1)), [x.ndim]
    return convert(reductions.var(x, dims, correction=correction, ctx=ctx), ctx.output.jax_dtype)


@lowers(prims.reshape.default, prims.collapse.default, prims.collapse_view.default, prims.split_dim.default, prims.squeeze.default)
def reshape(x: Array, *sizes: object, ctx: Context) -> Array:
    """x in the result's shape, row-major. These ops differ only in the arguments that determine that shape."""
    return lax.reshape(x, ctx.output.shape)


@lowers(prims.svd.default)
def svd(x: Array, *, full_matrices: bool, ctx: Context) -> tuple[Array, Array, Array]:
    """Like `linalg_svd`."""
    return linalg_eigen.linalg_svd(x, full_matrices, True, ctx=ctx)


@lowers(prims.signbit.default)
def signbit(x: Array) -> Array:
    """1 where the sign bit is set, else 0.

    Dtype:  that of x, as in the graph's metadata, although the prim's own kernel gives bool.
    """
    return convert(float_bits.signbit(x), x.dtype)


# Prims that are lowered like an ATen op.
for _prim, _op in {
    prims.abs: aten.abs.default,
    prims.acos: aten.acos.default,
    prims.acosh: aten.acosh.default,
    prims.asin: aten.asin.default,
    prims.asinh: aten.asinh.default,
    prims.atan: aten.atan.default,
    prims.atan2: aten.atan2.default,
    prims.atanh: aten.atanh.default,
    prims.bessel_i0: aten.i0.default,
    prims.bessel_i0e: aten.special_i0e.default,
    prims.bessel_i1: aten.special_i1.default,
    prims.bessel_i1e: aten.special_i1e.default,
    prims.bessel_j0: aten.special_bessel_j0.default,
    prims.bessel_j1: aten.special_bessel_j1.default,
    prims.bitwise_and: aten.bitwise_and.Tensor,
    prims.bitwise_not: aten.bitwise_not.default,
    prims.bitwise_or: aten.bitwise_or.Tensor,
    prims.bitwise_xor: aten.bitwise_xor.Tensor,
    prims.ceil: aten.ceil.default,
    prims.conj: aten._conj.default,
    prims.conj_physical: aten._conj_physical.default,
    prims.cos: aten.cos.default,
    prims.cosh: aten.cosh.default,
    prims.digamma: aten.digamma.default,
    prims.eq: aten.eq.Tensor,
    prims.erf: aten.erf.default,
    prims.erf_inv: aten.erfinv.default,
    prims.erfc: aten.erfc.default,
    prims.erfcx: aten.special_erfcx.default,
    prims.exp: aten.exp.default,
    prims.exp2: aten.exp2.default,
    prims.expm1: aten.expm1.default,
    prims.fill: aten.fill.Scalar,
    prims.floor: aten.floor.default,
    prims.fmax: aten.fmax.default,
    prims.fmin: aten.fmin.default,
    prims.fmod: aten.fmod.Tensor,
    prims.frexp: aten.frexp.Tensor,
    prims.gcd: aten.gcd.default,
    prims.ge: aten.ge.Tensor,
    prims.gt: aten.gt.Tensor,
    prims.hypot: aten.hypot.default,
    prims.igamma: aten.igamma.default,
    prims.igammac: aten.igammac.default,
    prims.imag: aten.imag.default,
    prims.isfinite: aten.isfinite.default,
    prims.le: aten.le.Tensor,
    prims.lgamma: aten.lgamma.default,
    prims.log: aten.log.default,
    prims.log10: aten.log10.default,
    prims.log1p: aten.log1p.default,
    prims.log2: aten.log2.default,
    prims.lt: aten.lt.Tensor,
    prims.maximum: aten.maximum.default,
    prims.minimum: aten.minimum.default,
    prims.mul: aten.mul.Tensor,
    prims.ndtri: aten.special_ndtri.default,
    prims.ne: aten.ne.Tensor,
    prims.neg: aten.neg.default,
    prims.nextafter: aten.nextafter.default,
    prims.pow: aten.pow.Tensor_Tensor,
    prims.real: aten.real.default,
    prims.reciprocal: aten.reciprocal.default,
    prims.remainder: aten.remainder.Tensor,
    prims.round: aten.round.default,
    prims.rsqrt: aten.rsqrt.default,
    prims.shift_left: aten.bitwise_left_shift.Tensor,
    prims.shift_right_arithmetic: aten.bitwise_right_shift.Tensor,
    prims.sign: aten.sign.default,
    prims.sin: aten.sin.default,
    prims.sinh: aten.sinh.default,
    prims.spherical_bessel_j0: aten.special_spherical_bessel_j0.default,
    prims.sqrt: aten.sqrt.default,
    prims.tan: aten.tan.default,
    prims.tanh: aten.tanh.default,
    prims.trunc: aten.trunc.default,
    prims.view_of_dtype: aten.view.dtype,
    prims.where: aten.where.self,
    prims.zeta: aten.special_zeta.default,
}.items():
    if not isinstance(_op, MissingOp):
        _rule = registry.find(_op)
        assert _rule is not None, _op
        registry.register(_prim.default, _rule.function)

lower_table(
    {
        prims.add.default: lambda x, y: elementwise.add(x, y),
        prims.sub.default: lambda x, y: elementwise.sub(x, y),
        prims.clone.default: lambda x: x,
        prims.view_of.default: lambda x: x,
        prims.copy_strided.default: lambda x, stride: x,
        prims.cat.default: shape.cat,
        prims.rev.default: shape.flip,
        prims.sum.default: _reduction(_sum),
        prims.prod.default: _reduction(_product),
        prims.amax.default: _reduction(reduce_max),
        prims.amin.default: _reduction(reduce_min),
        prims.xor_sum.default: _reduction(lax.reduce_xor),
    }
)

lower_table({prims.cbrt.default: lax.cbrt}, promote=Promotion.INT_TO_FLOAT)
lower_table({prims.fma.default: lambda x, y, z: elementwise.addcmul(z, x, y)})
