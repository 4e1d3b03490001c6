"""The ops whose lowerings the generic properties test: a new lowering is one row.

A row's samples are made with `make`, which gives operands of the property that is tested (dense or not, of rank 0), and with the size of
the first dimension, 0 among others. Where eager mode refuses a sample of rank 0 or without elements, so may we. A case that is none of an
op's samples, because it needs values of its own, is a test in the op's file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

aten, prims = torch.ops.aten, torch.ops.prims

Make = Callable[..., torch.Tensor]
Samples = Callable[[Make, int], Sequence[tuple[Any, ...]]]

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, torch.float64, *HALVES)
INTEGERS = (torch.int64, torch.uint8)
REAL = (*FLOATS, *INTEGERS)
NUMERIC = (*REAL, torch.complex64)
EVERY = (*NUMERIC, torch.bool)


@dataclass(frozen=True)
class Op:
    """Attributes: low, high: bounds of the operands' numbers; tolerance: by dtype, with a reason; gradient: whether there is one;
    without: forms of operands for which there is a reason not to try them."""

    op: torch._ops.OpOverload
    samples: Samples
    dtypes: Sequence[torch.dtype] = FLOATS
    low: float = -3.0
    high: float = 3.0
    tolerance: dict[torch.dtype, tuple[float, float]] = field(default_factory=dict)
    gradient: bool = True
    without: Sequence[str] = ()

    def __str__(self) -> str:
        return str(self.op)


def of(*rest: Any) -> Samples:
    """One tensor, and further arguments."""
    return lambda make, n: [(make(n, 3), *rest)]


def either(*rests: tuple[Any, ...]) -> Samples:
    """One tensor, and one or other further arguments."""
    return lambda make, n: [(make(n, 3), *rest) for rest in rests]


def along_each_dim(make: Make, n: int) -> list[tuple[Any, ...]]:
    return [(make(n, 3), dim) for dim in (0, -1)]


def two(make: Make, n: int) -> list[tuple[Any, ...]]:
    """Two tensors of one shape, and two that are broadcast."""
    return [(make(n, 3), make(n, 3)), (make(n, 3), make(3)), (make(n, 1), make())]


def three(make: Make, n: int) -> list[tuple[Any, ...]]:
    return [(make(n, 3), make(n, 3), make(3))]


def with_numbers(make: Make, n: int) -> list[tuple[Any, ...]]:
    return [(make(n, 3), 2), (make(n, 3), True)]


def image(*rest: Any) -> Samples:
    return lambda make, n: [(make(n, 2, 6, 5), *rest)]


def products(*shapes: tuple[int, ...]) -> Samples:
    """Tensors of these shapes; -1 is the changing size."""
    return lambda make, n: [tuple(make(*(n if size == -1 else size for size in shape)) for shape in shapes)]


# torch's shape functions give other strides there than its kernels.
NO_ORDER = ("transposed",)

ROWS: list[Op] = [
    # Arithmetic
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
    # Comparisons, logic and bits
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
    # Shapes
    Op(aten.permute.default, of([1, 0]), EVERY),
    Op(aten.unsqueeze.default, along_each_dim, EVERY),
    Op(aten.expand.default, lambda make, n: [(make(n, 1), [2, n, 4])], EVERY),
    Op(aten.select.int, of(1, 2), EVERY),
    Op(aten.slice.Tensor, either((0, 1, 3), (1, 0, 3, 2)), EVERY),
    Op(aten.cat.default, lambda make, n: [([make(n, 3), make(n, 3)], dim) for dim in (0, 1)], EVERY),
    Op(aten.stack.default, lambda make, n: [([make(n, 3), make(n, 3)], dim) for dim in (0, -1)], EVERY),
    Op(aten.flip.default, either(([0],), ([0, 1],), ([],)), EVERY),
    Op(aten.roll.default, either(([1], [0]), ([2],)), EVERY),
    Op(aten.repeat.default, of([2, 1, 3]), EVERY),
    Op(aten.tril.default, either((), (1,)), EVERY),
    Op(aten.triu.default, either((), (-1,)), EVERY),
    Op(aten.diagonal.default, either((), (1,)), EVERY),
    Op(aten.constant_pad_nd.default, either(([1, 2],), ([1, -1, 0, 2], 1)), EVERY),
    Op(aten.unfold.default, of(1, 2, 1), EVERY),
    Op(aten.clone.default, of(), EVERY),
    Op(aten._to_copy.default, of(), EVERY),
    Op(aten.sort.default, along_each_dim, (torch.float32, torch.float64)),
    # Indices
    Op(aten.index_select.default, lambda make, n: [(make(n, 3), 1, torch.tensor([2, 0]))], EVERY),
    Op(aten.gather.default, lambda make, n: [(make(n, 3), 1, torch.ones(n, 2, dtype=torch.int64))], EVERY),
    Op(aten.scatter_add.default, lambda make, n: [(make(n, 3), 1, torch.ones(n, 2, dtype=torch.int64), make(n, 2))], NUMERIC),
    Op(aten.index_add.default, lambda make, n: [(make(n, 3), 1, torch.tensor([2, 0]), make(n, 2))], NUMERIC),
    # Products
    Op(aten.mm.default, products((-1, 3), (3, 4)), NUMERIC),
    Op(aten.bmm.default, products((-1, 2, 3), (-1, 3, 4)), NUMERIC),
    Op(aten.mv.default, products((-1, 3), (3,)), NUMERIC),
    Op(aten.dot.default, products((-1,), (-1,)), NUMERIC),
    Op(aten.addmm.default, products((4,), (-1, 3), (3, 4)), NUMERIC),
    Op(aten.baddbmm.default, products((2, 4), (-1, 2, 3), (-1, 3, 4)), NUMERIC),
    # Images. torch's own shape functions for resampling take no empty batch.
    Op(aten.avg_pool2d.default, image([2, 2]), FLOATS),
    Op(aten.max_pool2d_with_indices.default, image([2, 2]), FLOATS),
    Op(aten._adaptive_avg_pool2d.default, image([3, 2]), FLOATS),
    Op(aten.reflection_pad2d.default, image([1, 2, 0, 1]), FLOATS),
    Op(aten.replication_pad2d.default, image([1, 2, 0, 1]), FLOATS),
    Op(aten.pixel_shuffle.default, lambda make, n: [(make(n, 4, 3, 2), 2)], FLOATS),
    Op(aten.upsample_nearest2d.default, image([9, 4]), FLOATS, without=["empty"]),
    Op(aten.upsample_bilinear2d.default, image([9, 4], False), FLOATS, without=["empty"]),
    Op(aten.convolution.default, lambda make, n: [
        (make(n, 2, 6, 5), make(3, 2, 3, 3), make(3), [1, 2], [1, 0], [1, 1], False, [0, 0], 1)
    ], FLOATS),
]  # fmt: skip
