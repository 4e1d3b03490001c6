"""Matrix products with a weight that is dequantized from 8-bit integers, as in `linear(x, weight.to(x.dtype) * scale[:, None])`.

XLA:CPU dequantizes the whole weight before it multiplies, and so writes and reads four bytes for each byte of the model. The implementation
"one_row" is for an x of one row, and dequantizes each element of the weight in the loop that multiplies the element. "blocks" dequantizes
the weight in blocks of rows and multiplies each block while it is in the processor's cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jax import Array, lax
from torch.fx import Node

from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..cpu import split_k_gemv
from ..dtypes import DType
from ..implementations import Implementations
from ..promotion import convert, expand, full_like

# A function of the index of the first row and the number of rows, which returns these rows of a value.
Rows = Callable[[Array, int], Array]


@dataclass(frozen=True)
class QuantizedProductProblem:
    """The product of x and the transpose of a dequantized weight.

    Attributes:
        rows: The number of rows of x.
        shape: The shape of the weight, (columns of the result, contracted size).
        dtype: The dtype of the dequantized weight.
        read_bytes: The size in bytes of the values from which the weight is computed.
        platform: JAX's name of the platform.
    """

    rows: int
    shape: tuple[int, ...]
    dtype: DType
    read_bytes: int
    platform: str


QUANTIZED_PRODUCT: Implementations[QuantizedProductProblem] = Implementations("quantized_product")

# If x has more rows than this, dequantizing is a small part of the time. For half types the limit is one row, since XLA rounds to half
# types slowly and oneDNN is fast from two rows on.
_MAX_ROWS = 16
# Weights with fewer elements fit into the cache as a whole.
_MIN_ELEMENTS = 1 << 20
# The same limit for the implementation "one_row". It was not measured.
_MIN_ONE_ROW_ELEMENTS = 1 << 16
# The size in bytes of one block of the weight, in the dtype in which it is multiplied.
_BLOCK_BYTES = 1 << 18


def product_of_quantized(ctx: Context, position: int, x: Array) -> Array | None:
    """Returns x times the current node's argument at `position`, the transpose of a weight that is dequantized from 8-bit integers.

    Returns None if the argument is not such a transpose, or if dequantizing the whole weight first is expected to be faster.

    Shape:  x (rows, n) and a weight (columns, n) give (rows, columns).
    Dtype:  the accumulator's.
    """
    node = ctx.node.args[position]
    if not isinstance(node, Node) or node.target is not aten.t.default or x.ndim != 2:
        return None
    node = node.args[0]
    leaves: list[Node] = []
    spec = ctx.spec(node)
    if len(spec.shape) != 2 or dtypes.to_jax(spec.dtype) != x.dtype or not dtypes.is_float(x.dtype):
        return None
    weight_rows = _row_function(ctx, node, spec.shape[0], leaves)
    if not any(_is_8_bit(ctx.spec(leaf).dtype) for leaf in leaves):
        return None
    read_bytes = sum(math.prod(ctx.spec(leaf).shape) * ctx.spec(leaf).dtype.itemsize for leaf in leaves)
    return quantized_product(ctx, x, spec.shape, weight_rows, read_bytes)


def quantized_product(ctx: Context, x: Array, shape: tuple[int, ...], weight_rows: Rows, read_bytes: int) -> Array | None:
    """Returns x times the transpose of a weight, or None if dequantizing the whole weight first is expected to be faster.

    Args:
        ctx: The context of the current node.
        x: An array of shape (rows, n).
        shape: The shape of the weight, (columns, n).
        weight_rows: Computes consecutive rows of the weight, from the index of the first row and the number of rows.
        read_bytes: The size in bytes of the values from which the weight is computed.
    """
    problem = QuantizedProductProblem(x.shape[0], shape, x.dtype, read_bytes, ctx.platform)
    result: Array | None = ctx.choose(QUANTIZED_PRODUCT, problem).run(problem, ctx, x, weight_rows)
    return result


def _is_8_bit(dtype: torch.dtype) -> bool:
    return dtype in (torch.int8, torch.uint8)


def _is_compact(problem: QuantizedProductProblem) -> bool:
    """True if the values from which the weight is computed have at most half of the weight's bytes."""
    return problem.read_bytes * 2 <= math.prod(problem.shape) * problem.dtype.itemsize


def _supports_one_row(problem: QuantizedProductProblem) -> bool:
    return problem.rows == 1 and 0 not in problem.shape and split_k_gemv.is_preferred_for_computed_y(problem.shape[1])


def _prefers_one_row(problem: QuantizedProductProblem) -> bool:
    """True for a weight that does not fit into the inner caches.

    On an Intel Xeon with AVX-512 (2026-11-30, one thread, jaxlib 0.10.2), products with 24 weights of 3072 x 768 took 4.5 ms, and 11 ms by
    "blocks".
    """
    return math.prod(problem.shape) >= _MIN_ONE_ROW_ELEMENTS and _is_compact(problem)


@QUANTIZED_PRODUCT.implementation("one_row", platforms=["cpu"], supports=_supports_one_row, preferred=_prefers_one_row)
def _by_one_row(problem: QuantizedProductProblem, ctx: Context, x: Array, weight_rows: Rows) -> Array:
    weight = convert(weight_rows(np.int32(0), problem.shape[0]), dtypes.accumulator(problem.dtype))
    return lax.squeeze(split_k_gemv.product(lax.expand_dims(x, [0]), lax.expand_dims(weight, [0])), [0])


def _prefers_blocks(problem: QuantizedProductProblem) -> bool:
    max_rows = _MAX_ROWS if problem.dtype.itemsize > 2 else 1
    return 0 < problem.rows <= max_rows and math.prod(problem.shape) >= _MIN_ELEMENTS and _is_compact(problem)


@QUANTIZED_PRODUCT.implementation("blocks", platforms=["cpu"], supports=lambda problem: 0 not in problem.shape, preferred=_prefers_blocks)
def _by_blocks(problem: QuantizedProductProblem, ctx: Context, x: Array, weight_rows: Rows) -> Array:
    (columns, count), wide = problem.shape, dtypes.accumulator(problem.dtype)
    size = max(1, min(columns, _BLOCK_BYTES // (count * wide.itemsize)))
    x = convert(x, wide)

    def step(block_index: Array, result: Array) -> Array:
        # XLA clamps the start of the last block, both in the read and in the write, so that the block has its full length.
        start = lax.mul(lax.convert_element_type(block_index, np.int32), np.int32(size))
        weight = convert(weight_rows(start, size), wide)
        part = lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=ctx.settings.matmul_precision)
        return lax.dynamic_update_slice(result, part, (np.int32(0), start))

    return lax.fori_loop(np.int32(0), np.int32(-(-columns // size)), step, lax.full((problem.rows, columns), 0, wide))


@QUANTIZED_PRODUCT.implementation("whole")
def _by_whole(problem: QuantizedProductProblem, ctx: Context, x: Array, weight_rows: Rows) -> None:
    """Returns None: the caller multiplies by the whole weight."""


_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default)
_ARITHMETIC = {aten.mul.Tensor: lax.mul, aten.sub.Tensor: lax.sub, aten.add.Tensor: lax.add, aten.div.Tensor: lax.div}


def _row_function(ctx: Context, node: Node, count: int, leaves: list[Node]) -> Rows:
    """Returns a function that computes consecutive rows of the value of `node`, which has `count` rows, in its dtype or the accumulator's.

    Appends to `leaves` the nodes whose rows the returned function reads. Operands that are broadcast over the rows are not appended.
    """
    spec = ctx.spec(node)
    dtype = dtypes.to_jax(spec.dtype)
    if node.target is aten._to_copy.default and set(node.kwargs) == {"dtype"}:
        inner = _row_function(ctx, node.args[0], count, leaves)
        # Every float dtype of PyTorch but float8 represents all 8-bit integers exactly: for them, the rounding to `dtype` is left out.
        to = dtypes.accumulator(dtype) if _is_8_bit(ctx.spec(node.args[0]).dtype) and dtype.itemsize > 1 else dtype
        return lambda start, size: convert(inner(start, size), to)
    if node.target in _RESHAPES and ctx.spec(node.args[0]).shape[:1] == (count,) == spec.shape[:1]:
        inner = _row_function(ctx, node.args[0], count, leaves)
        return lambda start, size: lax.reshape(inner(start, size), (size, *spec.shape[1:]))
    if node.target in _ARITHMETIC and len(node.args) == 2 and not node.kwargs and dtypes.is_float(dtype):
        operands = [_operand_function(ctx, argument, count, leaves, spec) for argument in node.args]
        return lambda start, size: _arithmetic_on_rows(node, [operand(start, size) for operand in operands], (size, *spec.shape[1:]), dtype)
    leaves.append(node)
    value = ctx.values[node]
    return lambda start, size: lax.dynamic_slice_in_dim(value, start, size)


def _arithmetic_on_rows(node: Node, operands: list[Array], shape: tuple[int, ...], dtype: DType) -> Array:
    """Computes one arithmetic op on a block of rows, and rounds the result to `dtype` as the op does."""
    wide = dtypes.accumulator(dtype)
    lhs, rhs = (expand(convert(operand, wide), shape) for operand in operands)
    return convert(_ARITHMETIC[node.target](lhs, rhs), dtype)


def _operand_function(ctx: Context, argument: Any, count: int, leaves: list[Node], result: Any) -> Rows:
    """Returns a function that computes the part of an op's argument that is needed for consecutive rows of the op's result.

    `result` is the spec of the op's result, which has `count` rows.
    """
    if not isinstance(argument, Node) or not isinstance(argument.meta.get("val"), torch.Tensor):
        number = ctx.spec_of(argument)
        wide = dtypes.accumulator(dtypes.to_jax(result.dtype))  # ATen does not round the number to a half type
        return lambda start, size: full_like(lax.full((), 0, wide), number)
    spec = ctx.spec(argument)
    if len(spec.shape) == len(result.shape) and spec.shape[0] == count > 1:
        return _row_function(ctx, argument, count, leaves)
    value = ctx.values[argument]
    return lambda start, size: value
