"""Padding rules (see `padded_rules.py`) for convolutions, pooling and other windows over images, audio or sequences of rounded sizes.

Beyond the true end, a window reads the same as beyond the edge of an image: zeros, or the neutral element. The number of windows grows with
the size, so the valid windows are a prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ...lowering.dimensions import wrap
from ...lowering.ops.masking import reflect_or_replicate, reflect_or_replicate_backward
from ...torch_ops import aten
from .masks import Masks
from .padded_order import by_strides
from .padded_rules import argument, become_several, lowest, one_dimension, rule, static, value
from .valid_sizes import Extent, Extents, NoPaddingRule, broadcast, joined, quotient, replaced, size_of, sizes_of


def _prefixes(masks: Masks, tensor: Node, first: int) -> list[int]:
    """Returns the spatial dimensions of a tensor, from `first` on. Raises: NoPaddingRule if a rounded one is not one prefix."""
    extents = masks.of(tensor)
    places = range(first, len(extents))
    for dim in places:
        if masks.is_padded(extents[dim]) and extents[dim].resolved != Extent.of(size_of(value(tensor).shape[dim])):
            raise NoPaddingRule("its windows are over a flattened dimension")
    return list(places)


def _images(masks: Masks, images: Any) -> list[int]:
    """Returns the spatial dimensions of a batch of images with channels. Raises: NoPaddingRule."""
    if not 3 <= value(images).dim() <= 5:
        raise NoPaddingRule("its input has no batch dimension")
    return _prefixes(masks, images, 2)


def _result(masks: Masks, node: Node, *around: Extent) -> Any:
    """Returns the extents of a node's results. around: the extents of the batch and, if the op keeps the channels, of the channels."""
    several = node.meta["val"]
    found = [(*around, *masks.prefixes(item)[len(around) :]) for item in (several if isinstance(several, (tuple, list)) else [several])]
    return found if isinstance(several, (tuple, list)) else found[0]


@rule(aten.convolution.default)
def _convolution(masks: Masks, node: Node) -> Any:
    images, weight, *rest = node.args
    assert isinstance(images, Node)
    if value(images).dim() != value(weight).dim():
        raise NoPaddingRule("a convolution has no batch dimension")
    masks.exact(*rest)
    masks.unpadded(images, [1])
    static(masks, [weight, *rest])
    node.update_arg(0, masks.masked(images, _images(masks, images), 0))
    return _result(masks, node, masks.of(images)[0])


@rule(aten.convolution_backward.default)
def _convolution_backward(masks: Masks, node: Node) -> list[Extents]:
    """Masks batch and spatial dimensions, since the gradients of weights are sums over them."""
    grad, images, *rest = node.args
    assert isinstance(grad, Node)
    assert isinstance(images, Node)
    masks.exact(*rest)
    static(masks, rest)
    batch = joined([masks.of(grad)[0], masks.of(images)[0]])
    for index, tensor in enumerate((grad, images)):
        dims = [0, *_images(masks, tensor)]
        masks.unpadded(tensor, [1])
        node.update_arg(index, masks.masked(tensor, dims, 0, replaced(masks.of(tensor), 0, batch)))
    results = [masks.prefixes(item) if isinstance(item, torch.Tensor) else () for item in node.meta["val"]]
    return [replaced(results[0], 0, batch) if results[0] else (), *results[1:]]


@rule(aten.max_pool2d_with_indices.default)
def _max_pool(masks: Masks, node: Node) -> Any:
    images, *rest = node.args
    assert isinstance(images, Node)
    masks.exact(*rest, *node.kwargs.values())
    dims = _images(masks, images)
    node.update_arg(0, masks.masked(images, dims, lowest(value(images).dtype)))
    if _is_width_padded(masks, images) and any(user.args[1] == 1 for user in node.users):
        out, positions = masks.again(node)
        row, column = _row_and_column(masks, positions, masks.number(images, -1))
        become_several(node, [out, _position(masks, row, masks.product([size_of(value(images).shape[-1])], value(row)), column)])
    return _result(masks, node, *masks.of(images)[:2])


# Indices of max pooling are linear positions in an image, which depend on the width: the true width is smaller than the rounded one


def _is_width_padded(masks: Masks, images: Node) -> bool:
    height = value(images).shape[-2]
    return masks.is_padded(masks.of(images)[-1]) and not (isinstance(height, int) and height == 1)


def _row_and_column(masks: Masks, position: Node, width: Any) -> tuple[Node, ...]:
    """Splits linear positions into rows and columns. width: a number of the graph, or a tensor of rank 0."""
    like = value(position)
    is_tensor = isinstance(width, Node) and isinstance(value(width), torch.Tensor)
    divide, remainder = (
        (aten.floor_divide.default, aten.remainder.Tensor) if is_tensor else (aten.floor_divide.Scalar, aten.remainder.Scalar)
    )
    return tuple(masks.add(op, (position, width), like.shape, like) for op in (divide, remainder))


def _position(masks: Masks, row: Node, width: Any, column: Node) -> Node:
    """Returns the linear positions of rows and columns. width: as in `_row_and_column`."""
    like = value(row)
    return masks.add(aten.add.Tensor, (masks.add(aten.mul.Tensor, (row, width), like.shape, like), column), like.shape, like)


@rule(aten.max_pool2d_with_indices_backward.default)
def _max_pool_backward(masks: Masks, node: Node) -> Extents:
    grad, images, *rest, indices = node.args
    assert isinstance(grad, Node)
    assert isinstance(images, Node)
    assert isinstance(indices, Node)
    masks.exact(*rest)
    places = _images(masks, images)
    around = broadcast([masks.of(tensor)[:2] for tensor in (grad, images, indices)])
    for index, tensor in ((0, grad), (len(node.args) - 1, indices)):
        _images(masks, tensor)
        node.update_arg(index, masks.masked(tensor, [0, 1, *places], 0, (*around, *masks.of(tensor)[2:])))
    if _is_width_padded(masks, images):
        width = masks.product([size_of(value(images).shape[-1])], value(indices))
        row, column = _row_and_column(masks, node.args[-1], width)
        node.update_arg(len(node.args) - 1, _position(masks, row, masks.number(images, -1), column))
    return (*around, *masks.prefixes(value(node))[2:])


def _mean_of_whole_windows(masks: Masks, images: Node, padding: Any, ceil_mode: bool, count_include_pad: bool, divisor: Any) -> None:
    """Raises NoPaddingRule if the number of elements in a window depends on where the image ends."""
    if divisor is not None or not any(masks.is_padded(extent) for extent in masks.of(images)[2:]):
        return
    if ceil_mode or (not count_include_pad and any(padding)):
        raise NoPaddingRule("an average is over windows that cross the end of a padded dimension")


@rule(aten.avg_pool2d.default)
def _mean_pool(masks: Masks, node: Node) -> Any:
    images, kernel, stride, padding, ceil_mode, count_include_pad, divisor = _filled(node)
    masks.exact(kernel, stride, padding)
    dims = _images(masks, images)
    _mean_of_whole_windows(masks, images, padding, ceil_mode, count_include_pad, divisor)
    node.update_arg(0, masks.masked(images, dims, 0))
    return _result(masks, node, *masks.of(images)[:2])


@rule(aten.avg_pool2d_backward.default)
def _mean_pool_backward(masks: Masks, node: Node) -> Extents:
    grad, images, kernel, stride, padding, ceil_mode, count_include_pad, divisor = _filled(node)
    masks.exact(kernel, stride, padding)
    dims = _images(masks, images)
    _images(masks, grad)
    _mean_of_whole_windows(masks, images, padding, ceil_mode, count_include_pad, divisor)
    node.update_arg(0, masks.masked(grad, dims, 0))
    around = broadcast([masks.of(grad)[:2], masks.of(images)[:2]])
    return (*around, *masks.prefixes(value(node))[2:])


@rule(aten._adaptive_avg_pool2d.default)
def _adaptive_pool(masks: Masks, node: Node) -> Any:
    """Takes images of exact sizes only, since the windows depend on the size."""
    images, size = node.args
    masks.exact(size)
    masks.unpadded(images, _images(masks, images))
    return _result(masks, node, *masks.of(images)[:2])


_MIRRORED = (aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
_REPEATED = (aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)
_MIRRORED_BACKWARD = tuple(getattr(aten, f"reflection_pad{count}d_backward").default for count in (1, 2, 3))
_REPEATED_BACKWARD = tuple(getattr(aten, f"replication_pad{count}d_backward").default for count in (1, 2, 3))


def _ends(masks: Masks, x: Node, padding: Sequence[int]) -> tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]], list[int]]:
    """Returns the widths added before and after each dimension, the same for rounded dimensions only, and the padding without the latter.

    Raises: NoPaddingRule.
    """
    masks.exact(padding)
    rank = value(x).dim()
    added = {rank - 1 - index: (padding[2 * index], padding[2 * index + 1]) for index in range(len(padding) // 2)}
    added = {dim: widths for dim, widths in added.items() if widths != (0, 0)}
    rounded = {dim: widths for dim, widths in added.items() if masks.is_padded(masks.of(x)[dim])}
    masks.fixed(rounded)
    for dim in rounded:
        one_dimension(masks, x, [dim])
    rest = [0 if rank - 1 - index // 2 in rounded else width for index, width in enumerate(padding)]
    return added, rounded, rest


@rule(*_MIRRORED, *_REPEATED)
def _continue(masks: Masks, node: Node) -> Extents:
    """Continues a rounded dimension beyond its true end with the elements in front of that end, mirrored or repeated."""
    x, padding = node.args
    assert isinstance(x, Node)
    extents, result = masks.of(x), masks.prefixes(value(node))
    added, rounded, rest = _ends(masks, x, padding)
    shape = [*value(x).shape]
    for dim, widths in rounded.items():
        place = masks.place(size_of(shape[dim]))
        shape[dim] = shape[dim] + sum(widths)
        x = masks.add(reflect_or_replicate, (x, masks.lengths, dim, place, widths[0], node.target in _MIRRORED), shape, value(node))
    node.args = (x, rest)
    return tuple(result[dim] if dim in added else extent for dim, extent in enumerate(extents))


@rule(*_MIRRORED_BACKWARD, *_REPEATED_BACKWARD)
def _continue_backward(masks: Masks, node: Node) -> Extents:
    grad, x, padding = node.args
    assert isinstance(grad, Node)
    assert isinstance(x, Node)
    extents, result = masks.of(grad), masks.prefixes(value(node))
    added, rounded, rest = _ends(masks, x, padding)
    shape = [*value(grad).shape]
    for dim in rounded:
        one_dimension(masks, grad, [dim])
    for dim, widths in rounded.items():
        size = value(x).shape[dim]
        shape[dim] = size
        arguments = masks.lengths, dim, masks.place(size_of(size)), widths[0], node.target in _MIRRORED_BACKWARD
        grad = masks.add(reflect_or_replicate_backward, (masks.masked(grad, [dim], 0, extents), *arguments), shape, value(node))
    node.args = (grad, x, rest)
    return tuple(result[dim] if dim in added else extent for dim, extent in enumerate(extents))


@rule(aten.unfold.default)
def _windows(masks: Masks, node: Node) -> Extents:
    source, dim, size, step = node.args
    assert isinstance(source, Node)
    masks.exact(size, step)
    extents = masks.of(source)
    if not extents:
        return (Extent.of(size),)
    dim = wrap(dim, len(extents))
    one_dimension(masks, source, [dim])
    return (*replaced(extents, dim, Extent.of(size_of(value(node).shape[dim]))), Extent.of(size))


@rule(aten.unfold_backward.default)
def _windows_backward(masks: Masks, node: Node) -> Extents:
    """Sets the gradients of padding windows to zero, since these windows overlap valid positions."""
    grad, _, dim, size, step = node.args
    assert isinstance(grad, Node)
    masks.exact(dim, size, step)
    extents, result = masks.of(grad), masks.prefixes(value(node))
    if not result:
        return ()
    dim = wrap(dim, len(result))
    one_dimension(masks, grad, [dim])
    masks.unpadded(grad, [len(extents) - 1])
    node.update_arg(0, masks.masked(grad, [dim], 0))
    # A gradient of size 1 applies to all positions: it is broadcast over the result.
    spread = masks.prefixes(value(node), uniform=True)
    around = tuple(own if own.factors else new for own, new in zip(extents[:-1], spread, strict=True))
    return replaced(around, dim, result[dim])


@rule(aten.as_strided.default, aten.as_strided_copy.default)
def _as_strided(masks: Masks, node: Node) -> Extents:
    """Rewrites `as_strided` as a permutation, broadcast and windows of the source's dimensions. `by_strides` handles slices of them."""
    source = node.args[0]
    assert isinstance(source, Node)
    x, result = masks.given.get(source, value(source)), value(node)
    size, stride = ([size_of(_number(item)) for item in node.args[index]] for index in (1, 2))
    repeats = any(step == 0 and count != 1 for count, step in zip(size, stride, strict=True))
    if not repeats and sum(count != 1 for count in size) <= sum(count != 1 for count in sizes_of(x)):
        return by_strides(masks, node)
    offset = argument(node, "storage_offset")
    if offset is not None and size_of(_number(offset)) != size_of(x.storage_offset()):
        raise NoPaddingRule("as_strided starts at another storage offset than its operand")
    steps = [size_of(step) for step in x.stride()]
    own = [dim for dim, count in enumerate(sizes_of(x)) if count != 1 and steps[dim] != 0]
    new = [dim for dim, (count, step) in enumerate(zip(size, stride, strict=True)) if count == 1 or step == 0]
    left = [dim for dim in range(len(size)) if dim not in new]
    order: dict[int, int] = {}  # from the result's dimensions to those of `made`
    extents = list(masks.prefixes(result, uniform=True))
    windows = []
    for dim in own:
        same = [item for item in left if (size[item], stride[item]) == (sizes_of(x)[dim], steps[dim])]
        if same:
            order[same[0]] = dim
            extents[same[0]] = masks.of(source)[dim]
            left.remove(same[0])
        else:
            windows.append(dim)
    if len(windows) > 1 or len(left) != 2 * len(windows):
        raise NoPaddingRule("as_strided is neither a permutation nor windows of a dimension")
    made = source
    if windows:
        (dim,), (outer, inner) = windows, sorted(left, key=lambda item: stride[item] == steps[dim])
        hop, count = quotient(stride[outer], steps[dim]), size[inner]
        if not isinstance(hop, int) or not isinstance(count, int) or stride[inner] != steps[dim]:
            raise NoPaddingRule("as_strided is neither a permutation nor windows of a dimension")
        one_dimension(masks, source, [dim])
        shape = [*x.shape[:dim], result.shape[outer], *x.shape[dim + 1 :], count]
        if size_of(x.unfold(dim, count, hop).shape[dim]) != size[outer]:
            raise NoPaddingRule("its windows end at another place than the padded dimension")
        made = masks.add(aten.unfold.default, (source, dim, count, hop), shape, result)
        order |= {outer: dim, inner: x.dim()}
        extents[outer], extents[inner] = Extent.of(size[outer]), Extent.of(count)
    kept = sorted(order.values())
    for dim in reversed([dim for dim in range(x.dim()) if dim not in kept]):
        shape = [*value(made).shape[:dim], *value(made).shape[dim + 1 :]]
        made = masks.add(aten.select.int, (made, dim, 0), shape, result)
    shape = [result.shape[dim] for dim in sorted(order)]
    made = masks.add(aten.permute.default, (made, [kept.index(order[dim]) for dim in sorted(order)]), shape, result)
    for dim in new:
        shape.insert(dim, 1)
        made = masks.add(aten.unsqueeze.default, (made, dim), shape, result)
    node.target, node.args, node.kwargs = aten.expand.default, (made, node.args[1]), {}
    return tuple(extents)


@rule(aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default)
def _transform(masks: Masks, node: Node) -> Extents:
    """Requires that no transformed dimension has a rounded size."""
    x, dims, *rest = node.args
    assert isinstance(x, Node)
    masks.exact(dims, rest)
    extents, result = masks.of(x), masks.prefixes(value(node))
    changed = {wrap(dim, len(extents)) for dim in dims}
    masks.unpadded(x, changed)
    return tuple(result[dim] if dim in changed else extent for dim, extent in enumerate(extents))


@rule(aten.view_as_real.default)
def _as_real(masks: Masks, node: Node) -> Extents:
    return (*masks.of(node.args[0]), Extent.of(2))


@rule(aten.view_as_complex.default)
def _as_complex(masks: Masks, node: Node) -> Extents:
    return masks.of(node.args[0])[:-1]


def _number(item: Any) -> Any:
    return item.meta["val"] if isinstance(item, Node) else item


def _filled(node: Node) -> list[Any]:
    """Returns all arguments of a node, with defaults for those that are not given."""
    items = node.target._schema.arguments
    return [
        node.args[index] if index < len(node.args) else node.kwargs.get(item.name, item.default_value) for index, item in enumerate(items)
    ]
