"""Implementations of scaled dot product attention and its gradients: with the scores in memory (all of them, or those of a block of rows
at a time), or by kernels of torch, cuDNN or Pallas, which do not store the scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
from ..promotion import convert, expand
from ..tpu import pallas_attention
from .attention_dropout import kept, kept_rows
from .matmul import Order, contract
from .products_of_updates import product_of_update
from .softmax import minus_largest

Gradients = tuple[Array, Array, Array, Array | None]


@dataclass(frozen=True)
class AttentionProblem:
    """The shapes, dtypes and settings of an attention or its gradient, by which an implementation is chosen.

    It has no `operands`, so the tuner does not measure it: some implementations exist to save memory, and the tuner measures time alone.

    Attributes:
        query, key, value: shape, dtype and memory order of each operand.
        mask: shape (of rank 4) and dtype; None without a mask. Batch and heads have size 1 where the mask is the same for all of them.
        is_causal: True if row i sees only the columns up to i.
        scale: factor of the scores.
        has_dropout: True if weights are dropped.
        wants_mask_gradient: True if the gradient of the mask is needed.
        platform: JAX's name of the platform.
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

    @property
    def fused(self) -> fused_attention.AttentionSettings:
        """Settings of cuDNN's kernels. The key's layout decides that of all operands: a key in a KV cache is the most expensive to copy."""
        return fused_attention.AttentionSettings(self.scale, self.is_causal, self.key.order == fused_attention.HEADS_INSIDE)


@dataclass(frozen=True)
class RowBlock:
    """The position of a block of rows in a larger attention.

    Attributes:
        first: index of the block's first row, an integer of rank 0.
        rows: number of rows of the larger attention.
    """

    first: Array
    rows: int


@dataclass(frozen=True)
class Attention:
    """An attention with its operands.

    With fewer key heads than heads (grouped-query attention), each key head serves a group of neighbouring heads of the query, whose rows
    are treated as rows of one head.

    Attributes:
        query: (batch, heads, rows, size).
        key: (batch, key heads, columns, size).
        value: (batch, key heads, columns, value size).
        mask: added to the scores; if bool, true where a score counts.
        is_causal: True if row i sees only the columns up to i.
        scale: factor of the scores; None: 1 / sqrt(size).
        ctx: context of the node that is being lowered.
        place: position of these rows in a larger attention; None if this is a whole attention.
    """

    query: Array
    key: Array
    value: Array
    mask: Array | None
    is_causal: bool
    scale: float | None
    ctx: Context
    place: RowBlock | None = None

    def problem(self, has_dropout: bool, *, wants_mask_gradient: bool = False) -> AttentionProblem:
        """Returns the description by which an implementation is chosen."""
        query, key, value = (Operand(x.shape, x.dtype, eager_order(self.ctx, x)) for x in (self.query, self.key, self.value))
        mask = None if self.mask is None else Operand(self._distinct_sizes(2), self.mask.dtype)
        return AttentionProblem(query, key, value, mask, self.is_causal, self.factor, has_dropout, wants_mask_gradient, self.ctx.platform)

    def _distinct_sizes(self, count: int) -> tuple[int, ...]:
        """The shape of `distinct_mask`."""
        assert self.mask is not None
        spec, missing = eager_spec(self.ctx, self.mask), 4 - self.mask.ndim
        strides = self.mask.shape if spec is None else spec.stride
        sizes = (
            1 if dim < count - missing and stride == 0 else size
            for dim, (size, stride) in enumerate(zip(self.mask.shape, strides, strict=True))
        )
        return (*(1,) * missing, *sizes)

    def distinct_mask(self, count: int) -> Array | None:
        """The mask, with rank 4, and with size 1 for each of its first `count` dimensions that is expanded (stride 0) in eager mode.

        count: 2 (batch and heads) or 4 (all dimensions).
        """
        if self.mask is None:
            return None
        sizes, missing = self._distinct_sizes(count), 4 - self.mask.ndim
        return lax.expand_dims(lax.slice(self.mask, (0,) * self.mask.ndim, sizes[missing:]), range(missing))

    @property
    def rows(self) -> tuple[int, ...]:
        """(batch, heads, rows): the shape of an array with one element per row of scores."""
        return self.query.shape[:3]

    @property
    def factor(self) -> float:
        return 1 / math.sqrt(self.query.shape[3]) if self.scale is None else self.scale

    def by_key_head(self, x: Array) -> Array:
        """x, reshaped from (batch, heads, rows, n) to (batch, key heads, rows of all heads of a key head, n)."""
        batch, heads, rows, size = x.shape
        key_heads = self.key.shape[1]
        return x if heads == key_heads else lax.reshape(x, (batch, key_heads, heads // key_heads * rows, size))

    def times(self, x: Array, y: Array, over: tuple[int, int], order: Order = None) -> Array:
        """The product of x and y for each batch and head. Half types are added in float32.

        Args:
            over: the dimension of x and the dimension of y that are summed over.
            order: preferred memory order of the result's dimensions.

        Shape:  x (batch, heads, ...) and y (batch, key heads, ...).
        Dtype:  the accumulator's.
        """
        if self.query.shape[1] != self.key.shape[1]:
            order = None
        x = self.by_key_head(x)
        out = None if self.place else product_of_update(self.ctx, 1 if over[1] == 3 else 2, x, (over[0],), (0, 1))
        if out is None:
            out = contract(x, y, ((over[0],), (over[1],)), self.ctx, batch=((0, 1), (0, 1)), order=order)
        return out if over[0] == 2 else lax.reshape(out, (*self.rows, out.shape[3]))

    def scores(self) -> Array:
        """The scaled scores, with -inf where masked.

        Shape:  (batch, heads, rows, columns).
        Dtype:  the accumulator's.
        """
        scores = self.times(self.query, self.key, (3, 3))
        scores = lax.mul(scores, lax.full_like(scores, self.factor))
        if self.mask is not None:
            mask = self.mask
            if dtypes.is_bool(mask.dtype):
                scores = lax.select(expand(mask, scores.shape), scores, lax.full_like(scores, -math.inf))
            else:
                scores = lax.add(scores, expand(convert(mask, scores.dtype), scores.shape))
        if self.is_causal:
            # With rank 2. On a TPU, XLA takes three times as long for the maximum if it computes positions for each batch and head.
            row, column = (lax.broadcasted_iota(np.int32, scores.shape[2:], dim) for dim in (0, 1))
            if self.place is not None:
                row = lax.add(row, lax.broadcast(self.place.first, row.shape))
            seen = lax.broadcast_in_dim(lax.le(column, row), scores.shape, (2, 3))
            scores = lax.select(seen, scores, lax.full_like(scores, -math.inf))
        return scores

    def dropped(self, x: Array, key: Array | None, probability: float) -> Array:
        """x after dropout; x itself without a key. The same key drops the same elements."""
        if key is None:
            return x
        if self.place is None:
            mask = kept(key, 1 - probability, x.shape)
        else:
            mask = kept_rows(key, 1 - probability, x.shape, self.place.rows, self.place.first)
        factor = 0.0 if probability == 1 else 1 / (1 - probability)
        return lax.select(mask, lax.mul(x, lax.full_like(x, factor)), lax.full_like(x, 0))

    def block(self, first: Array, count: int) -> Attention:
        """The attention of `count` rows, from `first` on. The mask must be one that `distinct_mask(4)` returned."""
        mask = self.mask
        if mask is not None and mask.shape[2] > 1:
            mask = lax.dynamic_slice_in_dim(mask, first, count, 2)
        query = lax.dynamic_slice_in_dim(self.query, first, count, 2)
        return replace(self, query=query, mask=mask, place=RowBlock(first, self.query.shape[2]))


def _spread(x: Array, shape: Sequence[int]) -> Array:
    """x, which has one element per row, broadcast along the columns."""
    return lax.broadcast_in_dim(x, shape, (0, 1, 2))


Results = tuple[Array, ...]

ATTENTION: Implementations[AttentionProblem] = Implementations("attention")
ATTENTION_GRADIENT: Implementations[AttentionProblem] = Implementations("attention_gradient")


def attend(attention: Attention, dropout_p: float = 0.0, key: Array | None = None) -> tuple[Array, Array]:
    """The attended values, in the query's dtype, and the log-sum-exp of each row of scores. key: PRNG key of dropout, or None."""
    problem = attention.problem(key is not None)
    out, logsumexp = attention.ctx.choose(ATTENTION, problem).run(problem, attention, dropout_p, key)
    return out, logsumexp


def gradients(
    attention: Attention,
    grad: Array,
    out: Array,
    logsumexp: Array,
    dropout_p: float = 0.0,
    key: Array | None = None,
    wants_mask_gradient: bool = False,
) -> Gradients:
    """Gradients of query, key and value in their dtypes and, if `wants_mask_gradient`, that of the scores in the accumulator's dtype.

    out, logsumexp, dropout_p, key: those of the forward.
    """
    problem = attention.problem(key is not None, wants_mask_gradient=wants_mask_gradient)
    found: Gradients = attention.ctx.choose(ATTENTION_GRADIENT, problem).run(problem, attention, grad, out, logsumexp, dropout_p, key)
    return found


def _supports_cudnn(problem: AttentionProblem) -> bool:
    """True if cuDNN computes this with the same result as the other implementations.

    Dropout is excluded: its seed is a constant of the program, and XLA counts its offset for each program separately, so the backward could
    not drop the same weights.
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
    """True if a mask can be cuDNN's bias: one number for each score, in the query's dtype. For odd sizes cuDNN has no gradient. A bias with
    one row for all rows is excluded: cuDNN does not document it, and JAX never passes one."""
    rows, columns = query.shape[2], key.shape[2]
    return (
        (dtypes.is_bool(mask.dtype) or mask.dtype == query.dtype)
        and len(mask.shape) == 4
        and all(size in (1, whole) for size, whole in zip(mask.shape[:2], query.shape[:2], strict=True))
        and mask.shape[2:] == (rows, columns)
        and rows % 2 == columns % 2 == 0
    )


def _prefers_cudnn(problem: AttentionProblem) -> bool:
    """True for more than one row. The scores of a single row take no more memory than the keys."""
    return problem.query.shape[2] > 1


@ATTENTION.implementation("cudnn", platforms=["cuda"], supports=_supports_cudnn, preferred=_prefers_cudnn, is_refusable=True)
def _by_cudnn(problem: AttentionProblem, attention: Attention, dropout_p: float, key: Array | None) -> tuple[Array, Array]:
    operands = attention.query, attention.key, attention.value, attention.distinct_mask(2)
    return fused_attention.forward(*operands, problem.fused)


# Rows and columns from which on the kernels of lowering/tpu are taken. Their blocks are padded to 128 rows and columns. No TPU has measured
# this threshold.
_FEWEST_FOR_PALLAS = 192


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
    return is_dtype_supported and all(size in (1, whole) for size, whole in sizes) and mask.shape[3] == key.shape[2]


def _prefers_pallas(problem: AttentionProblem) -> bool:
    return min(problem.query.shape[2], problem.key.shape[2]) >= _FEWEST_FOR_PALLAS


def _pallas_settings(problem: AttentionProblem, attention: Attention) -> pallas_attention.KernelSettings:
    return pallas_attention.KernelSettings(problem.scale, problem.is_causal, attention.ctx.settings.matmul_precision)


@ATTENTION.implementation("pallas", platforms=["tpu"], supports=_supports_pallas, preferred=_prefers_pallas, is_refusable=True)
def _by_pallas(problem: AttentionProblem, attention: Attention, dropout_p: float, key: Array | None) -> tuple[Array, Array]:
    operands = attention.query, attention.key, attention.value, _mask_for_pallas(attention)
    return pallas_attention.forward(*operands, _pallas_settings(problem, attention))


def _mask_for_pallas(attention: Attention) -> Array | None:
    """The mask with size 1 where it is expanded, except along the columns."""
    mask = attention.distinct_mask(4)
    return None if mask is None else lax.broadcast_in_dim(mask, (*mask.shape[:3], attention.key.shape[2]), range(4))


# Bytes of all scores above which scores in blocks of rows, which take longer but keep few scores, are worth it.
_MANY_BYTES = 64 << 20
# Bytes of the scores of a block. A block has no fewer than _FEWEST_ROWS rows, which a matrix product needs to be fast.
_BLOCK_BYTES = 16 << 20
_FEWEST_ROWS = 16
# The implementations that compute one block.
_IN_MEMORY = "fused_softmax", "xla"


def _supports_blocks(problem: AttentionProblem) -> bool:
    return 0 not in problem.query.shape + problem.key.shape and len(problem.query.shape) == 4 and not problem.wants_mask_gradient


def _is_large(problem: AttentionProblem) -> bool:
    rows = problem.query.shape[2]
    return rows * _row_bytes(problem) > _MANY_BYTES and rows > _FEWEST_ROWS


def _prefers_blocks(problem: AttentionProblem) -> bool:
    """True for a large attention with dropout, which the implementation "cudnn" excludes."""
    return problem.has_dropout and _is_large(problem)


def _row_bytes(problem: AttentionProblem) -> int:
    """Bytes of the scores of one row, over all batches and heads."""
    return math.prod(problem.query.shape[:2]) * problem.key.shape[2] * dtypes.accumulator(problem.query.dtype).itemsize


def _block_rows(problem: AttentionProblem) -> int:
    """Number of rows in a block: a power of two, or all rows."""
    fitting = max(_BLOCK_BYTES // _row_bytes(problem), _FEWEST_ROWS)
    return min(1 << fitting.bit_length() - 1, problem.query.shape[2])


def _in_blocks(problem: AttentionProblem, step: Callable[[Results, Array, int], Results], results: Results) -> Results:
    """Applies `step` to all blocks of rows, one after the other, and returns the final results.

    Args:
        step: takes the results so far, the index of a block's first row, and the block's number of rows; returns the new results.
        results: the initial results.
    """
    rows, count = problem.query.shape[2], _block_rows(problem)
    whole = rows // count * count
    results, _ = lax.scan(lambda found, first: (step(found, first, count), None), results, np.arange(0, whole, count, dtype=np.int32))
    return results if whole == rows else step(results, lax.full((), whole, np.int32), rows - whole)


@ATTENTION.implementation("blocks", platforms=["cuda"], supports=_supports_blocks, preferred=_prefers_blocks)
@ATTENTION.implementation("row_blocks", platforms=["tpu"], supports=_supports_blocks, preferred=_is_large)
def _by_blocks(problem: AttentionProblem, attention: Attention, dropout_p: float, key: Array | None) -> tuple[Array, Array]:
    attention = replace(attention, mask=attention.distinct_mask(4))
    in_memory = next(item for item in map(ATTENTION.by_name.__getitem__, _IN_MEMORY) if item.can_run(problem))

    def step(results: Results, first: Array, count: int) -> Results:
        found = in_memory.run(problem, attention.block(first, count), dropout_p, key)
        return tuple(lax.dynamic_update_slice_in_dim(whole, part, first, 2) for whole, part in zip(results, found, strict=True))

    dtype = attention.query.dtype
    shape = (*attention.rows, attention.value.shape[3])
    out, logsumexp = _in_blocks(problem, step, (lax.full(shape, 0, dtype), lax.full(attention.rows, 0, dtypes.accumulator(dtype))))
    return out, logsumexp


# Bytes of all scores from which on a processor's caches do not hold them between two passes.
_UNCACHED_BYTES = 8 << 20
# With fewer columns torch's kernels compute matrix products that are too small to be fast.
_MANY_COLUMNS = 160


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
    """True for a large attention in float32.

    With AVX2, torch's forward took 0.53 to 0.97 of the time of the implementation "xla", its gradient 0.7 to 1.1. For half types its
    gradient took up to seven times as long.
    """
    many = problem.query.shape[2] * _row_bytes(problem) >= _UNCACHED_BYTES and problem.key.shape[2] >= _MANY_COLUMNS
    return many and problem.query.dtype == np.float32


@ATTENTION.implementation("torch", platforms=["cpu"], supports=_supports_torch, preferred=_prefers_torch)
def _by_torch(problem: AttentionProblem, attention: Attention, dropout_p: float, key: Array | None) -> tuple[Array, Array]:
    operands = attention.query, attention.key, attention.value, attention.distinct_mask(4)
    return flash_attention.forward(*operands, (problem.query, problem.key, problem.value), problem.is_causal, problem.scale)


def _normalized(weights: Array, total: Array) -> tuple[Array, Array]:
    """Divides the weights by their sums, or leaves that to the caller. Returns: the weights, and the divisors that are left.

    After the product with the values there are fewer elements to divide. On a TPU, XLA fuses a whole softmax, which has the division: 2.3
    in place of 3.9 million cycles for 8 x 12 x 1024 x 64 (v5e, libtpu 0.0.42).
    """
    later = lambda weights, total: (weights, total)  # noqa: E731
    now = lambda weights, total: (lax.div(weights, _spread(total, weights.shape)), lax.full_like(total, 1))  # noqa: E731
    found: tuple[Array, Array] = lax.platform_dependent(weights, total, cpu=later, cuda=later, default=now)
    return found


def _attend(attention: Attention, dropout_p: float, key: Array | None) -> tuple[Array, Array, Array]:
    """Returns the output, the log-sum-exp and the largest score of each row. The first two are NaN for a row whose scores are all -inf."""
    scores = attention.scores()
    largest = reduce_max(scores, (3,))
    weights = lax.exp(minus_largest(scores, _spread(largest, scores.shape)))
    total = reduce_sum(weights, (3,))
    weights, divisor = _normalized(weights, total)
    weights = attention.dropped(weights, key, dropout_p)
    out = attention.times(convert(weights, attention.value.dtype), attention.value, (3, 2), attention.ctx.output[0].order)
    return lax.div(out, _spread(divisor, out.shape)), lax.add(lax.log(total), largest), largest


def _supports_fused_softmax(problem: AttentionProblem) -> bool:
    return problem.mask is None and 0 not in problem.key.shape


@ATTENTION.implementation("fused_softmax", platforms=["tpu"], supports=_supports_fused_softmax)
def _by_fused_softmax(problem: AttentionProblem, attention: Attention, dropout_p: float, key: Array | None) -> tuple[Array, Array]:
    """Without zeros for rows whose scores are all -inf, which have NaN instead. Without a mask these are scores that overflow.

    The zeros cost half as many cycles again (a block of GPT-2: 5.48 and 3.72 million, v5e, libtpu 0.0.42).
    """
    out, logsumexp, _ = _attend(attention, dropout_p, key)
    return convert(out, attention.query.dtype), logsumexp


@ATTENTION.implementation("xla")
def _by_xla(problem: AttentionProblem, attention: Attention, dropout_p: float, key: Array | None) -> tuple[Array, Array]:
    out, logsumexp, largest = _attend(attention, dropout_p, key)
    # A select between the maximum and the exponential would keep XLA:TPU from fusing them.
    nothing = lax.eq(largest, lax.full_like(largest, -math.inf))
    out = lax.select(_spread(nothing, out.shape), lax.full_like(out, 0), out)
    logsumexp = lax.select(nothing, lax.full_like(logsumexp, 0), logsumexp)
    return convert(out, attention.query.dtype), logsumexp


@ATTENTION_GRADIENT.implementation("cudnn", platforms=["cuda"], supports=_supports_cudnn, preferred=_prefers_cudnn, is_refusable=True)
def _gradients_by_cudnn(
    problem: AttentionProblem, attention: Attention, grad: Array, out: Array, logsumexp: Array, dropout_p: float, key: Array | None
) -> Gradients:
    operands = attention.query, attention.key, attention.value, attention.distinct_mask(2)
    return *fused_attention.backward(grad, *operands, out, logsumexp, problem.fused), None


@ATTENTION_GRADIENT.implementation("pallas", platforms=["tpu"], supports=_supports_pallas, preferred=_prefers_pallas, is_refusable=True)
def _gradients_by_pallas(
    problem: AttentionProblem, attention: Attention, grad: Array, out: Array, logsumexp: Array, dropout_p: float, key: Array | None
) -> Gradients:
    operands = attention.query, attention.key, attention.value, _mask_for_pallas(attention)
    found = pallas_attention.backward(grad, *operands, logsumexp, _shared(grad, out), _pallas_settings(problem, attention))
    return *found, None


@ATTENTION_GRADIENT.implementation("blocks", platforms=["cuda"], supports=_supports_blocks, preferred=_prefers_blocks)
@ATTENTION_GRADIENT.implementation("row_blocks", platforms=["tpu"], supports=_supports_blocks, preferred=_is_large)
def _gradients_by_blocks(
    problem: AttentionProblem, attention: Attention, grad: Array, out: Array, logsumexp: Array, dropout_p: float, key: Array | None
) -> Gradients:
    operands = attention.query, attention.key, attention.value
    shared = _shared(grad, out)
    attention = replace(attention, mask=attention.distinct_mask(4))

    def step(results: Results, first: Array, count: int) -> Results:
        grads, sums_of_rows, logarithms = (lax.dynamic_slice_in_dim(x, first, count, 2) for x in (grad, shared, logsumexp))
        grad_query, *sums = _wide_gradients(attention.block(first, count), grads, sums_of_rows, logarithms, dropout_p, key)[:3]
        queries = lax.dynamic_update_slice_in_dim(results[0], convert(grad_query, results[0].dtype), first, 2)
        return queries, *(lax.add(whole, part) for whole, part in zip(results[1:], sums, strict=True))

    dtype = dtypes.accumulator(attention.query.dtype)
    # The barrier hides that this is zero. Otherwise XLA would fill the accumulators of all layers at once, before the first layer runs.
    zero, _ = lax.optimization_barrier((lax.full((), 0, dtype), shared))
    start = [lax.broadcast(convert(zero, x.dtype if x is attention.query else dtype), x.shape) for x in operands]
    grad_query, grad_key, grad_value = _in_blocks(problem, step, tuple(start))
    return grad_query, convert(grad_key, attention.key.dtype), convert(grad_value, attention.value.dtype), None


@ATTENTION_GRADIENT.implementation("torch", platforms=["cpu"], supports=_supports_torch, preferred=_prefers_torch)
def _gradients_by_torch(
    problem: AttentionProblem, attention: Attention, grad: Array, out: Array, logsumexp: Array, dropout_p: float, key: Array | None
) -> Gradients:
    operands = attention.query, attention.key, attention.value, attention.distinct_mask(4)
    held = problem.query, problem.key, problem.value
    return *flash_attention.backward(grad, *operands, out, logsumexp, held, problem.is_causal, problem.scale), None


@ATTENTION_GRADIENT.implementation("xla")
def _gradients_by_xla(
    problem: AttentionProblem, attention: Attention, grad: Array, out: Array, logsumexp: Array, dropout_p: float, key: Array | None
) -> Gradients:
    *found, grad_scores = _wide_gradients(attention, grad, _shared(grad, out), logsumexp, dropout_p, key)
    grad_query, grad_key, grad_value = (
        convert(x, operand.dtype) for x, operand in zip(found, (attention.query, attention.key, attention.value), strict=True)
    )
    return grad_query, grad_key, grad_value, grad_scores


def _shared(grad: Array, out: Array) -> Array:
    """The sum over each row of the weights times their gradients. It equals the sum of out * grad, which needs no pass over the scores."""
    dtype = dtypes.accumulator(out.dtype)
    return reduce_sum(lax.mul(convert(out, dtype), convert(grad, dtype)), (3,))


def _wide_gradients(
    attention: Attention, grad: Array, shared: Array, logsumexp: Array, dropout_p: float, key: Array | None
) -> tuple[Array, Array, Array, Array]:
    """Gradients of query, key, value and scores, in the accumulator's dtype. shared: the result of `_shared`."""
    query, keys, value = attention.query, attention.key, attention.value
    scores = attention.scores()
    dtype = scores.dtype
    weights = lax.exp(minus_largest(scores, _spread(convert(logsumexp, dtype), scores.shape)))
    applied = convert(attention.dropped(weights, key, dropout_p), value.dtype)
    grad_value = attention.times(applied, attention.by_key_head(grad), (2, 2))
    grad_weights = attention.dropped(attention.times(grad, value, (3, 3)), key, dropout_p)
    grad_scores = lax.mul(weights, lax.sub(grad_weights, _spread(shared, scores.shape)))
    scaled = convert(lax.mul(grad_scores, lax.full_like(grad_scores, attention.factor)), query.dtype)
    grad_query = attention.times(scaled, keys, (3, 2))
    grad_key = attention.times(scaled, attention.by_key_head(query), (2, 2))
    return grad_query, grad_key, grad_value, grad_scores
