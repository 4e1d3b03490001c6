"""Implementations of scaled dot product attention and its gradients.

A score is the scaled product of a query row and a key, before the softmax. Some implementations keep all scores in memory, and some those
of one block of rows at a time. Others call kernels of torch, cuDNN or Pallas, which do not store the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from jax import Array, lax

from .. import dtypes
from ..context import Context
from ..cpu import flash_attention
from ..cpu.vectorized_reductions import reduce_max, reduce_sum
from ..cuda import fused_attention
from ..implementations import Implementations, Operand
from ..memory_order import eager_order, eager_spec
from ..promotion import convert, expand, expand_leading
from ..tpu import pallas_attention
from .attention_dropout import dropout_mask, dropout_mask_rows
from .matmul import Order, contract
from .products_of_updates import product_of_update
from .softmax import minus_largest

Gradients = tuple[Array, Array, Array, Array | None]


@dataclass(frozen=True)
class AttentionProblem:
    """The shapes, dtypes and settings of an attention or its gradient, for which an implementation is chosen.

    It has no attribute `operands`, so the tuner does not measure its implementations: some exist to save memory, not time.

    Attributes:
        query: shape, dtype and memory order of the query.
        key: shape, dtype and memory order of the key.
        value: shape, dtype and memory order of the value.
        mask: shape (of rank 4) and dtype of the mask; None without a mask. Batch and heads have size 1 where the mask is expanded along
            them.
        is_causal: True if row i attends only to columns 0 to i.
        scale: factor of the scores.
        has_dropout: True if weights are dropped.
        wants_mask_gradient: True if the gradient of the mask is needed.
        platform: `Context.platform`.
        devices: the number of devices of the mesh on which the program runs; 1 without a mesh.
    """

    query: Operand
    key: Operand
    value: Operand
    mask: Operand | None
    is_causal: bool
    scale: float
    has_dropout: bool
    wants_mask_gradient: bool
    platform: str
    devices: int = 1

    @property
    def fused_settings(self) -> fused_attention.AttentionSettings:
        """Settings of cuDNN's kernels. All operands get the key's layout: a key in a KV cache is the most expensive operand to copy."""
        return fused_attention.AttentionSettings(self.scale, self.is_causal, self.key.order == fused_attention.HEADS_INSIDE)


@dataclass(frozen=True)
class RowBlock:
    """The position of a block of rows in a larger attention.

    Attributes:
        first_row: index of the block's first row, an integer of rank 0.
        total_rows: number of rows of the larger attention.
    """

    first_row: Array
    total_rows: int


@dataclass(frozen=True)
class Attention:
    """An attention with its operands.

    With fewer key heads than query heads (grouped-query attention), each key head serves a group of neighbouring query heads. The rows of
    a group are treated as rows of one head (`group_by_key_head`).

    Attributes:
        query: (batch, heads, rows, size).
        key: (batch, key heads, columns, size).
        value: (batch, key heads, columns, value size).
        mask: added to the scores, or, if bool, true where a score counts; broadcast to (batch, heads, rows, columns). None without a mask.
        is_causal: True if row i attends only to columns 0 to i.
        scale: factor of the scores; None: 1 / sqrt(size).
        ctx: context of the node that is being lowered.
        row_block: position of these rows in a larger attention; None if this attention has all rows.
    """

    query: Array
    key: Array
    value: Array
    mask: Array | None
    is_causal: bool
    scale: float | None
    ctx: Context
    row_block: RowBlock | None = None

    def problem(self, has_dropout: bool, *, wants_mask_gradient: bool = False) -> AttentionProblem:
        """Returns the problem for which an implementation is chosen."""
        query, key, value = (Operand(x.shape, x.dtype, eager_order(self.ctx, x)) for x in (self.query, self.key, self.value))
        mask = None if self.mask is None else Operand(self._unexpanded_sizes(2), self.mask.dtype)
        devices = 1 if self.ctx.replicated is None else self.ctx.replicated.mesh.size
        return AttentionProblem(
            query, key, value, mask, self.is_causal, self.factor, has_dropout, wants_mask_gradient, self.ctx.platform, devices
        )

    def _unexpanded_sizes(self, count: int) -> tuple[int, ...]:
        """Returns the shape of the result of `unexpanded_mask`."""
        assert self.mask is not None
        spec, missing_dims = eager_spec(self.ctx, self.mask), 4 - self.mask.ndim
        strides = self.mask.shape if spec is None else spec.stride
        sizes = (
            1 if dim < count - missing_dims and stride == 0 else size
            for dim, (size, stride) in enumerate(zip(self.mask.shape, strides, strict=True))
        )
        return (*(1,) * missing_dims, *sizes)

    def unexpanded_mask(self, count: int) -> Array | None:
        """Returns the mask with rank 4, and with size 1 for each of its first `count` dimensions that is expanded (stride 0) in eager mode.

        Args:
            count: 2 (batch and heads) or 4 (all dimensions).
        """
        if self.mask is None:
            return None
        sizes, missing_dims = self._unexpanded_sizes(count), 4 - self.mask.ndim
        return lax.expand_dims(lax.slice(self.mask, (0,) * self.mask.ndim, sizes[missing_dims:]), range(missing_dims))

    @property
    def row_shape(self) -> tuple[int, ...]:
        """(batch, heads, rows): the shape of an array with one element per row of scores."""
        return self.query.shape[:3]

    @property
    def factor(self) -> float:
        """The factor of the scores: `scale`, or its default."""
        return 1 / math.sqrt(self.query.shape[3]) if self.scale is None else self.scale

    def group_by_key_head(self, x: Array) -> Array:
        """Returns x, reshaped from (batch, heads, rows, n) to (batch, key heads, rows of all heads of a key head, n)."""
        batch, heads, rows, size = x.shape
        key_heads = self.key.shape[1]
        return x if heads == key_heads else lax.reshape(x, (batch, key_heads, heads // key_heads * rows, size))

    def with_repeated_heads(self) -> Attention:
        """Returns the same attention with a copy of the key head and the value head for each query head."""
        heads, key_heads = self.query.shape[1], self.key.shape[1]
        if heads == key_heads:
            return self
        return replace(self, key=_repeat_heads(self.key, heads // key_heads), value=_repeat_heads(self.value, heads // key_heads))

    def batched_matmul(self, x: Array, y: Array, contracting_dims: tuple[int, int], order: Order = None) -> Array:
        """Returns the matrix product of x and y for each batch and head. Half types are added in float32.

        Args:
            contracting_dims: the dimension of x and the dimension of y that are summed over.
            order: preferred memory order of the result's dimensions.

        Shape:  x (batch, heads, ...) and y (batch, key heads, ...).
        Dtype:  float32 for half types, else that of x.
        """
        if self.query.shape[1] != self.key.shape[1]:
            order = None
        x = self.group_by_key_head(x)
        # If y is an updated key/value cache, `product_of_update` multiplies without materializing the updated cache. Key and value are the
        # op's arguments 1 and 2.
        out = (
            None if self.row_block else product_of_update(self.ctx, 1 if contracting_dims[1] == 3 else 2, x, (contracting_dims[0],), (0, 1))
        )
        if out is None:
            out = contract(x, y, ((contracting_dims[0],), (contracting_dims[1],)), self.ctx, batch=((0, 1), (0, 1)), order=order)
        return out if contracting_dims[0] == 2 else lax.reshape(out, (*self.row_shape, out.shape[3]))

    def scores(self) -> Array:
        """Returns the scaled scores, with -inf where masked.

        Shape:  (batch, heads, rows, columns).
        Dtype:  float32 for half types, else that of the query.
        """
        scores = self.batched_matmul(self.query, self.key, (3, 3))
        scores = lax.mul(scores, lax.full_like(scores, self.factor))
        if self.mask is not None:
            mask = self.mask
            if dtypes.is_bool(mask.dtype):
                scores = lax.select(expand(mask, scores.shape), scores, lax.full_like(scores, -math.inf))
            else:
                scores = lax.add(scores, expand(convert(mask, scores.dtype), scores.shape))
        if self.is_causal:
            # Row and column have rank 2. If XLA computed them for each batch and head, the maximum would take three times as long on a TPU.
            row, column = (lax.broadcasted_iota(np.int32, scores.shape[2:], dim) for dim in (0, 1))
            if self.row_block is not None:
                row = lax.add(row, lax.broadcast(self.row_block.first_row, row.shape))
            is_visible = lax.broadcast_in_dim(lax.le(column, row), scores.shape, (2, 3))
            scores = lax.select(is_visible, scores, lax.full_like(scores, -math.inf))
        return scores

    def apply_dropout(self, x: Array, prng_key: Array | None, probability: float) -> Array:
        """Returns x after dropout, or x itself if the PRNG key is None. Calls with the same key drop the same elements.

        Args:
            probability: the probability with which an element is dropped.
        """
        if prng_key is None:
            return x
        if self.row_block is None:
            mask = dropout_mask(prng_key, 1 - probability, x.shape)
        else:
            mask = dropout_mask_rows(prng_key, 1 - probability, x.shape, self.row_block.total_rows, self.row_block.first_row)
        factor = 0.0 if probability == 1 else 1 / (1 - probability)
        return lax.select(mask, lax.mul(x, lax.full_like(x, factor)), lax.full_like(x, 0))

    def block(self, first_row: Array, row_count: int) -> Attention:
        """Returns the attention of `row_count` rows, from `first_row` on. The mask must be a result of `unexpanded_mask(4)`."""
        mask = self.mask
        if mask is not None and mask.shape[2] > 1:
            mask = lax.dynamic_slice_in_dim(mask, first_row, row_count, 2)
        query = lax.dynamic_slice_in_dim(self.query, first_row, row_count, 2)
        return replace(self, query=query, mask=mask, row_block=RowBlock(first_row, self.query.shape[2]))


def _repeat_heads(x: Array, count: int) -> Array:
    """Returns x (batch, heads, rows, size) with `count` adjacent copies of each head: (batch, heads * count, rows, size)."""
    batch, heads, rows, size = x.shape
    repeated = lax.broadcast_in_dim(x, (batch, heads, count, rows, size), (0, 1, 3, 4))
    # Without the barrier, the pass passes/jaxpr/partitionable.py would defer the reshape, and XLA:TPU fuses no softmax of arrays of rank 5.
    return lax.optimization_barrier(lax.reshape(repeated, (batch, heads * count, rows, size)))


Results = tuple[Array, ...]

ATTENTION: Implementations[AttentionProblem] = Implementations("attention")
ATTENTION_GRADIENT: Implementations[AttentionProblem] = Implementations("attention_gradient")


def attend(attention: Attention, dropout_p: float = 0.0, prng_key: Array | None = None) -> tuple[Array, Array]:
    """Returns attention's result, in the query's dtype, and the log-sum-exp of each row of scores.

    Args:
        attention: the attention with its operands.
        dropout_p: the probability with which a weight is dropped.
        prng_key: PRNG key of the dropout; None without dropout.
    """
    problem = attention.problem(prng_key is not None)
    out, logsumexp = attention.ctx.choose(ATTENTION, problem).run(problem, attention, dropout_p, prng_key)
    return out, logsumexp


def gradients(
    attention: Attention,
    grad: Array,
    out: Array,
    logsumexp: Array,
    dropout_p: float = 0.0,
    prng_key: Array | None = None,
    wants_mask_gradient: bool = False,
) -> Gradients:
    """Returns the gradients of query, key and value in their dtypes, and that of the scores (float32 for half types).

    Args:
        attention: the attention with its operands.
        grad: gradient of the forward's result.
        out: result of the forward.
        logsumexp: log-sum-exp of the forward.
        dropout_p: the probability with which the forward dropped a weight.
        prng_key: PRNG key of the forward's dropout; None without dropout.
        wants_mask_gradient: True if the caller needs the gradient of the scores; if False, it may be None.
    """
    problem = attention.problem(prng_key is not None, wants_mask_gradient=wants_mask_gradient)
    grads: Gradients = attention.ctx.choose(ATTENTION_GRADIENT, problem).run(problem, attention, grad, out, logsumexp, dropout_p, prng_key)
    return grads


def _supports_cudnn(problem: AttentionProblem) -> bool:
    """True if cuDNN supports the problem, and gives the same result as the other implementations.

    Dropout is excluded. cuDNN's dropout seed is a constant of the program, and XLA counts the seed's offset for each program separately, so
    the backward's program could not drop the same weights.
    """
    query, key, value, mask = problem.query, problem.key, problem.value, problem.mask
    return (
        fused_attention.is_known()
        and query.dtype == key.dtype == value.dtype
        and len(query.shape) == 4
        and query.shape[::3] == key.shape[::3]
        and key.shape == value.shape
        and fused_attention.supports(query.dtype, query.shape[3])
        and 0 not in query.shape + key.shape
        and query.shape[1] % key.shape[1] == 0
        and (not problem.is_causal or (mask is None and query.shape[2] == key.shape[2]))
        and 0 < problem.scale < math.inf
        and not (problem.has_dropout or problem.wants_mask_gradient)
        and (mask is None or _supports_cudnn_mask(mask, query, key))
    )


def _supports_cudnn_mask(mask: Operand, query: Operand, key: Operand) -> bool:
    """True if a mask can be cuDNN's bias, which has one number for each score, in the query's dtype.

    Odd numbers of rows or columns are excluded because cuDNN has no gradient for them. A bias with a single row, broadcast to all rows, is
    excluded because cuDNN does not document it, and JAX never passes one.
    """
    rows, columns = query.shape[2], key.shape[2]
    return (
        (dtypes.is_bool(mask.dtype) or mask.dtype == query.dtype)
        and len(mask.shape) == 4
        and all(size in (1, full_size) for size, full_size in zip(mask.shape[:2], query.shape[:2], strict=True))
        and mask.shape[2:] == (rows, columns)
        and rows % 2 == columns % 2 == 0
    )


def _prefers_cudnn(problem: AttentionProblem) -> bool:
    """True for more than one row. The scores of a single row take no more memory than the keys."""
    return problem.query.shape[2] > 1


@ATTENTION.implementation("cudnn", platforms=["cuda"], supports=_supports_cudnn, preferred=_prefers_cudnn, is_refusable=True)
def _by_cudnn(problem: AttentionProblem, attention: Attention, dropout_p: float, prng_key: Array | None) -> tuple[Array, Array]:
    operands = attention.query, attention.key, attention.value, attention.unexpanded_mask(2)
    return fused_attention.forward(*operands, problem.fused_settings)


# With fewer rows or columns, the Pallas kernel is not used: it pads its blocks to 128 rows and columns. This threshold was not measured.
_MIN_PALLAS_SIZE = 192


def _supports_pallas(problem: AttentionProblem) -> bool:
    query, key, value, mask = problem.query, problem.key, problem.value, problem.mask
    return (
        query.dtype == key.dtype == value.dtype
        and len(query.shape) == 4
        and (query.shape[0], query.shape[3]) == key.shape[::3]
        and key.shape[:3] == value.shape[:3]
        and 0 not in query.shape + key.shape + value.shape
        and pallas_attention.supports(query.dtype, query.shape[3])
        and pallas_attention.supports(value.dtype, value.shape[3])
        and query.shape[1] % key.shape[1] == 0
        and not (problem.has_dropout or problem.wants_mask_gradient)
        and (mask is None or _supports_pallas_mask(mask, query, key))
    )


def _supports_pallas_mask(mask: Operand, query: Operand, key: Operand) -> bool:
    sizes = zip(mask.shape[:3], query.shape[:3], strict=True)
    is_dtype_supported = dtypes.is_bool(mask.dtype) or pallas_attention.supports(mask.dtype, 1)
    return is_dtype_supported and all(size in (1, full_size) for size, full_size in sizes) and mask.shape[3] == key.shape[2]


def _prefers_pallas(problem: AttentionProblem) -> bool:
    return min(problem.query.shape[2], problem.key.shape[2]) >= _MIN_PALLAS_SIZE


def _pallas_settings(problem: AttentionProblem, attention: Attention) -> pallas_attention.KernelSettings:
    return pallas_attention.KernelSettings(problem.scale, problem.is_causal, attention.ctx.settings.matmul_precision)


@ATTENTION.implementation("pallas", platforms=["tpu"], supports=_supports_pallas, preferred=_prefers_pallas, is_refusable=True)
def _by_pallas(problem: AttentionProblem, attention: Attention, dropout_p: float, prng_key: Array | None) -> tuple[Array, Array]:
    operands = attention.query, attention.key, attention.value, _mask_for_pallas(attention)
    return pallas_attention.forward(*operands, _pallas_settings(problem, attention))


def _mask_for_pallas(attention: Attention) -> Array | None:
    """Returns the mask with rank 4, and with size 1 for each expanded dimension except the last, the columns."""
    mask = attention.unexpanded_mask(4)
    return None if mask is None else lax.broadcast_in_dim(mask, (*mask.shape[:3], attention.key.shape[2]), range(4))


# Bytes of all scores above which the scores are computed in blocks of rows: blocks take longer, but need little memory.
_LARGE_SCORES_BYTES = 64 << 20
# Bytes of the scores of a block.
_BLOCK_BYTES = 16 << 20
# A block has at least this many rows: a matrix product with fewer rows is slow.
_MIN_BLOCK_ROWS = 16
# The implementations that can compute a block, in order of preference.
_BLOCK_IMPLEMENTATIONS = "fused_softmax", "xla"


def _supports_blocks(problem: AttentionProblem) -> bool:
    return 0 not in problem.query.shape + problem.key.shape and len(problem.query.shape) == 4 and not problem.wants_mask_gradient


def _is_large(problem: AttentionProblem) -> bool:
    rows = problem.query.shape[2]
    return rows * _row_bytes(problem) > _LARGE_SCORES_BYTES and rows > _MIN_BLOCK_ROWS


def _prefers_blocks(problem: AttentionProblem) -> bool:
    """True for large scores with dropout. Without dropout, cuDNN's kernels (for half types) need little memory, too."""
    return problem.has_dropout and _is_large(problem)


def _row_bytes(problem: AttentionProblem) -> int:
    """Bytes of the scores of one row, over all batches and heads, on one device. A mesh divides them among all its devices."""
    size = math.prod(problem.query.shape[:2]) * problem.key.shape[2] * dtypes.accumulator(problem.query.dtype).itemsize
    return max(1, size // problem.devices)


def _block_rows(problem: AttentionProblem) -> int:
    """Returns the number of rows in a block, so that its scores take about _BLOCK_BYTES: a power of two, or all rows."""
    max_rows = max(_BLOCK_BYTES // _row_bytes(problem), _MIN_BLOCK_ROWS)
    return min(1 << max_rows.bit_length() - 1, problem.query.shape[2])


def _for_each_block(problem: AttentionProblem, step: Callable[[Results, Array, int], Results], results: Results) -> Results:
    """Applies `step` to all blocks of rows, one after the other, and returns the final results.

    Args:
        problem: the attention of all rows.
        step: takes the results of the earlier blocks, the index of a block's first row, and the block's number of rows; returns the results
            that include the block.
        results: the initial results.
    """
    rows, block_rows = problem.query.shape[2], _block_rows(problem)
    blocked_rows = rows // block_rows * block_rows
    results, _ = lax.scan(
        lambda results_so_far, first_row: (step(results_so_far, first_row, block_rows), None),
        results,
        np.arange(0, blocked_rows, block_rows, dtype=np.int32),
    )
    return results if blocked_rows == rows else step(results, lax.full((), blocked_rows, np.int32), rows - blocked_rows)


@ATTENTION.implementation("blocks", platforms=["cuda"], supports=_supports_blocks, preferred=_prefers_blocks)
@ATTENTION.implementation("row_blocks", platforms=["tpu"], supports=_supports_blocks, preferred=_is_large, is_partitionable=True)
def _by_blocks(problem: AttentionProblem, attention: Attention, dropout_p: float, prng_key: Array | None) -> tuple[Array, Array]:
    attention = replace(attention, mask=attention.unexpanded_mask(4))
    block_implementation = next(item for item in map(ATTENTION.by_name.__getitem__, _BLOCK_IMPLEMENTATIONS) if item.can_run(problem))

    def step(results: Results, first_row: Array, count: int) -> Results:
        block_results = block_implementation.run(problem, attention.block(first_row, count), dropout_p, prng_key)
        return tuple(
            lax.dynamic_update_slice_in_dim(result, block_result, first_row, 2)
            for result, block_result in zip(results, block_results, strict=True)
        )

    dtype = attention.query.dtype
    shape = (*attention.row_shape, attention.value.shape[3])
    out, logsumexp = _for_each_block(
        problem, step, (lax.full(shape, 0, dtype), lax.full(attention.row_shape, 0, dtypes.accumulator(dtype)))
    )
    return out, logsumexp


# Scores of this size or more do not stay in a processor's caches between two passes.
_UNCACHED_BYTES = 8 << 20
# With fewer columns, the matrix products in torch's kernels are too small to be fast.
_MIN_TORCH_COLUMNS = 160


def _supports_torch(problem: AttentionProblem) -> bool:
    query, key, value, mask = problem.query, problem.key, problem.value, problem.mask
    return (
        query.dtype == key.dtype == value.dtype
        and dtypes.is_float(query.dtype)
        and len(query.shape) == 4
        and (*query.shape[:2], query.shape[3]) == (*key.shape[:2], key.shape[3])
        and key.shape == value.shape
        and 0 not in query.shape + key.shape
        and not (problem.has_dropout or problem.wants_mask_gradient)
        and (mask is None or (len(mask.shape) in (2, 4) and mask.dtype in (query.dtype, dtypes.accumulator(query.dtype))))
    )


def _prefers_torch(problem: AttentionProblem) -> bool:
    """True for scores in float32 that are larger than the caches.

    With AVX2, torch's forward took 0.53 to 0.97 times as long as the implementation "xla", torch's gradient 0.69 to 1.1 times as long, and
    torch's gradient in bfloat16 3 to 8 times as long (docs/internals/measurements.md).
    """
    is_uncached = problem.query.shape[2] * _row_bytes(problem) >= _UNCACHED_BYTES and problem.key.shape[2] >= _MIN_TORCH_COLUMNS
    return is_uncached and problem.query.dtype == np.float32


@ATTENTION.implementation("torch", platforms=["cpu"], supports=_supports_torch, preferred=_prefers_torch)
def _by_torch(problem: AttentionProblem, attention: Attention, dropout_p: float, prng_key: Array | None) -> tuple[Array, Array]:
    operands = attention.query, attention.key, attention.value, attention.unexpanded_mask(4)
    return flash_attention.forward(*operands, (problem.query, problem.key, problem.value), problem.is_causal, problem.scale)


def _normalize(weights: Array, total: Array) -> tuple[Array, Array]:
    """Divides the weights by their sums, or leaves the division to the caller.

    On CPUs and CUDA GPUs the caller divides the product of weights and values, which has fewer elements than the weights. On a TPU, XLA
    fuses a whole softmax, division included: 2.3 instead of 3.9 million cycles for 8 x 12 x 1024 x 64 (v5e, libtpu 0.0.42).

    Returns:
        The weights, and for each row the divisor that the caller still has to apply; 1 if the weights are already divided.
    """
    deferred = lambda weights, total: (weights, total)  # noqa: E731
    immediate = lambda weights, total: (lax.div(weights, expand_leading(total, weights.shape)), lax.full_like(total, 1))  # noqa: E731
    result: tuple[Array, Array] = lax.platform_dependent(weights, total, cpu=deferred, cuda=deferred, default=immediate)
    return result


def _attend(attention: Attention, dropout_p: float, prng_key: Array | None) -> tuple[Array, Array, Array]:
    """Returns the output, and for each row the log-sum-exp and the largest score. In a row of -inf scores, the first two are NaN."""
    scores = attention.scores()
    largest = reduce_max(scores, (3,))
    weights = lax.exp(minus_largest(scores, expand_leading(largest, scores.shape)))
    total = reduce_sum(weights, (3,))
    weights, divisor = _normalize(weights, total)
    weights = attention.apply_dropout(weights, prng_key, dropout_p)
    out = attention.batched_matmul(convert(weights, attention.value.dtype), attention.value, (3, 2), attention.ctx.output[0].order)
    return lax.div(out, expand_leading(divisor, out.shape)), lax.add(lax.log(total), largest), largest


def _supports_fused_softmax(problem: AttentionProblem) -> bool:
    return problem.mask is None and 0 not in problem.key.shape


@ATTENTION.implementation("fused_softmax", platforms=["tpu"], supports=_supports_fused_softmax)
def _by_fused_softmax(problem: AttentionProblem, attention: Attention, dropout_p: float, prng_key: Array | None) -> tuple[Array, Array]:
    """Attention in which a row whose scores are all -inf gives NaN, not zeros. Without a mask, only an overflow gives such scores.

    With a select that replaces the NaN by zeros, GPT-2's transformer block takes 5.48 instead of 3.72 million cycles (v5e, libtpu 0.0.42).
    Key heads are repeated: grouped query heads take 9.93 instead of 5.16 million in a block of Llama with four query heads per key head.
    """
    out, logsumexp, _ = _attend(attention.with_repeated_heads(), dropout_p, prng_key)
    return convert(out, attention.query.dtype), logsumexp


@ATTENTION.implementation("xla")
def _by_xla(problem: AttentionProblem, attention: Attention, dropout_p: float, prng_key: Array | None) -> tuple[Array, Array]:
    out, logsumexp, largest = _attend(attention, dropout_p, prng_key)
    # Rows of -inf scores get zeros after the softmax. A select between the maximum and the exponential would keep XLA:TPU from fusing both.
    is_all_masked = lax.eq(largest, lax.full_like(largest, -math.inf))
    out = lax.select(expand_leading(is_all_masked, out.shape), lax.full_like(out, 0), out)
    logsumexp = lax.select(is_all_masked, lax.full_like(logsumexp, 0), logsumexp)
    return convert(out, attention.query.dtype), logsumexp


@ATTENTION_GRADIENT.implementation("cudnn", platforms=["cuda"], supports=_supports_cudnn, preferred=_prefers_cudnn, is_refusable=True)
def _gradients_by_cudnn(
    problem: AttentionProblem, attention: Attention, grad: Array, out: Array, logsumexp: Array, dropout_p: float, prng_key: Array | None
) -> Gradients:
    operands = attention.query, attention.key, attention.value, attention.unexpanded_mask(2)
    return *fused_attention.backward(grad, *operands, out, logsumexp, problem.fused_settings), None


@ATTENTION_GRADIENT.implementation("pallas", platforms=["tpu"], supports=_supports_pallas, preferred=_prefers_pallas, is_refusable=True)
def _gradients_by_pallas(
    problem: AttentionProblem, attention: Attention, grad: Array, out: Array, logsumexp: Array, dropout_p: float, prng_key: Array | None
) -> Gradients:
    operands = attention.query, attention.key, attention.value, _mask_for_pallas(attention)
    grads = pallas_attention.backward(grad, *operands, logsumexp, _delta(grad, out), _pallas_settings(problem, attention))
    return *grads, None


@ATTENTION_GRADIENT.implementation("blocks", platforms=["cuda"], supports=_supports_blocks, preferred=_prefers_blocks)
@ATTENTION_GRADIENT.implementation("row_blocks", platforms=["tpu"], supports=_supports_blocks, preferred=_is_large, is_partitionable=True)
def _gradients_by_blocks(
    problem: AttentionProblem, attention: Attention, grad: Array, out: Array, logsumexp: Array, dropout_p: float, prng_key: Array | None
) -> Gradients:
    operands = attention.query, attention.key, attention.value
    delta = _delta(grad, out)
    attention = replace(attention, mask=attention.unexpanded_mask(4))

    def step(results: Results, first_row: Array, row_count: int) -> Results:
        block_grad, block_delta, block_logsumexp = (lax.dynamic_slice_in_dim(x, first_row, row_count, 2) for x in (grad, delta, logsumexp))
        grad_query, *grad_terms = _unrounded_gradients(
            attention.block(first_row, row_count), block_grad, block_delta, block_logsumexp, dropout_p, prng_key
        )[:3]
        all_grad_query = lax.dynamic_update_slice_in_dim(results[0], convert(grad_query, results[0].dtype), first_row, 2)
        return all_grad_query, *(lax.add(total, term) for total, term in zip(results[1:], grad_terms, strict=True))

    dtype = dtypes.accumulator(attention.query.dtype)
    # The barrier hides the constant zero from XLA, which would otherwise fill the accumulators of all layers before the first layer runs.
    zero, _ = lax.optimization_barrier((lax.full((), 0, dtype), delta))
    initial = [lax.broadcast(convert(zero, x.dtype if x is attention.query else dtype), x.shape) for x in operands]
    grad_query, grad_key, grad_value = _for_each_block(problem, step, tuple(initial))
    return grad_query, convert(grad_key, attention.key.dtype), convert(grad_value, attention.value.dtype), None


@ATTENTION_GRADIENT.implementation("torch", platforms=["cpu"], supports=_supports_torch, preferred=_prefers_torch)
def _gradients_by_torch(
    problem: AttentionProblem, attention: Attention, grad: Array, out: Array, logsumexp: Array, dropout_p: float, prng_key: Array | None
) -> Gradients:
    operands = attention.query, attention.key, attention.value, attention.unexpanded_mask(4)
    metadata = problem.query, problem.key, problem.value
    return *flash_attention.backward(grad, *operands, out, logsumexp, metadata, problem.is_causal, problem.scale), None


@ATTENTION_GRADIENT.implementation("xla")
def _gradients_by_xla(
    problem: AttentionProblem, attention: Attention, grad: Array, out: Array, logsumexp: Array, dropout_p: float, prng_key: Array | None
) -> Gradients:
    *grads, grad_scores = _unrounded_gradients(attention, grad, _delta(grad, out), logsumexp, dropout_p, prng_key)
    grad_query, grad_key, grad_value = (
        convert(x, operand.dtype) for x, operand in zip(grads, (attention.query, attention.key, attention.value), strict=True)
    )
    return grad_query, grad_key, grad_value, grad_scores


def _delta(grad: Array, out: Array) -> Array:
    """Returns, for each row, the sum of the weights times their gradients (`delta` in FlashAttention's papers).

    The function computes the sum of out * grad, which is equal and needs no pass over the scores.
    """
    dtype = dtypes.accumulator(out.dtype)
    return reduce_sum(lax.mul(convert(out, dtype), convert(grad, dtype)), (3,))


def _unrounded_gradients(
    attention: Attention, grad: Array, delta: Array, logsumexp: Array, dropout_p: float, prng_key: Array | None
) -> tuple[Array, Array, Array, Array]:
    """Returns the gradients of query, key, value and scores, in float32 for half types.

    Args:
        attention: the attention with its operands.
        grad: gradient of the forward's result.
        delta: the result of `_delta`.
        logsumexp: log-sum-exp of the forward.
        dropout_p: the probability with which the forward dropped a weight.
        prng_key: PRNG key of the forward's dropout; None without dropout.
    """
    query, key, value = attention.query, attention.key, attention.value
    scores = attention.scores()
    dtype = scores.dtype
    weights = lax.exp(minus_largest(scores, expand_leading(convert(logsumexp, dtype), scores.shape)))
    dropped_weights = convert(attention.apply_dropout(weights, prng_key, dropout_p), value.dtype)
    grad_value = attention.batched_matmul(dropped_weights, attention.group_by_key_head(grad), (2, 2))
    grad_weights = attention.apply_dropout(attention.batched_matmul(grad, value, (3, 3)), prng_key, dropout_p)
    grad_scores = lax.mul(weights, lax.sub(grad_weights, expand_leading(delta, scores.shape)))
    scaled = convert(lax.mul(grad_scores, lax.full_like(grad_scores, attention.factor)), query.dtype)
    grad_query = attention.batched_matmul(scaled, key, (3, 2))
    grad_key = attention.batched_matmul(scaled, attention.group_by_key_head(query), (2, 2))
    return grad_query, grad_key, grad_value, grad_scores
