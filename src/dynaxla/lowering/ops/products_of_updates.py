"""Products with an updated tensor, from the tensor before the update and the new slices, so it is never copied (see slice_updates.py).

If the updated dimension remains in the result, the products with the overwritten slices are replaced by those with the new slices. If it is
summed, the overwritten slices get weight zero, and the products with the new slices are added. Overwritten values never reach the result: a
weight of zero does not remove values that are not finite, so in that case the old slices themselves are set to zero first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jax import Array, lax

from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..cpu import onednn_support
from ..cpu.gemv import product, strided_product
from ..cpu.materialize import in_memory
from ..dtypes import DType
from ..implementations import Implementations
from ..promotion import convert, expand
from ..slice_updates import Factor, SliceUpdate, UpdatedOperand, updated_operand, written_range
from .indexing import from_front, take_along
from .products_of_samples import Samples, of_samples, samples
from .scattering import fit, write_slices


@dataclass(frozen=True)
class UpdatedProductProblem:
    """A product with an updated tensor, as a problem for implementations: everything but the operands' values.

    Attributes:
        shape: The shape of the tensor.
        dtype: The dtype of the tensor.
        count: The number of new slices.
        size: The number of positions a slice can have.
        rows: The number of vectors that each of the tensor's vectors is multiplied with.
        sums_slices: True if the product sums over the dimension of the slices.
        is_moved: True if the batch dimensions are not the first dimensions of the tensor.
        has_strides: True if, besides the batch dimensions, the tensor has one summed dimension and one other, and one of the two is the
            fastest in memory.
        platform: JAX's name of the platform.
    """

    shape: tuple[int, ...]
    dtype: DType
    count: int
    size: int
    rows: int
    sums_slices: bool
    is_moved: bool
    has_strides: bool
    platform: str


PRODUCT_OF_UPDATE: Implementations[UpdatedProductProblem] = Implementations("product_of_update")

# For a tensor of at most this many elements, a copy costs less than avoiding it.
_FEW_NUMBERS = 20_000
# With more rows, the scores are no smaller than the tensor.
_MANY_ROWS = 32
# At most one in _PARTS of the tensor's slices may be new.
_PARTS = 4


def product_of_update(ctx: Context, position: int, other: Array, over: Sequence[int], batch: Sequence[int]) -> Array | None:
    """Returns the current node's product of a view of an updated tensor and another array, without materializing the updated tensor.

    The result is None if the argument is no such view, or if it is faster to materialize the tensor.

    Shape:  batch dimensions, then the remaining dimensions of `other`, then those of the view.
    Dtype:  the accumulator's.

    Args:
        ctx: The context of the current node.
        position: The position of the node's argument that is the view.
        other: The other operand.
        over: The summed dimensions of `other`.
        batch: The batch dimensions of `other`.
    """
    found = updated_operand(ctx, position)
    if found is None:
        return None
    dtype = dtypes.to_jax(found.dtype)
    problem = UpdatedProductProblem(
        found.shape, dtype, found.count, found.capacity, found.rows, found.sums_slices, found.is_moved, found.has_strides, ctx.platform
    )
    result: Array | None = ctx.choose(PRODUCT_OF_UPDATE, problem).run(problem, ctx, found, other, over, batch)
    return result


def _prefers_parts(problem: UpdatedProductProblem) -> bool:
    """True if avoiding the copy is expected to be faster.

    A tensor whose batch dimensions are not first has to be transposed for several rows, which is a copy too, unless it has a half type or
    oneDNN reads it with its strides.
    """
    if problem.is_moved and problem.rows > 1 and problem.dtype.itemsize > 2 and not _reads_strides(problem):
        return False
    return math.prod(problem.shape) > _FEW_NUMBERS and problem.rows <= _MANY_ROWS and problem.count * _PARTS <= problem.size


def _reads_strides(problem: UpdatedProductProblem) -> bool:
    """True if oneDNN multiplies the tensor with its strides, without a copy. It would convert half types first."""
    return problem.is_moved and problem.has_strides and problem.dtype == np.float32 and onednn_support.supports(problem.dtype)


@dataclass(frozen=True)
class _Other:
    """The other operand, reshaped so that each dimension corresponds to one dimension of the tensor or to none.

    Attributes:
        array: The reshaped operand.
        labels: For each of its dimensions the corresponding dimension of the tensor, or a string if there is none.
        kept: For each batch dimension of the product, the labels of the dimensions that it consists of.
        rows: The labels of the dimensions that are neither summed nor batch dimensions.
    """

    array: Array
    labels: tuple[int | str, ...]
    kept: tuple[tuple[int | str, ...], ...]
    rows: tuple[str, ...]

    @staticmethod
    def of(found: UpdatedOperand, array: Array, over: Sequence[int], batch: Sequence[int]) -> _Other:
        theirs = {**dict(zip(over, found.roles.contracting, strict=True)), **dict(zip(batch, found.roles.batch, strict=True))}
        labels: list[int | str] = []
        shape: list[int] = []
        kept: dict[int, tuple[int | str, ...]] = {}
        for dim, size in enumerate(array.shape):
            factors: Sequence[Factor] = found.factors[theirs[dim]] if dim in theirs else [(None, size)]
            parts = [(f"{dim} {at}" if label is None else label, part) for at, (label, part) in enumerate(factors)]
            labels += [label for label, _ in parts]
            shape += [part for _, part in parts]
            kept[dim] = tuple(label for label, _ in parts)
        rows = tuple(str(label) for dim in range(array.ndim) if dim not in theirs for label in kept[dim])
        return _Other(lax.reshape(array, shape), tuple(labels), tuple(kept[dim] for dim in batch), rows)


@PRODUCT_OF_UPDATE.implementation("parts", platforms=["cpu"], preferred=_prefers_parts)
def _by_parts(
    problem: UpdatedProductProblem, ctx: Context, found: UpdatedOperand, array: Array, outer: Sequence[int], kept: Sequence[int]
) -> Array:
    other = _Other.of(found, array, outer, kept)
    old = lax.reshape(ctx.values[found.updates[0].base], found.shape)
    long = [dim for dim, size in enumerate(found.shape) if size > 1]
    over = [dim for dim in long if dim in {origin for place in found.roles.contracting for origin, _ in found.factors[place]}]
    batch = [dim for dim in long if dim in other.labels and dim not in over]
    free = [dim for dim in long if dim not in other.labels]
    rows = [label for label in other.labels if isinstance(label, str)]
    lead: list[int | str] = [*batch, *rows]
    sizes: dict[int | str, int] = dict(zip(other.labels, other.array.shape, strict=True))
    x = lax.transpose(other.array, [other.labels.index(label) for label in (*lead, *over)])

    def times(x: Array, y: Array) -> Array:
        """Returns the product of x (*batch, *rows, *over) and y, which has the tensor's dimensions: (*batch, *rows, *free)."""
        if y.shape == old.shape and _reads_strides(problem):
            x = lax.reshape(x, [*(sizes[label] for label in batch), math.prod(sizes[label] for label in rows), old.shape[over[0]]])
            out = strided_product(x, lax.reshape(y, [old.shape[dim] for dim in long]), [long.index(dim) for dim in (*batch, *free, *over)])
            return lax.reshape(out, [*(sizes[label] for label in lead), old.shape[free[0]]])
        groups = [math.prod(sizes[label] for label in batch), math.prod(sizes[label] for label in rows)]
        groups.append(math.prod(y.shape[dim] for dim in over))
        out = product(lax.reshape(x, groups), *_matrices(y, batch, over, free), ctx.settings.matmul_precision)
        return lax.reshape(out, [*(sizes[label] for label in lead), *(y.shape[dim] for dim in free)])

    if len(found.dims) > 1:
        new = Samples.of(found, [_written(ctx, update) for update in found.updates])
        out = of_samples(x, old, new, ([*lead, *over], [*lead, *free]), found.sums_slices, times, dtypes.accumulator(problem.dtype))
    elif found.sums_slices:
        out = _summed(x, old, _Slices.of(ctx, found), len(lead) + over.index(found.dims[0]), times)
    else:
        slices, axis = _Slices.of(ctx, found), len(lead) + free.index(found.dims[0])
        before, after = times(x, old), times(x, slices.new)
        # Materialized, because a softmax reads the scores twice.
        out = in_memory(lax.select(slices.along(slices.hit, axis, before.shape), slices.spread(after, axis, before.shape), before))
    own = [
        [dim for dim, _ in factor] for place, factor in enumerate(found.factors) if place not in found.roles.contracting + found.roles.batch
    ]
    groups: list[Sequence[int | str | None]] = [*other.kept, *([row] for row in other.rows), *own]
    sizes.update(zip(free, (found.shape[dim] for dim in free), strict=True))
    labels = [*lead, *free]
    out = lax.transpose(out, [labels.index(label) for group in groups for label in group if label is not None])
    return lax.reshape(out, [math.prod(sizes[label] for label in group if label is not None) for group in groups])


def _summed(x: Array, old: Array, slices: _Slices, axis: int, times: Callable[[Array, Array], Array]) -> Array:
    """Returns the product that sums over the dimension of the slices, which is `axis` in x."""
    kept = lax.select(slices.along(slices.hit, axis, x.shape), lax.full_like(x, 0), x)
    finite = lax.reduce_and(lax.is_finite(take_along(old, slices.dim, slices.inside)), range(old.ndim))

    def without(old: Array, kept: Array) -> Array:
        return times(kept, lax.select(slices.along(slices.hit, slices.dim, old.shape), lax.full_like(old, 0), old))

    untouched = lax.cond(finite, lambda old, kept: times(kept, old), without, old, kept)
    return lax.add(untouched, times(slices.taken(x, axis), slices.counted))


def _matrices(y: Array, batch: Sequence[int], over: Sequence[int], free: Sequence[int]) -> tuple[Array, bool, bool]:
    """Returns the tensor as a batch of matrices, and two flags.

    The matrices are (batch, free, over) if the last dimension is one of `over`, else (batch, over, free). The first flag is True for the
    former; the second is True if the elements have another order in memory than in y.
    """
    short = [dim for dim in range(y.ndim) if dim not in (*batch, *over, *free)]
    is_over_last = not free or (bool(over) and max(over) > max(free))
    groups = [batch, free, over] if is_over_last else [batch, over, free]
    order = [dim for dims in groups for dim in dims]
    moved = lax.transpose(y, [*short, *order])
    return lax.reshape(moved, [math.prod(y.shape[dim] for dim in dims) for dims in groups]), is_over_last, order != sorted(order)


@PRODUCT_OF_UPDATE.implementation("whole")
def _by_whole(
    problem: UpdatedProductProblem, ctx: Context, found: UpdatedOperand, other: Array, over: Sequence[int], batch: Sequence[int]
) -> None:
    """Returns None: the caller multiplies with the updated tensor."""


@dataclass(frozen=True)
class _Slices:
    """The new slices of a tensor along one dimension, from the first written to the last.

    Attributes:
        new: The slices, concatenated along `dim`.
        places: The index of each slice, int32; -1 or `size` for a slice that is out of range and not written.
        dim: The dimension of the tensor that the slices are indexed in.
        size: The size of that dimension in the tensor.
    """

    new: Array
    places: Array
    dim: int
    size: int

    @staticmethod
    def of(ctx: Context, found: UpdatedOperand) -> _Slices:
        (dim,) = found.dims
        pairs = [_slices(ctx, update) for update in found.updates]
        dtype, size = dtypes.to_jax(found.dtype), found.shape[dim]
        shape = (*found.shape[:dim], -1, *found.shape[dim + 1 :])
        new = [convert(lax.reshape(values, [at.size if part < 0 else part for part in shape]), dtype) for values, at in pairs]
        places = [lax.convert_element_type(lax.clamp(np.array(-1, at.dtype), at, np.array(size, at.dtype)), np.int32) for _, at in pairs]
        if len(pairs) == 1:
            return _Slices(new[0], places[0], dim, size)
        return _Slices(lax.concatenate(new, dim), lax.concatenate(places, 0), dim, size)

    @property
    def count(self) -> int:
        return int(self.places.shape[0])

    @property
    def inside(self) -> Array:
        """The indices of the slices, clamped to the range of the dimension."""
        return lax.clamp(np.int32(0), self.places, np.int32(self.size - 1))

    @property
    def writer(self) -> Array:
        """For each index of the dimension, the number of the slice that is written there last, or -1 if none is."""
        nobody = lax.full((self.size,), -1, np.int32)
        return write_slices(nobody, 0, self.places, lax.iota(np.int32, self.count), "amax")

    @property
    def hit(self) -> Array:
        """For each index of the dimension, True if a slice is written there."""
        if self.count == 1:
            return lax.eq(lax.iota(np.int32, self.size), lax.broadcast_in_dim(self.places, (self.size,), (0,)))
        return lax.ge(self.writer, lax.full((self.size,), 0, np.int32))

    @property
    def counts(self) -> Array:
        """For each slice, True if it remains in the result: its index is in range and no later slice overwrites it."""
        if self.count == 1:
            return lax.eq(self.places, self.inside)
        return lax.eq(take_along(self.writer, 0, self.inside), lax.iota(np.int32, self.count))

    @property
    def counted(self) -> Array:
        """The slices, with zeros for those that do not remain (see `counts`)."""
        return lax.select(self.along(self.counts, self.dim, self.new.shape), self.new, lax.full_like(self.new, 0))

    def along(self, x: Array, axis: int, shape: Sequence[int]) -> Array:
        """Broadcasts a vector along `axis` to a shape."""
        return lax.broadcast_in_dim(x, shape, (axis,))

    def spread(self, x: Array, axis: int, shape: Sequence[int]) -> Array:
        """Moves the results for each slice, along `axis` of x, to the indices of the slices. Other elements are arbitrary."""
        if self.count == 1:
            return expand(x, shape)
        return take_along(x, axis, lax.max(self.writer, lax.full((self.size,), 0, np.int32)))

    def taken(self, x: Array, axis: int) -> Array:
        """Returns the parts of x at the indices of the slices along `axis`, with zeros for slices that do not remain (see `counts`)."""
        found = take_along(x, axis, self.inside)
        return lax.select(self.along(self.counts, axis, found.shape), found, lax.full_like(found, 0))


def _written(ctx: Context, update: SliceUpdate) -> tuple[Array, dict[int, Array]]:
    """Returns the slices that an update writes, as the first dimension, and their indices by dimension: see `samples`."""
    if _has_several_indices(update.node):
        return samples(ctx, update)
    values, places = _slices(ctx, update)
    dim = update.dims[0]
    return lax.transpose(values, [dim, *(at for at in range(values.ndim) if at != dim)]), {dim: places}


def _has_several_indices(node: torch.fx.Node) -> bool:
    is_put = node.target in (aten.index_put.default, aten._unsafe_index_put.default)
    return node.target is aten.scatter.src or (is_put and sum(index is not None for index in node.args[1]) > 1)


def _slices(ctx: Context, update: SliceUpdate) -> tuple[Array, Array]:
    """Returns the slices that an update in one dimension writes, concatenated along that dimension, and their indices in it."""
    node, dim, shape = update.node, update.dims[0], ctx.values[update.base].shape
    if _has_several_indices(node):
        values, at = samples(ctx, update)
        values = lax.reshape(values, (update.count, *shape[:dim], *shape[dim + 1 :]))
        return lax.transpose(values, [*range(1, dim + 1), 0, *range(dim + 1, len(shape))]), at[dim]
    if node.target is aten.index_copy.default:
        places = ctx.values[node.args[2]]
        source = lax.reshape(ctx.values[node.args[3]], (*shape[:dim], places.size, *shape[dim + 1 :]))
        return source, lax.reshape(places, (places.size,))
    if node.target in (aten.slice_scatter.default, aten.select_scatter.default):
        known = written_range(ctx, node)
        source = ctx.values[node.args[1]]
        source = lax.expand_dims(source, [dim]) if node.target is aten.select_scatter.default else source
        places = lax.add(lax.mul(lax.iota(np.int32, len(known)), np.int32(known.step)), np.int32(known.start))
        return expand(source, (*shape[:dim], len(known), *shape[dim + 1 :])), places
    index, values = ctx.values[node.args[1][dim]], ctx.values[node.args[2]]
    slices = fit(values, (*shape[:dim], *index.shape, *shape[dim + 1 :]))
    slices = lax.reshape(slices, (*shape[:dim], index.size, *shape[dim + 1 :]))
    return slices, lax.reshape(from_front(index, shape[dim]), (index.size,))
