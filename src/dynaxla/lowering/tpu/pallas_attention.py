"""Attention kernels for TPUs, written in Pallas: they compute the scores block by block in VMEM, and never store them.

JAX's own kernels (jax.experimental.pallas.ops.tpu) have the same structure, but cannot be used. AOTAutograd runs the forward and the
backward as two programs, and only private functions of JAX accept the log-sum-exp of another program. The kernel "splash" adds no mask to
the scores. The kernel "flash" needs a mask for each batch and head, and stores the gradient of each score.

The grid of a kernel is (batch, head, block of rows, block of columns) or similar. The steps along its last dimension or dimensions run
sequentially on one core, and add to accumulators in VMEM. Source: Dao, FlashAttention-2 (2023), algorithms 1 and 2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from .. import dtypes

if TYPE_CHECKING:
    from jax.experimental import pallas as pl

# The possible numbers of rows or columns of a block: multiples of the 128 lanes of a vector register. A block of 512 x 512 float32 scores
# takes 1 MiB of the 16 MiB of VMEM that a kernel may use. About four such blocks exist at a time.
_BLOCKS = (512, 384, 256, 128)
_LANES = 128
# The fixed time of a grid step, as the number of rows that take this time.
_STEP_ROWS = 32
# The largest head size. For larger heads, the blocks of operands and accumulators need too much VMEM.
_LARGEST_SIZE = 256
_DTYPES = frozenset({"bfloat16", "float32"})

_NEG_INF = -math.inf
# Dimension numbers of the matrix products x @ y.T and x @ y.
_ROWS_WITH_ROWS, _PLAIN = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ()))


@dataclass(frozen=True)
class KernelSettings:
    """The settings of an attention.

    Attributes:
        scale: The factor of the scores, before a bias is added.
        is_causal: True if row i attends to columns 0 to i only.
        precision: The precision of products of float32 operands. Mosaic does not have HIGH, so HIGHEST is used for it.
    """

    scale: float
    is_causal: bool
    precision: lax.Precision


def supports(dtype: dtypes.DType, size: int) -> bool:
    """True if the kernels compute with heads of this dtype and size."""
    return dtype.name in _DTYPES and 0 < size <= _LARGEST_SIZE


@dataclass(frozen=True)
class _Tiling:
    """The division of the scores into blocks.

    Attributes:
        rows: The number of rows of the scores.
        columns: The number of columns of the scores.
        block_rows: The number of rows of a block.
        block_columns: The number of columns of a block.
        settings: The settings of the attention.
    """

    rows: int
    columns: int
    block_rows: int
    block_columns: int
    settings: KernelSettings

    @staticmethod
    def of(rows: int, columns: int, settings: KernelSettings) -> _Tiling:
        return _Tiling(rows, columns, _block(rows), _block(columns), settings)

    @property
    def row_blocks(self) -> int:
        return -(-self.rows // self.block_rows)

    @property
    def column_blocks(self) -> int:
        return -(-self.columns // self.block_columns)

    @property
    def padded_rows(self) -> int:
        return self.row_blocks * self.block_rows

    @property
    def padded_columns(self) -> int:
        return self.column_blocks * self.block_columns

    def has_scores(self, i: Array, j: Array) -> Any:
        """True if row block i and column block j have a score that is not hidden by the causal mask."""
        return (i + 1) * self.block_rows > j * self.block_columns if self.settings.is_causal else True

    def last_column_block(self, i: Array, j: Array) -> Array:
        """Returns j, or the last column block to which row block i attends if j is larger, so that no unused block is copied to VMEM."""
        if not self.settings.is_causal:
            return j
        return lax.min(j, lax.div((i + 1) * self.block_rows - 1, np.int32(self.block_columns)))

    def first_row_block(self, i: Array, j: Array) -> Array:
        """Returns i, or the first row block that attends to column block j if this row block comes after i; see `last_column_block`."""
        if not self.settings.is_causal:
            return i
        first = lax.div(j * self.block_columns, np.int32(self.block_rows))
        return lax.max(i, lax.min(first, np.int32(self.row_blocks - 1)))

    def hide_scores(self, scores: Array, i: Array, j: Array, row_dim: int) -> Array:
        """Returns the scores of a block, with -inf after the last column and where a row does not attend.

        Args:
            i: The row block.
            j: The column block.
            row_dim: The dimension of the rows, 0 or 1.
        """
        column = j * self.block_columns + lax.broadcasted_iota(np.int32, scores.shape, 1 - row_dim)
        if self.padded_columns != self.columns:
            scores = jnp.where(column < self.columns, scores, _NEG_INF)
        if self.settings.is_causal:
            row = i * self.block_rows + lax.broadcasted_iota(np.int32, scores.shape, row_dim)
            scores = jnp.where(column <= row, scores, _NEG_INF)
        return scores

    def dot(self, x: Array, y: Array, dims: Any) -> Array:
        """Returns a matrix product, accumulated in float32."""
        is_rounded = x.dtype != np.float32 or self.settings.precision == lax.Precision.DEFAULT
        precision = lax.Precision.DEFAULT if is_rounded else lax.Precision.HIGHEST
        return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=np.float32)

    def transposed_scores(self, query: Array, key: Array, bias: Array | None, i: Array, j: Array) -> Array:
        """Returns the scores of a block as (columns, rows), so that values per row lie along the lanes. bias: (rows or 1, columns)."""
        scores = self.dot(key, query, _ROWS_WITH_ROWS) * self.settings.scale
        if bias is not None:
            scores = scores + jnp.broadcast_to(bias.astype(np.float32), scores.shape[::-1]).T
        return self.hide_scores(scores, i, j, row_dim=1)


def _block(length: int) -> int:
    """Returns the size of a block with which a kernel covers a length in the least time: with little padding and few steps."""
    return min(_BLOCKS, key=lambda size: -(-length // size) * (size + _STEP_ROWS))


def _padded(x: Array, *last: int) -> Array:
    """Pads the last dimensions of x with zeros to the sizes `last`."""
    config = [(0, to - size, 0) for size, to in zip(x.shape, (*x.shape[: -len(last)], *last), strict=True)]
    return lax.pad(x, lax.full((), 0, x.dtype), config) if any(high for _, high, _ in config) else x


def _bias_of(mask: Array | None, dtype: dtypes.DType, tiling: _Tiling) -> Array | None:
    """Returns a mask as numbers to add to the scores, padded to full blocks; None without a mask."""
    if mask is None:
        return None
    if dtypes.is_bool(mask.dtype):
        mask = lax.select(mask, lax.full(mask.shape, 0, dtype), lax.full(mask.shape, _NEG_INF, dtype))
    return _padded(mask, tiling.padded_rows if mask.shape[2] > 1 else 1, tiling.padded_columns)


def _broadcast_columns(x: Array, width: int) -> Array:
    """Repeats x (rows, 128), whose columns are equal, to (rows, width)."""
    return jnp.tile(x, (1, -(-width // _LANES)))[:, :width]


def _crop(x: Array, shape: Sequence[int]) -> Array:
    return lax.slice(x, (0,) * x.ndim, shape) if x.shape != tuple(shape) else x


# --- the kernels


def _forward_kernel(tiling: _Tiling, pl: Any, has_bias: bool, *refs: Any) -> None:
    """Computes the output and the log-sum-exp. The grid is (batch, head, block of rows, block of columns)."""
    query, key, value, *biases, out, logsumexp, largest, total, sums = refs
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _start() -> None:
        largest[...] = jnp.full_like(largest, _NEG_INF)
        total[...] = jnp.zeros_like(total)
        sums[...] = jnp.zeros_like(sums)

    @pl.when(tiling.has_scores(i, j))
    def _add() -> None:
        scores = tiling.dot(query[...], key[...], _ROWS_WITH_ROWS) * tiling.settings.scale
        if has_bias:
            scores = scores + biases[0][...].astype(np.float32)
        scores = tiling.hide_scores(scores, i, j, row_dim=0)
        old = largest[...]
        new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
        base = jnp.where(new == _NEG_INF, 0.0, new)  # 0 for a row without scores so far
        weights = jnp.exp(scores - _broadcast_columns(base, scores.shape[1]))
        rescale = jnp.exp(old - base)
        total[...] = rescale * total[...] + jnp.sum(weights, axis=1, keepdims=True)
        added = tiling.dot(weights.astype(value.dtype), value[...], _PLAIN)
        sums[...] = _broadcast_columns(rescale, added.shape[1]) * sums[...] + added
        largest[...] = new

    @pl.when(j == tiling.column_blocks - 1)
    def _finish() -> None:
        is_empty = total[...] == 0
        divisor = jnp.where(is_empty, 1.0, total[...])
        out[...] = (sums[...] / _broadcast_columns(divisor, sums.shape[1])).astype(out.dtype)
        logsumexp[...] = jnp.where(is_empty, 0.0, largest[...] + jnp.log(divisor)).T[:1]


def _gradients_of_scores(tiling: _Tiling, refs: Sequence[Any], has_bias: bool, i: Array, j: Array) -> tuple[Array, Array]:
    """Returns the weights of a block and the gradients of its unscaled scores, as (columns, rows)."""
    query, key, value, grad, logsumexp, delta, *biases = refs
    scores = tiling.transposed_scores(query[...], key[...], biases[0][...] if has_bias else None, i, j)
    weights = jnp.exp(scores - logsumexp[...])
    grad_weights = tiling.dot(value[...], grad[...], _ROWS_WITH_ROWS)
    return weights, weights * (grad_weights - delta[...]) * tiling.settings.scale


def _key_value_gradient_kernel(tiling: _Tiling, pl: Any, has_bias: bool, *refs: Any) -> None:
    """Computes the gradients of key and value. The grid is (batch, key head, block of columns, head of the group, block of rows)."""
    *operands, grad_key, grad_value, key_sums, value_sums = refs
    query, grad = operands[0], operands[3]
    j, head, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)

    @pl.when((head == 0) & (i == 0))
    def _start() -> None:
        key_sums[...] = jnp.zeros_like(key_sums)
        value_sums[...] = jnp.zeros_like(value_sums)

    @pl.when(tiling.has_scores(i, j))
    def _add() -> None:
        weights, grad_scores = _gradients_of_scores(tiling, operands, has_bias, i, j)
        value_sums[...] += tiling.dot(weights.astype(grad.dtype), grad[...], _PLAIN)
        key_sums[...] += tiling.dot(grad_scores.astype(query.dtype), query[...], _PLAIN)

    @pl.when((head == pl.num_programs(3) - 1) & (i == tiling.row_blocks - 1))
    def _finish() -> None:
        grad_key[...] = key_sums[...].astype(grad_key.dtype)
        grad_value[...] = value_sums[...].astype(grad_value.dtype)


def _query_gradient_kernel(tiling: _Tiling, pl: Any, has_bias: bool, *refs: Any) -> None:
    """Computes the gradient of the query. The grid is (batch, head, block of rows, block of columns)."""
    *operands, grad_query, sums = refs
    key = operands[1]
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _start() -> None:
        sums[...] = jnp.zeros_like(sums)

    @pl.when(tiling.has_scores(i, j))
    def _add() -> None:
        _, grad_scores = _gradients_of_scores(tiling, operands, has_bias, i, j)
        sums[...] += tiling.dot(grad_scores.T.astype(key.dtype), key[...], _PLAIN)

    @pl.when(j == tiling.column_blocks - 1)
    def _finish() -> None:
        grad_query[...] = sums[...].astype(grad_query.dtype)


# --- calls of the kernels

# A function of a step's indices in the grid, which returns (batch, head, key head, block of rows, block of columns).
_BlockIndices = Callable[..., tuple[Any, Any, Any, Any, Any]]


@dataclass(frozen=True)
class _BlockSpecs:
    """Creates the block specifications of a kernel's operands and results.

    Attributes:
        pl: The module jax.experimental.pallas.
        tiling: The division into blocks.
        block_indices: See `_BlockIndices`.
    """

    pl: Any
    tiling: _Tiling
    block_indices: _BlockIndices

    def by_row(self, size: int) -> pl.BlockSpec:
        """Returns the specification of an operand (batch, heads, rows, size)."""
        return self._spec((self.tiling.block_rows, size), lambda batch, head, _, i, __: (batch, head, i, 0))

    def by_column(self, size: int) -> pl.BlockSpec:
        """Returns the specification of an operand (batch, key heads, columns, size)."""
        return self._spec((self.tiling.block_columns, size), lambda batch, _, head, __, j: (batch, head, j, 0))

    def per_row(self) -> pl.BlockSpec:
        """Returns the specification of an operand (batch, heads, 1, rows)."""
        return self._spec((1, self.tiling.block_rows), lambda batch, head, _, i, __: (batch, head, 0, i))

    def bias(self, bias: Array) -> pl.BlockSpec:
        """Returns the specification of a bias. Its size is 1 in the dimensions of batch, heads or rows along which it does not vary."""
        has_batch, has_heads, has_rows = (size > 1 for size in bias.shape[:3])

        def index(batch: Any, head: Any, _: Any, i: Any, j: Any) -> tuple[Any, ...]:
            return batch if has_batch else 0, head if has_heads else 0, i if has_rows else 0, j

        return self._spec((self.tiling.block_rows if has_rows else 1, self.tiling.block_columns), index)

    def _spec(self, shape: tuple[int, int], index: Callable[..., Any]) -> pl.BlockSpec:
        return self.pl.BlockSpec((None, None, *shape), lambda *grid: index(*self.block_indices(*grid)))


def _call(
    kernel: Callable[..., None],
    specs: _BlockSpecs,
    grid: tuple[int, ...],
    sequential: int,
    operands: Sequence[tuple[Any, Array]],
    results: Sequence[tuple[Any, jax.ShapeDtypeStruct]],
    accumulators: Sequence[tuple[int, int]],
    has_bias: bool,
) -> Sequence[Array]:
    """Calls a kernel.

    Args:
        grid: The number of steps along each dimension.
        sequential: The number of the last dimensions of the grid that must run sequentially on one core.
        operands: Pairs of a block specification and an operand.
        results: Pairs of a block specification and the shape and dtype of a result.
        accumulators: The shapes of float32 arrays in VMEM.
        has_bias: True if the last operand is a bias.
    """
    from jax.experimental.pallas import tpu

    # Mosaic has no 64-bit numbers, which Python's ints in a kernel would become.
    with jax.enable_x64(False):
        arrays: Sequence[Array] = specs.pl.pallas_call(
            functools.partial(kernel, specs.tiling, specs.pl, has_bias),
            grid=grid,
            in_specs=[spec for spec, _ in operands],
            out_specs=[spec for spec, _ in results],
            out_shape=[result for _, result in results],
            scratch_shapes=[tpu.VMEM(shape, np.float32) for shape in accumulators],
            compiler_params=tpu.CompilerParams(
                dimension_semantics=("parallel",) * (len(grid) - sequential) + ("arbitrary",) * sequential,
            ),
            name=kernel.__name__.strip("_"),
        )(*(operand for _, operand in operands))
    return arrays


def _row_block_indices(tiling: _Tiling, group: int) -> _BlockIndices:
    """Returns the block indices in the grid (batch, head, block of rows, block of columns). `group` heads share a key head."""
    return lambda b, head, i, j: (b, head, lax.div(head, np.int32(group)), i, tiling.last_column_block(i, j))


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def forward(query: Array, key: Array, value: Array, mask: Array | None, settings: KernelSettings) -> tuple[Array, Array]:
    """Returns the attention output, and the log-sum-exp of each row of scores. Both are zero in a row that the mask hides completely.

    Shape:  query (batch, heads, rows, size), key and value (batch, key heads, columns, size or value size), where heads is a multiple of
            key heads; mask (batch or 1, heads or 1, rows or 1, columns). Results: that of query with value's size; (batch, heads, rows).
    Dtype:  query, key, value and the output have one dtype; the mask is bool (True where a score counts) or is added to the scores;
            log-sum-exp is float32.
    """
    from jax.experimental import pallas as pl

    batch, heads, rows, size = query.shape
    value_size, tiling = value.shape[3], _Tiling.of(rows, key.shape[2], settings)
    specs = _BlockSpecs(pl, tiling, _row_block_indices(tiling, heads // key.shape[1]))
    query = _padded(query, tiling.padded_rows, size)
    key, value = (_padded(x, tiling.padded_columns, x.shape[3]) for x in (key, value))
    bias = _bias_of(mask, query.dtype, tiling)
    out, logsumexp = _call(
        _forward_kernel,
        specs,
        (batch, heads, tiling.row_blocks, tiling.column_blocks),
        1,
        [
            (specs.by_row(size), query), (specs.by_column(size), key), (specs.by_column(value_size), value),
            *([] if bias is None else [(specs.bias(bias), bias)]),
        ],
        [
            (specs.by_row(value_size), jax.ShapeDtypeStruct((*query.shape[:3], value_size), query.dtype)),
            (specs.per_row(), jax.ShapeDtypeStruct((batch, heads, 1, tiling.padded_rows), np.dtype(np.float32))),
        ],
        [(tiling.block_rows, _LANES), (tiling.block_rows, _LANES), (tiling.block_rows, value_size)],
        bias is not None,
    )  # fmt: skip
    logsumexp = lax.reshape(logsumexp, (batch, heads, tiling.padded_rows))
    return _crop(out, (batch, heads, rows, value_size)), _crop(logsumexp, (batch, heads, rows))


def backward(
    grad: Array, query: Array, key: Array, value: Array, mask: Array | None, logsumexp: Array, delta: Array, settings: KernelSettings
) -> tuple[Array, Array, Array]:
    """Returns the gradients of query, key and value, each of its operand's shape and dtype.

    Args:
        logsumexp: The result of `forward`.
        delta: float32 (batch, heads, rows); the sum of the output times `grad` over the last dimension.

    The other arguments are as for `forward`.
    """
    from jax.experimental import pallas as pl

    batch, heads, rows, size = query.shape
    key_heads, columns, value_size = key.shape[1], key.shape[2], value.shape[3]
    tiling = _Tiling.of(rows, columns, settings)
    group = heads // key_heads
    bias = _bias_of(mask, query.dtype, tiling)
    per_row = [_padded(lax.reshape(x, (batch, heads, 1, rows)), tiling.padded_rows) for x in (logsumexp, delta)]
    query, grad = (_padded(x, tiling.padded_rows, x.shape[3]) for x in (query, grad))
    key, value = (_padded(x, tiling.padded_columns, x.shape[3]) for x in (key, value))

    def operands(specs: _BlockSpecs) -> list[tuple[Any, Array]]:
        return [
            (specs.by_row(size), query), (specs.by_column(size), key), (specs.by_column(value_size), value),
            (specs.by_row(value_size), grad), *((specs.per_row(), x) for x in per_row),
            *([] if bias is None else [(specs.bias(bias), bias)]),
        ]  # fmt: skip

    def columns_first(b: Any, key_head: Any, j: Any, head: Any, i: Any) -> tuple[Any, ...]:
        return b, key_head * group + head, key_head, tiling.first_row_block(i, j), j

    specs = _BlockSpecs(pl, tiling, columns_first)
    grad_key, grad_value = _call(
        _key_value_gradient_kernel,
        specs,
        (batch, key_heads, tiling.column_blocks, group, tiling.row_blocks),
        2,
        operands(specs),
        [(specs.by_column(size), _like(key)), (specs.by_column(value_size), _like(value))],
        [(tiling.block_columns, size), (tiling.block_columns, value_size)],
        bias is not None,
    )
    specs = _BlockSpecs(pl, tiling, _row_block_indices(tiling, group))
    (grad_query,) = _call(
        _query_gradient_kernel,
        specs,
        (batch, heads, tiling.row_blocks, tiling.column_blocks),
        1,
        operands(specs),
        [(specs.by_row(size), _like(query))],
        [(tiling.block_rows, size)],
        bias is not None,
    )
    return (
        _crop(grad_query, (batch, heads, rows, size)),
        _crop(grad_key, (batch, key_heads, columns, size)),
        _crop(grad_value, (batch, key_heads, columns, value_size)),
    )
