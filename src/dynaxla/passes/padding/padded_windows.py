"""Padding rules (see `padded_rules.py`) for convolutions, pooling and other windows over images, audio or sequences of rounded sizes.

Beyond the true end, a window reads the same values as beyond the edge of an image: zeros, or the op's neutral element. The number of
windows grows with the size, so the valid windows are a prefix.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import Node

from ...lowering.dimensions import wrap
from ...lowering.ops.valid_size_ops import reflect_or_replicate, reflect_or_replicate_backward
from ...torch_ops import aten
from .padded_order import rewrite_as_strided
from .padded_rules import (
    argument,
    arguments_except,
    lowest,
    number_of,
    replace_by_results,
    require_all_unpadded,
    require_single_prefix,
    rule,
    value,
)
from .padding_rewrite import PaddingRewrite
from .valid_sizes import Extent, Extents, NoPaddingRule, broadcast, common_extent, quotient, size_of, sizes_of, with_extent


def _spatial_dims(rewrite: PaddingRewrite, tensor: Node, first: int) -> list[int]:
    """Returns the spatial dimensions of a tensor, from `first` on.

    Raises: NoPaddingRule if a rounded dimension is not one prefix.
    """
    extents = rewrite.extents_of(tensor)
    spatial_dims = range(first, len(extents))
    for dim in spatial_dims:
        if rewrite.is_padded(extents[dim]) and extents[dim].non_uniform != Extent.of(size_of(value(tensor).shape[dim])):
            raise NoPaddingRule("its windows are over a flattened dimension")
    return list(spatial_dims)


def _image_dims(rewrite: PaddingRewrite, images: Any, ranks: Collection[int] = (3, 4, 5)) -> list[int]:
    """Returns the spatial dimensions of a batch of images with channels. Raises: NoPaddingRule for other ranks, and as `_spatial_dims`."""
    if value(images).dim() not in ranks:
        raise NoPaddingRule("its input has no batch dimension")
    return _spatial_dims(rewrite, images, 2)


def _result(rewrite: PaddingRewrite, node: Node, *outer_extents: Extent) -> Any:
    """Returns the extents of a node's results.

    outer_extents: the extents of the batch and, if the op keeps the channels, of the channels.
    """
    several = node.meta["val"]
    found = [
        (*outer_extents, *rewrite.prefixes(item)[len(outer_extents) :])
        for item in (several if isinstance(several, (tuple, list)) else [several])
    ]
    return found if isinstance(several, (tuple, list)) else found[0]


@rule(aten.convolution.default)
def _convolution(rewrite: PaddingRewrite, node: Node) -> Any:
    images, weight, *rest = node.args
    assert isinstance(images, Node)
    if value(images).dim() != value(weight).dim():
        raise NoPaddingRule("a convolution has no batch dimension")
    rewrite.require_exact(*rest)
    rewrite.require_unpadded(images, [1])
    require_all_unpadded(rewrite, [weight, *rest])
    node.update_arg(0, rewrite.masked(images, _image_dims(rewrite, images), 0))
    return _result(rewrite, node, rewrite.extents_of(images)[0])


@rule(aten.convolution_backward.default)
def _convolution_backward(rewrite: PaddingRewrite, node: Node) -> list[Extents]:
    """Masks batch and spatial dimensions, since the gradients of weights are sums over these dimensions."""
    grad, images, *rest = node.args
    assert isinstance(grad, Node)
    assert isinstance(images, Node)
    rewrite.require_exact(*rest)
    require_all_unpadded(rewrite, rest)
    batch = common_extent([rewrite.extents_of(grad)[0], rewrite.extents_of(images)[0]])
    for index, tensor in enumerate((grad, images)):
        dims = [0, *_image_dims(rewrite, tensor)]
        rewrite.require_unpadded(tensor, [1])
        node.update_arg(index, rewrite.masked(tensor, dims, 0, with_extent(rewrite.extents_of(tensor), 0, batch)))
    results = [rewrite.prefixes(item) if isinstance(item, torch.Tensor) else () for item in node.meta["val"]]
    return [with_extent(results[0], 0, batch) if results[0] else (), *results[1:]]


@rule(aten.max_pool2d_with_indices.default)
def _max_pool(rewrite: PaddingRewrite, node: Node) -> Any:
    images, *rest = node.args
    assert isinstance(images, Node)
    rewrite.require_exact(*rest, *node.kwargs.values())
    dims = _image_dims(rewrite, images, (4,))
    node.update_arg(0, rewrite.masked(images, dims, lowest(value(images).dtype)))
    if _is_width_padded(rewrite, images) and any(user.args[1] == 1 for user in node.users):
        out, positions = rewrite.duplicate(node)
        row, column = _row_and_column(rewrite, positions, rewrite.rounded_size(images, -1))
        replace_by_results(
            node, [out, _position(rewrite, row, rewrite.true_product([size_of(value(images).shape[-1])], value(row)), column)]
        )
    return _result(rewrite, node, *rewrite.extents_of(images)[:2])


# Indices of max pooling are linear positions in an image. They depend on the width, and the true width is smaller than the rounded width.


def _is_width_padded(rewrite: PaddingRewrite, images: Node) -> bool:
    """True if linear positions in the images depend on a rounded width."""
    height = value(images).shape[-2]
    return rewrite.is_padded(rewrite.extents_of(images)[-1]) and not (isinstance(height, int) and height == 1)


def _row_and_column(rewrite: PaddingRewrite, position: Node, width: Any) -> tuple[Node, ...]:
    """Splits linear positions into rows and columns. width: a number of the graph, or a tensor of rank 0."""
    like = value(position)
    is_tensor = isinstance(width, Node) and isinstance(value(width), torch.Tensor)
    divide, remainder = (
        (aten.floor_divide.default, aten.remainder.Tensor) if is_tensor else (aten.floor_divide.Scalar, aten.remainder.Scalar)
    )
    return tuple(rewrite.add(op, (position, width), like.shape, like) for op in (divide, remainder))


def _position(rewrite: PaddingRewrite, row: Node, width: Any, column: Node) -> Node:
    """Returns the linear positions of rows and columns. width: as in `_row_and_column`."""
    like = value(row)
    return rewrite.add(aten.add.Tensor, (rewrite.add(aten.mul.Tensor, (row, width), like.shape, like), column), like.shape, like)


@rule(aten.max_pool2d_with_indices_backward.default)
def _max_pool_backward(rewrite: PaddingRewrite, node: Node) -> Extents:
    grad, images, *rest, indices = node.args
    assert isinstance(grad, Node)
    assert isinstance(images, Node)
    assert isinstance(indices, Node)
    rewrite.require_exact(*rest)
    spatial_dims = _image_dims(rewrite, images, (4,))
    outer_extents = broadcast([rewrite.extents_of(tensor)[:2] for tensor in (grad, images, indices)])
    for index, tensor in ((0, grad), (len(node.args) - 1, indices)):
        _image_dims(rewrite, tensor, (4,))
        node.update_arg(index, rewrite.masked(tensor, [0, 1, *spatial_dims], 0, (*outer_extents, *rewrite.extents_of(tensor)[2:])))
    if _is_width_padded(rewrite, images):
        width = rewrite.true_product([size_of(value(images).shape[-1])], value(indices))
        row, column = _row_and_column(rewrite, node.args[-1], width)
        node.update_arg(len(node.args) - 1, _position(rewrite, row, rewrite.rounded_size(images, -1), column))
    return (*outer_extents, *rewrite.prefixes(value(node))[2:])


def _require_whole_windows(
    rewrite: PaddingRewrite, images: Node, padding: Any, ceil_mode: bool, count_include_pad: bool, divisor: Any
) -> None:
    """Raises NoPaddingRule if the number of averaged elements of a window may depend on the true size of the image."""
    if divisor is not None or not any(rewrite.is_padded(extent) for extent in rewrite.extents_of(images)[2:]):
        return
    if ceil_mode or (not count_include_pad and any(padding)):
        raise NoPaddingRule("an average is over windows that cross the end of a padded dimension")


@rule(aten.avg_pool2d.default)
def _mean_pool(rewrite: PaddingRewrite, node: Node) -> Any:
    images, kernel, stride, padding, ceil_mode, count_include_pad, divisor = arguments_except(node)
    rewrite.require_exact(kernel, stride, padding)
    dims = _image_dims(rewrite, images, (4,))
    _require_whole_windows(rewrite, images, padding, ceil_mode, count_include_pad, divisor)
    node.update_arg(0, rewrite.masked(images, dims, 0))
    return _result(rewrite, node, *rewrite.extents_of(images)[:2])


@rule(aten.avg_pool2d_backward.default)
def _mean_pool_backward(rewrite: PaddingRewrite, node: Node) -> Extents:
    grad, images, kernel, stride, padding, ceil_mode, count_include_pad, divisor = arguments_except(node)
    rewrite.require_exact(kernel, stride, padding)
    dims = _image_dims(rewrite, images, (4,))
    _image_dims(rewrite, grad, (4,))
    _require_whole_windows(rewrite, images, padding, ceil_mode, count_include_pad, divisor)
    node.update_arg(0, rewrite.masked(grad, dims, 0))
    outer_extents = broadcast([rewrite.extents_of(grad)[:2], rewrite.extents_of(images)[:2]])
    return (*outer_extents, *rewrite.prefixes(value(node))[2:])


@rule(aten._adaptive_avg_pool2d.default)
def _adaptive_pool(rewrite: PaddingRewrite, node: Node) -> Any:
    """Accepts only images of exact sizes, since the windows depend on the size."""
    images, size = node.args
    rewrite.require_exact(size)
    rewrite.require_unpadded(images, _image_dims(rewrite, images, (4,)))
    return _result(rewrite, node, *rewrite.extents_of(images)[:2])


_REFLECTION = (aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
_REPLICATION = (aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)
_REFLECTION_BACKWARD = tuple(getattr(aten, f"reflection_pad{count}d_backward").default for count in (1, 2, 3))
_REPLICATION_BACKWARD = tuple(getattr(aten, f"replication_pad{count}d_backward").default for count in (1, 2, 3))


def _added_widths(
    rewrite: PaddingRewrite, x: Node, padding: Sequence[int]
) -> tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]], list[int]]:
    """Splits the argument `padding` of an op that pads x.

    Returns: the widths added before and after each padded dimension; the same for rounded dimensions only; and the argument with zeros for
        the rounded dimensions.

    Raises: NoPaddingRule.
    """
    rewrite.require_exact(padding)
    rank = value(x).dim()
    added = {rank - 1 - index: (padding[2 * index], padding[2 * index + 1]) for index in range(len(padding) // 2)}
    added = {dim: widths for dim, widths in added.items() if widths != (0, 0)}
    rounded = {dim: widths for dim, widths in added.items() if rewrite.is_padded(rewrite.extents_of(x)[dim])}
    rewrite.require_constant(rounded)
    for dim in rounded:
        require_single_prefix(rewrite, x, [dim])
    rest = [0 if rank - 1 - index // 2 in rounded else width for index, width in enumerate(padding)]
    return added, rounded, rest


@rule(*_REFLECTION, *_REPLICATION)
def _pad_reflect_or_replicate(rewrite: PaddingRewrite, node: Node) -> Extents:
    """Replaces the op in rounded dimensions by one that reflects or repeats the elements before a dimension's true end."""
    x, padding = node.args
    assert isinstance(x, Node)
    extents, result = rewrite.extents_of(x), rewrite.prefixes(value(node))
    added, rounded, rest = _added_widths(rewrite, x, padding)
    shape = [*value(x).shape]
    for dim, widths in rounded.items():
        place = rewrite.true_size_index(size_of(shape[dim]))
        shape[dim] = shape[dim] + sum(widths)
        x = rewrite.add(
            reflect_or_replicate, (x, rewrite.true_sizes, dim, place, widths[0], node.target in _REFLECTION), shape, value(node)
        )
    node.args = (x, rest)
    return tuple(result[dim] if dim in added else extent for dim, extent in enumerate(extents))


@rule(*_REFLECTION_BACKWARD, *_REPLICATION_BACKWARD)
def _pad_reflect_or_replicate_backward(rewrite: PaddingRewrite, node: Node) -> Extents:
    grad, x, padding = node.args
    assert isinstance(grad, Node)
    assert isinstance(x, Node)
    extents, result = rewrite.extents_of(grad), rewrite.prefixes(value(node))
    added, rounded, rest = _added_widths(rewrite, x, padding)
    shape = [*value(grad).shape]
    for dim in rounded:
        require_single_prefix(rewrite, grad, [dim])
    for dim, widths in rounded.items():
        size = value(x).shape[dim]
        shape[dim] = size
        arguments = rewrite.true_sizes, dim, rewrite.true_size_index(size_of(size)), widths[0], node.target in _REFLECTION_BACKWARD
        grad = rewrite.add(reflect_or_replicate_backward, (rewrite.masked(grad, [dim], 0, extents), *arguments), shape, value(node))
    node.args = (grad, x, rest)
    return tuple(result[dim] if dim in added else extent for dim, extent in enumerate(extents))


@rule(aten.unfold.default)
def _unfold(rewrite: PaddingRewrite, node: Node) -> Extents:
    source, dim, size, step = node.args
    assert isinstance(source, Node)
    rewrite.require_exact(size, step)
    extents = rewrite.extents_of(source)
    if not extents:
        return (Extent.of(size),)
    dim = wrap(dim, len(extents))
    require_single_prefix(rewrite, source, [dim])
    return (*with_extent(extents, dim, Extent.of(size_of(value(node).shape[dim]))), Extent.of(size))


@rule(aten.unfold_backward.default)
def _unfold_backward(rewrite: PaddingRewrite, node: Node) -> Extents:
    """Sets the gradients of padding windows to zero, since these windows overlap valid positions."""
    grad, _, dim, size, step = node.args
    assert isinstance(grad, Node)
    rewrite.require_exact(dim, size, step)
    extents, result = rewrite.extents_of(grad), rewrite.prefixes(value(node))
    if not result:
        return ()
    dim = wrap(dim, len(result))
    require_single_prefix(rewrite, grad, [dim])
    rewrite.require_unpadded(grad, [len(extents) - 1])
    node.update_arg(0, rewrite.masked(grad, [dim], 0))
    # A gradient of size 1 applies to all positions: it is broadcast over the result.
    spread = rewrite.prefixes(value(node), uniform=True)
    outer_extents = tuple(own if own.factors else new for own, new in zip(extents[:-1], spread, strict=True))
    return with_extent(outer_extents, dim, result[dim])


@rule(aten.as_strided.default, aten.as_strided_copy.default)
def _as_strided(rewrite: PaddingRewrite, node: Node) -> Extents:
    """Rewrites `as_strided` as a permutation and broadcast of the source's dimensions, with windows over at most one of them.

    `rewrite_as_strided` handles slices of the source's dimensions.
    """
    source = node.args[0]
    assert isinstance(source, Node)
    x, result = rewrite.original_inputs.get(source, value(source)), value(node)
    size, stride = ([size_of(number_of(item)) for item in node.args[index]] for index in (1, 2))
    repeats = any(step == 0 and count != 1 for count, step in zip(size, stride, strict=True))
    if not repeats and sum(count != 1 for count in size) <= sum(count != 1 for count in sizes_of(x)):
        return rewrite_as_strided(rewrite, node)
    offset = argument(node, "storage_offset")
    if offset is not None and size_of(number_of(offset)) != size_of(x.storage_offset()):
        raise NoPaddingRule("as_strided starts at another storage offset than its operand")
    steps = [size_of(step) for step in x.stride()]
    source_dims = [dim for dim, count in enumerate(sizes_of(x)) if count != 1 and steps[dim] != 0]
    broadcast_dims = [dim for dim, (count, step) in enumerate(zip(size, stride, strict=True)) if count == 1 or step == 0]
    unmatched = [dim for dim in range(len(size)) if dim not in broadcast_dims]
    order: dict[int, int] = {}  # from the result's dimensions to the dimensions of `view`
    extents = list(rewrite.prefixes(result, uniform=True))
    windowed = []
    for dim in source_dims:
        matching = [item for item in unmatched if (size[item], stride[item]) == (sizes_of(x)[dim], steps[dim])]
        if matching:
            order[matching[0]] = dim
            extents[matching[0]] = rewrite.extents_of(source)[dim]
            unmatched.remove(matching[0])
        else:
            windowed.append(dim)
    if len(windowed) > 1 or len(unmatched) != 2 * len(windowed):
        raise NoPaddingRule("as_strided is neither a permutation nor windows of a dimension")
    view = source
    if windowed:
        (dim,), (outer, inner) = windowed, sorted(unmatched, key=lambda item: stride[item] == steps[dim])
        window_step, window_size = quotient(stride[outer], steps[dim]), size[inner]
        if not isinstance(window_step, int) or not isinstance(window_size, int) or stride[inner] != steps[dim]:
            raise NoPaddingRule("as_strided is neither a permutation nor windows of a dimension")
        require_single_prefix(rewrite, source, [dim])
        shape = [*x.shape[:dim], result.shape[outer], *x.shape[dim + 1 :], window_size]
        if size_of(x.unfold(dim, window_size, window_step).shape[dim]) != size[outer]:
            raise NoPaddingRule("the number of its windows does not fit the size of the padded dimension")
        view = rewrite.add(aten.unfold.default, (source, dim, window_size, window_step), shape, result)
        order |= {outer: dim, inner: x.dim()}
        extents[outer], extents[inner] = Extent.of(size[outer]), Extent.of(window_size)
    kept = sorted(order.values())
    for dim in reversed([dim for dim in range(x.dim()) if dim not in kept]):
        shape = [*value(view).shape[:dim], *value(view).shape[dim + 1 :]]
        view = rewrite.add(aten.select.int, (view, dim, 0), shape, result)
    shape = [result.shape[dim] for dim in sorted(order)]
    view = rewrite.add(aten.permute.default, (view, [kept.index(order[dim]) for dim in sorted(order)]), shape, result)
    for dim in broadcast_dims:
        shape.insert(dim, 1)
        view = rewrite.add(aten.unsqueeze.default, (view, dim), shape, result)
    node.target, node.args, node.kwargs = aten.expand.default, (view, node.args[1]), {}
    return tuple(extents)


@rule(aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default)
def _transform(rewrite: PaddingRewrite, node: Node) -> Extents:
    """The transformed dimensions must not have rounded sizes."""
    x, dims, *rest = node.args
    assert isinstance(x, Node)
    rewrite.require_exact(dims, rest)
    extents, result = rewrite.extents_of(x), rewrite.prefixes(value(node))
    changed = {wrap(dim, len(extents)) for dim in dims}
    rewrite.require_unpadded(x, changed)
    return tuple(result[dim] if dim in changed else extent for dim, extent in enumerate(extents))


@rule(aten.view_as_real.default)
def _as_real(rewrite: PaddingRewrite, node: Node) -> Extents:
    return (*rewrite.extents_of(node.args[0]), Extent.of(2))


@rule(aten.view_as_complex.default)
def _as_complex(rewrite: PaddingRewrite, node: Node) -> Extents:
    return rewrite.extents_of(node.args[0])[:-1]
