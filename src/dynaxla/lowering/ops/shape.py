"""Lowerings of ops that rearrange elements (views, concatenations, scatters into views), and of their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array, lax

from ...torch_ops import aten
from ..context import Context
from ..dimensions import clamp_slice, infer_size, move, slice_dim, wrap, wrap_all
from ..dtypes import accumulator
from ..promotion import convert, result_type
from ..promotion import expand as broadcast_to
from ..registry import lower_table, lowers
from .circular_padding import lower_cat
from .strided import copy_to_overlapping, may_overlap


def _identity(x: Array) -> Array:
    return x


lower_table(
    {
        aten.alias.default: _identity,
        aten.alias_copy.default: _identity,
        aten.lift.default: _identity,
        aten.lift_fresh.default: _identity,
        aten.lift_fresh_copy.default: _identity,
        aten.t.default: lambda x: x if x.ndim < 2 else lax.transpose(x, (1, 0)),
        aten.t_copy.default: lambda x: x if x.ndim < 2 else lax.transpose(x, (1, 0)),
    }
)


@lowers(
    aten.view.default,
    aten.view_copy.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten._reshape_copy.default,
)
def view(x: Array, size: Sequence[int]) -> Array:
    """The same elements, in row-major order, in another shape. One size may be -1 and is inferred."""
    return lax.reshape(x, infer_size(size, x.size))


@lowers(aten.expand.default, aten.expand_copy.default)
def expand(x: Array, size: Sequence[int], *, implicit: bool = False) -> Array:
    """x broadcast to `size`: dimensions of size 1 are repeated, new ones added in front. A size of -1 keeps the size that x has."""
    added = len(size) - x.ndim
    return broadcast_to(x, [x.shape[dim - added] if extent == -1 else extent for dim, extent in enumerate(size)])


@lowers(aten.permute.default, aten.permute_copy.default)
def permute(x: Array, dims: Sequence[int]) -> Array:
    return lax.transpose(x, wrap_all(dims, x.ndim))


@lowers(aten.transpose.int, aten.transpose_copy.int, aten.swapaxes.default, aten.swapdims.default)
def transpose(x: Array, dim0: int, dim1: int) -> Array:
    if x.ndim == 0:
        return x
    order = list(range(x.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return lax.transpose(x, order)


@lowers(aten.squeeze.default, aten.squeeze_copy.default)
def squeeze(x: Array) -> Array:
    """x without its dimensions of size 1."""
    return lax.reshape(x, [size for size in x.shape if size != 1])


@lowers(aten.squeeze.dim, aten.squeeze_copy.dim)
def squeeze_dim(x: Array, dim: int) -> Array:
    """x without dimension `dim` if its size is 1; else x."""
    return squeeze_dims(x, [dim])


@lowers(aten.squeeze.dims, aten.squeeze_copy.dims)
def squeeze_dims(x: Array, dims: Sequence[int]) -> Array:
    """x without the dimensions in `dims` whose size is 1."""
    dropped = wrap_all(dims, x.ndim)
    return lax.reshape(x, [size for dim, size in enumerate(x.shape) if size != 1 or dim not in dropped])


@lowers(aten.unsqueeze.default, aten.unsqueeze_copy.default)
def unsqueeze(x: Array, dim: int) -> Array:
    """x with a new dimension of size 1, which becomes dimension `dim` of the result."""
    return lax.expand_dims(x, [wrap(dim, x.ndim + 1)])


@lowers(aten.slice.Tensor, aten.slice_copy.Tensor)
def slice_(x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    """Every step-th element of [start, end). Negative bounds count from the end; bounds are clamped to the dimension.

    Shape:  that of x, with ceil((end - start) / step) at `dim`.
    """
    dim = wrap(dim, x.ndim)
    first, last, _ = clamp_slice(x.shape[dim], start, end, step)
    return slice_dim(x, dim, first, last, step)


@lowers(aten.narrow_copy.default)
def narrow(x: Array, dim: int, start: int, length: int) -> Array:
    """`length` elements of one dimension, starting at `start`.

    Shape:  that of x, with `length` at `dim`.
    """
    dim = wrap(dim, x.ndim)
    start += x.shape[dim] if start < 0 else 0
    return slice_dim(x, dim, start, start + length)


@lowers(aten.select.int, aten.select_copy.int)
def select(x: Array, dim: int, index: int) -> Array:
    """The elements at one index of one dimension.

    Shape:  x without `dim`.
    """
    dim = wrap(dim, x.ndim)
    index += x.shape[dim] if index < 0 else 0
    return lax.squeeze(slice_dim(x, dim, index, index + 1), [dim])


@lowers(
    aten.split_with_sizes.default,
    aten.split_with_sizes_copy.default,
    aten.unsafe_split_with_sizes.default,
)
def split_with_sizes(x: Array, sizes: Sequence[int], dim: int = 0) -> list[Array]:
    """Consecutive pieces of x of the given sizes along one dimension: views of x in eager mode, separate arrays here."""
    return lax.split(x, list(sizes), wrap(dim, x.ndim))


@lowers(aten.split.Tensor, aten.split_copy.Tensor, aten.unsafe_split.Tensor)
def split(x: Array, size: int, dim: int = 0) -> list[Array]:
    """Consecutive pieces of `size`; the last one may be smaller. An empty dimension gives one empty piece."""
    total = x.shape[wrap(dim, x.ndim)]
    if total == 0:
        return [x]
    return split_with_sizes(x, [min(size, total - start) for start in range(0, total, size)], dim)


@lowers(aten.unbind.int, aten.unbind_copy.int)
def unbind(x: Array, dim: int = 0) -> list[Array]:
    """One array for each index of one dimension, each without that dimension."""
    dim = wrap(dim, x.ndim)
    if x.shape[dim] == 0:
        return []
    return [lax.squeeze(piece, [dim]) for piece in lax.split(x, [1] * x.shape[dim], dim)]


@lowers(aten.cat.default)
def cat(tensors: Sequence[Array], dim: int = 0, *, ctx: Context) -> Array:
    """The tensors concatenated along one dimension. Tensors of shape [0] are skipped, whatever the shapes of the others.

    Dtype:  promoted from all of them.
    """
    return lower_cat(ctx, lambda: concatenated(tensors, dim))


def concatenated(tensors: Sequence[Array], dim: int) -> Array:
    """Returns the result of `aten.cat`: the tensors in their common dtype, without empty vectors, concatenated."""
    dtype = result_type(tensors)
    nonempty = [convert(x, dtype) for x in tensors if x.shape != (0,)]
    if not nonempty:
        return convert(tensors[0], dtype)
    return nonempty[0] if len(nonempty) == 1 else concatenate_nonempty(nonempty, wrap(dim, nonempty[0].ndim))


def concatenate_nonempty(tensors: Sequence[Array], dim: int) -> Array:
    """Concatenates tensors along `dim`.

    Tensors of equal shapes that are concatenated along the last dimension are first stacked along a new dimension before the last one. A
    reshape then merges both dimensions. Without this, no loop would be vectorized: XLA:CPU decides for each index of the concatenated
    dimension from which tensor to read, and vectorizes only the loop over the dimensions after that dimension.
    """
    shape = tensors[0].shape
    if dim != len(shape) - 1 or any(x.shape != shape for x in tensors):
        return lax.concatenate(tensors, dim)
    stacked = lax.concatenate([lax.expand_dims(x, [dim]) for x in tensors], dim)
    return lax.reshape(stacked, (*shape[:dim], len(tensors) * shape[dim]))


@lowers(aten.stack.default)
def stack(tensors: Sequence[Array], dim: int = 0) -> Array:
    """The tensors stacked along a new dimension, which becomes dimension `dim` of the result.

    Dtype:  promoted from all of them.
    """
    return concatenated([unsqueeze(x, dim) for x in tensors], wrap(dim, tensors[0].ndim + 1))


@lowers(aten.repeat.default)
def repeat(x: Array, repeats: Sequence[int]) -> Array:
    """x tiled `repeats[i]` times in dimension i. If `repeats` is longer than the rank of x, new dimensions are added in front."""
    sizes = (1,) * (len(repeats) - x.ndim) + x.shape
    # Each dimension becomes two, (copies, size). The reshape below merges them.
    shape = [extent for copies, size in zip(repeats, sizes, strict=True) for extent in (copies, size)]
    offset = len(repeats) - x.ndim
    tiled = lax.broadcast_in_dim(x, shape, [2 * (dim + offset) + 1 for dim in range(x.ndim)])
    return lax.reshape(tiled, [copies * size for copies, size in zip(repeats, sizes, strict=True)])


@lowers(aten.flip.default)
def flip(x: Array, dims: Sequence[int]) -> Array:
    return lax.rev(x, wrap_all(dims, x.ndim)) if x.ndim and dims else x


@lowers(aten.roll.default)
def roll(x: Array, shifts: Sequence[int], dims: Sequence[int] = ()) -> Array:
    """x rolled by `shifts` along `dims`; without `dims`, the flattened tensor is rolled."""
    if not dims:
        return lax.reshape(roll(lax.reshape(x, (x.size,)), shifts, [0]), x.shape) if x.size else x
    for shift, dim in zip(shifts, wrap_all(dims, x.ndim), strict=True):
        size = x.shape[dim] if x.ndim else 0
        cut = -shift % size if size else 0
        if cut:
            x = lax.concatenate([slice_dim(x, dim, cut, size), slice_dim(x, dim, 0, cut)], dim)
    return x


@lowers(aten.rot90.default)
def rot90(x: Array, k: int = 1, dims: Sequence[int] = (0, 1)) -> Array:
    """x rotated by k * 90 degrees, from the first towards the second of `dims`.

    Shape:  that of x; for odd k, with the sizes of `dims` exchanged.
    """
    first, second = wrap_all(dims, x.ndim)
    turns = k % 4
    if turns == 0:
        return x
    if turns == 2:
        return lax.rev(x, (first, second))
    return transpose(lax.rev(x, (second,)), first, second) if turns == 1 else lax.rev(transpose(x, first, second), (second,))


def diagonal_span(rows: int, columns: int, offset: int) -> tuple[int, int]:
    """Returns the flat index of a diagonal's first element in a row-major matrix, and the number of its elements.

    Consecutive elements of the diagonal are columns + 1 apart.
    """
    if offset >= 0:
        return offset, max(min(rows, columns - offset), 0)
    return -offset * columns, max(min(rows + offset, columns), 0)


def _to_last_two(x: Array, dim1: int, dim2: int) -> Array:
    """Moves two dimensions of x to the end, in this order."""
    return lax.transpose(x, [dim for dim in range(x.ndim) if dim not in (dim1, dim2)] + [dim1, dim2])


def _from_last_two(x: Array, dim1: int, dim2: int) -> Array:
    """Moves the last two dimensions of x to `dim1` and `dim2`: the inverse of `_to_last_two`."""
    order = [dim for dim in range(x.ndim) if dim not in (dim1, dim2)] + [dim1, dim2]
    return lax.transpose(x, sorted(range(x.ndim), key=order.__getitem__))


@lowers(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(x: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    """The diagonals of the matrices that dimensions `dim1` and `dim2` form.

    Shape:  x without `dim1` and `dim2`; the diagonal is the last dimension.
    """
    x = _to_last_two(x, *wrap_all((dim1, dim2), x.ndim))
    *batch, rows, columns = x.shape
    start, count = diagonal_span(rows, columns, offset)
    if count == 0:
        return lax.full((*batch, 0), 0, x.dtype)
    flat = lax.reshape(x, (*batch, rows * columns))
    return slice_dim(flat, len(batch), start, start + (count - 1) * (columns + 1) + 1, columns + 1)


def embed_diagonal(x: Array, rows: int, columns: int, offset: int) -> Array:
    """Returns matrices of zeros with x's last dimension on the diagonal at `offset`."""
    *batch, count = x.shape
    if count == 0:
        return lax.full((*batch, rows, columns), 0, x.dtype)
    # One value per row (0 in rows that the diagonal does not cross), broadcast and masked: XLA:CPU vectorizes masks, not interior padding.
    before, shape = max(-offset, 0), (*batch, rows, columns)
    values_by_row = lax.pad(x, lax.full((), 0, x.dtype), [(0, 0, 0)] * len(batch) + [(before, rows - before - count, 0)])
    row, column = (lax.broadcasted_iota(np.int32, shape, len(batch) + dim) for dim in range(2))
    is_crossed = lax.eq(column, lax.add(row, lax.full_like(row, offset)))
    return lax.select(is_crossed, lax.broadcast_in_dim(values_by_row, shape, range(len(batch) + 1)), lax.full(shape, 0, x.dtype))


@lowers(aten.diag_embed.default)
def diag_embed(x: Array, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Array:
    """Matrices of zeros with the last dimension of x on their diagonals.

    Shape:  x without its last dimension, and with new dimensions `dim1` and `dim2` of size x.shape[-1] + abs(offset).
    """
    size = x.shape[-1] + abs(offset)
    return _from_last_two(embed_diagonal(x, size, size, offset), *wrap_all((dim1, dim2), x.ndim + 1))


@lowers(aten.diagonal_backward.default)
def diagonal_backward(grad: Array, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> Array:
    """The gradient of diagonal: zeros of shape `input_sizes`, with grad on the diagonals."""
    dim1, dim2 = wrap_all((dim1, dim2), len(input_sizes))
    others = [size for dim, size in enumerate(input_sizes) if dim not in (dim1, dim2)]
    _, count = diagonal_span(input_sizes[dim1], input_sizes[dim2], offset)
    grad = broadcast_to(grad, [*others, count])
    return _from_last_two(embed_diagonal(grad, input_sizes[dim1], input_sizes[dim2], offset), dim1, dim2)


# The scatter ops below return x with a part replaced. If elements of x share memory (as in a tensor made by as_strided), eager mode's write
# to the part also changes the elements outside the part that share its memory. `copy_to_overlapping` repeats these changes.


@lowers(aten.diagonal_scatter.default)
def diagonal_scatter(x: Array, source: Array, offset: int = 0, dim1: int = 0, dim2: int = 1, *, ctx: Context) -> Array:
    """x with its diagonals replaced by `source`, which has the shape of `diagonal`'s result."""
    dim1, dim2 = wrap_all((dim1, dim2), x.ndim)
    rows, columns = (lax.broadcasted_iota("int32", x.shape, dim) for dim in (dim1, dim2))
    on_diagonal = lax.eq(columns, lax.add(rows, lax.full_like(rows, offset)))
    result = lax.select(on_diagonal, diagonal_backward(convert(source, x.dtype), x.shape, offset, dim1, dim2), x)
    if may_overlap(spec := ctx.input(0)):
        is_written = np.eye(x.shape[dim1], x.shape[dim2], offset, bool)
        mask = np.expand_dims(is_written if dim1 < dim2 else is_written.T, [dim for dim in range(x.ndim) if dim not in (dim1, dim2)])
        return copy_to_overlapping(result, spec, np.broadcast_to(mask, x.shape))
    return result


@lowers(aten.slice_scatter.default)
def slice_scatter(
    x: Array, source: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1, *, ctx: Context
) -> Array:
    """x with one of its slices replaced by `source`, which has the slice's shape and is converted to the dtype of x."""
    dim = wrap(dim, x.ndim)
    first, _, count = clamp_slice(x.shape[dim], start, end, step)
    if count == 0 or x.size == 0:
        return x
    result = _with_slice(x, source, dim, first, count, step)
    if count < x.shape[dim] and may_overlap(spec := ctx.input(0)):
        is_written = np.zeros(x.shape, bool)
        is_written[(slice(None),) * dim + (slice(first, None, step),)] = True
        is_written[(slice(None),) * dim + (slice(first + count * step, None),)] = False
        return copy_to_overlapping(result, spec, is_written)
    return result


def _with_slice(x: Array, source: Array, dim: int, first: int, count: int, step: int) -> Array:
    """Returns x with `source` at the `count` indices first, first + step, and so on, of one dimension."""
    size = x.shape[dim]
    source = broadcast_to(convert(source, x.dtype), [*x.shape[:dim], count, *x.shape[dim + 1 :]])
    if count == size:
        return source
    if step == 1 or count == 1:
        # For a chain of dynamic_update_slice ops, XLA makes one copy and writes in place.
        return lax.dynamic_update_slice(x, source, [first if d == dim else 0 for d in range(x.ndim)])
    position = lax.sub(lax.broadcasted_iota("int64", x.shape, dim), lax.full(x.shape, first, "int64"))
    multiple = lax.eq(lax.rem(position, lax.full_like(position, step)), lax.full_like(position, 0))
    is_inside = lax.bitwise_and(multiple, lax.bitwise_and(lax.ge(position, lax.full_like(position, 0)), _below(position, count * step)))
    return lax.select(is_inside, _embed_slice(source, x.shape[dim], dim, first, step), x)


def _below(position: Array, limit: int) -> Array:
    return lax.lt(position, lax.full_like(position, limit))


def _embed_slice(x: Array, size: int, dim: int, first: int, step: int) -> Array:
    """Returns zeros, of size `size` in dimension `dim`, with the elements of x at first, first + step, and so on."""
    count = x.shape[dim]
    if count == 0:
        return lax.full((*x.shape[:dim], size, *x.shape[dim + 1 :]), 0, x.dtype)
    padding = [(0, 0, 0)] * x.ndim
    padding[dim] = (first, size - first - (count - 1) * step - 1, step - 1)
    return lax.pad(x, lax.full((), 0, x.dtype), padding)


@lowers(aten.slice_backward.default)
def slice_backward(grad: Array, input_sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Array:
    """The gradient of slice: zeros of shape `input_sizes`, with grad in the slice."""
    dim = wrap(dim, len(input_sizes))
    first, _, count = clamp_slice(input_sizes[dim], start, end, step)
    grad = broadcast_to(grad, [*input_sizes[:dim], count, *input_sizes[dim + 1 :]])
    return _embed_slice(grad, input_sizes[dim], dim, first, step)


@lowers(aten.select_backward.default)
def select_backward(grad: Array, input_sizes: Sequence[int], dim: int, index: int) -> Array:
    """The gradient of select: zeros of shape `input_sizes`, with grad at one index of one dimension."""
    dim = wrap(dim, len(input_sizes))
    index += input_sizes[dim] if index < 0 else 0
    grad = broadcast_to(grad, [*input_sizes[:dim], *input_sizes[dim + 1 :]])
    return _embed_slice(lax.expand_dims(grad, [dim]), input_sizes[dim], dim, index, 1)


@lowers(aten.select_scatter.default)
def select_scatter(x: Array, source: Array, dim: int, index: int, *, ctx: Context) -> Array:
    """x with the elements at one index of one dimension replaced by `source`, which has the shape of x without `dim`."""
    dim = wrap(dim, x.ndim)
    index += x.shape[dim] if index < 0 else 0
    source = broadcast_to(source, [*x.shape[:dim], *x.shape[dim + 1 :]])
    return slice_scatter(x, lax.expand_dims(source, [dim]), dim, index, index + 1, ctx=ctx)


@lowers(aten.unfold.default, aten.unfold_copy.default)
def unfold(x: Array, dimension: int, size: int, step: int) -> Array:
    """Sliding windows along one dimension.

    Shape:  that of x, with the number of windows, (x.shape[dimension] - size) // step + 1, at `dimension`, and a new last dimension of
            `size`. A rank-0 x gives [size].
    """
    if x.ndim == 0:
        return slice_dim(lax.reshape(x, (1,)), 0, 0, size)
    dim = wrap(dimension, x.ndim)
    count = (x.shape[dim] - size) // step + 1
    if size == 0:
        return lax.full((*x.shape[:dim], count, *x.shape[dim + 1 :], 0), 0, x.dtype)
    # The dimension is cut into runs of `step` elements. A window is ceil(size / step) whole runs, cut to `size`. The alternative, one slice
    # for each position in a window, takes up to 20 times as long, and seconds to compile for hundreds of positions.
    runs = -(-size // step)
    length = (count + runs - 1) * step
    missing = max(length - x.shape[dim], 0)
    x = lax.pad(x, lax.full((), 0, x.dtype), [(0, missing if d == dim else 0, 0) for d in range(x.ndim)])
    x = lax.reshape(slice_dim(x, dim, 0, length), (*x.shape[:dim], count + runs - 1, step, *x.shape[dim + 1 :]))
    x = move(x, dim + 1, x.ndim - 1)
    windows = lax.concatenate([lax.expand_dims(slice_dim(x, dim, run, run + count), [x.ndim - 1]) for run in range(runs)], x.ndim - 1)
    return slice_dim(lax.reshape(windows, (*x.shape[:dim], count, *x.shape[dim + 1 : -1], runs * step)), x.ndim - 1, 0, size)


@lowers(aten.unfold_backward.default)
def unfold_backward(grad: Array, input_sizes: Sequence[int], dim: int, size: int, step: int) -> Array:
    """The gradient of unfold: each element of the input gets the sum of the gradients of all windows that contain it.

    Shape:  `input_sizes`.
    """
    if not input_sizes:
        return lax.reshape(slice_dim(grad, 0, 0, 1), ()) if size else lax.full((), 0, grad.dtype)
    dim = wrap(dim, len(input_sizes))
    count = grad.shape[dim]
    grad = broadcast_to(grad, (*input_sizes[:dim], count, *input_sizes[dim + 1 :], size))  # istft passes a grad that must be broadcast
    zero = lax.full((), 0, grad.dtype)
    if size == 0 or count == 0:
        return lax.full(tuple(input_sizes), 0, grad.dtype)
    dtype = accumulator(grad.dtype)
    # Windows are cut into runs of `step` elements: run n of window w covers the same elements as run 0 of window w + n.
    runs = -(-size // step)
    windows = move(grad, dim, grad.ndim - 2)
    outer = windows.shape[:-2]
    no_padding = [(0, 0, 0)] * len(outer)
    windows = lax.reshape(lax.pad(windows, zero, [*no_padding, (0, 0, 0), (0, runs * step - size, 0)]), (*outer, count, runs, step))
    total = None
    for run in range(runs):
        part = lax.squeeze(slice_dim(windows, len(outer) + 1, run, run + 1), [len(outer) + 1])
        part = lax.pad(convert(part, dtype), convert(zero, dtype), [*no_padding, (run, runs - 1 - run, 0), (0, 0, 0)])
        total = part if total is None else lax.add(total, part)
    assert total is not None
    covered = (count + runs - 1) * step
    flat = convert(lax.reshape(total, (*outer, covered)), grad.dtype)
    return move(lax.pad(flat, zero, [*no_padding, (0, input_sizes[dim] - covered, 0)]), len(outer), dim)


@lowers(aten.pixel_shuffle.default)
def pixel_shuffle(x: Array, upscale_factor: int) -> Array:
    """Rearranges blocks of r**2 channels into r x r blocks of pixels.

    Shape:  x (..., C * r**2, H, W) gives (..., C, H * r, W * r), r being `upscale_factor`.
    """
    *batch, channels, height, width = x.shape
    factor, rank = upscale_factor, len(batch)
    x = lax.reshape(x, (*batch, channels // factor**2, factor, factor, height, width))
    x = lax.transpose(x, [*range(rank), *[rank + d for d in (0, 3, 1, 4, 2)]])
    return lax.reshape(x, (*batch, channels // factor**2, height * factor, width * factor))


@lowers(aten.pixel_unshuffle.default)
def pixel_unshuffle(x: Array, downscale_factor: int) -> Array:
    """Rearranges r x r blocks of pixels into r**2 channels: the inverse of pixel_shuffle.

    Shape:  x (..., C, H * r, W * r) gives (..., C * r**2, H, W), r being `downscale_factor`.
    """
    *batch, channels, height, width = x.shape
    factor, rank = downscale_factor, len(batch)
    x = lax.reshape(x, (*batch, channels, height // factor, factor, width // factor, factor))
    x = lax.transpose(x, [*range(rank), *[rank + d for d in (0, 2, 4, 1, 3)]])
    return lax.reshape(x, (*batch, channels * factor**2, height // factor, width // factor))


@lowers(aten.channel_shuffle.default)
def channel_shuffle(x: Array, groups: int) -> Array:
    """x with its channels interleaved: the first channel of each of `groups` groups, then the second of each, and so on.

    Shape:  that of x (batch, C, ...).
    """
    batch, channels, *rest = x.shape
    grouped = lax.reshape(x, (batch, groups, channels // groups, math.prod(rest)))
    return lax.reshape(lax.transpose(grouped, (0, 2, 1, 3)), x.shape)


@lowers(aten.block_diag.default)
def block_diag(tensors: Sequence[Array]) -> Array:
    """A matrix of zeros with the tensors along its diagonal. A vector is a block of one row, a scalar a block of one element.

    Dtype:  promoted from all of them.
    """
    dtype = result_type(tensors)
    blocks = [lax.reshape(convert(x, dtype), (1,) * (2 - x.ndim) + x.shape) for x in tensors]
    columns = sum(block.shape[1] for block in blocks)
    rows: list[Any] = []
    offset = 0
    for block in blocks:
        width = block.shape[1]
        rows.append(lax.pad(block, lax.full((), 0, dtype), [(0, 0, 0), (offset, columns - offset - width, 0)]))
        offset += width
    return lax.concatenate(rows, 0)
