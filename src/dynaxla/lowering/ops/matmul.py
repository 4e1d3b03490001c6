"""Lowerings of products of matrices and vectors, and the implementations that compute them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jax import Array, lax
from jax import numpy as jnp
from torch.fx import Node

from ...runtime import machine
from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..cpu import gemv, onednn, onednn_support, torch_kernels
from ..cpu.materialize import in_memory
from ..cpu.widening import widened
from ..dimensions import Dims, definitely, is_static
from ..dtypes import DType
from ..epilogue import with_activation
from ..implementations import Implementations, Operand
from ..memory_order import eager_order, untransposed, untransposed_node
from ..promotion import convert, expand, full_like, number
from ..registry import lowers
from ..settings import precision_for
from .products_of_updates import product_of_update
from .quantized_weights import product_of_quantized

Order = tuple[int, ...] | None


@dataclass(frozen=True)
class Contraction:
    """The problem (see implementations.py) of a sum of products over pairs of dimensions: a dot_general without its operands' values.

    Attributes:
        x: The shape of the first operand.
        y: The shape of the second operand.
        over: The contracted dimensions of x and of y, in pairs.
        batch: The batch dimensions of x and of y, in pairs.
        dtype: The dtype of both operands.
        out: The dtype of the result. Products are added in the accumulator's dtype of `out`.
        precision: XLA's precision of the products.
        platform: JAX's name of the platform.
        orders: The memory layouts of x, y and the result: dimensions from the slowest to the fastest, or None for row-major or for a layout
            that does not matter.
    """

    x: tuple[int, ...]
    y: tuple[int, ...]
    over: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: DType
    out: DType
    precision: lax.Precision
    platform: str
    orders: tuple[Order, Order, Order] = (None, None, None)

    @property
    def rows(self) -> int:
        return math.prod(size for dim, size in enumerate(self.x) if dim not in self.over[0] + self.batch[0])

    @property
    def columns(self) -> int:
        return math.prod(size for dim, size in enumerate(self.y) if dim not in self.over[1] + self.batch[1])

    @property
    def products(self) -> int:
        """The number of scalar multiplications."""
        return math.prod(self.x) * self.columns

    @property
    def operands(self) -> tuple[Operand, ...]:
        return Operand(self.x, self.dtype, self.orders[0]), Operand(self.y, self.dtype, self.orders[1])

    @property
    def result_order(self) -> Order:
        return self.orders[2]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.x)} by {list(self.y)}, over {list(self.over[0])} and {list(self.over[1])}"


CONTRACTION: Implementations[Contraction] = Implementations("contraction")

# oneDNN is preferred from _MIN_ONEDNN_PRODUCTS multiplications on: below, XLA's dot is as fast. With one row or column, XLA's dot is as
# fast for any size. For a linear layer with at most _MAX_LAYER_ROWS rows, oneDNN is also preferred if the weight has at least
# _MIN_LAYER_ELEMENTS elements: for few rows most of the time is spent reading the weight, and XLA's dot reads a large one more slowly.
_MIN_ONEDNN_PRODUCTS = 2_000_000
_MIN_LAYER_ELEMENTS = 150_000
_MAX_LAYER_ROWS = 16


def _are_matrices(problem: Contraction) -> bool:
    """True for products of non-empty matrices whose batch dimensions come first."""
    leading = tuple(range(len(problem.x) - 2))
    are_matrices = problem.batch == (leading, leading) and len(problem.x) == len(problem.y) >= 2 and len(problem.over[0]) == 1
    return are_matrices and 0 not in problem.x + problem.y


def _supports_torch(problem: Contraction) -> bool:
    """True for products of float32 or float64 matrices, if torch has MKL."""
    is_wide = problem.out == problem.dtype and problem.dtype in (np.float32, np.float64)
    return _are_matrices(problem) and is_wide and torch.backends.mkl.is_available()


# MKL multiplies a batch of matrices in one call. XLA's dot and oneDNN make one call for each matrix. For batches of at least _MIN_BATCH
# matrices with at most _MAX_SMALL_SIZE rows, columns and terms (the contracted dimension), they take twice as long as MKL. Batches with at
# most _MAX_TINY_SIZE rows and columns and at most _MAX_TINY_TERMS terms are fastest as elementwise work (`_by_terms`).
# A call of torch has a fixed cost. The call pays off for batches with at least _MIN_TORCH_BATCH_PRODUCTS multiplications. For a product of
# two matrices with `onednn_support.is_slow`, it pays off with at least _MIN_TORCH_PAIR_PRODUCTS multiplications.
_MAX_SMALL_SIZE, _MAX_TINY_SIZE, _MAX_TINY_TERMS, _MIN_BATCH = 32, 16, 8, 16
_MIN_TORCH_BATCH_PRODUCTS, _MIN_TORCH_PAIR_PRODUCTS = 400_000, 32_000_000


def _are_tiny(problem: Contraction) -> bool:
    are_tiny = max(problem.rows, problem.columns) <= _MAX_TINY_SIZE and problem.x[problem.over[0][0]] <= _MAX_TINY_TERMS
    return are_tiny and math.prod(problem.x[:-2]) >= _MIN_BATCH


def _prefers_torch(problem: Contraction) -> bool:
    """True if MKL's kernels are expected to be faster than oneDNN's.

    On Intel's processors, oneDNN's kernels are as fast as MKL's if the contracted dimension is the last of both x and y, as in a linear
    layer; and oneDNN also adds the bias and applies the activation in the same pass. Otherwise, as in the gradients of a linear layer,
    oneDNN takes up to 2.5 times as long as MKL. On other processors, MKL takes 2.2 times as long as oneDNN (AMD EPYC, family 26), or the
    same time (processors with AVX2 but no AVX-512). The exceptions are the sizes for which `onednn_support.is_slow` is True.
    """
    inner = problem.x[problem.over[0][0]]
    if len(problem.x) > 2:
        are_small = min(problem.rows, problem.columns) > 1 and max(problem.rows, problem.columns, inner) <= _MAX_SMALL_SIZE
        is_large_batch = math.prod(problem.x[:-2]) >= _MIN_BATCH and problem.products >= _MIN_TORCH_BATCH_PRODUCTS
        return are_small and is_large_batch and not _are_tiny(problem)
    reads_transposed = problem.over[0] == (0,), problem.over[1] == (1,)
    is_large = min(problem.rows, problem.columns) >= 64 and problem.products >= _MIN_TORCH_PAIR_PRODUCTS
    if is_large and onednn_support.is_slow(problem.rows, problem.columns, *reads_transposed, problem.dtype):
        return True
    return problem.over != ((1,), (1,)) and min(problem.rows, problem.columns, *problem.x) >= 128 and machine.is_intel()


@CONTRACTION.implementation("torch", platforms=["cpu"], supports=_supports_torch, preferred=_prefers_torch)
def _by_torch(problem: Contraction, x: Array, y: Array) -> Array:
    last = x.ndim - 1

    def write(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
        x, y = operands
        torch.matmul(x if problem.over[0] == (last,) else x.mT, y.mT if problem.over[1] == (last,) else y, out=results[0])

    shape = (*problem.x[:-2], problem.rows, problem.columns)
    return torch_kernels.call(write, [x, y], [(shape, problem.out)])[0]


def _supports_torch_int8(problem: Contraction) -> bool:
    """True for the product of two int8 matrices with an int32 result, if torch has oneDNN."""
    return (
        len(problem.x) == len(problem.y) == 2
        and len(problem.over[0]) == 1
        and not problem.batch[0]
        and problem.dtype == np.int8
        and problem.out == np.int32
        and 0 not in problem.x + problem.y
        and torch.backends.mkldnn.is_available()
    )


# Below this many multiplications, a call of torch takes longer than XLA's integer dot, which does only a few multiplications a nanosecond.
_MIN_INT8_PRODUCTS = 300_000


@CONTRACTION.implementation(
    "torch_int8", platforms=["cpu"], supports=_supports_torch_int8, preferred=lambda problem: problem.products >= _MIN_INT8_PRODUCTS
)
def _int8_by_torch(problem: Contraction, x: Array, y: Array) -> Array:
    def write(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
        x, y = operands
        aten._int_mm.out(x.t() if problem.over[0] == (0,) else x, y.t() if problem.over[1] == (1,) else y, out=results[0])

    return torch_kernels.call(write, [x, y], [((problem.rows, problem.columns), problem.out)])[0]


@CONTRACTION.implementation("terms", platforms=["cpu"], supports=_are_matrices, preferred=_are_tiny)
def _by_terms(problem: Contraction, x: Array, y: Array) -> Array:
    """Computes the product as elementwise work: for each term of the sums, a column times a row, for all matrices of the batch at once."""
    wide, last = dtypes.accumulator(problem.out), len(problem.x) - 1
    shape = (*problem.x[:-2], problem.rows, problem.columns)
    # Without the write to memory, XLA would fuse the computation of the operands into each term and repeat it.
    x, y = (in_memory(convert(operand, wide)) for operand in (x, y))

    def term(index: int) -> Array:
        slices = (lax.slice_in_dim(operand, index, index + 1, axis=dim) for operand, (dim,) in zip((x, y), problem.over, strict=True))
        column, row = (lax.squeeze(operand_slice, dims) for operand_slice, dims in zip(slices, problem.over, strict=True))
        batch = range(last - 1)
        return lax.mul(lax.broadcast_in_dim(column, shape, (*batch, last - 1)), lax.broadcast_in_dim(row, shape, (*batch, last)))

    return convert(functools.reduce(lax.add, map(term, range(problem.x[problem.over[0][0]]))), problem.out)


def _supports_onednn(problem: Contraction) -> bool:
    return _are_matrices(problem) and problem.out in (problem.dtype, np.float32) and onednn_support.supports(problem.dtype)


def _prefers_onednn(problem: Contraction) -> bool:
    if min(problem.rows, problem.columns) == 1:
        return False
    is_layer = problem.over == ((1,), (1,)) and problem.rows <= _MAX_LAYER_ROWS
    return problem.products >= _MIN_ONEDNN_PRODUCTS or (is_layer and math.prod(problem.y) >= _MIN_LAYER_ELEMENTS)


@CONTRACTION.implementation(
    "onednn",
    platforms=["cpu"],
    supports=_supports_onednn,
    preferred=_prefers_onednn,
    epilogues=("bias", *onednn.ACTIVATIONS),
)
def _by_onednn(problem: Contraction, x: Array, y: Array, bias: Array | None = None, activation: str = "") -> Array:
    return onednn.matmul(
        x, y, problem.over[0][0] == x.ndim - 2, problem.over[1][0] == y.ndim - 1, problem.out, bias, activation, problem.orders
    )


# With fewer multiplications than these, XLA's dot is as fast as the kernels of `gemv`: for half types, converting the matrix costs little;
# for float32, the matrix stays in the processor's inner caches.
_MIN_HALF_VECTOR_PRODUCTS = 16_000
_MIN_FLOAT_VECTOR_PRODUCTS = 250_000


def _supports_one_vector(problem: Contraction) -> bool:
    """True for products of one vector with a matrix, if `gemv` has a kernel for them.

    XLA's dot reads the matrix at less than the memory's bandwidth, and first converts the whole matrix if it has a half type.
    """
    return (
        len(problem.x) == len(problem.y) == 2
        and problem.over in (((1,), (0,)), ((1,), (1,)))
        and problem.rows == 1
        and gemv.replaces_dot(1, problem.x[1], problem.dtype, problem.over[1] == (1,))
    )


def _prefers_one_vector(problem: Contraction) -> bool:
    return problem.products >= (_MIN_HALF_VECTOR_PRODUCTS if problem.dtype.itemsize == 2 else _MIN_FLOAT_VECTOR_PRODUCTS)


@CONTRACTION.implementation("one_vector", platforms=["cpu"], supports=_supports_one_vector, preferred=_prefers_one_vector)
def _by_one_vector(problem: Contraction, x: Array, y: Array) -> Array:
    out = gemv.product(lax.expand_dims(x, [0]), lax.expand_dims(y, [0]), problem.over[1] == (1,), False, problem.precision)
    return convert(lax.squeeze(out, [0]), problem.out)


@CONTRACTION.implementation("xla")
def _by_xla(problem: Contraction, x: Array, y: Array) -> Array:
    dtype = dtypes.accumulator(problem.out)
    x, y = widened(x, y, problem.platform, definitely(lambda: min(problem.rows, problem.columns) <= 1))
    out = lax.dot_general(x, y, (problem.over, problem.batch), precision=problem.precision, preferred_element_type=dtype)
    return convert(out, problem.out)


def contract(
    x: Array,
    y: Array,
    over: tuple[Dims, Dims],
    ctx: Context,
    batch: tuple[Dims, Dims] = ((), ()),
    dtype: DType | None = None,
    order: Order = None,
) -> Array:
    """Returns the sum of products over pairs of dimensions. Half types are added in float32.

    Shape: batch dimensions, then the remaining dimensions of x, then those of y.
    Dtype: `dtype`, or the accumulator's dtype for x.

    Args:
        x: The first operand.
        y: The second operand, of the same dtype.
        over: The contracted dimensions of x and of y.
        ctx: The context of the current node.
        batch: The batch dimensions of x and of y.
        dtype: The dtype of the result, or None for the accumulator's.
        order: The preferred memory layout of the result: dimensions from the slowest to the fastest.
    """
    problem = _problem(x, y, over, batch, dtype or dtypes.accumulator(x.dtype), ctx, order)
    return ctx.choose(CONTRACTION, problem).run(problem, x, y)


# The layout of (batch, heads, length, size) that a linear layer produces: (batch, length, heads, size) in memory. oneDNN reads and writes
# this layout as fast as row-major.
_HEADS_INNER = (0, 2, 1, 3)


def _problem(
    x: Array, y: Array, over: tuple[Dims, Dims], batch: tuple[Dims, Dims], dtype: DType, ctx: Context, order: Order = None
) -> Contraction:
    over, batch = (tuple(over[0]), tuple(over[1])), (tuple(batch[0]), tuple(batch[1]))
    x_order, y_order, out_order = [
        layout if layout == _HEADS_INNER else None for layout in (eager_order(ctx, x), eager_order(ctx, y), order)
    ]
    precision = precision_for(ctx.settings.matmul_precision, x.dtype)
    return Contraction(x.shape, y.shape, over, batch, x.dtype, dtype, precision, ctx.platform, (x_order, y_order, out_order))


def _scale(x: Array, factor: Any) -> Array:
    """Returns x * factor. For integers the factor is truncated, as in ATen."""
    if isinstance(factor, (int, float, complex)) and factor == 1:
        return x
    return lax.mul(x, number(factor, x.dtype))


def _add_scaled(x: Array, product: Array, beta: Any, alpha: Any, dtype: DType, *, is_eager_loop: bool = False) -> Array:
    """Returns beta * x + alpha * product, cast to dtype. With beta = 0, NaNs of x are ignored.

    With alpha = 0, NaNs of the product are ignored if ATen computes the product by BLAS, which then skips the product. ATen's own CPU loops
    multiply by alpha = 0 instead. They compute the products of half types, which BLAS lacks there, and those with `is_eager_loop`.
    """
    if alpha == 0 and not is_eager_loop and dtypes.is_inexact(dtype) and np.dtype(dtype).itemsize >= 4:
        return full_like(product, 0, dtype) if beta == 0 else _scale(expand(convert(x, dtype), product.shape), beta)
    product = _scale(product, alpha)
    if beta != 0:
        product = lax.add(_scale(expand(convert(x, product.dtype), product.shape), beta), product)
    return convert(product, dtype)


# On the CPU, ATen computes a batch of matrix products in its own loop, not with BLAS, if each product has fewer multiplications than this.
# Source: ATen native/LinearAlgebra.cpp, bmm_out_or_baddbmm_
_EAGER_LOOP_PRODUCTS = 400


def _is_eager_loop(y: Array, z: Array, ctx: Context) -> bool:
    return ctx.eager.loops_over_few_terms and y.ndim == 3 and definitely(lambda: math.prod(y.shape[1:]) * z.shape[2] < _EAGER_LOOP_PRODUCTS)


def _matmul(x: Array, y: Array, ctx: Context, first: int = 0, dtype: DType | None = None) -> Array:
    """Returns the product of two matrices or two batches of matrices, which are the current node's arguments `first` and `first + 1`.

    Transposes of the operands are skipped: XLA:CPU is many times slower on `dot(x, transpose(w))` than on a dot over w's own dimensions.
    """
    product = _matmul_of_update(x, y, ctx, first)
    if product is None:
        product = product_of_quantized(ctx, first + 1, x)
    if product is not None:
        return convert(product, dtype or product.dtype)
    if (repeated_matrix := _repeated_matrix(ctx, first + 1)) is not None:
        matrix, (contracted, _) = repeated_matrix
        out = contract(lax.reshape(x, (x.shape[0] * x.shape[1], x.shape[2])), matrix, ((1,), (contracted,)), ctx, dtype=dtype)
        return lax.reshape(out, (*x.shape[:2], out.shape[1]))
    x, y, over, batch = _untransposed(x, y, ctx, first)
    return contract(x, y, over, ctx, batch=batch, dtype=dtype)


def _repeated_matrix(ctx: Context, index: int) -> tuple[Array, tuple[int, ...]] | None:
    """Returns the matrix that a batch repeats, before its transposes, and the position of each dimension in it, as `untransposed` does.

    Returns None if the argument at position `index` of the current node is not a batch that repeats one matrix.

    ATen expands a linear layer's weight to such a batch if the layer's input is not contiguous and no gradient is needed. As a batch, the
    weight would be copied for each element.
    """
    node = ctx.node.args[index]
    while isinstance(node, Node) and node.target is aten.view.default and node.args[0] in ctx.values:
        if ctx.values[node.args[0]].shape != ctx.values[node].shape:
            return None
        node = node.args[0]
    if not isinstance(node, Node) or node.target is not aten.expand.default or node.args[0] not in ctx.values:
        return None
    matrix = ctx.values[node.args[0]]
    # The tensor before the expand may have another rank, or be a matrix that is expanded along its own dimensions: no repeated matrix.
    if matrix.ndim != 2 or ctx.values[node].shape[1:] != matrix.shape or not is_static(ctx.input(index - 1).shape):
        return None
    return untransposed_node(ctx, node.args[0], matrix)


def _matmul_of_update(x: Array, y: Array, ctx: Context, first: int) -> Array | None:
    """Returns the product if one operand is a tensor with a few updated slices that need not be materialized, else None."""
    row_dim = x.ndim - 2
    batch = tuple(range(row_dim))
    out = product_of_update(ctx, first + 1, x, (row_dim + 1,), batch)
    if out is None:
        out = product_of_update(ctx, first, y, (row_dim,), batch)
        out = out if out is None else lax.transpose(out, (*batch, row_dim + 1, row_dim))
    return out


def _untransposed(x: Array, y: Array, ctx: Context, first: int) -> tuple[Array, Array, tuple[Dims, Dims], tuple[Dims, Dims]]:
    """Returns the operands before their transposes, and the contracted and the batch dimensions of these operands."""
    row_dim = x.ndim - 2
    x, x_order = untransposed(ctx, first, x)
    y, y_order = untransposed(ctx, first + 1, y)
    batch: tuple[Dims, Dims] = ((x_order[0],), (y_order[0],)) if row_dim else ((), ())
    return x, y, ((x_order[row_dim + 1],), (y_order[row_dim],)), batch


@lowers(aten.mm.default, aten.bmm.default)
def mm(x: Array, y: Array, *, ctx: Context) -> Array:
    """x @ y, for two matrices or for two batches of equally many matrices. Half types are added in float32.

    Dtype:  that of x.
    """
    return _matmul(x, y, ctx, dtype=x.dtype)


@lowers(aten.mm.dtype, aten.bmm.dtype)
def mm_dtype(x: Array, y: Array, out_dtype: DType, *, ctx: Context) -> Array:
    """Like `mm`, but sums of half types are cast from float32 directly to `out_dtype`.

    Dtype:  `out_dtype`.
    """
    return convert(_matmul(x, y, ctx), out_dtype)


@lowers(aten.addmm.default, aten.baddbmm.default)
def addmm(x: Array, y: Array, z: Array, *, beta: Any = 1, alpha: Any = 1, ctx: Context) -> Array:
    """beta * x + alpha * (y @ z), for two matrices or for two batches of equally many matrices. x is broadcast.

    A term with a factor of zero is left out where ATen leaves it out: see `_add_scaled`.

    Dtype:  that of y.
    """
    if x.ndim == 1 and x.shape == z.shape[-1:] and x.dtype == y.dtype and beta == alpha == 1:
        return _linear(y, z, x, ctx)
    return _add_scaled(x, _matmul(y, z, ctx, 1), beta, alpha, y.dtype, is_eager_loop=_is_eager_loop(y, z, ctx))


def _linear(x: Array, y: Array, bias: Array, ctx: Context) -> Array:
    """Returns x @ y + bias, in one call with the activation that follows in the graph if the implementation supports that."""
    product = product_of_quantized(ctx, 2, x)
    if product is not None:
        return _add_scaled(bias, product, 1, 1, x.dtype)
    x, y, over, batch = _untransposed(x, y, ctx, 1)
    problem = _problem(x, y, over, batch, x.dtype, ctx)
    implementation = ctx.choose(CONTRACTION, problem)
    if "bias" not in implementation.epilogues:
        return _add_scaled(bias, contract(x, y, over, ctx, batch=batch), 1, 1, x.dtype)
    return with_activation(ctx, implementation.epilogues, lambda activation: implementation.run(problem, x, y, bias, activation))


@lowers(aten.addmm.dtype, aten.baddbmm.dtype)
def addmm_dtype(x: Array, y: Array, z: Array, out_dtype: DType, *, beta: Any = 1, alpha: Any = 1, ctx: Context) -> Array:
    """Like `addmm`, but sums of half types are cast from float32 directly to `out_dtype`.

    Dtype:  `out_dtype`.
    """
    return _add_scaled(x, _matmul(y, z, ctx, 1), beta, alpha, out_dtype)


@lowers(aten.addbmm.default)
def addbmm(x: Array, y: Array, z: Array, *, beta: Any = 1, alpha: Any = 1, ctx: Context) -> Array:
    """beta * x + alpha * (the sum over the batch of y @ z).

    Shape:  y (batch, n, m) and z (batch, m, p) give (n, p); x is broadcast to it.
    """
    return _add_scaled(x, contract(y, z, ((0, 2), (0, 1)), ctx), beta, alpha, y.dtype)


@lowers(aten.mv.default, aten.dot.default)
def mv(x: Array, y: Array, *, ctx: Context) -> Array:
    """A matrix times a vector, or a vector times a vector.

    Shape:  x without its last dimension.
    Dtype:  that of x.
    """
    if x.ndim == 1:
        return convert(contract(x, y, ((0,), (0,)), ctx), x.dtype)
    return convert(_matrix_times_vector(x, y, ctx, 0), x.dtype)


def _matrix_times_vector(x: Array, y: Array, ctx: Context, argument: int) -> Array:
    """Returns x @ y for a vector y, computed as y @ x.T, since more implementations support this form.

    x is the current node's argument at position `argument`. As in `_matmul`, transposes of x are skipped: XLA:CPU takes 40 times as long
    for `transpose(x) @ y` as for `y @ x`.
    """
    x, order = untransposed(ctx, argument, x)
    out = contract(lax.expand_dims(y, [0]), x, ((1,), (order[1],)), ctx)
    return lax.squeeze(out, [0])


@lowers(aten.vdot.default)
def vdot(x: Array, y: Array, *, ctx: Context) -> Array:
    """The dot product of the vectors conj(x) and y.

    Shape:  [].
    Dtype:  that of x.
    """
    return mv(lax.conj(x) if dtypes.is_complex(x.dtype) else x, y, ctx=ctx)


@lowers(aten.addmv.default)
def addmv(x: Array, y: Array, z: Array, *, beta: Any = 1, alpha: Any = 1, ctx: Context) -> Array:
    """beta * x + alpha * (y @ z) for a vector z.

    Shape:  y (n, m) gives (n); x is broadcast to it.
    """
    # ATen calls BLAS's gemv for real types only.
    is_eager_loop = ctx.eager.loops_over_few_terms and dtypes.is_complex(y.dtype)
    return _add_scaled(x, _matrix_times_vector(y, z, ctx, 1), beta, alpha, y.dtype, is_eager_loop=is_eager_loop)


@lowers(aten._int_mm.default)
def int_mm(x: Array, y: Array, *, ctx: Context) -> Array:
    """The product of int8 matrices.

    Dtype:  int32.
    """
    x, y, over, batch = _untransposed(x, y, ctx, 0)
    return contract(x, y, over, ctx, batch=batch, dtype=np.dtype(np.int32))


@lowers(aten._trilinear.default)
def trilinear(x: Array, y: Array, z: Array, expand1: Dims, expand2: Dims, expand3: Dims, sumdim: Dims, *, ctx: Context) -> Array:
    """The sum over `sumdim` of the product of three tensors, after adding dimensions at `expand1`, `expand2` and `expand3`.

    Shape:  the broadcast shape of all three, without `sumdim`.
    Dtype:  that of x.
    Source: ATen native/Linear.cpp, _trilinear (used by nn.Bilinear)
    """
    rank = x.ndim + len(expand1)
    operand_dims = [
        [dim for dim in range(rank) if dim not in {position % rank for position in added}] for added in (expand1, expand2, expand3)
    ]
    summed_dims = {dim % rank for dim in sumdim}
    dtype = dtypes.accumulator(x.dtype)
    operands = [item for pair in zip((x, y, z), operand_dims, strict=True) for item in pair]
    out = jnp.einsum(
        *operands,
        [dim for dim in range(rank) if dim not in summed_dims],
        precision=ctx.settings.matmul_precision,
        preferred_element_type=dtype,
    )
    return convert(out, x.dtype)
