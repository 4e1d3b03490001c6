"""Lowerings of padding with a constant, by reflection, and by replication of the edge."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax import Array, lax

from ...torch_ops import aten
from .. import dtypes
from ..dimensions import slice_dim
from ..promotion import convert, expand
from ..registry import lowers


@lowers(aten.constant_pad_nd.default)
def constant_pad_nd(x: Array, pad: Sequence[int], value: bool | int | float | complex = 0) -> Array:
    """x padded with a number. `pad` holds (before, after) pairs, beginning with the last dimension. A negative size crops.

    Shape:  each padded dimension grows by the sum of its pair.
    Dtype:  that of x.
    """
    pairs = [(before, after, 0) for before, after in zip(pad[::2], pad[1::2], strict=True)]
    return lax.pad(x, convert(value, x.dtype), [(0, 0, 0)] * (x.ndim - len(pairs)) + pairs[::-1])


def _pad_dim(x: Array, dim: int, before: int, after: int, edge: Callable[[Array, int, int, bool], Array]) -> Array:
    """Pads one dimension with the elements that `edge` takes from x. A negative size crops.

    Cropping comes last, because it may reach into the padding of the other end.

    Args:
        x: The array.
        dim: The dimension.
        before: The number of elements to add in front.
        after: The number of elements to add at the end.
        edge: Returns the elements to add, from x, the dimension, their number, and True for the padding in front.
    """
    parts = [edge(x, dim, before, True)] if before > 0 else []
    parts.append(x)
    if after > 0:
        parts.append(edge(x, dim, after, False))
    padded = lax.concatenate(parts, dim) if len(parts) > 1 else x
    return slice_dim(padded, dim, max(-before, 0), padded.shape[dim] - max(-after, 0))


def _reflected(x: Array, dim: int, count: int, front: bool) -> Array:
    size = x.shape[dim]
    return lax.rev(slice_dim(x, dim, 1, 1 + count) if front else slice_dim(x, dim, size - 1 - count, size - 1), [dim])


def _repeated(x: Array, dim: int, count: int, front: bool) -> Array:
    edge = slice_dim(x, dim, 0, 1) if front else slice_dim(x, dim, x.shape[dim] - 1, x.shape[dim])
    return expand(edge, [*x.shape[:dim], count, *x.shape[dim + 1 :]])


def _pad(x: Array, padding: Sequence[int], edge: Callable[[Array, int, int, bool], Array]) -> Array:
    for index in range(len(padding) // 2):
        x = _pad_dim(x, x.ndim - 1 - index, padding[2 * index], padding[2 * index + 1], edge)
    return x


@lowers(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
def reflection_pad(x: Array, padding: Sequence[int]) -> Array:
    """x padded by reflection at its first and last elements, which are not repeated. `padding`: as for `constant_pad_nd`.

    Shape:  each padded dimension grows by the sum of its pair.
    Dtype:  that of x.
    """
    return _pad(x, padding, _reflected)


@lowers(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)
def replication_pad(x: Array, padding: Sequence[int]) -> Array:
    """x padded by copies of its first and last elements. `padding`: as for `constant_pad_nd`.

    Shape:  each padded dimension grows by the sum of its pair.
    Dtype:  that of x.
    """
    return _pad(x, padding, _repeated)


def _padding_gradient(pad: Callable[[Array, Sequence[int]], Array], grad: Array, x: Array, padding: Sequence[int]) -> Array:
    """Returns the gradient of x in `pad`: each padding element's gradient is added to the gradient of the element that it copies."""
    dtype = dtypes.accumulator(grad.dtype)
    like = jax.ShapeDtypeStruct(x.shape, dtype)
    (result,) = jax.linear_transpose(lambda operand: pad(operand, padding), like)(convert(grad, dtype))
    return convert(result, grad.dtype)


@lowers(aten.reflection_pad1d_backward.default, aten.reflection_pad2d_backward.default, aten.reflection_pad3d_backward.default)
def reflection_pad_backward(grad: Array, x: Array, padding: Sequence[int]) -> Array:
    """The gradient of x in `reflection_pad`: each element gets the sum of the gradients of itself and its mirror images.

    Shape:  that of x.
    """
    return _padding_gradient(reflection_pad, grad, x, padding)


@lowers(aten.replication_pad1d_backward.default, aten.replication_pad2d_backward.default, aten.replication_pad3d_backward.default)
def replication_pad_backward(grad: Array, x: Array, padding: Sequence[int]) -> Array:
    """The gradient of x in `replication_pad`: each element gets the sum of the gradients of itself and its copies.

    Shape:  that of x.
    """
    return _padding_gradient(replication_pad, grad, x, padding)
