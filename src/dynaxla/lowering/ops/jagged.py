"""Lowerings of conversions between a jagged tensor (rows of different lengths, concatenated) and a padded tensor."""

from __future__ import annotations

from collections.abc import Sequence

from jax import Array, lax

from ...errors import UnsupportedOp
from ...torch_ops import aten
from ..context import Context
from ..promotion import full_like, number
from ..registry import lowers
from .indexing import take_along
from .sorting import searchsorted


def _row_starts_and_lengths(offsets: Sequence[Array]) -> tuple[Array, Array]:
    """Returns the start and the length of each row.

    Raises: UnsupportedOp for more than one ragged dimension.
    """
    if len(offsets) != 1:
        raise UnsupportedOp("tensors with more than one ragged dimension")
    starts = lax.slice_in_dim(offsets[0], 0, offsets[0].shape[0] - 1)
    return starts, lax.sub(lax.slice_in_dim(offsets[0], 1, None), starts)


@lowers(aten._jagged_to_padded_dense_forward.default)
def jagged_to_padded_dense(values: Array, offsets: Sequence[Array], max_lengths: Sequence[int], padding_value: float = 0.0) -> Array:
    """The rows of a jagged tensor, padded or truncated to one length.

    Shape:  values (elements of all rows, ...) and offsets[0] (rows + 1) give (rows, max_lengths[0], ...). The offsets are the start of
            each row, followed by the end of the last row.
    Dtype:  that of the values.
    Raises: UnsupportedOp for more than one ragged dimension.
    """
    starts, lengths = _row_starts_and_lengths(offsets)
    shape = (starts.shape[0], max_lengths[0])
    position = lax.broadcasted_iota(starts.dtype, shape, 1)
    is_valid = lax.lt(position, lax.broadcast_in_dim(lengths, shape, (0,)))
    if values.shape[0] == 0 or 0 in shape:
        return lax.full((*shape, *values.shape[1:]), number(padding_value, values.dtype))
    rows = take_along(values, 0, lax.add(lax.broadcast_in_dim(starts, shape, (0,)), position))
    padding = full_like(rows, padding_value)
    return lax.select(lax.broadcast_in_dim(is_valid, rows.shape, (0, 1)), rows, padding)


@lowers(aten._padded_dense_to_jagged_forward.default)
def padded_dense_to_jagged(dense: Array, offsets: Sequence[Array], total_L: int | None = None, *, ctx: Context) -> Array:
    """The rows of a padded tensor without their padding, concatenated.

    Shape:  dense (rows, padded_length, ...) gives (total_L, ...). `offsets`: as for `jagged_to_padded_dense`.
    Dtype:  that of dense.
    Raises: UnsupportedOp for more than one ragged dimension; RuntimeError when the program runs, for a row longer than dense.shape[1].
    """
    starts, lengths = _row_starts_and_lengths(offsets)
    padded_length = dense.shape[1]
    is_short_enough = lax.le(lengths, lax.full_like(lengths, padded_length))
    message = f"_padded_dense_to_jagged_forward(): found a batch item longer than the padded input, {padded_length}"
    ctx.require(is_short_enough, RuntimeError, message)
    out = ctx.output.shape
    if 0 in out or dense.size == 0:
        return lax.full(out, number(0, dense.dtype))
    position = lax.iota(starts.dtype, out[0])
    row = lax.sub(searchsorted(starts, position, right=True), lax.full_like(position, 1))
    flat = lax.reshape(dense, (dense.shape[0] * padded_length, *dense.shape[2:]))
    position_in_row = lax.sub(position, take_along(starts, 0, row))
    return take_along(flat, 0, lax.add(lax.mul(row, lax.full_like(row, padded_length)), position_in_row))
